"""The user's init, step and look, traced once: checked, named, with their data separate.

Arrays that a function closes over, such as training data, become arguments of the compiled program,
so that they are held once for all seeds.
"""

import hashlib
import inspect
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal
from jax.interpreters.partial_eval import dce_jaxpr
from jax.tree_util import tree_leaves_with_path

from rank_collapse.checks import refuse_if
from rank_collapse.printed import format_one_line, quote_value
from rank_collapse.runs.states import is_key

_ADDRESS = re.compile(r"0x[0-9a-f]+")
# Of random bits whose values under vmap depend on the keys of all examples.
_SHARED_BITS = re.compile(r"rng_bit_generator|key<\w*rbg>|impl=\w*rbg")
_JITTED = type(jax.jit(lambda: None))
_PACKAGES = ("/jax/", "/jaxlib/", "/rank_collapse/training/")  # whose lines no user wrote


class Operations:
    """A traced function of one run, as operations on flat lists of arrays.

    Args:
        closed, out: The two results of `jax.make_jaxpr(fn, return_shape=True)`: the operations, and
            the pytree of shapes that the function returns.

    Attributes:
        consts: The arrays that the function closes over.
    """

    def __init__(self, closed: ClosedJaxpr, out: Any):
        self.closed, self.out = closed, out
        self.consts = [
            c if isinstance(c, jax.Array) else jnp.asarray(np.asarray(c)) for c in closed.consts
        ]

    def __call__(self, consts: Sequence[Any], *leaves: Any) -> list[Any]:
        """Computes the leaves of the result."""
        results = jax.core.eval_jaxpr(self.closed.jaxpr, consts, *leaves)
        return [
            leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf, shape.dtype)  # a constant
            for leaf, shape in zip(results, jax.tree.leaves(self.out), strict=True)
        ]

    def list_used(self) -> list[bool]:
        """Lists of each leaf of the arguments whether any result depends on it."""
        program = self.closed.jaxpr
        return list(dce_jaxpr(program, [True] * len(program.outvars))[1])


class Traced(Operations):
    """A function that a user wrote, checked.

    Args:
        name: Name of the function, for messages.
        fn: The function; a jitted one is used without its jit.
        arguments: Examples of its arguments: arrays, keys, numbers, jax.ShapeDtypeStruct.
        static: Keyword arguments.
        check: Checks the return value and converts it to a pytree of arrays.

    Attributes:
        fingerprint: Hash of the computation, without the values of the arrays.
        data: Hash of these.
        shares_bits: Whether random numbers under vmap depend on the other runs, as those of the
            generator "rbg" do.

    Raises:
        ValueError: It cannot be traced, differs when it is traced again, or has side effects.
    """

    def __init__(
        self,
        name: str,
        fn: Callable,
        arguments: Sequence[Any],
        static: Mapping[str, Any],
        check: Callable[[Any], Any] = lambda value: value,
    ):
        while isinstance(fn, _JITTED):
            fn = fn.__wrapped__

        def trace():
            """Traces fn.

            Returns:
                (hash of its program and of the paths of its results, hashes of its constants).
            """
            # A function of its own each time: none is cached.
            program = jax.make_jaxpr(lambda *a: check(fn(*a, **static)), return_shape=True)
            super(Traced, self).__init__(*program(*arguments))
            paths = [jax.tree_util.keystr(path) for path, _ in tree_leaves_with_path(self.out)]
            text = _ADDRESS.sub("", str(self.closed))
            self.shares_bits = _SHARED_BITS.search(text) is not None
            return _hash(text, *paths), _hash(*_list_data(self.closed))

        self.fingerprint, self.data = _explain_errors(name, trace)
        effects = sorted({str(effect) for effect in self.closed.effects})
        refuse_if(
            effects,
            f"{name} has side effects ({', '.join(effects)}), such as a print or a callback: "
            "return the values to print as metrics",
        )
        refuse_if(
            _explain_errors(name, trace) != (self.fingerprint, self.data),
            f"{name} is not the same when it is traced again: it draws from NumPy or random, reads "
            "a clock, or counts its calls; draw from the key, and keep what changes in the state",
        )


def _explain_errors(name, trace):
    """Returns the result of a trace; an error is reported as an error of the user's function."""
    try:
        return trace()
    except Refused as error:
        raise ValueError(str(error)) from None
    except Exception as error:
        raise ValueError(f"{name} {_explain(error)}{_locate(error)}") from error


