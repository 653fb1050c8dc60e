"""Peer: another engine in a process of its own, spoken to by one JSON object a line each way.

Owns the subprocess: where it is found, how it starts and ends, and what it has used. The scripts
that it runs (`peer_*.py`) import nothing of this project, so that each engine is as its users have
it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from graphengine.bench.measure import Answer
from graphengine.decode_timer import DecodeTimer

SCRIPTS: Final = MappingProxyType(
    {
        "transformers": "peer_transformers.py",
        "vllm": "peer_vllm.py",
        "llama.cpp": "peer_llama_cpp.py",
    }
)


@dataclass(frozen=True, slots=True)
class PeerPlace:
    """Which peer, and where it is installed.

    Attributes:
        path: the Python of its environment (llama.cpp: the folder of its binaries); None: this
            Python (PATH).
    """

    name: str
    path: Path | None = None

    @classmethod
    def parse(cls, text: str) -> PeerPlace:
        """`NAME` or `NAME=PATH`.

        Raises:
            ValueError: an unknown peer, or a path that is not there.
        """
        name, equals, path = text.partition("=")
        if name not in SCRIPTS:
            raise ValueError(f"--against {text}: allowed are {', '.join(SCRIPTS)}, each with =PATH")
        if equals and not (path and Path(path).exists()):
            raise ValueError(f"--against {text}: there is no file or folder {path!r}")
        return cls(name, Path(path) if equals else None)

    def command(self, options: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
        """Command line and environment."""
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
        python = sys.executable
        if self.path is not None and self.name == "llama.cpp":
            environment["LLAMA_CPP"] = str(self.path)
        elif self.path is not None:
            python = str(self.path)
        script = Path(__file__).with_name(SCRIPTS[self.name])
        # -P: the script's own folder must not shadow what it imports.
        return [python, "-P", str(script), json.dumps(options)], environment


class Peer:
    """A running peer process. Use as `with Peer.start(...) as peer`.

    Attributes:
        description: `version`, `what` exactly is run, `pid`, `threads`.
        start_seconds: until it could take a request.
    """

    def __init__(self, name: str, k: int, process: subprocess.Popen[str]) -> None:
        self.name, self.k = name, k
        self._process = process
        begin = time.perf_counter()
        self.description: dict[str, Any] = self._read()
        self.start_seconds = time.perf_counter() - begin

    @classmethod
    @contextmanager
    def start(
        cls, place: PeerPlace, model: Path, *, k: int, dtype: str, threads: int, max_num_seqs: int
    ) -> Iterator[Peer]:
        """Load the model in the peer.

        Args:
            model: a checkpoint of the form that the peer reads.
            k: most drafts of a step, looked up in the text; 0: plain decoding.

        Raises:
            ValueError: the peer cannot start; the message is its own.
        """
        command, environment = place.command(
            {
                "model": str(model),
                "dtype": dtype,
                "threads": threads,
                "k": k,
                "max_num_seqs": max_num_seqs,
            }
        )
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            encoding="utf-8",
        )
        try:
            yield cls(place.name, k, process)
        finally:
            assert process.stdin is not None
            assert process.stdout is not None
            with suppress(BrokenPipeError):  # it ended before it read everything
                process.stdin.close()
            process.stdout.close()
            process.terminate()
            process.wait()

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Answer:
        """Greedy continuations of exactly `num_tokens` tokens.

        Raises:
            ValueError: the peer process has ended, or cannot do this.
        """
        request = {"prompts": [list(prompt) for prompt in prompts], "num_tokens": num_tokens}
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, which is what reading says
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        timer = DecodeTimer(len(prompts))
        token_ids: list[list[int]] = [[] for _ in prompts]
        for now, deliveries in groupby(self._read()["deliveries"], key=lambda one: float(one[0])):
            counts: dict[str, int] = {}
            for _, index, tokens in deliveries:
                token_ids[index] += tokens
                counts[str(index)] = counts.get(str(index), 0) + len(tokens)
            timer.add_counts(counts, now)
        return Answer.of(token_ids, timer)

    @property
    def peak_bytes(self) -> int:
        """Most resident memory so far; 0 where the system does not tell."""
        with suppress(OSError):
            for line in Path(f"/proc/{self.description['pid']}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        return 0

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
