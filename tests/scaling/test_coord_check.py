"""The coordinate check finds known powers, in any framework; noise alone decides nothing."""

import re

import numpy as np
import pytest
from scipy import stats

import rank_collapse as rc
from rank_collapse.scaling import coord_check
from tests.support.closeness import assert_close
from tests.support.refusals import is_refused, parametrize_refusals

DEPTHS, WIDTHS = (2, 4, 8, 16), (4, 16)


def network(powers, noise=0.0, like=np.asarray):
    """Makes build(depth, seed) of a "network" with known powers of depth and width."""

    def build(depth, seed, width=4):
        rng = np.random.default_rng((seed, depth, width))
        counter, base = iter(range(100)), np.random.default_rng(0).normal(size=(3, 5, 4))

        def size(name):
            over_depth, over_width = powers[name]
            return depth**over_depth * (width / 4) ** over_width * np.exp(noise * rng.normal())

        def run_step():
            step_number = next(counter)
            hidden = size("stream") * base + size("change") * step_number  # all entries move alike
            before = hidden * (1 - size("branch"))
            return {
                "hidden": like(hidden),
                "before": like(before),
                "logits": like(size("logits") * base[0]),
                "query_gradient": like(size("query_gradient") * base[0]),
                "loss": 3.0,
            }

        return run_step

    return build


STILL = dict.fromkeys(("stream", "change", "branch", "logits", "query_gradient"), (0.0, 0.0))
POWERS = STILL | {"stream": (0.5, 0.0), "logits": (1.0, -0.5), "branch": (-1.0, 0.0)}
POWERS |= {"change": (0.25, 0.0), "query_gradient": (-2.0, 0.0)}


@pytest.mark.parametrize("framework", ["numpy", "jax.numpy", "torch"])
def test_known_powers_are_found(framework):
    build = network(POWERS, like=pytest.importorskip(framework).asarray)
    check = rc.coord_check(build, DEPTHS, steps=1)
    slopes = {slope.quantity: slope for slope in check.slopes()}
    for name in ("stream", "logits", "branch", "query_gradient"):
        assert slopes[name].slope == pytest.approx(POWERS[name][0], abs=1e-5)
    assert slopes["residual_ratio"].slope == pytest.approx(0, abs=1e-5)
    assert "change" not in slopes  # a first step has none


def test_slopes_have_intervals_over_seeds():
    check = rc.coord_check(network(POWERS, noise=0.01), DEPTHS, WIDTHS, steps=2, seeds=4)
    by_quantity = {(slope.quantity, slope.over): slope for slope in check.slopes(0)}
    noisy = (
        slope for slope in by_quantity.values() if slope.quantity in ("stream", "logits", "branch")
    )
    assert all(slope.low < slope.slope < slope.high for slope in noisy)
    assert by_quantity["stream", "depth"].slope == pytest.approx(0.5, abs=0.02)
    assert by_quantity["logits", "width"].slope == pytest.approx(-0.5, abs=0.02)
    assert by_quantity["stream", "depth"].ratio == pytest.approx(8**0.5, rel=0.05)
    # Student's interval of the slopes that numpy fits to each seed
    logs = np.log(check.values["stream"][..., 0]).mean(axis=0)
    slopes = np.polyfit(np.log(DEPTHS), logs, 1)[0]
    half = stats.t.ppf(0.975, 3) * slopes.std(ddof=1) / 2
    ends = by_quantity["stream", "depth"][3:5]
    assert_close(ends, [slopes.mean() - half, slopes.mean() + half], rtol=1e-9)
    # over width, of the geometric means over all depths
    logs = np.log(check.values["logits"][..., 0]).mean(axis=1)
    slopes = np.polyfit(np.log(WIDTHS), logs, 1)[0]
    assert_close(by_quantity["logits", "width"].slope, slopes.mean(), rtol=1e-9)
    (slope, *_) = rc.coord_check(network(POWERS), DEPTHS, steps=1, seeds=1).slopes()
    assert (slope.low, slope.high) == (-np.inf, np.inf)
    # seeds that agree exactly decide
    (slope, *_) = rc.coord_check(network(POWERS), DEPTHS, steps=1, seeds=3).slopes()
    assert slope.low == slope.high == slope.slope == pytest.approx(0.5)
    assert f"{slope.slope:.2f} to {slope.slope:.2f}" in str(
        rc.coord_check(network(POWERS), DEPTHS, steps=1, seeds=3)
    )


