"""An open checkpoint: its network, and its layers, which are read one by one."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.input_checks import check_indices
from rank_collapse.network.inputs import as_batch
from rank_collapse.network.parameters import BlockParams, TransformerParams
from rank_collapse.pretrained.entries import Settings
from rank_collapse.pretrained.family import Family
from rank_collapse.pretrained.lazy import Stored, Table, Unembedding, stored_values
from rank_collapse.pretrained.masked_token import MaskedHead, read_head
from rank_collapse.pretrained.weights import Weights


class OpenCheckpoint:
    """A model with weights that stay on disk until a layer is requested.

    Attributes:
        family: The `Family` of its `model_type`.
        settings: The entries of its config.json.
        layers: Its rows of parameters, `LazyLayers`.
        outside: `TransformerParams` without layers; its table of tokens is a `lazy.Table`.
    """

    def __init__(self, weights: Weights, family: Family, settings: Settings):
        """Reads the weights outside of the layers."""
        self.weights, self.family, self.settings = weights, family, settings
        self.config: TransformerConfig = family.make_config(settings)
        params = family.read_params(weights, settings, self.config)
        self.layers, self.outside = params.layers, params.replace(layers=None)
        weights.checks = False  # layers are, on the device

    @property
    def has_random_weights(self) -> bool:
        """Returns whether its weights are drawn, and none are trained."""
        return self.weights.is_random

    @property
    def is_causal_lm(self) -> bool:
        """Returns whether it is a causal language model, with a head for the next token."""
        return self.unembedding is not None

    @property
    def unembedding(self) -> Unembedding | None:
        """Returns the language-model head, a `lazy.Table`; None where the family has none."""
        return self.family.read_unembedding(self.weights, self.settings, self.config)

    @property
    def masked_head(self) -> MaskedHead | None:
        """Returns the head of a masked language model (BERT, ALBERT); None where there is none."""
        return read_head(self.weights, self.family, self.settings, self.config)

    def layer(self, index: int) -> BlockParams:
        """Read the parameters of one layer."""
        return stored_values(self.layers.get(row_index(self.config, index)))

    def stored_layer(self, index: int, coming: int | None = None) -> Any:
        """Read `layer` as a tree of `lazy.Stored`; a thread begins to read the layer `coming`.

        Args:
            index: Index of the layer.
            coming: Arrays of the next layer, or None.
        """
        coming = None if coming is None else row_index(self.config, coming)
        return self.layers.get(row_index(self.config, index), coming)

    def prepare_batch(
        self, inputs: Mapping[str, Any]
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

    def stored_layer(self, index: int, coming: int | None = None) -> Any:
        """Returns one layer's parameters from memory, where nothing is `coming` to be read."""
        return self.layers.get(row_index(self.config, index))

    def prepare_batch(
        self, inputs: Mapping[str, Any]
    ) -> tuple[TransformerConfig, TransformerParams, dict[str, np.ndarray]]:
        """Returns (config, parameters outside of the layers, inputs) for `stream`."""
        batch = as_batch(inputs)
        check_indices(batch, self.config)
        return self.config, self.outside, batch


class _HeldLayers:
    """The rows of a stack in memory."""

    def __init__(self, stack: BlockParams):
        self.stack = stack

    def get(self, row: int) -> Any:
        """Returns one row as a tree of `Stored`."""
        return jax.tree.map(lambda a: Stored(a[row], tuple(range(a.ndim - 1))), self.stack)

    def drop(self) -> None:
        """Keeps the stack: it is the caller's."""


Source = OpenCheckpoint | InMemory


def row_index(config: TransformerConfig, layer: int) -> int:
    """Returns the row of parameters that a layer has."""
    return config.layer_map[layer] if config.layer_map else layer
