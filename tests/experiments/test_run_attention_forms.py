"""forms at tiny size: what is measured, trained, compared and written."""

from types import SimpleNamespace

import numpy as np
import pytest

from experiments import run_attention_forms as forms
from experiments.attention_forms import score_functions as measured
from experiments.lab.experiment import read_run
from tests.support.runs import finished, rows, verdicts

pytestmark = pytest.mark.full

folder = finished(forms, *forms.EXPERIMENT.presets["tiny"])


def test_table_and_comparisons_are_of_every_form_and_seed(folder):
    def compute_mean(name, form):
        values = [float(r[name]) for r in rows(folder) if r["form"] == form and r[name]]
        assert len(values) == 2  # seeds
        return np.mean(values)

    assert compute_mean("variance_law", "dot") == 2
    first, *accuracies = read_run(forms, folder).comparisons
    assert (
        first.measured.startswith(f"{compute_mean('variance', 'dot'):.1f} (")
        and first.published == 2
    )
    for line, form in zip(accuracies, ("scaled_dot", "additive", "additive_matched"), strict=True):
        accuracy, dot_accuracy = (compute_mean("accuracy", name) for name in (form, "dot"))
        assert line.measured.partition(" (")[0] == f"{accuracy - dot_accuracy:.3f}"


def make_results(small, large, control=0.0):
    """Makes results whose additive networks are ahead by so much, seed by seed, at two widths.

    At the larger width, networks with scores of the size of dot products are ahead by `control`.
    """
    base, zero = np.full((len(small), 2), 0.5), np.zeros(len(small))
    leads = {
        "additive": np.stack([small, large], axis=1),
        "additive_matched": np.stack([zero, zero + control], axis=1),
    }
    trained = {
        form: {"d_k": np.array([4, 256]), "accuracy": base + leads.get(form, 0)}
        for form in measured.FORMS
    }
    random = {
        form: {"d_k": np.array([4, 1024])}
        | {
            n: np.outer(1 + index * np.arange(len(small)) / 99, [4.0, 1024])
            for n in measured.MEASURES
        }
        | dict.fromkeys(("saturated", "largest_weight"), np.full((len(small), 2), 0.25))
        for index, form in enumerate(measured.FORMS)
    }
    return {"random": random, "trained": trained}, SimpleNamespace(d_k=[4, 1024])


@pytest.mark.parametrize(
    ("control", "wanted"),
    [
        ([0.01, -0.03, 0.02] * 3, "within"),
        ([-0.2, 0.3, -0.25] * 3, "outside"),
        ([0.2, -0.01, 0.02] * 3, "undecided"),
        ([0.01], "undecided"),
    ],
)
def test_rows_can_come_out_otherwise(control, wanted):
    """What the paper says rests on `large`; whether the form matters, on the control at equal
    scales of the scores."""
    results = make_results([0.01] * len(control), [0.4] * len(control), np.array(control))
    few = len(control) < 3
    claims = list(forms.judge_claims(*results))
    assert verdicts(claims) == {
        "additive": "undecided" if few else "within",
        "additive form": wanted,
        "additive small": "undecided" if few else "within",
        "saturation": "undecided",  # has no range
        "small gradients": "undecided",
    }
    # of forms whose rows are the same nothing saturates more, and no gradient is smaller
    estimates = {row.key: row.estimate for row in claims}
    assert estimates["saturation"] == 0 and estimates["small gradients"] > -2
    rows = {c.quantity: c for c in forms.compare_results(*results)}
    assert rows["variance of dot products at d_k = 1024"].published == 1024
    assert rows["accuracy at d_k = 4, additive less dot products"].published == "alike"
