"""The functions of a sweep at one point of its static values, traced."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from rank_collapse.struct import refuse_if
from rank_collapse.training.engine import tracing
from rank_collapse.training.engine.axes import Axes
from rank_collapse.training.engine.tracing import Traced


class Functions:
    """What is computed of one run.

    Args:
        init, step, look: See `training.sweep`; `look` may be None.
        axes: With the traced values.
        static: Keyword arguments.
        base_key: Of the seeds.

    Attributes:
        init, step, look: Traced.
        state_shapes, metric_shapes, look_shapes: Their leaves, in order.
        metric_names, look_names: Of the leaves.

    Raises:
        ValueError: One of the functions is none, or does what it must not.
    """

    def __init__(
        self,
        init: Callable,
        step: Callable,
        look: Callable | None,
        axes: Axes,
        static: Mapping[str, Any],
        base_key: Any,
    ):
        hyper = axes.examples()
        tracing.check_callable("init", init, "init(key, hyper)", static)
        tracing.check_callable("step", step, "step(state, hyper, index)", static)
        key = jax.ShapeDtypeStruct((), base_key.dtype)
        self.init = Traced("init", init, (key, hyper), static, tracing.check_state)
        state = tracing.drop_weak_types(self.init.out)
        check_step = partial(tracing.check_step, like=state)
        index = jax.ShapeDtypeStruct((), jnp.int32)
        self.step = Traced("step", step, (state, hyper, index), static, check_step)
        self.look = None
        if look is not None:
            like = "look(state, hyper, key)"
            tracing.check_callable("look", look, like, tracing.accepted(look, static))
            self.look = Traced(
                "look",
                look,
                (state, hyper, key),
                tracing.accepted(look, static),
                partial(tracing.check_metrics, "look"),
            )
        metrics, looks = self.step.out[1], {} if self.look is None else self.look.out
        self.state_shapes = jax.tree.leaves(state)
        self.metric_names, self.metric_shapes = list(metrics), list(metrics.values())
        self.look_names, self.look_shapes = list(looks), list(looks.values())


def check_names(functions: Sequence[Functions], axes: Axes, finite: Sequence[str] | None) -> None:
    """Checks that metrics and looks have names of their own, the same at all points.

    Args:
        functions: Of each point of the static values.
        axes: Of the sweep.
        finite: Names of metrics that must be finite, or None.

    Raises:
        ValueError: A name is an axis, or is missing at a point.
    """
    first, axis_names = functions[0], {*axes.hyper_axes, *axes.static_axes, "seed", "step"}
    for attribute in ("metric", "look"):
        names = getattr(first, f"{attribute}_names")
        for name in axis_names.intersection(names):
            raise ValueError(f"the {attribute} {name!r} has the name of an axis of the sweep")
        for point, other in enumerate(functions):
            others = getattr(other, f"{attribute}_names")
            refuse_if(
                others != names,
                f"{attribute}s are {names}, and with {axes.describe_static(point)} {others}: they "
                "have the same names at all values of static",
            )
            for name, a, b in zip(
                names,
                getattr(first, f"{attribute}_shapes"),
                getattr(other, f"{attribute}_shapes"),
                strict=True,
            ):
                refuse_if(
                    a.ndim != b.ndim,
                    f"the {attribute} {name!r} has {a.ndim} axes, and {b.ndim} with "
                    f"{axes.describe_static(point)}",
                )
    refuse_if(isinstance(finite, str), f"finite={finite!r} is not a list of names")
    for name in finite or ():
        refuse_if(
            name not in first.metric_names,
            f"finite has {name!r}, which is not a metric; the metrics are {first.metric_names}",
        )
