"""The fields of a request body, read with llama-server's tolerance: null is absent, unknown names are ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pyctl.errors import RequestError

__all__ = ["Fields"]

_INT32_MAX = 2**31 - 1


class Fields:
    """A JSON object whose values are asked for by name and type; a wrong type raises RequestError.

    Several names for one value: the first that is present counts.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    @classmethod
    def parse(cls, body: bytes) -> Fields:
        """The fields of a JSON body."""
        try:
            values = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RequestError(f"the body is not valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise RequestError("the body must be a JSON object")
        return cls(values)

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def get(self, name: str) -> Any:
        """The value as it came, None if absent."""
        return self._values.get(name)

    def boolean(self, name: str, default: bool) -> bool:
        """true or false."""
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise RequestError(f"'{name}' must be true or false")
        return value

    def integer(self, *names: str, default: int, low: int | None = None, high: int = _INT32_MAX) -> int:
        """A number without its fraction; outside of [low, high] it raises RequestError."""
        for name in names:
            value = self._values.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise RequestError(f"'{name}' must be a number")
            if (low is not None and value < low) or value > high:
                raise RequestError(f"'{name}' must be in [{'-inf' if low is None else low}, {high}], not {value}")
            return int(value)
        return default

    def number(self, name: str, default: float, low: float | None = None, high: float | None = None) -> float:
        """A number; outside of [low, high] the nearer end counts."""
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RequestError(f"'{name}' must be a number")
        if low is not None:
            value = max(value, low)
        try:
            return float(value if high is None else min(value, high))
        except OverflowError:
            raise RequestError(f"'{name}' is too large a number") from None

    def string(self, name: str, default: str) -> str:
        """A string."""
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise RequestError(f"'{name}' must be a string")
        return value

    def strings(self, name: str) -> tuple[str, ...] | None:
        """A list of strings; a single string is a list of one."""
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, str):
            return (value,)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise RequestError(f"'{name}' must be a string or a list of strings")
        return tuple(value)

    def object(self, name: str) -> Fields:
        """A JSON object; an absent one is empty."""
        value = self._values.get(name)
        if value is None:
            return Fields({})
        if not isinstance(value, dict):
            raise RequestError(f"'{name}' must be an object")
        return Fields(value)

    def as_dict(self) -> dict[str, Any]:
        """All values as they came."""
        return dict(self._values)
