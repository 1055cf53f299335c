"""Wrong uses of sweep: one line each, and nothing is lost."""

import itertools
import resource
import shutil
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rank_collapse.runs import files
from rank_collapse.training import sweep
from rank_collapse.training.engine.files import SweepFolder
from rank_collapse.training.engine.program import Program
from tests.support.refusals import each_is_refused, is_refused

DATA = {"shift": np.arange(3.0)}


def init(key, hyper):
    return {"w": jax.random.normal(key, (3,))}


def step(state, hyper, index):
    loss = jnp.sum(state["w"] ** 2)
    return {"w": (1 - hyper["rate"]) * state["w"] + DATA["shift"]}, {"loss": loss}


def run(**changes):
    options = {"init": init, "step": step, "steps": 4, "seeds": 2, "every": 2, "quiet": True}
    return sweep(**options | {"hyper": {"rate": [0.1, 0.2]}} | changes)


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


def with_static(**static):
    """Returns changes with values of static that init and step take."""
    return {
        "static": static,
        "init": lambda key, hyper, **_: init(key, hyper),
        "step": lambda state, hyper, index, **_: step(state, hyper, index),
    }


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
        "step returns a state of another structure",
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
    "init yields": ("init yields or is async: it returns", {"init": yields}),
    "init is async": ("init yields or is async: it returns", {"init": begins_later}),
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
    "round_seeds of 0": ("round_seeds=0", {"round_seeds": 0}),
    "a negative key": ("key=-1", {"key": -1}),
    "two keys": (
        "key of shape \\(2,\\) is not one key",
        {"key": jax.random.split(jax.random.key(0))},
    ),
    "a key of fractions": ("key of float64\\[2\\] is not a random key", {"key": np.ones(2)}),
    "a mesh that is text": ("mesh='cpu' is no mesh of runs.seeds.seed_mesh", {"mesh": "cpu"}),
    "a mesh of other axes": (
        "is no mesh of runs.seeds.seed_mesh",
        {"mesh": jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))},
    ),
    "a folder that is a number": ("folder=3 is no path", {"folder": 3}),
    "a folder without a name": ("folder='' is no path", {"folder": ""}),
    "no value": ("hyper\\['rate'\\] is empty", {"hyper": {"rate": []}}),
    "a swept text": ("hyper\\['rate'\\]='a' is neither a number nor", {"hyper": {"rate": "a"}}),
    "a swept text among numbers": ("\\[1, 'a'\\] is neither", {"hyper": {"rate": [1, "a"]}}),
    "a swept None": ("hyper\\['rate'\\]=None is neither", {"hyper": {"rate": None}}),
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
    "a name in hyper and static": ("'rate' is in hyper and in static", {"static": {"rate": [1]}}),
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


@pytest.fixture(scope="module")
def used_folder(tmp_path_factory):
    """The folder of a sweep that is done."""
    folder = tmp_path_factory.mktemp("used")
    run(folder=folder)
    return folder


def list_files(folder):
    """Returns the bytes of all files of a folder."""
    paths = [p for p in Path(folder).rglob("*") if p.is_file()]
    return {str(p.relative_to(folder)): p.read_bytes() for p in paths}


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
        {"key": jax.random.key(0, impl="rbg"), "at_once": 10**6, "every": 10**9},
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


def test_a_static_value_changes_no_name():
    def named(state, hyper, index, name):
        return state, {name: 1.0}

    def shaped(state, hyper, index, size):
        return state, {"a": jnp.ones((1,) * size)}

    def begin(key, hyper, **static):
        return jnp.ones(3)

    each_is_refused(
        (lambda: run(init=begin, step=named, static={"name": ["a", "b"]}), "with name=b \\['b'\\]"),
        (lambda: run(init=begin, step=shaped, static={"size": [0, 1]}), "'a' has 0 axes, and 1 wi"),
    )


def test_a_run_at_an_array_is_that_run():
    result = run(
        **with_static(array=[np.zeros(2), np.ones(2)], size=[[1], [2]]), hyper={"rate": 0.1}
    )
    assert result.state(1, array=np.ones(2), size=[2])["w"].shape == (3,)
    is_refused("array=array", result.state, 0, array=np.full(2, 3.0), size=[1])


