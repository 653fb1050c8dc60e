"""`generate` and `chat`: where prompts come from, what is written where."""

import io
import signal
from pathlib import Path

import pytest

from graphengine.cli.answer import Answer
from graphengine.cli.chat import Conversation
from graphengine.cli.options import EngineOptions
from graphengine.config import EngineConfig
from graphengine.engine import Engine
from graphengine.outputs import RequestOutput
from graphengine.sampling.params import SamplingParams
from tests.graphengine.cli.conftest import SMALL, Cli
from tests.tiny import make_checkpoint

TOKENS = ["--max-tokens", "12"]


@pytest.fixture(scope="module")
def config() -> EngineConfig:
    return EngineOptions(max_num_seqs=1, max_model_len=256).config()


@pytest.fixture(scope="module")
def expected(checkpoint: Path, config: EngineConfig) -> str:
    """The answer to "hello" in the chat template, decoded at once."""
    engine = Engine(checkpoint, config)
    assert engine.tokenizer is not None
    engine.add_request(
        "a",
        engine.tokenizer.apply_chat_template([{"role": "user", "content": "hello"}]),
        SamplingParams(max_tokens=12),
    )
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    text = engine.tokenizer.decode(outputs[-1].outputs[0].token_ids)
    engine.close()
    return text


def _with_newline(text: str) -> str:
    return text if text.endswith("\n") else text + "\n"


