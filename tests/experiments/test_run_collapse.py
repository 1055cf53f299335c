"""run_collapse at tiny size: what it measures, resume, devices, compilations, bad input."""

from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr

import rank_collapse as rc
from experiments import run_collapse
from experiments.lab import initial_tokens
from rank_collapse.measures import residuals
from rank_collapse.theory import logdomain
from tests.support.closeness import assert_close
from tests.support.executors import replace_executor
from tests.support.runs import arrays, finished, opened_with, parsed, result_of, rows, run

SIZE = ["--depth=3", "--num_heads=2", "--d_model=8", "--num_tokens=6", "--num_seeds=3"]
TWO = [*SIZE, "--variants=san,san_skip"]


base = finished(run_collapse, *TWO)


@pytest.mark.full
def test_the_run_measures_what_the_library_gives_one_by_one(base):
    options, saved = parsed(run_collapse, *TWO), arrays(base)
    ids, _ = initial_tokens.read_tokens(options)
    key_tokens, key_params = jax.random.split(jax.random.fold_in(jax.random.key(0), 2))
    x = initial_tokens.input_tokens(key_tokens, ids, options)
    for variant, config in run_collapse.make_configs(options, "none", options.variants).items():
        params = rc.init(key_params, config)
        hidden = rc.apply(params, x, config).hidden
        measures = {
            n: saved[f"seeds/{n}/{variant}"][2] for n in ("ratio", *run_collapse.COLUMNS[1:3])
        }
        ratio = [residuals.residual_ratio(h) for h in hidden]
        np.testing.assert_allclose(measures["ratio"], ratio, rtol=1e-3, atol=1e-6)
        profile = logdomain.log_residual_profile(params, x, config)
        assert_close(measures["log10_residual"], profile, atol=1e-3)
        assert_close(measures["plain_log10_residual"][:2], profile[:2], atol=1e-3)


@pytest.mark.full
def test_rows_figures_and_statements_are_of_the_arrays(base):
    table, saved = rows(base), arrays(base)
    for column in ("log10_bound", "tightness_mean"):
        assert all((r[column] != "") == (r["variant"] == "san") for r in table)
    results, _ = result_of(run_collapse, base)
    comparisons = {c.quantity: c for c in run_collapse.compare_results(results)}
    assert "attention alone: residual ratio after 3 layers" in comparisons
    rounded = results.assign(ratio=results.ratio * 0 + np.float32(6e-8))
    first, *_ = run_collapse.compare_results(rounded)
    assert first.measured == "below 1e-06 (rounding)"
    free = [c.measured for q, c in comparisons.items() if "needs no condition" in q]
    assert free and not any(free)
    claims = {row.key: row for row in run_collapse.judge_claims(results)}
    assert claims["rate"].draws == 3
    assert claims["heads bound"].estimate == 0 and "cases" in claims["heads bound"].note
    assert claims["skips"].estimate > 1
    ratio = saved["seeds/ratio/san_skip"]
    remaining = ratio[:, -1] / ratio[:, 0]
    assert claims["skips stop"].estimate == np.mean(remaining > 0.1)


@pytest.fixture
def compilations():
    """The programs that XLA compiles."""
    events, event = [], "/jax/core/compile/backend_compile_duration"
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: events.append(name) if name == event else None
    )
    yield events
    jax.monitoring.clear_event_listeners()


@pytest.mark.full
def test_a_sweep_compiles_as_often_as_one_value(base, tmp_path, compilations):
    assert run(run_collapse, TWO, tmp_path / "one") == 0
    single_count, swept = len(compilations), ("--weight_scale=1,0.5,2", "--skip_gain=1,0")
    assert run(run_collapse, [*TWO, *swept], tmp_path) == 0
    assert 0 < len(compilations) - single_count <= single_count
    expected, results = arrays(base), arrays(tmp_path)
    for name, values in expected.items():
        point_values = results[f"weight_scale=1.0/skip_gain=1.0/{name}"]
        np.testing.assert_allclose(point_values, values, rtol=1e-5, err_msg=name)
    without_skip = results["weight_scale=0.5/skip_gain=0.0/seeds/ratio/san_skip"]
    san = results["weight_scale=0.5/skip_gain=1.0/seeds/ratio/san"]
    np.testing.assert_allclose(without_skip, san, rtol=1e-3, atol=1e-6)
    assert (tmp_path / "figures" / "sweep_weight_scale.png").exists()
    assert (tmp_path / "figures" / "sweep_skip_gain.png").exists()


