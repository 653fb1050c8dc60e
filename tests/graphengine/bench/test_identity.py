"""Identity off and on: what is compared, and what is told of a difference."""

from dataclasses import replace
from pathlib import Path

import pytest

from graphengine.bench.identity import IdentityCheck, Twin, check_identity, first_flip
from graphengine.bench.serve import Asked, Job, Stream, make_jobs, serve
from graphengine.config import CacheConfig
from graphengine.engine import Engine
from graphengine.sampling.params import SamplingParams
from tests.graphengine.bench.conftest import CONFIG

PROMPTS = [
    Asked(group="g", prompt_id="a", token_ids=[5, 6, 7, 5, 6, 7, 5, 6]),
    Asked(group="g", prompt_id="b", token_ids=[9, 8, 9, 8, 9]),
]
SAMPLED = SamplingParams(max_tokens=12, temperature=0.8)
JOB = Job(asked=PROMPTS[0], number=0, sample=3, params=SamplingParams(seed=4))


def stream(ids: list[int], *, text: str = "t", reason: str = "length", drafts: int = 1) -> Stream:
    return Stream(
        token_ids=ids,
        origins=["bonus"] * len(ids),
        text=text,
        finish_reason=reason,  # type: ignore[arg-type]
        logprobs=None,
        num_draft_tokens=drafts,
        num_accepted_tokens=0,
    )


def check(off: Stream, on: Stream) -> IdentityCheck:
    return IdentityCheck(twins=[Twin(job=JOB, off=off, on=on, flip=first_flip(JOB, off, on))])


@pytest.mark.parametrize(
    ("off", "on", "what", "position", "values"),
    [
        ([1, 2, 3], [1, 9, 3], "token", 1, (2, 9)),
        ([1, 2], [1, 2, 3], "token", 2, (None, 3)),
        ([1, 2, 3], [1], "token", 1, (2, None)),
    ],
)
def test_ids_that_part(
    off: list[int], on: list[int], what: str, position: int, values: tuple[int | None, int | None]
) -> None:
    """Guards a stream that is shorter, or differs late, and is called identical."""
    flip = first_flip(JOB, stream(off), stream(on, text="other"))
    assert flip is not None
    assert (flip.what, flip.position, (flip.off, flip.on)) == (what, position, values)
    assert (flip.prompt_id, flip.sample, flip.seed, flip.gap) == ("a", 3, 4, None)
    assert not check(stream(off), stream(on)).verdict.holds


def test_text_and_reason_are_compared_too() -> None:
    """Guards equal ids behind which the user sees another text or end."""
    flip = first_flip(JOB, stream([1], text="x"), stream([1], text="y"))
    assert flip is not None
    assert (flip.what, flip.position, flip.off, flip.on) == ("text", None, "x", "y")
    flip = first_flip(JOB, stream([1], reason="stop"), stream([1]))
    assert flip is not None
    assert (flip.what, flip.off, flip.on) == ("finish reason", "stop", "length")


def test_verdicts() -> None:
    """Guards a run without drafts, or with a difference, that is called a proof."""
    assert check(stream([1]), stream([1])).verdict.text == (
        "identical: 1 streams, 1 tokens; no draft was accepted, so that accepting was not tried"
    )
    nothing = check(stream([1]), stream([1], drafts=0)).verdict
    assert not nothing.holds
    assert nothing.text.startswith("nothing was drafted")
    different = check(stream([1]), stream([2], drafts=0)).verdict
    assert not different.holds
    assert different.text == "different: 1 of 1 streams"


def test_every_request_has_its_own_seed() -> None:
    """Guards samples that are the same sample."""
    jobs = make_jobs(PROMPTS, SAMPLED, samples=3, first_seed=(1 << 64) - 2)
    assert [job.params.seed for job in jobs] == [(1 << 64) - 2, (1 << 64) - 1, 0, 1, 2, 3]
    assert len({job.request_id for job in jobs}) == 6


def test_a_correct_engine_passes(engine: Engine) -> None:
    """Guards against a check that speculation as it is does not pass, or does not see."""
    found = check_identity(engine, make_jobs(PROMPTS, SAMPLED, samples=2, first_seed=0))
    assert found.verdict.holds
    assert found.verdict.text.startswith("identical: 4 streams, 48 tokens")
    assert all(twin.off.num_draft_tokens == 0 < twin.on.num_draft_tokens for twin in found.twins)
    assert len({tuple(twin.off.token_ids) for twin in found.twins}) == 4


def test_a_flip_is_told_with_the_models_own_gap(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a gap taken at another position, or after processors."""
    jobs = make_jobs(PROMPTS, SamplingParams(max_tokens=6), samples=1, first_seed=0)
    asked = make_jobs(PROMPTS, SamplingParams(max_tokens=6, logprobs=2), samples=1, first_seed=0)
    want = serve(engine, asked, draft_limit=0)[1].logprobs
    assert want is not None

    def other(engine: Engine, jobs: list[Job], *, draft_limit: int, **rest: object) -> list[Stream]:
        streams = serve(engine, jobs, draft_limit=draft_limit)
        if draft_limit:
            streams[1].token_ids[4] += 1
        return streams

    monkeypatch.setattr("graphengine.bench.identity.serve", other)
    found = check_identity(engine, jobs)
    [flip] = found.flips
    assert (flip.prompt_id, flip.position) == ("b", 4)
    assert flip.on == found.twins[1].off.token_ids[4] + 1
    likeliest = sorted(((one.logprob, token) for token, one in want[4].items()), reverse=True)
    assert flip.likeliest == [(token, value) for value, token in likeliest]
    assert flip.likeliest[0][0] == flip.off
    assert flip.gap == likeliest[0][0] - likeliest[1][0] > 0


def test_a_side_starts_without_the_others_cache(checkpoint: Path) -> None:
    """Guards a second side that reads the first one's KV, and is right because that was."""
    engine = Engine(checkpoint, replace(CONFIG, cache=CacheConfig()))
    prompt = Asked(group="g", prompt_id="long", token_ids=list(range(40)))
    jobs = make_jobs([prompt], SamplingParams(max_tokens=2), samples=1, first_seed=0)
    computed = []
    for limit in (0, 3):
        before = engine.stats().num_prefill_tokens
        serve(engine, jobs, draft_limit=limit)
        computed.append(engine.stats().num_prefill_tokens - before)
    engine.close()
    assert computed[0] == computed[1] > 30
