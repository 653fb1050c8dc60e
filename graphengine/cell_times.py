"""Times of captured cells: measured at a cold start, remembered for the next.

Owns what they depend on, which is the key of the cache entry. Measuring is the capture manager's.
"""

from __future__ import annotations

from dataclasses import asdict

from capture.cache import cache_key, machine_facts, read_entry, write_entry
from capture.config import CaptureConfig
from graphengine.model_runner import ModelRunner
from graphengine.resolve import ResolvedConfig

KIND = "cell_times"  # of cache entries


def ensure_cell_times(
    resolved: ResolvedConfig, capture: CaptureConfig, runner: ModelRunner
) -> bool:
    """Have the time of every captured cell; returns whether all were remembered.

    With `lazy`, cells are timed when somebody first asks, and nothing is remembered.
    """
    if capture.lazy:
        return False
    manager, key = runner.manager, cell_times_key(resolved, capture, runner)
    seconds = manager.stats.replay_seconds
    entry = read_entry(KIND, key) or {}
    known = {name: value for name, value in entry.items() if isinstance(value, float) and value > 0}
    seconds.update(known)
    manager.time_cells()
    if seconds == known:
        return True
    write_entry(KIND, key, seconds)
    return False


def cell_times_key(resolved: ResolvedConfig, capture: CaptureConfig, runner: ModelRunner) -> str:
    """Key of remembered times: machine, ops, sizes, and whose drafts are captured beside them."""
    draft = resolved.draft
    return cache_key(
        machine_facts()
        | {
            "opset": runner.opset.fingerprint,
            "attention": runner.decoder.attention.name,
            "model": asdict(resolved.model),
            "dtype": resolved.dtype,
            "device": resolved.device,
            "capture": asdict(capture),
            "cells": [str(key) for key in resolved.table],
            "sizes": asdict(resolved.sizes),
            "stream": type(runner.stream).__name__,
            "speculative": None if resolved.speculative is None else asdict(resolved.speculative),
            "draft": None if draft is None else (draft.num_weight_bytes, draft.kv_layers),
        }
    )
