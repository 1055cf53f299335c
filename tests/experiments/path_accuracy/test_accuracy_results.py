"""Verdicts and findings on paths by length, of made-up accuracies."""

import dataclasses

import numpy as np
import pytest
import xarray as xr

from experiments import run_sort
from experiments.lab.labelled import make_dataset
from experiments.path_accuracy import accuracy_figures, accuracy_results
from experiments.path_accuracy.accuracy_results import accuracies
from experiments.path_accuracy.evaluation import BASELINES, name_axes
from experiments.verdicts.claims import FINDING
from tests.support.closeness import assert_close
from tests.support.runs import answered, parsed, verdicts

SETUP = run_sort.make_task(parsed(run_sort, "--depth=3"))


def make_measurements(truncated, whole_accuracy, baseline, tokens, sets=None):
    """Makes what `accuracies` reads from curves [s, L + 1] of networks that did not diverge."""
    ones = np.ones(len(truncated))
    variables = {
        f"{name}/accuracy": np.asarray(values)
        for name, values in {
            "truncated": truncated,
            "whole": whole_accuracy * ones,
            "offset": 0.7 * ones,
            BASELINES[0]: baseline * ones,
            BASELINES[1]: 0.4 * ones,
        }.items()
    }
    dataset = make_dataset(variables, ("metric", "path_length"))
    dataset = dataset.assign_coords(path_length=np.arange(dataset.sizes["path_length"]))
    if sets is not None:
        places = ("seed", "num_paths", "metric", "path_length", "repeat")
        dataset["sampled"] = xr.DataArray(sets, {"num_paths": [20], "metric": ["accuracy"]}, places)
    return dataset.assign(tokens=("seed", tokens * ones), fine=("seed", ones > 0))


def make_results(carried=1.0, sets=(0.3, 0.9, 0.4, 0.2), seeds=8, below=0):
    """Makes results of a network of depth 3, in which even growth is a mean length of 1.5.

    Σ_k k (a_k − a_{k−1})/(a_3 − baseline) = carried: a_0 = a_1 = a_2 are carried/3 of the way from
    the whole model's .95 down to the baseline's .6. The baseline's standard error is .01.
    """
    wobble = 0.01 * np.arange(seeds)[:, None]
    curves = np.insert(np.repeat(0.95 - 0.35 * (carried + wobble) / 3, 3, axis=1), 3, 0.95, axis=1)
    curves[:below, 1] = 0.57
    sampled = (wobble + sets)[:, None, None, :, None]
    return make_measurements(curves, whole_accuracy=0.95, baseline=0.6, tokens=2400, sets=sampled)


@pytest.mark.parametrize(
    ("fields", "suffice", "one", "falls"),
    [
        ({}, "within", "within", "within"),
        # early for a path, whose mean length is 2, but no earlier than even growth
        ({"carried": 1.7}, "outside", "within", "within"),
        ({"carried": 1.465}, "undecided", "within", "within"),  # in half of the networks
        ({"sets": (0.3, 0.65, 0.7, 0.8)}, "within", "outside", "outside"),
        # below the baseline, but for chance, sets guess at all lengths and do not fall
        ({"sets": (0.3, 0.5, 0.4, 0.3)}, "within", "outside", "outside"),
        ({"sets": (0.3, 0.54, 0.4, 0.3)}, "within", "outside", "outside"),
        # a truncation below the baseline carries nothing, as a guess does
        ({"below": 1}, "undecided", "within", "within"),
        ({"below": 1, "seeds": 16}, "within", "within", "within"),
        ({"below": 4}, "undecided", "within", "within"),
        ({"sets": (0.3, 0.5, 0.4, 0.3), "below": 8}, "outside", "outside", "outside"),
        ({"seeds": 2}, "undecided", "undecided", "undecided"),
    ],
)
def test_verdicts(fields, suffice, one, falls):
    rows = list(accuracy_results.judge_claims(make_results(**fields), SETUP, "sorting"))
    answers, judged = answered(rows)[1], verdicts(rows)
    assert [key for key, answer in answers.items() if answer == FINDING] == ["biases", "all of it"]
    assert [judged[key] for key in ("short suffice", "one short", "falls")] == [suffice, one, falls]


