"""Sums over paths of a trained model: every value against numpy on the tokens that exist."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from experiments import run_memorization
from experiments.path_accuracy import evaluation
from experiments.train import trained_tasks
from experiments.train.trained_tasks import whole_metrics
from rank_collapse.paths.sets import Classifier
from rank_collapse.training.tasks.examples import (
    Examples,
    pack_examples,
    packed_rows,
    token_accuracy,
)
from rank_collapse.training.training import Model
from tests.oracles import draws
from tests.support.closeness import assert_close, near
from tests.support.runs import parsed

L, H, D, N, B = 2, 2, 6, 5, 3
LENGTHS = (5, 3, 4)
CONFIG = rc.transformer(L, H, D, d_ff=9)


@pytest.fixture
def data(x64):
    """A model and examples of several lengths."""
    params = draws.parameters(CONFIG, 0, 1.5, 0.4)
    inputs = draws.normal(B, N, D) + 0.5
    mask = np.arange(N)[None, :] < np.array(LENGTHS)[:, None]
    return Model(params, None), Examples(inputs, np.zeros((B, N), np.int32), mask)


def test_sums_of_lengths_have_one_offset_and_one_classifier(data):
    """Every sum by itself, with numpy, and Shapley's efficiency."""
    model, examples = data
    w, b = np.random.default_rng(3).normal(size=(D, 4)), np.arange(4.0)
    model = model.replace(classifier=Classifier(w, b))
    labels = np.random.default_rng(4).integers(0, 4, (B, N)).astype(np.int32)
    examples = Examples(examples.inputs, labels, examples.mask)
    metrics = {"accuracy": token_accuracy, "logits": lambda z, e: jnp.mean(jnp.sin(z))}
    sum_lengths = jax.jit(
        lambda model, examples: evaluation.length_sums(model, examples, CONFIG, metrics, 2)
    )
    results = jax.device_get(sum_lengths(model, examples))
    sum_paths = jax.vmap(lambda x, m: rc.path_contributions(model.network, x, CONFIG, mask=m))
    parts = jax.jit(sum_paths)(examples.inputs, examples.mask)
    c, offset = np.asarray(parts.by_length), np.asarray(parts.offset)

    def compute_value(chosen):
        return np.mean(np.sin((c[:, chosen].sum(axis=1) + offset) @ w + b))

    lengths = list(range(L + 1))
    sums = {
        "exact": [[k] for k in lengths],
        "up_to": [lengths[: k + 1] for k in lengths],
        "from": [lengths[k:] for k in lengths],
    }
    for name, sets in sums.items():
        wanted = [compute_value(chosen) for chosen in sets]
        assert len(set(wanted)) == L + 1
        assert_close(results[name]["logits"], wanted, rtol=1e-9, err_msg=name)
    assert_close(results["offset"]["logits"], compute_value([]), rtol=1e-9)
    for metric in metrics:
        gained = results["up_to"][metric][-1] - results["offset"][metric]
        assert float(results["shapley"][metric].sum()) == pytest.approx(float(gained), abs=1e-6)
    exists = np.asarray(examples.mask)[:, None, :, None]
    states = np.concatenate([c, offset[:, None]], axis=1) * exists
    sizes = [np.linalg.norm(states[:, k]) for k in range(L + 2)]
    wanted = sum(sizes) / np.linalg.norm(states.sum(axis=1))
    assert_close(results["cancellation"], wanted, rtol=1e-9)
    logits = ((c.sum(axis=1) + offset) @ w + b)[np.asarray(examples.mask)]
    centred = logits - logits.mean(axis=0)
    for k in lengths:
        part = (c[:, k] @ w)[np.asarray(examples.mask)]
        share = np.sum(centred * (part - part.mean(axis=0))) / np.sum(centred**2)
        assert_close(results["covariance"][k], share, rtol=1e-9)
    network_metrics = whole_metrics(model, examples, CONFIG, metrics)
    truncated = np.asarray(results["truncated"]["logits"])
    assert_close(truncated[-1], network_metrics["logits"], rtol=1e-9)
    assert len(set(truncated.tolist())) == L + 1


