"""run_depth_check: slopes over depth at every learning rate, and what they are compared with."""

import numpy as np
import pytest
import xarray as xr

from experiments import run_depth_check
from rank_collapse.report.wording import describe_value
from tests.support.executors import replace_executor
from tests.support.runs import opened_with, parsed

SETUP = run_depth_check.Setup(None, np.zeros(1, np.uint8), "a text")
RATES = (1e-4, 1e-3, 3e-3)
SLOPES = {"mup": (-0.1, -0.5, -0.7), "completep": (-0.2, 0.1, -0.5)}


def make_results():
    """Networks whose residual ratio goes with `SLOPES` of the depth at the last step."""
    depths, noise = np.array(run_depth_check.DEPTHS), np.random.default_rng(0)
    slopes = np.array([*SLOPES.values()])[:, :, None, None, None, None]
    ratios = depths[:, None, None, None] ** slopes * np.ones((2, 3, 6, 1, 8, 2))
    ratios *= np.exp(0.01 * noise.standard_normal(ratios.shape))
    axes = {
        "rule": [*SLOPES],
        "learning_rate": [*RATES],
        "depth": depths,
        "d_model": [64],
        "seed": np.arange(8),
        "step": [1, 10],
    }
    values = xr.DataArray(ratios, axes, [*axes])
    powers = {"stream": 3, "residual_ratio": 1, "linearisation": -2, "loss": 0.5}
    return xr.Dataset({name: values**power for name, power in powers.items()})


def test_tokens_are_asked_at_every_learning_rate():
    rows = list(run_depth_check.judge_claims(make_results(), SETUP))
    for key, rule in (("depth tokens", "mup"), ("depth tokens completep", "completep")):
        rule_rows = [row for row in rows if row.key == key]
        settings = [f"a text, learning rate {rate:g}" for rate in RATES]
        assert [row.setting for row in rule_rows] == settings
        assert [row.estimate for row in rule_rows] == pytest.approx(SLOPES[rule], abs=0.02)
    cure = [row.estimate for row in rows if row.key == "depth cure"]
    assert cure == pytest.approx(np.subtract(SLOPES["completep"], SLOPES["mup"]), abs=0.02)


def test_the_published_figure_is_compared_at_one_rate():
    rows = list(run_depth_check.judge_claims(make_results(), SETUP))
    assert sum(row.key == "depth growth" for row in rows) == 4  # two rules, two steps
    comparisons = list(run_depth_check.compare_results(make_results()))
    powers = {c.quantity: c.measured for c in comparisons if "power of the depth" in c.quantity}
    assert len(powers) == 6
    published = np.reshape(run_depth_check.PUBLISHED, (2, 3, -1))[:, [0, 2]]
    logs = np.log(run_depth_check.DEPTHS)
    growth = [
        3 * SLOPES[rule][1] - np.polyfit(logs, np.log(published[step, place]), 1)[0]
        for place, rule in enumerate(SLOPES)
        for step in range(2)
    ]
    estimates = [row.estimate for row in rows if row.key == "depth growth"]
    assert estimates == pytest.approx(growth, abs=0.05)
    (power,) = (v for q, v in powers.items() if "completep" in q.lower() and "0.003" in q)
    assert power == pytest.approx(-0.5, abs=0.02)
    assert run_depth_check.quantities_figure(make_results()) is not None


def test_the_figure_shows_the_largest_width_at_the_rate_of_its_title():
    """Widths and depths in the order of the flags: 64 before 32, 64 layers before 2."""
    narrow = make_results()
    wide = (10 * narrow).assign_coords(d_model=[128])
    results = xr.concat([wide, narrow], "d_model").isel(depth=slice(None, None, -1))
    fig = run_depth_check.quantities_figure(results)
    assert fig.get_suptitle() == "width 128, learning rate 0.001"
    lines = {line.get_label(): line for line in fig.axes[0].lines}
    for rule in SLOPES:
        name = describe_value("rule", rule)
        values = results.stream.sel(rule=rule, learning_rate=1e-3, d_model=128, step=10)
        expected = np.exp(np.log(values.sortby("depth")).mean("seed"))
        line = next(line for label, line in lines.items() if label == f"{name} last step")
        np.testing.assert_array_equal(line.get_xdata(), sorted(run_depth_check.DEPTHS))
        np.testing.assert_allclose(line.get_ydata(), expected, rtol=1e-6)


def test_without_the_published_rate_nothing_is_compared_with_the_figure():
    results = make_results().sel(learning_rate=[1e-4, 3e-3])
    keys = {row.key for row in run_depth_check.judge_claims(results, SETUP)}
    assert "depth growth" not in keys and "depth tokens" in keys
    wide = results.assign_coords(d_model=[256])  # as wide as the published networks
    assert {row.key for row in run_depth_check.judge_claims(wide, SETUP)} == keys
    comparisons = list(run_depth_check.compare_results(results))
    assert comparisons and all(c.published is None for c in comparisons)
    fig = run_depth_check.quantities_figure(results)
    assert fig.get_suptitle() == "width 64, learning rate 0.0001"


def test_the_loss_is_of_the_deepest_network_in_any_order():
    results = make_results().isel(depth=slice(None, None, -1))
    losses = {
        c.quantity: c.measured
        for c in run_depth_check.compare_results(results)
        if "loss" in c.quantity
    }
    deepest = results.loss.sel(depth=max(run_depth_check.DEPTHS), step=10).mean("seed")
    assert [*losses.values()] == pytest.approx(deepest.values.ravel().tolist())


