"""The engine as a teacher: what a target computes at each position of a text, for training drafts.

Owns a decoder of its own over one sequence, without scheduler, sampler or captured cells. Its
matrix products are torch's, which are fastest for the many rows of a whole text and need not be
row-invariant. Knows nothing of what is trained; hands out `proposers.training`'s view of a target.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict

import torch
from torch.nn import functional

from graphengine.attention.base import AttentionBatch, plan
from graphengine.config import CacheConfig, EngineConfig
from graphengine.kv import cache as kv_cache
from graphengine.models.block import ForwardBuffers, ForwardInputs
from graphengine.models.config import ModelConfig
from graphengine.models.decoder import Decoder, DecoderWeights
from graphengine.models.factory import LayerFactory
from graphengine.models.hidden_states import HiddenStates
from graphengine.models.layers import make_rope
from graphengine.models.loader import OpenedModel, Progress, load_weights
from graphengine.models.native_ops import NativeOps
from graphengine.native_opset import NativeOpSet
from graphengine.resolve import ResolvedConfig, resolve
from proposers.device import FINAL
from proposers.training import LayerSizes, Target, TeacherRows

Tensor = torch.Tensor


LOGIT_ROWS = 256  # that are computed at a time


class TeacherOps(NativeOps):
    """The native operations, with torch's matrix products in the dtype of the weights."""

    def linear(
        self,
        out: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        add: bool = False,
    ) -> None:
        product = functional.linear(x.to(weight.dtype), weight).float()
        if bias is not None:
            product += bias
        if add:
            out += product
        else:
            out.copy_(product)

    def gate_up(self, out: Tensor, x: Tensor, weight: Tensor) -> None:
        gate, up = functional.linear(x.to(weight.dtype), weight).float().chunk(2, dim=-1)
        torch.mul(functional.silu(gate), up, out=out)


class EngineTeacher:
    """See the module docstring; a `proposers.training.Teacher`.

    Args:
        opened: the target's checkpoint.
        taps: whose residual streams are wanted, see there.
        max_length: tokens of the longest text.
        progress: called after each tensor that is loaded.

    Raises:
        ValueError: the target cannot be run, or has no such layers.
    """

    def __init__(
        self,
        opened: OpenedModel,
        *,
        taps: Sequence[int],
        max_length: int,
        progress: Progress | None = None,
    ) -> None:
        model = opened.config
        for tap in taps:
            if not 0 <= tap <= model.num_layers:
                raise ValueError(
                    f"taps: {tap} is not from 0 to {model.num_layers}, the target's layers"
                )
        block_size = CacheConfig().block_size
        cache = CacheConfig(num_blocks=-(-max_length // block_size) + 1)
        config = EngineConfig(
            device="cpu", max_model_len=max_length, speculative="off", cache=cache
        )
        resolved = resolve(model, config)
        self.taps = tuple(taps)
        self.weights = DecoderWeights.allocate(model, resolved.dtype, resolved.device)
        load_weights(
            self.weights.destinations(model), opened.source, config=model, progress=progress
        )
        self._head = self.weights.lm_head.float()
        opset = NativeOpSet(resolved.dtype)
        self._states = HiddenStates(
            (*taps, FINAL),
            hidden_size=model.hidden_size,
            num_blocks=resolved.num_blocks,
            block_size=block_size,
            dtype=resolved.dtype,
            device=resolved.device,
            store=opset.store_slots(),
        )
        self._decoder = _make_decoder(resolved, opset, self.weights, self._states)
        widths = (
            model.hidden_size,
            model.hidden_size,
            model.q_size + 2 * model.kv_size,
            model.q_size,
            model.intermediate_size,
        )
        self._buffers = ForwardBuffers(*(torch.empty(max_length, width) for width in widths))
        self._first_slot = block_size  # behind the null block
        blocks = torch.arange(1, resolved.num_blocks, dtype=torch.int32)
        self._block_table = blocks[None]

    @torch.no_grad()
    def run(self, token_ids: Sequence[int]) -> TeacherRows:
        """All rows of one text, in the dtype in which decoding hands them to a draft; hidden states
        are views, valid until the next call.
        """
        length, first = len(token_ids), self._first_slot
        positions = torch.arange(length, dtype=torch.int32)
        ends = torch.tensor([0, length], dtype=torch.int32)
        inputs = ForwardInputs(
            token_ids=torch.tensor(token_ids, dtype=torch.int32),
            positions=positions,
            slot_mapping=first + positions,
            attention=AttentionBatch(self._block_table, ends, positions, length),
        )
        buffers = self._buffers.rows(slice(0, length))
        plan(self._decoder.attention, inputs.attention)
        self._decoder.forward(inputs, buffers)
        rows = self._states.storage[first : first + length]
        width = rows.shape[1] // len(self._states.taps)  # of one state, the final one the last
        return TeacherRows(rows[:, :-width], rows[:, -width:], self._greedy_ids(buffers))

    def _greedy_ids(self, buffers: ForwardBuffers) -> Tensor:
        """int32 [T], from the residual stream behind the last layer. Of fp32 logits: in bf16 many
        would be alike.
        """
        ops, found = self._decoder.ops, []
        for start in range(0, len(buffers.hidden), LOGIT_ROWS):
            part = buffers.rows(slice(start, start + LOGIT_ROWS))
            ops.rms_norm(part.normed, part.hidden, self.weights.final_norm)
            logits = functional.linear(part.normed, self._head)
            found.append(torch.empty(len(logits), dtype=torch.int32))
            ops.argmax(found[-1], logits)
        return torch.cat(found)


def layer_sizes(model: ModelConfig) -> LayerSizes:
    """Of the target's layers, which those of a draft follow."""
    return LayerSizes(
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        rms_norm_eps=model.rms_norm_eps,
        rope_theta=model.rope.theta,
    )


def describe_target(name: str, model: ModelConfig, weights: DecoderWeights) -> Target:
    """What training knows of a target."""
    return Target(
        name=name,
        fingerprint=fingerprint(weights, model),
        architecture=model.architecture,
        sizes=layer_sizes(model),
        num_layers=model.num_layers,
        vocab_size=model.vocab_size,
        max_position_embeddings=model.max_position_embeddings,
        eos_token_ids=model.eos_token_ids,
        embed=weights.embed,
        final_norm=weights.final_norm,
        lm_head=weights.lm_head,
    )


def fingerprint(weights: DecoderWeights, model: ModelConfig) -> str:
    """Hexadecimal digest of every parameter, and of what else its hidden states follow from."""
    about = {
        "heads": (model.num_heads, model.num_kv_heads, model.head_dim),
        "rms_norm_eps": model.rms_norm_eps,
        "rope": asdict(model.rope),
        "sliding_window": model.sliding_window,
    }
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, tensor in sorted(weights.destinations(model).items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()


def _make_decoder(
    resolved: ResolvedConfig, opset: NativeOpSet, weights: DecoderWeights, states: HiddenStates
) -> Decoder:
    model, block_size, length = (
        resolved.model,
        resolved.sizes.block_size,
        resolved.sizes.max_model_len,
    )
    caches = kv_cache.allocate(
        kv_cache.model_layers(model),
        resolved.dtype,
        num_blocks=resolved.num_blocks,
        block_size=block_size,
        device=resolved.device,
    )
    factory = LayerFactory(opset, max_model_len=length)
    return Decoder(
        model,
        weights,
        caches,
        ops=TeacherOps(resolved.dtype, model.rms_norm_eps),
        attention=factory.attention(model, block_size=block_size),
        rope=make_rope(model, length, block_size=block_size, device=resolved.device),
        hidden_states=states,
    )
