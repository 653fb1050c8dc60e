"""The peer: another engine in a process of its own, taking turns with ours over the same token ids.

Owns the subprocess and its protocol (one JSON object a line each way) and the rounds. Speculation
is off on our side: this compares plain decoding.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphengine.bench.measure import run_batch
from graphengine.engine import Engine
from graphengine.models.locate import locate_model
from graphengine.sampling.params import SamplingParams

_SCRIPT = Path(__file__).with_name("peer_transformers.py")
PEERS = ("transformers",)
SETTLE_SECONDS = 0.3  # between turns, so that no thread of the other side is still spinning


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerRound:
    """One turn of each side; decode tokens a second, first tokens excluded on both."""

    peer: str
    batch_size: int
    round: int
    peer_rate: float
    own_rate: float
    num_agreeing: int  # leading tokens that are the same on both sides, summed over requests
    num_tokens: int

    @property
    def ratio(self) -> float:
        return self.own_rate / self.peer_rate


class Peer:
    """A running peer process. Use as `with Peer.start(...) as peer`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.description: dict[str, Any] = self._read()

    @classmethod
    @contextmanager
    def start(cls, name: str, model: str, *, dtype: str, num_threads: int) -> Iterator[Peer]:
        """Load the model in the peer.

        Raises:
            ValueError: an unknown peer, or the peer cannot start; the message is its own.
        """
        if name not in PEERS:
            raise ValueError(f"--against {name}: allowed are {', '.join(PEERS)}")
        location = locate_model(model)
        # -P: the script's own folder must not shadow what it imports.
        command = [sys.executable, "-P", str(_SCRIPT), str(location.path), dtype, str(num_threads)]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"},
            encoding="utf-8",
        )
        try:
            yield cls(process)
        finally:
            assert process.stdin is not None
            assert process.stdout is not None
            with suppress(BrokenPipeError):  # it ended before it read everything
                process.stdin.close()
            process.stdout.close()
            process.terminate()
            process.wait()

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> dict[str, Any]:
        """Greedy continuations of exactly `num_tokens` tokens.

        Returns:
            `token_ids` [num_reqs, num_tokens] and `decode_seconds`, from the end of the first step
            to the end of the last.

        Raises:
            ValueError: the peer process has ended.
        """
        request = {"prompts": [list(prompt) for prompt in prompts], "num_tokens": num_tokens}
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, which is what reading says
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise ValueError(f"the peer process ended (exit {code}); its messages are above")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ValueError(f"peer: {answer['error']}")
        return answer


def run_rounds(
    engine: Engine,
    peer: Peer,
    batches: Sequence[Sequence[Sequence[int]]],
    *,
    rounds: int,
    num_tokens: int,
    progress: Callable[[PeerRound], None] = lambda one: None,
) -> list[PeerRound]:
    """Let both sides decode every batch in turns; who goes first alternates by round.

    Args:
        engine: ours, idle; its speculation is off meanwhile.
        batches: prompts as token ids.
        rounds: timed rounds; one more goes before, untimed.
        num_tokens: tokens of every answer; ends of text are ignored on both sides.
        progress: called after each timed turn of both sides.
    """
    limit, engine.draft_limit = engine.draft_limit, 0
    results = []
    for round_number in range(-1, rounds):
        for batch in batches:
            one = _round(engine, peer, batch, round_number, num_tokens)
            if round_number >= 0:
                results.append(one)
                progress(one)
    engine.draft_limit = limit
    return results


def _round(
    engine: Engine,
    peer: Peer,
    batch: Sequence[Sequence[int]],
    round_number: int,
    num_tokens: int,
) -> PeerRound:
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    theirs: dict[str, Any] = {}
    for side in ("peer", "own") if round_number % 2 else ("own", "peer"):
        time.sleep(SETTLE_SECONDS)
        if side == "peer":
            theirs = peer.generate(batch, num_tokens)
        else:
            ours = run_batch(engine, batch, params)
    agreeing = sum(map(_common_prefix, theirs["token_ids"], ours.token_ids))
    return PeerRound(
        peer=str(peer.description["name"]),
        batch_size=len(batch),
        round=round_number,
        peer_rate=len(batch) * (num_tokens - 1) / theirs["decode_seconds"],
        own_rate=ours.rate,
        num_agreeing=agreeing,
        num_tokens=ours.num_tokens,
    )


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    count = 0
    for left, right in zip(a, b, strict=False):
        if left != right:
            break
        count += 1
    return count