def test_a_bump_that_no_slope_shows_is_the_largest_ratio():
    sizes = {2: 1.07, 8: 100.3, 32: 1.06}
    states = np.random.default_rng(0).normal(size=(5, 4))
    check = rc.coord_check(lambda depth, seed: lambda: {"hidden": sizes[depth] * states}, steps=1)
    stream = check.slopes()[0]
    assert abs(stream.slope) < 0.01 and stream.ratio == pytest.approx(100.3 / 1.06)
    assert "94.6" in str(check)


def test_sizes_stand_in_the_order_in_which_they_are_given():
    """The text shows the first and the last depth after the last step; a slope of no number names
    the depth where it is 0."""
    sizes = {8: 4.0, 2: 1.0, 4: 0.0}

    def build(depth, seed):
        number = iter(range(1, 4))

        def run_step():
            factor = next(number)
            return {"hidden": factor * depth * np.eye(3, 4)[None], "own": factor * sizes[depth]}

        return run_step

    check = rc.coord_check(build, (8, 4, 2), steps=2, seeds=1)
    slope = check.slopes()[-1]
    assert slope.reason == "not a positive number at depth 4" and np.isnan(slope.ratio)
    header, *rows = [line.split() for line in str(check).splitlines()[1:]]
    assert header[2:4] == ["L=8", "L=2"]
    assert rows[-1] == ["own", "depth", "8", "2", "nan", *slope.reason.split()]
    (stream,) = (one for one in check.slopes() if one.quantity == "stream")
    assert stream.slope == pytest.approx(1) and stream.ratio == pytest.approx(4)
    columns = rc.coord_check(build, (8, 4, 2), steps=2, seeds=1).columns()
    assert (
        columns["depth"].tolist() == [8, 8, 4, 4, 2, 2] and columns["step"].tolist() == [1, 2] * 3
    )
    assert columns["own"].tolist() == [4, 8, 0, 0, 1, 2]


def test_the_text_has_the_geometric_means_over_seeds():
    def build(depth, seed):
        return lambda: {"hidden": np.eye(3)[None], "own": depth * 4.0**seed}

    text = str(rc.coord_check(build, (2, 8), steps=1, seeds=3))
    (row,) = (line.split() for line in text.splitlines() if line.split()[:2] == ["own", "depth"])
    assert row[2:4] == ["8", "32"]  # of 2, 8 and 32, and of 8, 32 and 128


def test_change_is_between_steps():
    check = rc.coord_check(network(POWERS), DEPTHS, steps=3)
    slopes = check.slopes()
    names = ["stream", "logits", "change", "branch", "residual_ratio", "cosine_distance"]
    names += ["query_gradient", "loss"]
    assert [one.quantity for one in slopes] == names
    first = [one.quantity for one in check.slopes(0)]  # a first step has no change
    assert first == [name for name in names if name != "change"]
    change = slopes[2]
    assert change.slope == pytest.approx(0.25, abs=1e-6)
    assert np.isnan(check.values["change"][..., 0]).all()


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_a_buffer_that_a_step_uses_again_has_changed(framework):
    module = pytest.importorskip(framework)

    def build(depth, seed):
        hidden = module.ones((5, 4))

        def step():
            hidden[...] += 0.5
            return {"hidden": hidden}

        return step

    change = rc.coord_check(build, DEPTHS, steps=2, seeds=1).values["change"]
    np.testing.assert_array_equal(change[..., 1], 0.5)


