"""Stop strings in the engine (case 42): ids, text and reason end together, at any place."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from graphengine.models.tokenizer import Tokenizer
from graphengine.outputs import CompletionOutput
from graphengine.sampling.params import SamplingParams
from tests.graphengine.engine.checkpoints import Checkpoints
from tests.graphengine.engine.harness import Harness
from tests.graphengine.engine.setups import Setup, scripted
from tests.tiny import make_tokenizer

PROMPT = (1, 2, 3)
SETUP = Setup(k=6, max_model_len=128)
# Letters, a token each, so that the n-th character is the n-th token.
TOKENIZER = Tokenizer(make_tokenizer())
LETTERS = tuple(TOKENIZER.encode(letter)[-1] for letter in "abcdefgh")
PARAMS = SamplingParams(
    max_tokens=40, temperature=1.0, seed=11, allowed_token_ids=LETTERS, ignore_eos=True
)


def answer(harness: Harness, params: SamplingParams) -> CompletionOutput:
    name = f"request-{len(harness.requests)}"
    harness.add(name, PROMPT, params)
    harness.drain()
    return harness.outputs[name].outputs[0]


@pytest.fixture(scope="module")
def plain(checkpoints: Checkpoints) -> CompletionOutput:
    """The answer that nothing stops."""
    return answer(Harness(replace(SETUP, k=0).start(checkpoints.get())), PARAMS)


@pytest.fixture(scope="module")
def harnesses(checkpoints: Checkpoints, plain: CompletionOutput) -> dict[str, Harness]:
    records = {PROMPT: plain.token_ids}
    return {
        "off": Harness(replace(SETUP, k=0).start(checkpoints.get())),
        "oracle": Harness(SETUP.start(checkpoints.get(), scripted("oracle", records))),
        "two of six": Harness(
            SETUP.start(checkpoints.get(), scripted("exactly", records, accept=2))
        ),
    }


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("start", range(9))
def test_a_stop_string_ends_everything_at_once(
    start: int, include: bool, harnesses: dict[str, Harness], plain: CompletionOutput
) -> None:
    """A stop at every offset of a block, across two blocks, and tokens that go on behind it."""
    stop = plain.text[start : start + 3]
    first = plain.text.index(stop)
    params = replace(PARAMS, stop=(stop,), include_stop_str_in_output=include)
    for name, harness in harnesses.items():
        got = answer(harness, params)
        assert got.token_ids == plain.token_ids[: first + 3], name
        assert got.text == plain.text[: first + (3 if include else 0)]
        assert got.finish_reason == "stop"


def test_the_earliest_of_several_stops_wins(
    harnesses: dict[str, Harness], plain: CompletionOutput
) -> None:
    """Two stop strings in one accepted block, listed in the other order."""
    late, early = plain.text[4:6], plain.text[1:4]
    got = answer(harnesses["oracle"], replace(PARAMS, stop=(late, early)))
    assert got.text == plain.text[: plain.text.index(early)]


def test_a_stop_string_counts_once_enough_tokens_are_out(
    harnesses: dict[str, Harness], plain: CompletionOutput
) -> None:
    """A stop before min_tokens that ends the request, or that hides the one after."""
    letter = max(plain.text, key=plain.text.count)
    places = [index for index, found in enumerate(plain.text) if found == letter]
    for name, harness in harnesses.items():
        for before, place in pairwise(places):
            got = answer(harness, replace(PARAMS, stop=letter, min_tokens=before + 2))
            assert got.text == plain.text[:place], name
            assert len(got.token_ids) == place + 1


def test_no_beginning_of_a_stop_string_is_given_out(
    harnesses: dict[str, Harness], plain: CompletionOutput
) -> None:
    """A stream that shows what the final text does not have."""
    stop = plain.text[10:16]
    harness = harnesses["off"]
    harness.add("streamed", PROMPT, replace(PARAMS, stop=(stop,)))
    shown = ""
    while harness.engine.has_unfinished_requests():
        for output in harness.step():
            shown += output.new_text
            assert plain.text[:10].startswith(shown)
    assert shown == plain.text[:10]


def test_text_that_was_held_comes_with_the_end(
    harnesses: dict[str, Harness], plain: CompletionOutput
) -> None:
    """The beginning of a stop string that never came, lost when the limit is reached."""
    stop = plain.text[-2:] + "zzz"
    got = answer(harnesses["oracle"], replace(PARAMS, stop=(stop,)))
    assert (got.text, got.finish_reason) == (plain.text, "length")


@pytest.mark.parametrize("value", ["", [""], [1], 3])
def test_what_is_no_stop_string_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"SamplingParams\.stop="):
        SamplingParams(stop=value)


@pytest.mark.parametrize("k", [0, 4])
def test_a_stop_string_that_the_last_bytes_make(k: int, checkpoints: Checkpoints) -> None:
    """Text that is cut at a stop string, and a reason that says the limit was met."""
    euro, letter = TOKENIZER.encode("\u20ac")[-3], LETTERS[0]
    wanted = [letter, letter, letter, euro]
    forced = SamplingParams(
        max_tokens=4, stop=("\ufffd",), allowed_tokens_fn=lambda p, output: [wanted[len(output)]]
    )
    got = answer(Harness(replace(SETUP, k=k).start(checkpoints.get())), forced)
    assert (got.token_ids, got.text, got.finish_reason) == (wanted, "aaa", "stop")
