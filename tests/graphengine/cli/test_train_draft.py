"""`graphengine train-draft`: from a target and text to a checkpoint, and what it refuses."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors.torch import load_file

from graphengine.models.loader import open_model
from tests.graphengine.cli.conftest import Cli, Result
from tests.tiny import make_checkpoint

QUICK = ["--steps", 4, "--batch-tokens", 128, "--length", 64, "--held-out", 0.3, "--unroll", 2]
QUICK += ["--measure-every", 2, "--save-every", 2, "--precision", "float32"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for number in range(12):
        (folder / f"{number}.py").write_text(f"print({number})\n" * 8, encoding="utf-8")
    return folder


def num_pieces(result: Result) -> int:
    """To train on and held out."""
    return sum(map(int, re.findall(r": (\d+) pieces, ", result.err)))


@pytest.mark.parametrize(
    ("kind", "flags", "config"),
    [
        (
            "eagle3",
            ["--draft-vocab", 50, "--taps", "0,1,2", "--norm-output", "--no-fc-norm"],
            {"draft_vocab_size": 50, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
        ),
        (
            "eagle1",
            ["--intermediate", 32, "--kv-heads", 4],
            {"intermediate_size": 32, "num_key_value_heads": 4, "bias": False},
        ),
        ("mtp", ["--dtype", "float32"], {"num_nextn_predict_layers": 1, "torch_dtype": "float32"}),
        ("draft_model", ["--layers", 1, "--hidden", 32], {"hidden_size": 32}),
    ],
)
def test_every_kind_is_trained(
    cli: Cli,
    checkpoint: Path,
    text: Path,
    tmp_path: Path,
    kind: str,
    flags: list[Any],
    config: dict[str, Any],
) -> None:
    """Guards flags that do not reach what is trained, and a run that leaves half of its files."""
    out = tmp_path / "out"
    command = ["train-draft", checkpoint, "--kind", kind, "--out", out, "--text", text]
    result = cli(*command, *flags, *QUICK)
    assert result.code == 0, result.err
    said = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert {name: said[name] for name in config} == config
    if kind == "eagle3":
        assert (said["norm_output"], said["fc_norm"]) == (True, False)
    assert (out / "training.png").is_file()
    curves = (out / "training.csv").read_text(encoding="utf-8").splitlines()
    assert [line.split(",")[0] for line in curves] == ["step", "2", "4"]
    assert "draft 2" in result.out
    assert "training: 4 of 4 loss" in result.err
    before = load_file(out / "model.safetensors")
    again = cli(*command, *flags, *QUICK)  # nothing is left to do but to write it again
    assert again.code == 0, again.err
    assert "training:" not in again.err
    after = load_file(out / "model.safetensors")
    assert all(after[name].equal(tensor) for name, tensor in before.items())


def test_a_draft_model_has_the_targets_tokenizer(
    cli: Cli, checkpoint: Path, text: Path, tmp_path: Path
) -> None:
    """Guards a draft model that nothing can load."""
    result = cli(
        "train-draft", checkpoint, "--kind", "draft_model", "--out", tmp_path / "out", "--hidden",
        32, "--text", text, *QUICK,
    )  # fmt: skip
    assert result.code == 0, result.err
    ours, theirs = open_model(tmp_path / "out"), open_model(checkpoint)
    assert ours.config.vocab_size == theirs.config.vocab_size
    assert ours.config.eos_token_ids == theirs.config.eos_token_ids
    tokenizers = [opened.load_tokenizer() for opened in (ours, theirs)]
    sentence = "the cat <|im_end|> sat"
    first, second = (tokenizer.encode(sentence) for tokenizer in tokenizers if tokenizer)
    assert first == second
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_the_target_chats_with_itself(cli: Cli, checkpoint: Path, tmp_path: Path) -> None:
    """Guards --chats N that trains on other chats than it writes, writes them again, or trains on
    those of an earlier and larger N.
    """
    command = ["train-draft", checkpoint, "--out", tmp_path / "out", "--chats", 40, *QUICK]
    command += ["--length", 256]
    result = cli(*command)
    assert result.code == 0, result.err
    assert "chats: 40 of 40" in result.err
    work = tmp_path / "out" / "work"
    [file] = work.glob("chats-*.jsonl")
    before = file.read_bytes()
    assert cli(*command).code == 0
    assert file.read_bytes() == before
    kinds = {line.split(",")[3] for line in (tmp_path / "out" / "training.csv").open()}
    assert kinds == {"kind", "chat"}
    command = [
        "train-draft",
        checkpoint,
        "--kind",
        "mtp",
        "--out",
        tmp_path / "mtp",
        "--work",
        work,
    ]
    fewer = cli(*command, "--chats", 30, *QUICK, "--length", 256)
    assert fewer.code == 0, fewer.err
    assert file.read_bytes() == before
    assert 0 < num_pieces(fewer) < num_pieces(result)


def test_the_target_answers_questions(cli: Cli, checkpoint: Path, tmp_path: Path) -> None:
    """Guards answers to other questions, or answers that are generated again."""
    questions = [f"What is {number}?" for number in range(40)]
    file = tmp_path / "questions.txt"
    file.write_text("\n\n".join(questions) + "\n", encoding="utf-8")
    command = ["train-draft", checkpoint, "--out", tmp_path / "out", "--questions", file, *QUICK]
    command += ["--length", 256]
    result = cli(*command)
    assert result.code == 0, result.err
    assert "answers: 40 of 40" in result.err
    work = tmp_path / "out" / "work"
    [answers] = work.glob("answers-*.jsonl")
    before = answers.read_text(encoding="utf-8")
    assert [json.loads(line)["user"] for line in before.splitlines()] == questions
    assert cli(*command).code == 0
    assert answers.read_text(encoding="utf-8") == before


def test_targets_that_share_a_folder_answer_for_themselves(
    cli: Cli, checkpoint: Path, tmp_path: Path
) -> None:
    """Guards a draft that is trained on what another target has said."""
    other = make_checkpoint(tmp_path / "other", seed=1)
    file = tmp_path / "questions.txt"
    file.write_text("".join(f"What is {number}?\n" for number in range(12)), encoding="utf-8")
    for target, kind in ((checkpoint, "mtp"), (other, "eagle1")):
        out = tmp_path / kind
        command = ["train-draft", target, "--kind", kind, "--out", out, "--questions", file]
        result = cli(*command, "--work", tmp_path / "work", *QUICK, "--length", 256)
        assert result.code == 0, result.err
        assert "answers: 12 of 12" in result.err
    first, second = (file.read_bytes() for file in (tmp_path / "work").glob("answers-*.jsonl"))
    assert first != second


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "nothing to train on: give --text, --chats or --questions"),
        (["--chats", "0"], "--chats 0: expected a file, or a number from 1 on"),
        (["--chats", "gone.jsonl"], "chats 'gone.jsonl' does not exist"),
        (["--questions", "gone.txt"], "--questions gone.txt: no such file"),
        (["--questions", os.devnull], f"--questions {os.devnull}: "),
        (["--text", "gone"], "text 'gone' does not exist"),
        (["--kind", "medusa"], "kind='medusa': expected one of eagle3"),
        (["--taps", "a"], "--taps a: expected layers, such as 2,15,27"),
        (["--text", ".", "--taps", "3"], "taps=[3]: expected layers from 0 to 2"),
        (["--kind", "mtp", "--draft-vocab", 9], "draft_vocab=9: only kind eagle3 has it"),
        (["--steps", 0], "steps=0: expected at least 1"),
        (["--device", "tpu"], "--device tpu: expected auto, cpu or cuda"),
    ],
)
def test_what_is_refused(
    cli: Cli, checkpoint: Path, tmp_path: Path, flags: list[Any], message: str
) -> None:
    """Guards a mistake that is found an hour later, or that is not named."""
    result = cli("train-draft", checkpoint, "--out", tmp_path / "out", *flags)
    assert result.code == 2
    assert message in result.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--length", 513], "length=513: the target's limit is max_position_embeddings=512"),
        (["--kind", "draft_model", "--hidden", 20], "hidden=20: expected a multiple of the"),
        (["--kv-heads", 3], "kv_heads=3: expected a divisor of the 4 query heads"),
        (["--draft-vocab", 265], "draft_vocab=265: expected 2 to 264 tokens"),
        (["--taps", "2,1,0"], "taps=[2, 1, 0]: expected layers from 0 to 2, in ascending order"),
        (["--kind", "mtp", "--norm-output"], "norm_output=True: only kind eagle3 has it"),
    ],
)
def test_what_the_target_does_not_allow_is_refused_first(
    cli: Cli, checkpoint: Path, tmp_path: Path, flags: list[Any], message: str
) -> None:
    """Guards hours of chats, or of training, in front of a mistake that the command line shows."""
    result = cli("train-draft", checkpoint, "--out", tmp_path / "out", "--chats", 40, *flags)
    assert result.code == 2
    assert message in result.err
    assert "chats:" not in result.err
    assert not (tmp_path / "out").exists()


def test_chats_of_another_vocabulary_are_refused(
    cli: Cli, checkpoint: Path, tmp_path: Path
) -> None:
    """Guards a target that is run over ids that it does not have."""
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"prompt_ids": [1], "output_ids": [264]}\n', encoding="utf-8")
    result = cli("train-draft", checkpoint, "--out", tmp_path / "out", "--chats", chats)
    assert result.code == 2
    assert "line 1: 264 is no token id of the target; allowed: 0 to 263" in result.err


def test_a_target_without_a_tokenizer_is_refused(cli: Cli, text: Path, tmp_path: Path) -> None:
    """Guards a traceback where no text can be read."""
    target = make_checkpoint(tmp_path / "target", tokenizer=False)
    result = cli("train-draft", target, "--out", tmp_path / "out", "--text", text)
    assert result.code == 2
    assert "has no tokenizer" in result.err
