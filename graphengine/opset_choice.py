"""Which ops an engine's steps are made of: the one place that chooses by device and config."""

from __future__ import annotations

from capture.compile import PieceCompiler
from capture.config import CaptureConfig
from graphengine.native_opset import NativeOpSet
from graphengine.opset import OpSet
from graphengine.resolve import ResolvedConfig


def make_opset(resolved: ResolvedConfig, capture: CaptureConfig, compiler: PieceCompiler) -> OpSet:
    """The ops of an engine.

    Args:
        compiler: makes torch's pieces, where some are asked for.
    """
    native = capture.compile in ("auto", "native")
    return NativeOpSet(resolved.dtype, None if native else compiler)
