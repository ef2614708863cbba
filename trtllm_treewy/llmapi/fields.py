"""What the settings classes share: checks of fields, and the class of a dict of them."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

_Config = TypeVar("_Config")


def check_int(
    owner: str, name: str, value: object, minimum: int, maximum: int | None = None
) -> None:
    """Raises ValueError unless `value` is an integer within the bounds."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or value < minimum
        or (maximum is not None and value > maximum)
    ):
        bound = f">= {minimum}" if maximum is None else f"in [{minimum}, {maximum}]"
        raise ValueError(f"{owner}: {name} must be an integer {bound}, got {value!r}")


def check_bool(owner: str, name: str, value: object) -> None:
    """Raises ValueError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{owner}: {name} must be True or False, got {value!r}")


def check_one_of(owner: str, name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raises ValueError unless `value` is one of those."""
    if value not in allowed:
        raise ValueError(f"{owner}: {name} must be one of {', '.join(allowed)}, got {value!r}")


def check_default(owner: str, name: str, value: object, default: object) -> None:
    """Raises ValueError for a setting of TensorRT-LLM that asks for what this version has not."""
    if value != default:
        raise ValueError(
            f"{owner}: {name}={value!r} is not supported in this version; only {default!r} is"
        )


def int_tuple(owner: str, name: str, values: Any) -> tuple[int, ...]:
    """Several integers as a tuple; ValueError where they are anything else."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise ValueError(f"{owner}: {name} must be a list of integers, got {values!r}")
    result = tuple(values)
    for value in result:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{owner}: {name} must hold integers, got {value!r}")
    return result


def settings_of(obj: object, what: str, cls: type) -> dict[str, Any]:
    """A copy of the dict that stands for an object of `cls`; ValueError where it is none."""
    if not isinstance(obj, Mapping):
        raise ValueError(
            f"{what} must be a {cls.__name__}, a dict of its fields or None, "
            f"got {type(obj).__name__}"
        )
    return dict(obj)


def construct(cls: type[_Config], what: str, settings: dict[str, Any]) -> _Config:
    """The object of these fields; ValueError for a key that is none, with the closest one."""
    known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for key in settings:
        if key not in known:
            raise ValueError(f"{what}: unknown key {key!r}; {_suggestion(key, known)}")
    return cls(**settings)


def _suggestion(key: object, known: list[str]) -> str:
    """The closest known name, else all of them."""
    lowered = {name.lower(): name for name in known}
    close = difflib.get_close_matches(str(key).lower(), lowered, n=1, cutoff=0.6)
    return f"did you mean {lowered[close[0]]!r}?" if close else f"known keys: {', '.join(known)}"
