"""Wrong uses of sweep: one line each, and nothing is lost."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.oracles.small_sweeps import init, list_files, run, step, with_static
from tests.support.refusals import is_refused


def gives(metrics):
    """Returns a step that gives metrics of (state, hyper, index)."""
    return lambda state, hyper, index: (state, metrics(state, hyper, index))


def becomes(state_of):
    """Returns a step whose state is another."""
    return lambda state, hyper, index: (state_of(state), {"loss": 0.0})


def shows(state, hyper, index):
    jax.debug.print("{}", index)
    return step(state, hyper, index)


def calls_back(state, hyper, index):
    jax.experimental.io_callback(lambda i: None, None, index)
    return step(state, hyper, index)


COUNTER, LEFT = itertools.count(), []


def branches(state, hyper, index):
    return step(state, hyper, index) if hyper["rate"] > 0.1 else (state, {"loss": 0.0})


def leaves(state, hyper, index):
    LEFT.append(state["w"])
    return {"w": LEFT[0]}, {"loss": 0.0}


def give_away():
    array = jnp.ones(3)
    array.delete()
    return array


GIVEN_AWAY = give_away()
RESTS = becomes(lambda state: state)
NAN = float("nan")


async def begins_later(key, hyper):
    return init(key, hyper)


def yields(key, hyper):
    yield init(key, hyper)


# {misuse: (message, changes)}
WRONG = {
    "step prints": ("step has side effects \\(Debug\\), such as a print", {"step": shows}),
    "step calls back": ("step has side effects \\(IO\\)", {"step": calls_back}),
    "look prints": (
        "look has side effects",
        {"look": lambda s, h, k: (jax.debug.print("x"), 1.0)[1]},
    ),
    "step draws from NumPy": (
        "step is not the same when it is traced again: it draws from NumPy",
        {"step": becomes(lambda s: {"w": s["w"] + np.random.default_rng().normal()})},
    ),
    "init counts its calls": (
        "init is not the same when it is traced again",
        {"init": lambda k, h: {"w": jnp.ones(3) * next(COUNTER)}},
    ),
    "look draws from NumPy": (
        "look is not the same when",
        {"look": lambda s, h, k: s["w"] * np.random.default_rng().normal()},
    ),
    "a metric has another name each time": (
        "step is not the same when",
        {"step": gives(lambda *_: {f"loss{next(COUNTER)}": 1.0})},
    ),
    "step keeps a traced value in a list": (
        "step uses a value that an earlier trace left",
        {"step": leaves},
    ),
    "Python if on a swept value": (
        "step uses a traced value as a Python number .* \\(test_sweep_mistakes.py:",
        {"step": branches},
    ),
    "Python if on the index": (
        "uses a traced value as a Python number .*jnp.where",
        {"step": gives(lambda s, h, i: {"a": 1.0 if i > 2 else 0.0})},
    ),
    "Python loop to the index": (
        "uses a traced value as a Python number",
        {"step": gives(lambda s, h, i: {"a": len(range(i))})},
    ),
    "float of a swept value": (
        "number \\(if, while, float",
        {"step": gives(lambda s, h, i: {"a": float(h["rate"])})},
    ),
    "NumPy of a state": (
        "number .* or give the value in static=",
        {"step": gives(lambda s, h, i: np.sin(s["w"]))},
    ),
    "a swept value as a shape": (
        "a shape, NumPy",
        {"step": gives(lambda s, h, i: jnp.zeros(h["rate"]))},
    ),
    "step changes a shape": (
        "step changes \\['w'\\] of the state from float32\\[3\\] to float32\\[2\\]",
        {"step": becomes(lambda s: {"w": s["w"][:2]})},
    ),
    "step changes a dtype": (
        "from float32\\[3\\] to bfloat16\\[3\\]; each array keeps",
        {"step": becomes(lambda s: {"w": s["w"].astype(jnp.bfloat16)})},
    ),
    "a whole number becomes a fraction": (
        "step changes itself of the state from int32\\[\\] to float32\\[\\]",
        {"init": lambda k, h: 1, "step": becomes(lambda s: s + 0.5)},
    ),
    "a complex swept value": (
        "from float32\\[3\\] to complex64\\[3\\]",
        {"hyper": {"rate": [1j]}},
    ),
    "a key becomes its data": (
        "step changes \\['k'\\] of the state from key",
        {
            "init": lambda k, h: {"k": k},
            "step": becomes(lambda s: {"k": jax.random.key_data(s["k"])}),
        },
    ),
    "step loses an array": ("step loses \\['w'\\] of the state", {"step": becomes(lambda s: {})}),
    "step adds an array": (
        "step adds \\['v'\\] of the state",
        {"step": becomes(lambda s: s | {"v": 0.0})},
    ),
    "step puts an array for None": (
        "step adds \\['v'\\] of the state; it keeps",
        {
            "init": lambda k, h: init(k, h) | {"v": None},
            "step": becomes(lambda s: s | {"v": 0.0}),
        },
    ),
    "step makes a list of a dictionary": (
        "step loses \\['w'\\] of the state; it keeps",
        {"step": becomes(lambda s: [s["w"]])},
    ),
    "step makes a tuple of a list": (
        "step returns a state whose structure differs",
        {"init": lambda k, h: [jnp.ones(3)], "step": becomes(lambda s: tuple(s))},
    ),
    "step returns the state alone": (
        "step returns dict, not \\(state, metrics\\)",
        {"step": lambda s, h, i: s},
    ),
    "step returns three values": (
        "step returns tuple of 3, not",
        {"step": lambda s, h, i: (s, {}, 0)},
    ),
    "step returns None": ("step returns NoneType", {"step": lambda s, h, i: None}),
    "step yields": (
        "step returns generator, not",
        {"step": lambda s, h, i: (x for x in (s, {}))},
    ),
    "init returns None": ("init returns None, which has no arrays", {"init": lambda k, h: None}),
    "init yields": ("init yields or is async: it must return its results", {"init": yields}),
    "init is async": (
        "init yields or is async: it must return its results",
        {"init": begins_later},
    ),
    "a state with text": (
        "the state that init returns holds str at \\['w'\\], which is not an array",
        {"init": lambda k, h: {"w": "a"}},
    ),
    "a state with a function": (
        "at \\['f'\\], which is not an array; nnx.split and eqx.partition",
        {"init": lambda k, h: {"w": jnp.ones(3), "f": jax.nn.relu}},
    ),
    "a state with an object": (
        "holds ndarray at \\['o'\\], which is not an array",
        {"init": lambda k, h: {"w": jnp.ones(3), "o": np.array([None])}},
    ),
    "a state with a whole number of 64 bits": (
        "has a whole number at \\['n'\\] that does not fit into 32 bits",
        {"init": lambda k, h: {"w": jnp.ones(3), "n": 2**40}},
    ),
    "a state with whole numbers of 64 bits": (
        "has a whole number at \\['n'\\] that does not fit into 32 bits",
        {"init": lambda k, h: {"w": jnp.ones(3), "n": np.array([1, -(2**31) - 1])}},
    ),
    "a metric is text": (
        "what step returns to be kept holds str at \\['a'\\]",
        {"step": gives(lambda *_: {"a": "x"})},
    ),
    "a metric is a function": (
        "holds builtin_function_or_method at",
        {"step": gives(lambda *_: {"a": print})},
    ),
    "a metric is a key": (
        "has random keys at \\['a'\\]: return numbers",
        {"step": gives(lambda *_: {"a": jax.random.key(0)})},
    ),
    "a metric of 64 bits": (
        "what step returns to be kept has a whole number at \\['a'\\] that does not fit",
        {"step": gives(lambda *_: {"a": np.int64(2**31)})},
    ),
    "a metric has the name of a swept value": (
        "the metric 'rate' has the name of an axis",
        {"step": gives(lambda *_: {"rate": 1.0})},
    ),
    "a metric is named seed": (
        "the metric 'seed' has the name of an axis",
        {"step": gives(lambda *_: {"seed": 1.0})},
    ),
    "a metric is named step": (
        "the metric 'step' has the name of an axis",
        {"step": gives(lambda *_: {"step": 1.0})},
    ),
    "a metric has the name of a static value": (
        "the metric 'size' has the name of an axis",
        with_static(size=[1, 2]) | {"step": lambda s, h, i, size: (s, {"size": 1.0})},
    ),
    "a look has the name of a swept value": (
        "the look 'rate' has the name of an axis",
        {"look": lambda s, h, k: {"rate": 1.0}},
    ),
    "two metrics of one name by a slash": (
        "step returns two arrays with the name 'a/b'",
        {"step": gives(lambda *_: {"a/b": 1.0, "a": {"b": 2.0}})},
    ),
    "a metric has the name of another's axis": (
        "the metric 'a_0' has the name of an axis",
        {"step": gives(lambda *_: {"a": jnp.ones(3), "a_0": 1.0})},
    ),
    "a swept value has the name of a metric's axis": (
        "'a_0' is a swept value and an axis of the metric 'a'",
        {"hyper": {"a_0": [1.0, 2.0]}, "step": gives(lambda *_: {"a": jnp.ones(3)})},
    ),
    "metrics have names of two kinds": (
        "step raises ValueError: Comparator raised",
        {"step": gives(lambda *_: {1: 1.0, "a": 2.0})},
    ),
    "look returns text": ("what look returns to be kept holds str", {"look": lambda s, h, k: "a"}),
    "look raises": ("look raises KeyError: 'v'", {"look": lambda s, h, k: s["v"]}),
    "finite names no metric": (
        "finite has 'los', which is not a metric; the metrics are \\['loss'\\]",
        {"finite": ["los"]},
    ),
    "finite is one name": ("finite='loss' is not a list", {"finite": "loss"}),
    "finite is a number": ("finite=3 is not a list", {"finite": 3}),
    "init is a number": ("init=3 is not a function init\\(key, hyper\\)", {"init": 3}),
    "look is a number": ("look=3 is not a function look\\(state, hyper, key\\)", {"look": 3}),
    "init takes no hyper": (
        "init cannot be called as init\\(key, hyper\\): ",
        {"init": lambda key: {}},
    ),
    "init and step swapped": (
        "init cannot be called as init\\(key, hyper\\): missing",
        {"init": step, "step": init},
    ),
    "step takes no index": (
        "step cannot be called as step\\(state, hyper, index\\)",
        {"step": lambda s, h: (s, {})},
    ),
    "look takes the state alone": (
        "look cannot be called as look\\(state, hyper, key\\)",
        {"look": lambda s: s},
    ),
    "init takes no static value": (
        "init cannot be called as init\\(key, hyper, depth=2\\)",
        {"static": {"depth": [2]}},
    ),
    "a static value is named key": (
        "init cannot be called as init\\(key, hyper, key=1\\): multiple",
        {"static": {"key": 1}},
    ),
    "an unknown swept value": (
        "step raises KeyError: 'lr' \\(test_sweep_mistakes.py:",
        {"step": gives(lambda s, h, i: h["lr"])},
    ),
    "shapes that do not fit": (
        "step raises TypeError: dot_general requires",
        {"step": gives(lambda s, h, i: s["w"] @ jnp.ones(5))},
    ),
    "step is vmapped over seeds": (
        "step raises ValueError: vmap was requested",
        {"step": jax.vmap(step)},
    ),
    "an axis that is not there": (
        "step raises NameError: .*unbound axis name",
        {"step": gives(lambda s, h, i: jax.lax.psum(s["w"], "i"))},
    ),
    "a donated array": (
        "step uses an array that was given away",
        {"step": becomes(lambda s: {"w": GIVEN_AWAY})},
    ),
    "until is a number": ("until=3 is not a function", {"until": 3}),
    "until returns a dataset": (
        "until returns Dataset, which is not true or false",
        {"until": lambda metrics: metrics},
    ),
    "until returns text": ("until returns str", {"until": lambda metrics: "no"}),
    "until returns an answer for each seed": (
        "until returns ndarray, which is not true or false",
        {"until": lambda metrics: np.array([True])},
    ),
    "until returns None": ("until returns NoneType", {"until": lambda metrics: None}),
    "no seeds": ("seeds=0 is not a whole number from 1", {"seeds": 0}),
    "negative seeds": ("seeds=-3 is not a whole number from 1", {"seeds": -3}),
    "half a seed": ("seeds=1.5 is not", {"seeds": 1.5}),
    "seeds are true": ("seeds=True is not", {"seeds": True}),
    "a list of seeds": ("seeds=\\[0, 1\\] is not", {"seeds": [0, 1]}),
    "too many seeds": ("seeds=2147483648 is not", {"seeds": 2**31}),
    "a negative first seed": ("first_seed=-1", {"first_seed": -1}),
    "a first seed beyond the last": ("first_seed=2147483647 is not", {"first_seed": 2**31 - 1}),
    "steps are text": ("steps='10' is not", {"steps": "10"}),
    "negative steps": ("steps=-1 is not", {"steps": -1}),
    "every of 0": ("every=0", {"every": 0}),
    "at_once of 0": ("at_once=0", {"at_once": 0}),
    "several runs at once whose random numbers depend on each other": (
        "at_once=2, but under vmap random numbers of the generator 'rbg' depend on the other runs",
        {"at_once": 2, "key": jax.random.key(0, impl="rbg")},
    ),
    "a first seed too large": (
        "first_seed=2147483646 is not a whole number from 0 to 2147483645",
        {"first_seed": 2**31 - 2, "seeds": 2},
    ),
    "round_seeds of 0": ("round_seeds=0", {"round_seeds": 0}),
    "a negative key": ("key=-1", {"key": -1}),
    "a key of 33 bits": ("key=4294967296 is not a whole number", {"key": 2**32}),
    "two keys": (
        "key of shape \\(2,\\) is not one key",
        {"key": jax.random.split(jax.random.key(0))},
    ),
    "a key of fractions": ("key of float64\\[2\\] is not a random key", {"key": np.ones(2)}),
    "a mesh that is text": (
        "mesh='cpu' is not a mesh made by runs.seeds.seed_mesh",
        {"mesh": "cpu"},
    ),
    "a mesh of other axes": (
        "is not a mesh made by runs.seeds.seed_mesh",
        {"mesh": jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))},
    ),
    "a folder that is a number": ("folder=3 is not a path", {"folder": 3}),
    "a folder without a name": ("folder='' is not a path", {"folder": ""}),
    "no value": ("hyper\\['rate'\\] is empty", {"hyper": {"rate": []}}),
    "a swept text": ("hyper\\['rate'\\]='a' is neither a number nor", {"hyper": {"rate": "a"}}),
    "a swept text among numbers": ("\\[1, 'a'\\] is neither", {"hyper": {"rate": [1, "a"]}}),
    "a swept None": ("hyper\\['rate'\\]=None is neither", {"hyper": {"rate": None}}),
    "a swept day": (
        "hyper\\['rate'\\]=.* is neither a number nor",
        {"hyper": {"rate": np.array(["2020-01-01"], "M8[D]")}},
    ),
    "a swept time": (
        "hyper\\['rate'\\]=.* is neither a number nor",
        {"hyper": {"rate": np.array([3], "m8[s]")}},
    ),
    "a swept set": ("hyper\\['rate'\\]=\\{1, 2\\} is neither", {"hyper": {"rate": {1, 2}}}),
    "a swept key": (
        "hyper\\['rate'\\]=Array.* is neither",
        {"hyper": {"rate": jax.random.key(0)}},
    ),
    "a swept NaN": (
        "hyper\\['rate'\\]=\\[0.1, nan\\] has a NaN",
        {"hyper": {"rate": [0.1, NAN]}},
    ),
    "a value twice": ("hyper\\['rate'\\] has 0.1 twice", {"hyper": {"rate": [0.1, 0.2, 0.1]}}),
    "a value twice in float32": (
        "hyper\\['rate'\\] has 0.1000000000\\d* twice",
        {"hyper": {"rate": [0.1, 0.1 + 1e-12]}},
    ),
    "nested values": (
        "hyper\\['rate'\\]=\\[\\[0.1\\], \\[0.2\\]\\] has 2 axes",
        {"hyper": {"rate": [[0.1], [0.2]]}},
    ),
    "nested values of two lengths": (
        "neither a number nor a list of numbers",
        {"hyper": {"rate": [[0.1], [0.2, 3]]}},
    ),
    "a swept whole number of 64 bits": (
        "hyper\\['rate'\\]=1099511627776 does not fit into int32",
        {"hyper": {"rate": 2**40}},
    ),
    "hyper is a list": ("hyper=\\[1\\] is not a dictionary", {"hyper": [1]}),
    "a swept seed": ("hyper has the name 'seed', which is an axis", {"hyper": {"seed": [1]}}),
    "an empty name": ("hyper has a value without a name", {"hyper": {"": [1], "rate": 0.1}}),
    "a name that is a number": ("hyper has the name 1, which is not a string", {"hyper": {1: 2}}),
    "a name in hyper and static": ("'rate' is in both hyper and static", {"static": {"rate": [1]}}),
    "static is text": ("static='depth' is not a dictionary", {"static": "depth"}),
    "no static value": ("static\\['depth'\\] is empty", {"static": {"depth": []}}),
    "a static value twice": ("static\\['depth'\\] has 2 twice", {"static": {"depth": [2, 2]}}),
    "two static functions without names": (
        "static\\['fn'\\] has '<lambda>' twice: each needs a name",
        {"static": {"fn": [lambda x: x, lambda x: 2 * x]}},
    ),
    "two static objects without names": (
        "static\\['fn'\\] has '<object object>' twice: each needs a name",
        {"static": {"fn": [object(), object()]}},
    ),
    "a static array twice": (
        "static\\['a'\\] has '\\[0. 0.\\]' twice: each needs a name",
        with_static(a=[np.zeros(2), np.zeros(2)]),
    ),
    "a static name that is no keyword": (
        "static has the name 'a b', which cannot",
        {"static": {"a b": 1}},
    ),
}


@pytest.mark.parametrize("misuse", WRONG)
def test_a_mistake_is_one_line(misuse, used_folder):
    message, changes = WRONG[misuse]
    saved = list_files(used_folder)
    is_refused(message, run, **{"folder": used_folder} | changes)
    assert list_files(used_folder) == saved


@pytest.mark.parametrize(
    "changes",
    [
        {"init": lambda k, h: 0, "step": lambda s, h, i: (s + 1, None)},
        {"init": lambda k, h: {"n": None, "f": True, "k": k}, "step": becomes(lambda s: s)},
        {"step": jax.jit(step, donate_argnums=0)},
        {"step": gives(lambda s, h, i: {"a/b": s["w"], "c": [1, 2.0]})},
        {"hyper": {"rate": (0.1, 0.2), "a/b": np.arange(2), "on": [True, False]}},
        with_static(size=[[1], [2]], array=[np.zeros(2), np.ones(2)], options={"a": 1}),
        {"key": jax.random.key(0, impl="rbg"), "every": 10**9},
        {"at_once": 10**6},
        {"look": lambda s, h, k: None},
    ],
    ids=[
        "a whole number as state and no metrics",
        "None, a flag and a key in the state",
        "a jitted step that donates",
        "metrics with slashes and in lists",
        "a tuple, an array and flags as values",
        "static values that cannot be hashed",
        "another kind of key, and large numbers",
        "more runs at once than there are",
        "a look at nothing",
    ],
)
def test_what_looks_wrong_and_is_not(changes, tmp_path):
    """It trains, and resumes."""
    whole = run(**changes)
    run(**changes | {"folder": tmp_path, "steps": 2})
    resumed = run(**changes | {"folder": tmp_path})
    for name, values in whole.metrics.data_vars.items():
        np.testing.assert_array_equal(resumed.metrics[name], values)
