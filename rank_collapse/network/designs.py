"""Residual designs by name: where the norms are, gains of skips and branches, initialisation.

    config = rc.design(rc.transformer(depth=18, num_heads=4, d_model=64), "deepnorm")
    params = rc.init(key, config)

N is the number of residual branches (attention, cross-attention and MLP of every layer), counted
from the config; λ multiplies skips, γ branches, β the initial V, O and MLP.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeVar

from rank_collapse import checks
from rank_collapse.network.config import TransformerConfig, check_config
from rank_collapse.network.layers import NormPlacement
from rank_collapse.network.residual import Gains, Unprofiled

DesignName = Literal[
    "post",
    "pre",
    "admin",
    "admin_log",
    "admin_const",
    "deepnorm",
    "rezero",
    "skipinit",
    "layerscale",
    "sandwich",
    "branch_norm",
    "qk_norm",
    "depth_scaled",
    "lambda_skip",
    "ngpt",
    "layernorm_scaling",
    "deepscalelm",
]
Network = TypeVar("Network")  # a `TransformerConfig` or an `EncoderDecoderConfig`


class Stack(NamedTuple):
    """Properties of a network on which the constants of a design may depend.

    Attributes:
        config: The network.
        branches: N, the number of its residual branches.
        role: "alone", or the part of an encoder-decoder: "encoder" or "decoder".
        other_branches: Number of residual branches of the other part.
    """

    config: TransformerConfig
    branches: int
    role: str = "alone"
    other_branches: int = 0


class Design(NamedTuple):
    """A residual design: its differences from a plain residual network x' = N(x + f(x)).

    Attributes:
        placements: Values of `norm_placement` for which it is made, the paper's first.
        constants: Fields of the configuration, or a function that computes them for a network.
        source: The paper.
    """

    placements: tuple[str, ...]
    constants: dict[str, object] | Callable[[Stack], dict[str, object]]
    source: str


def count_branches(config: TransformerConfig) -> int:
    """Count N, the number of residual branches: one for each sublayer of each layer."""
    return config.depth * len(config.kinds)


def _omega_fields(omega):
    """Set x' = N(ω ∘ x + f(x)), ω times a parameter [d] that starts at 1 (in the paper, at ω)."""
    return {"skip_gain": omega, "learned_skip_gain": 1.0, "learned_per_feature": True}


def _admin_log(stack):
    """Set ω² = (N + 1)/ln(N + 1) − 1: the output changes by O(log N)."""
    n = stack.branches + 1
    return _omega_fields(math.sqrt(n / math.log(n) - 1))


def _deepnorm(stack):
    """Set x' = N(α x + f(x)), V, O and MLP drawn by Xavier's rule times β (table of figure 2).

    With N layers of an encoder (2 branches each) and M of a decoder (3; alone 2):
        alone:    α = (2N)^(1/4),            β = (8N)^(−1/4),
        encoder:  α = 0.81 (N⁴ M)^(1/16),    β = 0.87 (N⁴ M)^(−1/16),
        decoder:  α = (3M)^(1/4),            β = (12M)^(−1/4).
    Layers of other kinds count by their branches: N = branches/2, M = branches/3.
    """
    if stack.role == "encoder":
        size = (stack.branches / 2) ** 4 * stack.other_branches / 3
        alpha, beta = 0.81 * size ** (1 / 16), 0.87 * size ** (-1 / 16)
    else:
        alpha, beta = stack.branches ** (1 / 4), (4 * stack.branches) ** (-1 / 4)
    return {"skip_gain": alpha, "init_gain": beta, "init": "xavier"}


def _layerscale(stack):
    """Set x' = x + γ ∘ f(N(x)), γ [d] learned from 0.1 to 18 layers, 1e-5 to 24, else 1e-6."""
    depth = stack.config.depth
    deep_start = 1e-5 if depth <= 24 else 1e-6
    return {
        "learned_branch_gain": 0.1 if depth <= 18 else deep_start,
        "learned_per_feature": True,
    }


