"""Which policy a configuration means."""

from __future__ import annotations

from capture.manager import CaptureManager
from graphengine.draft_length.controller import DraftLength
from graphengine.draft_length.costs import CellCosts
from graphengine.draft_length.measured import MeasuredLength
from graphengine.draft_length.policy import FixedLength, LengthByBatch, Policy, Threshold
from graphengine.resolve import ResolvedConfig
from graphengine.speculative_config import SHORT_DRAFT, SpeculativeConfig
from proposers.base import Proposer


def make_draft_length(
    resolved: ResolvedConfig, manager: CaptureManager, proposer: Proposer | None
) -> DraftLength:
    """What says how many drafts a step carries."""
    lengths = resolved.table.draft_lengths
    return DraftLength(_policy(resolved.speculative, lengths, manager, proposer), lengths)


def _policy(
    speculative: SpeculativeConfig | None,
    lengths: tuple[int, ...],
    manager: CaptureManager,
    proposer: Proposer | None,
) -> Policy:
    if speculative is None or proposer is None:
        return FixedLength(0)
    adaptive = speculative.adaptive
    if adaptive is True:
        return MeasuredLength(CellCosts(manager), lengths, listens=not proposer.graph_safe)
    if adaptive is False:
        return FixedLength(lengths[-1])
    if adaptive == "threshold":
        return Threshold(lengths[-1], min(SHORT_DRAFT, lengths[-1]))
    return LengthByBatch(dict(adaptive))
