"""Looped networks: states by hand, path lengths, and statements that can come out otherwise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr

import rank_collapse as rc
from experiments import run_loops
from tests.support.closeness import assert_close
from tests.support.executors import replace_executor
from tests.support.runs import parsed, result_of, run


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loops")
    assert run(run_loops, [*run_loops.EXPERIMENT.presets["tiny"], "--depth=3"], folder) == 0
    return result_of(run_loops, folder)[0]


@pytest.mark.full
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("power", [0.5, 1.0])
def test_a_loop_adds_the_branch_of_its_normalised_state(results, tied, power):
    key_tokens, key_params = jax.random.split(jax.random.fold_in(jax.random.key(0), 1))
    state = jax.random.normal(key_tokens, (4, 8))
    flags = ["--depth=3", f"--tied={tied}", "--num_heads=2", "--d_model=8"]
    config = run_loops.make_config(parsed(run_loops, *flags))
    params = rc.init(key_params, config)
    expected = [float(jnp.sqrt(jnp.mean(state**2)))]
    for layer in range(3):
        a = rc.network.layer_params(params, config, layer).attention
        centred = state - state.mean(axis=1, keepdims=True)
        x = centred / jnp.sqrt(centred.var(axis=1, keepdims=True) + config.norm_eps)
        q, k, v = (jnp.einsum("nd,hdk->hnk", x, w) for w in (a.w_q, a.w_k, a.w_v))
        weights = jax.nn.softmax(q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1]))
        state = state + 3.0**-power * jnp.einsum("hnm,hmv,hvd->nd", weights, v, a.w_o)
        expected.append(float(jnp.sqrt(jnp.mean(state**2))))
    measured = results.rms.sel(tied=tied, gain_power=power, depth=3, seed=1)
    np.testing.assert_allclose(measured, expected, rtol=1e-5)


@pytest.mark.full
def test_path_lengths_are_between_none_and_all_loops(results):
    lengths = results.path_length.sel(tied=True)
    assert_close(lengths.sel(loop=0), 0, atol=1e-6)
    assert np.all(lengths.sel(loop=3) > 0) and np.all(lengths.sel(loop=3) < 3)
    assert np.isnan(results.path_length.sel(tied=False)).all()


@pytest.mark.parametrize("tied", [True, False])
def test_a_network_is_measured_at_the_gain_of_its_point(tied, monkeypatch):
    """The fixed point and the transverse are those of a loop: the input has none."""
    flags = f"--tied={tied}", "--depth=3", "--d_model=8", "--gain_power=0.25"
    options = parsed(run_loops, *flags)

    def measure(measure_seed, make_cells):
        assert make_cells(options) == {"": 3**-0.25}
        arrays = {"rms": np.ones((2, 4)), "token_cosine": np.zeros((2, 4))}
        if tied:
            sizes = np.tile([[[1.0, 0, 3, 0]]], (2, 4, 1))
            arrays |= {"path_size": sizes, "fixed_point": np.ones((2, 3))}
            arrays |= {"transverse": 2 * np.ones((2, 3))}
        return {"": arrays}

    replace_executor(monkeypatch, run_loops, options, "folder", "depth 3", measure=measure)
    results = run_loops.measure(options, "config", "folder")
    assert results.loop.values.tolist() == [0, 1, 2, 3] and ("path_length" in results) == tied
    if tied:
        assert_close(results.path_length, np.full((2, 4), 1.5))
        for name, value in (("fixed_point", 1), ("transverse", 2)):
            np.testing.assert_array_equal(results[name], [[np.nan] + [value] * 3] * 2)


def make_results(growth, cosines):
    """Makes results of 16 loops whose states grow by 10^growth for the gain powers 0.5 and 1."""
    axes = {"tied": [True], "gain_power": [0.5, 1.0], "depth": [16]}
    axes |= {"seed": np.arange(6), "loop": np.arange(17)}
    shape = [len(values) for values in axes.values()]
    noise = np.arange(6)[:, None] / 1e3
    rms, cosine = np.ones(shape), np.zeros(shape)
    for index in range(2):
        rms[0, index, 0] = 10 ** (growth[index] * np.arange(17) / 16 + noise)
        cosine[0, index, 0] = cosines[index] + noise
        cosine[0, index, 0, :, 0] = -cosines[index]  # of the input, which says nothing
    data = {"rms": (tuple(axes), rms), "token_cosine": (tuple(axes), cosine)}
    return xr.Dataset(data, axes)


def test_growth_and_alignment_are_those_after_the_last_loop():
    rows = {row.key: row for row in run_loops.judge_claims(make_results((2.0, 0.1), (0.9, 0.3)))}
    assert rows["loops grow"].estimate == pytest.approx(2.0)
    assert rows["loops stay"].estimate == pytest.approx(0.1)
    assert rows["loops align"].estimate == 1.0  # share of the draws above 0
    assert {row.setting for row in rows.values()} == {"16 loops"}
    (reversed_row,) = (
        row
        for row in run_loops.judge_claims(make_results((2.0, 0.1), (0.3, 0.9)))
        if row.key == "loops align"
    )
    assert reversed_row.estimate == 0.0


def test_without_both_gains_nothing_is_said():
    results = make_results((2.0, 0.1), (0.9, 0.3))
    assert list(run_loops.judge_claims(results.sel(gain_power=[0.5]))) == []
    untied = results.assign_coords(tied=[False])
    assert list(run_loops.judge_claims(untied)) == []


def test_the_figures_are_of_the_most_loops_in_any_order():
    deep, shallow = make_results((2.0, 0.1), (0.9, 0.3)), make_results((1.0, 0.5), (0.2, 0.4))
    parts = [shallow.assign_coords(depth=[4]), deep, shallow.assign_coords(depth=[2])]
    results = xr.concat(parts, "depth")
    for draw, name in ((run_loops.states_figure, "rms"), (run_loops.tokens_figure, "token_cosine")):
        (ax,) = draw(results).axes
        for line, power in zip(ax.lines, (0.5, 1.0), strict=True):
            values = deep[name].sel(gain_power=power).squeeze().values
            mean = np.exp(np.log(values).mean(axis=0)) if name == "rms" else values.mean(axis=0)
            assert_close(line.get_ydata(), mean, rtol=1e-6)
