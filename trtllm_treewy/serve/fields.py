"""Reading the fields of a JSON request, each of them once; what is not known is refused."""

from __future__ import annotations

import difflib
import json
import math
from typing import Any, NoReturn

from .errors import ApiError, invalid


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`.

    Raises:
        ApiError: 400, it is not one.
    """
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = str(error) or "too deeply nested"
        raise invalid(None, f"the body is not JSON: {reason}", "invalid_json") from None
    if not isinstance(value, dict):
        raise invalid(None, f"the body must be a JSON object, got {kind_of(value)}", "invalid_json")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def kind_of(value: object) -> str:
    """The JSON type of a value, for messages."""
    names = {bool: "a boolean", int: "an integer", float: "a number", str: "a string"}
    names |= {list: "an array", dict: "an object", type(None): "null"}
    return names.get(type(value), type(value).__name__)


class Fields:
    """The fields of one JSON object; null counts as absent.

    Every `take` names its field; `finish` refuses the fields that nobody took.
    """

    def __init__(self, raw: dict[str, Any]) -> None:
        self._raw = raw
        self._known: set[str] = set()

    def take(self, name: str) -> Any:
        """The value as it stands, None where it is absent."""
        self._known.add(name)
        return self._raw.get(name)

    def integer(self, name: str, low: int | None = None, high: int | None = None) -> int | None:
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise invalid(name, f"{name} must be an integer, got {kind_of(value)}")
        self._check_range(name, value, low, high)
        return value

    def number(
        self, name: str, low: float | None = None, high: float | None = None
    ) -> float | None:
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise invalid(name, f"{name} must be a number, got {kind_of(value)}")
        if isinstance(value, int) and abs(value) > 1e18:
            raise invalid(name, f"{name} is out of range")
        if not math.isfinite(value):
            raise invalid(name, f"{name} must be finite, got {value}")
        self._check_range(name, value, low, high)
        return float(value)

    def boolean(self, name: str) -> bool | None:
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise invalid(name, f"{name} must be true or false, got {kind_of(value)}")
        return value

    def text(self, name: str) -> str | None:
        value = self.take(name)
        return None if value is None else expect_text(name, value)

    def required_text(self, name: str) -> str:
        value = self.text(name)
        if value is None:
            raise invalid(name, f"{name} is missing, expected a string", "missing_field")
        return value

    def object(self, name: str) -> dict[str, Any] | None:
        value = self.take(name)
        if value is not None and not isinstance(value, dict):
            raise invalid(name, f"{name} must be an object, got {kind_of(value)}")
        return value

    def only(self, name: str, accepted: tuple[Any, ...], reason: str) -> None:
        """Refuses a field that asks for what this server does not do."""
        value = self.take(name)
        if value is None or any(type(value) is type(a) and value == a for a in accepted):
            return
        raise invalid(name, f"{name}={json.dumps(value)[:80]} is not supported: {reason}")

    def ignore(self, *names: str) -> None:
        """Fields that ask for nothing this server could do, such as the user's name."""
        self._known.update(names)

    def finish(self) -> None:
        """Refuses the fields that were not taken, by name."""
        for name in self._raw:
            if name not in self._known:
                close = difflib.get_close_matches(name, self._known, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise invalid(name, f"unknown field {name!r}{hint}", "unknown_field")

    def _check_range(self, name: str, value: float, low: float | None, high: float | None) -> None:
        if (low is not None and value < low) or (high is not None and value > high):
            bound = f"in [{low}, {high}]" if high is not None else f">= {low}"
            raise invalid(name, f"{name} must be {bound}, got {value}")


def expect_text(name: str, value: object) -> str:
    """A string that is text: JSON can write half a character (a lone surrogate)."""
    if not isinstance(value, str):
        raise invalid(name, f"{name} must be a string, got {kind_of(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise invalid(name, f"{name} is not text that can be encoded") from None
    return value


def expect_list(name: str, value: object) -> list[Any]:
    """A JSON array."""
    if not isinstance(value, list):
        raise invalid(name, f"{name} must be an array, got {kind_of(value)}")
    return value


__all__ = ["ApiError", "Fields", "expect_list", "expect_text", "kind_of", "parse_object"]