@pytest.mark.parametrize("is_packed", [True, False])
def test_every_number_of_packed_texts_is_of_the_texts(monkeypatch, is_packed):
    """Training packs several texts into a row; what is measured is of single texts, against loops
    over these. A fixed logit of every token stands in for the network."""
    rng, lengths, width, num_eval = np.random.default_rng(5), (4, 2, 3, 1, 5, 2), 6, 4
    options = parsed(run_memorization, "--n_eval_data=4", f"--num_tokens={width}")
    mask = np.arange(width) < np.array(lengths)[:, None]
    tokens, logits = rng.integers(0, 9, mask.shape), rng.normal(size=(9, 2)).astype(np.float32)
    task = run_memorization.make_text_task(options, tokens, mask, 9)
    labels = np.where(rng.random(mask.shape) < 0.3, tokens % 2, logits[tokens].argmax(axis=-1))
    labelled = Examples(jnp.asarray(tokens), jnp.asarray(labels), jnp.asarray(mask))
    rows = packed_rows(np.array(lengths), width)
    assert len(rows) < len(tokens)
    data = {"train": labelled, "eval": labelled.first(num_eval)}
    if is_packed:
        data |= {"train": pack_examples(labelled, rows), "texts": labelled}
    asked = {}
    monkeypatch.setattr(
        trained_tasks, "batch_forward", lambda model, e, *_, **__: jnp.asarray(logits)[e.inputs]
    )
    monkeypatch.setattr(
        evaluation, "evaluate_samples", lambda task, model, e, key: asked.update(sets=e) or {}
    )
    monkeypatch.setattr(
        evaluation, "length_sums", lambda model, e, *_: asked.update(sums=e) or {"exact": {}}
    )
    results = evaluation.evaluate_paths(task, None, data, jax.random.key(2))

    def measure_texts(count):
        """Measures the first texts one by one."""
        right, losses, scores = [], [], {0: [], 1: []}
        for text, length in enumerate(lengths[:count]):
            z, wanted = logits[tokens[text, :length]].astype(float), labels[text, :length]
            right.append(z.argmax(axis=-1) == wanted)
            losses += [np.log(np.exp(a).sum()) - a[c] for a, c in zip(z, wanted, strict=True)]
            for a, c in zip(z, wanted, strict=True):
                scores[int(c)].append(a[1] - a[0])
        pairs = [(b > a) + (b == a) / 2 for a in scores[0] for b in scores[1]]
        return {
            "accuracy": np.concatenate(right).mean(),
            "exact_match": np.mean([all(r) for r in right]),
            "loss": np.mean(losses),
            "auc": np.mean(pairs),
        }

    assert [*task.metrics] == [*measure_texts(6)]
    near(results["whole"], measure_texts(num_eval), rtol=1e-5)
    near(results["whole_train"], measure_texts(len(lengths)), rtol=1e-5)
    assert 0 < results["whole"]["exact_match"] != results["whole_train"]["exact_match"]
    most = np.bincount(labels[mask]).argmax()
    majority, guess = (results[name]["accuracy"] for name in evaluation.BASELINES)
    near(majority, (labels[:num_eval] == most)[mask[:num_eval]].mean())
    count = sum(lengths[:num_eval])
    assert results["tokens"] == count
    assert float(guess * count) == pytest.approx(round(float(guess * count)))
    assert asked == {"sets": data["eval"], "sums": data["eval"]}
    assert {*results} == {*evaluation.BASELINES} | {
        *("whole", "whole_train", "sets", "exact", "tokens")
    }