def test_a_run_that_is_none_is_named():
    result = run(static={}, quiet=True)
    each_is_refused(
        (lambda: result.state(5, rate=0.1), "seed=5 is not one of \\[0, 1\\]"),
        (lambda: result.state(0, rate=0.3), "rate=0.3 is not one of"),
        (lambda: result.state(0), "values of \\[\\]; this sweep has \\['rate'\\]"),
    )
    assert "Swept(metrics=['loss'], {'rate': 2" in repr(result)


def test_a_key_that_is_used_twice_is_said(capsys):
    def keep(key, hyper):
        return {"w": jax.random.normal(key, (3,)), "key": key}

    def draw(state, hyper, index):
        return state | {"w": jax.random.normal(state["key"], (3,))}, {"loss": 0.0}

    def fold(state, hyper, index):
        key = jax.random.fold_in(state["key"], index)
        return state | {"w": jax.random.normal(key, (3,))}, {"loss": 0.0}

    for function, is_said in ((draw, True), (fold, False)):
        run(init=keep, step=function, quiet=False)
        assert ("a random key that was used is used again" in capsys.readouterr().err) is is_said


def test_seeds_or_values_that_change_nothing_are_said(capsys):
    """In a function that a jit hides, too; not where one static value or the look alone uses it."""
    seeds_note, value_note = "init does not use its key", "no function uses hyper['scale']"
    fixed = {"init": lambda key, hyper: {"w": jax.random.normal(jax.random.key(0), (3,))}}
    hidden = {"init": jax.jit(lambda key, hyper: jax.jit(lambda k: {"w": jnp.ones(3)})(key))}
    scales = {"hyper": {"rate": 0.1, "scale": [1.0, 2.0]}}
    at_one_size = {
        "static": {"size": [1, 2]},
        "init": lambda key, hyper, size: init(key, hyper),
        "step": lambda state, hyper, index, size: step(
            {"w": state["w"] * (hyper["scale"] if size > 1 else 1.0)}, hyper, index
        ),
    }
    looked_at = {"look": lambda state, hyper, key: hyper["scale"]}
    cases = [
        ({}, ()),
        (fixed, (seeds_note,)),
        (hidden, (seeds_note,)),
        (fixed | {"seeds": 1}, ()),
        (scales, (value_note,)),
        (scales | fixed, (seeds_note, value_note)),
        (scales | at_one_size, ()),
        (scales | looked_at, ()),
        ({"hyper": {"rate": 0.1, "scale": 2.0}}, ()),
        ({"hyper": {"rate": 0.1, "key": [1.0, 2.0]}}, ("no function uses hyper['key']",)),
    ]
    for changes, notes in cases:
        run(**changes, quiet=False)
        lines = [line for line in capsys.readouterr().err.splitlines() if "use" in line]
        assert len(lines) == len(notes), (changes, lines)
        for line, note in zip(lines, notes, strict=True):
            assert note in line


def faster(state, hyper, index):
    return step(state, {"rate": 2 * hyper["rate"]}, index)


def shifted(state, hyper, index):
    """Computes what `step` does, with other data."""
    loss = jnp.sum(state["w"] ** 2)
    return {"w": (1 - hyper["rate"]) * state["w"] + np.ones(3)}, {"loss": loss}


def find_snapshot(folder):
    return next(folder.glob("runs/*.npz"))


def write_over(name, content):
    """Returns what writes other bytes into a file of a folder, None for its snapshot."""

    def write(folder):
        path = find_snapshot(folder) if name is None else folder / name
        path.write_bytes(content(path.read_bytes()))

    return write


def drop_losses(folder):
    path = find_snapshot(folder)
    arrays = dict(np.load(path))
    arrays["metrics/0"] = arrays["metrics/0"][:, :1]
    np.savez(path, **arrays)


def flip_a_loss(folder):
    """Flips a bit of a number in a snapshot, which is not compressed."""
    path = find_snapshot(folder)
    content, losses = bytearray(path.read_bytes()), np.load(path)["metrics/0"].tobytes()
    content[content.index(losses)] ^= 1
    path.write_bytes(content)


