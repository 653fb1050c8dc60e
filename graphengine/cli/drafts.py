"""Draft colours: text coloured by where each token came from.

Owns the colours and their legend. Decodes token by token, since the engine's own text comes step by
step.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.color import ColorSystem
from rich.style import Style

from graphengine.models.detokenizer import IncrementalDetokenizer
from graphengine.models.tokenizer import Tokenizer
from graphengine.request import Origin

_STYLES: dict[Origin, Style] = {
    "accepted": Style(color="green"),
    "recovered": Style(color="yellow"),
    "bonus": Style(),
}
_MEANINGS: dict[Origin, str] = {
    "accepted": "draft accepted",
    "recovered": "recovered: the model's token where a draft was wrong",
    "bonus": "bonus: the model's own next token",
}


def legend(*, colour: bool) -> str:
    """What the colours mean, one line."""
    if not colour:
        return "draft colours need a terminal with colours: the text below is plain"
    return "colours: " + ", ".join(_paint(text, origin) for origin, text in _MEANINGS.items())


class DraftPainter:
    """Decodes one answer as it grows, coloured.

    Args:
        tokenizer: the engine's.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._last: Origin = "bonus"

    def add(self, token_ids: Sequence[int], origins: Sequence[Origin]) -> str:
        """Coloured text that these tokens complete; a character takes its last token's colour."""
        pieces = []
        for token_id, origin in zip(token_ids, origins, strict=True):
            self._last = origin
            pieces.append(_paint(self._detokenizer.add([token_id]), origin))
        return "".join(pieces)

    def flush(self) -> str:
        """Text held back so far."""
        return _paint(self._detokenizer.flush(), self._last)


def paint(tokenizer: Tokenizer, token_ids: Sequence[int], origins: Sequence[Origin]) -> str:
    """A whole answer, coloured."""
    painter = DraftPainter(tokenizer)
    return painter.add(token_ids, origins) + painter.flush()


def _paint(text: str, origin: Origin) -> str:
    style = _STYLES[origin]
    return style.render(text, color_system=ColorSystem.STANDARD) if text and style else text