def test_no_seed_is_left_out_but_of_findings_on_what_was_learned():
    dataset = make_results(seeds=5)
    dataset.whole.values[1] = 0.6
    rows = list(accuracy_results.judge_claims(dataset, SETUP, "sorting"))
    assert "1 of 5 draws have no number" in rows[0].note  # which may be on either side
    draws = {row.key: row.draws for row in rows}
    assert draws == {"short suffice": 4, "one short": 5, "falls": 5, "biases": 4, "all of it": 4}
    biases = next(
        row
        for row in accuracy_results.judge_claims(make_results(), SETUP, "sorting")
        if row.key == "biases"
    )
    assert biases.estimate == pytest.approx((0.7 - 0.6) / (0.95 - 0.6))


def test_what_is_shown_beside_published_values():
    comparisons = {c.quantity: c for c in accuracy_results.compare_results(make_results(), SETUP)}
    whole_model = comparisons["token accuracy of the full model"]
    assert whole_model.measured.startswith("0.950") and whole_model.published == 0.98
    text = "path length {}: accuracy without longer paths"
    truncated = [comparisons[text.format(k)].measured for k in range(4)]  # .95 − .35 · 1.035/3
    assert truncated == pytest.approx([0.829, 0.829, 0.829, 0.950], abs=5e-4)
    assert comparisons["frozen biases alone, without a path"].measured.startswith("0.700")
    (best,) = (c.measured for q, c in comparisons.items() if "highest accuracy" in q)
    assert best == 1


def test_the_length_at_which_the_accuracy_comes():
    cases = (  # a_0 .. a_3, Σ_k k (a_k − a_{k−1})/(a_3 − .5), least k within .015, fell below
        ((0.5, 0.9, 0.9, 0.9), 1, 1, False),
        ((0.6, 0.7, 0.8, 0.9), 1.5, 3, False),  # a quarter at each of 0, 1, 2, 3
        ((0.6, 0.88, 0.886, 0.9), 0.835, 2, False),
        # A truncation below the majority class, as of the hull, counts as it.
        ((0.6, 0.4, 0.8, 0.9), 2.0, 3, True),
        ((0.6, 0.46, 0.8, 0.9), 2.0, 3, False),  # ± 0.025
    )
    curves, *expected = zip(*cases, strict=True)
    measures = accuracies(make_measurements(curves, whole_accuracy=0.9, baseline=0.5, tokens=400.0))
    for name, values in zip(("carried", "enough", "fell_below"), expected, strict=True):
        assert_close(measures[name], values)
    guessing = make_measurements(
        [(0.5, 0.5, 0.5, 0.52)] * 2, whole_accuracy=0.52, baseline=0.5, tokens=400.0
    )
    measures = accuracies(guessing.assign(fine=("seed", [False, True])))
    assert not measures.learned.any() and len(measures.learned) == 1  # the other diverged
    assert np.isnan([measures.carried, measures.enough]).all()


def test_the_finding_names_the_fewest_layers_and_single_lengths():
    """From 0.9 of what the whole model has above a guess; sampled sets are the largest ones."""
    curves, sets = [(0.6, 0.7, 0.93, 0.95)] * 2, np.array([0.3, 0.89, 0.4, 0.25])
    measured = make_measurements(
        curves,
        whole_accuracy=0.95,
        baseline=0.6,
        tokens=2400,
        sets=np.tile(sets[:, None], (2, 1, 1, 1, 1)),
    )
    finding = accuracy_results.make_finding(measured, SETUP, "of the letters are sorted")
    assert finding.figure == "short_paths" and finding.sentence == (
        "0.93 of the letters are sorted without paths through more than 2 of 3 layers (0.95 with "
        "all paths, 0.60 by a guess); 20 sampled paths of length 1 give 0.89, of length 3 0.25."
    )


