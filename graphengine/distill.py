"""The engine as a teacher: what a target computes at each position of a text, for training drafts.

Owns a decoder of its own over one sequence, without scheduler, sampler or captured cells. Knows
nothing of what is trained; hands out `proposers.training`'s view of a target.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from graphengine.captured_step import make_buffers
from graphengine.config import CacheConfig, EngineConfig
from graphengine.kv import cache as kv_cache
from graphengine.model_runner import make_decoder
from graphengine.models.config import ModelConfig
from graphengine.models.decoder import Decoder, DecoderWeights, ForwardBuffers, ForwardInputs
from graphengine.models.loader import OpenedModel, Progress, load_weights
from graphengine.resolve import MAX_PREFILL_ROWS, ResolvedConfig, resolve
from proposers.training import LayerSizes, Target, TeacherRows

Tensor = torch.Tensor


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
        num_blocks = -(-max_length // block_size) + 1
        config = EngineConfig(
            max_model_len=max_length,
            max_num_seqs=1,
            numerics="fast",
            speculative="off",
            cache=CacheConfig(num_blocks=num_blocks, enable_prefix_caching=False),
        )
        resolved = resolve(model, config)
        self.taps = tuple(taps)
        self.model = model
        self.weights = DecoderWeights.allocate(model, resolved.dtype, resolved.device)
        load_weights(
            self.weights.destinations(model), opened.source, config=model, progress=progress
        )
        self._decoder = _decoder(resolved, self.weights)
        self._buffers = make_buffers(model, resolved.sizes, resolved.device)
        self._block_size = block_size
        rows = MAX_PREFILL_ROWS
        self._logits = torch.empty(rows, model.vocab_size)
        self._aux = torch.empty(max_length, len(taps) * model.hidden_size)
        self._final = torch.empty(max_length, model.hidden_size)
        self._greedy = torch.empty(max_length, dtype=torch.int32)

    def run(self, token_ids: Sequence[int]) -> TeacherRows:
        """All rows of one text, fp32; views, valid until the next call."""
        ids = np.asarray(token_ids, dtype=np.int32)
        for start in range(0, len(ids), MAX_PREFILL_ROWS):
            self._forward(ids[start : start + MAX_PREFILL_ROWS], start)
        length = len(ids)
        return TeacherRows(self._aux[:length], self._final[:length], self._greedy[:length])

    def _forward(self, token_ids: npt.NDArray[np.int32], start: int) -> None:
        num_tokens = len(token_ids)
        views = self._buffers.prefill(num_reqs=1, num_tokens=num_tokens)
        positions = np.arange(start, start + num_tokens, dtype=np.int32)
        views["token_ids"].numpy()[:] = token_ids
        views["positions"].numpy()[:] = positions
        views["slot_mapping"].numpy()[:] = self._block_size + positions  # block 0 is the null block
        views["block_table"].numpy()[0] = np.arange(1, views["block_table"].shape[1] + 1)
        views["query_start_loc"].numpy()[:] = (0, num_tokens)
        inputs, buffers = ForwardInputs.of(views), ForwardBuffers.of(views)
        decoder, rows = self._decoder, slice(start, start + num_tokens)
        decoder.attention.plan(inputs.attention)
        # INTERIM
        decoder.ops.embed(buffers.hidden, decoder.weights.embed, inputs.token_ids)
        h = self.model.hidden_size
        for t in range(self.model.num_layers + 1):
            for i, tap in enumerate(self.taps):
                if tap == t:
                    self._aux[rows, i * h : (i + 1) * h] = buffers.hidden
            if t < self.model.num_layers:
                layer = decoder.weights.layers[t]
                decoder._attend(layer, decoder._kv_caches[t], inputs, buffers)
                decoder._feed_forward(layer, buffers)
        logits = self._logits[:num_tokens]
        decoder.logits(logits, buffers)  # leaves the normed rows behind
        self._final[rows] = buffers.normed
        decoder.ops.argmax(self._greedy[rows], logits)


def describe_target(name: str, model: ModelConfig, weights: DecoderWeights) -> Target:
    """What training knows of a target."""
    return Target(
        name=name,
        fingerprint=fingerprint(weights, model),
        architecture=model.architecture,
        sizes=LayerSizes(
            hidden_size=model.hidden_size,
            intermediate_size=model.intermediate_size,
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            rms_norm_eps=model.rms_norm_eps,
            rope_theta=model.rope.theta,
        ),
        num_layers=model.num_layers,
        vocab_size=model.vocab_size,
        max_position_embeddings=model.max_position_embeddings,
        eos_token_ids=model.eos_token_ids,
        embed=weights.embed,
        final_norm=weights.final_norm,
        lm_head=weights.lm_head,
    )


def fingerprint(weights: DecoderWeights, model: ModelConfig) -> str:
    """Hexadecimal digest of every parameter and of the config."""
    digest = hashlib.sha256(repr(model).encode())
    for name, tensor in sorted(weights.destinations(model).items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _decoder(resolved: ResolvedConfig, weights: DecoderWeights) -> Decoder:
    caches = kv_cache.allocate(
        resolved.model,
        resolved.dtype,
        num_blocks=resolved.num_blocks,
        block_size=resolved.sizes.block_size,
        device=resolved.device,
    )
    return make_decoder(resolved, weights, caches, compiler=None)
