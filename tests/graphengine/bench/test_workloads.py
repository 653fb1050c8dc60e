"""Prompt lists: what is read, what is refused, and how batches are filled."""

import json
from pathlib import Path
from typing import Any

import pytest

from graphengine.bench.workloads import Prompt, batches, encode, load_workloads
from graphengine.demo import PROMPTS_FILE
from graphengine.models.tokenizer import Tokenizer
from tests.tiny import make_tokenizer

IDS = {"id": "r-1", "kind": "r", "token_ids": [5, 6, 7]}
ENTRY = {"id": "a-1", "kind": "a", "chat": True, "text": "hello"}


def _write(tmp_path: Path, data: Any) -> Path:
    path = tmp_path / "prompts.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_both_forms_are_read(tmp_path: Path) -> None:
    """Guards against grouping that loses or reorders prompts."""
    second = {**ENTRY, "id": "b-1", "kind": "b"}
    third = {**ENTRY, "id": "a-2"}
    flat = load_workloads(_write(tmp_path, [ENTRY, second, third]))
    assert {name: [p.id for p in found] for name, found in flat.items()} == {
        "a": ["a-1", "a-2"],
        "b": ["b-1"],
    }
    named = load_workloads(_write(tmp_path, {"w": [ENTRY, second]}))
    assert {name: [p.id for p in found] for name, found in named.items()} == {"w": ["a-1", "b-1"]}


def test_ids_and_temperatures_are_read(tmp_path: Path) -> None:
    """Guards against a prompt of ids that is decoded and encoded, or answered at another heat."""
    hot = {**IDS, "temperature": 1.5}
    (found,) = load_workloads(_write(tmp_path, [hot]))["r"]
    assert (encode(None, found), found.temperature) == ([5, 6, 7], 1.5)
    (cold,) = load_workloads(_write(tmp_path, [ENTRY]))["a"]
    assert cold.temperature == 0


def test_the_demo_list_is_read() -> None:
    """Guards against a demo whose prompts do not ship or do not parse."""
    assert sum(map(len, load_workloads(PROMPTS_FILE).values())) >= 4


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("{", "not valid JSON"),
        ([], "non-empty list"),
        ({"w": []}, "non-empty list"),
        ({}, "no prompt list"),
        (3, "non-empty list"),
        ([{"id": "a"}], "exactly id, kind, chat, text"),
        ([{**ENTRY, "temperature": "hot"}], "temperature='hot'"),
        ([{**IDS, "text": "both"}], "exactly id, kind, chat, text, or id, kind, token_ids"),
        ([{**IDS, "token_ids": []}], "non-empty list of token ids"),
        ([{**ENTRY, "more": 1}], "exactly id, kind, chat, text"),
        ([{**ENTRY, "chat": "yes"}], "chat='yes'"),
        ([{**ENTRY, "text": ""}], "text=''"),
    ],
)
def test_bad_lists_are_refused(tmp_path: Path, data: Any, message: str) -> None:
    """Guards against a half-read list, whose figures would be about something else."""
    with pytest.raises(ValueError, match=message):
        load_workloads(_write(tmp_path, data))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    """Guards against a traceback for a mistyped path."""
    with pytest.raises(ValueError, match="cannot be read"):
        load_workloads(tmp_path / "none.json")


def test_chat_prompts_get_the_template_and_others_do_not() -> None:
    """Guards against measuring a chat model on prompts it was not made for."""
    tokenizer = Tokenizer(make_tokenizer())
    raw = Prompt(id="a", kind="a", chat=False, text="hello")
    chat = Prompt(id="a", kind="a", chat=True, text="hello")
    assert encode(tokenizer, raw) == tokenizer.encode("hello")
    assert encode(tokenizer, chat) == tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}]
    )
    with pytest.raises(ValueError, match="no tokenizer"):
        encode(None, raw)


def test_batches_are_full_and_every_prompt_is_in_one() -> None:
    """Guards against a short last batch, timed as if it were a full one."""
    prompts = [Prompt(id=str(i), kind="a", chat=False, text="x") for i in range(5)]
    found = [[prompt.id for prompt in batch] for batch in batches(prompts, 2)]
    assert found == [["0", "1"], ["2", "3"], ["4", "0"]]
    assert [len(batch) for batch in batches(prompts[:1], 3)] == [3]
