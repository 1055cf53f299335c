"""Attention variants by name: replacements of softmax attention with their authors' start values.

    config = rc.variant(rc.transformer(depth=12, num_heads=4, d_model=64, mask="causal"), "shaped")
    params = rc.network.init_variant(key, config, "shaped")

A head is a composition: scores S, weights P = normalise(S), the mixing matrix M = α I + β P + γ C,
a gate. A variant sets `normalise`, `mixing` or, where it has parts of its own, `mix` of the
configuration. Its values (α, β, γ, sinks, decays, temperature laws) are numbers, [L] or [L, H],
leaves of the configuration: traced, swept by `jax.vmap` and trained by a gradient with respect to
the configuration.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from rank_collapse import struct
from rank_collapse.network import variant_heads as heads
from rank_collapse.network.attention import Mixing
from rank_collapse.network.config import DEFAULTS, TransformerConfig
from rank_collapse.network.covers import ANY, Covers
from rank_collapse.network.layers import ACTIVATIONS
from rank_collapse.network.parameters import TransformerParams, init
from rank_collapse.struct import refuse_if

VariantName = Literal[
    "softmax",
    "centred",
    "a_perp",
    "value_skipinit",
    "shaped",
    "attn_scale",
    "sigmoid",
    "softpick",
    "off_by_one",
    "sinks",
    "ssmax",
    "critical",
    "differential",
    "gated",
    "retention",
    "linear",
    "ssd",
    "dyt",
]

# --- Values as the authors start them: (config, key or None) → {name: value}


def _differential_values(config, key):
    start = jnp.asarray([0.8 - 0.6 * math.exp(-0.3 * l) for l in range(config.depth)])
    shape = (config.depth, 4, config.qk_width // 2)
    vectors = None if key is None else 0.1 * jax.random.normal(key, shape)
    return {"lambda_init": start, "vectors": vectors, "eps": 1e-5}


def _ssd_values(config, key):
    """a_h uniform in 1 .. 16, Δ log-uniform in 1e-3 .. 0.1; spread over heads without a key."""
    shape = (2, config.depth, config.num_heads)
    spread = (jnp.arange(config.num_heads) + 0.5) / config.num_heads
    u = jnp.broadcast_to(spread, shape) if key is None else jax.random.uniform(key, shape)
    step = 0.001 * 100 ** u[1]
    return {"decay": 1 + 15 * u[0], "step_bias": step + jnp.log(-jnp.expm1(-step))}


def _retention_values(config, key):
    power = -5 - jnp.broadcast_to(jnp.arange(config.num_heads), _shape(config))
    return {"decay": 1 - 2.0**power}


def _shape(config):
    return config.depth, config.num_heads


# --- Parameters that the authors start in a way of their own


def _no_queries(attention):
    """W_Q = 0: P = C at first, so that M = α I."""
    return attention.replace(w_q=jnp.zeros_like(attention.w_q))


def _identities(attention):
    """W_Q = W_K = W_V = W_O = I of one head."""
    eye = jnp.broadcast_to(jnp.eye(attention.w_q.shape[-1]), attention.w_q.shape)
    return attention.replace(**dict.fromkeys(("w_q", "w_k", "w_v", "w_o"), eye))


class Variant(NamedTuple):
    """An attention variant."""

    fields: Callable[..., dict[str, Any]]  # (config, **values) → fields of the config that it sets
    values: Any  # of `fields`, or (config, key) → those; None for one that the caller has to give
    source: str
    needs: Mapping[str, Any] = {}  # {field: values that it takes} where it does not take any
    start: Callable[[Any], Any] = lambda attention: attention  # AttentionParams as authors start

    def values_of(self, config: TransformerConfig, key: Any = None) -> dict[str, Any]:
        """The values of `fields` for a network; without a key none that are drawn."""
        return self.values(config, key) if callable(self.values) else dict(self.values)


def _mixing(alpha: Callable | float, beta: Callable | float, gamma: Callable | float) -> Callable:
    """Fields of M = α I + β P + γ C, each a number or a function of the variant's values."""
    own = {"identity": alpha, "weights": beta, "uniform": gamma}

    def fields(config, **values):
        given = {n: a(**values) if callable(a) else a for n, a in own.items()}
        return {"mixing": Mixing(**given)}

    return fields


