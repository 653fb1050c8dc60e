"""Incremental decoding: new token ids in, the text that they complete out.

Linear in the number of tokens: each call decodes a short window of them. Text that may still change
(a character whose bytes are not all there) is held back. Knows nothing of models or requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from graphengine.models.tokenizer import Tokenizer

_INCOMPLETE = "\ufffd"  # what a decoder shows for bytes that are not a character
_MAX_HELD_TOKENS = 8
# A character has at most four bytes, and a token at least one: what three more tokens did not
# complete stays as it is.
_LOOKAHEAD_TOKENS = 3


class IncrementalDetokenizer:
    """Decodes one sequence as it grows; the pieces joined equal the text decoded at once.

    One exception: a decoder that takes back a character it has shown (byte-fallback tokenizers do,
    when an invalid byte follows a valid character of byte tokens).

    Args:
        tokenizer: The tokenizer.
        skip_special_tokens: Whether special tokens leave no text.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        # First the tokens whose text was given out last, kept because a decoder treats the first
        # token of a text differently; then the tokens whose text was not given out.
        self._window: list[int] = []
        self._num_given = 0
        self._given_text = ""

    def copy(self) -> IncrementalDetokenizer:
        """One in the same state; what is added to it leaves this one as it is."""
        return copy(self)

    def add(self, token_ids: Sequence[int]) -> str:
        """Text that these tokens complete; empty while a character still lacks bytes."""
        pieces = []
        for token_id in token_ids:
            # A token that leaves no text must not push the context out of the window.
            if self._tokenizer.is_visible(token_id, skip_special_tokens=self._skip_special_tokens):
                self._window = [*self._window, token_id]  # a copy has the old one
                pieces.append(self._advance())
        return "".join(pieces)

    def flush(self) -> str:
        """Text held back so far, incomplete characters as U+FFFD; call once, at the end."""
        return self._give(len(self._window), self._decode(self._window))

    def _advance(self) -> str:
        text, end = self._decode(self._window), len(self._window)
        if text.endswith(_INCOMPLETE):
            if end - self._num_given < _MAX_HELD_TOKENS:
                return ""
            end -= _LOOKAHEAD_TOKENS
            settled = self._decode(self._window[:end])
            if not text.startswith(settled):
                return ""  # a character lies across `end`; it will not after the next token
            text = settled
        return self._give(end, text)

    def _give(self, end: int, text: str) -> str:
        """Give out what `text`, the first `end` tokens of the window, has more than was given."""
        if len(text) <= len(self._given_text):
            return ""
        new_text = text[len(self._given_text) :]
        self._window = self._window[self._num_given :]
        self._num_given = end - self._num_given
        self._given_text = self._decode(self._window[: self._num_given])
        return new_text

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
