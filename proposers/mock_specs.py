"""Registrations of the scripted proposers: tests reach them by name and options like any other.

Owns their infos, options and factories. Knows nothing of what the scripts do: that is
proposers.mock.
"""

from __future__ import annotations

from collections.abc import Mapping

from proposers.base import Runtime
from proposers.info import OptionInfo, ProposerInfo, ProposerSpec, int_option
from proposers.mock import (
    AcceptExactly,
    EmptyProposer,
    JunkProposer,
    OracleProposer,
    RaggedProposer,
    Records,
)

_RECORDS = OptionInfo(
    name="records",
    default=None,
    doc="mapping of request id to whole stream, or of prompt (tuple of ids) to output",
)


def _info(name: str, summary: str, *options: OptionInfo) -> ProposerInfo:
    return ProposerInfo(name=name, summary=summary, kind="host", status="testing", options=options)


def _records(proposer: str, options: Mapping[str, object]) -> Records | None:
    value = options["records"]
    if value is None:
        return None
    if not isinstance(value, Mapping) or not all(isinstance(key, str | tuple) for key in value):
        raise ValueError(
            f"proposer {proposer!r}: records={type(value).__name__} is not allowed; give a "
            "mapping whose keys are request ids (str) or prompts (tuple of token ids)"
        )
    return value


_ORACLE = _info(OracleProposer.name, "drafts the recorded tokens: all accepted", _RECORDS)
_JUNK = _info(
    JunkProposer.name,
    "drafts anything but the recorded tokens: none accepted",
    _RECORDS,
    OptionInfo(
        name="token_id", default=None, doc="drafted without a recording; default: the last id"
    ),
)
_EXACTLY = _info(
    AcceptExactly.name,
    "drafts num_accepted recorded tokens, then junk",
    _RECORDS,
    OptionInfo(name="num_accepted", default=0, doc="drafts to be accepted, tokens"),
)
_RAGGED = _info(
    RaggedProposer.name,
    "drafts 0..k tokens by a seeded schedule, recorded ones and junk mixed",
    _RECORDS,
    OptionInfo(name="seed", default=0, doc="seed of the schedule"),
    OptionInfo(name="true_fraction", default=0.8, doc="probability that a draft is the recorded"),
)
_EMPTY = _info(EmptyProposer.name, "never drafts")


def _build_oracle(options: Mapping[str, object], runtime: Runtime) -> OracleProposer:
    resolved = _ORACLE.resolve(options)
    records = _records(_ORACLE.name, resolved)
    return OracleProposer(vocab_size=runtime.vocab_size, records=records)


def _build_junk(options: Mapping[str, object], runtime: Runtime) -> JunkProposer:
    resolved = _JUNK.resolve(options)
    token_id = None
    if resolved["token_id"] is not None:
        token_id = int_option(_JUNK.name, resolved, "token_id", low=0, high=runtime.vocab_size - 1)
    records = _records(_JUNK.name, resolved)
    return JunkProposer(vocab_size=runtime.vocab_size, records=records, token_id=token_id)


def _build_exactly(options: Mapping[str, object], runtime: Runtime) -> AcceptExactly:
    resolved = _EXACTLY.resolve(options)
    num_accepted = int_option(
        _EXACTLY.name, resolved, "num_accepted", low=0, high=runtime.max_draft_tokens
    )
    records = _records(_EXACTLY.name, resolved)
    return AcceptExactly(num_accepted, vocab_size=runtime.vocab_size, records=records)


def _build_ragged(options: Mapping[str, object], runtime: Runtime) -> RaggedProposer:
    resolved = _RAGGED.resolve(options)
    fraction = resolved["true_fraction"]
    if not isinstance(fraction, int | float) or not 0 <= fraction <= 1:
        raise ValueError(
            f"proposer {_RAGGED.name!r}: true_fraction={fraction!r} is not allowed; "
            "give a number from 0 to 1"
        )
    return RaggedProposer(
        vocab_size=runtime.vocab_size,
        records=_records(_RAGGED.name, resolved),
        seed=int_option(_RAGGED.name, resolved, "seed", low=0, high=2**63 - 1),
        true_fraction=fraction,
    )


def _build_empty(options: Mapping[str, object], runtime: Runtime) -> EmptyProposer:
    _EMPTY.resolve(options)
    return EmptyProposer(vocab_size=runtime.vocab_size)


SPECS = (
    ProposerSpec(info=_ORACLE, factory=_build_oracle),
    ProposerSpec(info=_JUNK, factory=_build_junk),
    ProposerSpec(info=_EXACTLY, factory=_build_exactly),
    ProposerSpec(info=_RAGGED, factory=_build_ragged),
    ProposerSpec(info=_EMPTY, factory=_build_empty),
)
