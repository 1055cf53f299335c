"""Wrong uses of sweep: one line each, and nothing is lost."""

import itertools
import resource
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import each_is_refused, is_refused

from rank_collapse.runs import files
from rank_collapse.training import sweep

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
WRONG = {
    # side effects
    "step has side effects \\(Debug\\), such as a print": {"step": shows},
    "step has side effects \\(IO\\)": {"step": calls_back},
    "look has side effects": {"look": lambda s, h, k: (jax.debug.print("x"), 1.0)[1]},
    "step is not the same when it is traced again: it draws from NumPy": {
        "step": becomes(lambda s: {"w": s["w"] + np.random.default_rng().normal()})
    },
    "init is not the same when it is traced again": {
        "init": lambda k, h: {"w": jnp.ones(3) * next(COUNTER)}
    },
    "step uses a value that an earlier trace left": {"step": leaves},
    # Python where there are no numbers yet
    "step uses a traced value as a Python number .* \\(test_sweep_mistakes.py:": {"step": branches},
    "uses a traced value as a Python number .*jnp.where": {
        "step": gives(lambda s, h, i: {"a": 1.0 if i > 2 else 0.0})
    },
    "number \\(if, while, float": {"step": gives(lambda s, h, i: {"a": float(h["rate"])})},
    "number .* or give the value in static=": {"step": gives(lambda s, h, i: np.sin(s["w"]))},
    "a shape, NumPy": {"step": gives(lambda s, h, i: jnp.zeros(h["rate"]))},
    # states
    "step changes \\['w'\\] of the state from float32\\[3\\] to float32\\[2\\]": {
        "step": becomes(lambda s: {"w": s["w"][:2]})
    },
    "from float32\\[3\\] to bfloat16\\[3\\]; each array keeps": {
        "step": becomes(lambda s: {"w": s["w"].astype(jnp.bfloat16)})
    },
    "step loses \\['w'\\] of the state": {"step": becomes(lambda s: {})},
    "step adds \\['v'\\] of the state": {"step": becomes(lambda s: s | {"v": 0.0})},
    "step loses \\['w'\\] of the state; it keeps": {"step": becomes(lambda s: [s["w"]])},
    "step returns a state of another structure": {
        "init": lambda k, h: [jnp.ones(3)],
        "step": becomes(lambda s: tuple(s)),
    },
    "step returns dict, not \\(state, metrics\\)": {"step": lambda s, h, i: s},
    "step returns tuple of 3, not": {"step": lambda s, h, i: (s, {}, 0)},
    "step returns NoneType": {"step": lambda s, h, i: None},
    "init returns None, which has no arrays": {"init": lambda k, h: None},
    "the state that init returns holds str at \\['w'\\], which is not an array": {
        "init": lambda k, h: {"w": "a"}
    },
    "at \\['f'\\], which is not an array; nnx.split and eqx.partition": {
        "init": lambda k, h: {"w": jnp.ones(3), "f": jax.nn.relu}
    },
    # metrics
    "what step returns to be kept holds str at \\['a'\\]": {"step": gives(lambda *_: {"a": "x"})},
    "holds builtin_function_or_method at": {"step": gives(lambda *_: {"a": print})},
    "has random keys at \\['a'\\]: return numbers": {
        "step": gives(lambda *_: {"a": jax.random.key(0)})
    },
    "the metric 'rate' has the name of an axis": {"step": gives(lambda *_: {"rate": 1.0})},
    "the metric 'seed' has the name of an axis": {"step": gives(lambda *_: {"seed": 1.0})},
    "finite has 'los', which is not a metric; the metrics are \\['loss'\\]": {"finite": ["los"]},
    "finite='loss' is not a list": {"finite": "loss"},
    # functions
    "init=3 is not a function init\\(key, hyper\\)": {"init": 3},
    "init cannot be called as init\\(key, hyper\\): ": {"init": lambda key: {}},
    "step cannot be called as step\\(state, hyper, index\\)": {"step": lambda s, h: (s, {})},
    "look cannot be called as look\\(state, hyper, key\\)": {"look": lambda s: s},
    "init cannot be called as init\\(key, hyper, depth=2\\)": {"static": {"depth": [2]}},
    "step raises KeyError: 'lr' \\(test_sweep_mistakes.py:": {
        "step": gives(lambda s, h, i: h["lr"])
    },
    "step raises TypeError: dot_general requires": {
        "step": gives(lambda s, h, i: s["w"] @ jnp.ones(5))
    },
    "step raises NameError: .*unbound axis name": {
        "step": gives(lambda s, h, i: jax.lax.psum(s["w"], "i"))
    },
    "step uses an array that was given away": {"step": becomes(lambda s: {"w": GIVEN_AWAY})},
    "until=3 is not a function": {"until": 3},
    "until returns Dataset, which is not true or false": {"until": lambda metrics: metrics},
    "until returns NoneType": {"until": lambda metrics: None},
    # numbers and axes
    "seeds=0 is not a whole number from 1": {"seeds": 0},
    "seeds=1.5 is not": {"seeds": 1.5},
    "first_seed=-1": {"first_seed": -1},
    "steps='10' is not": {"steps": "10"},
    "every=0": {"every": 0},
    "at_once=0": {"at_once": 0},
    "round_seeds=0": {"round_seeds": 0},
    "key=-1": {"key": -1},
    "key of shape \\(2,\\) is not one key": {"key": jax.random.split(jax.random.key(0))},
    "key of float64\\[2\\] is not a random key": {"key": np.ones(2)},
    "hyper\\['rate'\\] is empty": {"hyper": {"rate": []}},
    "hyper\\['rate'\\]='a' is neither a number nor": {"hyper": {"rate": "a"}},
    "hyper\\['rate'\\]=None is neither": {"hyper": {"rate": None}},
    "hyper\\['rate'\\]=\\[0.1, nan\\] has a NaN": {"hyper": {"rate": [0.1, NAN]}},
    "hyper\\['rate'\\] has 0.1 twice": {"hyper": {"rate": [0.1, 0.2, 0.1]}},
    "hyper\\['rate'\\] has 0.1000000000\\d* twice": {"hyper": {"rate": [0.1, 0.1 + 1e-12]}},
    "hyper\\['rate'\\]=\\[\\[0.1\\], \\[0.2\\]\\] has 2 axes": {"hyper": {"rate": [[0.1], [0.2]]}},
    "neither a number nor a list of numbers": {"hyper": {"rate": [[0.1], [0.2, 3]]}},
    "hyper\\['rate'\\]=1099511627776 does not fit into int32": {"hyper": {"rate": 2**40}},
    "hyper=\\[1\\] is not a dictionary": {"hyper": [1]},
    "hyper has the name 'seed', which is an axis": {"hyper": {"seed": [1]}},
    "'rate' is in hyper and in static": {"static": {"rate": [1]}},
    "static\\['depth'\\] is empty": {"static": {"depth": []}},
    "static\\['depth'\\] has 2 twice": {"static": {"depth": [2, 2]}},
    "static\\['fn'\\] has '<lambda>' twice: each needs a name": {
        "static": {"fn": [lambda x: x, lambda x: 2 * x]}
    },
    "static\\['fn'\\] has '<object object>' twice: each needs a name": {
        "static": {"fn": [object(), object()]}
    },
    "static has the name 'a b', which cannot": {"static": {"a b": 1}},
}


