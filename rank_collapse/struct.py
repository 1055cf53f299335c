"""Frozen dataclasses that are pytrees, for parameters, configurations and results.

They are used like `flax.struct`, whose import would also import optimisers and checkpoint readers.
"""

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any, TypeVar, dataclass_transform

import jax

from rank_collapse.checks import check_choice, check_fields, check_numbers, check_whole

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


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Struct:
    """Base of frozen dataclasses that are pytrees, whose leaves' paths are the fields' names."""

    def __init_subclass__(cls, *, kw_only: bool = False, **options: object) -> None:
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
