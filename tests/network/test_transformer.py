"""The one network against a plain numpy forward pass, its transformations and invariances."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.network import layers
from tests.oracles import draws, mp_network
from tests.support.closeness import assert_close
from tests.support.marks import full_but
from tests.support.refusals import is_refused, parametrize_refusals

N, D = 6, 12
VARIANTS = {
    "san": (rc.san, {}),
    "san_mlp": (rc.san_mlp, {}),
    "san_mlp with its skip": (rc.san_mlp, {"mlp_skip": True, "norm_placement": "post"}),
    "san_skip": (rc.san_skip, {"skip_gain": 0.7, "branch_gain": 1.3}),
    "transformer": (rc.transformer, {}),
    "transformer pre-LN": (rc.transformer, {"norm_placement": "pre", "final_norm": True}),
    "transformer pre-RMS gated": (
        rc.transformer,
        {"norm_placement": "pre", "norm": "rms", "mlp": "swiglu", "scale_scores": False},
    ),
    "transformer local": (rc.transformer, {"mask": "local", "window": 1, "temperature": 0.5}),
    "shared layers": (rc.transformer, {"layer_map": (0, 1, 0)}),
    "norms of branches": (rc.transformer, {"norm_placement": "branch", "norm": "rms"}),
    "decoder sandwich": (
        rc.transformer,
        {"cross_attention": True, "norm_placement": "sandwich", "qk_norm": "head"}
        | {"branch_gain": 0.8, "mask": "causal"},
    ),
    "normalised together": (rc.san_skip, {"qk_norm": "width", "norm_eps": 0.1}),
    "decoder pre-LN": (rc.transformer, {"cross_attention": True, "norm_placement": "pre"}),
}


def build(name, **extra):
    preset, fields = VARIANTS[name]
    config = preset(extra.pop("depth", 3), 3, D, **(fields | extra))
    # Gains and biases of norms away from 1 and 0, so that a forgotten one shows.
    params = draws.parameters(config, gain_scale=0.2)
    memory = draws.tokens(4, D, seed=2, shift=0.0) if config.cross_attention else None
    return config, params, draws.tokens(N, D, shift=0.0), memory


@pytest.mark.parametrize("name", VARIANTS)
def test_forward_matches_numpy(name, x64):
    config, params, x, memory = build(name)
    trace = rc.apply(params, x, config, memory=memory)
    assert trace.hidden.dtype == jnp.float64
    states, output = mp_network.states(params, x, config, memory)
    assert_close(trace.hidden, states, rtol=1e-10, atol=1e-12)
    assert_close(trace.output, output, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", full_but(VARIANTS, "san", "shared layers", "decoder sandwich"))
def test_single_precision_matches_numpy(name):
    config, params, x, memory = build(name)
    trace = jax.jit(rc.apply)(params, x, config, memory=memory)
    assert trace.hidden.dtype == jnp.float32
    states, output = mp_network.states(params, x, config, memory)
    scale = np.abs(states).max()
    np.testing.assert_allclose(trace.hidden, states, rtol=1e-4, atol=2e-5 * scale)
    np.testing.assert_allclose(trace.output, output, rtol=1e-4, atol=2e-5 * scale)


@pytest.mark.full
def test_a_batch_is_each_example_with_its_masks_and_the_edits_of_all():
    """Values that are kept have the batch behind the layers."""
    config = rc.transformer(2, 3, D, cross_attention=True)
    params = draws.parameters(config)
    rng = np.random.default_rng(0)
    masks = {"mask": rng.random((2, N)) < 0.7, "memory_mask": rng.random((2, 4)) < 0.7}
    masks["mask"][:, 0] = masks["memory_mask"][:, 0] = True
    numbers = {name: mask.astype(int).tolist() for name, mask in masks.items()}  # 0 and 1
    x, memory = (np.stack([draws.tokens(n, D, seed=s) for s in (1, 2)]) for n in (N, 4))
    common = {"keep": ("q", "cross_v"), "edit": {"v": lambda v, layer: v * (1 + layer)}}
    batch = rc.network.apply_batch(params, x, config, memory=memory, bias=None, **numbers, **common)
    assert batch.kept["q"].shape == (2, 2, 3, N, 4)
    for i in range(2):
        example_masks = {name: mask[i] for name, mask in masks.items()}
        single = rc.apply(params, x[i], config, memory=memory[i], **example_masks, **common)
        assert_close(batch.hidden[:, i], single.hidden, atol=1e-5)
        assert_close(batch.output[i], single.output, atol=1e-5)
        for name, values in single.kept.items():
            assert_close(batch.kept[name][:, i], values, atol=1e-5)


def test_a_rate_of_dropout_that_is_traced_needs_no_key():
    config, params, x, _ = build("san")
    run = jax.eval_shape(lambda rate: rc.apply(params, x, config, dropout_rate=rate).output, 0.1)
    assert run.shape == (N, D)


@pytest.mark.full
def test_bfloat16_stays_bfloat16_and_close():
    config, params, x, _ = build("transformer")
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    trace = rc.apply(half, x.astype(jnp.bfloat16), config)
    assert {a.dtype for a in jax.tree.leaves(trace)} == {jnp.dtype(jnp.bfloat16)}
    full = rc.apply(params, x, config)
    assert_close(trace.hidden.astype(jnp.float32), full.hidden, atol=0.15)


@pytest.mark.full
def test_trace_holds_what_was_computed():
    config, params, x, _ = build("transformer", skip_gain=0.7, branch_gain=1.3)
    trace = rc.apply(params, x, config)
    assert trace.hidden.shape == (4, N, D) and trace.attention.shape == (3, 3, N, N)
    np.testing.assert_allclose(trace.attention.sum(-1), 1, rtol=1e-5)
    layer = rc.network.layer_params(params, config, 1)
    total = 0.7 * trace.hidden[1] + 1.3 * trace.attention_branch[1]
    after = layers.apply_norm(layer.attention_norm, total)
    np.testing.assert_allclose(trace.layers.after_attention[1], after, rtol=1e-5, atol=1e-5)
    total = 0.7 * after + 1.3 * trace.mlp_branch[1]
    assert_close(trace.hidden[2], layers.apply_norm(layer.mlp_norm, total), atol=2e-5)


@pytest.mark.full
def test_deeper_networks_begin_with_the_same_layers_and_a_scale_of_weights_is_traced():
    short, long = (
        jax.jit(lambda key, scale, n=depth: rc.init(key, rc.transformer(n, 3, D), scale).layers)
        for depth in (2, 5)
    )
    key = jax.random.key(0)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a, b[:2]), short(key, 0.5), long(key, 0.5)
    )


def test_unrolling_changes_nothing(x64):
    config, params, x, _ = build("transformer")
    plain = rc.apply(params, x, config).hidden
    unrolled = rc.apply(params, x, config.replace(unroll=3)).hidden
    assert_close(unrolled, plain, rtol=1e-12)


@pytest.mark.full
def test_explicit_masks_join_the_config_and_a_bias_of_scores_reaches_every_layer():
    config, params, x, _ = build("transformer")
    causal = rc.apply(params, x, config.replace(mask="causal")).output
    masked_output = rc.apply(params, x, config, mask=jnp.tril(jnp.ones((N, N), bool))).output
    np.testing.assert_allclose(causal, masked_output, rtol=1e-6)
    bias = jnp.zeros((3, N, N)).at[:, :, 2].set(-1e9)
    with_bias = rc.apply(params, x, config, bias=bias)
    assert np.max(with_bias.attention[..., 2]) == 0.0
    with_shared_bias = rc.apply(params, x, config, bias=bias[0])
    np.testing.assert_allclose(with_shared_bias.output, with_bias.output, rtol=1e-6)


def test_masks_of_a_memory_are_of_keys_of_pairs_or_of_heads():
    """In one layer, a token's output is that under its own row of the mask."""
    config = rc.transformer(1, 2, D, cross_attention=True, mask="causal")
    params, x, memory = draws.parameters(config), draws.tokens(N, D), draws.tokens(4, D, seed=3)
    head_masks = np.random.default_rng(0).random((2, N, 4)) < 0.6
    head_masks[..., 1] = True
    run = jax.jit(lambda mask: rc.apply(params, x, config, memory=memory, memory_mask=mask))
    by_head = run(head_masks).layers.cross_attention[0]
    for h in range(2):
        trace = run(head_masks[h])
        weights = trace.layers.cross_attention[0]
        assert np.all(np.asarray(weights)[:, ~head_masks[h]] == 0)
        np.testing.assert_allclose(by_head[h], weights[h], rtol=1e-6)
        for i in range(N):
            row = run(head_masks[h, i])
            assert_close(row.output[i], trace.output[i], rtol=1e-5, atol=1e-6)


