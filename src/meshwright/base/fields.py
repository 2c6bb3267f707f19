"""Fields of JSON that strangers send: types, ranges, and refusals that name the field."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, overload

import orjson

from meshwright.base.hints import did_you_mean


class Refusal(Exception):
    """A request that cannot be answered: the status, and what OpenAI's error object says."""

    def __init__(
        self, message: str, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status
        self.headers: dict[str, str] = {}


def parse_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a body."""
    try:
        values = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Refusal(f"the body is not JSON: {error}; send an object in UTF-8") from None
    if not isinstance(values, dict):
        raise Refusal(f"the body is {_kind(values)}; send a JSON object")
    return values


class Fields:
    """The fields of an object; each is taken once, and what is left over `refuse_rest` refuses."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._left = dict(values)
        self._taken = set[str]()

    def take(self, name: str, default: Any = None) -> Any:
        """Return a value that the caller checks; null counts as not given."""
        self._taken.add(name)
        value = self._left.pop(name, None)
        return default if value is None else value

    @overload
    def integer(self, name: str, default: int, low: int, high: int) -> int: ...
    @overload
    def integer(self, name: str, default: int | None, low: int, high: int) -> int | None: ...
    def integer(self, name: str, default: int | None, low: int, high: int) -> int | None:
        value = self.take(name, default)
        if value is None:
            return None
        # 1.0 is a whole number too; from 2 ** 53 on, a float does not say which.
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            value = int(value)
        # JSON's true is a bool, which Python counts among the ints.
        if isinstance(value, bool) or not isinstance(value, int):
            raise Refusal(f"{name} is {_kind(value)}; it must be a whole number", name)
        if not low <= value <= high:
            raise Refusal(f"{name} {value} must be from {low} to {high}", name)
        return value

    def number(
        self, name: str, default: float, low: float = -math.inf, high: float = math.inf
    ) -> float:
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Refusal(f"{name} is {_kind(value)}; it must be a number", name)
        # Infinity is accepted only where it is the default, such as for an open end.
        if not (low <= value <= high and (math.isfinite(value) or value == default)):
            raise Refusal(f"{name} {value} must be from {low:g} to {high:g}", name)
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise Refusal(f"{name} is {_kind(value)}; it must be true or false", name)
        return value

    def text(self, name: str, default: str | None = None) -> str | None:
        value = self.take(name, default)
        if value is not None and not isinstance(value, str):
            raise Refusal(f"{name} is {_kind(value)}; it must be a string", name)
        return value

    def strings(
        self, name: str, most: int, longest: int, default: Collection[str] = ()
    ) -> tuple[str, ...]:
        """Return a string or a list of strings as a tuple."""
        value = self.take(name, list(default))
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(v, str) and v for v in values):
            raise Refusal(
                f"{name} must be a string, or a list of strings, none of them empty", name
            )
        if len(values) > most:
            raise Refusal(f"{name} has {len(values)} strings; give at most {most}", name)
        if any(len(v) > longest for v in values):
            raise Refusal(
                f"{name} has a string of {max(map(len, values))} characters; give at most {longest}",
                name,
            )
        return tuple(values)

    def only(self, name: str, neutral: Collection[Any], why: str) -> None:
        """Refuse a field that has no effect here, unless its value asks for none."""
        value = self.take(name)
        # The types must be the same, too: 0 is not false.
        if value is not None and not any(value == v and type(value) is type(v) for v in neutral):
            raise Refusal(
                f"{name} is not supported: {why}; leave it out", name, "unsupported_parameter"
            )

    def refuse_rest(self) -> None:
        """Refuse what was not taken."""
        if self._left:
            # Strangers chose the names, so only a few are shown, and cut short.
            names = ", ".join(sorted(self._left)[:5])[:200]
            first = next(iter(self._left))[:64]
            hint = did_you_mean(first, self._taken)
            raise Refusal(
                f"unrecognized request argument supplied: {names}{hint or '; leave it out'}", first
            )


def _kind(value: Any) -> str:
    names = {
        type(None): "null",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "a string",
    }
    return names.get(type(value)) or ("a list" if isinstance(value, list) else "an object")
