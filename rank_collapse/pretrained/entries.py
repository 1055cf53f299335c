"""Entries of a config.json: their defaults and allowed values."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from rank_collapse.printed import quote_value

Settings = dict[str, Any]

# No published model has a tenth of it; what is built per layer would fill the memory beyond.
MAX_LAYERS = 10_000
_LARGEST = {int: 2**31 - 1, float: 3.4e38}  # what an index and a float32 can hold
_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    list: "a list",
    dict: "an object",
}


class Entry(NamedTuple):
    """One entry of a config.json."""

    default: Any  # What it is where it is absent or null
    kinds: tuple[type, ...]  # Its types
    # Of a number; None for the largest that there may be of its type
    least: float = 0
    most: float | None = None
    nullable: bool = False  # Whether null is a value of its own rather than the default


def as_entry(entry: Any) -> Entry:
    """Convert the short forms of an entry: a default, or a type where the default is None."""
    if isinstance(entry, Entry):
        return entry
    return Entry(None, (entry,)) if isinstance(entry, type) else Entry(entry, (type(entry),))


def count_entry(default: int | None = None, most: int | None = None) -> Entry:
    """Make the `Entry` of a whole number that is 1 or more."""
    return Entry(default, (int,), least=1, most=most)


def check_entry(name: str, value: Any, entry: Entry) -> None:
    """Raises an error for a value of another type, or beyond the limits of its entry.

    Args:
        name: Name of the entry, for the message.
        value: See config.json.
        entry: What is allowed.
    """
    kinds = entry.kinds
    if type(value) not in kinds and not (float in kinds and type(value) is int):
        expected = " or ".join(_NAMES[kind] for kind in kinds)
        raise ValueError(f"{name}={quote_value(value)} is not {expected}")
    if type(value) not in _LARGEST:
        return
    most = _LARGEST[float if float in kinds else int] if entry.most is None else entry.most
    if not entry.least <= value <= most:
        raise ValueError(f"{name}={quote_value(value)} is not between {entry.least} and {most}")


def check_allowed(settings: Mapping[str, Any], name: str, allowed: tuple[Any, ...]) -> None:
    """Raises an error for values of an entry that the network has no field for.

    Args:
        settings: Settings of the model.
        name: Name of the entry.
        allowed: Its supported values.
    """
    if settings[name] not in allowed:
        values, value = " or ".join(map(repr, allowed)), quote_value(settings[name])
        raise ValueError(
            f"{name}={value} of a {settings['model_type']} model is not supported, only {values}"
        )
