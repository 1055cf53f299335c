"""Checks of arguments: an error names the argument and its value."""

import dataclasses
import difflib
import math
import operator
from collections.abc import Iterable
from typing import Any

import numpy as np

from rank_collapse.printed import format_one_line


def refuse_if(condition: object, message: str) -> None:
    """Raise an error where a condition holds.

    Raises:
        ValueError: The condition holds; the error has the message.
    """
    if condition:
        raise ValueError(message)


def refuse(*cases: tuple[Any, str]) -> None:
    """Raise an error for the first of the (condition, message) that holds.

    Raises:
        ValueError: A condition holds; the error has its message.
    """
    for condition, message in cases:
        if condition:
            raise ValueError(message)


def check_choice(
    description: str, value: object, allowed: Iterable[object], suffix: str = ""
) -> None:
    """Check that a value is among those allowed.

    Args:
        description: The value with its name, as the message begins.
        value: The value.
        allowed: Allowed values.
        suffix: Text after the list of allowed values.

    Raises:
        ValueError: The value is not allowed; the message ends with the nearest names.
    """
    names = tuple(allowed)
    if value in names:
        return
    near = find_nearest(value, names)
    nearest = f"; nearest: {', '.join(map(repr, near))}" if near else ""
    raise ValueError(f"{description} is not one of {names}{suffix}{nearest}")


def find_nearest(value: object, names: Iterable[object]) -> list[str]:
    """Find at most three names that resemble a value, in their order."""
    texts = [name for name in names if isinstance(name, str)]
    return sorted(difflib.get_close_matches(str(value), texts, 3), key=texts.index)


def check_choices(config: object, **allowed: tuple[Any, ...]) -> None:
    """Check that fields have one of the values that are allowed.

    Raises:
        ValueError: A field has another value.
    """
    for name, values in allowed.items():
        value = getattr(config, name)
        check_choice(f"{name}={value!r}", value, values)


def check_fields(kind: object, names: Iterable[str]) -> None:
    """Check that names are fields of a dataclass.

    Raises:
        ValueError: A name is not a field; the message ends with the nearest names.
    """
    allowed = [field.name for field in dataclasses.fields(kind)]
    for name in names:
        check_choice(f"{kind.__name__}.{name}", name, allowed)


def check_numbers(interval: str, /, *, arrays: bool = False, **values: object) -> None:
    """Check that numbers lie in an interval, in which NaN never lies.

    Args:
        interval: The interval, such as "[0, 1)".
        arrays: Whether they may be arrays.
        **values: Numbers by name. Traced numbers, and those of torch on another device, are not
            checked.

    Raises:
        ValueError: A number outside; or None, text, a list.
    """
    low, high = map(float, interval[1:-1].split(","))
    for name, value in values.items():
        try:
            array = np.asarray(None if isinstance(value, list | tuple) else value)
        except (TypeError, RuntimeError):  # its values are not there
            continue
        is_number = array.dtype.kind not in "OSUMmc" and (arrays or not array.ndim)
        numbers = array.astype(float) if is_number else np.full(array.shape, np.nan)
        is_above = numbers >= low if interval[0] == "[" else numbers > low
        is_inside = is_above & (numbers <= high if interval[-1] == "]" else numbers < high)
        if not is_inside.all():
            wrong = float(numbers[~is_inside].flat[0]) if is_number else value
            raise ValueError(f"{name}={format_one_line(repr(wrong), 80)} is not in {interval}")


def check_whole(name: str, value: object, least: int, most: int | float = math.inf) -> int:
    """Convert a whole number to a Python integer, which is hashable, and check it.

    Args:
        name: Name of the argument, for the message.
        value: Number of Python or NumPy, or an array without axes that is not traced.
        least, most: Smallest and largest allowed number.

    Raises:
        ValueError: A number outside the limits, or a value that is not a whole number.
    """
    try:
        number = operator.index(None if isinstance(value, bool) else value)
    except TypeError:
        number = None
    if number is None or not least <= number <= most:
        wrong = value if number is None else number
        limits = f"from {least} on" if most == math.inf else f"from {least} to {most}"
        value_text = format_one_line(repr(wrong), 80)
        raise ValueError(f"{name}={value_text} is not a whole number {limits}")
    return number