@pytest.mark.parametrize("message", WRONG, ids=lambda message: message[:40])
def test_a_mistake_is_one_line(message):
    is_refused(message, run, **WRONG[message])


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


def test_the_folder_of_another_sweep_is_refused(tmp_path, monkeypatch):
    def other(state, hyper, index):
        return step(state, {"rate": 2 * hyper["rate"]}, index)

    def run_here(**changes):
        return run(folder=tmp_path, **changes)

    whole = run_here()
    cases = [
        ({"init": lambda k, h: {"w": jnp.ones(3)}}, "init is another function"),
        ({"step": other}, "step is another function; use another folder"),
        (
            {"hyper": {"rate": [0.1, 0.3]}},
            r"of hyper rate is \[0.1, 0.2\] there, \[0.1, 0.3\] here;",
        ),
        ({"key": 1}, r"key is \[0, 0\] there, \[0, 1\] here"),
        ({"look": lambda s, h, k: s["w"]}, "look= is given here, not there; use"),
        ({"finite": []}, "finite is None there"),
        (
            {
                "static": {"size": [1, 2]},
                "init": lambda k, h, size: init(k, h),
                "step": lambda s, h, i, size: step(s, h, i),
            },
            "of static size is 'absent' there, .* here; use another folder",
        ),
    ]
    for changes, message in cases:
        is_refused(
            f"^{tmp_path} is of another sweep: .*{message}",
            run_here,
            error=files.RunError,
            **changes,
        )
    with monkeypatch.context() as patch:
        patch.setitem(DATA, "shift", np.ones(3))
        is_refused("close over other arrays", run_here, error=files.RunError)
    with files.lock_folder(tmp_path):
        is_refused("is in use by another process", run_here, error=files.RunError)
    is_refused("steps=3, but .* has 4 steps: a sweep can be extended", run_here, steps=3)
    np.testing.assert_array_equal(run_here().metrics["loss"], whole.metrics["loss"])
    (tmp_path / "sweep.json").write_text("{")
    is_refused("sweep.json cannot be read .* use another", run_here, error=files.RunError)
    (tmp_path / "sweep.json").unlink()
    is_refused("has runs and no sweep.json", run_here, error=files.RunError)
    is_refused("cannot write to", run, folder="/dev/null/x", error=files.RunError)


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
