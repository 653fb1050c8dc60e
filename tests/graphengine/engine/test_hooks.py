"""What a request brings of its own: bad words, a prefix callable, logits processors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from graphengine.engine import Engine
from graphengine.models.loader import open_model
from graphengine.sampling.params import SamplingParams
from proposers.mock import JunkProposer
from tests.graphengine.engine.checkpoints import Checkpoints
from tests.graphengine.engine.harness import Harness
from tests.graphengine.engine.setups import Setup, scripted
from tests.tiny import EOS_ID, VOCAB_SIZE

PROMPT = [5, 6, 7, 5, 6]
DIGITS = list(range(48, 58))


class DigitsOnly:
    """A toy grammar: digits, none twice in a row, and after eight of them the end."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []

    def __call__(self, prompt: list[int], output: list[int]) -> list[int]:
        assert prompt == PROMPT
        self.asked.append(tuple(output))
        assert all(a in DIGITS for a in output), "asked about what it had forbidden"
        assert all(a != b for a, b in pairwise(output))
        if len(output) >= 8:
            return [EOS_ID]
        return [digit for digit in DIGITS if output[-1:] != [digit]]


def serve(engine: Engine, **jobs: SamplingParams) -> Harness:
    harness = Harness(engine)
    for name, params in jobs.items():
        harness.add(name, PROMPT, params)
    harness.drain()
    return harness


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_token_is_allowed_and_the_stream_is_that_of_no_drafts(
    checkpoints: Checkpoints, temperature: float
) -> None:
    """A bonus row without mask, rows of another request, an automaton that rejected drafts have
    advanced (case 22).
    """
    checkpoint = checkpoints.get()
    params = SamplingParams(
        temperature=temperature, seed=1, max_tokens=20, allowed_tokens_fn=DigitsOnly()
    )
    other = SamplingParams(temperature=temperature, seed=2, max_tokens=15)
    off = serve(Setup().start(checkpoint), a=params, b=other)
    stream = off.stream("a")
    assert len(stream) == 9
    assert stream[-1] == EOS_ID
    assert set(stream[:-1]) <= set(DIGITS)
    assert off.reason("a") == "stop"
    records = {name: [*PROMPT, *off.stream(name)] for name in "ab"}
    for kind in ("oracle", "junk", "ragged", "exactly"):
        fresh = DigitsOnly()
        asked = SamplingParams(
            temperature=temperature, seed=1, max_tokens=20, allowed_tokens_fn=fresh
        )
        proposer = scripted(kind, records, accept=2)  # type: ignore[arg-type]
        engine = Setup(k=4, debug=kind == "oracle").start(checkpoint, proposer)
        on = serve(engine, a=asked, b=other)
        assert on.stream("a") == stream
        assert on.stream("b") == off.stream("b")
        prefixes = {tuple(stream[:length]) for length in range(9)}
        assert prefixes <= set(fresh.asked)
        longest = max(map(len, fresh.asked))
        assert longest == 8, "asked about what comes behind the end"


def test_a_request_with_a_mask_may_be_preempted_and_have_mates(checkpoints: Checkpoints) -> None:
    """A mask of the row's last tenant, or one that does not survive a recompute."""
    setup = Setup(k=3, num_blocks=10, max_num_seqs=3, max_model_len=32)
    jobs = {
        "a": SamplingParams(max_tokens=20, allowed_tokens_fn=lambda p, o: DIGITS),
        "b": SamplingParams(max_tokens=20, bad_words=("e", "th")),
        "c": SamplingParams(max_tokens=20),
    }
    together = serve(setup.start(checkpoints.get()), **jobs)
    assert together.engine.stats().num_preemptions > 0
    for name, params in jobs.items():
        alone = serve(Setup(max_model_len=32).start(checkpoints.get()), **{name: params})
        assert alone.stream(name) == together.stream(name)