def _normalise(fn: Callable) -> Callable:
    return lambda config, **values: {"normalise": Partial(fn, *values.values())}


def _mix(fn: Callable, more: Callable[[TransformerConfig], int] = lambda config: 0) -> Callable:
    """Fields of a head of its own, whose queries and keys have `more` features beside their own."""

    def fields(config, **values):
        found = {"mix": Partial(fn, *values.values())}
        if extra := more(config):
            found |= {"d_qk": config.qk_width + extra, "d_v": config.v_width}
            found |= {"rotary_width": config.rotated_width} if config.position == "rotary" else {}
        return found

    return fields


def _differential_fields(config, **values):
    refuse_if(
        config.qk_width % 2, f"differential attention halves queries: d_qk={config.qk_width} is odd"
    )
    return {"mix": Partial(heads.differential, *values.values())}


def _critical_fields(config, gamma):
    d = config.d_model
    refuse_if(
        config.num_heads != 1,
        f"critical scaling has W = I: one head, not num_heads={config.num_heads}",
    )
    law = Partial(heads.by_log_n, jnp.asarray(gamma) / math.sqrt(d), 1.0)
    return {"d_qk": d, "d_v": d, "norm_placement": "pre", "norm": "rms", "normalise": law}


def dynamic_tanh(alpha: Any, x: Any) -> Any:
    """tanh(α x)/x [n, d], what dynamic tanh multiplies tokens [n, d] by; α at 0."""
    return alpha * ACTIVATIONS["tanh"].gate(alpha * x)


# What makes its own scores takes none of these fields of softmax attention.
OWN_SCORES = {n: (DEFAULTS[n],) for n in ("score", "scale_scores", "temperature", "qk_norm")}
OWN_SCORES |= {"position": ("none", "rotary", "relative_bias")}
NO_POSITION = OWN_SCORES | {"position": ("none",)}
NO_CAP = {"score_cap": (0.0,)}
CAUSAL = {"mask": ("causal",)}
ATTENTION = ("normalise", "mixing", "mix")
NETWORKS = ("san", "san_mlp", "san_skip", "transformer")  # of `presets`

VARIANTS: dict[VariantName, Variant] = {
    "softmax": Variant(lambda config: {}, {}, "Vaswani et al. 2017"),
    "centred": Variant(_mixing(0.0, 1.0, -1.0), {}, "Ali et al. 2023"),
    "a_perp": Variant(
        _mixing(0.0, lambda num_tokens: num_tokens**0.5, lambda num_tokens: -(num_tokens**0.5)),
        {"num_tokens": None},
        "Nait Saada et al. 2024",
    ),
    "value_skipinit": Variant(
        _mixing(lambda alpha, beta: alpha, lambda alpha, beta: beta, 0.0),
        {"alpha": 1.0, "beta": 0.0},
        "He et al. 2023",
    ),
    "shaped": Variant(
        _mixing(lambda alpha, **_: alpha, lambda beta, **_: beta, lambda gamma, **_: -gamma),
        {"alpha": 1.0, "beta": 1.0, "gamma": 1.0},
        "Noci et al. 2023; He and Hofmann 2023",
        start=_no_queries,
    ),
    "attn_scale": Variant(
        _mixing(0.0, lambda excess: 1 + excess, lambda excess: -excess),
        {"excess": 0.0},
        "Wang et al. 2022",
    ),
    "sigmoid": Variant(_normalise(heads.sigmoid), {"bias": None}, "Ramapuram et al. 2024"),
    "softpick": Variant(_normalise(heads.softpick), {"eps": 1e-8}, "Zuhri et al. 2025"),
    "off_by_one": Variant(_normalise(heads.with_sink), {"sink": 0.0}, "Miller 2023"),
    "sinks": Variant(
        _normalise(heads.with_sink),
        lambda config, key: {"sink": jnp.zeros(_shape(config))},
        "gpt-oss, OpenAI 2025",
    ),
    "ssmax": Variant(
        _normalise(heads.by_log_n),
        lambda config, key: {"scale": jnp.full(_shape(config), 0.168), "power": 1.0},
        "Nakanishi 2025",
    ),
    "critical": Variant(
        _critical_fields,
        {"gamma": 1.0},
        "arXiv 2510.05554",
        {"scale_scores": (True,), "norm_placement": ("none", "pre"), "norm": ("layer", "rms")}
        | {"d_qk": (None,), "d_v": (None,)},
        _identities,
    ),
    "differential": Variant(
        _differential_fields,
        _differential_values,
        "Ye et al. 2024",
        NO_POSITION,
    ),
    "gated": Variant(
        _mix(heads.gated, lambda config: config.v_width),
        {},
        "Qiu et al. 2025 (Qwen)",
        OWN_SCORES,
    ),
    "retention": Variant(
        _normalise(heads.retention),
        _retention_values,
        "Sun et al. 2023",
        CAUSAL,
    ),
    "linear": Variant(_mix(heads.linear), {}, "Katharopoulos et al. 2020", NO_POSITION | NO_CAP),
    "ssd": Variant(
        _mix(heads.ssd, lambda config: 1),
        _ssd_values,
        "Dao and Gu 2024 (Mamba-2)",
        NO_POSITION | NO_CAP | CAUSAL,
    ),
    "dyt": Variant(
        lambda config, alpha: {"norm": dynamic_tanh, "norm_values": alpha},
        {"alpha": 0.5},
        "Zhu et al. 2025",
        dict.fromkeys(ATTENTION, ANY),
    ),
}


