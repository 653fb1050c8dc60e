"""SamplingParams: defaults, normalisation, and a clear refusal for everything else."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from graphengine.sampling.params import MAX_LOGIT_BIAS, MAX_SEED, SamplingParams


def test_defaults_are_greedy_and_short() -> None:
    """Guards against a silent change of what a user gets who asks for nothing."""
    params = SamplingParams()
    assert params.max_tokens == 16
    assert params.temperature == 0.0
    assert params.stop_token_ids == ()
    assert not params.ignore_eos
    assert params.skip_special_tokens


def test_is_frozen_keyword_only_and_hashable() -> None:
    """Guards against one request's parameters being changed by another that shares them."""
    params = SamplingParams(max_tokens=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.max_tokens = 4  # type: ignore[misc]
    with pytest.raises(TypeError):
        SamplingParams(3)  # type: ignore[misc]
    assert hash(params) == hash(SamplingParams(max_tokens=3))


@pytest.mark.parametrize("given", [[7, 8], (7, 8), np.array([7, 8], dtype=np.int32), range(7, 9)])
def test_stop_token_ids_become_a_tuple_of_ints(given: Any) -> None:
    """Guards against a caller's list being aliased, or numpy scalars reaching set look-ups."""
    params = SamplingParams(stop_token_ids=given)
    assert params.stop_token_ids == (7, 8)
    assert all(type(token) is int for token in params.stop_token_ids)


def test_number_like_values_are_normalised() -> None:
    """Guards against numpy scalars and integer zeros leaking into hashes and JSON."""
    params = SamplingParams(max_tokens=np.int64(4), temperature=0)  # type: ignore[arg-type]
    assert type(params.max_tokens) is int
    assert type(params.temperature) is float
    assert math.copysign(1.0, SamplingParams(temperature=-0.0).temperature) == 1.0
    assert SamplingParams(max_tokens=None).max_tokens is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", True),
        ("max_tokens", 2.0),
        ("max_tokens", "16"),
        ("temperature", 1e-39),
        ("temperature", 1e39),
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", False),
        ("temperature", "0"),
        ("temperature", None),
        ("stop_token_ids", 3),
        ("stop_token_ids", "eos"),
        ("stop_token_ids", [1, -1]),
        ("stop_token_ids", [1.0]),
        ("stop_token_ids", [True]),
        ("ignore_eos", 1),
        ("skip_special_tokens", None),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("min_tokens", None),
        ("top_k", 1 << 31),
        ("temperature", 10**400),
        ("repetition_penalty", 1e38),
        ("top_k", -2),
        ("top_k", 1.0),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", math.inf),
        ("frequency_penalty", 2.1),
        ("frequency_penalty", "x"),
        ("presence_penalty", -2.1),
        ("presence_penalty", True),
        ("logit_bias", 3),
        ("logit_bias", "ab"),
        ("logit_bias", {"a": 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", [3]),
        ("allowed_token_ids", ()),
        ("allowed_token_ids", "ab"),
        ("allowed_token_ids", [1, -1]),
        ("seed", -1),
        ("seed", 1 << 64),
        ("seed", 1.0),
        ("seed", True),
        *((field, np.array(7)) for field in ("logit_bias", "allowed_token_ids", "stop_token_ids")),
        *((field, torch.tensor(7)) for field in ("stop", "bad_words", "logits_processors")),
        ("stop_token_ids", "a" * 1000),
    ],
)
def test_refusal_names_field_value_and_what_is_allowed(field: str, value: Any) -> None:
    """Guards against bad input being accepted, or refused without saying what to change."""
    with pytest.raises(ValueError, match=f"SamplingParams.{field}=.*expected ") as caught:
        SamplingParams(**{field: value})
    offenders = [value]
    if isinstance(value, list):
        offenders += value
    if isinstance(value, dict):
        offenders += [*value, *value.values()]
    assert any(repr(offender)[:200] in str(caught.value) for offender in offenders)


def test_a_bias_on_more_tokens_than_a_row_holds_is_refused() -> None:
    """Guards a bias that is cut off in silence."""
    SamplingParams(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0))
    with pytest.raises(ValueError, match="at most 256 tokens"):
        SamplingParams(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0))


def test_values_are_stored_in_one_form() -> None:
    """Guards two equal requests that differ, and a caller's dict that changes a running one."""
    bias = {9: 1, 3: -0.5}
    params = SamplingParams(
        logit_bias=bias,
        top_k=-1,
        top_p=1,
        allowed_token_ids=range(3),  # type: ignore[arg-type]
        seed=np.uint64(MAX_SEED),  # type: ignore[arg-type]
    )
    bias[4] = 2
    assert params.logit_bias == ((3, -0.5), (9, 1.0))
    assert (params.top_k, params.top_p, params.allowed_token_ids) == (0, 1.0, (0, 1, 2))
    assert type(params.seed) is int
    again = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    assert SamplingParams(**again) == params
    assert hash(params)


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 1.0},
        {"repetition_penalty": 1.1},
        {"frequency_penalty": 0.1},
        {"presence_penalty": -0.1},
        {"logit_bias": {1: 1.0}},
        {"allowed_token_ids": [1]},
        {"min_tokens": 1},
    ],
)
def test_what_can_change_a_choice_is_not_plain_greedy(changes: dict[str, Any]) -> None:
    """Guards a processor that is dropped because its step took the greedy graph."""
    neutral = {"top_k": 5, "top_p": 0.5, "min_p": 0.5, "seed": 1}  # cannot move an argmax
    assert SamplingParams(**neutral).is_plain_greedy  # type: ignore[arg-type]
    assert not SamplingParams(**changes).is_plain_greedy


@pytest.mark.parametrize("field", ["typical_p", "best_of", "beam"])
def test_unknown_fields_are_errors(field: str) -> None:
    """Guards against an option that is not built being swallowed."""
    with pytest.raises(TypeError, match=field):
        SamplingParams(**{field: 1})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "field", ["stop", "stop_token_ids", "bad_words", "logits_processors", "logit_bias"]
)
def test_none_is_none_of_them(field: str) -> None:
    """Guards against a refusal of what an API server passes on for a field that nobody set."""
    assert getattr(SamplingParams(**{field: None}), field) == ()
    assert SamplingParams(**{field: None}) == SamplingParams()
