"""run_circle at tiny size: what it trains, its continuation, and what it writes."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from scipy.stats import fisher_exact

from experiments import run_circle
from experiments.circle import walks
from experiments.circle.circle_figures import describe_network
from experiments.lab.folder import RunFolder
from rank_collapse import apply
from rank_collapse.network.inputs import input_states
from rank_collapse.training import load_models
from rank_collapse.training.training import forward
from tests.support.closeness import assert_close
from tests.support.runs import answered, arrays, finished, parsed, rows, seed_of

NAME = "circle_skip+mlp, d=8"
ARGUMENTS = (
    "--circle_skip",
    "--do_mlp",
    "--hidden_dim=8",
    "--n_epochs=2",
    "--n_train_data=40",
    "--n_eval_data=6",
    "--n_repeat=2",
)


folder = finished(run_circle, *ARGUMENTS, "--keep_models")


@pytest.mark.full
def test_a_row_for_every_seed(folder):
    table = rows(folder)
    assert [(r["case"], r["seed"], r["width"], r["variant"]) for r in table] == [
        (NAME, seed, "8", "circle_skip+mlp") for seed in "01"
    ]
    path, distance = (arrays(folder)[f"{NAME}/{part}"] for part in ("trajectory", "distance"))
    assert path.shape == (2, 6, 2, 2)
    np.testing.assert_allclose(np.linalg.norm(path[:, 0], axis=-1), 0.3, rtol=1e-5)
    np.testing.assert_allclose(
        [float(r["distance_at_end"]) for r in table], distance[:, -1], rtol=1e-6
    )


@pytest.mark.full
def test_kept_models_continue_as_the_arrays_say(folder):
    """With a skip around the recurrence inputs are sums of outputs. The arrays hold outputs."""
    (path,) = (folder / "models").iterdir()
    assert path.name == "circle-skip+mlp-d=8.safetensors"
    config, models = load_models(path)
    assert config.attention_skip and config.mlp == "gelu"
    walk = walks.make_examples(40)
    saved = {name.removeprefix(f"{NAME}/"): a for name, a in arrays(folder).items()}
    # 19 steps in one batch of 30: nothing before it.
    run_forward = jax.jit(functools.partial(forward, config=config))
    run_network = jax.jit(functools.partial(apply, config=config))
    for seed, row in enumerate(rows(folder)):
        model = seed_of(models, seed)
        inputs = outputs = walk.inputs[0]
        for points in saved["trajectory"][seed]:
            assert_close(points, outputs, atol=1e-5)
            last, outputs = inputs, run_forward(model, inputs)
            inputs = inputs + outputs
        after = np.stack([run_forward(model, x) for x in walk.inputs])
        error = np.sqrt(np.mean((after - walk.labels) ** 2) / 2)
        assert float(row["step_error"]) == pytest.approx(error, rel=1e-4)
        weights = run_network(model.network, input_states(model.network, last, config)).attention
        gaps = weights[0, :, 0, 0] - weights[0, :, 1, 0]
        assert_close(saved["head_gap"][seed][-1, 0], gaps, atol=1e-6)
        distance = 10.0 ** saved["log10_distance"][seed]
        np.testing.assert_allclose(distance, saved["distance"][seed], rtol=1e-4)


@pytest.mark.parametrize(
    "arguments, variant, mlp",
    [
        ([], "base", "none"),
        (["--circle_skip"], "circle_skip", "none"),
        (["--do_mlp"], "mlp", "gelu"),
        (["--circle_skip", "--do_mlp"], "circle_skip+mlp", "gelu"),
    ],
)
def test_published_commands_train_the_published_network(arguments, variant, mlp):
    options = parsed(run_circle, *arguments, "--hidden_dim=8", "--n_train_data=100")
    ((name, setup),) = run_circle.make_cases(options).items()
    assert name == f"{variant}, d=8"
    recipe, config = setup.recipe, setup.recipe.config
    assert config.attention_skip and recipe.output_dropout
    assert get_skip_gain(setup) == setup.floats["output_dropout"] == 1
    assert (config.mlp, config.norm_placement, config.d_model, config.ff_width) == (
        mlp,
        "post",
        8,
        8,
    )
    data = setup.make_data(None)
    sums = variant.startswith("circle_skip")
    assert sums == ("--circle_skip" in arguments)
    difference = np.asarray(data["train"].inputs - data["walk"].inputs)
    expected = data["walk"].inputs[:-30] if sums else 0
    assert_close(difference[30:], expected, atol=1e-7)
    assert not difference[:30].any()


def get_skip_gain(setup):
    """Returns the gain of the skip around the attention."""
    return setup.floats["network"]["skip_gain"].attention


@pytest.mark.full
def test_a_program_of_several_variants_gives_what_each_alone_gives(tmp_path):
    """A skip of gain 0 is none, and so is dropout at no rate."""
    options = parsed(run_circle, *ARGUMENTS[2:], "--compare=pure", "--widths=4")
    cases = run_circle.make_cases(options)
    programs = [case.program for case in cases.values()]
    assert [programs.index(program) for program in programs] == [0, 0, 0, 3]
    name = "attention, d=4"
    recipe = cases[name].recipe
    config = recipe.config.replace(attention_skip=False)
    recipe = dataclasses.replace(recipe, config=config, output_dropout=False)
    separate_cases = {name: dataclasses.replace(cases[name], recipe=recipe, floats={}, program="")}
    results = []
    for where, setups in {"shared": cases, "alone": separate_cases}.items():
        with RunFolder(tmp_path / where, {}) as folder:
            results.append(run_circle.measure(options, setups, folder)[name])
    shared, separate = results
    assert jax.tree.structure(shared) == jax.tree.structure(separate)
    close = functools.partial(assert_close, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, shared, separate)


@pytest.mark.parametrize(
    "argument, variants",
    [
        ("--compare=published", run_circle.PUBLISHED),
        ("--compare=theory", run_circle.THEORY),
        ("--compare=all", run_circle.PUBLISHED + run_circle.THEORY),
        ("--compare=pure", ("base", "attention", "attention+skip", "attention+mlp")),
        ("--num_seeds=1", ("base",)),
    ],
)
def test_compare_is_every_variant_at_every_width(argument, variants):
    widths = [32] if argument == "--num_seeds=1" else [8, 4]
    options = parsed(run_circle, argument, "--widths=8,4")
    cases = run_circle.make_cases(options)
    assert list(cases) == [f"{variant}, d={width}" for width in widths for variant in variants]
    for name, setup in cases.items():
        variant, config = name.split(",")[0], setup.recipe.config
        assert get_skip_gain(setup) == (variant in run_circle.PUBLISHED or "+skip" in variant)
        if variant in run_circle.THEORY:
            assert (config.mlp != "none") == ("+mlp" in variant)


def case(distances, logs=None):
    """Makes results of seeds at rest across the diagonal, with a multiplier of 0.5."""
    distance = np.asarray(distances, np.float32)
    seeds = len(distance)
    return {
        "distance": distance,
        "log10_distance": np.log10(np.maximum(distance, 1e-30)) if logs is None else logs,
        "head_gap": np.tile(np.float32([[[0.1, -0.2]]]), (seeds, 60, 1, 1)),
        "jacobian_across": np.tile(0.5 * np.eye(2), (seeds, 1, 1)),
        "equal_points_moved": np.zeros(seeds),
        "error": np.full(seeds, 0.02),
        "diverged_at": np.full(seeds, -1),
    }


def make_results(counts, seeds=64):
    """Makes results in which `counts` seeds of each case halve their distance at every step.

    They are spread over the seeds, those of a smaller count among those of a larger one.
    """
    fallen, apart = 0.6 * 0.5 ** np.arange(60), np.full(60, 0.6)
    places = np.argsort(np.arange(seeds) * 0.618033988749895 % 1)  # of the golden ratio: even
    rank = np.argsort(places)
    return {n: case([fallen if r < c else apart for r in rank]) for n, c in counts.items()}


def verdicts(results):
    return answered(run_circle.judge_claims(results))[0]


def list_comparisons(results):
    """Returns {quantity: (measured, published, note)} of the case at width 32."""
    lines = run_circle.compare_results(results)
    return {c.quantity.partition(": ")[2]: (c.measured, c.published, c.note) for c in lines}


def test_speed_and_law_of_those_that_fell():
    """A seed that diverged is not counted. τ begins with one sign in four others; three fell."""
    results = make_results({"attention, d=32": 5}, 12)
    (case_results,) = results.values()
    case_results["head_gap"][[0, 1, 2, 10, 11]] = 0.1
    case_results["diverged_at"][11] = 2
    row, *_ = run_circle.make_rows(results)
    assert row["multiplier"] == pytest.approx(0.5)
    comparisons = list_comparisons(results)
    assert comparisons["seeds that fell together"] == ("5 of 11", None, "")
    order, published, _ = comparisons["order p of d' ~ d^p, median"]
    assert order == pytest.approx(1, abs=1e-4) and published == 3
    assert (row["measured_steps"], row["predicted_steps"]) == (14, pytest.approx(13.3, abs=0.02))
    share, _, note = comparisons["fell, of those whose heads' τ begin with opposite signs"]
    assert share == "2 of 7" and note == "of the same sign 3 of 4; Fisher's exact p = 0.24"


def test_statements_of_the_paper_can_come_out_otherwise():
    def judge_counts(base, modified):
        """Judges cases in which `base` seeds fall, and `modified` with a skip or an MLP."""
        cases = {
            "attention+skip": modified,
            "attention+mlp": modified,
            "mlp": modified,
            "circle_skip": modified,
            "base": base,
            "attention": base,
        }
        answers = verdicts(make_results({f"{name}, d=32": count for name, count in cases.items()}))
        settings = {
            key: [n for k, n in answers if k == key] for key, _ in answers if "rate" not in key
        }
        assert settings == {
            "circle": ["published network, width 32", "attention alone, width 32"],
            "circle skip": [
                "attention and skip, width 32",
                "published network, skip around recurrence, width 32",
            ],
            "circle mlp": ["attention and MLP, width 32", "published network, MLP, width 32"],
        }
        return [[answers[key, name] for name in names] for key, names in settings.items()]

    assert judge_counts(60, 2) == [["within"] * 2] * 3
    assert judge_counts(10, 40) == [["outside"] * 2] * 3  # those that fall without it fall with it
    assert judge_counts(32, 16) == [["undecided"] * 2] * 3
    two = verdicts(make_results({"base, d=32": 2}, 2))
    assert two["circle", "published network, width 32"] == "undecided"  # two seeds say nothing


def test_who_is_kept_apart_is_said_seed_by_seed():
    """Four fall without it and two only with it; one that diverged has no number."""
    fallen, apart = 0.6 * 0.5 ** np.arange(60), np.full(60, 0.6)
    without_mlp = case([fallen] * 5 + [apart] * 3)
    with_mlp = case([fallen] + [apart] * 4 + [fallen] * 2 + [apart])
    with_mlp["diverged_at"][4] = 3
    at_end = walks.log10_at_end(with_mlp)[3:6].astype(np.float32)  # as accurate as its input
    assert_close(at_end, [np.log10(0.6), np.nan, -6])
    claims = run_circle.judge_claims({"base, d=4": without_mlp, "mlp, d=4": with_mlp})
    row = next(r for r in claims if r.key == "circle mlp")
    assert (row.estimate, row.draws) == (0.75, 4)
    assert "those of 7 seeds that fall without; 2 fall only with" in row.note


@pytest.mark.parametrize("widths", [(8, 4, 16), (4, 16, 8)])
def test_a_network_is_compared_with_the_baseline_of_its_own_width(widths):
    """The rows of all widths are those of each width alone; draws are the seeds that fall in the
    baseline. Without a baseline of its width a network has no such row."""
    pairs = [(v, width) for width in widths for v in run_circle.COMPARED["all"]]
    counts = {cell: 2 + (5 * place) % 11 for place, cell in enumerate(pairs)}
    results = make_results({f"{v}, d={width}": count for (v, width), count in counts.items()}, 14)

    def list_rows(cells):
        cases = {f"{v}, d={width}": results[f"{v}, d={width}"] for v, width in cells}
        rows = run_circle.judge_claims(cases)
        return {(r.key, r.setting): (r.draws, r.estimate, r.note) for r in rows}

    together, alone = list_rows(pairs), {}
    for width in widths:
        alone |= list_rows([cell for cell in pairs if cell[1] == width])
        for variant, (key, baseline) in run_circle.APART.items():
            row = together[key, describe_network(variant, width)]
            assert row[0] == counts[baseline, width], (variant, width)
    assert together == alone
    without = list_rows([cell for cell in pairs if cell != ("attention", widths[1])])
    lost = {key: [s for k, s in together.keys() - without.keys() if k == key] for key, _ in BESIDE}
    assert lost == {key: [describe_network(v, widths[1])] for key, v in BESIDE}


BESIDE = [(key, v) for v, (key, baseline) in run_circle.APART.items() if baseline == "attention"]


def test_an_order_other_than_the_theorys_is_said_to_be():
    def estimate_order(logs):
        results = {"attention, d=32": case(10.0 ** np.maximum(logs, -30), logs)}
        (row,) = (row for row in run_circle.judge_claims(results) if row.key == "rate")
        return row.estimate

    steps, orders = np.arange(60), np.array([[1.0], [1.1], [1.2]])
    assert estimate_order(-(orders**steps) * (1 + 0.3 * steps)) < 1.5
    assert estimate_order(-((2 + orders) ** steps)) == pytest.approx(3.1, abs=0.2)


@pytest.mark.parametrize(
    ("flags", "is_said"),
    [
        (["--num_seeds=2", "--circle_skip", "--do_mlp"], True),
        (["--num_seeds=8"], False),
        (["--num_seeds=2", "--compare=pure"], False),
    ],
)
def test_few_seeds_of_the_published_command_say_what_they_cannot_show(flags, is_said):
    text = run_circle.describe_limit(parsed(run_circle, *flags))
    assert bool(text) == is_said
    if is_said:
        assert text.startswith("2 seeds cannot show") and "1 to 3 of 8" in text
        command = text.split("experiments.run_circle ")[1].split()
        assert parsed(run_circle, *command).compare == "pure"


def test_the_finding_counts_the_seeds_that_fall():
    counts = {"attention": 48, "attention+skip": 3, "attention+mlp": 17}
    cases = make_results({f"{name}, d=32": count for name, count in counts.items()})
    finding = run_circle.make_finding(cases)
    assert finding.figure == "shares" and finding.sentence == (
        "Fed with its own output, a layer of attention alone lets two walkers on a circle fall "
        "together in 48 of 64 seeds, with a skip around the attention in 3, with an MLP in 17 "
        "(width 32)."
    )
    assert run_circle.make_finding(make_results({"base, d=32": 9})) is None


def test_counts_stand_beside_those_of_the_published_code_at_its_widths():
    """Every other network follows a law of order 1 but pure attention and its MLP."""
    counts = {"base, d=32": 5, "base, d=8": 5, "attention+mlp, d=32": 5, "attention+skip, d=32": 5}
    results = make_results(counts, 12)
    by_case = {name: list_comparisons({name: results[name]}) for name in counts}
    total = "5 of 12"
    published = walks.PUBLISHED_FELL["base", 32]
    p = fisher_exact([[5, 7], [published, walks.PUBLISHED_SEEDS - published]]).pvalue
    measured = by_case["base, d=32"]["seeds that fell together"]
    assert measured[:2] == (total, f"{published} of 8")
    assert measured[2].endswith(f"seeds 1 to 8; Fisher's exact p = {p:.2g}")
    for name in [*counts][1:]:
        assert by_case[name]["seeds that fell together"] == (total, None, "")
    orders = [lines["order p of d' ~ d^p, median"][1] for lines in by_case.values()]
    assert orders == [1, 1, 3, 1]
    both = ["seeds that fell together", "order p of d' ~ d^p, median"]
    assert [*by_case["base, d=8"]] == both  # no heads of one sign to compare with
    same = make_results({"base, d=8": 5}, 12)
    same["base, d=8"]["head_gap"][:] = 0.1
    assert [*list_comparisons(same)] == both
    same = make_results({"base, d=8": 0}, 12)
    same["base, d=8"]["head_gap"][:3] = 0.1
    assert [*list_comparisons(same)] == both[:1]  # none fell


def test_the_finding_is_of_the_first_width():
    cases = make_results({"attention, d=8": 7, "attention+mlp, d=8": 3, "attention, d=4": 1})
    sentence = run_circle.make_finding(cases).sentence
    assert sentence.endswith("in 7 of 64 seeds, with an MLP in 3 (width 8).")


def test_two_walks_need_four_points_of_two_coordinates():
    for flags, message in (
        (["--n_train_data=3"], "n_train_data=3 points are too few for two walks"),
        (["--num_labels=3"], "num_labels=3 is not 2"),
    ):
        with pytest.raises(ValueError, match=message):
            run_circle.make_cases(parsed(run_circle, *flags))
    assert [*run_circle.make_cases(parsed(run_circle, "--n_train_data=4"))] == ["base, d=32"]


def test_a_walk_has_as_many_points_as_are_evaluated(monkeypatch):
    monkeypatch.setattr(run_circle, "train_networks", lambda *arguments: arguments)
    options = parsed(run_circle, "--n_eval_data=7", "--n_train_data=9")
    *arguments, measure = run_circle.measure(options, "cases", "folder")
    assert arguments == [options, "cases", "folder"]
    assert (measure.func, measure.args, measure.keywords) == (walks.measure_walk, (7,), {})
