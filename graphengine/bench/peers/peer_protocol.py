"""What every peer process speaks: one JSON object a line each way.

Imported by the `peer_*.py` scripts, which run in environments of their own and import nothing of
this project. Argument: the options as JSON. Answers: a description once ready, then for every
request its deliveries, (seconds since the request, index of the prompt, tokens), in the order in
which they came.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Delivery = tuple[float, int, list[int]]
Prompts = Sequence[Sequence[int]]
Generate = Callable[[Prompts, int], Iterator[Delivery]]


class Refusal(Exception):
    """Why this peer cannot do what it is asked; the message is for the user."""


def serve(start: Callable[[dict[str, Any]], tuple[dict[str, Any], Generate]]) -> None:
    """Run a peer until its standard input ends.

    Args:
        start: takes the options `model`, `dtype`, `threads`, `k` (0: no drafts) and `max_num_seqs`;
            gives what describes the peer, and what generates exactly so many tokens for prompts.
    """
    answers = sys.stdout
    sys.stdout = sys.stderr  # whatever the libraries print must not get between the answers

    def answer(content: dict[str, Any]) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        try:
            description, generate = start(json.loads(sys.argv[1]))
        except Refusal as refusal:
            answer({"error": str(refusal)})
            return
        answer(description)
        for line in sys.stdin:
            request = json.loads(line)
            try:
                deliveries = list(generate(request["prompts"], request["num_tokens"]))
            except Refusal as refusal:
                answer({"error": str(refusal)})
                return
            answer({"deliveries": deliveries})