@pytest.mark.full
def test_what_is_not_known_is_a_gap_with_its_reason(tmp_path, capsys):
    """Weights that overflow: empty cells and a line that says why, and the run ends well."""
    arguments = [*SIZE, "--variants=san,san_skip", "--inputs=gaussian", "--weight_scale=1e30,1"]
    assert run(run_collapse, arguments, tmp_path) == 0
    err = capsys.readouterr().err
    assert "attention alone: no ratio in 3 of 3 seeds" in err
    by_scale = {1e30: [], 1: []}
    for row in rows(tmp_path):
        by_scale[float(row["weight_scale"])].append(row)
    assert {r["ratio"] for r in by_scale[1e30] if r["layer"] != "0"} == {""}
    assert all(r["ratio"] and r["log10_residual"] for r in by_scale[1])


@pytest.mark.full
def test_another_text_is_another_config(base, tmp_path, capsys):
    other = tmp_path / "other.txt"
    other.write_text("six other tokens in a row")
    assert run(run_collapse, [*TWO, f"--text={other}"], base) == 2
    assert "text_sha256" in capsys.readouterr().err


@pytest.mark.full
def test_the_gain_of_mlps_is_swept_in_one_program(tmp_path):
    """With norms the only gain is 1, which the figure leaves out."""
    arguments = [*SIZE, "--variants=san,san_mlp", "--mlp_gain=1,8", "--norm=none,post"]
    assert run(run_collapse, arguments, tmp_path) == 0
    saved = arrays(tmp_path)
    assert {name for name in saved if "post/seeds/swept" in name} == {
        "norm_placement=post/seeds/swept/1"
    }
    cell = "norm_placement=none/seeds"
    plain, swept = saved[f"{cell}/log10_residual/san_mlp"], saved[f"{cell}/swept/1"]
    np.testing.assert_allclose(swept, plain, rtol=1e-4, atol=1e-4)  # the same network
    larger_gain = saved[f"{cell}/swept/8"]
    assert (larger_gain[:, -1] > swept[:, -1] + 1).all()
    assert (tmp_path / "figures" / "mlp_gain.png").exists()


@pytest.mark.full
def test_the_constant_of_the_law_is_that_of_networks_without_skips(base, tmp_path):
    """Its closed form is that of attention alone; figures need no attention alone."""
    results, _ = result_of(run_collapse, base)
    comparisons = list(run_collapse.compare_results(results))
    laws = {c.quantity: c for c in comparisons if "3^L law" in c.quantity}
    assert len(laws) == 2
    assert all("law, attention alone" in quantity for quantity in laws)
    assert all(np.isfinite([c.measured, c.published]).all() for c in laws.values())
    assert run(run_collapse, [*SIZE, "--variants=san_mlp", "--mlp_gain=1,2"], tmp_path) == 0
    assert (tmp_path / "figures" / "log_residual.png").exists()
    assert not (tmp_path / "figures" / "mlp_gain.png").exists()


def test_gains_of_mlps_are_those_that_the_norm_leaves():
    """Post-norm undoes all but 1, pre-norm has none."""
    gains = [0.5, 1.0, 2.0]
    for norm, chosen in (("none", gains), ("post", [1.0]), ("sandwich", [1.0]), ("pre", [])):
        assert run_collapse.choose_gains(gains, norm) == chosen
    assert run_collapse.choose_gains([0.5], "post") == []


class Log(NamedTuple):
    """Stands in for the trace in logarithms: gains of both skips and of the MLPs."""

    profile: jax.Array


@pytest.mark.parametrize(
    ("flags", "mlp_skip", "gains"),
    [
        ((), 0.0, [1.0, 4.0]),  # without norms MLPs are swept without their own skip
        (("--norm_placement=post",), 0.0, [1.0]),
        (("--san_mlp_skip",), 0.5, [1.0, 4.0]),
        (("--norm_placement=pre",), 0.0, []),
    ],
)
def test_each_variant_is_measured_with_its_skips_at_the_gain_of_the_point(
    monkeypatch, flags, mlp_skip, gains
):
    """Networks of equal MLPs are one program; a skip that a network lacks has a gain of 0."""
    arguments = (*SIZE, "--inputs=gaussian", "--dtype=bfloat16", "--mlp_gain=4,1", *flags)
    options = parsed(run_collapse, *arguments)
    setup = run_collapse.make_setup(options)
    dtypes, measured_laws = set(), {}

    def list_gains(params, x, config):
        assert (params, x) == ("params", "x")
        assert config.attention_skip and config.mlp_skip
        skip = config.skip_gain
        return jnp.stack([skip.attention, skip.mlp, config.branch_gain.mlp])

    def measure_plain(params, x, config, dtype):
        dtypes.add(dtype)
        return {"plain": list_gains(params, x, config)}

    def measure_laws(params, x, config, log):
        measured_laws[len(measured_laws)] = config
        return {"log": log.profile}

    monkeypatch.setattr(run_collapse, "measure_plain", measure_plain)
    monkeypatch.setattr(run_collapse, "measure_laws", measure_laws)
    monkeypatch.setattr(
        run_collapse, "logdomain", SimpleNamespace(log_trace=lambda *a: Log(list_gains(*a)))
    )
    results = run_collapse.measure_seed(options, setup, ("x", "params"), (2.0, 0.5))
    expected = {
        "san": (0.0, 0.0, 1.0),
        "san_skip": (0.5, 0.0, 1.0),
        "san_mlp": (0.0, mlp_skip, 1.0),
        "transformer": (0.5, 0.5, 1.0),
    }
    for name in ("plain", "log"):
        assert {v: tuple(np.asarray(a)) for v, a in results[name].items()} == expected
    own_skip = float(bool(mlp_skip) or "post" in str(flags))
    assert {g: tuple(np.asarray(a)) for g, a in results.pop("swept", {}).items()} == {
        f"{gain:g}": (0.0, own_skip, gain) for gain in gains
    }
    assert [*results] == ["plain", "log"] and dtypes == {jnp.bfloat16}
    assert [*measured_laws.values()] == [setup.networks[variant] for variant in results["log"]]