def test_what_is_0_everywhere_is_drawn():
    step = {"hidden": np.eye(4), "before": np.eye(4), "query_gradient": np.zeros(3)}
    check = rc.coord_check(lambda depth, seed: lambda: step, DEPTHS, steps=2, seeds=2)
    figure = check.figure()
    figure.draw_without_rendering()
    scales = {ax.get_ylabel(): ax.get_yscale() for ax in figure.axes}
    names = "mean |x_L|", "‖x_L − x_{L−1}‖/‖x_L‖", "‖∂W_Q‖ of the last\nblock"
    assert [scales[name] for name in names] == ["log", "linear", "linear"]


def test_curves_of_several_networks_share_a_panel():
    """A logarithmic one, where any of them has numbers above 0; its label is broken into lines."""
    zero, one = np.zeros((2, 1, 3)), np.ones((2, 1, 3))
    curves = {"a": {"linearisation": zero, "own": one}, "b": {"linearisation": one, "own": zero}}
    figure = coord_check.coordinates_figure(
        curves, (2, 8), {"linearisation": "far from a line " * 2}
    )
    labels = ["far from a line far\nfrom a line", "own"]
    assert [ax.get_ylabel() for ax in figure.axes] == labels
    assert [ax.get_yscale() for ax in figure.axes] == ["log", "log"]
    assert [ax.get_xticks().tolist() for ax in figure.axes] == [[2, 8]] * 2
    assert not any(ax.get_xticks(minor=True).size for ax in figure.axes)
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == ["a first step", "a last step", "b first step", "b last step"]


def test_the_text_has_a_row_for_each_quantity_over_depth_and_over_width():
    """The sizes are means over widths; of one seed there is no interval."""
    stream = np.array([[1.0, 4.0], [3.0, 12.0]])[..., None, None] * [[9.0, 1.0]]  # two steps
    values = {"own": np.ones_like(stream), "stream": stream}
    first, *lines = str(coord_check.CoordCheck(values, (2, 8), (4, 16))).splitlines()
    assert first == "after 2 steps:"
    assert [re.split("  +", line) for line in lines] == [
        ["quantity", "over", "L=2", "L=8", "slope", "95 % interval", "largest ratio"],
        ["mean |x_L|", "depth", "2", "8", "1.00", "4"],
        ["mean |x_L|", "width", "2", "8", "0.79", "3"],  # ln 3 / ln 4
        ["own", "depth", "1", "1", "0.00", "1"],
        ["own", "width", "1", "1", "0.00", "1"],
    ]


def test_a_loss_of_half_precision_is_a_number():
    torch = pytest.importorskip("torch")
    step = {"hidden": torch.ones(5, 4), "loss": torch.tensor(1.5, dtype=torch.bfloat16)}
    check = rc.coord_check(lambda depth, seed: lambda: step, DEPTHS, steps=1, seeds=1)
    assert (check.values["loss"] == 1.5).all()


def test_what_is_not_positive_has_no_slope():
    def build(depth, seed):
        hidden = np.random.default_rng(seed).normal(size=(5, 4)) * (np.nan if depth in lost else 1)
        return lambda: {"hidden": hidden, "score": -1.0}

    for lost in ((8,), DEPTHS):
        stream, *_, score = rc.coord_check(build, DEPTHS, steps=1).slopes()
        assert np.isnan(stream.slope) and f"depth {lost[0]}" in stream.reason
        assert np.isnan(score.ratio) and "depth 2" in score.reason


def test_the_table_and_the_figure_have_every_quantity():
    pytest.importorskip("pandas")
    check = rc.coord_check(network(POWERS, noise=0.01), DEPTHS, WIDTHS, steps=2)
    table = check.to_pandas()
    assert len(table) == len(WIDTHS) * len(DEPTHS) * 3 * 2
    chosen = table[(table.width == 16) & (table.depth == 8) & (table.seed == 1)].sort_values("step")
    np.testing.assert_array_equal(chosen.stream, check.values["stream"][1, 2, 1])
    assert "width" not in rc.coord_check(network(POWERS), DEPTHS, steps=1).columns()
    lines = str(check).splitlines()
    assert len(lines) == 2 + len(check.slopes())
    panels = check.figure().axes
    assert len(panels) == len(check.values)
    lines = {ax.get_ylabel(): len(ax.get_lines()) for ax in panels}
    assert lines["mean |x_L|"] == 2 * len(WIDTHS)  # steps and widths
    assert lines["mean |Δx_L| of a step"] == len(WIDTHS)  # a first step has none


