"""Registrations of the scripted stand-ins: what each asks of the engine, in the original's manner.

Owns their plans, infos and options; they need no checkpoint and look at none. Knows nothing of what
they do: that is proposers.mock_models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

from proposers.chain import chain_buffers, scratch
from proposers.device import FINAL, Architecture, DraftPlan, DraftSite, KVShape
from proposers.info import OptionInfo, ProposerInfo, ProposerSpec, integers, none_or
from proposers.mock import AcceptExactly, MockProposer, OracleProposer
from proposers.mock_models import MockDraftModel, MockEagle, MockModelProposer, MockMtp, Shape
from proposers.mock_specs import LARGEST_ID, RECORDS, at_most, records_of

Options = Mapping[str, object]


def _draft_model_shape(options: Options, target: Architecture) -> Shape:
    return Shape(architecture=target, num_layers=2, shift=0, lookahead=0)


def _eagle_shape(options: Options, target: Architecture) -> Shape:
    taps = tuple(dict.fromkeys((0, target.num_layers // 2, target.num_layers)))
    return Shape(architecture=target, num_layers=1, shift=1, lookahead=1, taps=taps)


def _mtp_shape(options: Options, target: Architecture) -> Shape:
    heads = cast(int, options["num_layers"])
    return Shape(architecture=target, num_layers=heads, shift=1, lookahead=heads, taps=(FINAL,))


_NUM_ACCEPTED = OptionInfo(
    name="num_accepted",
    default=None,
    doc="drafts to be accepted, tokens; default: all",
    rule=none_or(integers(0, LARGEST_ID)),
)
_NUM_LAYERS = OptionInfo(name="num_layers", default=1, doc="heads", rule=integers(1, 8))


def _script(name: str, options: Options, site: DraftSite) -> MockProposer:
    records, vocab_size = records_of(options), site.target.vocab_size
    if options["num_accepted"] is None:
        return OracleProposer(vocab_size=vocab_size, records=records)
    num_accepted = at_most(name, options, "num_accepted", site.max_draft_tokens)
    return AcceptExactly(num_accepted, vocab_size=vocab_size, records=records)


def _spec(
    kind: type[MockModelProposer],
    shape_of: Callable[[Options, Architecture], Shape],
    *more: OptionInfo,
) -> ProposerSpec:
    """The registration of a stand-in; it needs no checkpoint, and looks at none."""

    def plan(options: Options, site: DraftSite) -> DraftPlan:
        target, script = site.target, _script(kind.name, options, site)
        shape = shape_of(options, target)
        buffers = chain_buffers(
            target,
            vocab_size=target.vocab_size,
            target_vocab=target.vocab_size,
            draft_sampling=site.draft_sampling,
        )
        if shape.taps:
            buffers.append(scratch("taps", len(shape.taps) * target.hidden_size))
        kv = KVShape(num_kv_heads=target.num_kv_heads, head_dim=target.head_dim)
        size = sum(one.nbytes for one in site.block_parameters(target).values())
        return DraftPlan(
            kv_layers=(kv,) * shape.num_layers,
            taps=shape.taps,
            lookahead=shape.lookahead,
            num_weight_bytes=size * shape.num_layers,
            buffers=tuple(buffers),
            build=lambda runtime: kind(runtime, shape, script),
        )

    info = ProposerInfo(
        name=kind.name,
        summary=f"a recording in the place of {kind.name.removeprefix('mock-').replace('-', '_')}",
        kind="device",
        graph_safe=kind.graph_safe,
        needs_hidden_states=kind.needs_hidden_states,
        produces_probs=kind.produces_probs,
        model="optional",
        status="testing",
        options=(RECORDS, _NUM_ACCEPTED, *more),
    )
    return ProposerSpec(info=info, open=plan)


DRAFT_MODEL = _spec(MockDraftModel, _draft_model_shape)
EAGLE = _spec(MockEagle, _eagle_shape)
MTP = _spec(MockMtp, _mtp_shape, _NUM_LAYERS)