@pytest.mark.parametrize("k", [0, 4])
def test_bad_words_never_come(checkpoints: Checkpoints, k: int) -> None:
    """A word that drafts spell, that spans two steps, or whose beginning alone is forbidden."""
    checkpoint = checkpoints.get()
    tokenizer = open_model(checkpoint).load_tokenizer()
    assert tokenizer is not None
    letters = [tokenizer.encode_plain(letter)[0] for letter in "abcdef"]
    plain = SamplingParams(
        max_tokens=50, temperature=1.5, seed=4, ignore_eos=True, allowed_token_ids=tuple(letters)
    )
    found = serve(Setup(k=k).start(checkpoint), a=plain).stream("a")
    spelling = next(list(pair) for pair in pairwise(found[9:]) if len({*pair}) == 2)
    single = next(token for token in found if token not in spelling)
    words = (tokenizer.decode(spelling), tokenizer.decode([single]))
    banned = replace(plain, bad_words=words)
    got = serve(Setup(k=k).start(checkpoint), a=banned).stream("a")
    assert single not in got
    assert spelling not in [got[index : index + 2] for index in range(len(got))]
    assert {*spelling} <= {*got}, "each of its tokens may come"
    common = next(i for i, (a, b) in enumerate(zip(found, got, strict=True)) if a != b)
    assert found[common] == single or found[common - 1 : common + 1] == spelling


