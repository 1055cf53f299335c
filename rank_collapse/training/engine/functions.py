"""The functions of a run, traced."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from rank_collapse.checks import refuse_if
from rank_collapse.printed import quote_value
from rank_collapse.runs.states import name_parts
from rank_collapse.training.engine import tracing
from rank_collapse.training.engine.axes import Axes
from rank_collapse.training.engine.tracing import Operations, Traced, drop_weak_types


class Functions:
    """What is computed of one run.

    Args:
        init: (key, hyper) → state.
        step: (state, hyper, index) → (state, metrics).
        look: (state, hyper, key) → arrays, or None.

    Attributes:
        init, step, look: The traced functions.
        state_shapes, metric_shapes, look_shapes: Their leaves, in order.
        metric_names, look_names: Names of the leaves of metrics and looks.
        unchanged: Which leaves of the state step returns as they are: data, which are not copied.
    """

    def __init__(self, init: Operations, step: Operations, look: Operations | None):
        self.init, self.step, self.look = init, step, look
        self.state_shapes = jax.tree.leaves(drop_weak_types(init.out))
        program = step.closed.jaxpr  # whose first arguments and results are the state
        pairs = zip(program.invars, program.outvars, self.state_shapes)  # noqa: B905 (the shortest)
        self.unchanged = [argument is result for argument, result, _ in pairs]
        metrics, looks = name_parts(step.out[1]), name_parts({} if look is None else look.out)
        self.metric_names, self.metric_shapes = list(metrics), list(metrics.values())
        self.look_names, self.look_shapes = list(looks), list(looks.values())

    def uses_key(self) -> bool:
        """Returns whether the state before training depends on the key of the seed."""
        return self.init.list_used()[0]

    def shares_bits(self) -> bool:
        """Returns whether random numbers under vmap depend on the other runs, for functions that
        `trace_functions` traced."""
        return any(f.shares_bits for f in (self.init, self.step, self.look) if f is not None)

    def list_unused(self, names: Sequence[str]) -> list[str]:
        """Lists the traced values that no result depends on.

        Args:
            names: Of all traced values, in the order of their leaves.
        """
        size = len(self.state_shapes)  # `step` and `look` take the leaves of the state first
        # The first argument of `init` is the key, and the last one of `step` is the index.
        is_used_by = [self.init.list_used()[1:], self.step.list_used()[size:-1]]
        if self.look is not None:  # its last argument is a key of its own
            is_used_by.append(self.look.list_used()[size:-1])
        is_used = [any(flags) for flags in zip(*is_used_by, strict=True)]
        return [name for name, used in zip(names, is_used, strict=True) if not used]


def trace_functions(
    init: Callable,
    step: Callable,
    look: Callable | None,
    hyper: Mapping[str, Any],
    static: Mapping[str, Any],
    key_type: Any,
) -> Functions:
    """Traces functions that a user wrote, and checks them.

    Args:
        init, step, look: See `training.sweep`; `look` may be None.
        hyper: An example of each traced value.
        static: Keyword arguments.
        key_type: Dtype of the keys of the seeds.

    Raises:
        ValueError: One of the functions is not a function, or breaks a rule of `sweep`.
    """
    tracing.check_callable("init", init, "init(key, hyper)", static)
    tracing.check_callable("step", step, "step(state, hyper, index)", static)
    key = jax.ShapeDtypeStruct((), key_type)
    traced_init = Traced("init", init, (key, hyper), static, tracing.check_state)
    state = drop_weak_types(traced_init.out)
    check_step = partial(tracing.check_step, like=state)
    index = jax.ShapeDtypeStruct((), jnp.int32)
    traced_step = Traced("step", step, (state, hyper, index), static, check_step)
    if look is None:
        return Functions(traced_init, traced_step, None)
    taken = tracing.accepted(look, static) if callable(look) else {}
    tracing.check_callable("look", look, "look(state, hyper, key)", taken)
    check_look = partial(tracing.check_metrics, "look")
    traced_look = Traced("look", look, (state, hyper, key), taken, check_look)
    return Functions(traced_init, traced_step, traced_look)


def check_names(functions: Sequence[Functions], axes: Axes, finite: Sequence[str] | None) -> None:
    """Checks that metrics and looks have names of their own, the same at all points.

    Args:
        functions: Functions at each point of the static values.
        axes: Axes of the sweep.
        finite: Names of metrics that must be finite, or None.

    Raises:
        ValueError: A name is also an axis, or is missing at a point.
    """
    first, axis_names = functions[0], {*axes.hyper_axes, *axes.static_axes, "seed", "step"}
    results = {  # {attribute: (names, shapes) at each point}
        "metric": [(fns.metric_names, fns.metric_shapes) for fns in functions],
        "look": [(fns.look_names, fns.look_shapes) for fns in functions],
    }
    for attribute, by_point in results.items():
        names, shapes = by_point[0]
        further = {f"{n}_{k}" for n, a in zip(names, shapes, strict=True) for k in range(a.ndim)}
        for name in axis_names.union(further).intersection(names):
            raise ValueError(f"the {attribute} {name!r} has the name of an axis of the sweep")
        for name in further & axis_names:
            raise ValueError(
                f"{name!r} is a swept value and an axis of the {attribute} "
                f"{name.rpartition('_')[0]!r}: rename one of them"
            )
        for point, (other_names, other_shapes) in enumerate(by_point):
            refuse_if(
                other_names != names,
                f"the {attribute}s are {names}, but with {axes.describe_static(point)} they are "
                f"{other_names}: use the same names at all values of static",
            )
            for name, a, b in zip(names, shapes, other_shapes, strict=True):
                refuse_if(
                    a.ndim != b.ndim,
                    f"the {attribute} {name!r} has {a.ndim} axes, but it has {b.ndim} with "
                    f"{axes.describe_static(point)}",
                )
    is_list = finite is None or isinstance(finite, list | tuple | set)
    refuse_if(not is_list, f"finite={quote_value(finite)} is not a list of names")
    for name in finite or ():
        refuse_if(
            name not in first.metric_names,
            f"finite has {name!r}, which is not a metric; the metrics are {first.metric_names}",
        )
