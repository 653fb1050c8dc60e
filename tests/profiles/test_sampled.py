"""profiles/sampled: what it calls the same."""

from __future__ import annotations

from graphengine.sampling.params import SamplingParams
from profiles.sampled import Answers, Job, compare


def job(name: str, n: int = 1, aborts: int | None = None) -> Job:
    params = SamplingParams(n=n, temperature=1.0)
    return Job(request_id=name, prompt=[1], params=params, arrives=0, aborts=aborts)


def test_every_kind_of_difference_is_seen() -> None:
    """A run that cannot fail: another token, length, text or reason, in any answer."""
    jobs = [job("a"), job("b", n=2), job("c", aborts=3)]
    truth: Answers = {
        "a": ([1, 2, 3], "xyz", "length"),
        "b": ([4], "u", "stop"),
        "b#1": ([5, 6], "vw", "length"),
        "c": ([7, 8, 9], "klm", "length"),
    }
    same: Answers = {**truth, "c": ([7, 8], "kl", "abort")}
    assert compare(truth, same, jobs) == []
    others: list[tuple[str, tuple[list[int], str, str | None], int | None]] = [
        ("a", ([1, 9, 3], "xyz", "length"), 1),
        ("a", ([1, 2], "xyz", "length"), 2),
        ("b#1", ([5, 6], "vv", "length"), None),
        ("b", ([4], "u", "length"), None),
        ("c", ([7, 7], "kl", "abort"), 1),
        ("c", ([7, 8, 9, 9], "klm", "abort"), 3),
    ]
    for name, answer, position in others:
        (found,) = compare(truth, {**same, name: answer}, jobs)
        assert (found["request"], found["position"]) == (name, position)