OTHER, DAMAGED = "^[^ ]* is of another sweep: .*", "delete this file, and the same"
# {misuse: (message, changes, what was done to the folder)}
FOLDERS = {
    "another init": (
        f"{OTHER}init is another function",
        {"init": lambda k, h: {"w": jnp.ones(3)}},
        None,
    ),
    "another step": (
        f"{OTHER}step is another function; use another folder",
        {"step": faster},
        None,
    ),
    "other data": (f"{OTHER}close over other arrays", {"step": shifted}, None),
    "other values": (
        OTHER + r"of hyper rate is \[0.1, 0.2\] there, \[0.1, 0.3\] here;",
        {"hyper": {"rate": [0.1, 0.3]}},
        None,
    ),
    "another key": (OTHER + r"key is \[0, 0\] there, \[0, 1\] here", {"key": 1}, None),
    "a look": (
        f"{OTHER}look= is given here, not there; use",
        {"look": lambda s, h, k: s["w"]},
        None,
    ),
    "other finite metrics": (f"{OTHER}finite is None there", {"finite": []}, None),
    "static values": (
        f"{OTHER}of static size is 'absent' there, .* here; use another folder",
        with_static(size=[1, 2]),
        None,
    ),
    "sweep.json is cut": (
        "sweep.json cannot be read .* use another",
        {},
        write_over("sweep.json", lambda content: content[:1]),
    ),
    "sweep.json is a list": (
        "sweep.json .*use another",
        {},
        write_over("sweep.json", lambda content: b"[]"),
    ),
    "sweep.json is missing": (
        "has runs and no sweep.json",
        {},
        lambda folder: (folder / "sweep.json").unlink(),
    ),
    "a snapshot is cut": (DAMAGED, {}, write_over(None, lambda content: content[:300])),
    "a snapshot is empty": (DAMAGED, {}, write_over(None, lambda content: b"")),
    "a bit of a snapshot is flipped": (DAMAGED, {}, flip_a_loss),
    "a snapshot has fewer losses": (DAMAGED, {}, drop_losses),
}


@pytest.mark.parametrize("misuse", FOLDERS)
def test_a_folder_of_another_sweep_or_damaged_is_refused_and_stays(misuse, used_folder, tmp_path):
    message, changes, spoil = FOLDERS[misuse]
    folder = tmp_path / "copy"
    shutil.copytree(used_folder, folder)
    if spoil is not None:
        spoil(folder)
    saved = list_files(folder)
    is_refused(message, run, error=files.RunError, folder=folder, **changes)
    assert list_files(folder) == saved


def test_a_folder_that_is_used_or_cannot_be_written_is_refused(used_folder):
    saved = list_files(used_folder)
    with files.lock_folder(used_folder):
        is_refused("is in use by another process", run, error=files.RunError, folder=used_folder)
    is_refused(
        "steps=3, but .* has 4 steps: a sweep can be extended", run, folder=used_folder, steps=3
    )
    for path in ("/dev/null/x", "/proc/self/x"):
        is_refused("cannot write to", run, error=files.RunError, folder=path)
    assert list_files(used_folder) == saved
    again, whole = (run(folder=folder).metrics["loss"] for folder in (used_folder, None))
    np.testing.assert_array_equal(again, whole)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interruption_saves_what_is_done(error, tmp_path, monkeypatch):
    advance, calls = Program.advance, []

    def interrupt(self, *arguments):
        calls.append(1)
        if len(calls) == 2:
            raise error
        return advance(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Program, "advance", interrupt)
        patch.setattr(SweepFolder, "is_due", lambda self: False)
        with pytest.raises(error):
            run(folder=tmp_path)
    assert int(np.load(find_snapshot(tmp_path))["step"]) == 2
    np.testing.assert_array_equal(run(folder=tmp_path).metrics["loss"], run().metrics["loss"])


def test_a_full_disk_loses_nothing(tmp_path):
    """No file may have more than 1000 bytes for a while."""
    options = {"folder": tmp_path, "seeds": 3}
    run(**options)
    saved = {p: p.read_bytes() for p in Path(tmp_path).glob("runs/*.npz")}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        is_refused(
            "cannot write to .*npz: File too large", run, error=files.RunError, steps=20, **options
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert {p: p.read_bytes() for p in Path(tmp_path).glob("runs/*.npz")} == saved
    extended = run(steps=20, **options)
    np.testing.assert_array_equal(extended.metrics["loss"], run(steps=20, seeds=3).metrics["loss"])
    path = next(Path(tmp_path).glob("runs/*.npz"))
    path.write_bytes(path.read_bytes()[:300])
    is_refused("delete this file, and the same", run, error=files.RunError, steps=20, **options)
    path.unlink()
    again = run(steps=20, **options)
    np.testing.assert_array_equal(again.metrics["loss"], extended.metrics["loss"])
