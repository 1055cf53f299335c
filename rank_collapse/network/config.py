"""The configuration of the one network: its sizes, and a part for each subject.

Its presets are the paper's four curves.
"""

import dataclasses
import numbers
from typing import Literal, get_args

import jax

from rank_collapse import checks, struct
from rank_collapse.annotations import Number
from rank_collapse.network.attention_config import AttentionConfig
from rank_collapse.network.embedding import EmbeddingConfig
from rank_collapse.network.layers import MLPConfig, ResidualConfig, Routing
from rank_collapse.network.positions import PositionConfig

Init = Literal["lecun", "xavier", "bert", "reference"]
INITS = get_args(Init)
PARTS = (AttentionConfig, PositionConfig, ResidualConfig, MLPConfig)


class TransformerConfig(AttentionConfig, PositionConfig, ResidualConfig, MLPConfig):
    """A network of attention and MLPs; every architecture and ablation is a choice of these fields.

        config = TransformerConfig(depth=12, num_heads=12, d_model=768, mlp="gelu", mask="causal")
        config = config.replace(attention_skip=True)

    It also has the fields of `AttentionConfig`, `PositionConfig`, `ResidualConfig` and `MLPConfig`,
    which are defined with the code that reads them.

    A pytree: the floats `skip_gain`, `branch_gain`, `temperature`, ... are leaves. A jitted
    function that takes a config as an ordinary argument does not recompile when one of them
    changes, and vmap may sweep them. Everything else is static and part of the treedef. All
    fields are hashable when the floats are Python numbers, so static arguments work too.

    Attributes:
        depth, num_heads, d_model: L, H and d.
        num_kv_heads: Groups of heads that share keys and values as `init` draws them, a divisor of
            H (Ainslie et al. 2023); None for H.
        d_qk, d_v: Per-head widths; None for d / H, which then must be an integer.
        embedding: How tokens or vectors become hidden states; None when inputs are [n, d].
        cross_attention: Decoder layers that attend to a memory.
        layer_map: Parameter row of each layer, () for one each; (0,)·depth shares one (ALBERT).
        init: "lecun" (variance 1/fan-in), "xavier" (2/(fan-in + fan-out)), "bert" (normal 0.02) or
            "reference" (normal 0.02, value and output projection uniform(±1/√fan-in)).
        unroll: Layers unrolled in the scan over depth: compile time against run time.
        family: The `model_type` of the checkpoint that it describes, None for another network; only
            `surgery` reads it.
        init_gain: Multiplies the initial values of V, O and MLP; a number. Only `init` reads it.
    """

    depth: int = struct.static(1)
    num_heads: int = struct.static(1)
    d_model: int = struct.static(64)
    d_qk: int | None = struct.static(None)
    d_v: int | None = struct.static(None)
    num_kv_heads: int | None = struct.static(None)
    embedding: EmbeddingConfig | None = struct.static(None)
    cross_attention: bool = struct.static(False)
    layer_map: tuple[int, ...] = struct.static(())
    init: Init = struct.static("lecun")
    unroll: int = struct.static(1)
    family: str | None = struct.static(None)
    init_gain: Number = 1.0

    def __repr__(self) -> str:
        changed = [f"{n}={v!r}" for n, v in flat(self).items() if v is not DEFAULTS[n]]
        return f"TransformerConfig({', '.join(changed)})"

    def __post_init__(self):
        struct.check_static_fields(
            self,
            **dict.fromkeys(("d_model", "d_qk", "d_v", "d_ff", "rotary_width"), 1),
            **dict.fromkeys(("depth", "num_heads", "num_kv_heads", "unroll"), 1),
        )
        for part in PARTS:
            part.__post_init__(self)
        checks.check_choices(self, init=INITS)
        checks.refuse_if(
            not isinstance(self.embedding, EmbeddingConfig | None),
            f"embedding={self.embedding!r} is not an EmbeddingConfig",
        )
        h, groups, depth = self.num_heads, self.num_kv_heads, self.depth
        if groups and h % groups:
            raise ValueError(f"num_kv_heads={groups} does not divide num_heads={h}")
        if self.d_model % h and None in (self.d_qk, self.d_v):
            raise ValueError(
                f"num_heads={h} does not divide d_model={self.d_model}; give d_qk and d_v"
            )
        for name in ("windows", "rotary_layers", "layer_map"):
            values = getattr(self, name)
            fits = isinstance(values, tuple) and len(values) in (0, depth)
            checks.refuse_if(not fits, f"{name}={values} is not a tuple of depth={depth} entries")
            for value in values:
                checks.check_whole(name, int(value) if name == "rotary_layers" else value, 0)
        if self.layer_map and set(self.layer_map) != set(range(self.num_rows)):
            raise ValueError(f"layer_map={self.layer_map} leaves out a row of the parameters")
        if self.position == "rotary":
            self.check_rotary(self.qk_width)
        if self.num_experts:
            self.check_experts(self.ff_width)

    @property
    def qk_width(self) -> int:
        """Per-head width of queries and keys."""
        return self.d_qk if self.d_qk is not None else self.d_model // self.num_heads

    @property
    def rotated_width(self) -> int:
        """Number of features of each head's queries and keys that rotary positions rotate."""
        return self.rotary_width if self.rotary_width is not None else self.qk_width

    @property
    def routing(self) -> Routing | None:
        """How the router chooses the MLP's units for each token; None where all are used."""
        if not self.num_experts:
            return None
        return Routing(self.num_experts, self.experts_per_token, self.router, self.d_shared)

    @property
    def v_width(self) -> int:
        """Per-head width of values."""
        return self.d_v if self.d_v is not None else self.d_model // self.num_heads

    @property
    def ff_width(self) -> int:
        """Hidden units of the MLP."""
        return self.d_ff if self.d_ff is not None else 4 * self.d_model

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of sublayers in a layer, in order."""
        exists = {"attention": True, "cross": self.cross_attention, "mlp": self.mlp != "none"}
        return tuple(kind for kind in exists if exists[kind])

    @property
    def num_rows(self) -> int:
        """Distinct layers: the length of the parameters' layer axis."""
        return max(self.layer_map) + 1 if self.layer_map else self.depth

    @property
    def first_layer_of_rows(self) -> tuple[int, ...]:
        """The first layer that uses each row of the parameters."""
        rows = self.layer_map or tuple(range(self.depth))
        return tuple(rows.index(row) for row in range(self.num_rows))