def test_dropout_needs_a_key_and_keeps_the_mean():
    config, params, x, _ = build("san", depth=1)
    clean = rc.apply(params, x, config).output

    def apply_with_dropout(key):
        trace = rc.apply(params, x, config, dropout_key=key, dropout_rate=0.2)
        return trace.output, trace.attention_branch[0], trace.attention[0]

    outputs, branches, weights = jax.jit(jax.vmap(apply_with_dropout))(
        jax.random.split(jax.random.key(9), 4000)
    )
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-5)  # before dropout, as branches
    assert np.all(branches)
    dropped = np.asarray(outputs) == 0
    np.testing.assert_allclose(outputs, np.where(dropped, 0, branches / 0.8), rtol=1e-5)
    error = np.abs(outputs.mean(0) - clean)
    assert (error < 5 * outputs.std(0) / np.sqrt(4000) + 1e-6).all()
    assert outputs.std() > 0.1


def test_every_place_of_every_layer_and_example_has_a_key_of_its_own(monkeypatch):
    """Attention weights, and the outputs of the three branches, in two layers of two texts."""
    keys, shapes = [], []

    def drop_nothing(key, x, rate):
        shapes.append(x.shape)
        jax.debug.callback(lambda key: keys.append(tuple(key.tolist())), key)
        return x

    monkeypatch.setattr("rank_collapse.network.transformer.dropout", drop_nothing)
    monkeypatch.setattr("rank_collapse.network.attention.dropout", drop_nothing)
    config = rc.transformer(2, 3, 6, d_ff=5, cross_attention=True)  # which no other test compiles
    x, memory = draws.normal(2, 7, 6), draws.normal(2, 4, 6, seed=2)
    options = {"dropout_key": jax.random.key(5), "dropout_rate": 0.5}
    rc.network.apply_batch(draws.parameters(config), x, config, memory=memory, **options)
    jax.effects_barrier()
    assert sorted(shapes) == sorted([(3, 7, 7), (7, 6), (3, 7, 4), (7, 6), (7, 6)])
    assert len(keys) == len(set(keys)) == 2 * 2 * 5


