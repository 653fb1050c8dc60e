"""Draft sources: token ids in, guessed next token ids out. Imports nothing of graphengine."""

from proposers.base import (
    INTERFACE,
    NO_TOKEN,
    Commit,
    Draft,
    DraftSampling,
    HostProposer,
    ProposeInputs,
    Proposer,
    RequestSampling,
    Runtime,
)
from proposers.drafting import DraftSampler
from proposers.info import (
    BOOLEAN,
    OptionInfo,
    ProposerInfo,
    ProposerSpec,
    Rule,
    integers,
    none_or,
    numbers,
    option_error,
)

__all__ = [
    "BOOLEAN",
    "INTERFACE",
    "NO_TOKEN",
    "Commit",
    "Draft",
    "DraftSampler",
    "DraftSampling",
    "HostProposer",
    "OptionInfo",
    "ProposeInputs",
    "Proposer",
    "ProposerInfo",
    "ProposerSpec",
    "RequestSampling",
    "Rule",
    "Runtime",
    "integers",
    "none_or",
    "numbers",
    "option_error",
]
