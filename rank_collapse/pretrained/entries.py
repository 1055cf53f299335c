"""Entries of a config.json: their defaults and allowed values."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from rank_collapse.printed import quote_value

Settings = dict[str, Any]

# No published model has a tenth of it; what is built per layer would fill the memory beyond.
MAX_LAYERS = 10_000
_LARGEST = {int: 2**31 - 1, float: 3.4e38}  # what an index and a float32 can hold
_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
_NAMES |= {list: "a list", dict: "an object"}


class Entry(NamedTuple):
    """One entry of a config.json."""

    default: Any  # What it is where it is absent or null
    kinds: tuple[type, ...]  # Its types
    # Of a number; None for the largest that there may be of its type
    least: float = 0
    most: float | None = None
    nullable: bool = False  # Whether null is a value of its own rather than the default


def as_entry(given: Any) -> Entry:
    """An `Entry` from its short forms: a default, or a type where the default is None."""
    if isinstance(given, Entry):
        return given
    return Entry(None, (given,)) if isinstance(given, type) else Entry(given, (type(given),))


def count(default: int | None = None, most: int | None = None) -> Entry:
    """A whole number that is 1 or more."""
    return Entry(default, (int,), least=1, most=most)


def check_entry(name: str, value: Any, entry: Entry) -> None:
    """Refuses a value of another type, not finite, or beyond the limits of its entry."""
    kinds = entry.kinds
    if type(value) not in kinds and not (float in kinds and type(value) is int):
        expected = " or ".join(_NAMES[kind] for kind in kinds)
        raise ValueError(f"{name}={quote_value(value)} is not {expected}")
    if type(value) not in _LARGEST:
        return
    if type(value) is float and not math.isfinite(value):
        raise ValueError(f"{name}={value!r} is not finite")
    if type(value) is int and abs(value) >= 2**63:
        raise ValueError(f"{name} has {len(str(value))} digits")
    most = _LARGEST[float if float in kinds else int] if entry.most is None else entry.most
    if not entry.least <= value <= most:
        raise ValueError(f"{name}={value!r} is not between {entry.least} and {most}")


def only(settings: Mapping[str, Any], name: str, allowed: tuple[Any, ...]) -> None:
    """Refuses values of an entry that the network has no field for."""
    if settings[name] not in allowed:
        values, given = " or ".join(map(repr, allowed)), quote_value(settings[name])
        raise ValueError(
            f"{name}={given} of a {settings['model_type']} model is not supported, only {values}"
        )