def test_a_ratio_that_is_no_number_is_no_rounding():
    """The column says which ratios rounding decides, from the setting's limit on."""
    axes = {"norm_placement": ["none"], "weight_scale": [1.0], "skip_gain": [1.0]}
    axes |= {"variant": ["san"], "seed": [0], "layer": [0, 1, 2, 3]}
    ratio = np.reshape([0.5, 1e-3, 1e-4, np.nan], [len(values) for values in axes.values()])
    results = xr.Dataset({"ratio": ([*axes], ratio), "log10_residual": ([*axes], 0 * ratio)}, axes)
    results["log10_residual"] = results.log10_residual.fillna(-9.0)
    rows = list(run_collapse.make_rows(results, SimpleNamespace(rounding=1e-3)))
    assert [row.get("rounding") for row in rows] == [0, 1, 1, None]


@pytest.mark.parametrize("summary", [None, {"finished": True}])
def test_gaps_are_said_by_the_run_that_measures(summary, monkeypatch):
    lines, saved = [], []
    ratio = np.full((2, 3), 0.5)
    progress = SimpleNamespace(say=lines.append)

    def chunks(make_cells, mapped, *, most):
        assert make_cells(options) == {"seeds": (2.0, 0.5)} and most == 3
        return ["a", "b"]

    def save(chunk, results):
        saved.append((chunk, results))

    def read(make_cells):
        return {"seeds": {f"{name}/san": -ratio for name in ("log10_residual", "ratio")}}

    flags = "--seed_chunk=9", "--weight_scale=2", "--skip_gain=0.5"
    options, folder = parsed(run_collapse, *TWO, *flags), SimpleNamespace(summary=summary)
    members = {"mesh": "mesh", "progress": progress, "chunks": chunks, "save": save, "read": read}
    replace_executor(monkeypatch, run_collapse, options, folder, "collapse", **members)
    monkeypatch.setattr(run_collapse, "Mapped", lambda fn, *arguments, draw: arguments)
    monkeypatch.setattr(
        run_collapse, "measure_chunk", lambda mapped, chunk, *others: (mapped, chunk, others)
    )
    monkeypatch.setattr(run_collapse, "describe_gaps", lambda results: [f"{results.ratio.sum()}"])
    monkeypatch.setattr(run_collapse, "local_rates", lambda values: 2 * values)
    results = run_collapse.measure(options, SimpleNamespace(networks="networks"), folder)
    others = "networks", "none", progress
    assert saved == [(c, (("mesh", progress), c, others)) for c in ("a", "b")]
    assert_close(results.local_rate.sel(variant="san"), -2 * ratio)
    assert len(lines) == (summary is None)


def test_all_variants_have_the_same_drawn_weights():
    """Those of a network with all norms and the MLP, whichever variant comes first."""
    arguments = (*SIZE, "--inputs=gaussian", "--variants=san,san_mlp", "--bias_scale=0.5")
    options = parsed(run_collapse, *arguments)
    setup = run_collapse.make_setup(options)
    key = jax.random.key(3)
    drawn = jax.eval_shape(lambda: run_collapse.draw(options, setup, key, (2.0, 1.0)))
    x, params = drawn
    assert x.shape == (6, 8) and params.layers.mlp is not None
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_collapse.rc, "init", lambda *a: seen.append(a))
        x, _ = run_collapse.draw(options, setup, key, (2.0, 1.0))
    ((key_params, config, scale, bias_scale),) = seen
    key_tokens, expected_key = jax.random.split(key)
    assert (key_params, scale, bias_scale) == (expected_key, 2.0, 0.5)
    assert config == rc.san_mlp(3, 2, 8, norm_placement="sandwich", norm="layer", init="lecun")
    assert_close(x, initial_tokens.input_tokens(key_tokens, None, options))


def test_another_text_is_another_run(monkeypatch):
    make, identify = opened_with(run_collapse, monkeypatch, "options")
    assert make is run_collapse.make_setup
    assert identify(SimpleNamespace(source={"text": "a"})) == {"text": "a"}
