"""Every metric of every training task, against its definition in NumPy on random logits."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import (
    run_attention_forms,
    run_convex_hull,
    run_memorization,
    run_sort,
    run_transformer,
)
from experiments.train import trained_tasks
from rank_collapse.training.tasks.examples import Examples
from tests.support.closeness import assert_close
from tests.support.on_host import on_host
from tests.support.refusals import each_is_refused
from tests.support.runs import parsed

MANY = 5, 4  # examples and tokens
TASKS = {
    "sorting": (run_sort, ["--num_labels=3"]),
    "sorting without repeats": (run_sort, ["--num_labels=3", "--num_tokens=2", "--no_repeat"]),
    "convex hull": (run_convex_hull, []),
    "memorization": (run_memorization, ["--task_name=shipped", "--num_tokens=8"]),
    "memorization, three labels": (
        run_memorization,
        ["--task_name=shipped", "--num_tokens=8", "--num_labels=3"],
    ),
    "attention forms": (run_attention_forms, ["--trained_d_k=8,2", "--num_labels=3"]),
    "transformer": (run_transformer, ["--num_labels=2"]),
}


def make_tasks(name, flags=()):
    """Makes the training tasks of an experiment."""
    module, arguments = TASKS[name]
    options = parsed(module, *arguments, *flags)
    if hasattr(module, "make_setups"):
        return [*module.make_setups(options).values()]
    return [module.make_task(options)]


def count_misordered(predicted, is_wrong):
    """Counts pairs of places whose answers are out of order, mean over examples."""
    b, n = predicted.shape
    pairs = [(i, j) for i in range(n) for j in range(i + 1, n)]
    return sum(is_wrong(row[i], row[j]) for row in predicted for i, j in pairs) / b


def define_metrics(logits, labels, mask, repeats):
    """Computes all metrics by their definitions, token by token."""
    predicted, places = logits.argmax(axis=-1), [*zip(*np.nonzero(mask), strict=True)]
    likelihood = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    right = (predicted == labels) | ~mask
    metrics = {
        "accuracy": np.mean([predicted[p] == labels[p] for p in places]),
        "exact_match": np.mean([row.all() for row in right]),
        "loss": np.mean([-np.log(likelihood[(*p, labels[p])]) for p in places]),
        "misordered_pairs": count_misordered(
            predicted, (lambda a, b: a > b) if repeats else (lambda a, b: a >= b)
        ),
    }
    metrics["exact_forced"] = metrics["exact_match"]
    scores = logits[..., 1] - logits[..., 0]
    positive, negative = ([scores[p] for p in places if labels[p] == c] for c in (1, 0))
    wins = [(a > b) + (a == b) / 2 for a in positive for b in negative]
    return metrics | {"auc": np.mean(wins)}


@pytest.mark.parametrize("name", TASKS)
def test_every_metric_is_its_definition(name, capsys):
    """On random answers with padding, ties, and one example that is right in every token."""
    rng = np.random.default_rng(3)
    for task in make_tasks(name):
        classes = task.recipe.num_outputs
        logits = rng.integers(-4, 5, (*MANY, classes)) / 2
        labels = rng.integers(0, classes, MANY)
        mask = np.ones(MANY, bool)
        mask[1, 2:] = mask[3, 3:] = False
        labels[1] = logits[1].argmax(axis=-1)
        labels[1, 2:] = (labels[1, 2:] + 1) % classes  # wrong, where no token is
        examples = Examples(inputs=jnp.asarray(labels), labels=labels, mask=jnp.asarray(mask))
        expected = define_metrics(logits, labels, mask, "without" not in name)
        measured = trained_tasks.compute_metrics(
            task.metrics, examples, jnp.asarray(logits, jnp.float32)
        )
        assert {"accuracy", "loss"} < set(measured)
        for metric, value in measured.items():
            assert_close(value, expected[metric], rtol=1e-5, err_msg=f"{name}, {metric}")
        assert ("auc" in measured) == (name in ("convex hull", "memorization"))
        assert len({round(float(v), 6) for v in measured.values()}) == len(measured)


@pytest.mark.parametrize("name", [n for n in TASKS if not n.startswith("memorization")])
def test_data_are_as_many_as_the_flags_say_and_differ_between_training_and_evaluation(name):
    counts = {"train": 5, "eval": 3}
    flags = [f"--n_{part}_data={count}" for part, count in counts.items()]
    (task, *_) = make_tasks(name, flags)
    data = on_host(task.make_data)(jax.random.key(7))
    assert {part: len(data[part]) for part in data} == counts
    first = [np.asarray(jax.tree.leaves(data[part].first(3))[0]) for part in counts]
    assert (first[0] != first[1]).any()


def test_the_labels_of_a_text_are_the_same_packed_and_alone():
    (task,) = make_tasks(
        "memorization, three labels", ["--num_tokens=80", "--n_train_data=6", "--n_eval_data=4"]
    )
    data = on_host(task.make_data)(jax.random.key(7))
    train, texts = data["train"], data["texts"]
    assert len(texts) == 6 and len(data["eval"]) == 4 and len(train) < 6
    for field in ("inputs", "labels", "mask"):
        np.testing.assert_array_equal(getattr(data["eval"], field), getattr(texts, field)[:4])
    assert set(texts.labels.ravel().tolist()) == {0, 1, 2}
    for index in range(6):
        places = train.parts == index
        for field in ("inputs", "labels"):
            alone = getattr(texts, field)[index][texts.mask[index]]
            np.testing.assert_array_equal(getattr(train, field)[places], alone)
    # a step has about as many texts as without packing
    assert task.recipe.batch_size == max(1, round(8 * len(train) / 6))
    assert task.batch_size == 8


def test_seeds_that_diverged_are_those_with_a_step():
    results = {"diverged_at": np.array([-1, 0, 5, -1])}
    assert trained_tasks.fine_seeds(results).tolist() == [0, 3]
    assert trained_tasks.diverged_seeds(results).tolist() == [0, 1, 1, 0]


def test_what_does_not_fit_a_task_is_refused():
    def make(name, *flags):
        return lambda: make_tasks(name, flags)

    def translate(flag):
        flags = ["--task=translation", f"--{flag}=5"]
        return lambda: run_transformer.make_task(parsed(run_transformer, *flags))

    each_is_refused(
        (make("convex hull", "--num_labels=3"), "num_labels=3 is not 2: a point is on the hull"),
        (make("convex hull", "--path_len=7"), "path_len=7"),
        (make("sorting", "--path_len=7"), "path_len=7"),
        (make("memorization", "--path_len=7"), "path_len=7"),
        (
            make("sorting", "--num_tokens=5", "--num_labels=4", "--no_repeat"),
            "--no_repeat needs num_tokens=5 to be at most num_labels=4",
        ),
        *(
            (translate(flag), f"--{flag}=5 has no effect: the grammar decides it")
            for flag in ("num_tokens", "num_labels", "min_len")
        ),
    )


def test_metrics_of_a_whole_model_are_of_held_out_examples_at_a_time(monkeypatch):
    asked = []

    def forward(*arguments, batch_size):
        asked.append((arguments, batch_size))
        return 3.0

    monkeypatch.setattr(trained_tasks, "batch_forward", forward)
    (task,) = make_tasks("sorting")
    task = replace(task, metrics={"double": lambda logits, examples: (2 * logits, examples)})
    data = {"train": "training", "eval": "held out"}
    measured = trained_tasks.measure_whole(task, "model", data, None)
    assert measured == {"whole": {"double": (6.0, "held out")}}
    trained_tasks.whole_metrics("model", "examples", "config", task.metrics, batch_size=5)
    assert asked == [
        (("model", "held out", task.recipe.config), None),
        (("model", "examples", "config"), 5),
    ]


def test_numbers_of_a_run_are_those_of_its_point_and_task_and_are_checked():
    (task,) = make_tasks("sorting", ["--learning_rate=0.5"])
    point = task.options.replace(learning_rate=0.25)
    hyper = replace(task, floats={"init_scale": 2.0}).make_hyper(point)
    assert (hyper.learning_rate, hyper.init_scale) == (0.25, 2.0)
    assert {value.dtype for value in jax.tree.leaves(hyper)} == {np.dtype("float32")}
    with pytest.raises(ValueError, match="warmup"):
        replace(task, floats={"warmup": -1.0}).make_hyper(point)
