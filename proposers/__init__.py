"""Draft sources: token ids in, guessed next token ids out. Imports nothing of graphengine."""

from proposers.base import NO_TOKEN, Commit, Draft, HostProposer, ProposeInputs, Proposer, Runtime
from proposers.info import OptionInfo, ProposerInfo, ProposerSpec

__all__ = [
    "NO_TOKEN",
    "Commit",
    "Draft",
    "HostProposer",
    "OptionInfo",
    "ProposeInputs",
    "Proposer",
    "ProposerInfo",
    "ProposerSpec",
    "Runtime",
]
