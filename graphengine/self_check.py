"""Self-check: whether a draft model that has been loaded knows the target it drafts for.

Lets the target write a short greedy text and asks the proposer, teacher-forced, for the first draft
at every place of it. A head with a norm in the wrong place, swapped inputs or another target's
weights runs without an error and accepts next to nothing: that is said at start, not found in a
bill. Bounded in seconds; leaves no trace in cache or counters.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from graphengine.request import Request
from graphengine.sampling.params import SamplingParams
from graphengine.scheduler import PrefillChunk
from proposers.device import ModelProposer

if TYPE_CHECKING:
    from graphengine.engine import Engine

logger = logging.getLogger(__name__)

TEXT: Final = "The history of the city began when"
NUM_TOKENS: Final = 64
MAX_SECONDS: Final = 20.0  # of writing the text, and as many again of looking for a reason
LEAST_TOKENS: Final = 16  # shorter texts show nothing
# What a draft that knows nothing may accept: by luck, and by always guessing what a text repeats.
LUCK: Final = 0.05
MOST_CHANCE: Final = 0.15
_REQUEST_ID: Final = "self-check"


@dataclass(frozen=True, slots=True)
class Acceptance:
    """First drafts that were right, and what always drafting the commonest token would have got."""

    num_places: int
    share: float
    chance: float
    diagnosis: str = ""  # where it is near chance: what to suspect

    @property
    def is_near_chance(self) -> bool:
        return self.num_places >= LEAST_TOKENS and self.share <= self.chance

    def __str__(self) -> str:
        return (
            f"{self.share:.1%} of {self.num_places} first drafts of a greedy text are the target's "
            f"tokens (near chance up to {self.chance:.1%})"
        )


def check_drafts(engine: Engine) -> None:
    """Check the drafts of an engine that has just started, as its configuration says.

    Raises:
        ValueError: `self_check="error"`, and the drafts are near chance.
    """
    speculative, proposer = engine.resolved.speculative, engine.proposer
    if speculative is None or not isinstance(proposer, ModelProposer):
        return
    if speculative.self_check == "off":
        return
    with engine.start_times.phase("self-check"):
        found = measure(engine, proposer)
    logger.info("self-check of %s: %s", proposer.name, found)
    if not found.is_near_chance:
        return
    message = (
        f"self_check: proposer {proposer.name!r} with model {speculative.model!r}: {found}; "
        f"{found.diagnosis}; self_check='warn' or 'off' drafts with it all the same"
    )
    if speculative.self_check == "error":
        raise ValueError(message)
    logger.warning(message)


def measure(engine: Engine, proposer: ModelProposer) -> Acceptance:
    """Let the target write, and compare."""
    limit, engine.draft_limit = engine.draft_limit, 0
    text = engine.tokenizer.encode(TEXT) if engine.tokenizer is not None else []
    prompt = [token for token in text if token < engine.resolved.model.vocab_size] or [0]
    held = engine.kv.pool.num_usable * engine.kv.block_size  # a pool may be less than a context
    longest = min(engine.resolved.sizes.max_model_len, held)
    if longest < LEAST_TOKENS:
        engine.draft_limit = limit
        return Acceptance(0, 1.0, 0.0)
    room = longest - len(prompt) - 1
    if room < LEAST_TOKENS:
        prompt, room = prompt[:1], longest - 2
    num_tokens = min(NUM_TOKENS, room) + 1
    # With a seed of its own, so that it draws none from the engine's series.
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=0)
    deadline = time.monotonic() + MAX_SECONDS
    engine.add_request(_REQUEST_ID, prompt, params)
    request = engine.delivery.streams[_REQUEST_ID].request
    try:
        # One token short of the end, with which the rows would be given back.
        while request.limit - request.num_tokens > 1 and time.monotonic() < deadline:
            engine.step()
        found = judge(engine, proposer, request)
        if found.is_near_chance:
            diagnosis = diagnose(engine, proposer, request, deadline + MAX_SECONDS)
            found = replace(found, diagnosis=diagnosis)
    finally:
        engine.abort(_REQUEST_ID)
        engine.draft_limit = limit
        engine.start_afresh()
    return found


def judge(engine: Engine, proposer: ModelProposer, request: Request) -> Acceptance:
    """Compare the first drafts along a text that the target is writing with what it wrote."""
    row, history = engine.state.row_of(request), engine.state.history(request)
    drafts = proposer.first_drafts(history, engine.state.block_table[row])
    first = request.num_prompt_tokens - 1
    places = [(drafts[i], history[i + 1]) for i in range(first, len(history) - 1) if drafts[i] >= 0]
    if not places:
        return Acceptance(0, 1.0, 0.0)
    commonest = Counter(int(token) for _, token in places).most_common(1)[0][1]
    share = sum(int(draft) == int(token) for draft, token in places) / len(places)
    return Acceptance(len(places), share, min(max(LUCK, commonest / len(places)), MOST_CHANCE))


def diagnose(engine: Engine, proposer: ModelProposer, request: Request, deadline: float) -> str:
    """What to suspect: the other reading of the checkpoint that fits best, if one does.

    Readings that there is no time for until `deadline` are not tried.
    """
    shares: dict[str, Acceptance] = {}
    readings = proposer.variants()
    while time.monotonic() < deadline and (reading := next(readings, None)) is not None:
        shares[reading[0]] = judge(engine, reading[1], request)
        del reading  # its weights go before the next ones are read
    for step in (-1, 1) if time.monotonic() < deadline else ():
        with _shifted_taps(engine, request, step) as is_possible:
            if is_possible:
                shares[f"aux layers (shifted by {step:+d})"] = judge(engine, proposer, request)
    best = max(shares, key=lambda name: shares[name].share, default=None)
    if best is None or shares[best].is_near_chance:
        return f"suspect {proposer.suspects}"
    return f"suspect the {best}: read the other way, {shares[best].share:.1%} are"


@contextmanager
def _shifted_taps(engine: Engine, request: Request, step: int) -> Iterator[bool]:
    """The text's hidden states taken so many layers later; False where these do not exist."""
    decoder, states = engine.runner.decoder, engine.runner.hidden_states
    taps = [] if states is None else [tap for tap in states.taps if isinstance(tap, int)]
    if (
        states is None
        or not taps
        or not 0 <= min(taps) + step <= max(taps) + step <= (decoder.config.num_layers)
    ):
        yield False
        return
    decoder.hidden_states = states.shifted(step)
    try:
        engine.runner.prefill([PrefillChunk(request, 0, request.kv_len)])
        yield True
    finally:
        decoder.hidden_states = states
