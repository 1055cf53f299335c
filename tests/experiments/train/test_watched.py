"""What is watched in training, against the trace of each example alone: padding is not measured."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from experiments import run_transformer
from experiments.train import watched
from experiments.train.watched import EXAMPLES, layer_scalars
from rank_collapse.paths.sets import Classifier
from rank_collapse.training import init_model
from rank_collapse.training.models import Model
from rank_collapse.training.tasks.examples import Examples
from tests.oracles import draws
from tests.support.closeness import assert_close
from tests.support.runs import parsed


def compute_ratio(state, keep):
    """Computes √(‖.‖₁ ‖.‖_∞) of the tokens minus their mean over that of the tokens."""

    def norm(a):
        return np.sqrt(np.abs(a).sum(axis=0).max() * np.abs(a).sum(axis=1).max())

    x = np.asarray(state, float)[keep]
    return norm(x - x.mean(axis=0)) / norm(x)


def compute_entropy(weights, keep):
    """Computes the mean over heads and existing queries of −Σ p ln p."""
    p = np.asarray(weights, float)[:, keep]
    return -np.sum(p * np.log(np.where(p > 0, p, 1)), axis=-1).mean()


def make_pairs():
    """Makes an encoder-decoder, and pairs of sequences of two to six letters."""
    flags = ["--depth=1", "--num_heads=2", "--d_model=8", "--num_tokens=6", "--min_len=2"]
    flags += ["--num_labels=5", "--n_train_data=2", f"--n_eval_data={EXAMPLES + 2}"]
    options = parsed(run_transformer, *flags)
    task = run_transformer.make_task(options)
    model = init_model(jax.random.key(1), task.recipe)
    data = run_transformer.make_data(options, jax.random.key(2))
    assert not data["eval"].source_mask[:EXAMPLES].all()
    return model, data, task.recipe.config


def test_every_half_is_measured_on_its_own_tokens(monkeypatch):
    """Each half gets its tokens and which exist; the decoder also what the encoder wrote."""
    model, data, config = make_pairs()

    def count(params, x, config, *, mask, memory=None, memory_mask=None):
        measures = {"sum": jnp.sum(x * mask), "tokens": jnp.sum(mask)}
        if memory is not None:
            assert params.layers.cross is not None
            measures["read"] = jnp.sum(memory * memory_mask)
        return 10 * x, {name: jnp.array([value, 2.0 * value]) for name, value in measures.items()}

    monkeypatch.setattr(watched, "monitored", count)
    scalars = layer_scalars(model, data, config)
    pairs = jax.tree.map(lambda a: np.asarray(a)[:EXAMPLES], data["eval"])
    read = pairs.target[:, :-1], pairs.target_mask[:, :-1]
    for half, (x, mask) in {
        "encoder": (pairs.source, pairs.source_mask),
        "decoder": read,
    }.items():
        assert_close(scalars[f"{half}.sum"], np.mean(np.sum(x * mask, axis=1)) * np.array([1, 2]))
        assert_close(scalars[f"{half}.tokens"], np.mean(mask.sum(axis=1)) * np.array([1, 2]))
    written = 10 * np.sum(pairs.source * pairs.source_mask, axis=1)
    assert_close(scalars["decoder.read"], np.mean(written) * np.array([1, 2]))
    assert len(scalars) == 5


@pytest.mark.full
def test_both_halves_of_an_encoder_decoder_are_measured_without_padding():
    model, data, config = make_pairs()
    pairs = data["eval"]
    scalars = jax.jit(lambda model: layer_scalars(model, data, config))(model)

    @jax.jit
    def trace_pair(pair):
        return rc.network.encoder_decoder.apply(
            model,
            pair.source,
            pair.target[:-1],
            config,
            source_mask=pair.source_mask,
            target_mask=pair.target_mask[:-1],
        )

    ratios, entropies = {"encoder": [], "decoder": []}, {"encoder": [], "decoder": []}
    for index in range(EXAMPLES):  # the two others are not watched
        pair = jax.tree.map(lambda a, i=index: a[i], pairs)
        trace = jax.device_get(trace_pair(pair))
        masks = {"encoder": pair.source_mask, "decoder": pair.target_mask[:-1]}
        for half, mask in masks.items():
            keep, values = np.asarray(mask), getattr(trace, half)
            ratios[half].append([compute_ratio(x, keep) for x in values.hidden[1:]])
            entropies[half].append([compute_entropy(p, keep) for p in values.attention])
    for half in ratios:
        for name, values in (("residual_ratio", ratios), ("attention_entropy", entropies)):
            expected = np.mean(values[half], axis=0)
            assert_close(scalars[f"{half}.{name}"], expected, rtol=1e-4, err_msg=f"{half} {name}")
    assert {name.partition(".")[0] for name in scalars} == {"encoder", "decoder"}


@pytest.mark.parametrize("is_padded", [True, pytest.param(False, marks=pytest.mark.full)])
def test_an_encoder_is_measured_on_the_first_examples_without_padding(is_padded):
    n, d = 5, 4
    config = rc.san_skip(2, 2, d, embedding=rc.EmbeddingConfig(vocab_size=7, d_embed=d))
    model = Model(draws.parameters(config), Classifier(jnp.zeros((d, 2)), jnp.zeros(2)))
    rng = np.random.default_rng(1)
    inputs = jnp.asarray(rng.integers(0, 7, (EXAMPLES + 1, n)))
    lengths = rng.integers(2, n + 1, EXAMPLES + 1) if is_padded else np.full(EXAMPLES + 1, n)
    mask = np.arange(n) < lengths[:, None]
    examples = Examples(inputs, inputs, jnp.asarray(mask) if is_padded else None)
    scalars = layer_scalars(model, {"eval": examples}, config)
    states = [
        rc.network.embed(model.network.embedding, row, config.embedding)
        for row in inputs[:EXAMPLES]
    ]
    ratios = []
    for x, keep in zip(states, mask, strict=False):
        hidden = rc.apply(model.network, x, config, mask=jnp.asarray(keep)).hidden
        ratios.append([compute_ratio(state, keep) for state in hidden[1:]])
    assert_close(scalars["residual_ratio"], np.mean(ratios, axis=0), rtol=1e-4)
