"""Networks and their weights from folders, models in memory, published names and configs.

An open checkpoint has its network, and layers that are read one by one.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rank_collapse.network import BlockParams, TransformerConfig, TransformerParams, as_batch
from rank_collapse.pretrained.checkpoint import Checkpoint, read_config
from rank_collapse.pretrained.drawn import RandomWeights
from rank_collapse.pretrained.entries import Entry, Settings, check_entry
from rank_collapse.pretrained.families import family_of
from rank_collapse.pretrained.family import Family
from rank_collapse.pretrained.hub import hub_folder, is_hub_name
from rank_collapse.pretrained.lazy import Stored, Table, Unembedding, values
from rank_collapse.pretrained.published import PUBLISHED
from rank_collapse.pretrained.tensors import LiveModel, is_model
from rank_collapse.pretrained.weights import CheckpointWeights, Weights

_BIASES = ("b_v", "b_o", "b_in", "b_out", "bias")


class OpenCheckpoint:
    """A model with weights that stay on disk until a layer is requested.

    Attributes:
        family: The `Family` of its `model_type`.
        settings: The entries of its config.json.
        layers: Its rows of parameters, `LazyLayers`.
        row_like: The shapes of one row's parameters, `BlockParams`.
        outside: `TransformerParams` without layers; its table of tokens is a `lazy.Table`.
    """

    def __init__(self, weights: Weights, family: Family, settings: Settings):
        """Checks names and shapes of all tensors, and reads the weights outside of the layers."""
        self.weights, self.family, self.settings = weights, family, settings
        self.config: TransformerConfig = family.config(settings, weights)
        shapes = family.params(weights.shapes(), settings, self.config)
        self.row_like: BlockParams = shapes.layers.row_like()
        found = family.params(weights, settings, self.config)
        self.layers, self.outside = found.layers, found.replace(layers=None)
        weights.checks = False  # layers are, on the device

    @property
    def is_causal_lm(self) -> bool:
        """Whether it is a causal language model, with a head for the next token."""
        return self.unembedding is not None

    @property
    def unembedding(self) -> Unembedding | None:
        """The language-model head, a `lazy.Table`; None where the family has none."""
        of = self.family.unembedding
        return None if of is None else of(self.weights, self.settings, self.config)

    @property
    def biased(self) -> bool:
        """Whether a layer or the final norm has a bias."""
        parts = vars(self.row_like).values()
        return any(
            getattr(part, name, None) is not None
            for part in (*parts, self.outside.final_norm)
            for name in _BIASES
        )

    def layer(self, index: int) -> BlockParams:
        """The parameters of one layer."""
        return values(self.layers.get(row_index(self.config, index)))

    def stored_layer(self, index: int, coming: int | None = None) -> Any:
        """`layer` as a tree of `lazy.Stored`; a thread begins to read the layer `coming`."""
        coming = None if coming is None else row_index(self.config, coming)
        return self.layers.get(row_index(self.config, index), coming)

    def entered(
        self, inputs: Mapping[str, Any]
    ) -> tuple[TransformerConfig, TransformerParams, dict[str, np.ndarray]]:
        """(config, parameters outside of the layers, inputs); of the embeddings, used tokens alone.

        Raises:
            ValueError: Arrays of different lengths, a token outside of the vocabulary, or more
                tokens than positions.
        """
        given = as_batch(inputs)
        config, outside, tables = self.config, self.outside, self.config.embedding
        x = given["x"]
        positions = 0 if tables is None else tables.num_positions
        if positions and x.ndim == 2 and x.shape[1] > positions:
            raise ValueError(f"{x.shape[1]} tokens are more than the {positions} positions")
        embedding = outside.embedding
        if embedding is not None and isinstance(embedding.tokens, Table):
            used = np.zeros(1, np.int64)
            if np.issubdtype(x.dtype, np.integer):
                wrong = x[(x < 0) | (x >= tables.vocab_size)]
                if wrong.size:
                    raise ValueError(
                        f"token id {wrong.flat[0]} is not below vocab_size={tables.vocab_size}"
                    )
                used, places = np.unique(x, return_inverse=True)
                given["x"] = places.reshape(x.shape).astype(np.int32)
            rows = jnp.asarray(embedding.tokens.rows(used)).astype(self.weights.dtype)
            outside = outside.replace(embedding=embedding.replace(tokens=rows))
            config = config.replace(embedding=tables.replace(vocab_size=len(used)))
        return config, outside, given


class InMemory:
    """A network in memory for `stream`: the same passes, layer by layer."""

    def __init__(self, params: TransformerParams, config: TransformerConfig):
        self.config, self.outside = config, params.replace(layers=None)
        self.layers = _HeldLayers(params.layers)
        self.row_like = jax.eval_shape(lambda a: jax.tree.map(lambda a: a[0], a), params.layers)

    def stored_layer(self, index: int, coming: int | None = None) -> Any:
        """One layer's parameters as a tree of `lazy.Stored`."""
        return self.layers.get(row_index(self.config, index))

    def entered(
        self, inputs: Mapping[str, Any]
    ) -> tuple[TransformerConfig, TransformerParams, dict[str, np.ndarray]]:
        """(config, parameters outside of the layers, inputs)."""
        return self.config, self.outside, as_batch(inputs)


class _HeldLayers:
    """The rows of a stack in memory."""

    def __init__(self, stack: BlockParams):
        self.stack = stack

    def get(self, row: int) -> Any:
        """One row as a tree of `Stored`."""
        return jax.tree.map(lambda a: Stored(a[row], tuple(range(a.ndim - 1))), self.stack)

    def drop(self) -> None:
        """Nothing: the stack is the caller's."""


