"""Typed look-up in a checkpoint's settings, and how messages list names.

Owns the checks of a value's type and the form of its refusal. Knows no key and no file format.
"""

from collections.abc import Mapping, Sequence
from typing import Any


class Values:
    """Settings by key.

    Args:
        source: Where they come from, the beginning of every message.
        raw: Key -> value, as parsed.
        defaults: What an absent key means.
        prefix: Stands before every key in `raw` and in messages.
    """

    def __init__(
        self,
        source: str,
        raw: Mapping[str, Any],
        *,
        defaults: Mapping[str, object] | None = None,
        prefix: str = "",
    ) -> None:
        self._source = source
        self._raw = raw
        self._defaults = defaults or {}
        self._prefix = prefix

    def get(self, key: str) -> Any:
        """The value, whatever its type; None where the key is absent without a default."""
        return self._raw.get(self._prefix + key, self._defaults.get(key))

    def count(self, key: str, *, null_means: int | None = None) -> int:
        """A positive integer.

        Raises:
            ValueError: The value is something else; so it is for the two below.
        """
        value = self.get(key)
        if value is None and null_means is not None:
            return null_means
        if type(value) is not int or value < 1:
            raise self._refusal(key, value, "a positive integer")
        return value

    def number(self, key: str, *, null_means: float | None = None) -> float:
        value = self.get(key)
        if value is None and null_means is not None:
            return null_means
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._refusal(key, value, "a number")
        return float(value)

    def flag(self, key: str) -> bool:
        """Null is false."""
        value = self.get(key)
        if value is not None and type(value) is not bool:
            raise self._refusal(key, value, "true or false")
        return bool(value)

    def _refusal(self, key: str, value: object, allowed: str) -> ValueError:
        return ValueError(f"{self._source}: {self._prefix}{key} must be {allowed}, got {value!r}")


def some_of(names: Sequence[str], most: int = 8) -> str:
    """Up to `most` names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
