"""Annotations are checked by beartype, but for the values of a `Literal`.

The library itself refuses those, with an error that the tests read.
"""

from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from beartype import beartype


def checked(fn: Any) -> Any:
    """Wraps fn so that annotations are checked; of a `Literal` only the type of its values is."""
    annotations = getattr(fn, "__annotations__", {})
    if any(_replace_literals(hint) is not hint for hint in annotations.values()):
        fn.__annotations__ = {name: _replace_literals(hint) for name, hint in annotations.items()}
    return beartype(fn)


def _replace_literals(hint):
    args, origin = get_args(hint), get_origin(hint)
    if origin is Literal:
        return Union[tuple({type(value) for value in args})]  # noqa: UP007
    plain = tuple(_replace_literals(a) for a in args)
    if all(new is old for new, old in zip(plain, args, strict=True)):
        return hint
    return Union[plain] if origin in (Union, UnionType) else origin[plain]  # noqa: UP007
