"""The rule of each operation, by the name of its primitive."""

from collections.abc import Sequence

from rank_collapse.paths.traced import primitives
from rank_collapse.paths.traced.equation import Equation
from rank_collapse.paths.traced.function_rules import bend, compare, measure, select, take_larger
from rank_collapse.paths.traced.linear_rules import add, add_up, choose, move
from rank_collapse.paths.traced.product_rules import contract, divide, multiply, negate
from rank_collapse.paths.traced.programs import bind
from rank_collapse.paths.traced.values import (
    Value,
    make_frozen,
)


def apply_rule(equation: Equation, values: Sequence[Value]) -> list[Value]:
    """Apply the rule of the equation's primitive: what becomes of the sums over paths of its
    arguments.

    Args:
        equation: The equation, an operation of a jaxpr.
        values: Its arguments.

    Returns:
        Its results.

    Raises:
        ValueError: There is no rule for the primitive.
    """
    name, arrays = equation.name, [v.array for v in values]
    if not any(v.depends for v in values):
        return equation.apply_to_constants(values)
    if name == "stop_gradient":
        return [make_frozen(a) for a in bind(equation.eqn, arrays)]
    if name == "optimization_barrier":
        pairs = zip(values, bind(equation.eqn, arrays), strict=True)
        return [v.replace(array=a) for v, a in pairs]
    if name in primitives.STRUCTURAL or _sums_single_entries(equation, values[0]):
        return move(equation, values[0])
    if name in primitives.STATISTICS:
        return measure(equation, values)
    if name in primitives.PREDICATES:
        return compare(equation, values)
    if name in primitives.UNARY or name in ("pow", "atan2", "rem", "nextafter", "clamp"):
        return [bend(equation, values)]
    rules = {
        "mul": multiply,
        "div": divide,
        "select_n": select,
        "max": take_larger,
        "min": take_larger,
        "neg": negate,
    }
    rules |= dict.fromkeys(("add", "sub", "add_any"), add)
    if name in rules:
        return [rules[name](equation, equation.broadcast(values))]
    if name in primitives.SELECTING:
        return [choose(equation, values)]
    if name in primitives.LINEAR:
        return [add_up(equation, values)]
    if name in primitives.BILINEAR:
        return [contract(equation, values)]
    if not equation.eqn.outvars:
        bind(equation.eqn, arrays)  # such as a print
        return []
    raise ValueError(
        f"fn computes {name} of a value that depends on x, at {equation.place}, and there is no "
        f"rule for paths through {name}; {primitives.find_cure(name)}"
    )


def _sums_single_entries(equation, value):
    """Return whether a sum is over axes of one entry only, so that it moves entries and adds none.

    `jnp.einsum` removes an axis of one argument by such a sum.

    Args:
        equation: The equation.
        value: Its argument.
    """
    if equation.name != "reduce_sum":
        return False
    return all(value.array.shape[axis] == 1 for axis in equation.eqn.params["axes"])
