"""A family of models as a table: the entries of its config.json, and where its tensors lie.

The names that such a table uses are imported from here, wherever they are defined.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

from rank_collapse.checks import refuse_if
from rank_collapse.network.config import DEFAULTS, TransformerConfig
from rank_collapse.network.embedding import EmbeddingConfig
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.pretrained.entries import (
    ANY_LENGTH as ANY_LENGTH,
    MAX_LAYERS as MAX_LAYERS,
    Entry as Entry,
    Settings as Settings,
    as_entry,
    check_allowed,
    check_entry,
    count_entry as count_entry,
    local_theta as local_theta,
    num_positions as num_positions,
    rotary_entry as rotary_entry,
    rotary_fields as rotary_fields,
)
from rank_collapse.pretrained.mapping import (
    Map as Map,
    NamedTensor as NamedTensor,
    Names as Names,
    Reader,
    take_tensor as take_tensor,
)
from rank_collapse.pretrained.random_weights import (
    Draw as Draw,
    Initialisation as Initialisation,
)
from rank_collapse.pretrained.weights import Unembedding, Weights as Weights
from rank_collapse.printed import quote_value

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
    "linear": "identity",
}
GATES = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "relu": "reglu",
    "gelu_new": "geglu_tanh",
    "gelu_pytorch_tanh": "geglu_tanh",
    "gelu_fast": "geglu_tanh",
}
# What most families call their sizes.
USUAL_READS = {
    "depth": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "mlp": "hidden_act",
}
_NORMAL = Initialisation()
_USUAL = {"attention_skip": True, "mlp_skip": True, "init": "bert"}
_EMBEDDING_FIELDS = {f.name for f in dataclasses.fields(EmbeddingConfig)} - DEFAULTS.keys()


@dataclasses.dataclass(frozen=True)
class Family:
    """One `model_type`.

    Attributes:
        model_type: See config.json.
        entries: The entries of config.json that are read: their defaults, or `Entry`s.
        reads: {field of `TransformerConfig` or, if it has none of that name, of
            `EmbeddingConfig`: the entry it is}; "depth", "num_heads" and "d_model" among them.
        names: Names of the tensors; a function of (weights, settings) if they differ.
        anchors: Ends of tensor names, one of which is in every checkpoint; the text before it is
            the prefix of all names.
        fields, embedding: Fields of `TransformerConfig` and `EmbeddingConfig` that are the same in
            all models.
        computed: settings → fields that follow from several entries, "embedding" a dictionary.
        allowed: {entry: its values for which there is a network}.
        gated: Whether the MLP has a gate, whose activation the entry of `reads["mlp"]` names.
        interleaved: Whether rotary positions turn neighbouring features; ours turn two halves.
        biases: {kind of map, as in `mapping`: whether it has a bias, or the entry that decides it};
            "" for all others. By default LayerNorms have biases, and heads ("head") do not.
        gain_offset: Number to add to the stored gains of norms.
        init: (tensor name, settings, layers) → how the tensor is drawn at initialisation.
        head: The table of a causal language model where it differs from the table of the tokens;
            None where there is no such head, or one that is not linear.
        masked_head: For a masked language model: the stem of the head's transform, and the name of
            the bias of its logits; None where there is none.
        sizes: settings → sizes of the family's own axes.
        rows: settings → the text in the stem's braces, row by row; None for 0 .. depth − 1.
        counted: {stem: the entry that counts it}, where this is not the depth.
        parts: The networks of one checkpoint, where there are several; the first is the default.
    """

    model_type: str
    entries: Mapping[str, object]
    reads: Mapping[str, str]
    names: Names | Callable[[Weights, Settings], Names]
    anchors: tuple[str, ...]
    fields: Mapping[str, object] = dataclasses.field(default_factory=dict)
    embedding: Mapping[str, object] = dataclasses.field(default_factory=dict)
    computed: Callable[[Settings], dict[str, object]] = lambda settings: {}
    allowed: Mapping[str, tuple[object, ...]] = dataclasses.field(default_factory=dict)
    gated: bool = False
    interleaved: bool = False
    biases: Mapping[str, bool | str] = dataclasses.field(default_factory=dict)
    gain_offset: float = 0.0
    init: Callable[[str, Settings, int], Draw] = _NORMAL
    head: str | None = None
    masked_head: tuple[str, str] | None = None
    sizes: Callable[[Settings], dict[str, int]] = lambda settings: {}
    rows: Callable[[Settings], Sequence[tuple[int, ...]]] | None = None
    counted: Mapping[str, str] = dataclasses.field(default_factory=dict)
    parts: tuple[str, ...] = ()

    def derive(self, model_type: str, **changes: object) -> "Family":
        """Derive another family: a dictionary adds to this one's (None takes away), others replace.

        Args:
            model_type: Model type of the new family.
            **changes: Attributes of `Family`.
        """
        for name, change in changes.items():
            attribute = getattr(self, name)
            if isinstance(attribute, dict):
                combined = attribute | change
                changes[name] = {key: value for key, value in combined.items() if value is not None}
        return dataclasses.replace(self, model_type=model_type, **changes)

    @functools.cached_property
    def schema(self) -> dict[str, Entry]:
        """Return the entries; those that count layers, heads or features are at least 1."""
        schema = {name: as_entry(entry) for name, entry in self.entries.items()}
        for field in ("num_heads", "d_model"):
            schema[self.reads[field]] = schema[self.reads[field]]._replace(least=1)
        for name in (self.reads["depth"], *self.counted.values()):
            schema[name] = schema[name]._replace(least=1, most=MAX_LAYERS)
        return schema

    def complete_settings(
        self, config_json: Mapping[str, object], part: str | None = None
    ) -> Settings:
        """Complete the entries of a config.json by the defaults and, of several parts, the part.

        Args:
            config_json: Content of config.json.
            part: One of `parts`; None for the first.

        Raises:
            ValueError: A quantised checkpoint, a part that the family does not have, an entry of
                another type than its own or beyond its limits.
        """
        refuse_if(
            part is not None and part not in self.parts,
            f"part={part!r} of a {self.model_type} model is not one of {self.parts}",
        )
        quantised = config_json.get("quantization_config")
        if quantised:
            method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
            raise ValueError(
                f"a checkpoint quantised by {quote_value(method)} is not supported: save it in "
                "bfloat16 or float32 (and where the weights are no longer quantised, delete the "
                "entry quantization_config of config.json)"
            )
        settings = {name: entry.default for name, entry in self.schema.items()} | config_json
        for name, entry in self.schema.items():
            if settings[name] is None and not entry.nullable:  # null means the default
                settings[name] = entry.default
            if settings[name] is None:
                continue
            check_entry(name, settings[name], entry)
            if entry.kinds == (float,):
                settings[name] = float(settings[name])
        if self.parts:
            settings["part"] = self.parts[0] if part is None else part
        return settings

    def make_config(self, settings: Settings) -> TransformerConfig:
        """Convert the entries to the network that they describe.

        Args:
            settings: Result of `complete_settings`.

        Raises:
            ValueError: A value for which there is no network.
        """
        settings = self._select_entries(settings)
        for name, values in self.allowed.items():
            check_allowed(settings, name, values)
        read = {field: settings[name] for field, name in self.reads.items()}
        if "mlp" in read:
            read["mlp"] = self._mlp_kind(settings, self.reads["mlp"])
        tables = {name: read.pop(name) for name in _EMBEDDING_FIELDS & read.keys()}
        fields = {**_USUAL, **self.fields, **read, **self.computed(settings)}
        tables = {"d_embed": read["d_model"], **self.embedding, **tables}
        tables |= fields.pop("embedding", {})
        if tables.get("norm", True):
            tables["norm_eps"] = fields["norm_eps"]
        self._count_key_groups(settings)
        fields["family"] = self.model_type
        return TransformerConfig(embedding=EmbeddingConfig(**tables), **fields)

    def read_params(
        self, weights: Weights, settings: Settings, config: TransformerConfig
    ) -> TransformerParams:
        """Read the network's parameters from the model's tensors, without heads and poolers.

        Args:
            weights: The model's tensors.
            settings: Settings from `complete_settings`.
            config: Configuration from `make_config`.

        Raises:
            ValueError: A tensor that is missing or of another shape than the config implies, or
                more layers in the file than in the config.
        """
        settings = self._select_entries(settings)
        names, sizes = self._tensor_names(weights, settings), self.sizes(settings)
        for stem, name in self.counted.items():
            weights.check_depth(stem, settings[name])
        if not self.counted:
            weights.check_depth(names.stem, config.depth)
        sizes = {"g": self._count_key_groups(settings), **sizes}
        biased = functools.partial(self._has_bias, settings, config)
        reader = Reader(weights, config, sizes, biased, self.gain_offset, self.interleaved)
        rows = [(i,) for i in range(config.depth)] if self.rows is None else self.rows(settings)
        layers = weights.stack(rows, functools.partial(reader.read_layer, names))
        return TransformerParams(layers=layers, **reader.read_outside(names))

    def read_unembedding(
        self, weights: Weights, settings: Settings, config: TransformerConfig
    ) -> Unembedding | None:
        """Read a causal language model's head: its own table, or the table of the tokens.

        Args:
            weights, settings, config: See `read_params`.

        Returns:
            None where the family or the checkpoint has no such head.
        """
        if self.head is None:
            return None
        settings = self._select_entries(settings)
        tokens = self._tensor_names(weights, settings).outside["embedding.tokens"]
        # A model in memory calls every head as most files do.
        names = (tokens,) if settings["tie_word_embeddings"] else (self.head, "lm_head.weight")
        name = next(filter(weights.has_tensor, names), None)
        if name is None:
            return None
        words, bias = config.embedding.vocab_size, None
        if self.biases.get("head"):
            bias = weights.take(f"{self.head.removesuffix('.weight')}.bias", words)
        table = weights.table(name, words, config.d_model)
        scale = settings.get("logit_scale", 1.0) / settings.get("logits_scaling", 1.0)
        return Unembedding(table, bias, settings.get("final_logit_softcapping") or None, scale)

    def tensor_law(self, name: str, settings: Settings) -> Draw:
        """Return how a tensor is drawn at initialisation.

        Args:
            name: Name of the tensor.
            settings: Result of `complete_settings`.
        """
        return self.init(name, settings, settings[self.reads["depth"]])

    def _select_entries(self, settings):
        """Select the entries that the family has; others of a file are neither checked nor read."""
        names = (*self.schema, "model_type", "part")
        return {name: settings[name] for name in names if name in settings}

    def _tensor_names(self, weights, settings):
        """Return the names of the tensors, which may depend on the weights and the settings."""
        return self.names(weights, settings) if callable(self.names) else self.names

    def _mlp_kind(self, settings, name):
        """Return the MLP kind of the activation that an entry of config.json names."""
        if self.gated:
            check_allowed(settings, name, tuple(GATES))
            return GATES[settings[name]]
        return activation_name(settings[name])

    def _count_key_groups(self, settings):
        """Return the number of groups of heads that share keys and values."""
        heads = settings[self.reads["num_heads"]]
        groups = settings.get("num_key_value_heads") or heads
        refuse_if(
            heads % groups,
            f"num_key_value_heads={groups} does not divide num_attention_heads={heads}",
        )
        return groups

    def _has_bias(self, settings, config, kind):
        """Return whether a kind of map or norm has a bias, which an entry of the settings may
        decide.

        Args:
            settings: Settings of the model.
            config: The network.
            kind: Kind of the map, as in `biases`, or "norm". By default LayerNorms have one,
                RMSNorms have none, and other maps follow the kind "".
        """
        usual = config.norm == "layer" if kind == "norm" else self.biases.get("", True)
        bias = self.biases.get(kind, usual)
        return settings[bias] if isinstance(bias, str) else bias


def activation_name(name: str) -> str:
    """Return our name of an activation; one that is not known is an error."""
    refuse_if(
        name not in ACTIVATIONS,
        f"activation {quote_value(name)} is not one of {tuple(ACTIVATIONS)}",
    )
    return ACTIVATIONS[name]
