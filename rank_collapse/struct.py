"""Frozen dataclasses that are pytrees, for parameters, configurations and results.

They are used like `flax.struct`, whose import would also import optimisers and checkpoint readers.
"""

import dataclasses
import difflib
import functools
import math
import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar, dataclass_transform

import numpy as np

from rank_collapse.annotations import Leaf as Leaf
from rank_collapse.printed import format_one_line

if TYPE_CHECKING:
    pass

T = TypeVar("T")


def field(*, pytree_node: bool = True, **options: object) -> Any:
    """Declare a field of a dataclass that is a pytree.

    Args:
        pytree_node: False for a static field: part of the treedef, hashed and compared by jit.
        **options: See `dataclasses.field`.
    """
    return dataclasses.field(metadata={"pytree_node": pytree_node}, **options)


def static(default: object) -> Any:
    """Declare a field whose value is part of the compiled program rather than traced."""
    return field(default=default, pytree_node=False)


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
    """Finds at most three names that resemble a value, in their order."""
    texts = [name for name in names if isinstance(name, str)]
    return sorted(difflib.get_close_matches(str(value), texts, 3), key=texts.index)


def check_choices(config: object, **allowed: tuple[Any, ...]) -> None:
    """Check that fields have one of the values that are allowed.

    Raises:
        ValueError: One has not.
    """
    for name, values in allowed.items():
        value = getattr(config, name)
        check_choice(f"{name}={value!r}", value, values)


def refuse_if(condition: object, message: str) -> None:
    """Raise an error where a condition holds.

    Raises:
        ValueError: With the message, where `condition` is true.
    """
    if condition:
        raise ValueError(message)


def refuse(*cases: tuple[Any, str]) -> None:
    """Raise an error for the first of the (condition, message) that holds.

    Raises:
        ValueError: With its message.
    """
    for condition, message in cases:
        if condition:
            raise ValueError(message)


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


def check_static_fields(config: object, **smallest: int) -> None:
    """Check static fields: switches, whole numbers (which become Python integers), and floats.

    Args:
        config: A dataclass.
        **smallest: Smallest values by name; without one, a whole number that has a default must be
            at least 0. None stays None.

    Raises:
        ValueError: An invalid value, or one below its smallest value (0 for a float).
    """
    for name, kind in (_static_kinds(type(config)) | dict.fromkeys(smallest, int)).items():
        value = getattr(config, name)
        if kind is bool:
            check_choice(f"{name}={value!r}", value, (False, True))
        elif kind is float and not (type(value) is float and 0 <= value < math.inf):
            check_numbers("[0, inf)", **{name: value})
        elif kind is int and value is not None:
            object.__setattr__(config, name, check_whole(name, value, smallest.get(name, 0)))


@functools.cache
def _static_kinds(config_class):
    """Return {field: the type of its default} for the static fields."""
    fields, has_leaves = dataclasses.fields(config_class), issubclass(config_class, Struct)
    return {
        f.name: type(f.default) for f in fields if not f.metadata.get("pytree_node", has_leaves)
    }


def check_fields(kind: object, names: Iterable[str]) -> None:
    """Check that names are fields of a dataclass.

    Raises:
        ValueError: A name is not a field; the message ends with the nearest names.
    """
    allowed = [field.name for field in dataclasses.fields(kind)]
    for name in names:
        check_choice(f"{kind.__name__}.{name}", name, allowed)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Struct:
    """Base of frozen dataclasses that are pytrees, whose leaves' paths are the fields' names."""

    def __init_subclass__(cls, *, kw_only: bool = False, **options: object) -> None:
        import jax  # here: the checks of this module are used without JAX

        super().__init_subclass__(**options)
        dataclasses.dataclass(frozen=True, repr=False, kw_only=kw_only)(cls)
        nodes: dict[bool, list[str]] = {True: [], False: []}
        for f in dataclasses.fields(cls):  # pyright: ignore
            nodes[f.metadata.get("pytree_node", True)].append(f.name)
        jax.tree_util.register_dataclass(cls, data_fields=nodes[True], meta_fields=nodes[False])

    def replace(self: T, **changes: object) -> T:
        """Return a copy with other values of some fields.

        Raises:
            ValueError: A field that does not exist.
        """
        check_fields(type(self), changes)
        return dataclasses.replace(self, **changes)  # pyright: ignore

    if not TYPE_CHECKING:  # to a type checker any other name is a mistake

        def __getattr__(self, name: str) -> Any:
            names = ", ".join(f.name for f in dataclasses.fields(self))
            raise AttributeError(
                f"{type(self).__name__} has no {name!r}; its fields are {names}",
                name=name,
                obj=self,
            )

    def __repr__(self) -> str:
        """Show arrays by their shape and dtype."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # pyright: ignore
        listing = (f"{name}={_describe(a)}" for name, a in fields.items() if a is not None)
        return f"{type(self).__name__}({', '.join(listing)})"


def _describe(value):
    """Describe an array by its dtype and shape, and any other value by its repr."""
    if getattr(value, "ndim", 0) and hasattr(value, "dtype"):
        return f"{value.dtype}[{', '.join(map(str, value.shape))}]"
    return repr(value)