@pytest.mark.parametrize("least", [0, 1, 2, 3])
def test_rows_name_lengths_not_places_where_sampled_paths_begin_later(least):
    """--path_len is the shortest sampled length: every row against a loop over lengths."""
    depth, rng = 4, np.random.default_rng(least)
    task = run_sort.make_task(parsed(run_sort, f"--depth={depth}", f"--path_len={least}"))
    task = dataclasses.replace(task, metrics={"accuracy": task.metrics["accuracy"]})
    lengths, seeds, repeats = range(least, depth + 1), range(3), range(2)
    names = ("exact", "up_to", "from", "shapley", "truncated")
    by_length = {name: rng.uniform(0.1, 0.9, (3, depth + 1)) for name in names}
    sets = {size: rng.uniform(0.1, 0.9, (3, len(lengths), 2)) for size in (5, 20)}
    arrays = {f"{name}/accuracy": values for name, values in by_length.items()}
    arrays |= {f"sets/{size}/accuracy": values for size, values in sets.items()}
    arrays |= {f"{name}/accuracy": np.full(3, 0.6) for name in (*BASELINES, "offset")}
    arrays |= {"whole/accuracy": np.full(3, 0.95), "tokens": np.full(3, 900.0)}
    results = name_axes(task, arrays | {"diverged_at": np.array([-1, 4, -1])})

    def average(values, length):
        """Averages over the seeds that did not diverge, and over repeats."""
        place = length - least
        return sum(values[s, place, r] for s in (0, 2) for r in repeats) / 4

    places = "evaluation", "seed", "path_length", "num_paths", "repeat"
    rows = accuracy_results.make_rows(results, task)
    rows = {tuple(map(row.get, places)): row["accuracy"] for row in rows if "path_length" in row}
    wanted = {
        (name, s, k, None, None): values[s, k]
        for name, values in by_length.items()
        for s in seeds
        for k in range(depth + 1)
    } | {
        ("sampled", s, k, size, r): values[s, k - least, r]
        for size, values in sets.items()
        for s in seeds
        for k in lengths
        for r in repeats
    }
    assert rows == pytest.approx(wanted)
    shown = {c.quantity: c.measured for c in accuracy_results.compare_results(results, task)}
    for k in range(depth + 1):
        mean = (by_length["truncated"][0, k] + by_length["truncated"][2, k]) / 2
        quantity = f"path length {k}: accuracy without longer paths"
        assert shown[quantity] == pytest.approx(mean)
    (single,) = accuracy_figures.short_paths_figure(results, task).axes
    assert [*single.get_xticks()] == [*range(depth + 1)]  # also those that are not sampled
    sampled, _ = accuracy_figures.paths_figure(results, task).axes
    for container, values in zip(sampled.containers, sets.values(), strict=True):
        line = np.asarray(container.lines[0].get_ydata(), float)
        assert_close(line[np.isfinite(line)], [average(values, k) for k in lengths])
    best = [max(lengths, key=lambda k, v=v: average(v, k)) for v in sets.values()]
    for dataset in (results, results.sel(path_length=[*lengths])):
        comparisons = accuracy_results.compare_results(dataset, task)
        assert [c.measured for c in comparisons if "highest accuracy" in c.quantity] == best
    keys = {row.key for row in accuracy_results.judge_claims(results, task, "sorting")}
    assert keys.isdisjoint({"one short", "falls"}) == (least > 1)
    finding = accuracy_results.make_finding(results, task, "are sorted")
    assert (finding is None) == (least > 1)
    if finding is not None:
        one, full = (average(sets[20], k) for k in (1, depth))
        assert f"of length 1 give {one:.2f}, of length 4 {full:.2f}." in finding.sentence


@pytest.mark.parametrize(
    ("is_below", "note"),
    [
        ([False, False], ""),
        ([True, False, False], "below the baseline in 1 of 3 networks"),
    ],
)
def test_networks_below_the_baseline_are_noted_if_there_are_any(is_below, note):
    assert accuracy_results.describe_below(xr.DataArray(is_below)) == note


def test_the_legend_of_losses_counts_the_seeds_that_diverged():
    losses = [[3.0, 2.0], [3.0, np.nan], [2.0, 1.0], [4.0, np.nan], [4.0, np.nan]]
    fine = [True, False, True, False, False]
    variables = {"losses": (("seed", "epoch"), losses), "fine": ("seed", fine)}
    results = xr.Dataset(variables, {"epoch": [0, 1], "seed": np.arange(5)})
    (ax,) = accuracy_figures.loss_figure(results, SETUP).axes
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["2 seeds", "diverged: 3"]
    untrained = results.isel(epoch=slice(0))
    assert accuracy_figures.loss_figure(untrained, SETUP) is None
