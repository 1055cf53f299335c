"""Small encoder-decoders with drawn parameters."""

import jax
import jax.numpy as jnp
import numpy as np

import rank_collapse as rc
from rank_collapse.network import encoder_decoder
from rank_collapse.network.embedding import EmbeddingConfig


def config(encoder=(), decoder=(), *, shared=(), embedding=(), **fields):
    """A small encoder-decoder of 9 token ids."""
    table = {"vocab_size": 9, "d_embed": 16, "positions": "sinusoidal", "norm": False}
    half = {
        "depth": 2,
        "num_heads": 2,
        "d_model": 16,
        "d_ff": 20,
        "mlp": "relu",
        "mlp_skip": True,
        "attention_skip": True,
        "norm_placement": "post",
        "embedding": EmbeddingConfig(**(table | dict(embedding))),
    } | dict(shared)
    decoder_fields = {"cross_attention": True, "mask": "causal"}
    return rc.network.EncoderDecoderConfig(
        rc.TransformerConfig(**(half | dict(encoder))),
        rc.TransformerConfig(**(half | decoder_fields | dict(decoder))),
        **fields,
    )


def draw_params(model_config, seed=0):
    """Draws parameters with numpy, which compiles nothing, large enough that tokens matter."""
    shapes = jax.eval_shape(lambda: encoder_decoder.init(jax.random.key(0), model_config))
    rng = np.random.default_rng(seed)
    return jax.tree.map_with_path(
        lambda path, like: jnp.asarray(
            path[-1].name.endswith("gain") + 0.3 * rng.normal(size=like.shape), jnp.float32
        ),
        shapes,
    )