@pytest.mark.parametrize(("batch_size", "in_training"), [(None, 500), (7, 7)])
def test_training_data_are_read_in_batches_whatever_the_flag_says(
    monkeypatch, batch_size, in_training
):
    """The data that are evaluated may be read at once, all of the training data not."""
    asked = {}

    def measure_whole(model, examples, config, metrics, size):
        assert (model, config, metrics) == ("model", "config", "metrics")
        return asked.setdefault(examples, size)

    monkeypatch.setattr(evaluation, "whole_metrics", measure_whole)
    for name in ("majority_baseline", "random_baseline"):
        monkeypatch.setattr(evaluation, name, lambda *_: 0.5)
    monkeypatch.setattr(evaluation, "evaluate_samples", lambda *_: {})
    monkeypatch.setattr(evaluation, "length_sums", lambda *a: asked.update(sums=a[1:]) or {})
    monkeypatch.setattr(evaluation, "token_mask", lambda examples: np.ones(3))
    recipe = SimpleNamespace(config="config", num_outputs=2)
    task = SimpleNamespace(recipe=recipe, metrics="metrics", batch_size=batch_size)
    data = {"train": "packed", "texts": "texts", "eval": "held out"}
    evaluation.evaluate_paths(task, "model", data, jax.random.key(0))
    sums = ("held out", "config", "metrics", batch_size)
    assert asked == {"held out": batch_size, "texts": in_training, "sums": sums}


def test_sampled_paths_are_no_longer_than_the_network_is_deep():
    lengths = [
        evaluation.sampled_lengths(SimpleNamespace(path_len=least, depth=3)).tolist()
        for least in (0, 2, 3)
    ]
    assert lengths == [[0, 1, 2, 3], [2, 3], [3]]
    with pytest.raises(ValueError, match="path_len=4 is larger than depth=3"):
        evaluation.sampled_lengths(SimpleNamespace(path_len=4, depth=3))


@pytest.mark.parametrize("no_sub_path", [True, False])
@pytest.mark.parametrize("batch_size", [None, 2])
def test_sampled_sets_of_a_size_are_its_own_draws(monkeypatch, no_sub_path, batch_size):
    """The flag's size beside the published ones. Smaller sets are padded by their first path, and
    the padding is no member."""
    held_out = Examples(jnp.arange(12.0).reshape(4, 3), None, jnp.ones((4, 3), bool))
    options = SimpleNamespace(path_len=1, depth=2, n_paths=3, n_repeat=2, no_sub_path=no_sub_path)
    config, asked = SimpleNamespace(depth=2, num_heads=5), []

    def draw_paths(key, lengths, repeats, most, depth, num_heads):
        assert [*lengths] == [1, 2] and (repeats, most, depth, num_heads) == (2, 20, 2, 5)
        return jax.random.randint(key, (2, 2, 20, 2), 0, 9)

    def path_set_logits(network, inputs, network_config, paths, classifier, **options):
        keep = options.pop("keep")
        assert (network, classifier, network_config) == ("network", "classifier", config)
        assert paths.shape == (*keep.shape, 2) == (3 * 2, 2, 20, 2) and inputs.shape == (3,)
        asked.append(options.pop("mask").shape)
        assert options == {"semantics": "recomputed", "no_sub_path": no_sub_path}
        members = jnp.sum(paths[..., 1] * jnp.where(keep, 1.0, 0.0078125), axis=-1)
        return members[..., None, None] + jnp.stack([inputs, inputs + 0.5], axis=1)[None, None]

    monkeypatch.setattr(evaluation, "sample_path_sets", draw_paths)
    monkeypatch.setattr(evaluation, "path_set_logits", path_set_logits)
    metrics = {"mean": lambda z, e: z.mean(), "last": lambda z, e: z[-1, 0, 1]}
    recipe = SimpleNamespace(config=config)
    task = SimpleNamespace(recipe=recipe, options=options, metrics=metrics, batch_size=batch_size)
    model, key = SimpleNamespace(network="network", classifier="classifier"), jax.random.key(3)
    results = evaluation.evaluate_samples(task, model, held_out, key)
    assert asked == [(3,)] and [*results] == ["3", "5", "20"]
    for size in (3, 5, 20):
        paths = np.asarray(draw_paths(jax.random.fold_in(key, size), (1, 2), 2, 20, 2, 5), float)[
            ..., 1
        ]
        members = paths[..., :size].sum(axis=-1) + (20 - size) * paths[..., 0] / 128
        measured = results[str(size)]
        assert_close(measured["mean"], members + np.arange(12).mean() + 0.25, rtol=1e-6)
        assert_close(measured["last"], members + 9.5, rtol=1e-6)