def test_a_figure_has_the_geometric_means_at_the_first_and_the_last_step():
    check = rc.coord_check(network(POWERS, noise=0.3), DEPTHS, WIDTHS, steps=3)
    panels = {ax.get_ylabel(): ax for ax in check.figure().axes}
    assert list(panels)[:2] == ["mean |x_L|", "mean |logit|"]
    ax, means = panels["mean |logit|"], np.exp(np.log(check.values["logits"]).mean(axis=2))
    assert (ax.get_xscale(), ax.get_yscale(), ax.get_xlabel()) == ("log", "log", "layers L")
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["2", "4", "8", "16"]
    lines = {line.get_label(): line for line in ax.get_lines()}
    assert set(lines) == {f"d={d} {when} step" for d in WIDTHS for when in ("first", "last")}
    for index, width in enumerate(WIDTHS):
        for when, step, dashes in (("first", 0, ":"), ("last", -1, "-")):
            line = lines[f"d={width} {when} step"]
            assert_close(line.get_xdata(), DEPTHS)
            assert_close(line.get_ydata(), means[index, :, step], rtol=1e-12)
            assert line.get_linestyle() == dashes
    assert lines["d=4 first step"].get_color() != lines["d=16 first step"].get_color()


def test_values_of_several_runs_are_split_by_their_label():
    check = rc.coord_check(network(POWERS), list(DEPTHS), list(WIDTHS), steps=1, seeds=1)
    assert check.depths == DEPTHS and check.widths == WIDTHS
    split = check.by_width("AdamW")
    assert list(split) == ["AdamW d=4", "AdamW d=16"]
    for values, title in zip(check.values["logits"], split, strict=True):
        np.testing.assert_array_equal(split[title]["logits"], values)
    alone = rc.coord_check(network(POWERS), DEPTHS, steps=1, seeds=1)
    assert list(alone.by_width("Lion")) == ["Lion"] and list(alone.by_width()) == [""]


def test_the_quantities_of_a_step_are_those_of_its_arrays():
    """Means over a batch of two texts."""
    hidden, before, last, logits, gradient = np.random.default_rng(1).normal(size=(5, 2, 5, 4))
    arrays = {"hidden": hidden, "before": before, "logits": logits, "query_gradient": gradient}
    numbers = coord_check.coordinates(arrays | {"loss": 7}, last)
    expected = {
        "stream": np.abs(hidden).mean(),
        "logits": np.abs(logits).mean(),
        "change": np.abs(hidden - last).mean(),
        "branch": np.sqrt(np.square(hidden - before).sum() / np.square(hidden).sum()),
        "residual_ratio": np.mean([rc.residual_ratio(x) for x in hidden]),
        "cosine_distance": 1 - np.mean([rc.token_cosine(x) for x in hidden]),
        "query_gradient": np.sqrt(np.square(gradient).sum()),
        "loss": 7,
    }
    assert numbers.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(numbers[name], value, rtol=1e-6, err_msg=name)
    assert coord_check.coordinates({"hidden": hidden}).keys() == {
        *("stream", "residual_ratio", "cosine_distance")
    }


def test_a_gradient_of_one_number_has_its_size():
    numbers = coord_check.coordinates({"hidden": STATES, "query_gradient": -3.0})
    assert numbers["query_gradient"] == 3


STATES = np.random.default_rng(0).normal(size=(5, 4))


def one_step(result):
    return lambda depth, seed: lambda: result


def shrinking(depth, seed):
    sizes = iter((5, 1))
    return lambda: {"hidden": STATES[: next(sizes)]}