def favour(token: int, amount: float) -> Any:
    def processor(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        assert prompt == PROMPT
        logits[(token + len(output)) % VOCAB_SIZE] += amount
        return logits

    return processor


@pytest.mark.parametrize("graph", ["tape", "compiled", "eager"])
def test_logits_processors_act_on_every_row(checkpoints: Checkpoints, graph: Any) -> None:
    """The second graph sees other logits than the hook gave, or a mate's; a bonus row left out."""
    checkpoint = checkpoints.get()
    engine = {"graph": graph, "debug": graph == "tape", "logits_processors": True}
    custom = SamplingParams(
        max_tokens=14,
        temperature=0.8,
        seed=3,
        logprobs=2,
        ignore_eos=True,
        logits_processors=(favour(70, 6.0), favour(90, 5.0)),
    )
    mate = SamplingParams(max_tokens=14, logprobs=1, ignore_eos=True)
    off = serve(Setup(**engine).start(checkpoint), a=custom, b=mate)  # type: ignore[arg-type]
    favoured = [token in ((70 + i), (90 + i)) for i, token in enumerate(off.stream("a"))]
    assert sum(favoured) > 7
    plain = serve(Setup(k=3).start(checkpoint), b=mate)
    assert plain.stream("b") == off.stream("b")
    records = {name: [*PROMPT, *off.stream(name)] for name in "ab"}
    for kind in ("oracle", "ragged"):
        proposer = scripted(kind, records)  # type: ignore[arg-type]
        on = serve(
            Setup(k=3, **engine).start(checkpoint, proposer),  # type: ignore[arg-type]
            a=custom,
            b=mate,
        )
        for name in "ab":
            assert on.stream(name) == off.stream(name)
            mine, theirs = on.outputs[name].outputs[0], off.outputs[name].outputs[0]
            assert mine.logprobs == theirs.logprobs
        stats = on.engine.stats()
        assert stats.eager_fallbacks["logits_processors"] == stats.num_steps
        tiers = {name.split(":")[1] for name in stats.replays}
        assert tiers == {"logits", "custom"}


def test_logprobs_are_the_models_own(checkpoints: Checkpoints) -> None:
    """Log-probabilities of what a processor made of the logits."""
    loud = SamplingParams(max_tokens=1, logprobs=0, logits_processors=(favour(70, 100.0),))
    forced = SamplingParams(max_tokens=1, logprobs=0, allowed_token_ids=(70,))
    engine = Setup(logits_processors=True).start(checkpoints.get())
    harness = serve(engine, a=loud, b=forced)
    first, second = (harness.outputs[name].outputs[0] for name in "ab")
    assert first.token_ids == second.token_ids == [70]
    assert first.logprobs == second.logprobs


def raising(prompt: Sequence[int], output: Sequence[int], *rest: Any) -> Any:
    if len(output) >= 3:
        raise KeyError("no such state")
    return rest[0] if rest else range(VOCAB_SIZE)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"allowed_tokens_fn": raising}, KeyError, "no such state"),
        ({"logits_processors": raising}, KeyError, "no such state"),
        ({"allowed_tokens_fn": lambda p, o: []}, ValueError, r"gave \[\]: expected token"),
        ({"allowed_tokens_fn": lambda p, o: [1.5]}, ValueError, r"gave \[1.5\]: expected"),
        ({"allowed_tokens_fn": lambda p, o: None}, ValueError, r"gave None: expected"),
        (
            {"allowed_tokens_fn": lambda p, o: np.empty(0, int)},
            ValueError,
            r"gave array\(\[\], dtype=int64\): exp",
        ),
        ({"allowed_tokens_fn": lambda p, o: [264]}, ValueError, r"in \[0, 264\)"),
        ({"logits_processors": lambda p, o, x: x[1:]}, ValueError, r"float32 \(263,\)"),
        ({"logits_processors": lambda p, o, x: x.double()}, ValueError, "float64"),
        ({"logits_processors": lambda p, o, x: None}, ValueError, "gave None"),
        (
            {"allowed_token_ids": (66,), "bad_words": ("c",)},
            ValueError,
            "nothing may come after 0 output tokens",
        ),
    ],
)
def test_a_hook_that_fails_is_named_and_costs_others_nothing(
    checkpoints: Checkpoints, fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    """An engine that is stuck, or torn, after a request's own code has raised."""
    engine = Setup(k=2, logits_processors=True).start(checkpoints.get())
    mate = SamplingParams(max_tokens=12, ignore_eos=True)
    expected = serve(Setup().start(checkpoints.get()), mate=mate).stream("mate")
    harness = Harness(engine)
    harness.add("mate", PROMPT, mate)
    harness.add("bad", PROMPT, SamplingParams(max_tokens=12, ignore_eos=True, **fields))
    for _ in range(2):  # it stays as it was
        with pytest.raises(error, match=message) as raised:
            harness.drain()
        assert raised.value.__notes__ == [
            "raised for request 'bad'; abort it, and the others go on"
        ]
    harness.num_interrupts = 3
    assert harness.abort("bad")
    harness.drain()
    assert harness.stream("mate") == expected


def test_refusals(checkpoints: Checkpoints) -> None:
    """Hooks that nobody would run, or that are none."""
    engine = Setup().start(checkpoints.get())
    with pytest.raises(ValueError, match="start it with logits_processors=True"):
        engine.add_request("a", PROMPT, SamplingParams(logits_processors=favour(1, 1.0)))
    bad: Any
    for bad in (3, lambda output: output, lambda p, o, x: p):
        with pytest.raises(ValueError, match=r"allowed_tokens_fn=.*: expected a function of \(pr"):
            SamplingParams(allowed_tokens_fn=bad)
    for bad in (3, [3], lambda p, o: p, [lambda x: x]):
        with pytest.raises(ValueError, match=r"logits_processors=.*: expected a function of \(pr"):
            SamplingParams(logits_processors=bad)
    with pytest.raises(ValueError, match=r"bad_words=\(''\,\): expected a text"):
        SamplingParams(bad_words=("",))
    engine.close()


def test_the_note_names_what_abort_takes(checkpoints: Checkpoints) -> None:
    """An engine that is stuck behind an id that abort does not know, and Ctrl-C with advice."""

    def second_fails(prompt: list[int], output: list[int]) -> range:
        if output and output[0] != firsts[0]:
            raise KeyError("no such state")
        return range(VOCAB_SIZE)

    engine = Setup(max_num_seqs=2).start(checkpoints.get())
    sampled = SamplingParams(max_tokens=4, n=2, temperature=1.0, seed=3)
    firsts = [ids[0] for ids in serve(engine, probe=sampled).streams("probe")]
    assert firsts[0] != firsts[1]
    engine.add_request("r", PROMPT, replace(sampled, allowed_tokens_fn=second_fails))
    engine.step()
    with pytest.raises(KeyError) as raised:
        engine.step()
    assert "request 'r', answer 1; abort it" in raised.value.__notes__[0]
    assert engine.abort("r")

    def interrupts(prompt: list[int], output: list[int]) -> range:
        raise KeyboardInterrupt

    engine.add_request("c", PROMPT, SamplingParams(allowed_tokens_fn=interrupts))
    with pytest.raises(KeyboardInterrupt) as stopped:
        engine.step()
    assert not hasattr(stopped.value, "__notes__")
    engine.close()


class DeadEnds:
    """Asked about what never comes, it has no answer, or none that is allowed."""

    def __init__(self, stream: Sequence[int], how: str) -> None:
        self.stream, self.how, self.num_guesses = list(stream), how, 0

    def on_the_way(self, output: list[int]) -> bool:
        found = output == self.stream[: len(output)]
        self.num_guesses += not found
        if not found and self.how == "raise":
            raise LookupError("never comes")
        return found

    def allowed(self, prompt: list[int], output: list[int]) -> Sequence[int]:
        return range(VOCAB_SIZE) if self.on_the_way(output) else []

    def logits(self, prompt: list[int], output: list[int], logits: torch.Tensor) -> Any:
        return logits if self.on_the_way(output) else None


@pytest.mark.parametrize("how", ["raise", "nothing"])
@pytest.mark.parametrize("hook", ["allowed_tokens_fn", "logits_processors"])
@pytest.mark.parametrize(
    ("verification", "temperature"), [("exact", 0.0), ("exact", 1.0), ("rejection", 0.0)]
)
def test_a_wrong_guess_is_no_error(
    checkpoints: Checkpoints, hook: str, how: str, verification: str, temperature: float
) -> None:
    """A draft that makes a request fail which runs without."""
    checkpoint = checkpoints.get()
    params = SamplingParams(max_tokens=20, temperature=temperature, seed=6, ignore_eos=True)
    off = serve(Setup(logits_processors=True).start(checkpoint), a=params).stream("a")
    records = {"a": [*PROMPT, *off]}
    for accept in range(3):
        dead = DeadEnds(off, how)
        method = dead.allowed if hook == "allowed_tokens_fn" else dead.logits
        hooked = replace(params, **{hook: method})
        setup = Setup(k=3, logits_processors=True, verification=verification)  # type: ignore[arg-type]
        proposer = scripted("exactly", records, accept=accept)  # type: ignore[arg-type]
        on = serve(setup.start(checkpoint, proposer), a=hooked)
        assert on.stream("a") == off
        assert dead.num_guesses > 0
        assert accept == 0 or on.engine.stats().num_accepted_tokens > 0


def test_words_that_forbid_everything_behind_a_wrong_draft(checkpoints: Checkpoints) -> None:
    """n-gram drafts into a dead end that plain decoding never meets."""
    a, b = 64, 65  # the letters
    prompt = [b, a, b, a, b]
    params = SamplingParams(
        max_tokens=6, allowed_token_ids=(a, b), bad_words=("aa", "ab"), logit_bias={b: 100.0}
    )
    for k in (0, 3):
        harness = Harness(Setup(k=k).start(checkpoints.get()))
        harness.add("r", prompt, params)
        harness.drain()
        assert harness.stream("r") == [b] * 6


def test_nobody_asks_behind_what_cannot_be_accepted(checkpoints: Checkpoints) -> None:
    """A processor that is asked about what masks, stop ids or it itself have forbidden."""
    stop, forbidden, cut = 7, 8, 9

    def processor(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        asked.append(output)
        logits[cut] = float("-inf")
        return logits

    asked: list[list[int]] = []
    free = [token for token in range(VOCAB_SIZE) if token not in (forbidden,)]
    params = SamplingParams(
        max_tokens=12,
        stop_token_ids=(stop,),
        allowed_token_ids=tuple(free),
        logits_processors=processor,
    )
    for draft in (stop, forbidden, cut):
        proposer = JunkProposer(vocab_size=VOCAB_SIZE, token_id=draft)
        setup = Setup(k=3, logits_processors=True)
        serve(setup.start(checkpoints.get(), proposer), a=params)
    assert len(asked) >= 30
    assert not [output for output in asked if {stop, forbidden, cut} & {*output}]


ODD_PLACES = list(range(10, 20))


def nothing_at_even_places(prompt: list[int], output: list[int], logits: torch.Tensor) -> Any:
    """A row that has nothing left gives token 0."""
    if len(output) % 2 == 0:
        logits[:] = float("-inf")
    else:
        logits[:10] = logits[20:] = float("-inf")
    return logits


@pytest.mark.parametrize("verification", ["exact", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_has_nothing_left_ends_the_block(
    checkpoints: Checkpoints, temperature: float, verification: Any
) -> None:
    """A draft that is just what such a row falls back to, and rows behind it without any hook."""
    params = SamplingParams(
        max_tokens=9,
        temperature=temperature,
        seed=2,
        ignore_eos=True,
        logits_processors=nothing_at_even_places,
    )
    contradicting = replace(
        params,
        logits_processors=lambda prompt, output, logits: logits.fill_(float("nan")),
        allowed_tokens_fn=lambda prompt, output: [0] if len(output) % 2 else ODD_PLACES,
    )
    found = []
    for k in (0, 3):
        setup = Setup(k=k, logits_processors=True, verification=verification)
        proposer = JunkProposer(vocab_size=VOCAB_SIZE, token_id=0) if k else None
        harness = serve(setup.start(checkpoints.get(), proposer), a=params, b=contradicting)
        found.append((harness.stream("a"), harness.stream("b")))
        assert set(harness.stream("a")[0::2]) == {0}
        assert set(harness.stream("a")[1::2]) <= set(ODD_PLACES)
    assert found[0] == found[1] or (verification == "rejection" and temperature)
