"""What a target's tokens must be distributed as, counts of what came, and their tests.

Owns the tables that a distribution is tested by: after a prompt and each likely beginning of an
answer, the probabilities of the next token. They are the model's own logits, from an engine without
speculation, and processors as plain loops (`graphengine/sampling/reference.py`), so nothing of the
fast sampler is in them. Knows nothing of drafts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from graphengine.bench.distributions import chi_square_p, total_variation
from graphengine.config import EngineConfig
from graphengine.engine import Engine
from graphengine.sampling.params import SamplingParams
from graphengine.sampling.reference import RowSettings, process

LEAST_COUNT = 5  # expected, of a category; rarer ones are pooled
LEAST_VISITS = 400  # expected, of a beginning whose next token is looked at
SMALL_VOCAB = 64  # up to here every token is counted on its own

FloatArray = npt.NDArray[np.float64]


class Target:
    """A model's next token, asked without speculation, one history at a time."""

    def __init__(self, model: str | Path, max_model_len: int) -> None:
        config = EngineConfig(max_model_len=max_model_len, max_num_seqs=1, speculative="off")
        self._engine = Engine(model, config)
        self._known: dict[tuple[int, ...], FloatArray] = {}

    def logits(self, history: Iterable[int]) -> FloatArray:
        """Logits [vocab] of what follows a history; read only."""
        key = tuple(map(int, history))
        if key not in self._known:
            runner = self._engine.runner
            self._engine.add_request("a", key, SamplingParams(max_tokens=1))
            while self._engine.has_unfinished_requests():
                self._engine.step()
            cell = runner.manager.dispatch(1, 0, "greedy")
            self._known[key] = runner.last_logits(cell)[0, 0].double().numpy().copy()
        return self._known[key]

    def probs(
        self, prompt: Sequence[int], output: Sequence[int], params: SamplingParams
    ) -> FloatArray:
        """Probabilities [vocab] of what follows, with temperature, top-p and allowed tokens."""
        settings = RowSettings(
            temperature=params.temperature, top_p=params.top_p, allowed=params.allowed_token_ids
        )
        logits = self.logits([*prompt, *output]).tolist()
        weights = np.exp(process(logits, settings, prompt, output))
        found: FloatArray = weights / weights.sum()
        return found

    def encode(self, text: str) -> list[int]:
        assert self._engine.tokenizer is not None, "a model with a tokenizer"
        return self._engine.tokenizer.encode(text)

    def close(self) -> None:
        self._engine.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """What may follow one beginning of an answer, and what did. Ready for JSON."""

    beginning: list[int]
    probability: float  # of the beginning
    # tokens with a category of their own; None: every token
    ids: list[int] | None
    # of each of them, and of all others together
    probs: list[float]
    counts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts.extend([0] * len(self.probs))

    def place(self, token: int) -> int:
        """Which category a token is in."""
        if self.ids is None:
            return token
        return self.ids.index(token) if token in self.ids else len(self.ids)


def make_tables(
    target: Target, prompt: Sequence[int], params: SamplingParams, num_requests: int
) -> list[Table]:
    """Tables of the empty beginning and of all that `num_requests` should visit often enough.

    Chosen by what is expected, not by what came: before the first token is drawn.
    """
    tables: list[Table] = []
    waiting: list[tuple[list[int], float]] = [([], 1.0)]
    while waiting:
        beginning, probability = waiting.pop(0)
        probs = target.probs(prompt, beginning, params)
        expected = num_requests * probability * probs
        ids = None
        if len(probs) > SMALL_VOCAB:
            ids = np.flatnonzero(expected >= LEAST_COUNT).tolist()
        own = probs if ids is None else probs[ids]
        rest = 0.0 if ids is None else max(0.0, 1 - own.sum())
        tables.append(
            Table(
                beginning=beginning,
                probability=_short(probability),
                ids=ids,
                probs=[*map(_short, own), _short(rest)],
            )
        )
        assert params.max_tokens is not None, "answers of one length"
        if len(beginning) + 1 < params.max_tokens:
            waiting += [
                ([*beginning, int(token)], probability * probs[token])
                for token in np.flatnonzero(expected >= LEAST_VISITS)
            ]
    return tables


def count_stream(tables: Sequence[Table], stream: Sequence[int]) -> None:
    """Add one answer to the tables of its beginnings."""
    known = {tuple(table.beginning): table for table in tables}
    for depth, token in enumerate(stream):
        table = known.get(tuple(stream[:depth]))
        if table is None:
            return
        table.counts[table.place(token)] += 1


def run_tests(tables: Sequence[Table]) -> list[dict[str, Any]]:
    """One test of the first token, one of the first two, and one after each longer beginning."""
    found = [_test("first", tables[0].counts, tables[0].probs)]
    seconds = [table for table in tables if len(table.beginning) == 1]
    if seconds:
        counts = [count for table in seconds for count in table.counts]
        probs = [table.probability * prob for table in seconds for prob in table.probs]
        counts.append(sum(tables[0].counts) - sum(counts))  # whatever else came first
        probs.append(max(0.0, _short(1 - sum(table.probability for table in seconds))))
        found.append(_test("first two", counts, probs))
    for table in tables:
        if len(table.beginning) > 1:
            name = "after " + " ".join(map(str, table.beginning))
            found.append(_test(name, table.counts, table.probs))
    return found


def _test(name: str, counts: Sequence[int], probs: Sequence[float]) -> dict[str, Any]:
    """p, and total variation beside what as many draws by the very law would show on average."""
    total, law = sum(counts), np.array(probs) / sum(probs)
    noise = math.sqrt(2 / math.pi) * np.sqrt(law * (1 - law) / max(1, total)).sum() / 2
    return {
        "test": name,
        "num": total,
        "p": chi_square_p(counts, probs, LEAST_COUNT) if total else 1.0,
        "tv": _short(total_variation(counts, probs)) if total else 0.0,
        "tv_of_noise": _short(noise),
    }


def _short(value: float) -> float:
    """Six digits: what the tests use is what the results file has."""
    return float(f"{value:.6g}")
