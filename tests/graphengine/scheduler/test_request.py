"""Request: limits, stop ids and the reason to finish."""

from typing import Any

import pytest

from graphengine.request import Request
from graphengine.sampling.params import SamplingParams
from tests.graphengine.scheduler.simulation import EOS, make_request


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "limit"), [(3, 4, 7), (3, None, 64), (60, 16, 64), (63, 1, 64)]
)
def test_limit_is_the_nearer_of_context_and_max_tokens(
    prompt_len: int, max_tokens: int | None, limit: int
) -> None:
    """Guards against a request that runs past either limit (cases 26, 27)."""
    assert make_request("a", range(prompt_len), max_tokens).limit == limit


@pytest.mark.parametrize(("num_output", "left"), [(0, 3), (1, 2), (2, 1), (3, 0), (4, 0)])
def test_drafts_allowed_leave_room_for_the_bonus(num_output: int, left: int) -> None:
    """Guards against a last block whose bonus token passes max_tokens (case 43)."""
    request = make_request("a", [1, 2], 4)
    request.token_ids += [9] * num_output
    assert request.max_draft_tokens == left


def test_stop_wins_over_length_on_the_last_allowed_token() -> None:
    """Guards against finish_reason "length" when EOS is exactly the last token (case 43)."""
    request = make_request("a", [1], 2, ignore_eos=False)
    request.token_ids.append(9)
    assert request.check_finished() is None
    request.token_ids.append(EOS)
    assert request.check_finished() == "stop"
    request.token_ids[-1] = 9
    assert request.check_finished() == "length"


def test_a_stop_id_in_the_prompt_does_not_finish() -> None:
    """Guards against a chat prompt that ends in EOS being over before it starts."""
    request = make_request("a", [1, EOS], 4, ignore_eos=False)
    assert request.check_finished() is None


def test_ignore_eos_keeps_the_users_own_stop_ids() -> None:
    """Guards against ignore_eos switching off stop_token_ids (case 1)."""
    assert make_request("a", [1], stop_token_ids=(7,)).stop_token_ids == {7}
    both = make_request("a", [1], stop_token_ids=(7,), ignore_eos=False)
    assert both.stop_token_ids == {7, EOS}


def test_output_is_what_follows_the_prompt() -> None:
    """Guards against old output being counted as prompt after a preemption (case 30)."""
    request = make_request("a", [1, 2, 3])
    request.token_ids += [8, 9]
    assert request.output_token_ids == [8, 9]
    assert request.num_output_tokens == 2
    assert request.prompt_token_ids == (1, 2, 3)
    request.output_token_ids.append(0)
    assert request.num_tokens == 5


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty"),
        ([3, -1], "-1 is negative"),
        ([1.9], "1.9 is not an integer"),
        ([4, True], "True is not an integer"),
        ([None], "None is not an integer"),
    ],
)
def test_bad_prompts_are_refused(prompt: list[Any], message: str) -> None:
    """Guards against a request with no row to predict from, and a placeholder as a token."""
    with pytest.raises(ValueError, match=message):
        Request("a", prompt, SamplingParams(), max_model_len=8)
