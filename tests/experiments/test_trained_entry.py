"""The rows of the trained experiments: each can come out otherwise."""

import numpy as np
import pytest
from trained_runs import answered, verdicts

from experiments.run_sort import EXPERIMENT, FLAGS
from experiments.shell import cli
from experiments.trained.paths import accuracies
from rank_collapse.report.claims import FINDING

SEEDS = 8
SETUP = EXPERIMENT.setup(cli.parse(FLAGS, ["--depth=3"]))


def measured(truncated, whole, baseline, tokens):
    """What `accuracies` reads, of curves [s, L + 1] of networks that did not diverge."""
    seeds = len(truncated)
    values = {"truncated": truncated, "whole": np.full(seeds, whole), "offset": np.full(seeds, 0.7)}
    return {name: {"accuracy": np.array(v)} for name, v in values.items()} | {
        "baselines": {"majority": np.full(seeds, baseline), "random": np.full(seeds, 0.4)},
        "tokens": np.full(seeds, tokens),
        "diverged_at": np.full(seeds, -1),
    }


def results(carried=1.0, sets=(0.3, 0.9, 0.4, 0.2), seeds=SEEDS, below=0):
    """Of a network of depth 3, in which even growth has its accuracy at a length of 1.5.

    Σ_k k (a_k − a_{k−1})/(a_3 − baseline) = carried where a_0 = a_1 = a_2 are that third of the
    way from the whole model's .95 down to the baseline's .6, whose standard error is .01.
    """
    wobble = 0.01 * np.arange(seeds)[:, None]
    curves = np.insert(np.repeat(0.95 - 0.35 * (carried + wobble) / 3, 3, axis=1), 3, 0.95, axis=1)
    curves[:below, 1] = 0.57
    return measured(curves, whole=0.95, baseline=0.6, tokens=2400) | {
        "lengths": np.arange(4),
        "sets": {"20": {"accuracy": (wobble + sets)[..., None]}},
    }


@pytest.mark.parametrize(
    ("fields", "suffice", "one", "falls"),
    [
        ({}, "within", "within", "within"),
        # early for a path, whose mean length is 2, but no earlier than even growth
        ({"carried": 1.7}, "outside", "within", "within"),
        ({"carried": 1.465}, "undecided", "within", "within"),  # in half of the networks
        ({"sets": (0.3, 0.65, 0.7, 0.8)}, "within", "outside", "outside"),
        # below the baseline, but for chance, a slope is of noise
        ({"sets": (0.3, 0.5, 0.4, 0.3)}, "within", "outside", "undecided"),
        ({"sets": (0.3, 0.54, 0.4, 0.3)}, "within", "outside", "undecided"),
        ({"below": 1}, "within", "within", "within"),
        ({"below": 4}, "undecided", "within", "within"),
        ({"sets": (0.3, 0.5, 0.4, 0.3), "below": 8}, "undecided", "outside", "undecided"),
        ({"seeds": 2}, "undecided", "undecided", "undecided"),
    ],
)
def test_verdicts(fields, suffice, one, falls):
    rows = list(EXPERIMENT.claims(results(**fields), SETUP))
    answers, found = answered(rows)[1], verdicts(rows)
    assert [key for key, answer in answers.items() if answer == FINDING] == ["biases", "all of it"]
    assert [found[key] for key in ("short suffice", "one short", "falls")] == [suffice, one, falls]


def test_no_seed_is_left_out_but_of_findings_on_what_was_learned():
    found = results(seeds=5)
    found["whole"]["accuracy"][1] = 0.6
    rows = list(EXPERIMENT.claims(found, SETUP))
    assert "1 of 5 draws have no number" in rows[0].why  # which may be on either side
    draws = {row.key: row.draws for row in rows}
    assert draws == {"short suffice": 4, "one short": 5, "falls": 5, "biases": 4, "all of it": 4}
    biases = next(row for row in EXPERIMENT.claims(results(), SETUP) if row.key == "biases")
    assert biases.estimate == pytest.approx((0.7 - 0.6) / (0.95 - 0.6))


def test_what_is_shown_beside_published_values():
    found = {c.quantity: c for c in EXPERIMENT.compare(results(), SETUP)}
    whole = found["token accuracy of the whole model"]
    assert whole.measured.startswith("0.950") and whole.published == 0.98
    truncated = found["without paths longer than 0 .. 3, self-consistent"].measured
    assert truncated == "0.829, 0.829, 0.829, 0.950"  # .95 − .35 · 1.035/3
    assert found["no path at all: the offset alone, frozen"].measured.startswith("0.700")
    best = found["best length of sets of 20 sampled paths"]
    assert best.measured == 1 and best.note == "its accuracy 0.935"


def test_the_length_at_which_the_accuracy_comes():
    cases = (  # a_0 .. a_3, Σ_k k (a_k − a_{k−1})/(a_3 − .5), least k within .015, fell below
        ((0.5, 0.9, 0.9, 0.9), 1, 1, False),
        ((0.6, 0.7, 0.8, 0.9), 1.5, 3, False),  # a quarter at each of 0, 1, 2, 3
        ((0.6, 0.88, 0.886, 0.9), 0.835, 2, False),
        # A truncation below the majority class, as of the hull: the sum has negative terms.
        ((0.6, 0.4, 0.8, 0.9), np.nan, 3, True),
        ((0.6, 0.46, 0.8, 0.9), 2.1, 3, False),  # ± 0.025
    )
    curves, *wanted = zip(*cases, strict=True)
    found = accuracies(measured(curves, whole=0.9, baseline=0.5, tokens=400.0))
    for name, values in zip(("carried", "enough", "fell_below"), wanted, strict=True):
        np.testing.assert_allclose(found[name], values)
    guessing = measured([(0.5, 0.5, 0.5, 0.52)] * 2, whole=0.52, baseline=0.5, tokens=400.0)
    found = accuracies(guessing | {"diverged_at": np.array([3, -1])})
    assert not found["learned"].any() and len(found["learned"]) == 1  # the other diverged
    assert np.isnan([found["carried"], found["enough"]]).all()