def test_every_source_gives_the_same_answer(
    cli: Cli, checkpoint: Path, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against prompts with a stray line break, and text lost or repeated in streaming."""
    argument = cli("generate", checkpoint, "hello", *TOKENS, *SMALL)
    assert argument.out == _with_newline(expected)
    assert argument.code == 0
    file = tmp_path / "prompt.txt"
    file.write_text("hello\n")
    assert cli("generate", checkpoint, "--file", file, *TOKENS, *SMALL).out == argument.out
    for dash in ([], ["-"]):
        monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
        assert cli("generate", checkpoint, *dash, *TOKENS, *SMALL).out == argument.out


def test_sampling_flags_reach_the_sampler(cli: Cli, checkpoint: Path, expected: str) -> None:
    """Guards a flag that is read and not used, and a seed that speculation changes."""

    def answer(*flags: str) -> str:
        return cli("generate", checkpoint, "hello", *flags, *TOKENS, *SMALL).out

    sampled = ("--temperature", "1", "--seed", "3")
    first = answer(*sampled)
    assert first == answer(*sampled, "--speculate", "ngram:2")
    assert len({first, _with_newline(expected), answer("--temperature", "1", "--seed", "4")}) == 3
    assert answer("--temperature", "1", "--top-k", "1") == _with_newline(expected)
    for flag, value in (("top-p", "1e-9"), ("min-p", "1")):
        assert answer("--temperature", "1", f"--{flag}", value) == _with_newline(expected)
    for name, value in (("repetition", "0.01"), ("frequency", "-2"), ("presence", "-2")):
        assert answer(f"--{name}-penalty", value) != _with_newline(expected)


@pytest.mark.parametrize(
    ("flag", "value"), [("temperature", "-1"), ("top-p", "0"), ("top-k", "-2"), ("seed", "-1")]
)
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_sampling_flags_are_checked(
    cli: Cli, checkpoint: Path, command: str, flag: str, value: str
) -> None:
    """Guards a traceback, or a start of seconds before the refusal."""
    prompt = ["hello"] if command == "generate" else []
    result = cli(command, checkpoint, *prompt, f"--{flag}", value, *SMALL)
    assert result.code == 2
    assert f"SamplingParams.{flag.replace('-', '_')}={value}" in result.err


def test_stdout_is_plain_text_alone(cli: Cli, checkpoint: Path, expected: str) -> None:
    """Guards against progress, figures or colours in a pipe; all of it must be on stderr."""
    result = cli(
        "generate", checkpoint, "hello", "--show-drafts", "--speculate", "ngram:2", *TOKENS, *SMALL
    )
    assert result.out == _with_newline(expected)
    lines = result.err.splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == ["loading weights", "capturing cells"]
    assert "colours" in lines[2]
    assert lines[3].startswith("12 tokens (length), prompt ")
    assert len(lines) == 4
    assert "\x1b" not in result.err


def test_raw_prompts_skip_the_template(cli: Cli, checkpoint: Path) -> None:
    """Guards against a template around text that is to be continued."""
    raw = cli("generate", checkpoint, "hello", "--raw", *TOKENS, *SMALL).err
    chat = cli("generate", checkpoint, "hello", "--chat", *TOKENS, *SMALL).err
    assert "prompt 6," in raw  # <|bos|> and five bytes
    assert "prompt 6," not in chat


def test_no_stats(cli: Cli, checkpoint: Path) -> None:
    """Guards against a switch that does nothing."""
    result = cli("generate", checkpoint, "hello", "--no-stats", *TOKENS, *SMALL)
    assert "tokens (" not in result.err


def test_without_a_tokenizer(cli: Cli, tmp_path: Path) -> None:
    """Guards against a traceback for a checkpoint that only takes token ids."""
    bare = make_checkpoint(tmp_path / "bare", tokenizer=False)
    for name in ("generate", "chat"):
        arguments = [name, bare, *(["hello"] if name == "generate" else []), *SMALL]
        result = cli(*arguments)
        assert result.code == 2
        assert "no tokenizer" in result.err or "no chat template" in result.err


def test_ctrl_c_ends_an_answer_between_steps(checkpoint: Path, config: EngineConfig) -> None:
    """Guards against a step cut in half, a request left running, or Ctrl-C being ignored."""
    engine = Engine(checkpoint, config)
    step, steps = engine.step, [0]

    def interrupted_step() -> list[RequestOutput]:
        steps[0] += 1
        if steps[0] == 3:
            signal.raise_signal(signal.SIGINT)
        return step()

    engine.step = interrupted_step  # type: ignore[method-assign]
    answer = Answer(engine)
    output = answer.stream([5, 9, 200], SamplingParams(max_tokens=100, ignore_eos=True))
    assert answer.interrupted
    assert output.outputs[0].finish_reason == "abort"
    assert 1 <= len(output.outputs[0].token_ids) <= 3
    assert not engine.has_unfinished_requests()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    engine.step = step  # type: ignore[method-assign]
    again = Answer(engine).stream([5, 9, 200], SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(again.outputs[0].token_ids) == 4
    engine.close()


def test_chat_remembers_until_reset(
    cli: Cli, checkpoint: Path, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against lost turns, commands sent to the model, and lines read after /quit."""
    lines = "hello\n\n/what\nagain\n/reset\nhello\n/quit\nhello\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    result = cli("chat", checkpoint, *TOKENS, *SMALL)
    assert result.code == 0
    first = _with_newline(expected)
    assert result.out.startswith(first)
    assert result.out.endswith(first)
    figures = [line for line in result.err.splitlines() if "tokens (" in line]
    prompts = [int(line.split("prompt ")[1].split(",")[0]) for line in figures]
    assert len(prompts) == 3
    assert prompts[1] > prompts[0] == prompts[2]
    assert "unknown command /what" in result.err


def test_chat_ends_at_the_end_of_input(
    cli: Cli, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a traceback or an endless loop at the end of a pipe."""
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert cli("chat", checkpoint, *SMALL).code == 0


def test_a_refused_turn_changes_nothing(checkpoint: Path, config: EngineConfig) -> None:
    """Guards against a conversation that holds a message which was never answered."""
    engine = Engine(checkpoint, config)
    conversation = Conversation(
        engine, SamplingParams(max_tokens=4), system="be brief", colour_drafts=False
    )
    conversation.turn("hello")
    before = list(conversation.messages)
    with pytest.raises(ValueError, match="answer-"):
        conversation.turn("x" * 400)
    assert conversation.messages == before
    assert [message["role"] for message in before] == ["system", "user", "assistant"]
    engine.close()
