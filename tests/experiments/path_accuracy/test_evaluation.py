"""Sums over paths of a trained model: every value against numpy on the tokens that exist."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from experiments.path_accuracy import evaluation
from experiments.train.trained_tasks import whole_metrics
from rank_collapse.paths.sets import Classifier
from rank_collapse.training.tasks.examples import Examples, token_accuracy
from rank_collapse.training.training import Model
from tests.oracles import draws
from tests.support.closeness import assert_close

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
    network_metrics = whole_metrics(model, examples, CONFIG, metrics)
    truncated = np.asarray(results["truncated"]["logits"])
    assert_close(truncated[-1], network_metrics["logits"], rtol=1e-9)
    assert len(set(truncated.tolist())) == L + 1
