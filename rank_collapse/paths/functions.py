"""Paths by length through any JAX function, without changing the function.

    contributions = rc.function_contributions(model, x, branches="attention")
    contributions.by_length  # [longest + 1, n, d]

Softmax weights, norm statistics, gates and choices are constants of the pass at x, as in
`path_contributions`. The function is then affine, and its paths are counted by the branches on
them. `branches` names scopes of `jax.named_scope`, which Equinox and Flax Linen set for each
module, or names of `jax.ad_checkpoint.checkpoint_name`.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from rank_collapse import checks
from rank_collapse.annotations import ArrayLike, Tree
from rank_collapse.network.precision import full_precision
from rank_collapse.paths.contributions import PathContributions
from rank_collapse.paths.traced.branches import Branches
from rank_collapse.paths.traced.channels import LazySums, Slots
from rank_collapse.paths.traced.inner_skips import check_skips, start_trail
from rank_collapse.paths.traced.interpreter import Interpreter, Start
from rank_collapse.paths.traced.programs import trace
from rank_collapse.paths.traced.values import Kind, Value, is_inexact, make_constant, make_state


@full_precision
def function_contributions(
    fn: Callable[[Tree], Tree],
    x: ArrayLike,
    *,
    branches: str | Mapping[str, str],
    longest: int | Mapping[str, int] | None = None,
    direction: ArrayLike | None = None,
    freeze: bool = True,
) -> PathContributions:
    """Sum all paths of each length through a function, exactly: Σ_k C_k + offset = fn(x).

    Frozen at x: softmax weights, norm statistics, gates, maxima, choices of experts. An elementwise
    function f of a state h is a gate f(h)/h times h, however it is written; a gate times another
    value is frozen as a whole. If two gates are multiplied, as in sigmoid(a) tanh(b), the gate with
    f(0) ≠ 0 is frozen; two gates with f(0) = 0 are a product of two states. Linear operations pass.
    A product of two states, and an unknown operation, are refused with their scope and line;
    `jax.lax.stop_gradient` freezes a value.

    A path takes or skips each branch: each entry into a scope that matches, or each value whose
    name matches. Its length counts the branches that it takes. A scope must contain the branch
    without the skip; one that contains it is refused if all paths go through it. Nested branches
    count once, as the outermost.

    Runs under jit, vmap and grad, and through scan, remat, jit, cond and custom derivatives. It
    traces fn again at every call: `jax.jit(lambda x: rc.function_contributions(fn, x, ...))`.

    Args:
        fn: Function of one array that returns one array. A function of token ids has to be written
            as a function of their embeddings.
        x: Where paths start and where fn is frozen: the residual stream or the embedding, floats
            of any shape.
        branches: A regular expression that matches whole parts of scopes ("LB_0/att" matches two
            parts) or names; or {"attention": …, "mlp": …} to count both, with by_length [a, m,
            ...].
        longest: The longest length with its own entry; `longer` is the sum of the others. None for
            all. For two kinds of branches, a number or one for each.
        direction: The vector that the paths carry, of the shape of x; None for x itself. The offset
            is output − Σ_k C_k, the constant part of fn if the direction is x.
        freeze: False for the exact derivative at x, Σ_k C_k = jvp(fn, x, direction), instead. A
            `jax.custom_jvp` without branches keeps its own rule. A `jax.custom_vjp` has no rule for
            a direction: its forward code is differentiated, so that a gradient of the caller's own,
            such as that of a straight-through estimator, is not used.

    Returns:
        `PathContributions`: by_length [longest + 1, ...], offset, output and longer.

    Raises:
        ValueError: An operation that cannot be frozen, with its place; a pattern without a match,
            with the nearest scopes; a branch that contains its own skip, with its line; whole
            numbers for x; several outputs; a direction of another shape.

    Source: Theorem 2.1 of Dong et al. 2021, summed by length as in its section 2.1.
    """
    x = _check_state(x)
    direction = x if direction is None else _check_direction(direction, x)
    return sum_paths(fn, x, branches, longest, freeze, direction=direction)


def sum_paths(
    fn: Callable[[Tree], Tree],
    x: ArrayLike,
    branches: str | Mapping[str, str],
    longest: int | Mapping[str, int] | None,
    freeze: bool,
    *,
    direction: ArrayLike | None = None,
    start: Start | None = None,
) -> PathContributions:
    """Sum the paths from the input along a direction, or from a state inside of the function.

    Args:
        fn, x, branches, longest, freeze: See `function_contributions`; x may be whole numbers
            where there is a start.
        direction: Direction at the input; None where paths start inside.
        start: The state where paths start; None where they start at the input.

    Raises:
        ValueError: In the same cases as `function_contributions`.
    """
    counted = Branches(branches)
    if not isinstance(freeze, bool):
        raise ValueError(f"freeze={freeze!r} is not True or False")
    slots = Slots(_check_longest(longest, counted.kinds))
    program = _trace(fn, x)
    value = make_constant(x)
    if start is None:
        value = make_state(x, LazySums(lambda: slots.start(direction), trail=start_trail()))
    interpreter = Interpreter(slots, counted, freeze, start)
    (out,) = interpreter.run(program.jaxpr, program.consts, [value])
    if start is not None:
        start.check_reached()
    result = interpreter.resolve(out)
    counted.check_matched(program.jaxpr)
    return _build_result(result, slots, counted)


def _build_result(out: Value, slots: Slots, counted: Branches) -> PathContributions:
    """Return the contributions, once the output is known to be a state.

    Args:
        out: The output of the function.
        slots: Axes of the path lengths.
        counted: The branches that matched.

    Raises:
        ValueError: The output is not a state.
    """
    if out.kind in (Kind.FACTOR, Kind.PRODUCT):
        raise ValueError(
            f"fn computes {out.reason}, so its output is not a sum of paths; freeze an argument of "
            "this operation with jax.lax.stop_gradient"
        )
    if out.kind != Kind.STATE:
        raise ValueError(
            "no path leads from x to the output of fn, because fn does not depend on x or depends "
            "on it only through frozen values (softmax weights, statistics, choices)"
        )
    counted.check_counted()
    check_skips(out.trail, counted.kinds)
    sums, output, axes = out.sums.array, out.array, tuple(range(slots.num_axes))
    wide = jnp.promote_types(output.dtype, jnp.float32)
    total = sums.astype(wide).sum(axes)
    offset = (output.astype(wide) - total).astype(output.dtype)
    sizes = [
        size if limit is None else limit + 1
        for size, limit in zip(slots.sizes(sums), slots.limits, strict=True)
    ]
    by_length = slots.resize(sums, sizes)
    longer = None
    if any(size > num_slots for size, num_slots in zip(slots.sizes(sums), sizes, strict=True)):
        longer = (total - by_length.astype(wide).sum(axes)).astype(output.dtype)
    return PathContributions(
        by_length, offset, None, output, slots.num_axes == 2, longer, output.ndim
    )


def _check_state(x):
    """Return the starting point of the paths as an array.

    Raises:
        ValueError: Several arrays, whole numbers, or an array that was donated.
    """
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.is_deleted():
        raise ValueError("x was deleted, because it was donated to another function; pass a copy")
    leaves = jax.tree.leaves(x)
    if len(leaves) != 1 or leaves[0] is not x:
        raise ValueError(
            f"x is {type(x).__name__}, not one array; pass the array from which paths start, and "
            "fix the other arguments of fn, as in lambda h: fn(h, others)"
        )
    x = _to_array(x, "x")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"x is {x.dtype}, but must be real floats; for token ids, pass their embeddings as x, "
            "and as fn a function of the embeddings"
        )
    return x


def _to_array(value, name):
    """Return a value as an array.

    Raises:
        ValueError: The value is not an array.
    """
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} is {type(value).__name__}, not one array of floats") from None


def _check_direction(direction, x):
    """Return the direction with the dtype of x.

    Raises:
        ValueError: A direction of another shape.
    """
    direction = _to_array(direction, "direction")
    if direction.shape != x.shape or not jnp.issubdtype(direction.dtype, jnp.floating):
        raise ValueError(
            f"direction is {direction.dtype}{list(direction.shape)}, but must be floats of the "
            f"shape of x, {list(x.shape)}"
        )
    return direction.astype(x.dtype)


def _check_longest(longest, kinds):
    """Return the limit of each kind of branch.

    Raises:
        ValueError: Not a whole number, or a limit for another kind.
    """
    by_kind = longest if isinstance(longest, Mapping) else dict.fromkeys(kinds, longest)
    unknown = [kind for kind in by_kind if kind not in kinds]
    if unknown:
        raise ValueError(
            f"longest={longest!r} has the key {unknown[0]!r}, but branches has only "
            f"{' and '.join(map(repr, kinds))}"
        )
    limits = tuple(by_kind.get(kind) for kind in kinds)
    for limit in limits:
        if limit is not None:
            checks.check_whole("longest", limit, 0)
    return limits


def _trace(fn, x):
    """Trace the function.

    Raises:
        ValueError: It is not a function, fails, or does not return one array of floats.
    """
    if not callable(fn):
        raise ValueError(f"fn is {type(fn).__name__}, not a function of x")
    try:
        program, outputs = trace(fn, x)
    except Exception as error:  # of anyone's code
        if isinstance(error, ValueError) and "\n" not in str(error):
            raise
        raise ValueError(_describe_failure(error, x)) from error
    leaves = jax.tree.leaves(outputs)
    if len(leaves) != 1:
        choice = "; choose it, as in lambda x: fn(x)[0]" if leaves else ""
        raise ValueError(f"fn returns {len(leaves)} arrays, but must return one{choice}")
    if not is_inexact(leaves[0]) or jnp.issubdtype(leaves[0].dtype, jnp.complexfloating):
        raise ValueError(f"fn returns {leaves[0].dtype}, but must return real floats")
    return program


def _describe_failure(error, x):
    """Describe in one line how a function fails, and what to change."""
    name, shape = type(error).__name__, list(x.shape)
    message = " ".join(str(error).split())
    cure = "fn must be a JAX function of one array"
    if isinstance(
        error, jax.errors.ConcretizationTypeError | jax.errors.TracerArrayConversionError
    ):
        cure = (
            "fn reads values of x in Python, but JAX traces fn before x has values; replace if, "
            "float and numpy by jnp.where, jax.lax.cond and jax.numpy"
        )
    elif any(word in message.lower() for word in ("dropout", "rng")):
        cure = (
            "dropout needs random numbers; switch it off with deterministic=True, "
            "eqx.nn.inference_mode or model.eval()"
        )
    elif "trace level" in message:
        cure = "call nnx.clone(model) inside of fn"
    return f"fn fails for x of {x.dtype}{shape} with {name}: {message[:200]}; {cure}"
