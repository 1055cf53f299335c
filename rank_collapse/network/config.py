"""The configuration of the one network."""

import dataclasses
from typing import Any

import numpy as np

from rank_collapse import struct
from rank_collapse.network import attention, layers
from rank_collapse.network.embedding import EmbeddingConfig

NORM_PLACEMENTS = ("none", "pre", "post", "sandwich", "branch")
QK_NORMS = ("none", "head", "width")
MASKS = ("none", "causal", "local")
POSITIONS = ("none", "rotary", "relative_bias", "relative_key")
INITS = ("lecun", "xavier", "bert", "reference")
ROUTERS = ("chosen", "all")


class _FollowsWidth(int):
    """d_ff = 4 d where none was given: `replace(d_model=...)` computes it anew."""


def static(default: Any) -> Any:
    """A field that is part of the compiled program rather than a traced value."""
    return struct.field(default=default, pytree_node=False)


@struct.dataclass
class TransformerConfig:
    """One attention network; every architecture and ablation is a choice of these fields.

    A pytree: the floats `skip_gain`, `branch_gain`, `temperature`, ... are leaves, so that a config
    passed to a jitted function as an ordinary argument does not recompile when one of them
    changes, and can be vmapped over. Everything else is static and part of the treedef. All
    fields are hashable when the floats are Python numbers, so static arguments work too.

    Layer l, with gains λ = skip_gain and γ = branch_gain, norm_placement "post" or "none":
        a = N(λ x·[attention_skip] + γ SA(x)),   x' = N(λ a·[mlp_skip] + γ MLP(a)),
    "pre": a = λ x·[attention_skip] + γ SA(N(x)), "sandwich": λ x·[attention_skip] + γ N'(SA(N(x)))
    (Ding et al. 2021; peri-LN, Gemma 2) and "branch": λ x·[attention_skip] + γ N'(SA(x)) (OLMo 2),
    the same for the MLP. With cross_attention a third sublayer, placed between the two, looks at
    `memory`.

    Attributes:
        depth, num_heads, d_model: L, H and d.
        d_qk, d_v: Per-head widths; None for d / H, which then must be an integer.
        d_ff: Width f of the MLP; None for 4 d.
        mlp: "none" or a kind of `layers.MLP_KINDS`.
        attention_skip, mlp_skip, cross_skip: Which sublayers have a skip.
        norm_placement: Where norms are, see above: "none", "pre", "post", "sandwich", "branch".
        norm, norm_eps: "layer" or "rms"; what is added to variances.
        final_norm: A norm after the last layer; the trace's `output`, not its hidden states.
        mask, window: "none", "causal", "local" with |i − j| ≤ window.
        score, scale_scores: "dot" or "additive"; dot products divided by √d_qk.
        qk_norm: RMSNorm with a gain on queries and keys before positions: "none", of each "head"
            (Qwen3, Gemma 3), or over the "width" of all heads (OLMo 2); with norm_eps.
        position: "none", "rotary", "relative_bias" (T5), "relative_key" (XLNet).
        score_cap: c of c·tanh(scores/c) before biases and mask (Gemma 2); 0 for none.
        rotary_theta, rotary_scaling, rotary_tables: See `positions.rotary_angles`.
        rotary_width: Features of queries and keys that are rotated, the first; None for all.
        rotary_factor: Multiplies the rotated features of queries and keys (YaRN, LongRoPE).
        windows: How far each layer looks, |i − j| ≤ its entry, on top of the mask; an entry of 0
            for any distance, () for all layers so (Gemma, ModernBERT).
        local_theta: Base of the unscaled rotary frequencies in layers with a window; 0 for the same
            positions in all layers.
        num_buckets, max_distance: Of the position bias of "relative_bias".
        clamp_distance: Distances of "relative_key" are cut to ± this; 0 for not.
        cross_attention: Decoder layers that look at a memory.
        parallel: The MLP looks at what the layer's attention looks at, and one skip carries both:
            x' = λ (λ x·[attention_skip] + γ SA(N(x))) + γ MLP(N(x)) (GPT-NeoX).
        first_norm: Whether attention of the first layer looks at normed tokens, as others do under
            "pre" and "sandwich"; False where the embedding's norm stands in (ModernBERT).
        num_experts: Equal groups of the MLP's hidden units, of which a router takes
            `experts_per_token` for each token; 0 for all units always. All are computed.
        experts_per_token, router: How many, and whether their shares are the softmax over those
            "chosen" (Mixtral) or over "all" experts.
        d_shared: Hidden units behind those of the experts that every token uses, times a sigmoid
            gate of their own (Qwen2-MoE).
        layer_map: Parameter row of each layer, () for one each; (0,)·depth shares one (ALBERT).
        embedding: How tokens or vectors become hidden states; None when inputs are [n, d].
        init: "lecun" (variance 1/fan-in), "xavier" (2/(fan-in + fan-out)), "bert" (normal 0.02) or
            "reference" (normal 0.02, value and output projection uniform(±1/√fan-in)).
        unroll: Layers unrolled in the scan over depth: compile time against run time.
        skip_gain, branch_gain: λ and γ of every sublayer, or `Gains` of each kind; a number, one
            per layer [L], or per layer and feature [L or 1, d].
        norm_gain: The same for what the norm of a sublayer puts out; None for none.
        learned_skip_gain, learned_branch_gain: Where gains start that are trained: parameters,
            which multiply λ and γ. The same shapes; None for none.
        learned_per_feature: Whether they are [d] in each layer or one number.
        temperature: Divides the scores; scalar or [L].
        init_gain: Multiplies the initial values of V, O and MLP; a number. Only `init` reads it.
    """

    depth: int = static(1)
    num_heads: int = static(1)
    d_model: int = static(64)
    d_qk: int | None = static(None)
    d_v: int | None = static(None)
    d_ff: int | None = static(None)
    mlp: str = static("none")
    attention_skip: bool = static(False)
    mlp_skip: bool = static(False)
    cross_skip: bool = static(True)
    norm_placement: str = static("none")
    norm: str = static("layer")
    norm_eps: float = static(1e-12)
    final_norm: bool = static(False)
    mask: str = static("none")
    window: int = static(2)
    score: str = static("dot")
    scale_scores: bool = static(True)
    qk_norm: str = static("none")
    score_cap: float = static(0.0)
    position: str = static("none")
    rotary_theta: float = static(10000.0)
    rotary_scaling: tuple[float, ...] = static(())
    rotary_tables: tuple[tuple[int, tuple[float, ...]], ...] = static(())
    rotary_width: int | None = static(None)
    rotary_factor: float = static(1.0)
    windows: tuple[int, ...] = static(())
    local_theta: float = static(0.0)
    num_buckets: int = static(32)
    max_distance: int = static(128)
    clamp_distance: int = static(0)
    learned_per_feature: bool = static(False)
    cross_attention: bool = static(False)
    parallel: bool = static(False)
    first_norm: bool = static(True)
    num_experts: int = static(0)
    experts_per_token: int = static(1)
    router: str = static("chosen")
    d_shared: int = static(0)
    layer_map: tuple[int, ...] = static(())
    embedding: EmbeddingConfig | None = static(None)
    init: str = static("lecun")
    unroll: int = static(1)
    skip_gain: Any = 1.0
    branch_gain: Any = 1.0
    norm_gain: Any = None
    learned_skip_gain: Any = None
    learned_branch_gain: Any = None
    temperature: Any = 1.0
    init_gain: Any = 1.0

    def __post_init__(self):
        for name in ("depth", "num_heads", "d_model", "window", "unroll"):
            self._coerce(name)
            value = getattr(self, name)
            if not isinstance(value, int) or value < (0 if name == "window" else 1):
                raise ValueError(f"{name}={value!r} is not a positive integer")
        if self.d_ff is None or isinstance(self.d_ff, _FollowsWidth):
            object.__setattr__(self, "d_ff", _FollowsWidth(4 * self.d_model))
        for name in ("d_qk", "d_v", "d_ff"):
            self._coerce(name)
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name}={value!r} is not a positive integer")
        if self.d_model % self.num_heads and None in (self.d_qk, self.d_v):
            raise ValueError(
                f"num_heads={self.num_heads} does not divide d_model={self.d_model}; "
                "give d_qk and d_v"
            )
        for name, allowed in (
            ("mlp", layers.MLP_KINDS),
            ("norm_placement", NORM_PLACEMENTS),
            ("norm", layers.NORM_KINDS),
            ("mask", MASKS),
            ("score", attention.SCORES),
            ("qk_norm", QK_NORMS),
            ("position", POSITIONS),
            ("init", INITS),
            ("router", ROUTERS),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {allowed}")
        if self.position == "rotary":
            self._check_rotary()
        if self.parallel and self.norm_placement == "post":
            raise ValueError("parallel=True has no place for norm_placement='post'")
        if self.windows and (len(self.windows) != self.depth or min(self.windows) < 0):
            raise ValueError(f"windows={self.windows} are not {self.depth} distances")
        if self.num_experts:
            self._check_experts()
        if self.layer_map and len(self.layer_map) != self.depth:
            raise ValueError(f"layer_map has {len(self.layer_map)} entries for depth={self.depth}")
        if self.layer_map and set(self.layer_map) != set(range(max(self.layer_map) + 1)):
            raise ValueError(f"layer_map={self.layer_map} leaves out a row of the parameters")

    def _check_rotary(self):
        width = self.rotated_width
        if self.qk_width % 2:
            raise ValueError(f"rotary positions need an even d_qk, not {self.qk_width}")
        if width % 2 or not 0 < width <= self.qk_width:
            raise ValueError(f"rotary_width={width} is not even and between 2 and {self.qk_width}")
        if len(self.rotary_scaling) not in (0, 1, 2, 4):
            raise ValueError(f"rotary_scaling={self.rotary_scaling} has not 0, 1, 2 or 4 entries")
        for _, frequencies in self.rotary_tables:
            if len(frequencies) != width // 2:
                raise ValueError(
                    f"rotary_tables has {len(frequencies)} frequencies for {width // 2} pairs"
                )

    def _check_experts(self):
        units = self.d_ff - self.d_shared
        if self.mlp == "none" or units < 1 or units % self.num_experts:
            raise ValueError(
                f"num_experts={self.num_experts} do not divide the {units} units of "
                f"d_ff={self.d_ff} − d_shared={self.d_shared} of mlp={self.mlp!r}"
            )
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"experts_per_token={self.experts_per_token} of num_experts={self.num_experts}"
            )

    def _coerce(self, name):
        """Integers of numpy and the like as Python's, which are hashable and static."""
        value = getattr(self, name)
        if isinstance(value, np.integer):
            object.__setattr__(self, name, int(value))

    @property
    def qk_width(self) -> int:
        """Per-head width of queries and keys."""
        return self.d_qk if self.d_qk is not None else self.d_model // self.num_heads

    @property
    def rotated_width(self) -> int:
        """Features of each head's queries and keys that rotary positions rotate."""
        return self.rotary_width if self.rotary_width is not None else self.qk_width

    @property
    def routing(self) -> layers.Routing | None:
        """How the MLP's units are chosen token by token; None where all are used."""
        if not self.num_experts:
            return None
        return layers.Routing(self.num_experts, self.experts_per_token, self.router, self.d_shared)

    @property
    def v_width(self) -> int:
        """Per-head width of values."""
        return self.d_v if self.d_v is not None else self.d_model // self.num_heads

    @property
    def kinds(self) -> tuple[str, ...]:
        """The sublayers of a layer, in the order in which they are passed."""
        there = {"attention": True, "cross": self.cross_attention, "mlp": self.mlp != "none"}
        return tuple(kind for kind, is_there in there.items() if is_there)

    @property
    def num_rows(self) -> int:
        """Distinct layers: the length of the parameters' layer axis."""
        return max(self.layer_map) + 1 if self.layer_map else self.depth


# What may be swept and saved as numbers or arrays; everything else is static.
SWEPT = tuple(
    f.name for f in dataclasses.fields(TransformerConfig) if f.metadata.get("pytree_node", True)
)
