"""Which ops an engine's steps are made of: the one place that chooses by device and config.

Triton is optional: its modules are imported here, when they are asked for.
"""

from __future__ import annotations

from capture.compile import PieceCompiler
from capture.config import CaptureConfig
from graphengine.config import is_native
from graphengine.native_opset import NativeOpSet
from graphengine.opset import OpSet
from graphengine.resolve import ResolvedConfig


def make_opset(resolved: ResolvedConfig, capture: CaptureConfig, compiler: PieceCompiler) -> OpSet:
    """The ops of an engine.

    Args:
        compiler: makes torch's pieces, where some are asked for.
    """
    pieces = compiler if capture.compile in ("inductor", "off") else None
    if is_native(capture, resolved.device):
        return NativeOpSet(resolved.dtype, pieces)
    from graphengine.triton_opset import TritonOpSet

    model, sizes = resolved.model, resolved.sizes
    hidden, wide = model.hidden_size, model.intermediate_size
    shapes = [
        (model.q_size + 2 * model.kv_size, hidden),
        (hidden, model.q_size),
        (2 * wide, hidden),
        (hidden, wide),
        (model.vocab_size, hidden),
    ]
    return TritonOpSet(
        resolved.dtype,
        resolved.device,
        max_rows=max(sizes.max_num_tokens, sizes.max_cell_tokens),
        shapes=shapes,
        vocab_size=model.vocab_size,
        compiler=pieces,
    )
