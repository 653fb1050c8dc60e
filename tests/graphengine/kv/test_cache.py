"""KV storage: what cannot be had is refused in words."""

import pytest
import torch

from graphengine.config import MAX_SLOTS, CacheConfig
from graphengine.kv.cache import allocate, block_bytes, model_layers, resolve_num_blocks
from graphengine.models.loader import open_model
from tests.tiny import make_checkpoint


def test_memory_that_cannot_be_had_is_refused_by_name(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Guards against torch's own message."""
    model = open_model(make_checkpoint(tmp_path_factory.mktemp("model"))).config
    num_blocks = 1 << 40  # beyond any address space
    size = num_blocks * block_bytes(model, torch.float32, 16)
    message = rf"num_blocks={num_blocks} \({size} bytes\) cannot be allocated; lower .*num_blocks"
    sizes = {"num_blocks": num_blocks, "block_size": 16}
    with pytest.raises(ValueError, match=message):
        allocate(model_layers(model), torch.float32, device=torch.device("cpu"), **sizes)


@pytest.mark.parametrize("block_size", [1, 16, 256])
def test_every_slot_has_an_int32_number(
    block_size: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Guards against slots that wrap to negative numbers: writes outside of the cache."""
    most = min(1 << 24, MAX_SLOTS // block_size)
    assert most * block_size <= torch.iinfo(torch.int32).max
    CacheConfig(block_size=block_size, num_blocks=most)
    with pytest.raises(ValueError, match=f"num_blocks={most + 1}: .* from 2 to {most}"):
        CacheConfig(block_size=block_size, num_blocks=most + 1)
    model = open_model(make_checkpoint(tmp_path_factory.mktemp("model"))).config
    cache = CacheConfig(block_size=block_size, max_bytes=1 << 50)
    num_blocks = resolve_num_blocks(
        cache, model, torch.float32, max_num_seqs=4096, max_model_len=1 << 24
    )
    assert MAX_SLOTS - block_size < num_blocks * block_size <= MAX_SLOTS
