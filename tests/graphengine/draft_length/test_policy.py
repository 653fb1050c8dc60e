"""Rules without a clock: by number of requests, and by a threshold of acceptance."""

from graphengine.draft_length.policy import Batch, FixedLength, LengthByBatch, Threshold


def batch(num_reqs: int) -> Batch:
    return Batch([f"r{index}" for index in range(num_reqs)], "greedy")


def test_a_fixed_length_is_everybodys() -> None:
    rule = FixedLength(5)
    assert [rule.longest(batch(size)) for size in (0, 1, 9)] == [5, 5, 5]
    assert rule.allowances(batch(2), 5) == [5, 5]
    assert rule.worthwhile(batch(2), [5, 0]) == [5, 0]
    assert not rule.may_listen()


def test_a_table_holds_from_each_size_on() -> None:
    rule = LengthByBatch({4: 3, 1: 6, 9: 0})
    found = {size: rule.longest(batch(size)) for size in (0, 1, 3, 4, 8, 9, 40)}
    assert found == {0: 6, 1: 6, 3: 6, 4: 3, 8: 3, 9: 0, 40: 0}


def test_a_threshold_shortens_and_recovers() -> None:
    """5 -> 2 under 40 %, and back."""
    rule = Threshold(5, 2)
    assert rule.longest(batch(1)) == 5
    for _ in range(50):
        rule.observe("r0", 5, 5)
    assert 20 < steps_until(rule, 2, drafts=5, accepted=1) < 100  # a moving average
    for _ in range(60):
        rule.observe("r0", 5, 1)
    assert 5 < steps_until(rule, 5, drafts=2, accepted=2) < 100


def steps_until(rule: Threshold, length: int, *, drafts: int, accepted: int) -> int:
    """How many such steps it takes."""
    count = 0
    while rule.longest(batch(1)) != length and count < 200:
        rule.observe("r0", drafts, accepted)
        count += 1
    return count
