"""Random cases: a model, an engine, a proposer and a schedule of requests, all from one number.

Knows how to draw; running and comparing is in `random_runs.py`. The truth of a case is plain
decoding of its requests, one at a time.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from graphengine.engine import Engine
from graphengine.request import answer_id
from graphengine.sampling.params import SamplingParams
from profiles.random_params import Favour, random_params
from profiles.tiny_drafts import write_draft
from proposers.base import Proposer
from proposers.device import ModelProposer
from proposers.mock import Records
from proposers.ngram import NgramProposer
from proposers.suffix import SuffixProposer
from tests.graphengine.engine.harness import Harness
from tests.graphengine.engine.setups import Setup, scripted
from tests.parity.hostile import HostileModelProposer, HostileProposer
from tests.parity.random_policy import decide_at_random
from tests.tiny import ROPES, make_checkpoint

HEADS = ((4, 2, 16), (6, 2, 24), (4, 1, 40), (8, 1, 8), (3, 3, 8), (2, 2, 64), (1, 1, 32))
PROPOSERS = ("ngram", "suffix", "oracle", "junk", "exactly", "ragged", "ragged", "empty")
NUM_MODELS = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """One request and its fate."""

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    salt: str | None
    arrives: int
    aborts: int | None


@dataclass
class Case:
    """Everything of one run; attributes are drawn on first use, in a fixed order."""

    seed: int
    root: Path
    kinds: dict[str, Any] = field(default_factory=dict)  # fields of Setup that are not drawn

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.setup}, {self.threads} threads, {self.checkpoint[0].name}"

    @cached_property
    def draw(self) -> random.Random:
        return random.Random(self.seed)

    @cached_property
    def number(self) -> int:
        """Of the model."""
        return self.draw.randrange(NUM_MODELS)

    @cached_property
    def checkpoint(self) -> tuple[Path, int]:
        """Directory and vocabulary size."""
        return random_checkpoint(self.root, self.number)

    @property
    def has_plain_layers(self) -> bool:
        """Whether a layer of the model has no more than the common parameters."""
        config = json.loads((self.checkpoint[0] / "config.json").read_text())
        return config["model_type"] in ("llama", "mistral") and not config.get("attention_bias")

    @cached_property
    def setup(self) -> Setup:
        draw = self.draw
        max_model_len = draw.choice((16, 40, 64, 150))
        block_size = draw.choice((1, 2, 3, 4, 8, 16, 64, 200))
        per_context = -(-(max_model_len - 1) // block_size)
        max_num_seqs = draw.choice((1, 2, 3, 4, 6, 9, 12))
        k = draw.choice((1, 1, 2, 3, 4, 6, 9))
        chunked = draw.random() < 0.7
        tight = per_context + 1 + draw.randint(0, per_context // 2 + 2)
        budget = max(max_num_seqs, k + 1, draw.randint(4, 60))
        lengths = tuple(draw.randint(0, k) for _ in range(draw.randint(1, 3)))
        reqs = tuple(draw.randint(1, max_num_seqs) for _ in range(draw.randint(1, 3)))
        graph = draw.choice(("tape", "tape", "compiled", "eager"))
        setup = Setup(
            k=k,
            dtype=draw.choice(("float32", "bfloat16")),
            graph=graph,
            compile="off" if draw.random() < 0.15 else "native",
            block_size=block_size,
            num_blocks=tight if draw.random() < 0.7 else None,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            budget=budget if chunked and draw.random() < 0.8 else None,
            chunked=chunked,
            prefix=draw.random() < 0.6,
            debug=draw.random() < 0.3,
            numerics=draw.choice(("invariant", "fast", "fast")),
            draft_lengths=lengths if draw.random() < 0.6 else None,
            num_reqs=reqs if draw.random() < 0.6 else None,
            lazy=draw.random() < 0.3,
            logits_processors=draw.random() < 0.25,
            verification=draw.choice(("exact", "exact", "exact", "rejection")),
        )
        return replace(setup, **self.kinds)

    @cached_property
    def threads(self) -> int:
        return self.draw.choice((1, 1, 2, 3))

    @cached_property
    def wishes(self) -> list[Wish]:
        draw, (_, vocab_size), longest = self.draw, self.checkpoint, self.setup.max_model_len - 1
        pattern = [draw.randrange(vocab_size) for _ in range(draw.randint(1, 9))]
        pattern = (pattern * longest)[:longest]
        wishes, now = [], 0
        for index in range(draw.randint(2, 12)):
            length = draw.choice(
                (1, 2, longest, draw.randint(1, longest), *[draw.randint(1, 20)] * 3)
            )
            length = min(length, longest)
            shared = draw.randint(0, length) if draw.random() < 0.5 else 0
            tail = tuple(draw.randrange(vocab_size) for _ in range(length - shared))
            now += draw.choice((0, 0, 0, 1, 3))
            wishes.append(
                Wish(
                    request_id=f"r{index}",
                    prompt=tuple(pattern[:shared]) + tail,
                    params=self._params(vocab_size),
                    salt=draw.choice((None, None, "a", "b")),
                    arrives=now,
                    aborts=now + draw.randrange(15) if draw.random() < 0.15 else None,
                )
            )
        return wishes

    def _params(self, vocab_size: int) -> SamplingParams:
        params = random_params(self.draw, vocab_size)
        if not self.setup.logits_processors or self.draw.random() < 0.7:
            return params
        return replace(params, logits_processors=(Favour(4.0), Favour(-2.0)))

    @cached_property
    def truth(self) -> Harness:
        """Plain decoding, one request at a time, roomy, uncut: streams and logits."""
        setup = replace(
            self.setup, k=0, graph="tape", max_num_seqs=2, num_blocks=None, budget=None, lazy=False
        )
        setup = replace(setup, prefix=False, draft_lengths=None, num_reqs=None, block_size=16)
        harness = Harness(setup.start(self.checkpoint[0]), keep_logits=True)
        for wish in self.wishes:
            harness.add(wish.request_id, wish.prompt, wish.params)
            harness.drain()
        harness.engine.close()
        return harness

    @cached_property
    def model_options(self) -> dict[str, Any]:
        """A proposer that carries a model, and how it drafts; empty: a scripted one."""
        draw, rejects = self.draw, self.setup.verification == "rejection"
        if draw.random() < 0.6:
            return {}
        method, make = draw.choice(DRAFTS)
        if method == "mtp" and not self.has_plain_layers:
            return {}
        drawn = ("greedy", "probabilistic") if rejects else ("greedy", "coupled")
        options = {
            "method": method,
            "model": str(make(self)),
            "draft_sampling": draw.choice(drawn),
            "self_check": "off",
        }
        override, min_match = draw.choice((None, None, "ngram", "suffix")), draw.randint(1, 5)
        if override is not None:
            options |= {"override": override, "override_min_match": min_match}
        return options

    def start(self) -> tuple[Engine, HostileProposer]:
        """The engine of the case, and what drafts in it, as long as some policy says."""
        adaptive = self.draw.choice((True, True, "threshold", {1: self.setup.k, 3: 1, 5: 0}))
        if not self.model_options:
            proposer = self.proposer()
            engine = self.setup.start(self.checkpoint[0], proposer, adaptive=adaptive)
            self._choose_policy(engine)
            return engine, proposer
        engine = self.setup.start(self.checkpoint[0], **self.model_options, adaptive=adaptive)
        self._choose_policy(engine)
        assert isinstance(engine.proposer, ModelProposer)
        share = self.draw.choice((0.0, 0.0, 0.1, 0.3))
        hostile = HostileModelProposer(
            engine.proposer, vocab_size=self.checkpoint[1], seed=self.seed, share=share
        )
        engine.proposer = hostile
        return engine, hostile

    def _choose_policy(self, engine: Engine) -> None:
        """Half of the time one that decides by dice."""
        if self.draw.random() < 0.5:
            decide_at_random(engine, self.seed)

    def proposer(self) -> HostileProposer:
        draw, vocab_size = self.draw, self.checkpoint[1]
        is_exact = self.setup.verification == "exact"
        records: Records = {
            answer_id(wish.request_id, choice): [*wish.prompt, *stream]
            for wish in self.wishes
            for choice, stream in enumerate(self.truth.streams(wish.request_id))
            if is_exact or not wish.params.temperature  # what is drawn anew leaves any recording
        }
        names = PROPOSERS if is_exact else ("ngram", "suffix", "junk", "ragged", "empty")
        name, share = draw.choice(names), draw.choice((0.0, 0.0, 0.1, 0.3))
        inner: Proposer
        if name == "ngram":
            low = draw.randint(1, 4)
            high = draw.randint(low, 6)
            inner = NgramProposer(
                min_ngram_size=low, max_ngram_size=high, limit_by_match=draw.random() < 0.5
            )
        elif name == "suffix":
            low = draw.randint(1, 3)
            inner = SuffixProposer(
                min_match_length=low,
                max_match_length=draw.randint(low, 9),
                draft_factor=draw.choice((0, 1, 2.0, 9.5)),
                min_probability=draw.choice((0, 0.1, 0.4)),
                shared_tree_tokens=draw.choice((0, 15, 50_000)),
            )
        else:
            accept = draw.randint(0, self.setup.k)
            inner = scripted(name, records, accept=accept, seed=self.seed, vocab_size=vocab_size)
        return HostileProposer(inner, vocab_size=vocab_size, seed=self.seed, share=share)


def random_checkpoint(root: Path, number: int, *, other: bool = False) -> tuple[Path, int]:
    """One of `NUM_MODELS` models, made on first use, and its vocabulary size.

    Args:
        other: a smaller one of the same vocabulary instead.
    """
    draw = random.Random(number)
    arch = ("llama", "mistral", "qwen2", "qwen3")[number % 4]
    heads, kv_heads, head_dim = draw.choice(HEADS)
    vocab_size = draw.choice((7, 33, 100, 264))
    directory = root / f"random-{number}"
    fields: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": heads * draw.choice((6, 9, 16, 20)),
        "intermediate_size": draw.choice((20, 50, 96)),
        "num_hidden_layers": draw.randint(1, 3),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "tie_word_embeddings": draw.random() < 0.4,
        "rope_parameters": draw.choice(list(ROPES.values())),
        "bos_token_id": 0,
        "eos_token_id": draw.randrange(vocab_size),
    }
    if arch == "mistral" and draw.random() < 0.7:
        fields["sliding_window"] = draw.choice((1, 5, 24, 70))
    if arch in ("llama", "qwen3"):
        fields["attention_bias"] = draw.random() < 0.5
    seed = number
    if other:
        directory, seed = root / f"random-{number}-other", NUM_MODELS + number
        fields["num_hidden_layers"] = 1
    if not directory.exists():
        make_checkpoint(directory, arch, seed=seed, tokenizer=False, **fields)
    return directory, vocab_size


# Name of a proposer that carries a model, and what makes its checkpoint for a case.
DRAFTS: tuple[tuple[str, Callable[[Case], Path]], ...] = (
    ("draft_model", lambda case: case.checkpoint[0]),
    ("draft_model", lambda case: random_checkpoint(case.root, case.number, other=True)[0]),
    ("eagle", lambda case: random_head(case, "eagle")),
    ("mtp", lambda case: random_head(case, "mtp")),
)


def random_head(case: Case, kind: str) -> Path:
    """A head for the case's target."""
    target = case.checkpoint[0]
    folder = target.with_name(f"{target.name}-{kind}")
    if not folder.exists():
        folder.mkdir()
        write_draft(kind, folder, target)
    return folder
