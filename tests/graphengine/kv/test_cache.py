"""KV storage: what cannot be had is refused in words."""

import pytest
import torch

from graphengine.kv.cache import allocate, block_bytes, check_memory
from graphengine.models.loader import open_model
from tests.tiny import make_checkpoint


def test_memory_that_cannot_be_had_is_refused_by_name(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Guards against torch's own message, and against a process killed when it fills its cache."""
    model = open_model(make_checkpoint(tmp_path_factory.mktemp("model"))).config
    num_blocks = 1 << 40  # beyond any address space
    size = num_blocks * block_bytes(model, torch.float32, 16)
    message = rf"num_blocks={num_blocks} \({size} bytes\) cannot be allocated; lower .*num_blocks"
    sizes = {"num_blocks": num_blocks, "block_size": 16}
    with pytest.raises(ValueError, match=message):
        check_memory(model, torch.float32, **sizes)
    with pytest.raises(ValueError, match=message):
        allocate(model, torch.float32, device=torch.device("cpu"), **sizes)
    check_memory(model, torch.float32, num_blocks=16, block_size=16)
