"""Attention variants by name: replacements of softmax attention with their authors' start values.

    config = rc.variant(rc.transformer(depth=12, num_heads=4, d_model=64, mask="causal"), "shaped")
    params = rc.network.init_variant(key, config, "shaped")

A head is a composition: scores S, weights P = normalise(S), and M = α I + β P + γ C, which mixes
values. A variant sets `normalise`, `mixing` or `mix` of the configuration. Its values (α, β, γ,
sinks, decays) are numbers, [L] or [L, H], leaves of the configuration: traced, swept by `jax.vmap`
and trained by a gradient with respect to the configuration.

Axis letters: h heads, n queries, m keys, k and v their widths.
"""

import math
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from rank_collapse import checks
from rank_collapse.annotations import ArrayLike, Key, Leaf, Number
from rank_collapse.network.attention import AttentionParams
from rank_collapse.network.attention_config import Mixing
from rank_collapse.network.attention_weights import AttentionContext, softmax
from rank_collapse.network.config import DEFAULTS, TransformerConfig, check_config
from rank_collapse.network.covers import ANY, Covers
from rank_collapse.network.parameters import TransformerParams, init

VariantName = Literal[
    "softmax",
    "centred",
    "shaped",
    "attn_scale",
    "sigmoid",
    "sinks",
    "retention",
    "linear",
]

# --- Weights of scores: (value, scores [h, n, m], context) → P [h, n, m]


def allowed_keys(scores: ArrayLike, context: AttentionContext) -> Leaf:
    """Compute the keys that a query may attend to, Bool [1 or h, n, m].

    Args:
        scores: [h, n, m].
        context: Context with the mask.
    """
    mask = jnp.ones(scores.shape[-2:], bool) if context.mask is None else context.mask
    return mask.reshape((1,) * (3 - mask.ndim) + mask.shape)


def _zero_to_one(total):
    """Replace 0 by 1 in sums of rows to divide by: weights of a row without a key stay 0."""
    return jnp.where(total == 0, 1, total)


def with_sink(sink: Number, scores: Leaf, context: AttentionContext) -> Leaf:
    """Compute exp(S_ij) / (exp(s_h) + Σ_j exp S_ij): a column of score s_h, then dropped.

    Args:
        sink: s, a number, [L] or [L, H].
        scores, context: See `AttentionConfig.normalise`.
    """
    column = jnp.broadcast_to(context.broadcast_to_heads(sink, len(scores)), (*scores.shape[:2], 1))
    allowed = jnp.broadcast_to(allowed_keys(scores, context), scores.shape)
    mask = jnp.concatenate([allowed, jnp.ones_like(allowed[..., :1])], axis=-1)
    widened = jnp.concatenate([scores, column.astype(scores.dtype)], axis=-1)
    return jnp.where(allowed, softmax(widened, mask)[..., :-1], 0)


def sigmoid(bias: Number | None, scores: Leaf, context: AttentionContext) -> Leaf:
    """Compute σ(S + b), b = −ln m for None with m all keys, padding too; rows sum to any value.

    Args:
        bias: b, a number, [L] or [L, H]; None for −ln m.
        scores, context: See `AttentionConfig.normalise`.
    """
    if bias is None:
        shift = -math.log(scores.shape[-1])
    else:
        shift = context.broadcast_to_heads(bias, len(scores))
    return jnp.where(allowed_keys(scores, context), jax.nn.sigmoid(scores + shift), 0)


def retention(decay: Number, scores: Leaf, context: AttentionContext) -> Leaf:
    """Compute S ∘ D / max(|Σ_j (S ∘ D)_ij|, 1), D_ij = γ_h^(i−j) / √(Σ_j γ_h^(i−j)).

    The divisor has no gradient.

    Args:
        decay: γ, a number, [L] or [L, H].
        scores, context: See `AttentionConfig.normalise`.

    Raises:
        ValueError: Queries and keys that are different tokens.
    """
    h, n, m = scores.shape
    if n != m:
        raise ValueError(
            f"retention needs equal numbers of keys and queries, not scores of shape {scores.shape}"
        )
    distance = jnp.abs(jnp.arange(n)[:, None] - jnp.arange(n)[None, :])
    powers = context.broadcast_to_heads(decay, h) ** distance[None]
    d = jnp.where(allowed_keys(scores, context), powers, 0)
    p = scores * d / jnp.sqrt(_zero_to_one(d.sum(axis=-1, keepdims=True)))
    size = jax.lax.stop_gradient(jnp.abs(p.sum(axis=-1, keepdims=True)))
    return p / jnp.maximum(size, 1)


def linear(q: Leaf, k: Leaf, v: Leaf, context: AttentionContext) -> tuple[Leaf, None]:
    """Compute M = φ(q)φ(k)ᵀ over its row sums, φ = elu + 1: a full head, `AttentionConfig.mix`.

    Args:
        q, k, v, context: See `AttentionConfig.mix`.
    """
    products = (jax.nn.elu(q) + 1) @ (jax.nn.elu(k) + 1).swapaxes(1, 2)
    m = jnp.where(allowed_keys(products, context), products, 0)
    return m / _zero_to_one(m.sum(axis=-1, keepdims=True)), None


