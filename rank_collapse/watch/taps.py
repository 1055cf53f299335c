"""Arrays that a JAX program measures inside its own transformations: vmap, scan, checkpoint, jit.

A Python list that collects a layer's values would keep tracers of a finished transformation. Here
`tap` marks the arrays in the program by a primitive that does nothing. `measure_taps` traces the
program, measures the arrays where they are marked, and returns the scalars from every inner
program. Axes of a vmap come first, like a batch; steps of a scan are layers. This is the "harvest"
of functional programs, with JAX's documented primitives and interpreters.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

from rank_collapse.checks import refuse_if
from rank_collapse.paths.traced.programs import count_scan_arguments

Scalars = dict[str, Array]  # by name, with the layers as first axis
Measure = Callable[..., dict[str, Any]]

_COUNT = ""  # name of a scalar that every layer has
_tap = core.Primitive("rank_collapse_tap")
_tap.multiple_results = True
_tap.def_impl(lambda *arrays, part: [])
_tap.def_abstract_eval(lambda *arrays, part: [])
mlir.register_lowering(_tap, lambda context, *arrays, part: [])
ad.primitive_jvps[_tap] = lambda primals, tangents, *, part: (_tap.bind(*primals, part=part), [])

# JAX traces an inner jit or checkpoint once for each value of this context: what it traced without
# taps, or with those of other modules, is not reused.
_tapped = jax.make_user_context(None)


def _batch_tap(arrays, axes, *, part):
    """Put the axis of a vmap in front, of every array.

    Args:
        arrays: Arguments of the tap.
        axes: The mapped axis of each; None for one that is the same for all.
        part: See `tap`.

    Returns:
        As a batching rule: (results of the tap: none, their axes: none).
    """
    pairs = list(zip(arrays, axes, strict=True))
    size = next(a.shape[axis] for a, axis in pairs if axis is not None)
    in_front = [
        jnp.broadcast_to(a, (size, *a.shape)) if axis is None else jnp.moveaxis(a, axis, 0)
        for a, axis in pairs
    ]
    return _tap.bind(*in_front, part=part), []


batching.primitive_batchers[_tap] = _batch_tap


def tap(x: Array, weights: Array | None = None, part: str = "layer") -> None:
    """Mark a layer's tokens, and attention weights, to be measured; has no other effect.

    Args:
        x: Tokens [..., n, d].
        weights: [..., h, n, m]; None for none.
        part: "layer"; or "begin" and "end" of a layer that is measured only if no tap between them
            is.
    """
    _tap.bind(*jax.lax.stop_gradient((x,) if weights is None else (x, weights)), part=part)


def measure_taps(
    function: Callable[..., Any], measure: Measure, *args: object, choice: object = ""
) -> tuple[Any, Scalars]:
    """Call a function and measure the arrays that are marked in it by `tap`.

    Args:
        function: A JAX function, which is traced once. Values that it closes over may be traced
            outside.
        measure: measure(x, weights), weights None where there are none; a pure function.
        *args: Arguments of the function, pytrees of arrays.
        choice: What determines, apart from the function, which arrays are marked.

    Returns:
        (its output, scalars). The scalars are stacked in the order of the calls, [layers, ...], NaN
        where a layer does not have a name, also one without any; {} if no layer has one.

    Raises:
        ValueError: A tap inside a loop of unknown length, or inside a program that returns no
            further outputs, such as `shard_map` or a custom derivative.
    """
    traced_result = []  # structure of the result, leaves (None for an array), positions of arrays

    def list_arrays(*args):
        """Calls the function, and returns the arrays of its result."""
        leaves, structure = jax.tree.flatten(function(*args))
        arrays = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)}
        statics = [None if i in arrays else leaf for i, leaf in enumerate(leaves)]
        traced_result[:] = structure, statics, list(arrays)
        return list(arrays.values())

    def measure_marked(x, weights):
        """Measures a layer; also one without scalars has an entry, so that it has a number."""
        return {_COUNT: 0.0, **measure(x, weights)}

    with _tapped(choice):
        closed = jax.make_jaxpr(list_arrays)(*args)
    arrays, scalars = _run(closed.jaxpr, closed.consts, jax.tree.leaves(args), measure_marked)
    scalars.pop(_COUNT, None)
    structure, leaves, positions = traced_result
    for position, array in zip(positions, arrays, strict=True):
        leaves[position] = array
    return jax.tree.unflatten(structure, leaves), scalars


def _run(jaxpr, consts, args, measure):
    """Evaluate a program equation by equation, and measure the arrays that are marked in it by
    `tap`.

    Args:
        jaxpr, consts: The program and its constants.
        args: Its arguments.
        measure: Function of (tokens, attention weights or None) of a marked layer, which returns
            scalars by name.

    Returns:
        (its outputs, scalars [layers, ...] by name).
    """
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    layers, begun = [], []
    for eqn in jaxpr.eqns:
        inputs = [a.val if isinstance(a, core.Literal) else values[a] for a in eqn.invars]
        outputs: Any = []
        if eqn.primitive is _tap and eqn.params["part"] == "begin":
            begun.append(len(layers))
        elif eqn.primitive is _tap:
            if eqn.params["part"] == "end" and begun.pop() < len(layers):
                continue
            x, weights = (*inputs, None)[:2]
            scalars = measure(x, weights)
            layers.append({name: jnp.asarray(a)[None] for name, a in scalars.items()})
        elif _has_tap(eqn):
            outputs, scalars = _run_equation(eqn, inputs, measure)
            layers.append(scalars)
        else:
            variables = [a for a in eqn.invars if isinstance(a, core.Var)]
            program = jaxpr.replace(constvars=(), invars=variables, outvars=eqn.outvars, eqns=[eqn])
            arrays = [values[a] for a in variables]
            outputs = core.jaxpr_as_fun(core.ClosedJaxpr(program, ()))(*arrays)
        values.update(zip(eqn.outvars, outputs, strict=True))
    outputs = [a.val if isinstance(a, core.Literal) else values[a] for a in jaxpr.outvars]
    return outputs, concatenate_layers(layers)


def _run_equation(eqn, inputs, measure):
    """Evaluate an equation whose own programs have taps.

    Args:
        eqn: The equation.
        inputs: Its arguments.
        measure: See `_run`.

    Returns:
        (its outputs, scalars [layers, ...] by name).
    """
    name, params = eqn.primitive.name, eqn.params

    def run(program, *arrays):
        """Evaluates a program inside of the equation, and measures its taps."""
        return _run(*_open(program), arrays, measure)

    if name == "scan":
        return _run_scan(params, inputs, measure)
    if name == "cond":
        return _run_cond(params["branches"], inputs, measure)
    if name in ("jit", "pjit"):
        return jax.jit(lambda *arrays: run(params["jaxpr"], *arrays))(*inputs)
    if name in ("checkpoint", "remat", "remat2"):
        options = {key: params[key] for key in ("prevent_cse", "policy")}
        return jax.checkpoint(lambda *arrays: run(params["jaxpr"], *arrays), **options)(*inputs)
    refuse_if(
        True,
        f"an attention inside {name} cannot be measured from outside of it: let the layer return "
        "the scalars of rc.monitor, or leave it out by select= or blocks=",
    )


def _run_scan(params, inputs, measure):
    """Evaluate a scan: the layers of its steps follow each other.

    Args:
        params: Parameters of the equation.
        inputs: Its arguments.
        measure: See `_run`.

    Returns:
        (its outputs: the carry, then what is stacked; scalars [steps · layers of a step, ...] by
        name).
    """
    num_consts, num_carry = count_scan_arguments(params)
    jaxpr, consts = _open(params["jaxpr"])
    fixed, carry, stacked = (
        inputs[:num_consts],
        inputs[num_consts : num_consts + num_carry],
        inputs[num_consts + num_carry :],
    )

    def step(carry, x):
        """Runs the body of the scan once: (its carry, (its stacked outputs, its scalars by
        name))."""
        outputs, scalars = _run(jaxpr, consts, (*fixed, *carry, *x), measure)
        return outputs[:num_carry], (outputs[num_carry:], scalars)

    options = {
        key: params[key]
        for key in ("length", "reverse", "unroll", "_split_transpose")
        if key in params
    }
    carry, (outputs, scalars) = jax.lax.scan(step, list(carry), tuple(stacked), **options)
    steps = {name: a.reshape((-1, *a.shape[2:])) for name, a in scalars.items()}
    return [*carry, *outputs], steps


def _run_cond(branches, inputs, measure):
    """Evaluate a conditional: NaN for the layers that the branch taken does not have.

    Args:
        branches: Programs of the branches.
        inputs: Number of the branch that is taken, then the arguments.
        measure: See `_run`.

    Returns:
        (its outputs, scalars [layers, ...] by name).
    """
    programs = [_open(branch) for branch in branches]
    shapes = [
        jax.eval_shape(lambda *arrays, p=p: _run(*p, arrays, measure)[1], *inputs[1:])
        for p in programs
    ]
    longest = {}
    for scalars in shapes:
        for name, a in scalars.items():
            longest[name] = max(longest.get(name, a), a, key=lambda a: a.shape[0])
    num_layers = max(a.shape[0] for a in longest.values())

    def make_branch(program):
        """Makes the function of one branch, with NaN for layers and names that it does not have."""

        def run(*arrays):
            """Runs the branch: (its outputs, its scalars with NaN for layers that it lacks)."""
            outputs, scalars = _run(*program, arrays, measure)
            padded = {}  # {name: [num_layers, ...]}, of the same shapes in every branch
            for name, example in longest.items():
                padded[name] = jnp.full((num_layers, *example.shape[1:]), jnp.nan, example.dtype)
                if name in scalars:
                    num_measured = len(scalars[name])
                    padded[name] = padded[name].at[:num_measured].set(scalars[name])
            return outputs, padded

        return run

    index, *arguments = inputs
    return jax.lax.switch(index, [make_branch(program) for program in programs], *arguments)


def concatenate_layers(layers: list[Scalars]) -> Scalars:
    """Concatenate scalars of several layers, NaN where a layer has none of a name.

    Args:
        layers: {name: [l, ...]} of one or several layers each.
    """
    examples: dict[str, Array] = {}
    for scalars in layers:
        for name, a in scalars.items():
            examples.setdefault(name, a)
    columns = {}
    for name, example in examples.items():
        pieces = []
        for scalars in (s for s in layers if s):
            if name in scalars:
                pieces.append(scalars[name])
            else:
                size = len(next(iter(scalars.values())))
                pieces.append(jnp.full((size, *example.shape[1:]), jnp.nan, example.dtype))
        dtype = jnp.result_type(*(a.dtype for a in pieces))
        columns[name] = jnp.concatenate([a.astype(dtype) for a in pieces])
    return columns


def _open(program):
    """Return (program without constants, its constants) of either kind of JAX's programs."""
    return (program.jaxpr, program.consts) if hasattr(program, "consts") else (program, ())


def _programs(eqn) -> Iterator[Any]:
    """Yield the programs in an equation's parameters."""
    for value in eqn.params.values():
        for program in value if isinstance(value, list | tuple) else (value,):
            if isinstance(program, core.ClosedJaxpr | core.Jaxpr):
                yield _open(program)[0]


def _has_tap(eqn):
    """Return whether a program inside of an equation has a tap, the mark of an array to be
    measured."""
    return any(
        inner.primitive is _tap or _has_tap(inner)
        for program in _programs(eqn)
        for inner in program.eqns
    )
