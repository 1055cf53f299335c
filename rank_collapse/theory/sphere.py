"""Tokens as particles on the sphere: attention in continuous depth (Geshkovski et al. 2023).

ẋ_i = P_{x_i} Σ_j softmax_j(β⟨Q x_i, K x_j⟩) V x_j, P_x = I − x xᵀ, for |x_i| = 1.

Axis letters: n tokens, d width, t steps.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse.network.precision import full_precision

PLACEMENTS = ("post", "pre", "sandwich", "ngpt", "layernorm_scaling")


@full_precision
def trajectory(
    x: Float[Array, "n d"], beta: Any, num_steps: int, dt: Any = 0.1
) -> Float[Array, "t n d"]:
    """Tokens at 0, dt, 2dt, ...: Euler's step with Q = K = V = I, back onto the sphere."""

    def step(x, _):
        out = jax.nn.softmax(beta * x @ x.T, axis=-1) @ x
        moved = x + dt * (out - jnp.sum(out * x, axis=1, keepdims=True) * x)
        moved = moved / jnp.linalg.norm(moved, axis=1, keepdims=True)
        return moved, moved

    return jnp.concatenate([x[None], jax.lax.scan(step, x, None, length=num_steps)[1]])


@full_precision
def num_clusters(x: Float[Array, "n d"]) -> Array:
    """Tokens without an earlier one at a cosine above 0.9999: how many clusters there are."""
    near = x @ x.T > 0.9999
    earlier = jnp.arange(len(x))[None, :] < jnp.arange(len(x))[:, None]
    return jnp.sum(~jnp.any(near & earlier, axis=1))


def equiangular_cosine(
    start: Any,
    beta: Any,
    num_tokens: Any,
    num_steps: int,
    dt: Any = 0.1,
    *,
    placement: str = "post",
    gain: Any = 1.0,
) -> Float[Array, "t"]:
    """The cosine c of n tokens that are all at one angle, as they stay: at 0, dt, 2dt, ...

    ċ = 2 (1 − c)(1 + (n − 1) c) P/s with P = 1/(e^{β(1−c)} + n − 1) the weight of another token and
    s what the norms slow it down by: 1 under "post", the radius r under "pre" (ṙ = ⟨x̂, A⟩, A
    attention's output), r‖A‖ under "sandwich" (ṙ = ⟨x̂, A⟩/‖A‖), ‖A‖/α under "ngpt" and r √(t + 1)
    under "layernorm_scaling". By Runge and Kutta, from r = 1.

    Args:
        start: c at time 0.
        beta, num_tokens: β and n.
        num_steps, dt: As in `trajectory`.
        placement: One of `PLACEMENTS`.
        gain: α of "ngpt".

    Raises:
        ValueError: An unknown placement.

    Source: Geshkovski et al. 2023 (arXiv 2312.10794), theorem 6.8; norms by arXiv 2510.22026.
    """
    if placement not in PLACEMENTS:
        raise ValueError(f"placement={placement!r} is not one of {PLACEMENTS}")
    n = num_tokens

    def slopes(state):
        c, r, t = state
        share = 1 / (jnp.exp(beta * (1 - c)) + n - 1)
        own, others = 1 - (n - 1) * share, (n - 1) * share
        along = own + others * c  # ⟨x̂, A⟩
        size = jnp.sqrt(own * (own + 2 * others * c) + others * share * (1 + (n - 2) * c))
        slow, out = {
            "post": (1.0, 0.0),
            "pre": (r, along),
            "sandwich": (r * size, along / size),
            "ngpt": (size / gain, 0.0),
            "layernorm_scaling": (r * jnp.sqrt(t + 1), along / jnp.sqrt(t + 1)),
        }[placement]
        return jnp.stack([2 * (1 - c) * (1 + (n - 1) * c) * share / slow, out + 0 * c, 1 + 0 * c])

    def step(state, _):
        a = slopes(state)
        b = slopes(state + 0.5 * dt * a)
        e = slopes(state + 0.5 * dt * b)
        state = state + dt / 6 * (a + 2 * b + 2 * e + slopes(state + dt * e))
        return state, state

    first = jnp.stack([jnp.asarray(start, float), jnp.ones(()), jnp.zeros(())])
    found = jax.lax.scan(step, first, None, length=num_steps)[1]
    return jnp.concatenate([first[None, 0], found[:, 0]])
