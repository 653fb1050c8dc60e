"""Registrations of the scripted proposers: tests reach them by name and options like any other.

Owns their infos, options and factories. Knows nothing of what the scripts do: that is
proposers.mock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from proposers.base import Runtime
from proposers.info import (
    OptionInfo,
    ProposerInfo,
    ProposerSpec,
    Rule,
    integers,
    none_or,
    numbers,
    option_error,
)
from proposers.mock import (
    AcceptExactly,
    EmptyProposer,
    JunkProposer,
    OracleProposer,
    RaggedProposer,
    Records,
)

LARGEST_ID = 2**31 - 1
RECORDS = OptionInfo(
    name="records",
    default=None,
    doc="mapping of request id to whole stream, or of prompt (tuple of ids) to output",
    rule=none_or(
        Rule(
            lambda value: (
                isinstance(value, Mapping) and all(isinstance(key, str | tuple) for key in value)
            ),
            "a mapping whose keys are request ids (str) or prompts (tuple of token ids)",
        )
    ),
)


def _info(name: str, summary: str, *options: OptionInfo) -> ProposerInfo:
    return ProposerInfo(name=name, summary=summary, kind="host", status="testing", options=options)


_ORACLE = _info(OracleProposer.name, "drafts the recorded tokens: all accepted", RECORDS)
_JUNK = _info(
    JunkProposer.name,
    "drafts anything but the recorded tokens: none accepted",
    RECORDS,
    OptionInfo(
        name="token_id",
        default=None,
        doc="drafted without a recording; default: the last id",
        rule=none_or(integers(0, LARGEST_ID)),
    ),
)
_EXACTLY = _info(
    AcceptExactly.name,
    "drafts num_accepted recorded tokens, then junk",
    RECORDS,
    OptionInfo(
        name="num_accepted",
        default=0,
        doc="drafts to be accepted, tokens",
        rule=integers(0, LARGEST_ID),
    ),
)
_RAGGED = _info(
    RaggedProposer.name,
    "drafts 0..k tokens by a seeded schedule, recorded ones and junk mixed",
    RECORDS,
    OptionInfo(name="seed", default=0, doc="seed of the schedule", rule=integers(0, 2**63 - 1)),
    OptionInfo(
        name="true_fraction",
        default=0.8,
        doc="probability that a draft is the recorded",
        rule=numbers(0, 1),
    ),
)
_EMPTY = _info(EmptyProposer.name, "never drafts")


def records_of(options: Mapping[str, object]) -> Records | None:
    """The recording among a script's options."""
    return cast(Records | None, options["records"])


def at_most(proposer: str, options: Mapping[str, object], key: str, high: int) -> int:
    """An integer option whose upper limit only the runtime knows."""
    rule, value = integers(0, high), options[key]
    if not rule.accepts(value):
        raise option_error(proposer, key, value, rule.allowed)
    return cast(int, value)


def _build_oracle(options: Mapping[str, object], runtime: Runtime) -> OracleProposer:
    return OracleProposer(vocab_size=runtime.vocab_size, records=records_of(options))


def _build_junk(options: Mapping[str, object], runtime: Runtime) -> JunkProposer:
    token_id = None
    if options["token_id"] is not None:
        token_id = at_most(_JUNK.name, options, "token_id", runtime.vocab_size - 1)
    return JunkProposer(
        vocab_size=runtime.vocab_size, records=records_of(options), token_id=token_id
    )


def _build_exactly(options: Mapping[str, object], runtime: Runtime) -> AcceptExactly:
    num_accepted = at_most(_EXACTLY.name, options, "num_accepted", runtime.max_draft_tokens)
    return AcceptExactly(num_accepted, vocab_size=runtime.vocab_size, records=records_of(options))


def _build_ragged(options: Mapping[str, object], runtime: Runtime) -> RaggedProposer:
    return RaggedProposer(
        vocab_size=runtime.vocab_size,
        records=records_of(options),
        seed=cast(int, options["seed"]),
        true_fraction=cast(float, options["true_fraction"]),
    )


def _build_empty(options: Mapping[str, object], runtime: Runtime) -> EmptyProposer:
    return EmptyProposer(vocab_size=runtime.vocab_size)


ORACLE = ProposerSpec(info=_ORACLE, factory=_build_oracle)
JUNK = ProposerSpec(info=_JUNK, factory=_build_junk)
ACCEPT_EXACTLY = ProposerSpec(info=_EXACTLY, factory=_build_exactly)
RAGGED = ProposerSpec(info=_RAGGED, factory=_build_ragged)
EMPTY = ProposerSpec(info=_EMPTY, factory=_build_empty)
