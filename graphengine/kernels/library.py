"""What the kernel library exports, and the one loaded copy of it.

Owns the table of names and argument kinds (the same as abi.h). Knows nothing of tensors: callers
pass addresses and integers, and keep the memory alive.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Final, Literal

from graphengine.kernels.build import Built, build

Kind = Literal["pointer", "int"]

MAX_HEAD_DIM: Final = 256  # kMaxHeadDim of attend.h, the size of the kernels' workspaces


@dataclass(frozen=True, kw_only=True, slots=True)
class Function:
    """One exported function: its symbol and the names and kinds of its arguments, in order."""

    name: str
    arguments: tuple[tuple[str, Kind], ...]

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return tuple(kind for _, kind in self.arguments)


def _function(name: str, pointers: str, ints: str, more: str = "", last: str = "") -> Function:
    """Arguments come in runs: pointers, ints, pointers again, ints again."""
    runs: tuple[tuple[str, Kind], ...] = (
        (pointers, "pointer"),
        (ints, "int"),
        (more, "pointer"),
        (last, "int"),
    )
    arguments = tuple((argument, kind) for names, kind in runs for argument in names.split())
    return Function(name=name, arguments=arguments)


def _typed(suffix: str) -> tuple[Function, ...]:
    return (
        _function(f"linear_{suffix}", "out x w bias", "M N K accumulate"),
        _function(f"gate_up_{suffix}", "out x w", "M I K"),
        _function(f"embed_{suffix}", "out table ids", "M H"),
        _function(
            f"rope_write_{suffix}",
            "qkv kv_cache cos sin positions slot_mapping",
            "T Hq Hkv D block_size",
            "q_norm_weight k_norm_weight eps",
        ),
        _function(
            f"paged_attention_{suffix}",
            "out qkv kv_cache block_table query_start_loc positions",
            "R table_stride Hq Hkv D block_size sliding_window",
            "scratch",
            "scratch_floats",
        ),
        _function(f"store_slots_{suffix}", "cache x slots", "T H width column num_null_slots"),
        _function(f"load_slots_{suffix}", "out cache slots", "T width"),
    )


FUNCTIONS: Final = MappingProxyType(
    {
        function.name: function
        for function in (
            *_typed("bf16"),
            *_typed("f32"),
            _function("rms_norm", "out x weight", "M H", "eps"),
            _function("argmax_rows", "out logits", "M V"),
            _function(
                "greedy_verify",
                "packed target_ids token_ids query_len num_draft_tokens stop_ids max_new_tokens",
                "rows width num_stop_ids",
            ),
            _function(
                "prepare_rows",
                "token_ids positions slot_mapping num_draft_tokens max_new_tokens state_rows "
                "allowed_drafts most_new_tokens draft_token_ids block_table num_tokens limits "
                "history",
                "num_rows R query_len max_model_len table_stride block_size padding_row",
            ),
            _function(
                "commit_rows",
                "history num_tokens counts packed state_rows settings",
                "R width max_model_len V padding_row",
            ),
            _function(
                "prepare_window",
                "token_ids positions slot_mapping last_rows loop_positions loop_slots requests "
                "state_rows allowed_drafts filled block_table num_tokens history rules",
                "R query_len max_model_len table_stride block_size padding_row",
            ),
            _function(
                "process_logits",
                "out logits token_ids query_len state_rows settings counts in_prompt bias_ids "
                "bias_values mask",
                "T V max_bias",
            ),
            _function(
                "sample_rows",
                "target_ids processed positions query_len state_rows settings",
                "T V",
            ),
            _function(
                "reject_rows",
                "target_ids processed draft_probs token_ids positions query_len num_draft_tokens "
                "has_draft_probs state_rows settings",
                "T V",
            ),
            _function("row_logprobs", "ids values ranks logits target_ids", "T V width"),
            _function("take_rows", "out x rows", "R H"),
            _function("zero_first", "out positions", "T H"),
            _function("concat_rows", "out a b", "T A B"),
            _function("shift_tokens", "out token_ids last_rows newest", "R width"),
            _function(
                "choose_drafts",
                "chosen drafts probs logits tokens requests",
                "R V target_vocab query_len step sampling",
            ),
            _function("run_calls", "program", "n_calls"),
        )
    }
)


def bind(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare every exported function's argument types; AttributeError where one is missing."""
    for function in FUNCTIONS.values():
        symbol = getattr(library, function.name)
        symbol.restype = None
        symbol.argtypes = [
            ctypes.c_void_p if kind == "pointer" else ctypes.c_int64 for kind in function.kinds
        ]
    for fact in (library.vector_lanes, library.rounds_activations):
        fact.restype = ctypes.c_int64
        fact.argtypes = []
    return library


@cache
def load() -> ctypes.CDLL:
    """The library of this process: built where the cache lacks it, loaded and bound once."""
    return bind(_built().library)


def ensure_loaded() -> bool:
    """Load the library; False where that compiled it."""
    loaded_before = _built.cache_info().currsize > 0
    load()
    return loaded_before or _built().cached


@cache
def _built() -> Built:
    return build()


@cache
def address(name: str) -> int:
    """Address of an exported function; ValueError where there is none of this name."""
    if name not in FUNCTIONS:
        raise ValueError(f"no kernel named {name!r}; there are: {', '.join(sorted(FUNCTIONS))}")
    return ctypes.cast(getattr(load(), name), ctypes.c_void_p).value or 0
