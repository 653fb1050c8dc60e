"""The reference backend against torch's own attention under the chain mask, written out."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from graphengine.attention.reference import chain_mask
from tests.graphengine.kernels.calls import Context, Kernels, reference_attention

BLOCK = 4


def written_out(pasts: list[int], k: int, window: int) -> Tensor:
    """The mask [batch, 1, k + 1, past + k + 1] entry by entry; `past` is the longest one."""
    mask = torch.zeros(len(pasts), 1, k + 1, max(pasts) + k + 1, dtype=torch.bool)
    for request, past in enumerate(pasts):
        for row in range(k + 1):  # the last known token, then the drafts
            for column in range(past + k + 1):
                history, itself_or_before = column < past, column - past <= row
                inside = window == 0 or past + row - column < window
                mask[request, 0, row, column] = (history or itself_or_before) and inside
    return mask


@pytest.mark.parametrize("window", [0, 1, 6])
@pytest.mark.parametrize("k", [0, 1, 6])
def test_the_chain_mask_is_history_and_the_drafts_before(k: int, window: int) -> None:
    """Guards against a draft that sees a later one, or a row without all of its history."""
    pasts = [0, 3, 17]
    positions = torch.tensor(pasts)[:, None] + torch.arange(k + 1)
    mask = chain_mask(positions, max(pasts) + k + 1, window or None)
    assert torch.equal(mask, written_out(pasts, k, window))


@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (5, 1)])
@pytest.mark.parametrize("k", [0, 3, 6])
def test_a_verify_step_is_torchs_attention_under_the_mask(
    native: Kernels, k: int, heads: int, kv_heads: int, window: int
) -> None:
    """Guards reference and kernel alike: pages, heads, scale and mask, against code not ours."""
    pasts, dim = [9, 130, 0, 64], 16
    longest, batch = max(pasts) + k + 1, len(pasts)
    kv = torch.randn(batch, longest, 2, kv_heads, dim)
    blocks = -(-longest // BLOCK)
    cache = torch.full((batch * blocks + 1, 2, BLOCK, kv_heads, dim), float("nan"))
    table = (torch.randperm(batch * blocks) + 1).view(batch, blocks).int()
    for request, past in enumerate(pasts):
        at = torch.arange(past + k + 1)  # what lies behind stays NaN
        cache[table[request, at // BLOCK].long(), :, at % BLOCK] = kv[request, at]
    qkv = torch.randn(batch, k + 1, heads + 2 * kv_heads, dim)
    context = Context(
        qkv=qkv.flatten(2).flatten(0, 1),
        cache=cache,
        block_table=table,
        query_start_loc=torch.arange(batch + 1, dtype=torch.int32) * (k + 1),
        positions=(torch.tensor(pasts)[:, None] + torch.arange(k + 1)).flatten().int(),
        num_heads=heads,
        window=window,
    )
    q, keys, values = (
        part.transpose(1, 2).double() for part in (qkv[:, :, :heads], kv[:, :, 0], kv[:, :, 1])
    )
    expected = F.scaled_dot_product_attention(
        q, keys, values, attn_mask=written_out(pasts, k, window), enable_gqa=True
    )
    expected = expected.transpose(1, 2).reshape(batch * (k + 1), -1)
    torch.testing.assert_close(reference_attention(context), expected)
    torch.testing.assert_close(native.attention(context).double(), expected, rtol=1e-5, atol=2e-6)
