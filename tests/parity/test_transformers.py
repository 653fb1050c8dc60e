"""The same greedy tokens as Hugging Face transformers in fp32, for every architecture and rope."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from graphengine.config import CacheConfig, EngineConfig
from graphengine.engine import Engine
from graphengine.models.locate import locate_model
from graphengine.sampling.params import SamplingParams
from graphengine.speculative_config import SpeculativeConfig
from tests.tiny import TinyCase, make_checkpoint, make_gguf, make_model, tiny_matrix

pytestmark = pytest.mark.parity

NUM_TOKENS = 72
PROMPT_LENGTHS = (1, 2, 17, 90)
SERVED = [case for case in tiny_matrix() if not case.overrides.get("mlp_bias")]
PROMPTS_FILE = Path(__file__).parents[2] / "profiles" / "prompts" / "identity.json"


def make_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randint(256, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS
    ]


def generate_theirs(model: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Greedy tokens of transformers, one prompt at a time, so that it pads nothing."""
    model.set_attn_implementation("eager")
    inputs = torch.tensor([list(prompt)])
    with torch.no_grad():
        output = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=False,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
    return output[0, len(prompt) :].tolist()


def generate_ours(
    engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int
) -> list[list[int]]:
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    answers: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            answers[output.request_id] = output.outputs[0].token_ids
    return [answers[str(index)] for index in range(len(prompts))]


def make_engine(checkpoint: Path, **fields: Any) -> Engine:
    config = EngineConfig(
        dtype="float32",
        max_model_len=192,
        max_num_seqs=4,
        cache=CacheConfig(block_size=8),
        **fields,
    )
    return Engine(checkpoint, config)


def check_same(model: Any, engine: Engine) -> None:
    prompts = make_prompts()
    ours = generate_ours(engine, prompts, NUM_TOKENS)
    for prompt, mine in zip(prompts, ours, strict=True):
        theirs = generate_theirs(model, prompt, NUM_TOKENS)
        assert mine == theirs, first_difference(model, prompt, mine, theirs)


def first_difference(model: Any, prompt: list[int], mine: list[int], theirs: list[int]) -> str:
    """Where two answers part, and how near the two best logits of transformers are there."""
    place = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + theirs[:place]])).logits[0, -1].float()
    best = logits.topk(2)
    return (
        f"prompt of {len(prompt)}: token {place} is {mine[place]}, transformers says "
        f"{theirs[place]}; top two {best.indices.tolist()} differ by "
        f"{(best.values[0] - best.values[1]).item():.3g}"
    )


@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
def test_tiny(case: TinyCase, tmp_path: Path) -> None:
    """A wrong rotation, norm, bias, head grouping, window or tie, for plain decoding."""
    engine = make_engine(case.make(tmp_path / "model"))
    check_same(make_model(case.arch, **case.overrides), engine)
    engine.close()


def test_tiny_speculating(tmp_path: Path) -> None:
    """A parity that holds for plain decoding only."""
    speculative = SpeculativeConfig("ngram", max_draft_tokens=3, min_ngram_size=1, adaptive=False)
    engine = make_engine(make_checkpoint(tmp_path / "model"), speculative=speculative)
    check_same(make_model("llama"), engine)
    assert engine.stats().num_accepted_tokens > 0
    engine.close()


def test_mlp_bias_is_refused_by_name(tmp_path: Path) -> None:
    """Guards against serving the one case of the matrix that is not built, with wrong tokens."""
    (case,) = [case for case in tiny_matrix() if case not in SERVED]
    with pytest.raises(ValueError, match="mlp_bias"):
        make_engine(case.make(tmp_path / "model"))


def test_sharded(tmp_path: Path) -> None:
    """A parameter that is taken from the wrong shard."""
    path = make_checkpoint(tmp_path / "model", max_shard_size="60KB")
    assert len(list(path.glob("*.safetensors"))) > 1
    engine = make_engine(path)
    check_same(make_model("llama"), engine)
    engine.close()


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_gguf(arch: str, tmp_path: Path) -> None:
    """Permuted heads, or a config read wrongly, of a GGUF file."""
    path = make_gguf(make_checkpoint(tmp_path / "model", arch), tmp_path / "model.gguf")
    engine = make_engine(path)
    check_same(make_model(arch), engine)
    engine.close()


def check_demo_model(num_prompts: int, num_tokens: int) -> None:
    location = locate_model("smollm2-135m")
    config = EngineConfig(dtype="float32", max_model_len=512, max_num_seqs=4)
    engine = Engine("smollm2-135m", config)
    prompts = load_prompts(engine, num_prompts)
    ours = generate_ours(engine, prompts, num_tokens)
    engine.close()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        location.path.parent, gguf_file=location.path.name, dtype=torch.float32
    ).eval()
    for prompt, mine in zip(prompts, ours, strict=True):
        theirs = generate_theirs(model, prompt, num_tokens)
        assert mine == theirs, first_difference(model, prompt, mine, theirs)


def load_prompts(engine: Engine, num_prompts: int) -> list[list[int]]:
    """Prompts of the frozen list, evenly over its kinds, that leave room to answer."""
    assert engine.tokenizer is not None
    entries = json.loads(PROMPTS_FILE.read_text(encoding="utf-8"))
    encoded = []
    for entry in entries[:: max(1, len(entries) // (2 * num_prompts))]:
        if entry["chat"]:
            messages = [{"role": "user", "content": entry["text"]}]
            prompt = engine.tokenizer.apply_chat_template(messages)
        else:
            prompt = engine.tokenizer.encode(entry["text"])
        if len(prompt) < 400:
            encoded.append(prompt)
    assert len(encoded) >= num_prompts
    return encoded[:num_prompts]


def test_demo_model_on_two_prompts() -> None:
    """The real model, read from its GGUF file, in the default set: a slip that tiny ones miss."""
    check_demo_model(num_prompts=2, num_tokens=16)


@pytest.mark.slow
def test_demo_model() -> None:
    """The real model on twenty real prompts."""
    check_demo_model(num_prompts=20, num_tokens=32)
