"""One seed's training against a numpy oracle of the optimiser and the order of the data."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import run_memorization as memorization
from rank_collapse.network import transformer
from rank_collapse.network.embedding import EmbeddingConfig
from rank_collapse.network.encoder_decoder import EncoderDecoderConfig
from rank_collapse.training import models, training
from rank_collapse.training.recipe import run_config
from rank_collapse.training.tasks.examples import (
    Examples,
    cross_entropy,
    pack_examples,
    packed_rows,
)
from rank_collapse.training.training import (
    Hyper,
    batch_forward,
    forward,
    init_state,
    schedule_factor,
    train_epoch,
    train_step,
)
from tests.oracles import draws
from tests.oracles.trained_networks import begin, config, data, hyper, recipe
from tests.support.closeness import assert_close, near


@pytest.mark.full
def test_the_classifier_begins_small():
    classifier = begin(Hyper(), recipe(num_outputs=500)).model.classifier
    np.testing.assert_allclose(np.std(classifier.w), 0.02, rtol=0.05)  # of 4000 draws
    assert not classifier.b.any()


class NumpyAdam:
    """Adam as Kingma and Ba write it, with L2 decay in the gradient, in float64."""

    def __init__(self, weights, b1=0.9, b2=0.999, eps=1e-8):
        self.b1, self.b2, self.eps = b1, b2, eps
        self.w = [np.asarray(a, float) for a in weights]
        self.m = [np.zeros_like(a) for a in self.w]
        self.v = [np.zeros_like(a) for a in self.w]
        self.t = 0

    def step(self, gradients, rate, decay, clip):
        gradients = [np.asarray(g, float) for g in gradients]
        if clip is not None:
            norm = np.sqrt(sum((g**2).sum() for g in gradients))
            gradients = [g * min(1.0, clip / norm) for g in gradients]
        self.t += 1
        for i, g in enumerate(gradients):
            g = g + decay * self.w[i]
            self.m[i] = self.b1 * self.m[i] + (1 - self.b1) * g
            self.v[i] = self.b2 * self.v[i] + (1 - self.b2) * g**2
            m, v = self.m[i] / (1 - self.b1**self.t), self.v[i] / (1 - self.b2**self.t)
            self.w[i] = self.w[i] - rate * m / (np.sqrt(v) + self.eps)


@pytest.mark.full
@pytest.mark.parametrize(
    "fields, floats",
    [
        pytest.param({}, {}, marks=pytest.mark.full),
        pytest.param(
            {"schedule": "milestones", "milestones": (1, 2), "decay": 0.5},
            {"weight_decay": 0.1},
            marks=pytest.mark.full,
        ),
        (
            {"schedule": "linear", "clip_norm": 0.05, "b1": 0.8, "b2": 0.97, "eps": 1e-3},
            {"weight_decay": 0.1, "label_smoothing": 0.2, "warmup": 5.0}
            | {"network": {"skip_gain": 0.6, "temperature": 1.5}},
        ),
    ],
)
def test_epochs_are_adam_steps_on_batches_in_order_with_a_short_last_one(fields, floats, x64):
    """With all options at once, and of tokens that exist.

    In float64, and from weights that are not 0: Adam divides a gradient by its size.

    The gradient of the keys' bias is zero but for rounding, in float32 as large as Adam's epsilon.
    With decay a bias of 0 would grow from it by 0.01 · 0.1/1e-8 a step, in any precision.
    """
    chosen, examples = recipe(**fields), data(10)
    lengths = jnp.array([4, 2, 3, 4, 1, 3, 4, 2, 4, 3])
    examples = examples.replace(mask=jnp.arange(4)[None] < lengths[:, None])
    values = hyper(learning_rate=0.01, dropout=0.0, **floats)
    state = begin(values, chosen)
    state = state.replace(model=jax.tree.map(lambda a: np.asarray(a) + 0.2, state.model))
    structure = jax.tree.structure(state.model)
    oracle = NumpyAdam(jax.tree.leaves(state.model), chosen.b1, chosen.b2, chosen.eps)
    network = chosen.config.replace(**floats.get("network", {}))

    def loss(model, batch):
        logits = batch_forward(model, batch, network)
        smoothing = floats.get("label_smoothing", 0.0)
        return cross_entropy(logits, batch.labels, batch.mask, smoothing)

    gradient = jax.jit(jax.value_and_grad(loss))
    step = 0
    run = jax.jit(lambda s, e: train_epoch(s, examples, e, values, chosen))
    for epoch in range(3):
        losses = []
        for rows in (slice(0, 4), slice(4, 8), slice(8, 10)):
            batch = jax.tree.map(lambda a, r=rows: np.asarray(a)[r], examples)
            model = jax.tree.unflatten(structure, oracle.w)
            value, g = gradient(model, batch)
            factor = {"constant": 1, "milestones": 0.5 ** min(epoch, 2), "linear": 1 - step / 9}
            rate = 0.01 * factor[chosen.schedule] * min(1, (step + 1) / floats.get("warmup", 1))
            decay = floats.get("weight_decay", 0.0)
            oracle.step(jax.tree.leaves(g), rate, decay, chosen.clip_norm)
            losses.append(float(value))
            step += 1
        state, mean = run(state, epoch)
        assert float(mean) == pytest.approx(np.mean(losses), rel=1e-6)
    for ours, theirs in zip(jax.tree.leaves(state.model), oracle.w, strict=True):
        assert ours.dtype == np.float64
        assert_close(ours, theirs, atol=1e-7)


@pytest.mark.full
def test_shuffling_visits_every_example_once_per_epoch():
    chosen = recipe(shuffle=True, batch_size=3)
    still = hyper(learning_rate=0.0, dropout=0.0)  # the loss of an epoch is then a plain mean
    state = begin(still, chosen)
    examples = data(9)
    shuffled, ordered = (
        jax.jit(lambda epoch, h, r=r: train_epoch(state, examples, epoch, h, r)[1])
        for r in (chosen, dataclasses.replace(chosen, shuffle=False))
    )
    np.testing.assert_allclose(shuffled(0, still), ordered(0, still), rtol=1e-5)
    moving = hyper(learning_rate=0.01, dropout=0.0)  # only the order differs between epochs
    assert ordered(0, moving) == ordered(1, moving)
    assert abs(shuffled(0, moving) - shuffled(1, moving)) > 1e-5


def test_schedules_at_their_borders():
    steps = recipe(schedule="milestones", milestones=(15, 30), decay=0.91)
    factors = [float(schedule_factor(steps, e, 0, 1)) for e in (0, 14, 15, 29, 30, 99)]
    np.testing.assert_allclose(factors, [1, 1, 0.91, 0.91, 0.91**2, 0.91**2], rtol=1e-6)
    linear = recipe(schedule="linear", num_epochs=2)
    linear_factors = np.array([schedule_factor(linear, 0, s, 5) for s in (0, 5, 9)])
    np.testing.assert_array_equal(linear_factors, np.float32([1.0, 0.5, 1 - 9 / 10]))


@pytest.mark.parametrize("position", ["none", "rotary"])
def test_the_network_that_trains_is_the_one_network(position):
    chosen = recipe(config=config(position=position))
    state = begin(hyper(), chosen)
    x, positions = data().inputs[0], jnp.array([0, 2, 3, 1])
    output = transformer.apply(state.model.network, x, chosen.config, positions=positions).output
    w, b = state.model.classifier
    logits = forward(state.model, x, chosen.config, positions=positions)
    np.testing.assert_allclose(logits, output @ w + b[None, :], rtol=1e-6)


def test_vectors_as_wide_as_the_network_are_embedded_once():
    chosen = recipe(config=config(embedding=EmbeddingConfig(d_input=8, d_embed=8)))
    model = begin(hyper(), chosen).model
    x = draws.normal(4, 8)
    output = transformer.apply(model.network, x, chosen.config).output
    w, b = model.classifier
    logits = forward(model, x, chosen.config)
    np.testing.assert_allclose(logits, output @ w + b[None, :], rtol=1e-5, atol=1e-6)


def test_floats_of_a_run_reach_its_initial_weights():
    """`init_gain`, `init_scale`, and what `Recipe.start` makes of the network with `start`."""
    key, floats = jax.random.key(0), {"init_gain": jnp.float32(0.5)}

    def start(network, factor):
        return jax.tree.map(lambda a: factor * a, network)

    plain = init_state(key, hyper(), recipe())
    changed = init_state(
        key,
        hyper(init_scale=3.0, start=7.0).replace(network=floats),
        recipe(start=start),
    )
    (one, w), (other, scaled_w) = (
        (s.model.network.layers.attention, s.model.classifier.w) for s in (plain, changed)
    )
    np.testing.assert_allclose(other.w_v, 0.5 * 3 * 7 * one.w_v, rtol=1e-6)
    np.testing.assert_allclose(other.w_q, 3 * 7 * one.w_q, rtol=1e-6)
    np.testing.assert_array_equal(scaled_w, w)
    tables = (s.model.network.embedding.tokens for s in (changed, plain))
    np.testing.assert_allclose(next(tables), 7 * next(tables), rtol=1e-6)
    assert not np.array_equal(*(jax.random.key_data(k) for k in (plain.key, key)))


def test_the_order_and_dropout_have_keys_that_no_weights_have(monkeypatch):
    keys = []

    def init_model(key, *_):
        keys.append(key)
        return {"w": jnp.ones(2)}

    monkeypatch.setattr(training, "init_model", init_model)
    root = jax.random.key(0)
    state = init_state(root, hyper(), recipe())
    assert state.key not in (root, *keys) and keys[0] != root


def test_floats_of_a_run_reach_the_half_that_they_are_for():
    one = config()
    decoder = one.replace(cross_attention=True, cross_skip=True, mask="causal")
    pairs = recipe(config=EncoderDecoderConfig(one, decoder))
    floats = {"decoder": {"skip_gain": 2.0}, "encoder": {"branch_gain": 0.5}}
    changed = run_config(pairs, hyper().replace(network=floats), unroll=2)
    assert changed.encoder == one.replace(branch_gain=0.5, unroll=2)
    assert changed.decoder == decoder.replace(skip_gain=2.0, unroll=2)
    del floats["encoder"]
    changed = run_config(pairs, hyper().replace(network=floats))
    assert (changed.encoder, changed.decoder) == (one, decoder.replace(skip_gain=2.0))


@pytest.mark.full
def test_a_step_passes_its_options_on(monkeypatch):
    """To the forward pass: floats of the run, dropout by the number of the step, and weights."""
    calls = []

    def batch_forward(model, batch, config, **options):
        calls.append((config, options))
        return jnp.exp(model.classifier.b[0]) + jnp.zeros((2, 3, 4)) + jnp.arange(4.0)[None, None]

    monkeypatch.setattr(training, "batch_forward", batch_forward)
    ids = jnp.array([[3, 0, 1], [2, 2, 3]])
    mask = jnp.array([[True, True, False], [True, True, True]])
    batch = Examples(ids, ids, mask)
    values = hyper(dropout=0.4, output_dropout=0.5, network={"temperature": 2.0})
    fields = {"unroll": 3, "output_dropout": True}
    losses = []
    for chosen, run, weights, step in (
        (recipe(**fields), values, [True, False], 0),
        (recipe(**fields), values, [True, True], 1),
        (recipe(), values.replace(dropout=None), [False, True], 1),
        (recipe(loss="squared_error"), values, [False, True], 0),
    ):
        labels = jnp.zeros((2, 3, 4)) if chosen.loss == "squared_error" else ids
        state = init_state(jax.random.key(0), run, chosen)
        step_batch = batch.replace(labels=labels)
        _, loss = train_step(state, step_batch, jnp.array(weights), step, 1.0, run, chosen)
        losses.append(float(loss))
    nll = np.log(np.exp(np.arange(4)).sum()) - np.asarray(ids)
    expected = [nll[0, :2].mean(), (nll[0, :2].sum() + nll[1].sum()) / 5, nll[1].mean()]
    np.testing.assert_allclose(losses, [*expected, 3 * (1 + 4 + 9 + 16)], rtol=1e-5)
    configs, options = zip(*calls, strict=True)
    assert [c.unroll for c in configs] == [3, 3, 6, 6]
    assert [float(c.temperature) for c in configs] == [2] * 4
    rates = [float(o["dropout_rate"]) for o in options]
    np.testing.assert_allclose(rates, [0.4, 0.4, 0, 0.4], rtol=1e-6)
    assert [float(o["output_dropout"]) for o in options] == [0.5, 0.5, 0, 0]
    first, second, none, again = (o["dropout_key"] for o in options)
    assert none is None and first == again and first != second
    orders = [jax.random.fold_in(jax.random.fold_in(state.key, 0), epoch) for epoch in (0, 1)]
    assert first not in orders and second not in orders  # the keys of the examples' orders


def test_tokens_of_a_packed_row_see_and_count_from_their_own_sequence(monkeypatch):
    def forward(model, inputs, config, *, mask, positions, **options):
        position = jnp.zeros(5, int) - 1 if positions is None else positions
        return jnp.concatenate([mask.astype(int).reshape(-1), position, inputs])

    monkeypatch.setattr(models, "forward", forward)
    ids, parts = jnp.arange(10).reshape(2, 5), jnp.array([[0, 0, 1, 1, 1], [2, 2, 2, -1, -1]])
    padded, packed = Examples(ids, ids, parts >= 0), Examples(ids, ids, parts >= 0, parts)
    for size in (None, 1):
        rows = np.asarray(batch_forward(None, packed, None, batch_size=size))
        seen = (parts[:, :, None] == parts[:, None]) & (parts >= 0)[:, None]
        np.testing.assert_array_equal(rows[:, :25], seen.reshape(2, 25))
        np.testing.assert_array_equal(rows[:, 25:28], [[0, 1, 0], [0, 1, 2]])
        np.testing.assert_array_equal(rows[:, 30:], ids)
        rows = np.asarray(batch_forward(None, padded, None, batch_size=size))
        np.testing.assert_array_equal(rows[:, :5], parts >= 0)
        np.testing.assert_array_equal(rows[:, 5:10], -np.ones((2, 5)))


@pytest.mark.full
def test_packed_sequences_train_as_padded_ones():
    lengths = np.array([4, 1, 3, 2, 2])
    rng = np.random.default_rng(0)
    mask = jnp.asarray(np.arange(4)[None] < lengths[:, None])
    padded = memorization.make_examples(
        jax.random.key(3), jnp.asarray(rng.integers(0, 5, (5, 4))) * mask, mask
    )
    rows = packed_rows(lengths, 4)
    packed = pack_examples(padded, rows)
    assert len(packed) == 3 and packed.mask.sum() == lengths.sum()
    values = hyper(learning_rate=0.01, dropout=0.0)
    chosen = recipe(config=config(position="relative_bias"), batch_size=5)
    state = begin(values, chosen)
    one, other = (batch_forward(state.model, e, chosen.config) for e in (packed, padded))
    exists = rows[..., 0] >= 0
    np.testing.assert_allclose(
        np.asarray(one)[exists],
        np.asarray(other)[rows[exists][:, 0], rows[exists][:, 1]],
        rtol=1e-4,
        atol=1e-6,
    )
    after = [
        train_epoch(state, e, jnp.int32(0), values, dataclasses.replace(chosen, batch_size=len(e)))
        for e in (packed, padded)
    ]
    np.testing.assert_allclose(after[0][1], after[1][1], rtol=1e-5)
    near(after[0][0].optimizer, after[1][0].optimizer, atol=1e-5)
