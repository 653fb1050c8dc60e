"""Incremental decoding: new token ids in, the text that they complete out.

Linear in the number of tokens: each call decodes only a short window of them. Text that may still
change (a character whose bytes are not all there) is held back. Knows nothing of models or
requests.
"""

from collections.abc import Sequence

from graphengine.models.tokenizer import Tokenizer

_INCOMPLETE = "\ufffd"  # what decoders show for bytes that are not a character yet
# Four bytes make a character, so a longer run of replacement characters is one that stays.
_MAX_HELD_TOKENS = 8


class IncrementalDetokenizer:
    """Decodes one sequence as it grows; the pieces joined equal the text decoded at once.

    Args:
        tokenizer: The tokenizer.
        skip_special_tokens: Whether special tokens leave no text.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        # The window: tokens whose text was given out, kept as context for what follows (a decoder
        # may treat the first token of a text differently), then tokens whose text was not.
        self._window: list[int] = []
        self._num_given = 0

    def add(self, token_ids: Sequence[int]) -> str:
        """Text that these tokens complete; empty while a character still lacks bytes."""
        pieces = []
        for token_id in token_ids:
            self._window.append(token_id)
            pieces.append(self._advance(hold=True))
        return "".join(pieces)

    def flush(self) -> str:
        """Text held back so far, incomplete characters as U+FFFD; call once, at the end."""
        return self._advance(hold=False)

    def _advance(self, *, hold: bool) -> str:
        before = self._decode(self._window[: self._num_given])
        after = self._decode(self._window)
        held = len(self._window) - self._num_given
        if hold and after.endswith(_INCOMPLETE) and held < _MAX_HELD_TOKENS:
            return ""
        if not held or len(after) < len(before):
            return ""
        self._window = self._window[self._num_given :]
        self._num_given = len(self._window)
        return after[len(before) :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
