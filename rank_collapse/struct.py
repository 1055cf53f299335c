"""Frozen dataclasses that are pytrees: what parameters, configurations and results are.

Used as `flax.struct` is, whose import would bring optimisers and checkpoint readers with it.
"""

import dataclasses
from typing import Any, TypeVar, dataclass_transform

import jax

T = TypeVar("T")


def field(*, pytree_node: bool = True, **options: Any) -> Any:
    """A field of such a dataclass.

    Args:
        pytree_node: False for what is static: part of the treedef, hashed and compared by jit.
        **options: As `dataclasses.field` takes them.
    """
    return dataclasses.field(metadata={"pytree_node": pytree_node}, **options)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def dataclass(cls: type[T]) -> type[T]:
    """A frozen dataclass, registered as a pytree whose leaves have the fields' names as their path.

    It has the method `replace(**changes)`, which gives a changed copy.
    """
    cls = dataclasses.dataclass(frozen=True)(cls)
    cls.replace = dataclasses.replace
    static = {f.name: not f.metadata.get("pytree_node", True) for f in dataclasses.fields(cls)}
    return jax.tree_util.register_dataclass(
        cls,
        data_fields=[name for name, is_static in static.items() if not is_static],
        meta_fields=[name for name, is_static in static.items() if is_static],
    )