def check_config(config: object, name: str = "config") -> None:
    """Check that an argument is a network's configuration, since arguments may be in the wrong
    order.

    Args:
        config: The network.
        name: Name of the argument, for the message.

    Raises:
        ValueError: It is not a configuration, or one of its numbers or functions is invalid.
    """
    kind = type(config).__name__
    checks.refuse_if(
        not isinstance(config, TransformerConfig), f"{name} is a {kind}, not a TransformerConfig"
    )
    for field in ("normalise", "mix"):
        function = getattr(config, field)
        is_function = function is None or callable(function)
        checks.refuse_if(not is_function, f"{field}={function!r} is not a function")
    for path, leaf in jax.tree.leaves_with_path(config, is_leaf=lambda value: value is None):
        is_number = isinstance(leaf, numbers.Number) or hasattr(leaf, "dtype")
        is_absent = leaf is None and DEFAULTS[path[0].name] is None
        if not (is_number or is_absent):
            raise ValueError(f"{name}{jax.tree_util.keystr(path)}={leaf!r} is not a number")


def flat(config: TransformerConfig) -> dict[str, object]:
    """List all fields by name, inherited ones last; `TransformerConfig(**fields)` is the config."""
    first = TransformerConfig.__annotations__
    inherited = (f.name for f in dataclasses.fields(config) if f.name not in first)
    return {name: getattr(config, name) for name in (*first, *inherited)}


DEFAULTS = flat(TransformerConfig())
# What may be swept and saved as numbers or arrays; everything else is static.
SWEPT = tuple(
    f.name for f in dataclasses.fields(TransformerConfig) if f.metadata.get("pytree_node", True)
)


def san(depth: int, num_heads: int, d_model: int, **fields: object) -> TransformerConfig:
    """Make a pure self-attention network: no skip, no MLP (Dong et al. 2021, section 2)."""
    return _preset(fields, depth, num_heads, d_model, mlp="none", attention_skip=False)


def san_mlp(depth: int, num_heads: int, d_model: int, **fields: object) -> TransformerConfig:
    """Make a network of self-attention and MLPs without any skip (Corollary 3.2).

    The published curves of this name keep the MLP's own skip: `mlp_skip=True`.
    """
    return _preset(fields, depth, num_heads, d_model, mlp="gelu", attention_skip=False)


def san_skip(depth: int, num_heads: int, d_model: int, **fields: object) -> TransformerConfig:
    """Make a network of self-attention with skips, no MLP (section 3.1)."""
    return _preset(fields, depth, num_heads, d_model, mlp="none", attention_skip=True)


def transformer(depth: int, num_heads: int, d_model: int, **fields: object) -> TransformerConfig:
    """Make a network of attention and MLPs, each with a skip; post-LayerNorm by default."""
    defaults = {"mlp": "gelu", "attention_skip": True, "mlp_skip": True, "norm_placement": "post"}
    return _preset(fields, depth, num_heads, d_model, **defaults)


def _preset(fields, depth, num_heads, d_model, **defaults) -> TransformerConfig:
    """Make a configuration from a preset's defaults and the caller's fields, which come first.

    Args:
        fields: Fields of `TransformerConfig` from the caller; an unknown name is refused.
        depth, num_heads, d_model: L, H and d.
        **defaults: Fields of the preset.
    """
    checks.check_fields(TransformerConfig, fields)
    return TransformerConfig(
        depth=depth, num_heads=num_heads, d_model=d_model, **(defaults | fields)
    )
