"""Masked tokens of a checkpoint: the language-model head of BERT and ALBERT.

Axis letters: b examples, n tokens, d width, e width of the token embedding.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse import struct
from rank_collapse.network import layers
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.layers import NormParams
from rank_collapse.network.precision import full_precision
from rank_collapse.pretrained.entries import Settings, check_allowed
from rank_collapse.pretrained.family import Family
from rank_collapse.pretrained.lazy import Unembedding
from rank_collapse.pretrained.weights import Weights


class MaskedHead(struct.Struct):
    """Logits N(φ(Y W + b)) Eᵀ + c of the output Y [n, d], E the table of the tokens [vocab, e]."""

    weight: Any  # W [d, e]
    bias: Any  # b [e]
    norm: NormParams  # N, each [e]
    unembedding: Unembedding  # E, a `lazy.Table`, and c
    activation: str = struct.static("gelu")  # φ
    eps: float = struct.static(1e-12)  # Of N

    @full_precision
    def read(self, states: Float[Any, "*b n d"]) -> Float[Array, "*b n e"]:
        """Compute N(φ(Y W + b)) of outputs: what `next_token.token_losses` applies the table to.

        Args:
            states: Y [..., n, d], after the final norm.
        """
        states = jnp.asarray(states)
        hidden = states.reshape(-1, states.shape[-1]) @ self.weight + self.bias[None]
        hidden = layers.get_activation(self.activation).fn(hidden)
        return layers.apply_norm(self.norm, hidden, eps=self.eps).reshape(*states.shape[:-1], -1)


def read_head(
    weights: Weights, family: Family, settings: Settings, config: TransformerConfig
) -> MaskedHead | None:
    """Read the head of a masked language model (Devlin et al. 2019, task 1); None without one.

    Args:
        weights, family, settings, config: Weights, family, settings and configuration of the model.

    Raises:
        ValueError: A head whose table is not that of the tokens, or tensors of a wrong shape.
    """
    if family.masked_head is None or not weights.has_tensor(
        f"{family.masked_head[0]}.dense.weight"
    ):
        return None
    check_allowed({"tie_word_embeddings": True} | settings, "tie_word_embeddings", (True,))
    stem, logit_bias = family.masked_head
    e = config.embedding.d_embed
    tensors = {
        name: jnp.asarray(weights.take(f"{stem}.{name}", *shape), weights.dtype)
        for name, shape in {
            "dense.weight": (e, config.d_model),
            "dense.bias": (e,),
            "LayerNorm.weight": (e,),
            "LayerNorm.bias": (e,),
        }.items()
    }
    words = config.embedding.vocab_size
    table = weights.table("embeddings.word_embeddings.weight", words, e)
    return MaskedHead(
        weight=tensors["dense.weight"].T,
        bias=tensors["dense.bias"],
        norm=NormParams(tensors["LayerNorm.weight"], tensors["LayerNorm.bias"]),
        unembedding=Unembedding(table, weights.take(logit_bias, words)),
        activation=config.mlp,
        eps=config.norm_eps,
    )
