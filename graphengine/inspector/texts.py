"""Texts of tokens: as they stand in an answer, and each on its own.

An answer's own tokens are decoded in place, so that their texts joined are its text; drafts and
alternatives stand for themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

from graphengine.models.detokenizer import IncrementalDetokenizer
from graphengine.models.tokenizer import Tokenizer


class TokenTexts:
    """See the module docstring.

    Args:
        tokenizer: None: a token's text is its number.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._before: IncrementalDetokenizer | None = None
        if tokenizer is not None:
            # Behind a letter: a decoder may treat the first token of a text differently.
            self._before = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
            self._before.add(tokenizer.encode_plain("a"))
        self.known: dict[int, str] = {}  # all that have been asked for

    def of(self, token_id: int) -> str:
        """One token on its own; U+FFFD for bytes that are no whole character."""
        if token_id not in self.known:
            self.known[token_id] = self._decode(token_id)
        return self.known[token_id]

    def in_place(self, token_ids: Sequence[int]) -> list[str]:
        """What each token of an answer adds to its text; a character is its last token's.

        "" of a special token, and of one that is only the beginning of a character.
        """
        if self._tokenizer is None:
            return [f"{self.of(token_id)} " for token_id in token_ids]
        detokenizer = IncrementalDetokenizer(self._tokenizer)
        texts = [detokenizer.add([token_id]) for token_id in token_ids]
        if texts:
            texts[-1] += detokenizer.flush()
        return texts

    def whole(self, token_ids: Sequence[int]) -> str:
        """Decoded at once, special tokens included."""
        if self._tokenizer is None:
            return " ".join(map(self.of, token_ids))
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def _decode(self, token_id: int) -> str:
        if self._before is None:
            return f"#{token_id}"
        detokenizer = self._before.copy()
        text = detokenizer.add([token_id]) or detokenizer.flush()
        return text or f"#{token_id}"