@parametrize_refusals(
    [
        (lambda: rc.coord_check(network(POWERS), (2, 2)), r"depths=\(2, 2\)"),
        (lambda: rc.coord_check(network(POWERS), (2, 4, 2)), r"depths=\(2, 4, 2\) must have"),
        (lambda: rc.coord_check(network(POWERS), DEPTHS, (4,)), r"widths=\(4,\)"),
        (lambda: rc.coord_check(network(POWERS), (0, 2)), r"depths=0\.0 is not in"),
        (lambda: rc.coord_check(network(POWERS), DEPTHS, (4, -8)), r"widths=-8\.0 is not in"),
        (lambda: rc.coord_check(network(POWERS), DEPTHS, steps=0), "steps=0"),
        (lambda: rc.coord_check(network(POWERS), DEPTHS, seeds=1.5), r"seeds=1\.5"),
        (lambda: rc.coord_check(network(POWERS), DEPTHS, steps="3"), "steps='3'"),
        (lambda: rc.coord_check(network(POWERS), 8), "depths=8"),
        (lambda: rc.coord_check(None, DEPTHS), "build is a NoneType, not a function of the depth"),
        (lambda: rc.coord_check(lambda depth, seed: None, DEPTHS), "build returned a NoneType"),
        (lambda: rc.coord_check(one_step((STATES,)), DEPTHS), "a step returned a tuple"),
        (lambda: rc.coord_check(one_step({"hidden": STATES, "a": "b"}), DEPTHS), "a of a step"),
        (lambda: rc.coord_check(one_step({"hidden": STATES, "a": STATES}), DEPTHS), "a of a step"),
        (lambda: rc.coord_check(one_step({"loss": 1}), DEPTHS), "no 'hidden'"),
        (lambda: rc.coord_check(one_step({"hidden": None}), DEPTHS), "no 'hidden'"),
        (lambda: rc.coord_check(one_step({"hidden": STATES, "stream": 1}), DEPTHS), "stream"),
        (lambda: rc.coord_check(one_step({"hidden": STATES, "change": 1}), DEPTHS), "change"),
        (
            lambda: rc.coord_check(one_step({"hidden": STATES, "branch": 1, "stream": 1}), DEPTHS),
            "branch, stream: coord_check measures this itself",
        ),
        (
            lambda: rc.coord_check(one_step({"hidden": STATES, "before": STATES[:1]}), DEPTHS),
            r"\(5, 4\) .* \(1, 4\)",
        ),
        (lambda: rc.coord_check(shrinking, DEPTHS, steps=2), r"\(1, 4\) .* \(5, 4\)"),
    ]
)
def test_mistakes_are_named(arguments, message):
    is_refused(message, *arguments)


def test_seeds_that_agree_exactly_have_the_slope_as_interval():
    """Of one seed the interval is infinite; of several that are equal it is the slope."""
    values = {"stream": np.broadcast_to(np.array([2.0, 8.0])[None, :, None, None], (1, 2, 3, 1))}
    slope = coord_check.CoordCheck(values, (2, 8)).slopes()[0]
    assert slope.low == slope.slope == slope.high == pytest.approx(1)
    one = coord_check.CoordCheck({"stream": values["stream"][:, :, :1]}, (2, 8)).slopes()[0]
    assert (one.low, one.high) == (-np.inf, np.inf)


@pytest.mark.parametrize("scale", [1e25, 1e-25])
def test_norms_of_a_step_neither_overflow_nor_vanish(scale):
    scaled = np.float32(scale) * STATES.astype(np.float32)
    one = coord_check.coordinates(
        {"hidden": scaled, "before": scaled / 2, "query_gradient": scaled}
    )
    np.testing.assert_allclose(one["branch"], 0.5, rtol=1e-6)
    want = scale * np.linalg.norm(STATES)
    np.testing.assert_allclose(one["query_gradient"], want, rtol=1e-5)


@pytest.mark.parametrize("framework", ["jax.numpy", "torch"])
def test_earlier_states_may_be_of_numpy(framework):
    """The states of the step decide the framework; a step may keep earlier ones on the host."""
    hidden = pytest.importorskip(framework).asarray(STATES)
    numbers = coord_check.coordinates({"hidden": hidden, "before": 0.25 * STATES}, 0.5 * STATES)
    assert float(numbers["change"]) == pytest.approx(0.5 * np.abs(STATES).mean(), rel=1e-6)
    assert float(numbers["branch"]) == pytest.approx(0.75, rel=1e-6)
