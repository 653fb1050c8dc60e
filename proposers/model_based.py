"""ModelBasedProposer: drafts by a model of its own; one graph for the whole k-step chain.

Owns the chain: which rows are run, with which tokens, positions and slots, and what comes back.
A step first *extends* the draft KV by the tokens that were verified since (a window of fixed
width), takes the state behind the last of them, and from there drafts token by token. What a window
cannot hold (a prompt, a gap after steps without drafts) is filled before, outside the table.
Subclasses hold the architecture's forward. Keeps nothing of a request: how much of its draft KV is
valid is the engine's to know, since the rows live and die with the target's.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from capture.manager import CaptureManager
from capture.shapes import ShapeKey
from proposers.base import NO_TOKEN, Draft, ProposeInputs, StatelessProposer, TokenArray
from proposers.cells import Cells, rows_of
from proposers.chain import INPUTS, TIER
from proposers.device import Activations, DraftRuntime, PrefillInputs, Rows
from proposers.device_draft import DeviceDraft
from proposers.window import Layout, Window, write_rows

Tensor = torch.Tensor
Views = Mapping[str, Tensor]
# Told of rows that were run: the first slot of each request, and the states [T, hidden] behind all.
Seen = Callable[[TokenArray, Views, Tensor], None]

logger = logging.getLogger(__name__)


class ModelBasedProposer(StatelessProposer, ABC):
    """See the module docstring.

    Args:
        runtime: of the engine.
        shift: 0: a slot's row embeds its own token; 1: the one behind it.
        lookahead: how many tokens behind its own a slot's row depends on; at least `shift`.
        max_len: longest history that the model drafts for; longer ones get no drafts.
        num_embeddings: ids from here on are embedded as the last id.
        rms_norm_eps: of the norms in `ops`.
        tokens: [draft_vocab] int32, the target's id of each column of the logits; None: the same.
    """

    name: str
    graph_safe = True
    needs_hidden_states = False
    produces_probs = True
    needs_tokens = True  # whether a subclass looks at drafts on the host; see `ProposerInfo`
    suspects = "the checkpoint, which may be of another target"

    def __init__(
        self,
        runtime: DraftRuntime,
        *,
        shift: int,
        lookahead: int,
        max_len: int,
        num_embeddings: int,
        rms_norm_eps: float,
        tokens: Tensor | None = None,
    ) -> None:
        self.runtime = runtime
        self.ops = runtime.ops(rms_norm_eps)
        self.shift = shift
        self.lookahead = lookahead
        self.max_len = min(max_len, runtime.max_model_len)
        self._layout = Layout(
            block_size=runtime.block_size, shift=shift, num_embeddings=num_embeddings
        )
        self._tokens = None if tokens is None else tokens.to(runtime.device)
        self._manager: CaptureManager | None = None
        self._cells = Cells(runtime, self.width)
        self._rules: dict[int, Tensor] = {}  # by k; see `DraftOps.prepare_window`
        if self.max_len < runtime.max_model_len:
            logger.warning(
                "proposer %s drafts for histories up to %d tokens, the limit of its checkpoint; "
                "max_model_len is %d",
                self.name,
                self.max_len,
                runtime.max_model_len,
            )

    def variants(self) -> Iterator[tuple[str, ModelBasedProposer]]:
        """Other readings of the checkpoint, for the check at load; see `ModelProposer`."""
        yield from ()

    # ---- the architecture ----

    @abstractmethod
    def extend(self, views: Views, rows: Rows, activations: Activations) -> Tensor:
        """Run rows whose tokens are known; returns the state [T, hidden] behind each. Captured."""

    @abstractmethod
    def step(self, views: Views, rows: Rows, activations: Activations, state: Tensor) -> None:
        """Run one drafted token a request on from `state` [R, hidden], and replace it. Captured."""

    @abstractmethod
    def logits(self, out: Tensor, state: Tensor, activations: Activations) -> None:
        """out [R, draft_vocab] from the states of the rows. Captured."""

    def width(self, k: int) -> int:
        """Rows a request of the window: what a step can have verified, all behind it once more."""
        return k + 1

    def num_kept_drafts(self, allowance: int, k: int) -> int:
        """How many of a request's drafts have KV that stays valid where they are accepted."""
        return 0

    def num_loop_rows(self, allowance: int, k: int) -> int:
        """Drafts of a request that are run on: for the next one's sake, or to keep their KV."""
        return max(allowance - 1, self.num_kept_drafts(allowance, k))

    def deepen(self, depth: int, views: Views, rows: Rows, activations: Activations) -> Tensor:
        """Run deeper layers over rows that `extend` has run; returns their states. Captured.

        Args:
            depth: from 1 to lookahead - shift; the rows' tokens are so many further on.
        """
        raise AssertionError(f"proposer {self.name} has no layer {depth} behind its first")

    def advance(self, step: int, views: Views, window: Views) -> None:
        """From the draft of `step` to the state that the next one is chosen from. Captured."""
        num_reqs = len(views["block_table"])
        part = slice(step * num_reqs, (step + 1) * num_reqs)
        rows = self.runtime.rows(
            views["draft.chosen"],
            views["draft.loop_positions"][part],
            views["draft.loop_slots"][part],
            views["block_table"],
            views["draft.loop_start"],
        )
        activations = self.runtime.activations(views, num_reqs)
        self.step(views, rows, activations, views["draft.state"])

    # ---- capture ----

    def capture(self, manager: object) -> None:
        """Capture a chain for every cell of the table that has drafts."""
        assert isinstance(manager, CaptureManager), f"{manager!r} captures nothing"
        self._manager = manager
        for k in manager.table.draft_lengths:
            loop_rows = [self.num_loop_rows(count, k) for count in range(k + 1)]
            rules = [self.width(k), self.shift, self._layout.num_embeddings, *loop_rows]
            self._rules[k] = torch.tensor(rules, dtype=torch.int32, device=self.runtime.device)
        for num_rows in (1, 2):  # torch compiles a piece for one row, and for any more
            views = self.runtime.buffers.prefill(num_reqs=1, num_tokens=num_rows)
            rows, activations = rows_of(self.runtime, views), self._activations(views)
            self.runtime.stream.run(partial(self._run_rows, 0, views, rows, activations))
        manager.capture_tier(TIER, self._chain, self._cells.prepare, num_rows=self._num_rows)

    def _num_rows(self, key: ShapeKey) -> int:
        """Rows that a chain runs, padding included."""
        k = key.query_len - 1
        return key.num_reqs * (self.width(k) + self.num_loop_rows(k, k))

    def _chain(self, views: Views) -> None:
        """The captured step: make the rows, extend, then choose and advance k times.

        Deeper layers are run where fewer drafts are wanted, too: for their KV.
        """
        ops = self.ops
        num_reqs, k = len(views["block_table"]), _num_drafts(views)
        window = self._cells.window(num_reqs, k)
        ops.prepare_window({**views, **{name: window[name] for name in INPUTS}}, self._rules[k])
        state, activations = views["draft.state"], self.runtime.activations(views, num_reqs)
        behind = self.extend(window, rows_of(self.runtime, window), self._activations(window))
        ops.take_rows(state, behind, views["draft.last_rows"])
        num_steps = max(k, self.lookahead - self.shift + 1)
        for step in range(num_steps):
            if step < k:
                self.logits(views["draft.logits"], state, activations)
                ops.choose(
                    views["draft.chosen"],
                    views["draft.drafts"],
                    views.get("draft.probs"),
                    views["draft.logits"],
                    self._tokens,
                    views["draft.requests"],
                    step,
                )
            if step + 1 < num_steps:
                self.advance(step, views, window)

    def _activations(self, views: Views) -> Activations:
        return self.runtime.activations(views, len(views["token_ids"]))

    # ---- steps ----

    def prefill(self, inputs: PrefillInputs) -> TokenArray:
        """Fill the draft KV of prompt rows, as far as the tokens are known.

        In all no more rows than the target has run and a forward's worth: what is missing further
        back is caught up step by step.
        """
        lengths = np.array([len(tokens) for tokens in inputs.token_ids], dtype=np.int32)
        known = np.where(lengths < self.max_len, lengths - self.lookahead, 0)
        ends = np.minimum(inputs.num_slots, known)
        window = Window(inputs.token_ids, inputs.block_table, inputs.draft_kv_lens, ends)
        return self._fill(window, inputs.num_new_rows + self.runtime.max_fill_rows)

    def propose(self, inputs: ProposeInputs) -> Draft:
        """Draft for every request that has room, in one replay."""
        assert self._manager is not None, f"proposer {self.name} has not been captured"
        cache, k, num_reqs = inputs.cache, inputs.k, inputs.num_reqs
        assert cache is not None, f"proposer {self.name} needs to know where its KV lies"
        lengths = np.array([len(tokens) for tokens in inputs.token_ids], dtype=np.int32)
        in_flight = np.zeros_like(lengths) if inputs.num_in_flight is None else inputs.num_in_flight
        most = lengths + in_flight  # if all of it comes; the chain itself knows what has come
        ends = most - self.shift
        room = np.clip(self.max_len - most, 0, None)
        counts = np.where(ends > 0, np.minimum(inputs.num_draft_tokens, room), 0)
        starts = np.where(counts > 0, np.maximum(ends - self.width(k), 0), 0)
        # What is under way cannot be filled yet.
        gaps = np.where(in_flight > 0, 0, starts)
        gap = Window(inputs.token_ids, cache.block_table, cache.draft_kv_lens, gaps)
        filled = self._fill(gap, self.runtime.max_fill_rows)
        # If all comes, the most may be missing. What is left of a gap is for the next step.
        missing = np.minimum(filled, most - 1) < starts
        counts = np.where(missing, 0, counts).astype(np.int32)
        live = counts > 0
        key = self._manager.dispatch(num_reqs, k, TIER)
        assert key.query_len == k + 1, f"no cell of {k} drafts"
        if live.any():
            self._manager.make_ready(key)
            self._cells.tell(key, inputs, counts, filled)
            # At least the last row is run, for the state behind it.
            starts = np.minimum(np.maximum(starts, filled), ends - 1)
            loop_rows = [self.num_loop_rows(count, k) for count in counts[live].tolist()]
            num_tokens = int((ends - starts)[live].sum()) + sum(loop_rows)
            self._manager.replay(key, num_reqs=num_reqs, num_tokens=num_tokens)
        kept = np.array([self.num_kept_drafts(count, k) for count in counts.tolist()])
        resting = np.where(in_flight > 0, -most, filled - lengths)
        ahead = np.where(live, kept - self.lookahead, resting).astype(np.int32)
        cell = self._cells.of(key)
        if inputs.on_device and cell.probs is None:
            return DeviceDraft.of(cell.drafts, counts, ahead, waits=bool(missing.any()))
        draft_kv_lens = np.maximum(lengths + ahead, filled).astype(np.int32)
        if not live.any():
            return replace(Draft.empty(num_reqs, k), draft_kv_lens=draft_kv_lens)
        return self._read(key, counts, draft_kv_lens)

    def first_drafts(self, token_ids: TokenArray, block_table: TokenArray) -> TokenArray:
        """The likeliest first draft at every place of a text, teacher-forced."""
        found = np.full(len(token_ids), NO_TOKEN, dtype=np.int32)
        end = np.array([len(token_ids) - self.lookahead], dtype=np.int32)
        window = Window([token_ids], block_table[None], np.zeros_like(end), end)

        def note(starts: TokenArray, views: Views, states: Tensor) -> None:
            ids = torch.cat([self._likeliest(views, part) for part in states.split(1)])
            # A row tells what follows the last token that it has seen.
            first = int(starts[0]) + self.shift
            found[first : first + len(ids)] = ids.cpu().numpy()

        self._run_window(window, note)
        self.runtime.stream.synchronize()
        return found

    def _likeliest(self, views: Views, state: Tensor) -> Tensor:
        """The likeliest token [1] by a state [1, hidden]."""
        out = self.runtime.buffers.cell(ShapeKey(1, 2, TIER))["draft.logits"]
        self.logits(out, state, self.runtime.activations(views, 1))
        column = out.argmax(-1)
        return column if self._tokens is None else self._tokens[column]

    def _read(self, key: ShapeKey, counts: TokenArray, draft_kv_lens: TokenArray) -> Draft:
        """Wait for a cell's drafts."""
        num_reqs, k, edge = len(counts), key.query_len - 1, self.runtime.edge
        cell, probs = self._cells.of(key), None
        if cell.probs is not None:
            probs = torch.from_numpy(edge.read(cell.probs).wait()[:num_reqs, :k].copy())
        drafts = edge.read(cell.drafts).wait()[:num_reqs, :k].copy()
        drafts[np.arange(k) >= counts[:, None]] = NO_TOKEN
        return Draft(
            token_ids=drafts,
            num_draft_tokens=counts,
            probs=probs,
            draft_kv_lens=draft_kv_lens,
        )

    def _fill(self, window: Window, most_rows: int) -> TokenArray:
        """Run rows beside the table, for their KV; returns the slots of each that are valid now."""
        assert self._manager is not None, f"proposer {self.name} has not been captured"
        part = window.within(most_rows)
        for _ in range(self._run_window(part)):
            self._manager.count_eager(f"fill:{self.name}")
        return np.maximum(part.ends, window.starts)

    def _run_window(self, window: Window, seen: Seen | None = None) -> int:
        """Run rows in forwards of a bounded size, in order; returns how many there were."""
        most_reqs, starts, num_runs = self.runtime.max_num_seqs, window.starts.copy(), 0
        while (left := np.maximum(window.ends - starts, 0)).any():
            chosen = np.flatnonzero(left)[:most_reqs]
            room = self.runtime.max_fill_rows - np.concatenate(([0], np.cumsum(left[chosen])[:-1]))
            takes = np.minimum(left[chosen], np.maximum(room, 0))
            chosen, takes = chosen[takes > 0], takes[takes > 0]
            part = window.part(chosen, starts[chosen], starts[chosen] + takes)
            views = self.runtime.buffers.prefill(num_reqs=len(chosen), num_tokens=int(takes.sum()))
            rows, activations = (
                rows_of(self.runtime, views, int(takes.max())),
                self._activations(views),
            )
            note = None if seen is None else partial(seen, part.starts)
            self.runtime.plan(rows)
            for depth in range(self.lookahead - self.shift + 1):
                self._send_rows(views, part, depth)
                run = partial(self._run_rows, depth, views, rows, activations, note)
                self.runtime.stream.run(run)
            starts[chosen] += takes
            num_runs += 1
        return num_runs

    def _send_rows(self, views: Views, window: Window, depth: int) -> None:
        """Bring rows of exactly the window to the device."""
        edge = self.runtime.edge
        edge.begin()
        host = edge.views(views, INPUTS)
        offsets = np.concatenate(([0], np.cumsum(window.ends - window.starts)))
        write_rows(host, window, offsets, self._layout, depth)
        edge.send(views, host)

    def _run_rows(
        self,
        depth: int,
        views: Views,
        rows: Rows,
        activations: Activations,
        seen: Callable[[Views, Tensor], None] | None = None,
    ) -> None:
        """Run one depth of rows that have been sent, in the stream."""
        if depth:
            self.deepen(depth, views, rows, activations)
            return
        states = self.extend(views, rows, activations)
        if seen is not None:
            seen(views, states)


def _num_drafts(views: Views) -> int:
    """k of a cell's views."""
    return len(views["token_ids"]) // len(views["block_table"]) - 1