Source = OpenCheckpoint | InMemory


def row_index(config: TransformerConfig, layer: int) -> int:
    """The row of parameters that a layer has."""
    return config.layer_map[layer] if config.layer_map else layer


# Models of images and text, of which the language model is read.
TEXT_PARTS = {"gemma3": "gemma3_text"}


def settings_of(source: Any, part: str | None = None) -> Settings:
    """The entries of a config.json, completed by the family's defaults.

    Args:
        source: The name of one of `PUBLISHED`, a checkpoint folder (a `Path` where it has such a
            name), "hf:" and a name on the hub (see `hub`), or a dictionary with the entries of a
            config.json, `model_type` among them.
        part: "encoder" or "decoder" of a model that has both (T5); its encoder by default.

    Raises:
        FileNotFoundError: No such folder, or no config.json in it.
        ValueError: An unknown model type, or a part that the model does not have.
    """
    if is_hub_name(source):
        source = hub_folder(source)
    if not isinstance(source, dict | str | os.PathLike):
        raise ValueError(
            f"a {type(source).__name__} is not a checkpoint folder, a config dictionary or a model "
            "of transformers with .config and .state_dict(); for other models, rc.profile measures "
            "hidden states"
        )
    if isinstance(source, dict):
        given = source
    elif source in PUBLISHED:
        given = PUBLISHED[source]
    else:
        given = read_config(source)
    model_type = given.get("model_type")
    if isinstance(model_type, str) and model_type in TEXT_PARTS:
        check_entry("text_config", given.get("text_config"), Entry(None, (dict,)))
        given = given["text_config"] | {"model_type": TEXT_PARTS[model_type]}
    return family_of(given.get("model_type")).settings(given, part)


def config_of(source: Any, part: str | None = None) -> TransformerConfig:
    """The network that a folder, a published name or a config dictionary describes."""
    settings = settings_of(source, part)
    return family_of(settings["model_type"]).config(settings)


def load(
    folder: Any, *, part: str | None = None, dtype: Any = jnp.float32
) -> tuple[TransformerConfig, TransformerParams]:
    """The network of a checkpoint folder, or of a model of `transformers`, with its weights.

    Heads and poolers are not read. Weights are read once; the folder is only read.

    Args:
        folder: Holds config.json and model.safetensors, pytorch_model.bin, or shards of either.
            Or "hf:" and a name on the hub, or a model in memory, with the `config` and
            `state_dict()` of `transformers`.
        part: "encoder" or "decoder" of a model that has both; its encoder by default.
        dtype: Dtype of the parameters.

    Returns:
        (config, params), as `rank_collapse.apply` takes them.

    Raises:
        FileNotFoundError: A folder or file that does not exist.
        ValueError: A file cut short, a tensor missing or of another shape than the config
            implies, an unknown model type or an unsupported variant.
    """
    weights, family, settings = _read(folder, part, dtype, lazy=False)
    config = family.config(settings, weights)
    return config, family.params(weights, settings, config)


def open_checkpoint(
    folder: Any, *, part: str | None = None, dtype: Any = jnp.float32
) -> OpenCheckpoint:
    """`load` of a checkpoint whose layers are read one by one, for models larger than memory.

    Every tensor's name and shape is checked here; values are read when `stream`, or
    `OpenCheckpoint.layer`, asks for them.

    Raises:
        FileNotFoundError, ValueError: As `load`, of any layer, before one is read.
    """
    return OpenCheckpoint(*_read(folder, part, dtype, lazy=True))


def open_random(
    source: Any, key: Any, *, part: str | None = None, dtype: Any = jnp.float32
) -> OpenCheckpoint:
    """`random_like` whose layers are drawn one by one, with the same values."""
    return OpenCheckpoint(*_drawn(source, key, part, dtype, lazy=True))


def random_like(
    source: Any, key: Any, *, part: str | None = None, dtype: Any = jnp.float32
) -> tuple[TransformerConfig, TransformerParams]:
    """The architecture of `source` at its own initialisation: (config, params).

    Args:
        source: As in `settings_of`; of a checkpoint folder its config.json alone is read.
        part, dtype: As in `load`.
    """
    weights, family, settings = _drawn(source, key, part, dtype, lazy=False)
    config = family.config(settings, weights)
    return config, family.params(weights, settings, config)


def _read(folder, part, dtype, *, lazy):
    """(weights, family, settings) of a folder, a name on the hub or a model in memory."""
    if is_model(folder):
        given, tensors = folder.config.to_dict(), LiveModel(folder)
    elif is_hub_name(folder):
        given = hub_folder(folder)
    else:  # a path is never the name of a published model
        given = Path(folder) if isinstance(folder, str) else folder
    settings = settings_of(given, part)
    family = family_of(settings["model_type"])
    family.config(settings)  # what it does not support is said before weights are looked for
    if not is_model(folder):
        tensors = Checkpoint(given)
    return CheckpointWeights(tensors, family.anchors, dtype, lazy=lazy), family, settings


def _drawn(source, key, part, dtype, *, lazy):
    """(weights, family, settings) of an architecture at its own initialisation."""
    settings = settings_of(source, part)
    family = family_of(settings["model_type"])
    weights = RandomWeights(key, lambda name: family.draw(name, settings), dtype, lazy=lazy)
    return weights, family, settings
