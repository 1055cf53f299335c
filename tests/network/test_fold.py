"""Networks without gains: the same output as with them."""

from functools import partial

import draws
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import near
from refusals import each_is_refused

import rank_collapse as rc

L, N, D = 3, 5, 8
EMBEDDINGS = {
    "post": rc.EmbeddingConfig(vocab_size=7, d_embed=D),
    "decoder": rc.EmbeddingConfig(vocab_size=7, d_embed=D, positions="sinusoidal", norm=False),
    "pre": rc.EmbeddingConfig(vocab_size=7, d_embed=6, projection="after_norm"),
}
ALL_GAINS = {"learned_branch_gain": 1.0, "norm_gain": 0.7, "norm": "rms"}
CASES = {
    "post": ("admin_log", ALL_GAINS),
    "decoder": ("admin_const", {"cross_attention": True, "mlp": "swiglu", "layer_map": (0, 1, 0)}),
    "sandwich": ("sandwich", {"learned_branch_gain": 2.0}),
    "pre": ("layernorm_scaling", {"learned_branch_gain": 2.0}),
}
apply = jax.jit(rc.apply)


def build(name):
    design, fields = CASES[name]
    config = rc.transformer(
        L, 2, D, embedding=EMBEDDINGS.get(name, EMBEDDINGS["pre"]), d_ff=7, norm_eps=1e-3
    )
    layout = {n: v for n, v in fields.items() if "gain" not in n}
    config = rc.design(config.replace(**layout), design)
    config = config.replace(**{n: v for n, v in fields.items() if "gain" in n})
    params = draws.parameters(config, gain_scale=0.2)
    memory = draws.tokens(4, D) if config.cross_attention else None
    return params, jnp.array([0, 3, 6, 3, 1]), config, memory


def compare(name, tolerance):
    params, x, config, memory = build(name)
    folded, plain = rc.fold_gains(params, config)
    assert jax.tree.leaves(plain) == [1.0, 1.0, 1.0, config.init_gain]  # λ, γ, temperature
    assert (plain.embedding != config.embedding) == (name == "decoder")  # a projection, from ω_1
    assert plain.layer_map == () and folded.layers.mlp_gains is None
    expected = apply(params, x, config, memory=memory).output
    found = apply(folded, x, plain, memory=memory).output
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
    forgotten = params.replace(layers=params.layers.replace(attention_gains=None, mlp_gains=None))
    if not config.layer_map:
        forgotten = apply(forgotten, x, plain).output
        assert np.abs(forgotten - expected).max() > 1e-2


@pytest.mark.parametrize("name", CASES)
def test_the_output_stays_in_float64(x64, name):
    compare(name, 1e-12)


def test_the_output_stays_in_float32():
    compare("post", 1e-6)


def test_hidden_states_are_multiplied_by_the_next_gain_and_groups_stay():
    params, x, config, _ = build("post")
    grouped = {n: getattr(params.layers.attention, n)[:, :1] for n in ("w_k", "b_k", "w_v", "b_v")}
    params = draws.changed(params, attention=grouped | {"b_q": None})
    folded, plain = rc.fold_gains(params, config)
    assert folded.layers.attention.w_k.shape == (L, 1, D, D // 2)
    states, own = apply(params, x, config), apply(folded, x, plain)
    np.testing.assert_allclose(own.output, states.output, rtol=1e-5, atol=1e-6)
    omega = config.skip_gain * params.layers.attention_gains.skip
    expected = omega[:, None] * states.hidden[:-1]
    np.testing.assert_allclose(own.hidden[:-1], expected, rtol=1e-5, atol=1e-6)


def test_seeds_fold_under_vmap():
    params, _, config, _ = build("post")
    two = jax.tree.map(lambda a: jnp.stack([a, 1.1 * a]), params)
    folded = jax.jit(jax.vmap(lambda p: rc.fold_gains(p, config)[0]))(two)
    alone, _ = rc.fold_gains(jax.tree.map(lambda a: a[1], two), config)
    near(jax.tree.map(lambda a: a[1], folded), alone, rtol=1e-6)


ZERO = rc.Gains(mlp=np.array([1.0, 0.0, 1.0]))
PRE = rc.design(rc.transformer(L, 2, D), "pre").replace(skip_gain=0.5)


def test_what_cannot_be_folded_is_refused_in_one_line():
    params, _, config, _ = build("post")
    each_is_refused(
        (
            partial(rc.fold_gains, params, config.replace(skip_gain=-1.0)),
            "skip gain -1.* of the attention sublayer of la",
        ),
        (
            partial(rc.fold_gains, params, config.replace(skip_gain=ZERO)),
            "skip gain 0 of the mlp sublayer of layer 1 is not positive",
        ),
        (
            partial(rc.fold_gains, params.replace(embedding=None), config.replace(embedding=None)),
            r"the first skip gain \(.*\) cannot be folded: there is no embedding",
        ),
        (
            partial(rc.fold_gains, draws.parameters(PRE), PRE),
            "under norm_placement='pre'",
        ),
    )


@pytest.mark.slow
def test_encoder_decoders_profile_and_fold_half_by_half():
    tokens = rc.EmbeddingConfig(vocab_size=7, d_embed=D, positions="sinusoidal", norm=False)
    half = rc.transformer(2, 2, D, d_ff=7, embedding=tokens)
    both = rc.EncoderDecoderConfig(
        half, half.replace(mask="causal", cross_attention=True), shared_embedding=True
    )
    config = rc.design(both, "admin")
    parts = [draws.parameters(c, gain_scale=0.2) for c in (config.encoder, config.decoder)]
    parts[1] = parts[1].replace(embedding=parts[1].embedding.replace(tokens=None))
    w = jnp.asarray(np.random.default_rng(3).standard_normal((D, 7)), float)
    params = rc.EncoderDecoderParams(*parts, w_output=w)
    ids = jnp.asarray(np.random.default_rng(4).integers(0, 7, (3, 5)))
    mask = np.arange(5) < np.array([5, 3, 4])[:, None]
    module = rc.encoder_decoder
    config = module.admin_profile(params, ids, ids[:, :4], config, source_mask=mask)

    alone = rc.admin_profile(params.encoder, ids, config.encoder, mask=mask)
    for kind in ("attention", "mlp"):
        found, expected = (getattr(c.skip_gain, kind) for c in (config.encoder, alone))
        np.testing.assert_allclose(found, expected, rtol=1e-6)

    @jax.jit
    def run(params, config):
        def one(x, mask):
            return module.apply(params, x, x[:4], config, source_mask=mask)

        return jax.vmap(one)(ids, mask)

    # ω_2 and ω_3 of the decoder by definition, with ω_1 = 1; all multiply what is learned.
    trace = run(params, config)
    first, own = jax.tree.map(lambda a: a[:, 0], trace.decoder.layers), params.decoder.layers
    kept = np.var(trace.decoder.hidden[:, 0] * own.attention_gains.skip[0][None, None])
    second = np.sqrt(kept + np.var(first.attention_branch))
    np.testing.assert_allclose(config.decoder.skip_gain.cross[0], second, rtol=1e-5)
    kept = np.var(second * first.after_attention * own.cross_gains.skip[0][None, None])
    third = np.sqrt(kept + np.var(first.cross_branch))
    np.testing.assert_allclose(config.decoder.skip_gain.mlp[0], third, rtol=1e-5)
    folded, plain = module.fold_gains(params, config)
    assert folded.decoder.embedding.tokens is None and plain.decoder.skip_gain == 1.0
    np.testing.assert_allclose(run(folded, plain).logits, trace.logits, rtol=2e-5, atol=2e-5)
