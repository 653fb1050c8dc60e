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

from graphengine import step_batch
from graphengine.captured_step import make_buffers
from graphengine.config import CacheConfig, EngineConfig
from graphengine.kv import cache as kv_cache
from graphengine.models.block import ForwardBuffers, ForwardInputs
from graphengine.models.config import ModelConfig
from graphengine.models.decoder import Decoder, DecoderWeights
from graphengine.models.factory import LayerFactory
from graphengine.models.hidden_states import FINAL, HiddenStates
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
        self.weights = DecoderWeights.allocate(model, resolved.dtype, resolved.device)
        load_weights(
            self.weights.destinations(model), opened.source, config=model, progress=progress
        )
        self._states = HiddenStates(
            (*taps, FINAL),
            hidden_size=model.hidden_size,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=resolved.dtype,
        )
        self._decoder = _make_decoder(resolved, self.weights, self._states)
        self._buffers = make_buffers(model, resolved.sizes, resolved.device)
        self._first_slot = block_size  # behind the null block
        self._logits = torch.empty(MAX_PREFILL_ROWS, model.vocab_size)
        self._greedy_ids = torch.empty(max_length, dtype=torch.int32)

    def run(self, token_ids: Sequence[int]) -> TeacherRows:
        """All rows of one text, in the dtype in which decoding hands them to a draft; views, valid
        until the next call.
        """
        ids = np.asarray(token_ids, dtype=np.int32)
        for start in range(0, len(ids), MAX_PREFILL_ROWS):
            self._forward(ids[start : start + MAX_PREFILL_ROWS], start)
        rows = self._states.storage[self._first_slot : self._first_slot + len(ids)]
        width = rows.shape[1] // len(self._states.taps)  # of one state, the final one the last
        return TeacherRows(rows[:, :-width], rows[:, -width:], self._greedy_ids[: len(ids)])

    def _forward(self, token_ids: npt.NDArray[np.int32], start: int) -> None:
        num_tokens, decoder = len(token_ids), self._decoder
        views = self._buffers.prefill(num_reqs=1, num_tokens=num_tokens)
        host = step_batch.host_views(views, step_batch.PREFILL_INPUTS)
        positions = np.arange(start, start + num_tokens, dtype=np.int32)
        host["token_ids"][:] = token_ids
        host["positions"][:] = positions
        host["slot_mapping"][:] = self._first_slot + positions
        host["block_table"][0] = np.arange(1, host["block_table"].shape[1] + 1)
        host["query_start_loc"][:] = (0, num_tokens)
        inputs, buffers = ForwardInputs.of(views), ForwardBuffers.of(views)
        decoder.attention.plan(inputs.attention)
        decoder.forward(inputs, buffers)
        logits = self._logits[:num_tokens]
        decoder.logits(logits, buffers.hidden, buffers.normed)
        decoder.ops.argmax(self._greedy_ids[start : start + num_tokens], logits)


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


def _make_decoder(
    resolved: ResolvedConfig, weights: DecoderWeights, states: HiddenStates
) -> Decoder:
    caches = kv_cache.allocate(
        kv_cache.model_layers(resolved.model),
        resolved.dtype,
        num_blocks=resolved.num_blocks,
        block_size=resolved.sizes.block_size,
        device=resolved.device,
    )
    factory = LayerFactory(
        resolved.dtype, max_model_len=resolved.sizes.max_model_len, compiler=None
    )
    return factory.decoder(resolved.model, weights, caches, states)
