"""Gains of skips and branches: one value for all sublayers, or their own for each kind and layer.

Post-norm with gains reads N(λ x + γ branch(x)). Admin's ω (λ = ω), DeepNet's α (λ = α), LayerScale
(γ [L, d]), ReZero (γ = 0 at first) and 1/√L (γ) are values of these, not code.

Axis letters: l layers, d width.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from rank_collapse import struct
from rank_collapse.network.config import TransformerConfig


@struct.dataclass
class Gains:
    """A gain of each kind of sublayer: a number, [L] or [L or 1, d]; after `layer_gains` [L(, d)].

    As `skip_gain` or `branch_gain` of a config it tells the sublayers apart:
    `config.replace(skip_gain=Gains(attention=2.0, mlp=1.0))`.
    """

    attention: Any = 1.0
    cross: Any = 1.0
    mlp: Any = 1.0


@struct.dataclass
class LayerGains:
    """Everything of a layer that may be swept; with a leading layer axis for a stack."""

    skip: Gains  # λ
    branch: Gains  # γ
    temperature: Any


def layer_gains(config: TransformerConfig, dtype: Any) -> LayerGains:
    """The gains and the temperature of a config, one entry per layer.

    Args:
        config: The network.
        dtype: Of the arithmetic.

    Returns:
        Leaves [L], or [L, d] where a gain is given per feature.

    Raises:
        ValueError: A gain of another shape.
    """

    def each(name: str, gain: Any) -> Gains:
        kinds = gain if isinstance(gain, Gains) else Gains(gain, gain, gain)
        return Gains(
            *(
                _by_layer(name, value, config, dtype)
                for value in (kinds.attention, kinds.cross, kinds.mlp)
            )
        )

    return LayerGains(
        skip=each("skip_gain", config.skip_gain),
        branch=each("branch_gain", config.branch_gain),
        temperature=_by_layer("temperature", config.temperature, config, dtype),
    )


def _by_layer(name: str, value: Any, config: TransformerConfig, dtype: Any) -> Array:
    value = jnp.asarray(value, dtype)
    depth, d = config.depth, config.d_model
    features = name != "temperature"
    if value.ndim == 0 or value.shape == (depth,):
        return jnp.broadcast_to(value, (depth,))
    if features and value.shape in ((depth, d), (1, d)):
        return jnp.broadcast_to(value, (depth, d))
    allowed = f"() or [{depth}]" + (f" or [{depth} or 1, {d}]" if features else "")
    raise ValueError(
        f"{name} of shape {value.shape} is not {allowed} for depth={depth}, d_model={d}; "
        "use jax.vmap to sweep it"
    )


def scaled(gain: Any, x: Array) -> Array:
    """gain · x for a scalar or [d] gain and any x [..., d]."""
    gain = jnp.asarray(gain, x.dtype)
    return gain.reshape((1,) * (x.ndim - 1) + (-1,)) * x if gain.ndim else gain * x
