"""NativeDraftOps: what a chain of drafts calls beside the layers (`proposers.device.DraftOps`).

Owns the kernels' arguments. Layer operations are those of the engine's `LayerOps`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

import torch

from graphengine.device_rows import DeviceRows
from graphengine.kernels.ops import check_contiguous, kernel_suffix, native_op
from graphengine.models.hidden_states import HiddenStates
from graphengine.models.layers import LayerOps
from proposers.base import DraftSampling
from proposers.device import WINDOW_READ, WINDOW_WRITTEN

Tensor = torch.Tensor


class NativeDraftOps:
    """See the module docstring.

    Args:
        layer_ops: embedding, norms and linears.
        hidden_states: of the target; None where nobody reads them.
        rows: of the requests.
        block_size: of the cache.
        draft_sampling: how drafts are chosen.
    """

    def __init__(
        self,
        layer_ops: LayerOps,
        hidden_states: HiddenStates | None,
        rows: DeviceRows,
        *,
        block_size: int,
        draft_sampling: DraftSampling,
    ) -> None:
        self.embed = layer_ops.embed
        self.rms_norm = layer_ops.rms_norm
        self.linear = layer_ops.linear
        self._states = None if hidden_states is None else hidden_states.storage
        dtype = torch.float32 if self._states is None else self._states.dtype
        self._load_slots = native_op(f"load_slots_{kernel_suffix(dtype)}")
        self._rows, self._block_size = rows, block_size
        self._prepare_window = native_op("prepare_window")
        self._zero_first = native_op("zero_first")
        self._concat = native_op("concat_rows")
        self._take_rows = native_op("take_rows")
        self._shift_tokens = native_op("shift_tokens")
        self._choose = native_op("choose_drafts")
        self._sampling = get_args(DraftSampling).index(draft_sampling)
        self._vocab_size = rows.sampler.vocab_size

    def prepare_window(self, views: Mapping[str, Tensor], rules: Tensor) -> None:
        rows, table = self._rows, views["block_table"]
        buffers = [views[name] for name in (*WINDOW_WRITTEN, *WINDOW_READ)]
        check_contiguous(*buffers, rules)
        self._prepare_window(
            *buffers,
            rows.num_tokens,
            rows.token_ids,
            rules,
            len(table),
            len(views["draft.loop_slots"]) // len(table),
            rows.max_model_len,
            table.shape[1],
            self._block_size,
            rows.padding_row,
        )

    def load_slots(self, out: Tensor, slots: Tensor) -> None:
        assert self._states is not None, "the target keeps no hidden states"
        check_contiguous(out, slots)
        self._load_slots(out, self._states, slots, *out.shape)

    def zero_first(self, out: Tensor, positions: Tensor) -> None:
        check_contiguous(out, positions)
        self._zero_first(out, positions, *out.shape)

    def concat(self, out: Tensor, first: Tensor, second: Tensor) -> None:
        check_contiguous(out, first, second)
        self._concat(out, first, second, len(out), first.shape[1], second.shape[1])

    def take_rows(self, out: Tensor, x: Tensor, rows: Tensor) -> None:
        check_contiguous(out, x, rows)
        self._take_rows(out, x, rows, *out.shape)

    def shift_tokens(self, out: Tensor, token_ids: Tensor, last_rows: Tensor, new: Tensor) -> None:
        check_contiguous(out, token_ids, last_rows, new)
        num_reqs = len(last_rows)
        self._shift_tokens(out, token_ids, last_rows, new, num_reqs, len(token_ids) // num_reqs)

    def choose(
        self,
        chosen: Tensor,
        drafts: Tensor,
        probs: Tensor | None,
        logits: Tensor,
        tokens: Tensor | None,
        requests: Tensor,
        step: int,
    ) -> None:
        given = [drafts, logits, requests, *(one for one in (probs, tokens) if one is not None)]
        check_contiguous(chosen, *given)
        query_len = len(drafts) // len(chosen)
        sizes = (*logits.shape, self._vocab_size, query_len)
        self._choose(chosen, drafts, probs, logits, tokens, requests, *sizes, step, self._sampling)
