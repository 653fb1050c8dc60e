"""Checks of what a user gives, with the error that says what is allowed."""

from __future__ import annotations


def check_integer(name: str, value: object, low: int, high: int) -> None:
    """Raises ValueError, naming the field, where it is no integer from low to high."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name}={value!r}: expected an integer from {low} to {high}")
