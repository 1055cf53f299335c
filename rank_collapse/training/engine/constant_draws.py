"""Finds draws that are the same at each step: of a random key that no argument changes."""

from collections.abc import Sequence

from jax.extend.core import Jaxpr, Literal
from jax.interpreters.partial_eval import dce_jaxpr

from rank_collapse.paths.traced.programs import count_scan_arguments
from rank_collapse.training.engine.tracing import Operations

DRAWS = ("random_bits", "random_gamma", "threefry2x32", "rng_bit_generator", "rng_uniform")


def repeats_draws(step: Operations, num_results: int) -> bool:
    """Returns whether results depend on random numbers that are the same at each step.

    The key of such numbers depends on no argument, as `jax.random.key(0)` inside of the function
    does. Draws that other results alone depend on do not count: they may be fixed data, on which
    the training is evaluated. Nor do draws under a condition that an argument decides.

    Args:
        step: The function, whose first results are the new state.
        num_results: Number of these results.
    """
    program = step.closed.jaxpr
    is_needed = [position < num_results for position in range(len(program.outvars))]
    needed, is_used = dce_jaxpr(program, is_needed)
    return _read(needed, [True] * sum(is_used))[0]


def _read(program: Jaxpr, flags: Sequence[bool]) -> tuple[bool, list[bool]]:
    """Reads the equations of a program, with a flag for each value: whether steps change it.

    Args:
        program: The program.
        flags: Of each of its arguments.

    Returns:
        (whether one of the draws repeats, the flags of its results).
    """
    changes = dict(zip(program.invars, flags, strict=True))

    def read_flag(atom):
        return not isinstance(atom, Literal) and changes.get(atom, False)

    any_repeats = False
    for equation in program.eqns:
        inputs = [read_flag(atom) for atom in equation.invars]
        repeats, outputs = _read_equation(equation, inputs)
        any_repeats |= repeats
        changes.update(zip(equation.outvars, outputs, strict=True))
    return any_repeats, [read_flag(atom) for atom in program.outvars]


def _read_equation(equation, inputs):
    """Returns (whether one of its draws repeats, the flags of its results).

    Args:
        equation: The equation.
        inputs: Of each argument, whether steps change it.
    """
    name, params, count = equation.primitive.name, equation.params, len(equation.outvars)
    if name == "scan":
        return _read_loop(_open(params["jaxpr"]), inputs, *count_scan_arguments(params))
    if name == "while":
        # The arguments are constants of the condition, constants of the body, and the carry.
        num_condition, num_body = params["cond_nconsts"], params["body_nconsts"]
        num_carry = len(inputs) - num_condition - num_body
        body_inputs, body = inputs[num_condition:], _open(params["body_jaxpr"])
        repeats, carry = _read_loop(body, body_inputs, num_body, num_carry)
        condition = _open(params["cond_jaxpr"])
        does_length_change = _read(condition, inputs[:num_condition] + carry)[1][0]
        return (False, [True] * count) if does_length_change else (repeats, carry)
    if name == "cond" and not inputs[0]:
        does_repeat, flags = False, [False] * count
        for branch in params["branches"]:
            branch_repeats, branch_flags = _read(_open(branch), inputs[1:])
            does_repeat |= branch_repeats
            flags = [one or other for one, other in zip(flags, branch_flags, strict=True)]
        return does_repeat, flags
    inner = [_open(params[key]) for key in ("jaxpr", "call_jaxpr") if key in params]
    if name != "cond" and inner and len(inner[0].invars) == len(inputs):
        repeats, outputs = _read(inner[0], inputs)
        if len(outputs) == count:
            return repeats, outputs
    return name in DRAWS and not any(inputs), [any(inputs)] * count


def _read_loop(body, inputs, first_carried, num_carry):
    """Reads the body of a loop until the flags of what it carries stay the same.

    A carried value counts as changed by steps if it is so before the loop or after any pass.

    Args:
        body: The program of one pass.
        inputs: Of each argument of the body, whether steps change it.
        first_carried: Position of the first argument that the loop carries.
        num_carry: Number of carried values; they are the first results of the body.

    Returns:
        (whether one of the draws repeats, the flags of the loop's results: the carried values, then
        what is stacked).
    """
    inputs = list(inputs)
    carried = slice(first_carried, first_carried + num_carry)
    while True:
        repeats, outputs = _read(body, inputs)
        new = [a or b for a, b in zip(inputs[carried], outputs, strict=False)]
        if new == inputs[carried]:
            return repeats, [*new, *outputs[num_carry:]]
        inputs[carried] = new


def _open(program):
    """Returns a program without its constants, which never change."""
    return getattr(program, "jaxpr", program)
