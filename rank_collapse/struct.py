"""Frozen dataclasses that are pytrees: what parameters, configurations and results are.

Used as `flax.struct` is, whose import would bring optimisers and checkpoint readers with it.
"""

import dataclasses
import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar, dataclass_transform

import numpy as np

if TYPE_CHECKING:
    import jax

T = TypeVar("T")

if TYPE_CHECKING:
    # What a result holds. A transformation may put something else there, such as an axis or a
    # sharding, so that nothing is checked while a program runs.
    Leaf = jax.Array
else:
    Leaf = Any


def field(*, pytree_node: bool = True, **options: Any) -> Any:
    """Declare a field of such a dataclass.

    Args:
        pytree_node: False for what is static: part of the treedef, hashed and compared by jit.
        **options: As `dataclasses.field` takes them.
    """
    return dataclasses.field(metadata={"pytree_node": pytree_node}, **options)


def static(default: Any) -> Any:
    """Declare a field whose value is part of the compiled program rather than traced."""
    return field(default=default, pytree_node=False)


def unknown_value_error(
    description: str, value: Any, allowed: Iterable[Any], suffix: str = ""
) -> ValueError:
    """Make the error that a value is not among those allowed; it ends with the nearest of them.

    Args:
        description: The value with its name, as the message begins.
        value: The value.
        allowed: What it could be.
        suffix: Put after the list of these.
    """
    names = tuple(allowed)
    near = difflib.get_close_matches(str(value), [n for n in names if isinstance(n, str)], 3)
    nearest = f"; nearest: {', '.join(map(repr, sorted(near, key=names.index)))}" if near else ""
    return ValueError(f"{description} is not one of {names}{suffix}{nearest}")


def check_choices(config: Any, **allowed: tuple[Any, ...]) -> None:
    """Check that fields have one of the values that are allowed.

    Raises:
        ValueError: One has not.
    """
    for name, values in allowed.items():
        value = getattr(config, name)
        if value not in values:
            raise unknown_value_error(f"{name}={value!r}", value, values)


def refuse_if(condition: Any, message: str) -> None:
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
        refuse_if(condition, message)


def check_integers(config: Any, **smallest: int) -> None:
    """Convert fields to Python integers, which are hashable, and check them; None stays.

    Raises:
        ValueError: One is no integer, or below its smallest value.
    """
    for name, bound in smallest.items():
        value = getattr(config, name)
        if isinstance(value, np.integer):
            value = int(value)
            object.__setattr__(config, name, value)
        if value is not None and (not isinstance(value, int) or value < bound):
            raise ValueError(f"{name}={value!r} is not a positive integer")


def check_fields(kind: Any, names: Iterable[str]) -> None:
    """Check that names are fields of a dataclass.

    Raises:
        ValueError: One is not; the message ends with the nearest.
    """
    allowed = [field.name for field in dataclasses.fields(kind)]
    for name in names:
        if name not in allowed:
            raise unknown_value_error(f"{kind.__name__}.{name}", name, allowed)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Struct:
    """Base of frozen dataclasses that are pytrees, whose leaves' paths are the fields' names."""

    def __init_subclass__(cls, *, kw_only: bool = False, **options: Any) -> None:
        import jax  # here: the checks of this module are used without JAX

        super().__init_subclass__(**options)
        dataclasses.dataclass(frozen=True, repr=False, kw_only=kw_only)(cls)
        nodes: dict[bool, list[str]] = {True: [], False: []}
        for f in dataclasses.fields(cls):  # pyright: ignore
            nodes[f.metadata.get("pytree_node", True)].append(f.name)
        jax.tree_util.register_dataclass(cls, data_fields=nodes[True], meta_fields=nodes[False])

    def replace(self: T, **changes: Any) -> T:
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