def _layernorm_scaling(stack):
    """Set x' = x + f(N(x)/√l) in layer l = 1, ..., L."""
    return {"norm_gain": tuple(1 / math.sqrt(l) for l in range(1, stack.config.depth + 1))}


def _deepscalelm(stack):
    """Set x' = λ x + β f(N(x)), β² = 2/L, λ² = 1 − β², each branch of variance 1 at the start.

    Let weights have variance 1/fan-in, and tokens variance 1 and correlation r. Attention then
    keeps r of the variance, a ReLU MLP ½. The paper multiplies the weights by 1/√r and √2; here
    these are gains of the branches. r begins at .221, that of text. The correlation within a
    branch is 1 after attention and r + (√(1 − r²) − r arccos r)/π after an MLP. Without dropout.
    X^0 is to have variance 1.
    """
    square = min(1.0, 2 / stack.config.depth)  # β²
    r, gains = 0.221, []
    for _ in range(stack.config.depth):
        gains.append(math.sqrt(square / r))
        r += square * (1 - r)
        r += square * (math.sqrt(1 - r * r) - r * math.acos(r)) / math.pi
    attention_gains = tuple(gains)
    branch = Gains(attention_gains, cross=attention_gains, mlp=math.sqrt(2 * square))
    return {"skip_gain": math.sqrt(1 - square), "branch_gain": branch, "init": "lecun"}


# x' = x + α f(x), no norms; α of each branch is learned and starts at 0 (equation 1). In ReZero's
# Transformer both branches of a layer share one α. SkipInit (arXiv 2002.10444), published
# independently, allows any small start, 0 or up to 1/√N: `config.replace(learned_branch_gain=α)`.
_REZERO = {"learned_branch_gain": 0.0}
# x' = N(x + α (N'(f(x)) − x)), α = 0.05, N and N' to one size, queries and keys too. The size is
# √d rather than 1 here. In the paper α is a parameter of each feature and the weights' rows and
# columns are normalised after each step; here α stays where it starts.
_NGPT = {"skip_gain": 0.95, "branch_gain": 0.05, "norm": "rms", "qk_norm": "head"}


DESIGNS: dict[DesignName, Design] = {
    "post": Design(("post",), {}, "Vaswani et al. 2017"),
    "pre": Design(("pre",), {}, "Xiong et al. 2020"),
    "admin": Design(("post",), _omega_fields(Unprofiled()), "Liu et al. 2020"),  # by a batch
    "admin_log": Design(("post",), _admin_log, "Liu et al. 2020"),
    # ω² = N: the output changes by O(1).
    "admin_const": Design(
        ("post",), lambda stack: _omega_fields(math.sqrt(stack.branches)), "Liu et al. 2020"
    ),
    "deepnorm": Design(("post",), _deepnorm, "Wang et al. 2022"),
    "rezero": Design(("none", "pre", "post"), _REZERO, "Bachlechner et al. 2020"),
    "skipinit": Design(("none", "pre", "post"), _REZERO, "De and Smith 2020"),
    "layerscale": Design(("pre", "post"), _layerscale, "Touvron et al. 2021"),
    "sandwich": Design(("sandwich",), {}, "Ding et al. 2021; peri-LN, Kim et al. 2025"),
    "branch_norm": Design(("branch",), {}, "OLMo 2, 2025"),
    # Queries and keys of each head divided by their root mean square.
    "qk_norm": Design(
        ("pre", "branch"), {"qk_norm": "head"}, "Henry et al. 2020; RMSNorm as in Qwen3"
    ),
    # x' = N(x + f(x)/√L), L the number of layers.
    "depth_scaled": Design(
        ("post", "pre", "none"),
        lambda stack: {"branch_gain": 1 / math.sqrt(stack.config.depth)},
        "Noci et al. 2022",
    ),
    # x' = N(λ x + f(x)), λ of each sublayer learned from 1 on (equation 5).
    "lambda_skip": Design(("post",), {"learned_skip_gain": 1.0}, "Arangath Joseph et al. 2024"),
    "ngpt": Design(("both",), _NGPT, "Loshchilov et al. 2024"),
    "layernorm_scaling": Design(("pre",), _layernorm_scaling, "Sun et al. 2025"),
    "deepscalelm": Design(("pre", "post"), _deepscalelm, "Kedia et al. 2024"),
}

