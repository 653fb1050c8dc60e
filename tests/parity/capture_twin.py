"""CaptureTwin: every replay of an engine, held to the same step called from Python.

Before each replay of a tape, whatever the tier, the cell runs once as an `EagerGraph` on the very
same storages; then everything is put back, the tape is replayed with all of the step's Python
forbidden, and every bit that either has left is compared: outputs, KV, hidden states, the rows of
requests. Knows nothing of what is served.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from capture.buffers import garbage
from capture.graph import EagerGraph
from capture.manager import OVER_BUDGET
from capture.shapes import ShapeKey
from capture.tape import TapeGraph
from graphengine.engine import Engine
from proposers.chain import TIER
from proposers.model_based import ModelBasedProposer

Tensor = torch.Tensor


class CaptureTwin:
    """Wraps the manager of an engine whose graphs are tapes in debug mode.

    Attributes:
        replays: of tapes that were compared, by cell.
        ragged: of these, those in which requests had different numbers of drafts.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._manager = engine.runner.manager
        assert self._manager.kind == "tape"
        assert self._manager.config.debug
        self._replay = self._manager.replay
        self._manager.replay = self._twice  # type: ignore[method-assign]
        self._is_replaying = False
        self.replays: Counter[ShapeKey] = Counter()
        self.ragged: Counter[ShapeKey] = Counter()
        decoder = engine.runner.decoder
        owners: list[tuple[Any, tuple[str, ...]]] = [(decoder, ("forward", "logits"))]
        if isinstance(engine.proposer, ModelBasedProposer):
            owners.append((engine.proposer, ("extend", "step", "logits", "deepen", "advance")))
        for owner, names in owners:
            for name in names:
                setattr(owner, name, self._outside_replay(getattr(owner, name), name))

    def persistent(self) -> dict[str, Tensor]:
        """What outlives a step and may be written by it."""
        engine = self._engine
        found = {f"layer {i}": one for i, one in enumerate(engine.runner.decoder.kv_caches)}
        if engine.runner.hidden_states is not None:
            found["hidden states"] = engine.runner.hidden_states.storage
        if isinstance(engine.proposer, ModelBasedProposer):
            found |= {f"draft {i}": c for i, c in enumerate(engine.proposer.runtime.kv_caches)}
        device = engine.state.device
        for name, value in [*vars(device).items(), *vars(device.sampler).items()]:
            if isinstance(value, Tensor):
                found[f"rows {name}"] = value
        return found

    def _outside_replay(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            assert not self._is_replaying, f"a replay has called {name}"
            return function(*args, **kwargs)

        return guarded

    def _twice(self, key: ShapeKey, *, num_reqs: int, num_tokens: int) -> None:
        buffers, manager = self._manager.buffers, self._manager
        self._count(key, num_reqs)
        inputs = buffers.snapshot(("input",))
        before = {name: one.clone() for name, one in self.persistent().items()}
        buffers.poison(("scratch", "output"))
        EagerGraph(manager._tiers[key.tier].step, buffers, key).replay()
        expected = self._left(key)
        if key.tier == TIER:
            self._check_target_outputs()
        buffers.restore(inputs)
        for name, one in self.persistent().items():
            one.copy_(before[name])
        is_known = key in manager._graphs
        self._is_replaying = is_known and key not in manager._over_budget
        try:
            self._replay(key, num_reqs=num_reqs, num_tokens=num_tokens)
        finally:
            self._is_replaying = False
        if not isinstance(manager._graphs[key], TapeGraph):
            assert manager.stats.eager_fallbacks[OVER_BUDGET] > 0
            return
        self.replays[key] += 1
        for name, bits in self._left(key).items():
            assert torch.equal(bits, expected[name]), f"{name} of {key} differs from eager"

    def _check_target_outputs(self) -> None:
        """A chain has written none of them: the host may still be reading (case 13)."""
        buffers = self._manager.buffers
        for name, spec in buffers.specs.items():
            if spec.role == "output" and not name.startswith("draft."):
                left, poison = buffers.whole(name), torch.empty(1, dtype=spec.dtype)
                poison.fill_(garbage(spec.dtype))
                assert ((left == poison) | (left != left)).all(), f"drafting has written {name}"

    def _left(self, key: ShapeKey) -> Mapping[str, Tensor]:
        """Bits of what the step has left for others: outputs in the cell's shape, and rows."""
        specs, views = self._manager.buffers.specs, self._manager.buffers.cell(key)
        found = {name: views[name] for name, spec in specs.items() if spec.role == "output"}
        found |= self.persistent()
        return {name: one.clone().view(torch.uint8) for name, one in found.items()}

    def _count(self, key: ShapeKey, num_reqs: int) -> None:
        views = self._manager.buffers.cell(key)
        if key.tier != TIER and views["allowed_drafts"][:num_reqs].unique().numel() > 1:
            self.ragged[key] += 1
