"""The coordinate check: known powers are found, noise decides nothing, frameworks do not matter."""

import numpy as np
import pytest
from refusals import refused

import rank_collapse as rc
from rank_collapse.measures.coord_check import FAILS, HOLDS, OPEN

DEPTHS, WIDTHS = (2, 4, 8, 16), (4, 16)


def network(powers, noise=0.0, like=np.asarray):
    """build(depth, seed) of a "network" whose quantities are known powers of depth and width."""

    def build(depth, seed, width=4):
        rng = np.random.default_rng((seed, depth, width))
        step, base = iter(range(100)), np.random.default_rng(0).normal(size=(3, 5, 4))

        def size(name):
            over_depth, over_width = powers[name]
            return depth**over_depth * (width / 4) ** over_width * np.exp(noise * rng.normal())

        def one():
            now = next(step)
            hidden = size("stream") * base + size("change") * now  # all entries move alike
            before = hidden * (1 - size("branch"))
            return {
                "hidden": like(hidden),
                "before": like(before),
                "logits": like(size("logits") * base[0]),
                "query_gradient": like(size("query_gradient") * base[0]),
                "loss": 3.0,
            }

        return one

    return build


STILL = dict.fromkeys(("stream", "change", "branch", "logits", "query_gradient"), (0.0, 0.0))
KNOWN = STILL | {"stream": (0.5, 0.0), "logits": (1.0, -0.5), "branch": (-1.0, 0.0)}
KNOWN |= {"change": (0.25, 0.0), "query_gradient": (-2.0, 0.0)}


@pytest.mark.parametrize("framework", ["numpy", "jax.numpy", "torch"])
def test_known_powers_are_found(framework):
    build = network(KNOWN, like=pytest.importorskip(framework).asarray)
    check = rc.coord_check(build, DEPTHS, steps=1)
    found = {one.quantity: one for one in check.slopes()}
    for name in ("stream", "logits", "branch", "query_gradient"):
        assert found[name].slope == pytest.approx(KNOWN[name][0], abs=1e-5)
    assert found["residual_ratio"].slope == pytest.approx(0, abs=1e-5)
    assert "change" not in found  # a first step has none


def test_each_slope_is_judged_by_its_range():
    check = rc.coord_check(network(KNOWN, noise=0.01), DEPTHS, WIDTHS, steps=2, seeds=4)
    found = {(one.quantity, one.over): one for one in check.slopes(0)}
    drawn = (one for one in found.values() if one.quantity in ("stream", "logits", "branch"))
    assert all(one.low < one.slope < one.high for one in drawn)
    answers = {key: one.answer for key, one in found.items()}
    assert answers["stream", "depth"] == FAILS and answers["stream", "width"] == HOLDS
    assert answers["logits", "width"] == FAILS
    assert answers["branch", "depth"] == HOLDS
    assert answers["query_gradient", "depth"] == FAILS
    assert answers["branch", "width"] == answers["loss", "depth"] == "no range"
    assert found["stream", "depth"].slope == pytest.approx(0.5, abs=0.02)
    assert found["logits", "width"].slope == pytest.approx(-0.5, abs=0.02)


def test_change_is_between_steps_and_ranges_are_the_callers():
    check = rc.coord_check(
        network(KNOWN), DEPTHS, steps=3, ranges={"change": (0.2, 0.3), "loss": None}
    )
    (change,) = (one for one in check.slopes() if one.quantity == "change")
    assert change.slope == pytest.approx(0.25, abs=1e-6) and (change.least, change.most) == (
        0.2,
        0.3,
    )
    assert np.isnan(check.values["change"][..., 0]).all()


def test_noise_and_few_seeds_cannot_be_said():
    noisy = rc.coord_check(network(STILL, noise=1.0), DEPTHS, steps=1, seeds=4)
    found = {one.quantity: one for one in noisy.slopes()}
    assert found["stream"].answer == found["logits"].answer == OPEN
    few = rc.coord_check(network(STILL, noise=0.01), DEPTHS, steps=1, seeds=2)
    assert {one.answer for one in few.slopes()} <= {OPEN, "no range"}


def test_what_is_not_finite_does_not_hold():
    def build(depth, seed):
        hidden = np.random.default_rng(seed).normal(size=(5, 4)) * (np.nan if depth in lost else 1)
        return lambda: {"hidden": hidden, "score": -1.0}

    for lost in ((8,), DEPTHS):
        stream, *_, score = rc.coord_check(build, DEPTHS, steps=1).slopes()
        assert stream.answer == FAILS and f"depth {lost[0]}" in stream.why
        assert score.answer == "no range"


def test_the_table_and_the_figure_have_every_quantity():
    pytest.importorskip("pandas")
    check = rc.coord_check(network(KNOWN, noise=0.01), DEPTHS, WIDTHS, steps=2)
    table = check.to_pandas()
    assert len(table) == len(WIDTHS) * len(DEPTHS) * 3 * 2
    chosen = table[(table.width == 16) & (table.depth == 8) & (table.seed == 1)].sort_values("step")
    np.testing.assert_array_equal(chosen.stream, check.values["stream"][1, 2, 1])
    assert "width" not in rc.coord_check(network(KNOWN), DEPTHS, steps=1).columns()
    lines = str(check).splitlines()
    assert len(lines) == 2 + len(check.slopes())
    shown = check.figure().axes
    assert len(shown) == len(check.values)
    lines = {ax.get_ylabel(): len(ax.get_lines()) for ax in shown}
    assert lines["mean |x_L|"] == 2 * len(WIDTHS)  # steps and widths
    assert lines["mean |Δx_L| of a step"] == len(WIDTHS)  # a first step has none


test_mistakes_are_named = refused(
    [
        (lambda: rc.coord_check(network(KNOWN), (2, 2)), r"depths=\(2, 2\)"),
        (lambda: rc.coord_check(network(KNOWN), DEPTHS, (4,)), r"widths=\(4,\)"),
        (lambda: rc.coord_check(network(KNOWN), DEPTHS, steps=0), "steps=0"),
        (lambda: rc.coord_check(lambda d, seed: lambda: {"loss": 1}, DEPTHS), "no 'hidden'"),
    ]
)
