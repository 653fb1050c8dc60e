"""rms_norm, embed, rope_write and argmax_rows: values, edge cases, and row-by-row bits."""

import ctypes

import pytest
import torch
from torch import Tensor

from capture.ops import NativeOp
from graphengine.models import torch_ops
from tests.graphengine.kernels.calls import SUFFIX, Kernels, empty, eps, threads, words

DTYPES = (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("width", [1, 5, 16, 63, 64, 576, 2049])
def test_rms_norm(kernels: Kernels, width: int) -> None:
    """Right values, and a row's bits do not depend on its batch."""
    x, weight = torch.randn(300, width), torch.randn(width)
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5) * weight
    out = kernels.rms_norm(x, weight)
    torch.testing.assert_close(out.double(), exact, rtol=2e-6, atol=1e-6)
    for rows in (1, 2, 7, 33):
        assert torch.equal(kernels.rms_norm(x[-rows:], weight), out[-rows:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_embed_widens_exactly(kernels: Kernels, dtype: torch.dtype) -> None:
    """A wrong row or a lossy widening changes the first layer's input."""
    table = torch.randn(40, 77).to(dtype)
    ids = torch.randint(0, 40, (300,), dtype=torch.int32)
    assert torch.equal(kernels.embed(table, ids), table[ids.long()].float())


def _norm_heads(x: Tensor, weight: Tensor | None) -> Tensor:
    if weight is None:
        return x
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 1, 64), (4, 2, 8), (2, 2, 24)])
def test_rope_write(
    kernels: Kernels, dtype: torch.dtype, normed: bool, heads: int, kv_heads: int, dim: int
) -> None:
    """Rotation style, q/k norm, cache layout and rounding, against the formulas in torch."""
    tokens, block_size, num_blocks = 61, 4, 20
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim)
    angles = torch.rand(100, dim // 2) * 6
    positions = torch.randint(0, 100, (tokens,), dtype=torch.int32)
    slots = (torch.randperm(block_size * (num_blocks - 1))[:tokens] + block_size).int()
    weights = (torch.randn(dim), torch.randn(dim)) if normed else (None, None)
    cache = empty(num_blocks, 2, block_size, kv_heads, dim, dtype=dtype)

    q, k, v = qkv.double().view(tokens, -1, dim).split([heads, kv_heads, kv_heads], 1)
    cos = angles.cos()[positions.long(), None].double()
    sin = angles.sin()[positions.long(), None].double()
    rotated = []
    for part, weight in ((q, weights[0]), (k, weights[1])):
        a, b = _norm_heads(part, weight).chunk(2, -1)
        rotated.append(torch.cat([a * cos - b * sin, b * cos + a * sin], -1))

    def run(count: int) -> tuple[Tensor, Tensor]:
        out, written = qkv.clone(), cache.clone()
        kernels.call(
            f"rope_write_{SUFFIX[dtype]}", out[:count], written, angles.cos(), angles.sin(),
            positions, slots, count, heads, kv_heads, dim, block_size, *weights, eps(),
        )  # fmt: skip
        return out.view(tokens, -1, dim), written

    out, written = run(tokens)
    torch.testing.assert_close(out[:, :heads].double(), rotated[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        out[:, heads : heads + kv_heads].double(), rotated[1], rtol=1e-5, atol=1e-5
    )
    assert torch.equal(out[:, heads + kv_heads :], v.float())
    block, offset = (slots // block_size).long(), (slots % block_size).long()
    assert torch.equal(written[block, 0, offset], out[:, heads : heads + kv_heads].to(dtype))
    assert torch.equal(written[block, 1, offset], v.float().to(dtype))
    assert written.isnan().sum() == cache.numel() - 2 * tokens * kv_heads * dim
    assert torch.equal(run(3)[0][:3], out[:3])


def test_bf16_store_rounds_to_nearest_even_and_keeps_nan(kernels: Kernels) -> None:
    """Truncation, or a NaN that rounds into infinity, would differ from torch's conversion."""
    bits = torch.randint(-(2**31), 2**31, (4096,), dtype=torch.int64).int()
    ties = (torch.arange(2048, dtype=torch.int32) << 16) | 0x8000
    special = torch.tensor([0x7F800000, 0x7F800001, 0x7FFFFFFF, 0x7F7FFFFF, -1, 0, 1, -(2**31)])
    values = torch.cat([bits, ties, special.int()]).view(torch.float32)
    values = values[: len(values) // 8 * 8].contiguous()
    dim = 8
    tokens = len(values) // dim
    qkv = torch.cat([torch.zeros(tokens, 2 * dim), values.view(tokens, dim)], 1)
    cache = torch.zeros(tokens + 1, 2, 1, 1, dim, dtype=torch.bfloat16)
    index = torch.arange(tokens, dtype=torch.int32)
    kernels.call(
        "rope_write_bf16", qkv, cache, torch.ones(tokens, 4), torch.zeros(tokens, 4),
        index, index + 1, tokens, 1, 1, dim, 1, None, None, eps(),
    )  # fmt: skip
    stored, expected = cache[1:, 1].flatten(), values.bfloat16()
    assert torch.equal(stored.isnan(), expected.isnan())
    keep = ~expected.isnan()
    assert torch.equal(stored[keep].view(torch.int16), expected[keep].view(torch.int16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_write_leaves_the_null_block_alone(kernels: Kernels, dtype: torch.dtype) -> None:
    """Padding rows of several threads map to one slot: to store there would be a data race."""
    tokens, dim, block_size = 300, 16, 4
    qkv = torch.randn(tokens, 3 * dim)
    table, positions = torch.rand(tokens, dim // 2), torch.arange(tokens, dtype=torch.int32)

    def run(slots: Tensor) -> tuple[Tensor, Tensor]:
        out, cache = qkv.clone(), empty(80, 2, block_size, 1, dim, dtype=dtype)
        kernels.call(
            f"rope_write_{SUFFIX[dtype]}", out, cache, table, table, positions, slots,
            tokens, 1, 1, dim, block_size, None, None, eps(),
        )  # fmt: skip
        return out, cache

    slots = positions + block_size
    padded = torch.where(positions % 3 == 0, slots, positions % block_size)
    (out, full), (rotated, cache) = run(slots), run(padded)
    assert torch.equal(rotated, out)
    assert cache[0].isnan().all()
    kept = slots[::3].long()
    kept = (kept // block_size, slice(None), kept % block_size)
    assert torch.equal(cache[kept], full[kept])
    assert cache.isfinite().sum() == full[kept].numel()


def _recorded(kernels: Kernels, name: str, arguments: list[int]) -> list[int]:
    """A call of this library's function as its `run_calls` reads it."""
    at = ctypes.cast(getattr(kernels.library, name), ctypes.c_void_p).value
    assert at is not None
    return NativeOp(name, at, len(arguments)).encode(tuple(arguments))


@pytest.mark.parametrize("count", [1, 2])
def test_a_call_without_rows_or_columns_writes_nothing(kernels: Kernels, count: int) -> None:
    """Guards against a division by the number of tiles, and a thread that waits for nobody."""
    x, ids = torch.zeros(64), torch.zeros(64, dtype=torch.int32)
    out, chosen = empty(64), empty(64, dtype=torch.int32)
    calls: list[tuple[str, tuple[Tensor | int | None, ...]]] = []
    for rows, width in ((0, 8), (2, 0)):
        calls += [
            ("rms_norm", (out, x, x, rows, width, eps())),
            ("argmax_rows", (chosen, x, rows, width)),
        ]
        for suffix in SUFFIX.values():
            calls += [
                (f"linear_{suffix}", (out, x, x, None, rows, width, 8, 0)),
                (f"gate_up_{suffix}", (out, x, x, rows, width, 8)),
                (f"embed_{suffix}", (out, x, ids, rows, width)),
                # no token, of 1 head, 1 kv head, 8 dimensions and blocks of 4
                (
                    f"rope_write_{suffix}",
                    (out, out, x, x, ids, ids, 0, 1, 1, 8, 4, None, None, eps()),
                ),
                # no request, then two without a token
                (
                    f"paged_attention_{suffix}",
                    (out, x, x, ids, ids, ids, rows, 1, 1, 1, 8, 4, 0, out, 0),
                ),
            ]
    calls.append(("greedy_verify", (chosen, *[ids] * 6, 0, 8, 4)))
    with threads(count):
        for name, arguments in calls:
            kernels.call(name, *arguments)
        program = [_recorded(kernels, name, words(*arguments)) for name, arguments in calls]
        kernels.call("run_calls", torch.tensor(program), len(program))
    assert out.isnan().all()
    assert (chosen == -1).all()


@pytest.mark.parametrize("vocab", [1, 3, 17, 1000, 49152])
@pytest.mark.parametrize("rows", [1, 2, 7, 16])
def test_argmax_breaks_ties_to_the_lowest_id(kernels: Kernels, rows: int, vocab: int) -> None:
    """bf16 heads tie often: any other choice flips tokens between shapes and threads."""
    logits = torch.randint(0, 6, (rows, vocab)).float()
    lowest = (logits == logits.amax(1, keepdim=True)).int().argmax(1).int()
    for count in (1, 2, 3):
        with threads(count):
            assert torch.equal(kernels.argmax(logits), lowest)


NAN, INF = float("nan"), float("inf")
PLANTED = torch.tensor(
    [
        # 9 logits a row, and the index that both forms must give
        [NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, -5.0, 8],
        [NAN, NAN, NAN, -INF, -INF, -INF, -INF, -INF, -INF, 3],
        [-INF, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, 0],
        [NAN, -INF, -5.0, NAN, -5.0, -INF, NAN, NAN, NAN, 2],
        [NAN, NAN, 1.0, NAN, INF, INF, NAN, NAN, NAN, 4],
        [NAN, NAN, 0.0, NAN, NAN, -0.0, NAN, NAN, NAN, 2],
        [-INF, -INF, -0.0, 0.0, -INF, -INF, -INF, -INF, -INF, 2],
        [-INF, -INF, -INF, -INF, -INF, -INF, -INF, -INF, -INF, 0],
        [NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, 0],
        [1.0, 3.0, 3.0, 2.0, 3.0, 0.0, 0.0, 0.0, 0.0, 1],
    ]
)


@pytest.mark.parametrize("vocab", [9, 49152])
def test_argmax_with_nan_infinities_and_ties(kernels: Kernels, vocab: int) -> None:
    """Both forms: NaN never wins, over -inf either; ties go to the lowest; only NaN gives 0."""
    planted, expected = PLANTED[:, :-1], PLANTED[:, -1].int()
    logits = torch.full((len(planted), vocab), NAN)
    logits[:, -9:] = planted
    expected = torch.where(planted.isnan().all(1), 0, expected + vocab - 9)
    for count in (1, 2, 3):
        with threads(count):
            assert torch.equal(kernels.argmax(logits), expected)
    out = empty(len(planted), dtype=torch.int32)
    torch_ops.argmax(out, logits)
    assert torch.equal(out, expected)
