"""Figures of run_stability, of drawn measures of two designs at two depths."""

import numpy as np

from experiments.stability import stability_figures
from experiments.stability.padded_designs import Case
from experiments.stability.stability_results import VISIBLE
from tests.support.closeness import assert_close

NUMBERS = ("change.random", "change.gradient", "expected_change", "gradient_bound")


def draw_results():
    """Draws measures of three seeds; the deepest networks come first, and two of their seeds fall
    below what is visible."""
    rng, results = np.random.default_rng(0), {}
    for design in ("pre", "post"):
        for depth in (30, 2):
            apart = rng.uniform(0.1, 1.0, (3, depth + 1))
            if depth == 30:
                apart[1, -3:], apart[2, -1] = VISIBLE / 2, 0.0
            results[Case(design, depth, 2 * depth)] = {
                "apart": apart,
                "expected_log_apart": np.log(rng.uniform(0.1, 1.0, (3, depth + 1))),
                "shares": rng.uniform(0.1, 0.9, (3, 2 * depth)),
            } | {name: rng.uniform(0.5, 4.0, 3) for name in (*NUMBERS, "gradient_bound")}
    return results


def geometric(values):
    return np.exp(np.log(values).mean(axis=0))


def test_tokens_are_drawn_where_they_are_visible_beside_the_mean_of_the_law():
    results = draw_results()
    collapse, change = stability_figures.one_law_figure(results).axes
    for index, design in enumerate(("pre", "post")):
        deep, shallow = results[design, 30, 60], results[design, 2, 4]
        marked, law, least, most = collapse.lines[4 * index : 4 * index + 4]
        assert_close(marked.get_ydata()[:-3], geometric(deep["apart"][:, :-3]))
        assert np.isnan(marked.get_ydata()[-3:]).all()
        assert marked.get_markevery() == (index, 2)  # about twelve markers, not on each other
        assert_close(law.get_ydata(), np.exp(deep["expected_log_apart"]).mean(axis=0))
        for line, ends in ((least, np.min), (most, np.max)):
            assert_close(line.get_ydata()[:-3], ends(deep["apart"][:, :-3], axis=0))
        pairs = [
            (geometric(m["expected_change"]), geometric(m["change.random"]))
            for m in (shallow, deep)
        ]
        assert_close(change.lines[index].get_xydata(), pairs)
    (low, high), equal = collapse.get_ylim(), change.lines[-1].get_xydata()
    assert VISIBLE / 10 <= low < 0.1 and high == 2
    assert (equal[:, 0] == equal[:, 1]).all() and (equal[0] < equal[1]).all()


def test_the_lower_end_of_the_tokens_is_a_tenth_of_what_is_visible():
    results = draw_results()
    for measures in results.values():
        measures["apart"][:, -1] = 1.1 * VISIBLE
        measures["expected_log_apart"][:] = -60.0
    collapse, _ = stability_figures.one_law_figure(results).axes
    assert_close(collapse.get_ylim(), [VISIBLE / 10, 2], rtol=1e-9)


def test_the_dependency_of_the_shallowest_network_is_a_mean_of_roots():
    """β_ij = √(share of j in its sum) times the roots of what each later branch leaves."""
    results = draw_results()
    fig = stability_figures.dependency_figure(results)
    for ax, design in zip(fig.axes, ("pre", "post"), strict=False):
        expected = np.zeros((3, 5, 5))
        for seed, shares in enumerate(results[design, 2, 4]["shares"]):
            parts = np.insert(shares, 0, 1.0)
            for i in range(5):
                for j in range(i + 1):
                    left = np.prod(1 - parts[j + 1 : i + 1])
                    expected[seed, i, j] = np.sqrt(parts[j] * left)
        (image,) = ax.images
        shown = image.get_array()
        np.testing.assert_array_equal(shown.mask, np.arange(5)[:, None] < np.arange(5)[None])
        assert_close(shown.filled(0), expected.mean(axis=0), rtol=1e-5)
        assert image.get_clim() == (0, 1) and ax.get_title().endswith(", 2 layers")


def test_changes_are_divided_by_the_measured_one_at_the_fewest_branches():
    results = draw_results()
    random, gradient = stability_figures.output_change_figure(results).axes
    for index, design in enumerate(("pre", "post")):
        networks = [results[design, 2, 4], results[design, 30, 60]]
        for ax, update in ((random, "random"), (gradient, "gradient")):
            curve, reference = ax.lines[2 * index : 2 * index + 2]
            measured = [geometric(m[f"change.{update}"]) for m in networks]
            assert_close(curve.get_xydata(), [[4, 1], [60, measured[1] / measured[0]]])
            expected = [m["expected_change"].mean() for m in networks]
            bounds = [geometric(m["gradient_bound"]) for m in networks]
            expected = np.divide(expected, expected[0])
            if update == "gradient":
                expected = np.divide(bounds, measured[0])
            assert_close(reference.get_ydata(), expected)
    for ax in (random, gradient):
        laws = {line.get_label(): line.get_ydata() for line in ax.lines[4:]}
        assert_close(laws["O(N)"], [1, 15])
        assert_close(laws["O(1)"], [1, 60 / 61 / (4 / 5)])
        harmonic = [sum(1 / (i + 1) for i in range(1, n + 1)) for n in (4, 60)]
        assert_close(laws["O(log N)"], [1, harmonic[1] / harmonic[0]])
        assert ax.get_xscale() == ax.get_yscale() == "log"
