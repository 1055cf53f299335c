"""forms at tiny size: what is measured, trained, compared and written."""

import itertools

import numpy as np
import pytest

from experiments import run_attention_forms as forms
from experiments.attention_forms import score_functions as measured
from experiments.lab.experiment import read_run
from experiments.verdicts import mean_with_interval
from tests.support.closeness import assert_close
from tests.support.executors import replace_executor
from tests.support.figures_as_data import describe
from tests.support.runs import finished, parsed, rows, verdicts

folder = finished(forms, *forms.EXPERIMENT.presets["tiny"])


@pytest.mark.full
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
    return {"random": random, "trained": trained}


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
    claims = list(forms.judge_claims(results))
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
    rows = {c.quantity: c for c in forms.compare_results(results)}
    assert rows["variance of dot products at d_k = 1024"].published == 1024
    assert rows["accuracy at d_k = 4, additive less dot products"].published == "alike"


UNSORTED = ["--d_k=64,4,16,4", "--trained_d_k=8,2", "--num_seeds=3", "--num_queries=5"]


@pytest.fixture
def unsorted_results(monkeypatch):
    """Results at widths in no order: each number names its form, measure, width and seed."""
    options = parsed(forms, *UNSORTED)

    def measure(make, cells):
        """Measures nothing: an array of a width is that width and the seed."""
        (cell,) = cells
        width = int(cell.removeprefix("random d_k="))
        assert make == (width, 5, 0.99)
        seeds = np.arange(3) / 8
        return {
            cell: {
                f"{form}/{measure}": width + seeds + 100 * i + 1000 * j
                for i, form in enumerate(measured.FORMS)
                for j, measure in enumerate(measured.MEASURES)
            }
        }

    def train(options, tasks, folder, measure):
        assert measure is forms.measure_accuracy
        fields = {name: task.recipe.config for name, task in tasks.items()}
        assert all(f", d_k={config.d_qk}" in name for name, config in fields.items())
        scores = {name: (config.score, config.scale_scores) for name, config in fields.items()}
        assert scores["trained additive, d_k=8"] == ("additive", False)
        assert scores["trained scaled_dot, d_k=2"] == ("dot", False)
        return {
            name: {
                "accuracy": np.array([0.5, 0.25, 0.75]) + i * np.array([1, 2, 4]) / 64,
                "diverged_at": np.array([-1, 3, -1]) if i == 2 else np.full(3, -1),
            }
            for i, name in enumerate(tasks)
        }

    arguments = options, None, "random queries and keys", 9  # 3 widths, 3 seeds
    replace_executor(monkeypatch, forms, *arguments, measure=measure)
    monkeypatch.setattr(forms, "make_measure", lambda *arguments: arguments)
    monkeypatch.setattr(forms, "train_networks", train)
    return forms.measure(options, forms.make_setups(options), None), options


def test_networks_are_trained_at_the_temperature_of_their_form():
    tasks = forms.make_setups(parsed(forms, *UNSORTED))
    assert len(tasks) == 8
    for name, task in tasks.items():
        form = measured.FORMS[name.removeprefix("trained ").partition(",")[0]]
        config, width = task.recipe.config, int(name.rpartition("=")[2])
        assert task.floats["network"] == {
            "temperature": np.float32(form.options(width)["temperature"])
        }
        assert (config.d_qk, config.d_v, config.init) == (width, 16, "lecun")
        assert task.program == f"{form.score}, d_k={width}"
    temperatures = {n: float(t.floats["network"]["temperature"]) for n, t in tasks.items()}
    assert temperatures["trained dot, d_k=8"] == temperatures["trained additive, d_k=8"] == 1
    assert temperatures["trained scaled_dot, d_k=8"] == pytest.approx(8**0.5)
    assert temperatures["trained additive_matched, d_k=8"] < 0.5


def test_numbers_stand_at_their_width_whatever_the_order_of_the_flag(unsorted_results):
    table = list(forms.make_rows(*unsorted_results))
    assert [r["d_k"] for r in table if r["form"] == "dot"][::3] == [4, 16, 64, 2, 8]
    for row in table:
        index = [*measured.FORMS].index(row["form"])
        if row["part"] == "random":
            start = row["d_k"] + row["seed"] / 8 + 100 * index
            for place, name in enumerate(measured.MEASURES):
                assert row[name] == start + 1000 * place
            law = measured.score_variance(
                row["d_k"], **measured.FORMS[row["form"]].options(row["d_k"])
            )
            assert (row["variance_law"], row["variance_within_rows_law"]) == law
        else:
            place = [2, 8].index(row["d_k"]) * 4 + index
            start = [0.5, 0.25, 0.75][row["seed"]]
            assert row["accuracy"] == start + place * [1, 2, 4][row["seed"]] / 64
            assert row["diverged"] == (place == 2 and row["seed"] == 1)
    assert len(table) == 4 * 3 * 3 + 4 * 2 * 3