# Every design decides all of these: what it does not name is as in a plain residual network.
_PLAIN = {
    "skip_gain": 1.0,
    "branch_gain": 1.0,
    "init_gain": 1.0,
    "norm_gain": None,
    "qk_norm": "none",
    "learned_skip_gain": None,
    "learned_branch_gain": None,
    "learned_per_feature": False,
}


def design(
    config: Network,
    name: DesignName,
    *,
    norm_placement: NormPlacement | None = None,
    learned: bool = True,
) -> Network:
    """Make a network one of a residual design; then draw the parameters: `init(key, design(...))`.

    Sets skips, gains, `init_gain`, `qk_norm` and the norms (including a final one, where the stream
    is not normalised), and `init` where the paper names one. Other fields do not change, but gains
    of an earlier design are removed.

    Args:
        config: The network, a `TransformerConfig` or an `EncoderDecoderConfig`.
        name: One of `DESIGNS`.
        norm_placement: A placement that differs from the paper's, if the design allows it.
        learned: Whether gains that the paper trains are parameters; if not, they stay at their
            initial values.

    Raises:
        ValueError: An unknown name, or a placement that the design is not made for.
    """
    options = {"norm_placement": norm_placement, "learned": learned}
    if isinstance(config, TransformerConfig):
        return _design_stack(Stack(config, count_branches(config)), name, **options)
    if not hasattr(config, "encoder"):
        check_config(config)
    counts = {role: count_branches(getattr(config, role)) for role in ("encoder", "decoder")}
    encoder = Stack(config.encoder, counts["encoder"], "encoder", counts["decoder"])
    decoder = Stack(config.decoder, counts["decoder"], "decoder", counts["encoder"])
    return dataclasses.replace(
        config,
        encoder=_design_stack(encoder, name, **options),
        decoder=_design_stack(decoder, name, **options),
    )


def _design_stack(stack, name, norm_placement, learned):
    """Apply a design to one stack, alone or as a part of an encoder-decoder; see `design`.

    Args:
        stack: The network.
        name, norm_placement, learned: See `design`.
    """
    checks.check_choice(f"design {name!r}", name, DESIGNS)
    spec = DESIGNS[name]
    placement = spec.placements[0] if norm_placement is None else norm_placement
    if placement not in spec.placements:
        raise ValueError(
            f"design {name!r} needs norm_placement={' or '.join(map(repr, spec.placements))}, "
            f"not {placement!r} ({spec.source})"
        )
    config = stack.config
    skips = {"attention_skip": True, "cross_skip": True, "mlp_skip": config.mlp != "none"}
    norms = {"norm_placement": placement, "final_norm": placement in ("pre", "sandwich", "branch")}
    constants = spec.constants(stack) if callable(spec.constants) else spec.constants
    config = config.replace(**(_PLAIN | skips | norms | constants))
    return config if learned else _freeze_gains(config)


def _freeze_gains(config):
    """Multiply the config's gains by the initial values of the learned ones, which are then
    removed."""
    fields = {"learned_skip_gain": None, "learned_branch_gain": None, "learned_per_feature": False}
    for name in ("skip_gain", "branch_gain"):
        start, gain = getattr(config, f"learned_{name}"), getattr(config, name)
        if start is not None and not isinstance(gain, Unprofiled):
            fields[name] = gain * start
    return config.replace(**fields)
