"""Training text: files and chats on this machine as pieces of token ids, split once and for all.

Owns which files are read, how texts are cut, and which are held out: a property of the text alone,
so that no other choice moves a text from one side to the other. Knows nothing of models; it is
handed the function that encodes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

TEXT_SUFFIXES = (".py", ".md", ".rst", ".txt")
# Other people's packages below a folder of sources, and what is hidden.
_SKIPPED_FOLDERS = ("site-packages", "dist-packages", "__pycache__")
_LEAST_TOKENS = 8  # of a piece; shorter ones teach nothing

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A stretch of one text, as long as training looks at."""

    token_ids: npt.NDArray[np.int32]  # [T]
    first: int  # index of the first token that counts; those before are a prompt
    kind: Literal["text", "chat"]
    held_out: bool

    def update(self, digest: hashlib._Hash) -> None:
        """Add what a corpus is told apart by."""
        digest.update(np.array([len(self.token_ids), self.first, self.held_out]).tobytes())
        digest.update(self.token_ids.tobytes())


@dataclass(frozen=True, slots=True)
class Chats:
    """A file of chats: lines of JSON with `prompt_ids` and `output_ids`."""

    file: Path
    count: int | None = None  # only lines whose `index` is below it; None: all


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusConfig:
    """How texts become pieces."""

    length: int = 512  # most tokens of a piece
    held_out: float = 0.05  # part of the texts that is measured on and not trained on
    max_text_tokens: int | None = None  # of files together; None: all

    def __post_init__(self) -> None:
        if self.length < 2 * _LEAST_TOKENS:
            raise ValueError(f"length={self.length}: expected at least {2 * _LEAST_TOKENS} tokens")
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out={self.held_out}: expected a number between 0 and 1")
        if self.max_text_tokens is not None and self.max_text_tokens < 1:
            raise ValueError(f"max_text_tokens={self.max_text_tokens}: expected at least 1")


def read_corpus(
    texts: Sequence[Path],
    chats: Sequence[Chats],
    encode: Encode,
    config: CorpusConfig,
    *,
    vocab_size: int,
) -> list[Piece]:
    """All pieces, in an order that the texts alone decide: files by hash, then chats as they come.

    Args:
        texts: files, and folders whose files are taken by suffix (`TEXT_SUFFIXES`).
        chats: files of chats.
        encode: text to token ids.
        vocab_size: of the target.

    Raises:
        ValueError: a path does not exist, a line of `chats` is none, an id is not the target's, or
            nothing is left to train on or to measure on.
    """
    pieces = [*_text_pieces(texts, encode, config, vocab_size)]
    for some in chats:
        pieces += _chat_pieces(some, config, vocab_size)
    for side, held_out in (("train on", False), ("measure on", True)):
        if not any(piece.held_out == held_out for piece in pieces):
            raise ValueError(
                f"the corpus has nothing to {side}: it has {len(pieces)} pieces, and a file or "
                f"chat is held out as a whole (held_out={config.held_out}); give more of them, or "
                "hold out another part"
            )
    return pieces


def corpus_digest(pieces: Iterable[Piece]) -> str:
    """Hexadecimal digest of all that the pieces hold."""
    digest = hashlib.sha256()
    for piece in pieces:
        piece.update(digest)
    return digest.hexdigest()


def text_files(path: Path) -> list[Path]:
    """The file, or a folder's files by suffix, sorted.

    Raises:
        ValueError: there is neither.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"text {str(path)!r} does not exist; give a file or a folder")
    found = []
    for file in sorted(path.rglob("*")):
        folders = file.relative_to(path).parts[:-1]
        hidden = any(part in _SKIPPED_FOLDERS or part.startswith(".") for part in folders)
        if file.suffix in TEXT_SUFFIXES and file.is_file() and not hidden:
            found.append(file)
    if not found:
        raise ValueError(f"text {str(path)!r} holds no file of {', '.join(TEXT_SUFFIXES)}")
    return found


def _text_pieces(
    paths: Sequence[Path], encode: Encode, config: CorpusConfig, vocab_size: int
) -> Iterator[Piece]:
    """Files by their hash, which is a sample of them where there is not room for all."""
    by_hash = {}
    for path in paths:
        for file in text_files(path):
            data = file.read_bytes()
            by_hash[hashlib.sha256(data).digest()] = file, data
    room = config.max_text_tokens
    for digest in sorted(by_hash):
        if room is not None and room <= 0:
            return
        file, data = by_hash[digest]
        encoded = np.array(encode(data.decode("utf-8", errors="replace")), dtype=np.int64)
        ids = _token_ids(encoded, vocab_size, f"text {str(file)!r}")[:room]
        if room is not None:
            room -= len(ids)
        held_out = _is_held_out(digest, config.held_out)
        for start in range(0, len(ids), config.length):
            part = ids[start : start + config.length]
            if len(part) >= _LEAST_TOKENS:
                yield Piece(part, 0, "text", held_out)


def _chat_pieces(chats: Chats, config: CorpusConfig, vocab_size: int) -> Iterator[Piece]:
    """One piece a chat, cut at the end; only the answer counts."""
    name = f"chats {str(chats.file)!r}"
    if not chats.file.is_file():
        raise ValueError(f"{name} does not exist; give a file of JSON lines")
    with chats.file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{name}, line {number}"
            try:
                chat = json.loads(line)
                if chats.count is not None and chat["index"] >= chats.count:
                    continue
                prompt, output = list(chat["prompt_ids"]), list(chat["output_ids"])
                given = np.array(prompt + output, dtype=np.int64)
            except (ValueError, TypeError, KeyError, OverflowError) as error:
                raise ValueError(
                    f"{where}: expected a JSON object with prompt_ids and output_ids ({error})"
                ) from error
            ids = _token_ids(given, vocab_size, where)[: config.length]
            if len(ids) - len(prompt) >= _LEAST_TOKENS:
                # By the prompt, so that two answers to one question stay on one side.
                digest = hashlib.sha256(np.array(prompt, dtype=np.int32).tobytes()).digest()
                held_out = _is_held_out(digest, config.held_out)
                yield Piece(ids, len(prompt), "chat", held_out)


def _token_ids(ids: npt.NDArray[np.int64], vocab_size: int, where: str) -> npt.NDArray[np.int32]:
    """The same, checked: a target's embedding is read without a look at where it ends."""
    strange = ids[(ids < 0) | (ids >= vocab_size)]
    if len(strange):
        raise ValueError(
            f"{where}: {strange[0]} is no token id of the target; allowed: 0 to {vocab_size - 1}"
        )
    return ids.astype(np.int32)


def _is_held_out(digest: bytes, part: float) -> bool:
    """By the digest's last bytes: files are taken in the order of the first."""
    return int.from_bytes(digest[-4:], "big") < part * (1 << 32)