def test_claims_are_of_the_width_that_they_name(unsorted_results):
    results, _ = unsorted_results
    rows = {row.key: row for row in forms.judge_claims(results)}
    settings = {key: row.setting for key, row in rows.items()}
    assert settings == {
        "saturation": "d_k = 64",
        "small gradients": "d_k = 64",
        "additive small": "sorting, d_k = 2",
        "additive": "sorting, d_k = 8",
        "additive form": "sorting, d_k = 8",
    }
    compared = {c.quantity: c for c in forms.compare_results(results)}
    first = compared["variance of dot products at d_k = 64"]
    assert first.published == 64 and first.measured.startswith("64.1 ")
    steps = np.array([1, 2, 4]) / 64
    for place, width in enumerate((2, 8)):
        for index, form in enumerate(("scaled dot", "additive", "additive matched"), 1):
            line = compared[f"accuracy at d_k = {width}, {form} less dot products"]
            mean = mean_with_interval(index * steps)[0]
            assert line.measured.startswith(f"{mean:.3f} ("), (place, form)
            assert line.published == ("alike" if (width, form) == (2, "additive") else None)


def test_curves_of_the_figures_are_those_of_the_arrays(unsorted_results):
    results, options = unsorted_results
    for arrays in results["random"].values():
        for name in ("query_gradient", "score_gradient"):
            arrays[f"median_{name}"] *= np.array([[1.0], [6.0], [2.0]])
    axes = forms.random_figure(results, options).axes
    names = ["variance", "entropy", "largest_weight", "saturated", "query_gradient"]
    names += ["score_gradient"]
    for ax, name in zip(axes, names, strict=True):
        lines = [line for line in ax.lines if len(line.get_xdata()) == 3]
        for form, arrays in results["random"].items():
            label = measured.FORMS[form].label
            (line,) = (line for line in lines if line.get_label() == label)
            assert line.get_xdata().tolist() == [4, 16, 64]
            logs = np.log(arrays[name]) if name == "variance" or "grad" in name else arrays[name]
            mean = logs.mean(axis=0)
            mean = np.exp(mean) if name == "variance" or "grad" in name else mean
            assert_close(line.get_ydata(), mean, rtol=1e-6)
            if "gradient" in name:
                medians = np.median(arrays[f"median_{name}"], axis=0)
                dashed = [a for a in lines if a.get_linestyle() == "--"]
                assert any(np.allclose(a.get_ydata(), medians) for a in dashed)
    fig = forms.trained_figure(results)
    accuracy, less = fig.axes
    labels = [form.label for form in measured.FORMS.values()]
    assert [text.get_text() for text in fig.legends[0].get_texts()] == labels
    drawn = iter(less.containers)
    for place, (index, form) in itertools.product(range(2), enumerate(measured.FORMS)):
        if form != "dot":
            point, *_ = next(drawn).lines
            mean = forms.accuracy_gain(results, form)[:, place].mean()
            assert_close(point.get_xydata(), [[place + 0.18 * (index - 2), mean]])
    assert not [*drawn]
    assert [t.get_text() for t in accuracy.get_xticklabels()] == ["2", "8"]
    for index, form in enumerate(measured.FORMS):
        values = results["trained"][form]["accuracy"]
        for place in range(2):
            x = place + 0.18 * (index - 1.5)
            points = [
                line.get_ydata()
                for line in accuracy.lines
                if len(line.get_xdata()) == 3 and abs(line.get_xdata()[0] - x) < 1e-9
            ]
            assert_close(points, [values[:, place]])
            bars = [
                line.get_ydata()
                for line in accuracy.lines
                if len(line.get_xdata()) == 2 and abs(np.mean(line.get_xdata()) - x) < 1e-9
            ]
            assert_close(bars, [[values[:, place].mean()] * 2])
    assert "dot product" in describe(fig)


def test_networks_of_one_width_say_nothing_about_small_widths():
    results = make_results([0.01] * 9, [0.4] * 9)
    for arrays in results["trained"].values():
        arrays |= {name: values[..., 1:] for name, values in arrays.items()}
    rows = {row.key: row for row in forms.judge_claims(results)}
    assert "additive small" not in rows and rows["additive"].setting == "sorting, d_k = 256"
    published = [c.published for c in forms.compare_results(results)]
    assert published == [1024, None, None, None]
