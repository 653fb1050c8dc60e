"""What is read, how it is cut, and which side of the split it is on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from proposers.training import Chats, CorpusConfig, Piece, read_corpus
from proposers.training.corpus import corpus_digest, text_files

CONFIG = CorpusConfig(length=16, held_out=0.3)


def encode(text: str) -> list[int]:
    return list(text.encode())


def read(
    texts: list[Path],
    chats: list[Path],
    config: CorpusConfig = CONFIG,
    *,
    count: int | None = None,
) -> list[Piece]:
    files = [Chats(file, count) for file in chats]
    return read_corpus(texts, files, encode, config, vocab_size=256)


def write_texts(folder: Path, numbers: range) -> Path:
    folder.mkdir(exist_ok=True)
    for number in numbers:
        (folder / f"{number}.txt").write_text(f"text number {number:03d}", encoding="utf-8")
    return folder


def write_chats(file: Path, prompts: range, answer: int = 0) -> Path:
    lines = [{"prompt_ids": [1, number, 2], "output_ids": [10 + answer] * 10} for number in prompts]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return file


def sides(pieces: list[Piece]) -> dict[bytes, bool]:
    return {piece.token_ids.tobytes(): piece.held_out for piece in pieces}


def test_a_text_stays_on_its_side(tmp_path: Path) -> None:
    """Guards a split that moves texts over when others come, so that a resumed or extended run is
    measured on what it was trained on.
    """
    few = sides(read([write_texts(tmp_path / "a", range(40))], []))
    many = sides(read([write_texts(tmp_path / "a", range(90))], []))
    assert len(many) > len(few)
    assert {key: many[key] for key in few} == few
    assert 0.1 < sum(many.values()) / len(many) < 0.5


def test_answers_to_one_prompt_stay_together(tmp_path: Path) -> None:
    """Guards a held-out chat whose prompt was trained on."""
    first = read([], [write_chats(tmp_path / "a", range(40))])
    other = read([], [write_chats(tmp_path / "b", range(40), answer=1)])
    assert [piece.held_out for piece in first] == [piece.held_out for piece in other]
    assert corpus_digest(first) != corpus_digest(other)


def test_pieces_are_cut_and_prompts_do_not_count(tmp_path: Path) -> None:
    """Guards lost or doubled tokens at a cut, a tail of nothing, and loss on a user's words."""
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(65, 65 + 40)))
    config = CorpusConfig(length=16, held_out=0.5)
    chats = write_chats(tmp_path / "chats", range(20))
    pieces = read([text], [chats], config)
    cut = [piece.token_ids for piece in pieces if piece.kind == "text"]
    assert np.concatenate(cut).tolist() == list(range(65, 65 + 40))
    assert [len(part) for part in cut] == [16, 16, 8]
    assert all(piece.first == 0 for piece in pieces if piece.kind == "text")
    chat = [piece for piece in pieces if piece.kind == "chat"]
    assert len(chat) == 20
    assert all(piece.first == 3 and len(piece.token_ids) == 13 for piece in chat)


def test_a_long_chat_is_cut_at_its_end(tmp_path: Path) -> None:
    """Guards a piece longer than the teacher has room for."""
    config = CorpusConfig(length=16, held_out=0.5)
    file = tmp_path / "chats"
    chats = [{"prompt_ids": [n] * 5, "output_ids": list(range(30))} for n in range(20)]
    chats += [{"prompt_ids": [n] * 14, "output_ids": list(range(30))} for n in range(20)]
    file.write_text("".join(json.dumps(chat) + "\n" for chat in chats), encoding="utf-8")
    pieces = read([], [file], config)
    assert [len(piece.token_ids) for piece in pieces] == [16] * 20  # others have no answer left


def test_chats_behind_the_count_are_left_out(tmp_path: Path) -> None:
    """Guards a run of fewer chats that trains on all that an earlier one has left."""
    file = write_chats(tmp_path / "chats", range(60))
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    indexed = [{"index": 2 * number, **chat} for number, chat in enumerate(lines)]
    file.write_text("".join(json.dumps(chat) + "\n" for chat in indexed), encoding="utf-8")
    assert len(read([], [file])) == len(read([], [file], count=119)) == 60
    assert [piece.token_ids[1] for piece in read([], [file], count=80)] == list(range(40))
    with pytest.raises(ValueError, match=r"line 1: .*'index'"):
        read([], [write_chats(tmp_path / "b", range(40))], count=40)


