"""Tokens of networks at initialisation, from a text or Gaussian: their flags and arithmetic."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lab import Flags, Options, content_hash, shared_flags
from experiments.lab.text_inputs import read_text, token_ids
from rank_collapse.network import embedding
from rank_collapse.network.config import TransformerConfig
from rank_collapse.printed import format_count
from rank_collapse.text import words


class TokenNetwork(NamedTuple):
    """The network at initialisation that the flags describe."""

    config: TransformerConfig
    ids: np.ndarray | None  # Token ids of the text; None for Gaussian tokens
    source: dict[str, str]  # What identifies the input


DTYPES = {"float32": jnp.float32, "float64": jnp.float64, "bfloat16": jnp.bfloat16}


def define_flags(flag_values: Flags) -> None:
    """Defines --inputs, --text, --num_tokens and --positions."""
    flag_values.define("enum", "inputs", "text", "Tokens.", ("text", "gaussian"))
    shared_flags.define_text(flag_values, "UTF-8 text (default: one that comes with the package).")
    flag_values.define("integer", "num_tokens", 64, "Tokens; fewer where the text is shorter.")
    flag_values.define(
        "enum", "positions", "sinusoidal", "Positions of text.", embedding.POSITION_KINDS
    )


def read_tokens(options: Options) -> tuple[np.ndarray | None, dict[str, str]]:
    """Reads the token ids of the text.

    Args:
        options: The flags.

    Returns:
        (the ids, {the name of an entry of config.json: the hash of the text}). For Gaussian tokens
        the ids are None, and there is no entry.

    Raises:
        ValueError: Flags that exclude each other, or fewer than two tokens.
    """
    if options.inputs == "gaussian":
        if options.text:
            raise ValueError("--text and --inputs=gaussian exclude each other")
        if options.num_tokens < 2:
            raise ValueError(f"num_tokens={options.num_tokens} is fewer than 2")
        return None, {}
    content = read_text(options.text) if options.text else words.default_text()
    ids, _ = token_ids(content, options.num_tokens)
    if len(ids) < options.num_tokens:
        print(
            f"the text has {format_count(len(ids), 'token')}, fewer than "
            f"num_tokens={options.num_tokens}"
        )
    return ids, {"text_sha256": content_hash(content.encode())}


def input_tokens(key: jax.Array, ids: np.ndarray | None, options: Options) -> jax.Array:
    """Draws X^0 [n, d] of one seed: Gaussian, or LayerNorm(embedding of the text + positions).

    Args:
        key: Random key of the seed.
        ids: Token ids of the text; None for Gaussian tokens.
        options: The flags of `define_flags`.
    """
    if ids is None:
        return jax.random.normal(key, (options.num_tokens, options.d_model))
    config = embedding.EmbeddingConfig(
        vocab_size=int(ids.max()) + 1,
        d_embed=options.d_model,
        positions=options.positions,
        num_positions=len(ids),
        # Tables are drawn from normal(0, 0.02); sines are as large as 1, so tokens must be too.
        scale=50.0 if options.positions == "sinusoidal" else 1.0,
    )
    params = embedding.init_embedding(key, config, options.d_model)
    return embedding.embed(params, jnp.asarray(ids), config)