def test_the_text_is_that_of_the_file_or_of_the_package(tmp_path):
    """A file is named with its folder; all of its paragraphs are read."""
    path = tmp_path / "some" / "words.txt"
    path.parent.mkdir()
    path.write_text("many words\nof one text\n\nand another")
    flags = ("--depth=2", "--d_model=8", "--num_tokens=4")
    setup = run_depth_check.make_setup(parsed(run_depth_check, *flags, f"--text={path}"))
    assert setup.source == "some/words.txt"
    text = bytes(setup.text.astype(np.uint8).tolist()).decode()
    assert text.startswith("many words") and text.endswith("another") and len(text) >= 30
    usual = run_depth_check.make_setup(parsed(run_depth_check, *flags))
    assert usual.source == "the package's text" and len(usual.text) > len(setup.text)
    assert usual.config == setup.config and usual.config.depth == 2
    identities = [run_depth_check.identity(s)["text_sha256"] for s in (setup, usual)]
    assert len({*identities}) == 2


def test_sizes_at_the_start_are_compared_at_the_published_width_alone():
    """The ratio to the published size at step 1; the slope over depth where all of it was read
    off: that of half at step 10 was not."""
    narrow = make_results().assign_coords(rule=["half", "completep"])
    ratio = 1.5
    published = np.reshape(run_depth_check.PUBLISHED, (2, 3, -1))
    wide = narrow.assign_coords(d_model=[256])
    values = xr.DataArray(
        ratio * published[0, 1:], {"rule": wide.rule, "depth": wide.depth}, ["rule", "depth"]
    )
    wide["stream"] = (wide.stream * 0 + values).transpose(*wide.stream.dims)
    rows = list(run_depth_check.judge_claims(xr.concat([narrow, wide], "d_model"), SETUP))
    start = [row for row in rows if row.key == "depth start"]
    assert [row.estimate for row in start] == pytest.approx([np.log(ratio)] * len(start))
    assert len(start) == 2 * 6  # rules and depths
    assert all(row.key != "depth start" for row in run_depth_check.judge_claims(narrow, SETUP))
    growth = [row.setting for row in rows if row.key == "depth growth"]
    assert len(growth) == 3 * 2  # of both widths: half at step 1, CompleteP at both steps
    assert sum("10" in setting.partition("step")[2] for setting in growth) == 2


def test_one_depth_has_no_power_and_a_statement_needs_its_rule_and_step():
    results = make_results()
    single = results.isel(depth=[2])
    assert list(run_depth_check.judge_claims(single, SETUP)) == []
    lines = [c.quantity for c in run_depth_check.compare_results(single)]
    assert lines and not any("power" in line or "loss" in line for line in lines)
    assert not any(
        "tokens" in row.key for row in run_depth_check.judge_claims(results.sel(step=[1]), SETUP)
    )
    both = results.isel(depth=[0, 1])
    assert {row.key for row in run_depth_check.judge_claims(both, SETUP)} == {
        "depth tokens",
        "depth tokens completep",
        "depth cure",
    }
    other = both.sel(rule=["completep"])
    keys = {row.key for row in run_depth_check.judge_claims(other, SETUP)}
    assert keys == {"depth tokens completep"}
    half = both.assign_coords(rule=["half", "completep"])
    linear = {
        r.key: r.estimate for r in run_depth_check.judge_claims(half.isel(learning_rate=[1]), SETUP)
    }
    assert linear["depth linear"] == pytest.approx(-2 * (0.1 + 0.5), abs=0.1)
    assert linear["depth tokens completep"] == pytest.approx(0.1, abs=0.05)
    lines = [c.quantity for c in run_depth_check.compare_results(both)]
    assert sum("loss of the deepest network at step 10" in line for line in lines) == 6


def test_each_cell_is_trained_by_its_rule_rate_and_decay(monkeypatch):
    """The rule is that of the network whose rates are known; steps are counted from 1."""
    flags = ("--depth=3", "--d_model=8", "--num_tokens=4", "--rule=mup", "--learning_rate=0.25")
    flags += ("--weight_decay=0.5", "--steps=2", "--batch_size=7", "--base_depth=5")
    options = parsed(run_depth_check, *flags, "--base_width=16")
    setup, trained = run_depth_check.make_setup(options), []

    def measure(function, make_cells):
        ((name, floats),) = make_cells(options).items()
        return {name: function("key", floats)}

    def train_network(*arguments, **fields):
        trained.append((arguments, fields))
        return {"loss": np.array([[3.0, 2.0]]), "stream": np.array([[0.5, 0.25]])}

    replace_executor(monkeypatch, run_depth_check, options, None, "L=3, d=8", measure=measure)
    monkeypatch.setattr(run_depth_check, "train_network", train_network)
    results = run_depth_check.measure(options, setup, None)
    (((key, text, config, rule), fields),) = trained
    assert key == "key" and text is setup.text and config is setup.config
    base = run_depth_check.byte_model(5, 16, 4)
    assert rule == run_depth_check.rc.depth_rule("mup", base)
    assert fields == {"rate": 0.25, "weight_decay": 0.5, "steps": 2, "batch_size": 7}
    assert results.step.values.tolist() == [1, 2] and results.loss.values.tolist() == [[3, 2]]


def test_another_text_is_another_run(monkeypatch):
    make, identify = opened_with(run_depth_check, monkeypatch, "options")
    assert make is run_depth_check.make_setup
    assert identify is run_depth_check.identity
