"""Whether two checkpoints speak the same tokens: the same text for every id that both have.

Sizes may differ by padding rows, which stand for nothing.
"""

from __future__ import annotations

from graphengine.models.loader import OpenedModel
from graphengine.models.tokenizer import Tokenizer


def vocabulary_difference(target: OpenedModel, draft: OpenedModel) -> str | None:
    """What is different about the vocabularies, in words; None where an id means the same in both.

    Without a tokenizer on either side the sizes must be equal, since nothing else can be compared.
    """
    if target.location == draft.location:
        return None
    sizes = target.config.vocab_size, draft.config.vocab_size
    if not (target.has_tokenizer and draft.has_tokenizer):
        same = target.has_tokenizer == draft.has_tokenizer and sizes[0] == sizes[1]
        return None if same else _unknown(target, draft)
    ours, theirs = _tokens(target.load_tokenizer()), _tokens(draft.load_tokenizer())
    for token_id in sorted(ours.keys() | theirs.keys()):
        mine, other = ours.get(token_id), theirs.get(token_id)
        if mine != other:
            return f"token id {token_id} is {mine!r} for the target and {other!r} for the draft"
    return None


def _tokens(tokenizer: Tokenizer | None) -> dict[int, str]:
    assert tokenizer is not None, "a tokenizer was there"
    return tokenizer.tokens()


def _unknown(target: OpenedModel, draft: OpenedModel) -> str:
    named = {True: "a tokenizer", False: "no tokenizer"}
    return (
        f"the target has {named[target.has_tokenizer]} and {target.config.vocab_size} ids, the "
        f"draft {named[draft.has_tokenizer]} and {draft.config.vocab_size}: nothing shows that "
        "they mean the same"
    )
