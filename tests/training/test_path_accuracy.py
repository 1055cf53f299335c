"""Ranks and α of a trained model: every value against numpy on the tokens that exist."""

import draws
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from experiments.train import path_accuracy
from rank_collapse.paths.sets import Classifier
from rank_collapse.training.tasks.examples import Examples, token_accuracy
from rank_collapse.training.training import Model

L, H, D, N, B = 2, 2, 6, 5, 3
LENGTHS = (5, 3, 4)
CONFIG = rc.transformer(L, H, D, d_ff=9)


@pytest.fixture
def data(x64):
    """A model, examples of several lengths, and what the network computes of each alone."""
    params = draws.parameters(CONFIG, 0, 1.5, 0.4)
    inputs = draws.normal(B, N, D) + 0.5
    mask = jnp.arange(N)[None, :] < jnp.array(LENGTHS)[:, None]
    examples = Examples(inputs, jnp.zeros((B, N), jnp.int32), mask)
    alone = [rc.apply(params, x[:n], CONFIG) for x, n in zip(inputs, LENGTHS, strict=True)]
    return Model(params, None), examples, alone


def effective_rank(a):
    """exp of the entropy of the singular values, divided by their sum."""
    s = np.linalg.svd(a, compute_uv=False)
    p = s[s > 1e-14 * s[0]] / s.sum()
    return np.exp(-(p * np.log(p)).sum())


def composite(a):
    return np.sqrt(np.abs(a).sum(0).max() * np.abs(a).sum(1).max())


@pytest.mark.full
def test_layer_ranks_are_means_over_examples(data):
    model, examples, alone = data
    found = path_accuracy.layer_ranks(model, examples, CONFIG, tolerance=1.2)
    measures = {
        "rank": lambda x: (np.linalg.svd(x, compute_uv=False) > 1.2).sum(),
        "effective_rank": effective_rank,
        "residual_ratio": lambda x: composite(x - x.mean(0)) / composite(x),
    }
    for name, measure in measures.items():
        expected = np.mean([[measure(np.asarray(x)) for x in t.hidden] for t in alone], axis=0)
        assert len(set(expected)) == L + 1, name
        np.testing.assert_allclose(found[name], expected, rtol=1e-6, err_msg=name)
    ranks = [[[effective_rank(np.asarray(p)) for p in l] for l in t.attention] for t in alone]
    np.testing.assert_allclose(found["attention_rank"], np.mean(ranks, axis=(0, 2)), rtol=1e-6)


def test_alpha_is_the_share_of_sums_over_examples(data):
    model, examples, alone = data
    found = path_accuracy.layer_alpha(model, examples, CONFIG)
    skip = sum(np.array([composite(np.asarray(x)) for x in t.hidden[:-1]]) for t in alone)
    branch = sum(np.array([composite(np.asarray(x)) for x in t.attention_branch]) for t in alone)
    np.testing.assert_allclose(found, skip / (skip + branch), rtol=1e-9)
    assert abs(found[0] - found[1]) > 0.01


def test_sums_of_lengths_have_one_offset_and_one_classifier(data):
    """Every sum by itself, with numpy, and Shapley's efficiency."""
    model, examples, _ = data
    w, b = np.random.default_rng(3).normal(size=(D, 4)), np.arange(4.0)
    model = model.replace(classifier=Classifier(jnp.asarray(w), jnp.asarray(b)))
    labels = jax.random.randint(jax.random.key(4), (B, N), 0, 4)
    examples = Examples(examples.inputs, labels, examples.mask)
    metrics = {"accuracy": token_accuracy, "logits": lambda z, e: jnp.mean(jnp.sin(z))}
    found = path_accuracy.length_sums(model, examples, CONFIG, metrics, batch_size=2)
    parts = jax.vmap(lambda x, m: rc.path_contributions(model.network, x, CONFIG, mask=m))(
        examples.inputs, examples.mask
    )
    c, offset = np.asarray(parts.by_length), np.asarray(parts.offset)

    def value(kept):
        return np.mean(np.sin((c[:, kept].sum(axis=1) + offset) @ w + b))

    every = list(range(L + 1))
    sums = {
        "exact": [[k] for k in every],
        "up_to": [every[: k + 1] for k in every],
        "from": [every[k:] for k in every],
    }
    sums["all_but"] = [[j for j in every if j != k] for k in every]
    for name, sets in sums.items():
        wanted = [value(kept) for kept in sets]
        assert len(set(wanted)) == L + 1
        np.testing.assert_allclose(found[name]["logits"], wanted, rtol=1e-9, err_msg=name)
    np.testing.assert_allclose(found["offset"]["logits"], value([]), rtol=1e-9)
    for metric in metrics:
        gained = found["up_to"][metric][-1] - found["offset"][metric]
        assert float(found["shapley"][metric].sum()) == pytest.approx(float(gained), abs=1e-6)
    exists = np.asarray(examples.mask)[:, None, :, None]
    states = np.concatenate([c, offset[:, None]], axis=1) * exists
    sizes = [np.linalg.norm(states[:, k]) for k in range(L + 2)]
    wanted = sum(sizes) / np.linalg.norm(states.sum(axis=1))
    np.testing.assert_allclose(found["cancellation"], wanted, rtol=1e-9)
    whole = path_accuracy.whole_model(model, examples, CONFIG, metrics)
    kept = np.asarray(found["truncated"]["logits"])
    np.testing.assert_allclose(kept[-1], whole["logits"], rtol=1e-9)
    assert len(set(kept.tolist())) == L + 1
