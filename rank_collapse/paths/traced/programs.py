"""Programs of traced functions: how they are opened, computed and described."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core as jax_core, source_info_util
from jax.extend.core import Jaxpr, JaxprEqn

from rank_collapse.annotations import AnyArray, Tree


class Scope(NamedTuple):
    """A named scope, and the number that tells entries into scopes of one name apart."""

    name: str
    number: int


def open_program(program: Any) -> tuple[Any, Sequence[Any]]:
    """Return the equations and the constants of a program inside a program."""
    if hasattr(program, "consts"):
        return program.jaxpr, program.consts
    return program, ()


def count_scan_arguments(params: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many of the first arguments of a scan are constants, and how many it carries.

    Args:
        params: Parameters of the equation. JAX 0.11 groups the arguments; JAX 0.10 counts them.
    """
    if "ft_in" in params:
        constants, carry, _ = params["ft_in"].unpack()
        return len(constants), len(carry)
    return params["num_consts"], params["num_carry"]


def read_scopes(eqn: JaxprEqn) -> tuple[Scope, ...]:
    """Return the named scopes of an equation, without transformations such as vmap."""
    stack = eqn.source_info.name_stack.stack
    return tuple(Scope(s.name, id(s)) for s in stack if type(s).__name__ == "Scope")


def has_scopes(jaxpr: Jaxpr) -> bool:
    """Return whether a program has scopes or names of its own."""
    return any(
        eqn.primitive.name == "name"
        or read_scopes(eqn)
        or any(map(has_scopes, jax_core.jaxprs_in_params(eqn.params)))
        for eqn in jaxpr.eqns
    )


def describe_place(eqn: JaxprEqn, scopes: Sequence[Scope], calls: Sequence[JaxprEqn] = ()) -> str:
    """Describe where an equation is: its file, line and scope.

    Args:
        eqn: The equation.
        scopes: Around it.
        calls: The calls around it, from the outermost. An equation inside a function of JAX such as
            `jnp.where` has no line of its own.
    """
    path = "/".join(scope.name for scope in scopes)
    lines = (source_info_util.summarize(e.source_info) for e in (eqn, *reversed(calls)))
    line = next(filter(None, lines), "an unknown line")
    return f"{line} in the scope {path!r}" if path else line


def bind(eqn: JaxprEqn, arrays: Sequence[object]) -> list[Any]:
    """Compute an equation of a program.

    Args:
        eqn: The equation.
        arrays: Arguments of the equation.
    """
    with eqn.ctx.manager:  # the precision and number types of its place
        out = eqn.primitive.bind(*arrays, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


def push_tangents(eqn: JaxprEqn, arrays: Sequence[object], tangents: Sequence[object]) -> list[Any]:
    """Compute the derivative of an equation along tangents, None for 0.

    Args:
        eqn, arrays: See `bind`.
        tangents: Tangents of the arguments.
    """
    positions = [i for i, tangent in enumerate(tangents) if tangent is not None]

    def compute(*moving):
        arguments = list(arrays)
        for i, array in zip(positions, moving, strict=True):
            arguments[i] = array
        return bind(eqn, arguments)

    moving = tuple(arrays[i] for i in positions)
    return jax.jvp(compute, moving, tuple(tangents[i] for i in positions))[1]


def place_tangents(
    tangents: Sequence[AnyArray], has_tangent: Sequence[bool]
) -> list[AnyArray | None]:
    """Return a tangent for each argument: None, which is 0, for those that have none.

    Args:
        tangents: Those of the arguments that have one, in order.
        has_tangent: For each argument, whether it has one.
    """
    remaining = iter(tangents)
    return [next(remaining) if has else None for has in has_tangent]


def trace(fn: Callable[[Tree], Tree], x: AnyArray) -> tuple[Any, Any]:
    """Trace a function of one array.

    Returns:
        Its program with constants, and the tree of the shapes of its outputs.
    """
    return jax.make_jaxpr(fn, return_shape=True)(x)
