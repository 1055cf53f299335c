"""sweep: anyone's init and step over seeds and swept values, whole, resumed, on any devices."""

import os
import pickle
import signal
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rank_collapse.runs.seeds import seed_mesh
from rank_collapse.training import sweep
from rank_collapse.training.engine.functions import trace_functions
from rank_collapse.training.engine.program import Program
from tests.support.folders import REPOSITORY
from tests.support.processes import LIMIT, python

INPUTS = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
TARGETS = np.sin(INPUTS.sum(axis=1))


def init(key, hyper, width=4):
    """A network of one hidden layer; its key draws the batches."""
    key_in, key_out, key_data = jax.random.split(key, 3)
    weights = {
        "in": jax.random.normal(key_in, (3, width)),
        "out": hyper["scale"] * jax.random.normal(key_out, (width,)),
    }
    return {"weights": weights, "key": key_data, "mean": jnp.zeros((), jnp.bfloat16)}


def step(state, hyper, index, width=4):
    """A step of gradient descent on a batch of the step."""
    key = jax.random.fold_in(state["key"], index)
    batch = jax.random.randint(key, (8,), 0, 16)

    def compute_loss(weights):
        outputs = jnp.tanh(jnp.asarray(INPUTS)[batch] @ weights["in"]) @ weights["out"]
        return jnp.mean((outputs - jnp.asarray(TARGETS)[batch]) ** 2)

    loss, slope = jax.value_and_grad(compute_loss)(state["weights"])
    weights = jax.tree.map(lambda w, g: w - hyper["rate"] * g, state["weights"], slope)
    mean = 0.5 * state["mean"] + loss.astype(jnp.bfloat16)
    return state | {"weights": weights, "mean": mean}, {"loss": loss, "index": index}


def measure(state, hyper, key):
    return {
        "norm": jnp.linalg.norm(state["weights"]["in"], axis=0),
        "drawn": jax.random.uniform(key),
    }


# Runs of rate 6 are soon no longer finite.
SWEPT = {"hyper": {"rate": [0.01, 6.0], "scale": 0.5}, "static": {"width": [2, 4]}}
WHOLE = SWEPT | {"steps": 25, "seeds": 3, "every": 10, "look": measure, "quiet": True}


@pytest.fixture(scope="module")
def whole():
    return sweep(init, step, **WHOLE)


def list_leaves(result):
    """Lists metrics, looks and states as plain arrays."""
    states = jax.tree.leaves(result.states)
    data = [jax.random.key_data(a) if isinstance(a, jax.Array) else a for a in states]
    looks = [] if result.looks is None else list(result.looks.data_vars.values())
    values = [*result.metrics.data_vars.values(), *looks, result.diverged_at, *data]
    return [np.asarray(a).astype(np.float64) for a in values]


