"""Residual designs by name: where the norms are, gains of skips and branches, initialisation.

    config = rc.design(rc.transformer(depth=18, num_heads=4, d_model=64), "deepnorm")
    params = rc.init(key, config)

N is the number of residual branches (attention, cross-attention and MLP of every layer), counted
from the config; λ multiplies skips, γ branches, β the initial V, O and MLP.

Admin's gains ω of the skips give every residual branch the same weight (Liu et al. 2020). They are
profiled on one batch:

    config = rc.admin_profile(params, x, config, mask=mask)  # of a Post-LN network
    trace = rc.apply(params, x[0], config)

Sublayer i of a Post-LN network becomes x_i = N(ω_i ∘ x_{i−1} + f_i(x_{i−1})). "admin_log" and
"admin_const" need no batch. After training: `rc.fold_gains`.

Axis letters: b examples, n tokens, m keys, d width, l layers.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.gains import Gains, scaled
from rank_collapse.network.inputs import PreparedInputs, as_mask, check_known, prepare_inputs
from rank_collapse.network.layers import NormPlacement
from rank_collapse.network.parameters import TransformerParams, completed
from rank_collapse.network.residual import token_norm
from rank_collapse.network.transformer import Tokens
from rank_collapse.network.walk import Algebra, walk, walk_layer
from rank_collapse.struct import refuse_if

ROLES = ("alone", "encoder", "decoder")
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
    "hyper_connections",
    "mhc",
    "attention_residuals",
]
Network = TypeVar("Network")  # a `TransformerConfig` or an `EncoderDecoderConfig`


class Stack(NamedTuple):
    """The properties of a network on which constants of a design may depend."""

    config: TransformerConfig
    branches: int  # N
    role: str = "alone"  # or the part of an encoder-decoder that it is
    other: int = 0  # residual branches of the other part


class Design(NamedTuple):
    """A residual design: what differs from a plain residual network x' = N(x + f(x))."""

    placements: tuple[str, ...]  # values of `norm_placement` that it is made for, its own first
    constants: dict[str, Any] | Callable[[Stack], dict[str, Any]]  # fields of the config
    source: str  # the paper


def count_branches(config: TransformerConfig) -> int:
    """N: the sublayers of all layers, each of which has a residual branch."""
    return config.depth * len(config.kinds)


def _learned_omega(omega):
    """x' = N(ω ∘ x + f(x)): ω times a parameter [d] from 1 on (in the paper ω is the parameter)."""
    return {"skip_gain": omega, "learned_skip_gain": 1.0, "learned_per_feature": True}


def _admin_log(stack):
    """ω² = (N + 1)/ln(N + 1) − 1: the output changes by O(log N)."""
    n = stack.branches + 1
    return _learned_omega(math.sqrt(n / math.log(n) - 1))


def _deepnorm(stack):
    """x' = N(α x + f(x)), V, O and MLP drawn by Xavier's rule times β (table of figure 2).

    With N layers of an encoder (2 branches each) and M of a decoder (3; alone 2):
        alone:    α = (2N)^(1/4),            β = (8N)^(−1/4),
        encoder:  α = 0.81 (N⁴ M)^(1/16),    β = 0.87 (N⁴ M)^(−1/16),
        decoder:  α = (3M)^(1/4),            β = (12M)^(−1/4).
    Layers of other kinds count by their branches: N = branches/2, M = branches/3.
    """
    if stack.role == "encoder":
        size = (stack.branches / 2) ** 4 * stack.other / 3
        gains = 0.81 * size ** (1 / 16), 0.87 * size ** (-1 / 16)
    else:
        gains = stack.branches ** (1 / 4), (4 * stack.branches) ** (-1 / 4)
    return {"skip_gain": gains[0], "init_gain": gains[1], "init": "xavier"}


def _layerscale(stack):
    """x' = x + γ ∘ f(N(x)), γ [d] learned from 0.1 to 18 layers, 1e-5 to 24, else 1e-6."""
    depth = stack.config.depth
    start = 0.1 if depth <= 18 else 1e-5 if depth <= 24 else 1e-6
    return {"learned_branch_gain": start, "learned_per_feature": True}


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
    # ω from a batch: see `admin`, which takes the place of this NaN.
    "admin": Design(("post",), _learned_omega(math.nan), "Liu et al. 2020"),
    "admin_log": Design(("post",), _admin_log, "Liu et al. 2020"),
    # ω² = N: the output changes by O(1).
    "admin_const": Design(
        ("post",), lambda stack: _learned_omega(math.sqrt(stack.branches)), "Liu et al. 2020"
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
    # x' = x + f(N(x)/√l) in layer l = 1, ..., L.
    "layernorm_scaling": Design(
        ("pre",),
        lambda stack: {
            "norm_gain": tuple(1 / math.sqrt(l) for l in range(1, stack.config.depth + 1))
        },
        "Sun et al. 2025",
    ),
    # Several streams, whose connections are parameters: `network.streams` has their equations.
    "hyper_connections": Design(("pre",), {"connection": "hyper"}, "Zhu et al. 2024"),
    "mhc": Design(("pre",), {"connection": "manifold"}, "Xie et al. 2025 (DeepSeek)"),
    "attention_residuals": Design(("pre",), {"connection": "attention"}, "Kimi Team 2026"),
}

