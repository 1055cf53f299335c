"""An open checkpoint: its layers one by one, batches, and its head for masked tokens.

Axis letters: b examples, n tokens, d width, e width of the token embedding.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rank_collapse import struct
from rank_collapse.annotations import AnyArray, Leaf, Tree
from rank_collapse.checks import refuse_if
from rank_collapse.network import layers
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.input_checks import check_indices
from rank_collapse.network.inputs import as_batch
from rank_collapse.network.layers import NormParams
from rank_collapse.network.parameters import BlockParams, TransformerParams
from rank_collapse.network.precision import full_precision
from rank_collapse.pretrained.entries import Settings, check_allowed
from rank_collapse.pretrained.family import Family
from rank_collapse.pretrained.weights import Stored, Table, Unembedding, Weights, stored_values


class MaskedHead(struct.Struct):
    """Logits N(φ(Y W + b)) Eᵀ + c of the output Y [n, d], E the table of the tokens [vocab, e].

    Attributes:
        weight, bias: W [d, e] and b [e].
        norm: N, each [e].
        unembedding: E, a `Table`, and c.
        activation, eps: φ, and the eps of N.
    """

    weight: Leaf
    bias: Leaf
    norm: NormParams
    unembedding: Unembedding
    activation: str = struct.static("gelu")
    eps: float = struct.static(1e-12)

    @full_precision
    def read(self, states: Float[AnyArray, "*b n d"]) -> Float[Array, "*b n e"]:
        """Compute N(φ(Y W + b)) of outputs: what `predictions.token_losses` applies the table to.

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
        ValueError: A head whose table differs from the table of the tokens, or tensors of a wrong
            shape.
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


COMPARED_ROWS = 32  # of two tables: training changes every row of a head


def check_tied(weights: Weights, family: Family, table: Table) -> None:
    """Checks that a checkpoint whose head is the table of the tokens has no other head.

    Args:
        weights, family: Weights and family of the model.
        table: The table of the tokens.

    Raises:
        ValueError: It has one; versions of transformers differ in which of the two they use.
    """
    for name in dict.fromkeys((family.head, "lm_head.weight")):
        if weights.is_random or not weights.has_tensor(name):
            continue
        other, (words, _) = weights.table(name, *table.shape), table.shape
        rows = np.unique(np.linspace(0, words - 1, COMPARED_ROWS).round().astype(int))
        refuse_if(
            not np.array_equal(other.rows(rows), table.rows(rows)),
            f"{name} differs from the table of the tokens, but tie_word_embeddings is true in "
            "config.json: transformers uses the table before version 5, and the head since then; "
            "set tie_word_embeddings to false to use the head, or delete the head from the file",
        )


class OpenCheckpoint:
    """A model with weights that stay on disk until a layer is requested.

    Attributes:
        family: The `Family` of its `model_type`.
        settings: The entries of its config.json.
        layers: Its rows of parameters, `LazyLayers`.
        outside: `TransformerParams` without layers; its table of tokens is a `Table`.
    """

    def __init__(self, weights: Weights, family: Family, settings: Settings):
        """Read the weights outside of the layers."""
        self.weights, self.family, self.settings = weights, family, settings
        self.config: TransformerConfig = family.make_config(settings)
        params = family.read_params(weights, settings, self.config)
        self.layers, self.outside = params.layers, params.replace(layers=None)
        weights.checks = False  # layers are, on the device

    @property
    def has_random_weights(self) -> bool:
        """Return whether its weights are drawn, and none are trained."""
        return self.weights.is_random

    @property
    def is_causal_lm(self) -> bool:
        """Return whether it is a causal language model, with a head for the next token."""
        return self.unembedding is not None

    @property
    def unembedding(self) -> Unembedding | None:
        """Returns the language-model head, a `Table`; None where the family has none."""
        head = self.family.read_unembedding(self.weights, self.settings, self.config)
        if head is not None and self.settings["tie_word_embeddings"]:
            check_tied(self.weights, self.family, head.table)
        return head

    @property
    def masked_head(self) -> MaskedHead | None:
        """Return the head of a masked language model (BERT, ALBERT); None where there is none."""
        return read_head(self.weights, self.family, self.settings, self.config)

    def layer(self, index: int) -> BlockParams:
        """Read the parameters of one layer."""
        return stored_values(self.layers.get(row_index(self.config, index)))

    def stored_layer(self, index: int, coming: int | None = None) -> Tree:
        """Read the layer as a tree of `Stored`; a thread begins to read the next layer.

        Args:
            index: Index of the layer.
            coming: Index of the next layer; None to read nothing ahead.
        """
        coming = None if coming is None else row_index(self.config, coming)
        return self.layers.get(row_index(self.config, index), coming)

    def prepare_batch(
        self, inputs: Mapping[str, object]
    ) -> tuple[TransformerConfig, TransformerParams, dict[str, np.ndarray]]:
        """Prepare a batch for `stream`: of the embedding only the rows of its tokens are read.

        Args:
            inputs: See `stream`.

        Returns:
            (config, parameters outside of the layers, inputs).

        Raises:
            ValueError: Arrays of different lengths, a token outside of the vocabulary, or more
                tokens than positions.
        """
        batch = as_batch(inputs)
        config, outside, tables = self.config, self.outside, self.config.embedding
        x = batch["x"]
        check_indices(batch, config)
        positions = 0 if tables is None else tables.num_positions
        if positions and x.ndim == 2 and x.shape[1] > positions:
            raise ValueError(f"{x.shape[1]} tokens are more than the {positions} positions")
        embedding = outside.embedding
        if embedding is not None and isinstance(embedding.tokens, Table):
            used = np.zeros(1, np.int64)
            if np.issubdtype(x.dtype, np.integer):
                used, places = np.unique(x, return_inverse=True)
                batch["x"] = places.reshape(x.shape).astype(np.int32)
            rows = jnp.asarray(embedding.tokens.rows(used)).astype(self.weights.dtype)
            outside = outside.replace(embedding=embedding.replace(tokens=rows))
            config = config.replace(embedding=tables.replace(vocab_size=len(used)))
        return config, outside, batch


class InMemory:
    """A network in memory for `stream`: the same passes, layer by layer."""

    def __init__(self, params: TransformerParams, config: TransformerConfig):
        self.config, self.outside = config, params.replace(layers=None)
        self.layers = _HeldLayers(params.layers)

    def stored_layer(self, index: int, coming: int | None = None) -> Tree:
        """Return one layer's parameters from memory; nothing is read ahead."""
        return self.layers.get(row_index(self.config, index))

    def prepare_batch(
        self, inputs: Mapping[str, object]
    ) -> tuple[TransformerConfig, TransformerParams, dict[str, np.ndarray]]:
        """Return (config, parameters outside of the layers, inputs) for `stream`."""
        batch = as_batch(inputs)
        check_indices(batch, self.config)
        return self.config, self.outside, batch


class _HeldLayers:
    """The rows of a stack in memory."""

    def __init__(self, stack: BlockParams):
        self.stack = stack

    def get(self, row: int) -> Tree:
        """Return one row as a tree of `Stored`."""
        return jax.tree.map(lambda a: Stored(a[row], tuple(range(a.ndim - 1))), self.stack)

    def drop(self) -> None:
        """Keep the stack, which belongs to the caller."""


Source = OpenCheckpoint | InMemory


def row_index(config: TransformerConfig, layer: int) -> int:
    """Return the row of parameters that a layer has."""
    return config.layer_map[layer] if config.layer_map else layer
