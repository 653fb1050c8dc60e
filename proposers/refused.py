"""Methods that are known and not served: why, and what to use in their place.

The explicit list of the support matrix: who asks for one of these gets an answer, not a spelling
error. Knows nothing of what is registered.
"""

from __future__ import annotations

from proposers.info import ProposerInfo

_ONE_CHAIN = "a captured shape is num_reqs chains of k + 1 rows, with no room for branches"


def _unsupported(name: str, summary: str, reason: str, *instead: str) -> ProposerInfo:
    return ProposerInfo(
        name=name,
        summary=summary,
        kind="device",
        status="unsupported",
        reason=reason,
        instead=instead,
    )


REFUSED = (
    _unsupported(
        "medusa",
        "independent heads, one for each future position",
        "its heads ignore each other's choice and pay off only in trees",
        *("eagle", "mtp"),
    ),
    _unsupported(
        "tree",
        "several candidates for each position (SpecInfer, Sequoia)",
        _ONE_CHAIN,
        *("eagle", "draft_model"),
    ),
    _unsupported(
        "eagle2",
        "EAGLE heads that draft trees which grow by their confidence",
        f"{_ONE_CHAIN}; the heads themselves are EAGLE-1's, and draft a chain",
        "eagle",
    ),
    _unsupported(
        "hass",
        "EAGLE heads trained on their own features, drafting trees",
        f"{_ONE_CHAIN}; of its training there is no recipe here",
        "eagle",
    ),
    _unsupported(
        "p-eagle",
        "an EAGLE head that drafts all positions in one pass, behind mask tokens",
        "a chain runs token by token; there is no pass over masked positions",
        "eagle",
    ),
    _unsupported(
        "dflash",
        "a draft of a whole block at once by diffusion",
        "a block's rows see each other both ways; attention here is causal",
        "eagle",
    ),
    _unsupported(
        "dspark",
        "dflash, with a Markov head and a confidence for each position",
        "as for dflash",
        "eagle",
    ),
    _unsupported(
        "mtp-moe",
        "multi-token-prediction layers with experts or latent attention (MoE, MLA)",
        "no such block is built; mtp refuses the checkpoint by what it holds",
        *("draft_model", "suffix"),
    ),
    _unsupported(
        "lookahead",
        "Jacobi iteration with an n-gram pool filled by the target itself",
        "it needs an attention mask of its own; drafts here are one chain",
        *("ngram", "suffix"),
    ),
)