def assert_same_bits(a, b):
    for x, y in zip(list_leaves(a), list_leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def run_alone(seed, rate, width, steps=25, scale=0.5):
    """Runs one seed by hand: (metrics, last finite state)."""
    hyper = {"rate": rate, "scale": scale}
    state = init(jax.random.fold_in(jax.random.key(0), seed), hyper, width=width)
    advance = jax.jit(lambda state, index: step(state, hyper, index, width=width))
    losses, last = [], state
    for index in range(steps):
        if np.isfinite(state["weights"]["in"]).all():
            last = state
        state, metrics = advance(state, index)
        losses.append(float(metrics["loss"]))
    finite = np.isfinite(state["weights"]["in"]).all()
    return np.array(losses), state if finite else last


def test_a_member_is_the_same_run_alone(whole):
    for seed, rate, width in ((0, 0.01, 2), (2, 0.01, 4), (1, 6.0, 2)):
        losses, state = run_alone(seed, rate, width)
        member = whole.metrics["loss"].sel(seed=seed, rate=rate, width=width).values
        finite = np.isfinite(losses)
        np.testing.assert_allclose(member[finite], losses[finite], rtol=1e-4)
        assert np.isfinite(member).sum() == finite.sum() == (25 if rate < 1 else finite.argmin())
        ours = whole.state(seed, rate=rate, width=width)
        np.testing.assert_allclose(ours["weights"]["in"], state["weights"]["in"], rtol=1e-3)
        assert ours["mean"].dtype == jnp.bfloat16 and np.isfinite(np.float32(ours["mean"]))
        np.testing.assert_array_equal(
            jax.random.key_data(ours["key"]), jax.random.key_data(state["key"])
        )


def test_results_have_the_axes_and_coordinates_of_what_is_swept(whole):
    assert whole.metrics["loss"].dims == ("width", "rate", "seed", "step")
    assert whole.metrics["loss"].shape == (2, 2, 3, 25) and whole.metrics.attrs == {"scale": 0.5}
    assert whole.metrics["rate"].values.tolist() == [0.01, 6.0]
    assert whole.looks["norm"].dims == ("width", "rate", "seed", "step", "norm_0")
    assert whole.looks["step"].values.tolist() == [0, 10, 20, 25]
    assert list(whole.states) == [2, 4]
    assert whole.states[4]["weights"]["in"].shape == (3, 2, 3, 4)  # seeds first, then rates
    narrow = whole.looks["norm"].sel(width=2, rate=0.01)
    assert np.isfinite(narrow[..., :2]).all() and np.isnan(narrow[..., 2:]).all()
    norms = np.linalg.norm(whole.states[2]["weights"]["in"][:, 0], axis=1)
    np.testing.assert_allclose(narrow.sel(step=25)[:, :2], norms, rtol=1e-5)
    drawn = whole.looks["drawn"].sel(rate=0.01).values  # of the seed, at each look
    assert (drawn == drawn[:, :, :1]).all() and len(np.unique(drawn)) == 3
    assert whole.metrics["index"].sel(rate=0.01, width=2)[1].values.tolist() == list(range(25))


def test_runs_that_are_not_finite_are_named_and_the_others_go_on(whole, capsys):
    diverged = whole.diverged_at
    assert (diverged.sel(rate=0.01) == -1).all() and (diverged.sel(rate=6.0) >= 0).all()
    for rate, limit in ((0.01, 25), (6.0, None)):
        for width in (2, 4):
            for seed in range(3):
                at = int(diverged.sel(rate=rate, width=width, seed=seed))
                index = whole.metrics["index"].sel(rate=rate, width=width, seed=seed).values
                assert np.isfinite(index).sum() == (limit or at + 1)
                leaves = whole.state(seed, rate=rate, width=width)["weights"]
                assert all(np.isfinite(a).all() for a in leaves.values())
    sweep(init, step, **WHOLE | {"quiet": False, "static": {"width": [2]}, "look": None})
    lines = capsys.readouterr().err.splitlines()
    named = [line for line in lines if "it keeps its state after" in line]
    assert len(named) == 3
    assert all(
        any(f": seed {s} (width=2, rate=6.0): loss is" in x for x in named) for s in range(3)
    )
    assert lines[-1].startswith("sweep: 100%, loss ")


@pytest.mark.parametrize(
    "change",
    [
        {"every": 1, "look": None},
        {"every": 7, "look": None},
        {"every": 1000, "look": None},
        {"mesh": 1},
        {"mesh": 1, "every": 25, "look": None, "seeds": 1},
    ],
    ids=str,
)
def test_chunks_devices_and_other_seeds_change_no_bit(whole, change):
    options = WHOLE | change
    if "mesh" in change:
        options["mesh"] = seed_mesh(jax.devices()[: change["mesh"]])
    other = sweep(init, step, **options)
    seeds = slice(0, options["seeds"])
    assert_same_bits_of(other, whole, seeds, options["look"] is not None)


def assert_same_bits_of(a, b, seeds, has_looks=True):
    np.testing.assert_array_equal(a.metrics["loss"], b.metrics["loss"][:, :, seeds])
    np.testing.assert_array_equal(a.diverged_at, b.diverged_at[:, :, seeds])
    if has_looks:
        np.testing.assert_array_equal(a.looks["norm"], b.looks["norm"][:, :, seeds])
    for x, y in zip(jax.tree.leaves(a.states), jax.tree.leaves(b.states), strict=True):
        if not isinstance(x, jax.Array):
            np.testing.assert_array_equal(x, y[seeds])


@pytest.mark.parametrize("at_once", [2, 100])
def test_runs_side_by_side_are_runs_one_after_the_other(whole, at_once):
    other = sweep(init, step, **WHOLE | {"at_once": at_once})
    fine = {"rate": 0.01}
    for name in ("loss", "index"):
        a, b = (r.metrics[name].sel(fine) for r in (other, whole))
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(other.diverged_at, whole.diverged_at)
    x, y = (r.states[4]["weights"]["in"] for r in (other, whole))
    np.testing.assert_allclose(x[:, 0], y[:, 0], rtol=1e-5, atol=1e-6)


def test_seeds_have_their_keys_at_every_value_and_anywhere(whole):
    def keep(key, hyper, scale=1):
        return key

    def rest(state, hyper, index, scale=1):
        return state, {"rate": hyper["learning_rate"]}

    options = {"steps": 1, "hyper": {"learning_rate": [0.1, 0.2]}, "quiet": True}
    result = sweep(keep, rest, seeds=3, first_seed=5, key=7, static={"scale": [1, 2]}, **options)
    expected = [jax.random.key_data(jax.random.fold_in(jax.random.key(7), s)) for s in (5, 6, 7)]
    for keys in result.states.values():
        data = jax.random.key_data(keys)
        np.testing.assert_array_equal(data, np.stack([expected] * 2, axis=1))
    assert result.metrics["seed"].values.tolist() == [5, 6, 7]
    np.testing.assert_allclose(result.metrics["rate"][0, :, 0, 0], [0.1, 0.2], rtol=1e-6)
    typed = sweep(keep, rest, seeds=1, first_seed=5, key=jax.random.key(7), **options)
    legacy = sweep(keep, rest, seeds=1, first_seed=5, key=jax.random.PRNGKey(7), **options)
    for other in (typed, legacy):
        np.testing.assert_array_equal(jax.random.key_data(other.states)[0, 0], expected[0])


def test_sixty_four_rates_compile_once():
    traces, compiled = [], []

    def counted(state, hyper, index):
        traces.append(index)
        return step(state, hyper, index)

    def count(event, _, **__):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    numbers = []
    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        for rates in ([0.01, 0.02], list(np.logspace(-4, -1, 64))):
            traces.clear()
            compiled.clear()
            jax.clear_caches()
            hyper = {"rate": rates, "scale": 1.0}
            result = sweep(init, counted, steps=3, seeds=2, hyper=hyper, quiet=True)
            numbers.append((len(traces), len(compiled)))
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    assert result.metrics["loss"].shape == (64, 2, 3)
    assert numbers[0][0] == numbers[1][0] == 2  # the second says whether it is the same again
    assert 0 < numbers[1][1] == numbers[0][1] < 15  # with small programs that draw keys


def test_more_seeds_and_more_steps_extend_a_folder(whole, tmp_path):
    less = WHOLE | {"folder": tmp_path, "seeds": 2, "steps": 14}
    sweep(init, step, **less)
    only_missing = sweep(init, step, **less | {"seeds": 3})
    assert only_missing.metrics["loss"].shape == (2, 2, 3, 14)
    extended = sweep(init, step, **WHOLE | {"folder": tmp_path})
    assert_same_bits(extended, whole)
    again = sweep(init, step, **WHOLE | {"folder": tmp_path})
    assert again.seconds["running"] == 0
    assert_same_bits(again, whole)


class Interrupted(BaseException):
    pass


def test_interrupted_anywhere_and_resumed_is_whole(whole, tmp_path, monkeypatch):
    """After each chunk of each group, on one and two devices in turn."""
    advance, calls = Program.advance, []

    def interrupt(self, *arguments):
        if calls:
            raise Interrupted
        calls.append(1)
        return advance(self, *arguments)

    monkeypatch.setattr(Program, "advance", interrupt)
    for turn in range(12):
        calls.clear()
        mesh = seed_mesh(jax.devices()[: 1 + turn % 2])
        try:
            resumed = sweep(init, step, **WHOLE | {"folder": tmp_path, "mesh": mesh})
        except Interrupted:
            continue
        break
    assert turn == 5  # two groups of three chunks
    assert_same_bits(resumed, whole)
    assert [p.suffix for p in tmp_path.glob("runs/*")] == [".npz"] * 2


PROGRAM = """
import sys, pickle, jax
jax.config.update("jax_num_cpu_devices", int(sys.argv[1]))
from tests.training import test_sweep
options = test_sweep.WHOLE | {"steps": 6000, "seeds": 5, "folder": sys.argv[2] or None}
result = test_sweep.sweep(test_sweep.init, test_sweep.step, **options)
pickle.dump(test_sweep.list_leaves(result), open(sys.argv[3], "wb"))
"""


def start(errors, *arguments):
    """Starts a Python program with the tests on its path."""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "PYTHONHASHSEED": "random"}
    command = [sys.executable, "-c", *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stderr=errors)