class Refused(Exception):
    """A return value of a function is refused; the message is complete."""


_TRACED_VALUE = (
    "uses a traced value as a Python number (if, while, float(), a shape, NumPy): use jnp.where or "
    "lax.cond, or give the value in static="
)


def _explain(error):
    """Explains in one line why the user's function cannot be traced."""
    if isinstance(error, jax.errors.UnexpectedTracerError):
        return "uses a value that an earlier trace left in a global or a list"
    if isinstance(
        error,
        jax.errors.ConcretizationTypeError
        | jax.errors.TracerArrayConversionError
        | jax.errors.TracerIntegerConversionError
        | jax.errors.NonConcreteBooleanIndexError,
    ):
        return _TRACED_VALUE
    text = str(error).strip().partition("\n")[0]
    if "concrete values" in text:  # of a shape
        return _TRACED_VALUE
    if "has been deleted" in text:
        return "uses an array that was given away, by donate_argnums or delete()"
    return f"raises {type(error).__name__}: {format_one_line(text, 300)}"


def _locate(error):
    """Names the line of the user's file where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [f for f in frames if not any(part in f.filename for part in _PACKAGES)]
    return f" ({users[-1].filename.rpartition('/')[2]}:{users[-1].lineno})" if users else ""


def check_callable(name: str, fn: Any, like: str, static: Mapping[str, Any]) -> None:
    """Checks that a function can be called with these arguments.

    Args:
        name: Name of the argument.
        fn: The function.
        like: Form of the call, such as "init(key, hyper)".
        static: Keyword arguments.

    Raises:
        ValueError: It is not a function, or takes other arguments.
    """
    refuse_if(not callable(fn), f"{name}={quote_value(fn)} is not a function {like}")
    is_later = inspect.isgeneratorfunction(fn) or inspect.iscoroutinefunction(fn)
    refuse_if(is_later, f"{name} yields or is async: it must return its results")
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # of C
        return
    positions = like.count(",") + 1
    try:
        signature.bind(*range(positions), **static)
    except TypeError as error:
        keywords = "".join(f", {key}={value!r}" for key, value in static.items())
        raise ValueError(f"{name} cannot be called as {like[:-1]}{keywords}): {error}") from None


def accepted(fn: Callable, static: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keyword arguments that a function takes."""
    parameters = inspect.signature(fn).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {name: value for name, value in static.items() if takes_any or name in parameters}


def as_arrays(what: str, tree: Any, advice: str = "", keys: bool = True) -> Any:
    """Converts numbers of a pytree to arrays, and checks that every leaf is one.

    Args:
        what: Description of the pytree, for messages.
        tree: The pytree.
        advice: Advice for messages.
        keys: Whether random keys are allowed.

    Raises:
        Refused: A leaf is none.
    """
    leaves = tree_leaves_with_path(tree)
    for path, leaf in leaves:
        name = jax.tree_util.keystr(path) or "itself"
        is_number = isinstance(leaf, bool | int | float | complex)
        is_number |= isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind not in "OSUMm"
        if not (is_number or isinstance(leaf, jax.Array)):
            kind = type(leaf).__name__
            raise Refused(f"{what} holds {kind} at {name}, which is not an array{advice}")
        if not keys and is_key(leaf):
            raise Refused(f"{what} has random keys at {name}: return numbers")
        if not isinstance(leaf, jax.Array) and not fits_into_jax(np.asarray(leaf)):
            raise Refused(f"{what} has a whole number at {name} that does not fit into 32 bits")
    return jax.tree.map(lambda a: a if isinstance(a, jax.Array) else jnp.asarray(a), tree)


def fits_into_jax(array: np.ndarray) -> bool:
    """Returns whether JAX, which may have 32 bits alone, has all values of an array of numbers."""
    if array.dtype.kind not in "iu":
        return True
    limits = np.iinfo(jax.dtypes.canonicalize_dtype(array.dtype))
    return bool(((array >= limits.min) & (array <= limits.max)).all())


def check_state(state: Any) -> Any:
    """Converts what init returns to a pytree of arrays.

    Raises:
        Refused: The state has no arrays, or a leaf is not an array.
    """
    if not jax.tree.leaves(state):
        raise Refused(f"init returns {quote_value(state)}, which has no arrays")
    advice = "; nnx.split and eqx.partition take arrays and the remainder apart"
    return as_arrays("the state that init returns", state, advice)


