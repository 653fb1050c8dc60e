"""SamplingParams: defaults, normalisation, and a clear refusal for everything else."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from graphengine.sampling.params import SamplingParams


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
        ("temperature", 0.7),
        ("temperature", 1),
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", False),
        ("temperature", "0"),
        ("temperature", None),
        ("stop_token_ids", 3),
        ("stop_token_ids", "eos"),
        ("stop_token_ids", None),
        ("stop_token_ids", [1, -1]),
        ("stop_token_ids", [1.0]),
        ("stop_token_ids", [True]),
        ("ignore_eos", 1),
        ("skip_special_tokens", None),
    ],
)
def test_refusal_names_field_value_and_what_is_allowed(field: str, value: Any) -> None:
    """Guards against bad input being accepted, or refused without saying what to change."""
    with pytest.raises(ValueError, match=f"SamplingParams.{field}=.*expected ") as caught:
        SamplingParams(**{field: value})
    offender = value[-1] if isinstance(value, list) else value
    assert repr(offender) in str(caught.value)


def test_sampling_is_refused_rather_than_ignored() -> None:
    """Guards against temperature > 0 being served greedily without a word."""
    with pytest.raises(ValueError, match=r"temperature=0\.7.*greedy.*not served yet"):
        SamplingParams(temperature=0.7)


@pytest.mark.parametrize("field", ["top_p", "seed", "n"])
def test_unknown_fields_are_errors(field: str) -> None:
    """Guards against an option that is not built being swallowed."""
    with pytest.raises(TypeError, match=field):
        SamplingParams(**{field: 1})  # type: ignore[arg-type]
