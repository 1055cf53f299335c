"""Language models over bytes: distance from linear, scores of a head, texts that are too short."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rank_collapse as rc
from experiments.train import byte_networks
from experiments.train.byte_networks import (
    byte_model,
    linearisation_distance,
    text_bytes,
    train_network,
)
from rank_collapse.scaling.depth_rules import DepthRule
from tests.oracles import draws
from tests.support.closeness import assert_close
from tests.support.refusals import is_refused


@pytest.mark.full
def test_the_distance_from_linear_is_of_first_order_in_the_step():
    """It halves with the step, is 0 for a block linear in the moved weights, and equals finite
    differences."""
    with jax.enable_x64(True):
        config = rc.transformer(3, 2, 8, norm_placement="pre", mlp="gelu")
        params, x = draws.parameters(config), draws.tokens(5, 8)
        direction = draws.parameters(config, seed=1)

        def compute_distance(size, part=None):
            moved = jax.tree.map(lambda a, b: a + size * b, params, direction)
            if part is not None:
                attention = params.layers.attention.replace(w_o=moved.layers.attention.w_o)
                moved = params.replace(layers=params.layers.replace(attention=attention))
            return linearisation_distance(params, moved, x, part or config)

        full, half = compute_distance(1e-3), compute_distance(5e-4)
        np.testing.assert_allclose(full / half, 2, rtol=0.02)
        attention_only = config.replace(mlp="none", mlp_skip=False)
        assert np.all(compute_distance(1.0, attention_only) < 1e-12)
        trace = rc.apply(params, x, config)
        for layer in range(3):
            one = config.replace(depth=1)

            def run_block(size, layer=layer, one=one):
                layers = jax.tree.map(
                    lambda a, b: (a + size * b)[layer : layer + 1], params.layers, direction.layers
                )
                return rc.apply(params.replace(layers=layers), trace.hidden[layer], one).hidden[1]

            first = (run_block(1e-5) - run_block(-1e-5)) / 2e-5 * 1e-3
            remainder = run_block(1e-3) - run_block(0.0) - first
            ratio = np.linalg.norm(remainder) / np.linalg.norm(first)
            np.testing.assert_allclose(full[layer], ratio, rtol=1e-4)


def test_the_distance_is_0_for_a_block_that_is_linear_in_the_moved_weights(x64):
    config = rc.san(1, 1, 4)
    params, x = draws.parameters(config), draws.tokens(3, 4)
    other = draws.parameters(config, seed=1).layers.attention

    def compute_distance(**moved):
        attention = params.layers.attention.replace(**moved)
        changed = params.replace(layers=params.layers.replace(attention=attention))
        return linearisation_distance(params, changed, x, config)

    assert compute_distance(w_o=other.w_o) < 1e-12
    assert compute_distance(w_v=other.w_v) < 1e-12
    assert compute_distance(w_v=other.w_v, w_o=other.w_o) > 1e-2


def test_the_distance_of_a_layer_is_that_of_its_own_weights_at_its_own_input(x64):
    """Values and outputs that both move: the remainder is the product of both changes."""
    config = rc.san(2, 1, 4)
    params, x = draws.parameters(config, bias_scale=0.0), draws.tokens(3, 4)
    new = draws.parameters(config, seed=1).layers.attention
    attention = params.layers.attention
    moved = params.replace(
        layers=params.layers.replace(attention=attention.replace(w_v=new.w_v, w_o=new.w_o))
    )
    trace = jax.device_get(rc.apply(params, x, config))
    expected = []
    for layer in range(2):
        w_v, w_o, new_v, new_o = (
            np.asarray(w[layer, 0]) for w in (attention.w_v, attention.w_o, new.w_v, new.w_o)
        )
        seen = trace.attention[layer, 0] @ trace.hidden[layer]
        linear = seen @ ((new_v - w_v) @ w_o + w_v @ (new_o - w_o))
        remainder = seen @ (new_v - w_v) @ (new_o - w_o)
        expected.append(np.linalg.norm(remainder) / np.linalg.norm(linear))
    assert_close(linearisation_distance(params, moved, x, config), expected)


def test_a_text_is_its_bytes_and_longer_than_a_sequence():
    assert text_bytes("aé", 2).tolist() == [97, 195, 169]
    is_refused("a text of 2 bytes is too short for 2 tokens", text_bytes, "ab", 2)


@pytest.mark.parametrize("width", [8, 64, 128])
def test_a_head_has_a_width_of_64_and_scores_over_64(width):
    config = byte_model(2, width)
    assert config.num_heads == max(1, width // 64) and config.embedding.vocab_size == 256
    assert np.sqrt(64) * config.temperature == 64


def test_quantities_of_a_step_are_of_its_own_batch_and_of_the_weights_before_it(monkeypatch):
    """With a rate of 0 all steps have the first weights, and NumPy gives their losses; with another
    rate the first step is the same, and the next ones are of other weights."""
    tokens, steps, batch = 4, 3, 2
    config, rule = byte_model(2, 4, tokens), DepthRule(byte_model(1, 2, tokens), gain=-0.5)
    monkeypatch.setattr(  # of the first weights, and of the first text of the first batch
        byte_networks,
        "linearisation_distance",
        lambda start, end, x, _: (
            start.embedding.tokens[0, 0] + jnp.sum(x) + jnp.array([0.0, -7.0, 100.0])
        ),
    )
    initialise = DepthRule.init  # larger, or the gradients of the scores are all rounding
    monkeypatch.setattr(
        DepthRule, "init", lambda *args: jax.tree.map(lambda a: 20 * a, initialise(*args))
    )
    text, key = np.arange(60, 110, dtype=np.uint8), jax.random.key(3)

    @jax.jit
    def train(rate):
        options = {"weight_decay": 0.25, "steps": steps, "batch_size": batch}
        return train_network(key, text, config, rule, rate=rate, **options)

    still, moved = jax.device_get((train(0.0), train(0.5)))
    key_weights, key_data = jax.random.split(key)
    network = rule.network(config)

    @jax.jit
    def draw(key_weights, key_data):
        first = jax.random.randint(key_data, (steps, batch, 1), 0, len(text) - tokens)
        return rule.init(key_weights, config), first

    params, first = jax.device_get(draw(key_weights, key_data))
    data = text[first + np.arange(tokens + 1)].astype(int)
    batches = data.reshape(steps * batch, tokens + 1)
    trace = jax.jit(jax.vmap(lambda x: rc.apply(params, x, network)))(batches[:, :-1])
    table = np.asarray(params.embedding.tokens, float)
    logits = rule.logit_gain(config) * np.asarray(trace.output, float) @ table.T
    log_shares = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    losses = -np.take_along_axis(log_shares, batches[:, 1:, None], axis=-1)[..., 0]
    np.testing.assert_allclose(still["loss"], losses.reshape(steps, -1).mean(axis=1), rtol=1e-4)
    size = np.abs(logits).reshape(steps, -1).mean(axis=1)
    np.testing.assert_allclose(still["logits"], size, rtol=1e-4)
    stream = np.abs(np.asarray(trace.hidden)[:, -1]).reshape(steps, -1).mean(axis=1)
    np.testing.assert_allclose(still["stream"], stream, rtol=1e-4)

    @jax.jit
    @jax.grad
    def compute_gradient(params, batch):
        output = jax.vmap(lambda x: rc.apply(params, x, network).output)(batch[:, :-1])
        shares = jax.nn.log_softmax(rule.logit_gain(config) * output @ params.embedding.tokens.T)
        return -jnp.take_along_axis(shares, batch[:, 1:, None], axis=-1).mean()

    tree = jax.device_get(compute_gradient(params, batches[:batch]))
    size = np.linalg.norm(tree.layers.attention.w_q[-1])
    np.testing.assert_allclose(still["query_gradient"][0], size, rtol=1e-4)

    adamw = rule.adamw(0.5, config, weight_decay=0.25)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)

    @jax.jit
    def make_step(params, state, gradient):
        updates, state = optimizer.update(gradient, state, params)
        new = optax.apply_updates(params, updates)
        before, after = (rc.apply(p, batches[0, :-1], network).hidden[-1] for p in (params, new))
        return new, state, jnp.mean(jnp.abs(after - before))

    state = jax.jit(optimizer.init)(params)
    new, state, change = make_step(params, state, tree)
    second = compute_gradient(new, batches[batch : 2 * batch])
    _, _, later_change = make_step(new, state, second)
    np.testing.assert_allclose(moved["change"][1:], [change, later_change], rtol=1e-3)
    assert np.isnan([still["change"][0], moved["change"][0]]).all()
    assert (still["change"][1:] == 0).all() and (moved["change"][1:] > 1e-3).all()
    for name, values in moved.items():
        assert values.shape == (steps,)
        if name == "linearisation":
            assert np.isnan(values[:-1]).all()
            first = params.embedding.tokens[0, 0] + data[0, 0, :-1].sum()
            np.testing.assert_allclose(
                [values[-1], still[name][-1]], [first, first], rtol=1e-5, atol=1e-3
            )
        elif name != "change":
            np.testing.assert_allclose(values[0], still[name][0], rtol=1e-5)
            assert (np.abs(values[1:] / still[name][1:] - 1) > 1e-5).all(), name