# Every design decides all of these: what it does not name is as in a plain residual network.
_PLAIN = {"skip_gain": 1.0, "branch_gain": 1.0, "init_gain": 1.0, "norm_gain": None}
_PLAIN |= {"qk_norm": "none", "connection": "skip"}
_PLAIN |= {"learned_skip_gain": None, "learned_branch_gain": None, "learned_per_feature": False}


def design(
    config: Network,
    name: DesignName,
    *,
    norm_placement: NormPlacement | None = None,
    learned: bool = True,
) -> Network:
    """The config of a residual design; draw the parameters with it: `init(key, design(...))`.

    Sets skips, gains, `init_gain`, `qk_norm` and the norms (a final one too, where the stream is
    not normalised); `init` where the paper names one. Everything else stays; gains of an earlier
    design do not.

    Args:
        config: The network, a `TransformerConfig` or an `EncoderDecoderConfig`.
        name: One of `DESIGNS`.
        norm_placement: Another placement than the paper's, where the design allows it.
        learned: Whether gains that the paper trains are parameters; if not, they stay where they
            start. Connections of several streams always are.

    Raises:
        ValueError: An unknown name, or a placement that the design is not made for.
    """
    if isinstance(config, TransformerConfig):
        stack = Stack(config, count_branches(config))
        return of_stack(stack, name, norm_placement=norm_placement, learned=learned)
    parts = {"encoder": config.encoder, "decoder": config.decoder}
    counts = {role: count_branches(part) for role, part in parts.items()}
    others = {"encoder": counts["decoder"], "decoder": counts["encoder"]}
    options = {"norm_placement": norm_placement, "learned": learned}
    designed = {
        role: of_stack(Stack(part, counts[role], role, others[role]), name, **options)
        for role, part in parts.items()
    }
    return dataclasses.replace(config, **designed)


def of_stack(
    stack: Stack,
    name: DesignName,
    *,
    norm_placement: NormPlacement | None = None,
    learned: bool = True,
) -> TransformerConfig:
    """`design` of one stack, alone or as a part of an encoder-decoder."""
    if name not in DESIGNS:
        raise ValueError(f"design {name!r} is not one of {tuple(DESIGNS)}")
    if stack.role not in ROLES:
        raise ValueError(f"role={stack.role!r} is not one of {ROLES}")
    chosen = DESIGNS[name]
    placement = chosen.placements[0] if norm_placement is None else norm_placement
    if placement not in chosen.placements:
        raise ValueError(
            f"design {name!r} needs norm_placement={' or '.join(map(repr, chosen.placements))}, "
            f"not {placement!r} ({chosen.source})"
        )
    config = stack.config
    skips = {"attention_skip": True, "cross_skip": True, "mlp_skip": config.mlp != "none"}
    norms = {"norm_placement": placement, "final_norm": placement in ("pre", "sandwich", "branch")}
    constants = chosen.constants(stack) if callable(chosen.constants) else chosen.constants
    config = config.replace(**(_PLAIN | skips | norms | constants))
    return config if learned else _held(config)


def _held(config):
    """Gains that are learned stay where they start: factors of the config's own."""
    starts = {n: getattr(config, f"learned_{n}") for n in ("skip_gain", "branch_gain")}
    held = {n: getattr(config, n) * start for n, start in starts.items() if start is not None}
    none = {"learned_skip_gain": None, "learned_branch_gain": None, "learned_per_feature": False}
    return config.replace(**(held | none))


_NAMES = {"attention": "attention", "cross": "cross-attention", "mlp": "MLP"}


