"""Prompt lists: what is measured.

Owns the JSON format: `{"workload": [{"id", "kind", "chat", "text"}, ...]}`, or one such list, whose
entries are grouped by kind. An entry may have `token_ids` in place of `chat` and `text`, and a
`temperature`. Knows nothing of engines but their tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphengine.models.tokenizer import Tokenizer

_TEXT = {"id": str, "kind": str, "chat": bool, "text": str}
_IDS = {"id": str, "kind": str, "token_ids": list}


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One entry of a list. `chat`: `text` is a user's message, else the start of a document."""

    id: str
    kind: str
    chat: bool = False
    text: str = ""
    token_ids: Sequence[int] = ()  # the prompt itself, in place of a text
    temperature: float = 0.0  # at which it is to be answered


Workloads = Mapping[str, Sequence[Prompt]]


def load_workloads(path: Path) -> dict[str, list[Prompt]]:
    """Workload name -> its prompts, in the order of the file.

    Raises:
        ValueError: the file cannot be read, is not JSON, or is not a prompt list.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"prompts {path}: cannot be read ({error.strerror})") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"prompts {path}: not valid JSON ({error})") from error
    lists = data if isinstance(data, dict) else {None: data}
    if not lists:
        raise ValueError(f"prompts {path}: holds no prompt list")
    found: dict[str, list[Prompt]] = {}
    for name, entries in lists.items():
        if not isinstance(entries, list) or not entries:
            raise ValueError(f"prompts {path}: expected a non-empty list of prompts")
        for entry in entries:
            prompt = _prompt(path, entry)
            found.setdefault(name if name is not None else prompt.kind, []).append(prompt)
    return found


def load_all(paths: Sequence[Path]) -> dict[str, list[Prompt]]:
    """The lists of several files; those of the same name are joined.

    Raises:
        ValueError: as `load_workloads`.
    """
    found: dict[str, list[Prompt]] = {}
    for path in paths:
        for name, prompts in load_workloads(path).items():
            found.setdefault(name, []).extend(prompts)
    return found


def _prompt(path: Path, entry: Any) -> Prompt:
    expected = _IDS if isinstance(entry, dict) and "token_ids" in entry else _TEXT
    if not isinstance(entry, dict) or set(entry) - {"temperature"} != set(expected):
        raise ValueError(
            f"prompts {path}: an entry must have exactly {', '.join(_TEXT)}, or "
            f"{', '.join(_IDS)}, and may have temperature"
        )
    for name, kind in expected.items():
        if not isinstance(entry[name], kind) or entry[name] in ("", []):
            allowed = {bool: "true or false", list: "a non-empty list of token ids"}
            raise ValueError(
                f"prompts {path}: entry {entry['id']!r}: {name}={entry[name]!r} is not "
                f"{allowed.get(kind, 'a non-empty string')}"
            )
    temperature = entry.get("temperature", 0.0)
    if isinstance(temperature, bool) or not isinstance(temperature, int | float):
        raise ValueError(
            f"prompts {path}: entry {entry['id']!r}: temperature={temperature!r} is not a number"
        )
    return Prompt(**entry)


def encode(tokenizer: Tokenizer | None, prompt: Prompt) -> list[int]:
    """Token ids of a prompt.

    Raises:
        ValueError: no tokenizer, or a chat prompt for a tokenizer without a chat template.
    """
    if prompt.token_ids:
        return list(prompt.token_ids)
    if tokenizer is None:
        raise ValueError("the checkpoint has no tokenizer, so it cannot read prompts")
    if prompt.chat:
        return tokenizer.apply_chat_template([{"role": "user", "content": prompt.text}])
    return tokenizer.encode(prompt.text)


def batches(prompts: Sequence[Prompt], batch_size: int) -> list[list[Prompt]]:
    """Full batches in order; the last one is filled up from the front."""
    starts = range(0, len(prompts), batch_size)
    return [[prompts[(s + i) % len(prompts)] for i in range(batch_size)] for s in starts]