def check_step(output: Any, like: Any) -> Any:
    """Converts what step returns to (state, {name: metric}).

    Args:
        output: Result of step.
        like: The shapes of the state.

    Raises:
        Refuses a new state that differs in structure, shapes or dtypes from the old one, and
        metrics that are not arrays.
    """
    if not (isinstance(output, tuple) and len(output) == 2):
        size = f" of {len(output)}" if isinstance(output, tuple) else ""
        raise Refused(f"step returns {type(output).__name__}{size}, not (state, metrics)")
    state = as_arrays("the state that step returns", output[0])
    old, new = dict(_name_leaves(like)), dict(_name_leaves(state))
    for name in sorted(old.keys() ^ new.keys()):
        change = "loses" if name in old else "adds"
        raise Refused(f"step {change} {name} of the state; it keeps the structure that init made")
    for name, leaf in new.items():
        before, after = _describe(old[name]), _describe(leaf)
        if before != after:
            raise Refused(
                f"step changes {name} of the state from {before} to {after}; each array keeps its "
                "shape and dtype"
            )
    if jax.tree.structure(state) != jax.tree.structure(like):
        raise Refused(
            "step returns a state whose structure differs from the structure that init made"
        )
    return state, check_metrics("step", output[1])


def check_metrics(name: str, metrics: Any) -> dict[str, Any]:
    """Converts a pytree of arrays to {name: array}, with "/" between the names of its levels.

    Args:
        name: Name of the function that returns it.
        metrics: The pytree; a single array is named "metric".

    Raises:
        Refused: A leaf is not an array of numbers, or two have one name.
    """
    arrays = {}
    metrics = as_arrays(f"what {name} returns to be kept", metrics, keys=False)
    for path, leaf in tree_leaves_with_path(metrics):
        metric = jax.tree_util.keystr(path, simple=True, separator="/") or "metric"
        if metric in arrays:
            raise Refused(f"{name} returns two arrays with the name {metric!r}")
        arrays[metric] = leaf
    return arrays


def _name_leaves(tree):
    for path, leaf in tree_leaves_with_path(tree):
        yield jax.tree_util.keystr(path) or "itself", leaf


def _describe(leaf):
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def drop_weak_types(tree: Any) -> Any:
    """Returns the shapes of a pytree as of arrays, not of Python's numbers."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)


def reuses_key(init: Traced, step: Traced, key: Any, hyper: Sequence[Any]) -> bool:
    """Returns whether the first two steps use a random key again that was used before.

    Args:
        init, step: The functions of one run.
        key: Random key of a seed.
        hyper: Traced values of the run.
    """
    size = len(jax.tree.leaves(init.out))

    def make_steps(key, hyper):
        """Makes two steps, so that a key that the state keeps is used twice."""
        leaves = init(init.consts, key, *hyper)
        for index in range(2):
            leaves = step(step.consts, *leaves, *hyper, jnp.int32(index))[:size]
        return leaves

    with jax.debug_key_reuse(True):
        try:
            jax.make_jaxpr(make_steps)(key, list(hyper))
        except jax.errors.KeyReuseError:
            return True
        except Exception:  # the check of JAX does not know every program
            return False
    return False


def _hash(*parts):
    """Returns a short hash of texts and bytes."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part if isinstance(part, bytes) else str(part).encode())
        digest.update(b"\0")
    return digest.hexdigest()[:16]


def _list_data(program):
    """Lists the bytes of all arrays in a program, including those of inner programs."""
    for const in getattr(program, "consts", ()):
        yield _as_bytes(const)
    for equation in getattr(program, "jaxpr", program).eqns:
        for atom in equation.invars:
            if isinstance(atom, Literal) and np.ndim(atom.val):
                yield _as_bytes(atom.val)
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_program):
            if _is_program(value):
                yield from _list_data(value)


def _is_program(value):
    return hasattr(value, "eqns")


def _as_bytes(array):
    """Converts an array to bytes that identify its dtype, shape and values."""
    if isinstance(array, jax.core.Tracer):
        raise jax.errors.UnexpectedTracerError("of an earlier trace")
    if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    array = np.ascontiguousarray(np.asarray(array))
    return f"{array.dtype}{array.shape}".encode() + hashlib.sha256(array.tobytes()).digest()
