"""Norms and MLPs for one example, and the fields of the configuration that describe them.

`ResidualConfig` stands here, too, because it says where the norms are.

Axis letters: n tokens, d model width, f MLP width.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse import checks, struct
from rank_collapse.annotations import Leaf, Number

NormKind = Literal["layer", "rms"]
NormPlacement = Literal["none", "pre", "post", "sandwich", "branch", "both"]
Router = Literal["chosen", "all"]
MLPKind = Literal[
    "none",
    "identity",
    "relu",
    "gelu",
    "gelu_tanh",
    "quick_gelu",
    "silu",
    "tanh",
    "reglu",
    "geglu",
    "geglu_tanh",
    "swiglu",
]
NORM_KINDS, NORM_PLACEMENTS = get_args(NormKind), get_args(NormPlacement)
ROUTERS = get_args(Router)
MLP_KINDS = get_args(MLPKind)  # "none", and those of `ACTIVATIONS` and `GATED`


class ResidualConfig(struct.Struct, kw_only=True):
    """How branches join the residual stream: skips, norms and gains.

    Layer l, with gains λ = skip_gain and γ = branch_gain, norm_placement "post" or "none":
        a = N(λ x·[attention_skip] + γ SA(x)),   x' = N(λ a·[mlp_skip] + γ MLP(a)),
    "pre": a = λ x·[attention_skip] + γ SA(N(x)), "sandwich": λ x·[attention_skip] + γ N'(SA(N(x)))
    (Ding et al. 2021; peri-LN, Gemma 2), "branch": λ x·[attention_skip] + γ N'(SA(x)) (OLMo 2) and
    "both": N(λ x·[attention_skip] + γ N'(SA(x))) (nGPT), the same for the MLP. With
    cross_attention a third sublayer, placed between the two, attends to
    `memory`.

    Attributes:
        attention_skip, mlp_skip, cross_skip: Whether the sublayers of each kind have a skip.
        norm_placement: Position of the norms, see above: "none", "pre", "post", "sandwich",
            "branch", "both".
        norm, norm_eps: "layer" or "rms"; the number that is added to variances. Or the caller's
            norm, a function of tokens [n, d] that returns the factor for them, [n, 1] or [n, d].
        final_norm: A norm after the last layer; the trace's `output`, not its hidden states.
        first_norm: Whether attention of the first layer reads normalised tokens, as the other
            layers do under "pre" and "sandwich"; False where the embedding's norm replaces it
            (ModernBERT).
        parallel: The MLP and the attention of a layer read the same input, and one skip carries
            both: x' = λ (λ x·[attention_skip] + γ SA(N(x))) + γ MLP(N(x)) (GPT-NeoX).
        skip_gain, branch_gain: λ and γ of every sublayer, or `Gains` of each kind: a number, one
            per layer [L], or one per layer and feature [L or 1, d]. `admin_profile` computes a
            skip_gain of `Unprofiled()`.
        norm_gain: A gain, in the same forms, for the output of a sublayer's norm; None for none.
        learned_skip_gain, learned_branch_gain: Initial values of trained gains: parameters, which
            multiply λ and γ. They have the same shapes; None for no trained gains.
        learned_per_feature: Whether learned gains are [d] in each layer or one number.
    """

    attention_skip: bool = struct.static(False)
    mlp_skip: bool = struct.static(False)
    cross_skip: bool = struct.static(True)
    norm_placement: NormPlacement = struct.static("none")
    norm: NormKind | Callable = struct.static("layer")
    norm_eps: float = struct.static(1e-12)
    final_norm: bool = struct.static(False)
    first_norm: bool = struct.static(True)
    parallel: bool = struct.static(False)
    learned_per_feature: bool = struct.static(False)
    skip_gain: Number = 1.0
    branch_gain: Number = 1.0
    norm_gain: Any = None
    learned_skip_gain: Any = None
    learned_branch_gain: Any = None

    def __post_init__(self):
        checks.check_choices(self, norm_placement=NORM_PLACEMENTS)
        if not callable(self.norm):
            checks.check_choices(self, norm=NORM_KINDS)
        if self.parallel and self.norm_placement in ("post", "both"):
            raise ValueError(
                f"parallel=True does not support norm_placement={self.norm_placement!r}"
            )


class MLPConfig(struct.Struct, kw_only=True):
    """The MLP of each layer.

    Attributes:
        mlp: "none" or a kind of `MLP_KINDS`; or the caller's activation, a function φ of arrays,
            entry by entry, with φ(0) = 0.
        d_ff: Width f; None for 4 d.
        num_experts: Number of equal groups of hidden units; a router chooses `experts_per_token` of
            them for each token. 0 for all units always. All groups are computed.
        experts_per_token, router: Number of experts for each token, and whether their shares are
            the softmax over the "chosen" experts (Mixtral) or over "all" experts.
        d_shared: Number of hidden units that every token uses, after those of the experts,
            multiplied by a second, sigmoid gate (Qwen2-MoE).
    """

    mlp: MLPKind | Callable = struct.static("none")
    d_ff: int | None = struct.static(None)
    num_experts: int = struct.static(0)
    experts_per_token: int = struct.static(1)
    router: Router = struct.static("chosen")
    d_shared: int = struct.static(0)

    def __post_init__(self):
        checks.check_choices(self, router=ROUTERS)
        if not callable(self.mlp):
            checks.check_choices(self, mlp=MLP_KINDS)

    def check_experts(self, d_ff: int) -> None:
        """Check that experts divide the hidden units.

        Raises:
            ValueError: They do not divide them, or there are fewer experts than a token uses.
        """
        units = d_ff - self.d_shared
        if self.mlp == "none" or units < 1 or units % self.num_experts:
            raise ValueError(
                f"num_experts={self.num_experts} do not divide the {units} units of "
                f"d_ff={d_ff} − d_shared={self.d_shared} of mlp={self.mlp!r}"
            )
        checks.check_whole("experts_per_token", self.experts_per_token, 1, self.num_experts)


class NormParams(struct.Struct):
    """Gain and offset of a norm; RMSNorm has the bias None.

    Attributes:
        gain: [d].
        bias: [d] or None.
    """

    gain: Leaf
    bias: Leaf | None = None


class MLPParams(struct.Struct):
    """Two linear maps, and a gate of the first's shape for gated MLPs; biases may be None.

    Attributes:
        w_in, b_in: [d, f] and [f], the first map.
        w_out, b_out: [f, d] and [d], the second map.
        w_gate, b_gate: [d, f] and [f], the gate of a gated MLP.
        w_router: [d, experts], the router of a mixture of experts.
        w_shared: [d, 1], the gate of the units that every token uses.
    """

    w_in: Leaf
    b_in: Leaf | None = struct.field(default=None, kw_only=True)
    w_out: Leaf
    b_out: Leaf | None = struct.field(default=None, kw_only=True)
    w_gate: Leaf | None = None
    b_gate: Leaf | None = None
    w_router: Leaf | None = None
    w_shared: Leaf | None = None


class Routing(NamedTuple):
    """The hidden units that a token uses: see `TransformerConfig.num_experts` and `unit_shares`."""

    num_experts: int
    per_token: int
    kind: str
    d_shared: int


class Activation(NamedTuple):
    """φ and its gate φ(z)/z, by which φ(z) = z · gate(z) is linear once the gate is frozen."""

    fn: Callable
    gate: Callable


def _gelu_tanh_gate(z):
    """Compute gelu(z)/z in the approximation by tanh."""
    return 0.5 * (1 + jnp.tanh(jnp.sqrt(2 / jnp.pi).astype(z.dtype) * (z + 0.044715 * z**3)))


def _tanh_gate(z):
    """Compute tanh(z)/z, which is 1 at 0; the gradient there is not NaN either."""
    safe = jnp.where(z == 0, 1.0, z)
    return jnp.where(z == 0, 1.0, jnp.tanh(safe) / safe)


def _quotient_gate(phi, z):
    """Compute φ(z)/z, and φ'(0) at 0; NaN there where φ(0) is not 0."""
    value, slope = jax.jvp(phi, (jnp.zeros_like(z),), (jnp.ones_like(z),))
    gate_at_zero = jnp.where(value == 0, slope, jnp.nan)
    return jnp.where(z == 0, gate_at_zero, phi(z) / jnp.where(z == 0, 1, z))


ACTIVATIONS = {
    "identity": Activation(lambda z: z, jnp.ones_like),
    "relu": Activation(jax.nn.relu, lambda z: (z > 0).astype(z.dtype)),
    "gelu": Activation(lambda z: jax.nn.gelu(z, approximate=False), jax.scipy.stats.norm.cdf),
    "gelu_tanh": Activation(lambda z: jax.nn.gelu(z, approximate=True), _gelu_tanh_gate),
    "quick_gelu": Activation(
        lambda z: z * jax.nn.sigmoid(1.702 * z), lambda z: jax.nn.sigmoid(1.702 * z)
    ),
    "silu": Activation(jax.nn.silu, jax.nn.sigmoid),
    "tanh": Activation(jnp.tanh, _tanh_gate),
}
GATED = {"reglu": "relu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "swiglu": "silu"}


def get_activation(kind: str | Callable) -> Activation:
    """Return the activation of an MLP kind; for a gated MLP, the activation of the gate.

    Args:
        kind: See `MLPConfig.mlp`.

    Raises:
        ValueError: An unknown kind, or "none".
    """
    if callable(kind):
        return Activation(kind, lambda z: _quotient_gate(kind, z))
    checks.check_choice(f"mlp={kind!r}", kind, MLP_KINDS[1:])
    return ACTIVATIONS[GATED.get(kind, kind)]


def norm_statistics(
    x: Float[Array, "n d"], kind: str | Callable, eps: float
) -> tuple[Float[Array, "n 1"], Float[Array, "n #d"]]:
    """Compute (mean, 1/σ) of each token, in at least float32.

    σ² = variance + eps; for RMSNorm the mean is 0 and σ² = mean square + eps. For the caller's norm
    the mean is 0 and σ is what it returns.

    Args:
        x: Tokens.
        kind, eps: See `apply_norm`.

    Raises:
        ValueError: An unknown kind.
    """
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    if callable(kind):
        return jnp.zeros_like(x[:, :1]), kind(x)
    checks.check_choice(f"norm={kind!r}", kind, NORM_KINDS)
    mean = jnp.mean(x, axis=-1, keepdims=True)
    if kind == "rms":
        mean = jnp.zeros_like(mean)
    variance = jnp.mean(jnp.square(x - mean), axis=-1, keepdims=True)
    return mean, jax.lax.rsqrt(variance + jnp.asarray(eps, x.dtype))


def apply_norm(
    params: NormParams | None,
    x: Float[Array, "n d"],
    kind: NormKind | Callable = "layer",
    eps: float = 1e-12,
) -> Float[Array, "n d"]:
    """Compute (x − mean)/σ · gain + bias, token by token.

    Args:
        params: Gain and bias, each [d]; None for neither.
        x: Tokens [n, d].
        kind: "layer" (Ba et al. 2016), "rms" (Zhang and Sennrich 2019: no mean, no bias) or the
            caller's function, see `ResidualConfig`.
        eps: Added to the variance.
    """
    mean, inverse = norm_statistics(x, kind, eps)
    y = ((x.astype(mean.dtype) - mean) * inverse).astype(x.dtype)
    if params is not None:
        y = y * params.gain[None, :]
        if params.bias is not None:
            y = y + params.bias[None, :]
    return y


def apply_mlp(
    params: MLPParams,
    x: Float[Array, "n d"],
    kind: str | Callable,
    routing: Routing | None = None,
    edit: Callable[[str, Array], Array] | None = None,
) -> Float[Array, "n d"]:
    """Compute φ(x W_in + b_in) W_out + b_out; gated: φ(x W_gate + b_gate) ∘ (x W_in + b_in) as φ.

    Args:
        params: Parameters; `w_gate` and `b_gate` for gated kinds only.
        x: Tokens [n, d].
        kind: One of `MLP_KINDS` but "none".
        routing: Routing weights of a mixture of experts; hidden units are multiplied by
            `unit_shares`.
        edit: (name, value) -> value for the "mlp_hidden" units [n, f] before W_out.
    """
    z = _affine(x, params.w_in, params.b_in)
    hidden = compute_gate(params, x, kind) * z if kind in GATED else get_activation(kind).fn(z)
    if routing is not None:
        hidden = hidden * unit_shares(params, x, routing)
    if edit is not None:
        hidden = edit("mlp_hidden", hidden)
    return _affine(hidden, params.w_out, params.b_out)


def compute_gate(params: MLPParams, x: Float[Array, "n d"], kind: str) -> Float[Array, "n f"]:
    """Compute φ(x W_gate + b_gate), which multiplies the units of a gated MLP.

    Args:
        params: Parameters with `w_gate` [d, f].
        x: Tokens.
        kind: Kind of a gated MLP.
    """
    return get_activation(kind).fn(_affine(x, params.w_gate, params.b_gate))


def unit_shares(params: MLPParams, x: Float[Array, "n d"], routing: Routing) -> Float[Array, "n f"]:
    """Compute the factor of each hidden unit in a mixture of experts, Σ_e p_e MLP_e as one MLP.

    p is the softmax of x W_router over the experts. It is 0 except for the `per_token` largest
    entries, which are divided by their sum if the kind is "chosen". Shared units come last, with
    σ(x w_shared).

    Args:
        params: Parameters with `w_router` [d, experts], and with `w_shared` where units are shared.
        x: Tokens [n, d].
        routing: Number of experts that a token uses, and how they are chosen.

    Returns:
        [n, f], 0 for the units of experts that a token does not use.

    Source: Shazeer et al. 2017; Jiang et al. 2024 (Mixtral), section 2.1.
    """
    logits = x @ params.w_router
    p = jax.nn.softmax(logits.astype(jnp.promote_types(x.dtype, jnp.float32)), axis=-1)
    highest, index = jax.lax.top_k(p, routing.per_token)
    if routing.kind == "chosen":
        highest = highest / highest.sum(axis=-1, keepdims=True)
    shares = jnp.put_along_axis(jnp.zeros_like(p), index, highest, axis=-1, inplace=False)
    expert_width = (params.w_in.shape[-1] - routing.d_shared) // routing.num_experts
    shares = jnp.repeat(shares.astype(x.dtype), expert_width, axis=-1)
    if not routing.d_shared:
        return shares
    shared = jnp.repeat(jax.nn.sigmoid(x @ params.w_shared), routing.d_shared, axis=-1)
    return jnp.concatenate([shares, shared], axis=-1)


def _affine(x, w, b):
    """Compute x w + b; b may be None."""
    y = x @ w
    return y if b is None else y + b[None, :]
