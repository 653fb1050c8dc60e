"""Random runs: everything that may vary is drawn from a seed, and no token or bit may follow it.

`run_case` runs a case of `random_case.py` under the harness and holds every stream, and every logit
behind it, to plain decoding. An error's notes name the seed.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.graphengine.engine.harness import Harness
from tests.graphengine.kernels.calls import threads
from tests.parity.hostile import HostileProposer, Mischief
from tests.parity.random_case import Case, Wish

MAX_STEPS = 1500


@dataclass(frozen=True, slots=True)
class Run:
    """A case that was run to its end and compared; its engine is closed."""

    harness: Harness
    proposer: HostileProposer


def run_case(seed: int, root: Path, **kinds: Any) -> Run:
    """Run the case of a seed and hold it to the truth.

    Args:
        seed: the number that everything is drawn from.
        root: where the models are kept.
        kinds: fields of `Setup` that are not drawn.
    """
    case = Case(seed, root, kinds)
    _ = case.checkpoint, case.setup, case.threads, case.wishes  # drawn in this order
    # Uncompiled torch is bit-equal only to itself with as many threads.
    with threads(case.threads if case.setup.compile == "off" else 1):
        _ = case.truth, case.model_options
    with threads(case.threads):
        engine, proposer = case.start()
        harness = Harness(engine, keep_logits=True)
        try:
            play(case, harness)
            compare(case, harness)
        except BaseException as error:
            error.add_note(f"{case}, {proposer.deeds}")
            raise
        close(harness)
    return Run(harness, proposer)


def play(case: Case, harness: Harness) -> None:
    """The schedule to its end, and what may happen between steps; goes on after a broken step."""
    draw, refused = case.draw, set()
    last = max(max(wish.arrives, wish.aborts or 0) for wish in case.wishes)
    for now in range(MAX_STEPS):
        for wish in case.wishes:
            if wish.arrives == now and not add(harness, wish):
                refused.add(wish.request_id)
            if wish.aborts == now:
                attempt(harness, lambda wish=wish: harness.engine.abort(wish.request_id))
        if draw.random() < 0.1:
            harness.engine.draft_limit = draw.randint(0, case.setup.k)
        if draw.random() < 0.03:
            harness.engine.reset_prefix_cache()
        attempt(harness, harness.step)
        if now >= last and not harness.engine.has_unfinished_requests():
            harness.check_drained()
            assert len(harness.outputs) + len(refused) == len(case.wishes)
            return
    raise AssertionError(f"still running after {MAX_STEPS} steps")


def add(harness: Harness, wish: Wish) -> bool:
    """Whether the request was taken; one that the pool can never hold is refused."""
    try:
        harness.add(wish.request_id, wish.prompt, wish.params, cache_salt=wish.salt)
    except ValueError as error:
        if "KV blocks" not in str(error):
            raise
        return False
    return True


def attempt(harness: Harness, action: Any) -> None:
    """Run it; what the proposer did wrong comes out as an error and must leave all consistent."""
    proposer = harness.engine.proposer
    assert isinstance(proposer, HostileProposer)
    before = proposer.num_breaches
    try:
        action()
    except Mischief:
        harness.audit_between_steps()
    except (AssertionError, ValueError) as error:
        is_named = str(error).startswith("draft ") or "read-only" in str(error)
        if proposer.num_breaches == before or not is_named:
            raise
        harness.audit_between_steps()
    else:
        assert proposer.num_breaches == before, f"a breach went by unseen: {proposer.deeds}"


def compare(case: Case, harness: Harness) -> None:
    """Tokens, reasons and logits of every request are those of the truth."""
    is_exact = case.setup.verification == "exact"
    for request_id, request in harness.requests.items():
        if request.choice or request_id not in harness.outputs:
            continue
        if request.params.temperature and not is_exact:
            continue  # of these only the distribution is promised
        got, truth = harness.outputs[request_id], case.truth.outputs[request_id]
        for mine, theirs in zip(got.outputs, truth.outputs, strict=True):
            expected = theirs.token_ids
            if mine.finish_reason == "abort":
                expected = expected[: len(mine.token_ids)]
            else:
                assert mine.finish_reason == theirs.finish_reason, request_id
                assert mine.logprobs == theirs.logprobs, request_id
                assert got.prompt_logprobs == truth.prompt_logprobs
            assert mine.token_ids == expected, (request_id, mine.index)
    for place, processed in harness.processed.items() if is_exact else ():
        if place in case.truth.processed:
            same = processed.tobytes() == case.truth.processed[place].tobytes()
            assert same, f"processed logits of {place} differ"
    for place, logits in harness.logits.items() if is_exact else ():
        same = logits.tobytes() == case.truth.logits[place].tobytes()
        assert same, f"logits of {place} differ"


def close(harness: Harness) -> None:
    with suppress(Mischief):
        harness.engine.close()
    assert not hasattr(harness.engine, "runner")