# --- The table


class Variant(NamedTuple):
    """An attention variant.

    Attributes:
        fields: Values → the fields of the configuration that the variant sets.
        values: Configuration → the values at which its authors start.
        source: The paper.
        needs: {field: values that the variant supports}, where it does not support all of them.
        start: Drawn parameters → the parameters at which its authors start.
    """

    fields: Callable[..., dict[str, object]]
    values: Callable[[TransformerConfig], dict[str, object]]
    source: str
    needs: Mapping[str, object] = {}
    start: Callable[[AttentionParams], AttentionParams] = lambda attention: attention


def _constant_values(**values: object) -> Callable[[TransformerConfig], dict[str, object]]:
    """Make the function `Variant.values` of values that do not depend on the network."""
    return lambda config: dict(values)


def _retention_values(config):
    heads = jnp.arange(config.num_heads)
    return {"decay": 1 - 2.0 ** (-5 - jnp.broadcast_to(heads, (config.depth, len(heads))))}


def _zero_queries(attention):
    """Set W_Q = 0, so that P = C at first and M = α I."""
    return attention.replace(w_q=jnp.zeros_like(attention.w_q))


# A variant without softmax scores supports none of these fields.
WITHOUT_SCORES = {
    name: (DEFAULTS[name],)
    for name in ("score", "scale_scores", "temperature", "qk_norm", "position", "score_cap")
}
ATTENTION = ("normalise", "mixing", "mix")

VARIANTS: dict[VariantName, Variant] = {
    "softmax": Variant(lambda: {}, _constant_values(), "Vaswani et al. 2017"),
    "centred": Variant(
        lambda: {"mixing": Mixing(0.0, 1.0, -1.0)}, _constant_values(), "Ali et al. 2023"
    ),
    "shaped": Variant(
        lambda alpha, beta, gamma: {"mixing": Mixing(alpha, beta, -gamma)},
        _constant_values(alpha=1.0, beta=1.0, gamma=1.0),
        "Noci et al. 2023; He and Hofmann 2023",
        start=_zero_queries,
    ),
    "attn_scale": Variant(
        lambda excess: {"mixing": Mixing(0.0, 1 + excess, -excess)},
        _constant_values(excess=0.0),
        "Wang et al. 2022",
    ),
    "sigmoid": Variant(
        lambda bias: {"normalise": Partial(sigmoid, bias)},
        _constant_values(bias=None),
        "Ramapuram et al. 2024",
    ),
    "sinks": Variant(
        lambda sink: {"normalise": Partial(with_sink, sink)},
        lambda config: {"sink": jnp.zeros((config.depth, config.num_heads))},
        "gpt-oss, OpenAI 2025",
    ),
    "retention": Variant(
        lambda decay: {"normalise": Partial(retention, decay)},
        _retention_values,
        "Sun et al. 2023",
        {"mask": ("causal",)},
    ),
    "linear": Variant(
        lambda: {"mix": Partial(linear)},
        _constant_values(),
        "Katharopoulos et al. 2020",
        WITHOUT_SCORES,
    ),
}


def _find_variant(name):
    """Return the variant of a name.

    Raises:
        ValueError: There is no variant of this name.
    """
    if name in ("san", "san_mlp", "san_skip", "transformer"):
        raise ValueError(
            f"{name!r} is a network, not a variant of attention: use rc.{name}(depth, ...)"
        )
    checks.check_choice(f"variant {name!r}", name, VARIANTS)
    return VARIANTS[name]


def variant(config: TransformerConfig, name: VariantName, **values: object) -> TransformerConfig:
    """Replace a network's attention by a variant; `init_variant` draws its parameters.

    Args:
        config: The network, of softmax attention.
        name: One of `VARIANTS`.
        **values: Values that replace the authors', by name: numbers, [L] or [L, H]; may be traced.

    Returns:
        The config of the variant.

    Raises:
        ValueError: An unknown name or value, or a config whose attention is already replaced, or
            whose scores the variant does not support.
    """
    check_config(config)
    spec = _find_variant(name)
    start = spec.values(config)
    for value in values:
        if value not in start:
            raise ValueError(f"variant {name!r} has no value {value!r}, only {tuple(start)}")
    supported = dict.fromkeys(DEFAULTS, ANY) | dict.fromkeys(ATTENTION, (None,)) | spec.needs
    Covers(f"variant {name!r}", supported).check(config)
    return config.replace(**spec.fields(**(start | values)))


def init_variant(
    key: Key,
    config: TransformerConfig,
    name: VariantName,
    weight_scale: Number = 1.0,
    bias_scale: Number = 0.0,
) -> TransformerParams:
    """Draw parameters of a network, with the attention initialised as by the variant's authors; see
    `init`.

    Args:
        key: Random key.
        config: Configuration from `variant`.
        name: One of `VARIANTS`.
        weight_scale, bias_scale: See `init`.

    Raises:
        ValueError: An unknown name.
    """
    start = _find_variant(name).start
    params = init(key, config, weight_scale, bias_scale)
    layers = params.layers
    return params.replace(layers=layers.replace(attention=start(layers.attention)))
