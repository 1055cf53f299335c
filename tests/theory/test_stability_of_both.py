"""The law of collapse and instability of an encoder-decoder, against networks over seeds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.measures import updates
from rank_collapse.network import EmbeddingConfig, EncoderDecoderConfig, encoder_decoder
from rank_collapse.theory import encoder_decoder as theory, stability

SEEDS = jax.vmap(lambda s: jax.random.fold_in(jax.random.key(3), s))(jnp.arange(8))
SIZE = 1e-2


def network():
    """Two layers of attention alone in each half, d = 64, post-norm; both are given states."""
    half = rc.san_skip(2, 2, 64, norm_placement="post", temperature=1.5)
    embedding = EmbeddingConfig(vocab_size=1, d_embed=64)
    decoder = half.replace(cross_attention=True, mask="causal", embedding=embedding)
    return EncoderDecoderConfig(half.replace(skip_gain=0.7), decoder)


@functools.cache
def measured_and_expected():
    """({quantity: [seed, ...]} of networks, the same expected); sources of 12 tokens, targets 9."""
    config = network()

    def compare(key):
        keys = jax.random.split(key, 5)
        source, target = (
            jax.random.normal(k, (n, 64)) for k, n in zip(keys, (12, 9), strict=False)
        )
        asked = jax.random.normal(keys[2], (9, 64))
        params, other = (encoder_decoder.init(k, config) for k in keys[3:])

        def with_own(found):
            return params.replace(
                **{h: updates.with_matrices(getattr(params, h), found[h]) for h in theory.HALVES}
            )

        def output(params):
            return encoder_decoder.apply(params, source, target, config).decoder.output

        def loss(matrices):
            return jnp.sum(asked * output(with_own(matrices)))

        own, direction = (
            {h: updates.matrices_of(getattr(p, h)) for h in theory.HALVES} for p in (params, other)
        )
        moved = {
            f"change of {', '.join(halves)}": params.replace(
                **{h: updates.moved(getattr(params, h), direction[h], SIZE) for h in halves}
            )
            for halves in (("encoder",), theory.HALVES)
        }
        hidden = encoder_decoder.apply(params, source, target, config).decoder.hidden
        found = {
            "collapse": jnp.log(1 - jax.vmap(rc.token_cosine)(hidden)[1:]),
            "gradients": jax.tree.map(
                jnp.log, {h: updates.norms_of(g) for h, g in jax.grad(loss)(own).items()}
            ),
        } | {
            name: jnp.log(jnp.mean(jnp.square(output(p) - hidden[-1]))) for name, p in moved.items()
        }
        sizes = theory.update_sizes(config, SIZE)
        norms, traces = theory.expected_gradient_norms(params, source, target, config, sizes=sizes)
        alone = sizes | {"decoder": stability.update_sizes(config.decoder, 0.0)}
        of_encoder = theory.expected_pass(params, source, target, config, sizes=alone)
        return found, {
            "collapse": traces["decoder"].log_one_minus_cosine[1:],
            "gradients": jax.tree.map(jnp.log, norms),
            "change of encoder": jnp.log(of_encoder["decoder"].output_change[-1]),
            "change of encoder, decoder": jnp.log(traces["decoder"].output_change[-1]),
        }

    return jax.device_get(jax.jit(lambda keys: jax.lax.map(compare, keys))(SEEDS))


@pytest.mark.slow
@pytest.mark.parametrize(
    "quantity", ["collapse", "gradients", "change of encoder", "change of encoder, decoder"]
)
def test_the_law_of_both_halves(quantity):
    """Means over 8 seeds within 4 standard errors and what the limit of wide networks leaves out:
    n L/d is 0.4 here, of fluctuations, as in `test_stability`."""
    here, there = (found[quantity] for found in measured_and_expected())
    margin = {"collapse": 0.12, "gradients": 0.2}.get(quantity, 0.12)
    assert jax.tree.structure(here) == jax.tree.structure(there)

    def close(path, measured, expected):
        error = measured.std(axis=0, ddof=1) / np.sqrt(len(measured))
        off = np.abs(measured.mean(axis=0) - expected.mean(axis=0))
        assert np.all(off < 4 * error + margin), (jax.tree_util.keystr(path), off, error)

    jax.tree_util.tree_map_with_path(close, here, there)


@pytest.mark.slow
def test_the_decoder_moves_with_the_encoder():
    """Most of what an update does comes from the memory here, so that the chain is needed."""
    here, _ = measured_and_expected()
    share = np.exp(here["change of encoder"] - here["change of encoder, decoder"]).mean()
    assert 0.1 < share < 0.9
    assert here["collapse"].mean(axis=0)[-1] < -0.5


@pytest.mark.slow
def test_a_kernel_in_the_place_of_the_memory():
    """The kernel of the memory itself gives what the memory gives."""
    config = network().decoder.replace(embedding=None)
    params = rc.init(jax.random.key(0), config)
    x, memory = (jax.random.normal(jax.random.key(i), (n, 64)) for i, n in ((1, 5), (2, 4)))
    kernel = stability.token_kernel.kernel_of(memory)
    own = stability.expected_pass(params, x, config, memory=memory)
    given = stability.expected_pass(params, x, config, memory=0 * memory, memory_kernel=kernel)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)  # two programs
    jax.tree.map(close, own, given)