def assert_same_files(a, b):
    """Compares two results that `list_leaves` made."""
    for x, y in zip(*(np.load(path, allow_pickle=True) for path in (a, b)), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.full
def test_killed_twenty_times_it_is_whole(tmp_path):
    """By SIGKILL and Ctrl-C, at random moments, on one and two devices in turn."""
    folder, kills, rng = tmp_path / "run", 0, np.random.default_rng(0)

    def list_files():
        return {(p, p.stat().st_mtime_ns) for p in folder.glob("runs/*.npz") if p.exists()}

    with open(tmp_path / "errors", "w+") as errors:
        assert start(errors, PROGRAM, 2, "", tmp_path / "whole").wait(LIMIT) == 0
        while True:
            before = list_files()
            process = start(errors, PROGRAM, 1 + kills % 2, folder, tmp_path / "parts")
            # One in four while it starts, compiles or computes; others around a snapshot.
            end = time.monotonic() + (rng.uniform(0, 6) if kills % 4 == 3 else LIMIT)
            while process.poll() is None and (
                kills >= 20 or (time.monotonic() < end and list_files() <= before)
            ):
                time.sleep(0.002)
            time.sleep(rng.uniform(0, 0.02))
            if process.poll() is None:
                process.send_signal((signal.SIGKILL, signal.SIGINT)[kills % 4 // 2])
            if process.wait(LIMIT) == 0:
                break
            kills += 1
            assert kills <= 20, (tmp_path / "errors").read_text()[-2000:]
    assert kills >= 10
    assert_same_files(tmp_path / "whole", tmp_path / "parts")


def test_rounds_of_seeds_end_when_the_rule_says_so(tmp_path):
    seen = []

    def rule(metrics):
        seen.append(metrics["loss"].sizes["seed"])
        return metrics.sizes["seed"] >= 5

    options = WHOLE | {"seeds": 9, "until": rule, "round_seeds": 2, "folder": tmp_path}
    options["static"] = {"width": [2]}
    result = sweep(init, step, **options)
    assert seen == [2, 4, 6]
    assert result.metrics["loss"].shape == (1, 2, 6, 25)
    straight = sweep(init, step, **options | {"until": None, "seeds": 6, "folder": None})
    assert_same_bits(result, straight)
    seen.clear()
    assert_same_bits(sweep(init, step, **options), straight)  # asks again, and trains nothing
    assert seen == [2, 4, 6]


def test_metrics_may_be_anything_and_a_state_any_pytree():
    """A tuple as state, whole numbers, flags, vectors and nested names as metrics."""

    def begin(key, hyper):
        return (jnp.arange(3), [jax.random.normal(key, (2,)), 1, True])

    def count(state, hyper, index):
        whole, (drawn, number, flag) = state
        metrics = {"a": {"b": drawn, "c": number}, "flag": flag, "half": jnp.bfloat16(index)}
        return (whole + 1, [drawn, number + 1, ~flag]), metrics

    result = sweep(begin, count, steps=3, seeds=2, quiet=True)
    assert set(result.metrics) == {"a/b", "a/c", "flag", "half"}
    assert result.metrics["a/b"].dims == ("seed", "step", "a/b_0")
    assert result.metrics["a/c"].values.tolist() == [[1, 2, 3]] * 2
    assert result.metrics["a/c"].dtype == np.int32 and result.metrics["flag"].dtype == bool
    assert result.metrics["half"].values.tolist() == [[0, 1, 2]] * 2
    assert isinstance(result.states, tuple) and result.states[0].tolist() == [[3, 4, 5]] * 2
    assert result.state(1)[1][1:] == [4, False] and result.looks is None
    alone = sweep(lambda key, hyper: 0.0, lambda s, h, i: (s + 1, s), steps=2, seeds=1, quiet=True)
    assert alone.metrics["metric"].values.tolist() == [[0, 1]] and alone.states.tolist() == [2]
    nothing = sweep(lambda key, hyper: 0.0, lambda s, h, i: (s + 1, {}), steps=0, quiet=True)
    assert nothing.states.tolist() == [0] * 8 and not nothing.metrics.data_vars


def test_what_was_never_finite_is_no_divergence():
    """A mask of -inf, a best loss of inf and a metric that is measured at some steps alone."""

    def begin(key, hyper):
        return {"mask": jnp.array([0, -jnp.inf]), "best": jnp.inf, "x": 1.0}

    def improve(state, hyper, index):
        sometimes = jnp.where(index % 2 == 0, state["x"], jnp.nan)
        best = jnp.minimum(state["best"], state["x"])
        return state | {"x": state["x"] / 2, "best": best}, {"x": state["x"], "some": sometimes}

    options = {"steps": 4, "seeds": 1, "every": 2, "quiet": True}
    result = sweep(begin, improve, finite=["x"], **options)
    assert result.diverged_at.values.tolist() == [-1] and result.states["best"].tolist() == [0.125]
    assert np.isnan(result.metrics["some"]).values.tolist() == [[False, True] * 2]
    strict = sweep(begin, improve, **options)
    assert strict.diverged_at.values.tolist() == [1] and strict.states["x"].tolist() == [0.5]


def test_data_in_the_state_are_not_carried(tmp_path):
    def begin(key, hyper):
        return {"data": jax.random.normal(key, (4,)), "key": key, "w": jnp.zeros(4)}

    def add(state, hyper, index):
        return state | {"w": state["w"] + state["data"]}, {}

    key = jax.random.key(0)
    assert trace_functions(begin, add, None, {}, {}, key.dtype).unchanged == [True, True, False]
    options = {"seeds": 3, "every": 2, "folder": tmp_path, "quiet": True}
    sweep(begin, add, steps=3, **options)
    result = sweep(begin, add, steps=5, **options)
    np.testing.assert_allclose(result.states["w"], 5 * result.states["data"], rtol=1e-6)
    still = sweep(begin, lambda state, hyper, index: (state, {"index": index}), steps=3, quiet=True)
    assert still.metrics["index"].values.tolist() == [[0, 1, 2]] * 8


@pytest.mark.parametrize("every", [1, 4, 9, 32])
@pytest.mark.parametrize("at_once", [1, None])
def test_the_last_finite_state_is_kept_whatever_shows_it(every, at_once):
    """Metrics that show it at once, a step later or never."""

    def begin(key, hyper):
        return {"x": 0.0, "count": 0, "data": hyper["at"] * jnp.ones(2)}

    def advance(state, hyper, index):
        x = jnp.where(index == hyper["at"], jnp.inf, state["x"] + 1)
        shown = jnp.where(index >= hyper["at"] + hyper["delay"], jnp.nan, 1.0)
        return state | {"x": x, "count": state["count"] + 1}, {"shown": shown}

    at, delay = [0, 5, 9, 13], [0, 1, 6, 100]
    result = sweep(
        begin,
        advance,
        steps=14,
        seeds=1,
        every=every,
        hyper={"at": at, "delay": delay},
        at_once=at_once,
        quiet=True,
    )
    expected = np.broadcast_to(np.array(at)[:, None], (4, 4))
    np.testing.assert_array_equal(result.diverged_at[..., 0], expected)
    np.testing.assert_array_equal(result.states["count"][0], expected)
    np.testing.assert_array_equal(result.states["x"][0], expected)
    np.testing.assert_array_equal(result.states["data"][0, ..., 0], expected)
    finite = np.isfinite(result.metrics["shown"].values).sum(axis=-1)[..., 0]
    np.testing.assert_array_equal(finite, expected + (np.array(delay) > 0))


def test_a_function_is_the_same_in_another_process(tmp_path):
    """The fingerprint of a folder holds no address and no order of a set."""
    options = (1, tmp_path / "run", tmp_path / "out")
    for _ in range(2):
        process = python("-c", PROGRAM.replace("400", "3"), *map(str, options))
        assert process.returncode == 0, process.stderr


CALLABLES = """
import functools, sys, jax, jax.numpy as jnp
from rank_collapse.training import sweep
def cube(x):
    return x**3
leaky = functools.partial(jax.nn.leaky_relu, negative_slope=0.3)
result = sweep(
    lambda key, hyper, act, gate: jax.random.normal(key, (3,)),
    lambda state, hyper, index, act, gate: (act(state), {"sum": gate(state).sum()}),
    steps=2, seeds=2, static={"act": [cube, jnp.tanh, jax.nn.relu, leaky], "gate": jax.nn.silu},
    folder=sys.argv[1], quiet=True,
)
assert result.metrics.act.values.tolist()[:3] == ["cube", "tanh", "relu"], result.metrics
assert "0x" not in str(result.metrics) and result.metrics.attrs["gate"] == "silu"
assert result.state(1, act=leaky).shape == result.state(0, act=cube).shape == (3,)
"""


def test_callables_as_static_values_resume_in_another_process(tmp_path):
    for _ in range(2):
        process = python("-c", CALLABLES, str(tmp_path / "run"))
        assert process.returncode == 0, process.stderr


TWO = """
import sys, jax
jax.config.update("jax_num_cpu_devices", 1)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{sys.argv[1]}", 2, int(sys.argv[2]))
from tests.training import test_sweep
import pickle
rule = lambda metrics: metrics.sizes["seed"] >= 5
options = test_sweep.WHOLE | {"folder": sys.argv[3], "seeds": 7, "until": rule, "round_seeds": 3}
result = test_sweep.sweep(test_sweep.init, test_sweep.step, **options)
pickle.dump(test_sweep.list_leaves(result), open(sys.argv[4] + sys.argv[2], "wb"))
"""


@pytest.mark.full
def test_processes_share_the_seeds(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with open(tmp_path / "errors", "w+") as errors:
        paths = tmp_path / "run", tmp_path / "out"
        started = [start(errors, TWO, port, i, *paths) for i in range(2)]
        codes = [process.wait(LIMIT) for process in started]
    assert codes == [0, 0], (tmp_path / "errors").read_text()[-2000:]
    with open(tmp_path / "out", "wb") as file:
        pickle.dump(list_leaves(sweep(init, step, **WHOLE | {"seeds": 6})), file)
    for i in range(2):
        assert_same_files(tmp_path / f"out{i}", tmp_path / "out")
