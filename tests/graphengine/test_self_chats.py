"""Chats of a model with itself: each a function of its index, through any interrupt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from graphengine import LLM, SamplingParams, self_chats
from graphengine.self_chats import user_prefix, write_answers, write_chats
from tests.tiny import CHAT_TEMPLATE, make_checkpoint, make_tokenizer

COUNT = 10


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = make_checkpoint(tmp_path_factory.mktemp("tiny"))
    with LLM(folder, max_num_seqs=4, max_model_len=512, numerics="fast") as llm:
        yield llm


@pytest.fixture(scope="module")
def written(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Lines of a run that was never stopped."""
    file = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    write_chats(llm, file, COUNT)
    return file.read_text(encoding="utf-8")


def test_a_line_is_what_its_seeds_give(llm: LLM, written: str) -> None:
    """Guards an answer to another prompt, another seed, and text without its template."""
    chats = [json.loads(line) for line in written.splitlines()]
    assert 2 <= len(chats) < COUNT  # a model of random weights does not end every turn
    before = user_prefix(llm.tokenizer)  # type: ignore[arg-type]
    for chat in chats:
        index = chat["index"]
        asking = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=96, seed=2 * index)
        turn = llm.generate([before], asking)[0].outputs[0]
        assert chat["user"] == turn.text.strip()
        assert chat["prompt_ids"] == llm.chat_prompt([{"role": "user", "content": chat["user"]}])
        temperature = 0.7 if index % 3 else 0.0
        answering = SamplingParams(temperature=temperature, max_tokens=320, seed=2 * index + 1)
        answer = llm.generate([chat["prompt_ids"]], answering)[0].outputs[0]
        assert chat["output_ids"] == list(answer.token_ids)
        assert chat["reason"] == answer.finish_reason


@pytest.mark.parametrize("cut", ["nothing", "half a line", "lines"])
def test_a_resumed_file_is_the_same(
    llm: LLM, written: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: str
) -> None:
    """Guards half a line, a chat twice, and chats that depend on what they are generated beside."""
    monkeypatch.setattr(self_chats, "GROUP", 3)
    file = tmp_path / "chats.jsonl"
    lines = written.splitlines(keepends=True)
    kept = {"nothing": "", "half a line": lines[0] + lines[1][:20], "lines": "".join(lines[:2])}
    file.write_text(kept[cut], encoding="utf-8")
    tried: list[int] = []
    write_chats(llm, file, COUNT, tried.append)
    assert file.read_text(encoding="utf-8") == written
    assert tried[-1] == COUNT
    write_chats(llm, file, COUNT, tried.append)  # nothing is missing but what makes no chat
    assert file.read_text(encoding="utf-8") == written


def test_an_answer_is_what_its_question_gives(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards an answer to another question, and answers that depend on where a run stopped."""
    monkeypatch.setattr(self_chats, "GROUP", 2)
    file = tmp_path / "answers.jsonl"
    questions = ["What is a cat?", "Where is the cat?", "Why?", "Why not?", "Who sat?"]
    write_answers(llm, file, questions[:3])
    write_answers(llm, file, questions)
    chats = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [chat["index"] for chat in chats] == list(range(5))
    for chat, question in zip(chats, questions, strict=True):
        assert chat["user"] == question
        prompt = llm.chat_prompt([{"role": "user", "content": question}])
        temperature = 0.7 if chat["index"] % 2 else 0.0
        how = SamplingParams(temperature=temperature, max_tokens=192, seed=2 * chat["index"] + 1)
        answer = llm.generate([prompt], how)[0].outputs[0]
        assert chat["prompt_ids"] == prompt
        assert chat["output_ids"] == list(answer.token_ids)


def test_answers_to_other_questions_are_refused(llm: LLM, tmp_path: Path) -> None:
    """Guards a changed file of questions whose first ones keep the answers to the old ones."""
    file = tmp_path / "answers.jsonl"
    questions = ["What is a cat?", "Where is the cat?", "Why?"]
    write_answers(llm, file, questions)
    before = file.read_bytes()
    message = r"answers\.jsonl', line 2: it answers 'Where is the cat\?', .* 1 is 'Where is it\?'"
    with pytest.raises(ValueError, match=message):
        write_answers(llm, file, ["What is a cat?", "Where is it?", "Why?", "Why not?"])
    write_answers(llm, file, questions[:2])  # fewer: the others stay
    assert file.read_bytes() == before


def test_the_prefix_ends_where_the_user_begins(llm: LLM) -> None:
    """Guards a turn that starts with another role's words."""
    assert llm.tokenizer is not None
    prefix = llm.tokenizer.decode(user_prefix(llm.tokenizer), skip_special_tokens=False)
    assert prefix == "<|im_start|>user\n"


def test_what_cannot_chat_is_refused(llm: LLM, tmp_path: Path) -> None:
    """Guards a traceback where a template, or an index, is missing."""
    file = tmp_path / "chats.jsonl"
    file.write_text('{"prompt_ids": []}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="line 1: expected a JSON object with index and user"):
        write_chats(llm, file, COUNT)
    folder = make_checkpoint(tmp_path / "model", tokenizer=False)
    tokenizer = make_tokenizer()
    hidden = CHAT_TEMPLATE.replace("message['content']", "message['role']")
    for template, message in (
        (None, "no chat template"),
        (hidden, "does not hold the user's turn"),
    ):
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
        with (
            LLM(folder, max_num_seqs=1, max_model_len=64, numerics="fast") as refusing,
            pytest.raises(ValueError, match=message),
        ):
            write_chats(refusing, tmp_path / "a", 1)