def _known(name):
    network = str(name).lower().replace("+", "_")
    if network in NETWORKS:
        raise ValueError(
            f"variant {name!r} is a network, not a form of attention: rc.{network} makes it, and "
            "rc.surgery.variant cuts it out of another network"
        )
    if name not in VARIANTS:
        raise struct.unknown(f"variant {name!r}", name, VARIANTS)
    return VARIANTS[name]


def variant(
    config: TransformerConfig, name: VariantName, *, key: Any = None, **values: Any
) -> TransformerConfig:
    """The config of an attention variant; draw its parameters by `init_variant`.

    Args:
        config: The network, of softmax attention.
        name: One of `VARIANTS`.
        key: For values that the authors draw; None for values without chance in their place.
        **values: In the place of the authors', by name: numbers, [L] or [L, H], α of "dyt" a
            number; may be traced.

    Raises:
        ValueError: An unknown name or value, one that is missing, or a config that has an
            attention of its own already or scores that the variant does not take.
    """
    if not isinstance(config, TransformerConfig):
        raise ValueError(f"variant {name!r} needs a TransformerConfig, not {type(config).__name__}")
    known = _known(name)
    start = known.values_of(config, key)
    for given in values:
        refuse_if(
            given not in start, f"variant {name!r} has no value {given!r}, only {tuple(start)}"
        )
    start |= values
    refuse_if(
        name == "a_perp" and start["num_tokens"] is None,
        "variant 'a_perp' scales by √num_tokens: give num_tokens",
    )
    taken = dict.fromkeys(DEFAULTS, ANY) | dict.fromkeys(ATTENTION, (None,)) | known.needs
    Covers(f"variant {name!r}", taken).check(config)
    return config.replace(**known.fields(config, **start))


def init_variant(
    key: Any,
    config: TransformerConfig,
    name: VariantName,
    weight_scale: Any = 1.0,
    bias_scale: Any = 0.0,
) -> TransformerParams:
    """Parameters of a network, its attention as a variant's authors start it; see `init`.

    Args:
        key: Random key.
        config: From `variant`.
        name: One of `VARIANTS`.
        weight_scale, bias_scale: As of `init`.

    Raises:
        ValueError: An unknown name.
    """
    start = _known(name).start
    params = init(key, config, weight_scale, bias_scale)
    layers = params.layers
    return params.replace(layers=layers.replace(attention=start(layers.attention)))