@parametrize_refusals(
    [
        ({}, {}, jnp.ones((6, 11)), r"\(6, 11\)"),
        ({}, {}, jnp.arange(6), "no embedding"),
        ({"qk_norm": "width"}, {"q_norm": None}, jnp.ones((N, D)), "q_norm is missing"),
    ]
)
def test_bad_inputs_and_parameters_are_named(arguments, message):
    fields, changed, x = arguments
    is_refused(
        message,
        lambda: rc.apply(
            draws.changed(build("transformer", **fields)[1], attention=changed),
            x,
            build("transformer", **fields)[0],
        ),
    )


@pytest.mark.full
def test_grouped_keys_are_normalised_as_if_each_head_had_its_own():
    config = rc.san(2, 4, D, qk_norm="width")
    params, x = draws.parameters(config, bias_scale=0.0), draws.tokens(N, D)
    attention = params.layers.attention
    few = {"w_k": attention.w_k[:, ::2], "w_v": attention.w_v[:, ::2]}
    few["k_norm"] = 1 + jnp.arange(2 * 2 * 3.0).reshape(2, 2, 3)
    repeated = {name: jnp.repeat(a, 2, axis=1) for name, a in few.items()}
    outputs = [
        rc.apply(draws.changed(params, attention=fields), x, config).output
        for fields in (few | {"b_k": None, "b_v": None}, repeated)
    ]
    assert_close(*outputs, rtol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("name", list(VARIANTS))
def test_jit_vmap_and_grad(name):
    config, params, x, memory = build(name)

    def loss(params, x):
        return jnp.sum(jnp.sin(rc.apply(params, x, config, memory=memory).output))

    single_loss = loss(params, x)
    batch = jax.jit(jax.vmap(loss, (None, 0)))(params, jnp.stack([2 * x, x]))
    np.testing.assert_allclose(batch[1], single_loss, rtol=1e-4, atol=1e-4)
    gradients = jax.tree.leaves(jax.jit(jax.grad(loss))(params, x))
    assert all(np.isfinite(g).all() for g in gradients)