def admin_profile(
    params: TransformerParams, x: Any, config: TransformerConfig, **inputs: Any
) -> TransformerConfig:
    """The config with Admin's ω as its skip gains, profiled on one batch.

    In the order in which the sublayers (attention, cross-attention, MLP) are passed,
        r_1 = 1,   ω_i = r_i,   r_{i+1} = √(Var(ω_i ∘ x_{i−1}) + Var(f_i(x_{i−1}))),
    Var over all entries of all tokens that exist in the batch, x_i the states with these ω. A gain
    that is learned multiplies ω as it is; the config's own skip gains are replaced. (The published
    code counts padding too, and profiles with dropout.)

    Args:
        params: The network's parameters, as they are before training.
        x: Token ids [b, n], or states [b, n, d], as `apply` takes one example of.
        config: A Post-LN network, with a skip around every sublayer.
        **inputs: mask, bias, memory, memory_mask, segments and positions of `apply`, each with the
            leading axis b; with a mask [b, n] other tokens count in no variance.

    Returns:
        The config with `skip_gain` a `Gains` of ω [l].

    Raises:
        ValueError: Another placement of norms, a sublayer without a skip, inputs that are not a
            batch, or a batch that gives an activation that is not finite or an ω of 0.

    Source: Liu et al. 2020, "Admin: adaptive model initialization".
    """
    _check_design(config)
    x, inputs = _checked_batch(x, inputs, config)
    params = completed(params, config)
    config = config.replace(skip_gain=1.0)
    entries = jax.vmap(lambda x, inputs: prepare_inputs(params, x, config, **inputs)[1])(x, inputs)
    omegas, after = _profile(params, entries, config)
    if not isinstance(after, jax.core.Tracer):
        _check_sizes(np.asarray(after), config)
    return config.replace(skip_gain=Gains(**omegas))


class Profiling(Algebra):
    """A batch of tokens [b, n, d] and r; sublayer i has ω_i = r."""

    def __init__(self, exists: Any):
        self.exists = exists

    def norm(self, layer, spec, state):
        x, r = state
        return jax.vmap(lambda x: token_norm(spec, x))(x), r

    def add(self, layer, spec, state, part):
        x, r = state
        summands = r * scaled(spec.skip_gain, x), scaled(spec.branch_gain, part)
        return sum(summands), jnp.sqrt(sum(map(self._variance, summands)))

    def branch(self, layer, kind, branch_input):
        def one(x, inputs):
            return getattr(Tokens(), kind)(layer.replace(inputs=inputs), x)[0]

        return jax.vmap(one)(branch_input[0], layer.inputs), None

    def _variance(self, a):
        return jnp.var(a, where=jnp.broadcast_to(self.exists[..., None], a.shape))


@jax.jit
def _profile(params, entries: PreparedInputs, config):
    """ω by kind [l] and r after every sublayer [l, kinds]."""
    exists = entries.token_mask
    if exists is None:
        exists = jnp.ones(entries.x.shape[:2], bool)
    algebra = Profiling(exists)

    def step(layer, state):
        state, passages = walk_layer(algebra, layer, state)
        omegas = {kind: passage.state[1] for kind, passage in passages.items()}
        return state, (omegas, jnp.stack([passage.after[1] for passage in passages.values()]))

    start = (entries.x, jnp.ones((), entries.x.dtype))
    return walk(step, start, params, entries, config)[1]


def _check_design(config):
    refuse_if(
        config.norm_placement != "post",
        f"Admin needs norm_placement='post', not {config.norm_placement!r}: "
        'rc.design(config, "admin")',
    )
    for kind in config.kinds:
        refuse_if(
            not getattr(config, f"{kind}_skip"),
            f"Admin's ω multiplies skips, but {kind}_skip=False",
        )


def _checked_batch(x, inputs, config):
    x = jnp.asarray(x)
    is_ids = jnp.issubdtype(x.dtype, jnp.integer)
    refuse_if(
        x.ndim != (2 if is_ids else 3),
        f"x of shape {x.shape} is not token ids [b, n] or states [b, n, d]",
    )
    check_known({"x": x}, config)
    inputs = {name: a for name, a in inputs.items() if a is not None}
    for name in inputs:
        value = as_mask(inputs[name], name) if "mask" in name else jnp.asarray(inputs[name])
        if value.shape[:1] != x.shape[:1]:
            raise ValueError(f"{name} of shape {value.shape} is not of {x.shape[0]} examples")
        inputs[name] = value
    return x, inputs


def _check_sizes(after, config):
    """Refuses r [l, kinds] that is no gain, and names the first sublayer that made it."""
    bad = np.argwhere(~(np.isfinite(after) & (after > 0)))
    if not len(bad):
        return
    layer, place = bad[0]
    name = f"the {_NAMES[config.kinds[place]]} sublayer of layer {layer}"
    refuse_if(
        not np.isfinite(after[layer, place]),
        f"profiling: an activation that is not finite in {name}",
    )
    raise ValueError(f"profiling: ω = 0 is not positive: nothing varies in {name}")
