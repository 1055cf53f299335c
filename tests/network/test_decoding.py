"""Greedy decoding, against one forward pass over the whole target."""

import jax
import jax.numpy as jnp
import pytest

import rank_collapse as rc
from rank_collapse.network import encoder_decoder
from tests.oracles.encoder_decoders import config, draw_params
from tests.support.closeness import assert_close
from tests.support.marks import full_but

BEGIN, END = 1, 2


apply = jax.jit(encoder_decoder.apply)


SOURCES = jnp.array([3, 4, 5, 6, 7, 0, 0])


EXISTS = SOURCES > 0


KINDS = {
    "post-norm, shared": {"decoder": {"branch_gain": 0.3}, "shared_embedding": True},
    "pre-norm, additive, rotary": {
        "shared": {"norm_placement": "pre", "final_norm": True, "norm": "rms"},
        "decoder": {
            "score": "additive",
            "position": "rotary",
            "branch_gain": 0.3,
            "qk_norm": "head",
            "norm_eps": 0.1,
        },
    },
    "T5's positions, learned ones, gains, one row of parameters, tied": {
        "shared_embedding": True,
        "tied_output": True,
        "decoder": {
            "layer_map": (0, 0),
            "position": "relative_bias",
            "num_buckets": 8,
            "skip_gain": 1.5,
            "branch_gain": 0.4,
            "temperature": 0.8,
        },
        "embedding": {"positions": "learned", "num_positions": 9},
    },
    "XLNet's positions": {"decoder": {"position": "relative_key", "branch_gain": 0.3}},
}


@pytest.mark.parametrize("kind", full_but(KINDS, "post-norm, shared"))
def test_teacher_forcing_agrees_with_decoding(kind):
    model_config = config(**KINDS[kind])

    @jax.jit
    @jax.vmap
    def decode_and_force(params):
        options = {"begin": BEGIN, "end": END, "max_len": 6, "source_mask": EXISTS}
        decoding = rc.network.greedy_decode(params, SOURCES, model_config, **options)
        decoder_input = encoder_decoder.shift_target(decoding.tokens, BEGIN)
        trace = apply(params, SOURCES, decoder_input, model_config, source_mask=EXISTS)
        return decoding, trace.logits

    networks = [draw_params(model_config, seed) for seed in range(8)]
    decoding, forced_logits = decode_and_force(jax.tree.map(lambda *a: jnp.stack(a), *networks))
    assert_close(decoding.logits, forced_logits, atol=1e-5)
    # Equal tokens alone would not show a place that is off by one; a tied output repeats itself.
    assert (
        model_config.tied_output or max(len(set(tokens)) for tokens in decoding.tokens.tolist()) > 2
    )


def test_decoding_ends_with_the_first_end_mark():
    model_config = config(decoder={"branch_gain": 0.3})

    @jax.jit
    @jax.vmap
    def decode(source, end):
        return rc.network.greedy_decode(
            params, source, model_config, begin=BEGIN, end=end, max_len=6
        )

    params = draw_params(model_config, 5)
    sources = jnp.stack([SOURCES, SOURCES[::-1]])
    free = decode(sources, jnp.array([-1, -1])).tokens
    ends = free[:, 2]
    decoding = decode(sources, ends)
    for i, end in enumerate(ends.tolist()):
        first = free[i].tolist().index(end)
        assert decoding.tokens[i].tolist() == free[i, : first + 1].tolist() + [end] * (5 - first)
        assert decoding.exists[i].tolist() == [True] * (first + 1) + [False] * (5 - first)
    assert (~decoding.exists).any()