def test_a_sample_of_files_is_the_same_sample(tmp_path: Path) -> None:
    """Guards a limit that takes the first files of the alphabet, or others each time."""
    folder = write_texts(tmp_path / "a", range(60))
    config = CorpusConfig(length=16, held_out=0.3, max_text_tokens=600)
    pieces = read([folder], [], config)
    assert 500 < sum(len(piece.token_ids) for piece in pieces) <= 600
    renamed = tmp_path / "b"
    renamed.mkdir()
    for file in folder.iterdir():
        (renamed / f"z{file.name[::-1]}.md").write_bytes(file.read_bytes())
    assert corpus_digest(read([renamed], [], config)) == corpus_digest(pieces)


def test_folders_are_read_by_suffix(tmp_path: Path) -> None:
    """Guards binaries, other people's packages and hidden folders among the sources."""
    for name in ("a.py", "sub/b.rst", "c.bin", ".git/d.txt", "site-packages/e.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x", encoding="utf-8")
    assert text_files(tmp_path) == [tmp_path / "a.py", tmp_path / "sub/b.rst"]
    assert text_files(tmp_path / "c.bin") == [tmp_path / "c.bin"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: expected a JSON object"),
        ('{"prompt_ids": [1]}', "line 2: .*output_ids"),
        ("[1]", "line 2"),
        ('{"prompt_ids": ["a"], "output_ids": [1]}', "line 2"),
        (f'{{"prompt_ids": [1], "output_ids": [{1 << 63}]}}', "line 2: .*output_ids"),
    ],
)
def test_a_line_that_is_no_chat_is_named(tmp_path: Path, line: str, message: str) -> None:
    """Guards a traceback out of the middle of a file of thousands of lines."""
    file = write_chats(tmp_path / "chats", range(1))
    file.write_text(file.read_text(encoding="utf-8") + line + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read([], [file])


@pytest.mark.parametrize("strange", [-1, 256, 1 << 31])
@pytest.mark.parametrize("side", ["prompt_ids", "output_ids"])
def test_an_id_that_is_not_the_targets_is_named(tmp_path: Path, side: str, strange: int) -> None:
    """Guards a target that reads outside its embedding, and trains on what stands there."""
    file = write_chats(tmp_path / "chats", range(40))
    read([], [file])
    chat = {"prompt_ids": [1], "output_ids": [255] * 10}
    chat[side] = [*chat[side], strange]
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(chat) + "\n")
    with pytest.raises(ValueError, match=rf"chats', line 41: {strange} is .* allowed: 0 to 255"):
        read([], [file])


def test_a_tokenizer_with_more_tokens_than_the_target_is_refused(tmp_path: Path) -> None:
    """Guards the same for texts, where it is the tokenizer that has added tokens."""
    folder = write_texts(tmp_path / "a", range(40))
    (folder / "7.txt").write_text("the last letter of this text is one: z", encoding="utf-8")
    vocab_size = ord("z")
    with pytest.raises(ValueError, match=r"text .*7\.txt': 122 is no .* allowed: 0 to 121"):
        read_corpus([folder], [], encode, CONFIG, vocab_size=vocab_size)
    read_corpus([folder], [], encode, CONFIG, vocab_size=vocab_size + 1)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    """Guards a run over nothing."""
    with pytest.raises(ValueError, match=r"text .*gone' does not exist"):
        read([tmp_path / "gone"], [])
    with pytest.raises(ValueError, match=r"holds no file of \.py"):
        read([tmp_path], [])
    with pytest.raises(ValueError, match=r"chats .*gone' does not exist"):
        read([], [tmp_path / "gone"])
    text = tmp_path / "one.txt"
    text.write_text("only one text here", encoding="utf-8")
    with pytest.raises(ValueError, match=r"nothing to (train|measure) on"):
        read([text], [])


@pytest.mark.parametrize(
    "values", [{"length": 4}, {"held_out": 0.0}, {"held_out": 1.0}, {"max_text_tokens": 0}]
)
def test_values_that_are_not_allowed(values: dict[str, float]) -> None:
    """Guards a configuration that fails an hour later."""
    (name,) = values
    with pytest.raises(ValueError, match=f"{name}="):
        CorpusConfig(**values)  # type: ignore[arg-type]
