"""Collapse at initialisation: the number of heads, gains by depth, random values."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rank_collapse as rc
from experiments.theorems import prescribed_networks
from experiments.theorems.outcomes import Curve, Panel, Theorem

HEADS = (1, 4, 16)


def make_uniform(params: rc.network.TransformerParams) -> rc.network.TransformerParams:
    """Sets all queries to 0: scores are equal and attention is uniform."""
    attention = params.layers.attention
    attention = attention.replace(w_q=0 * attention.w_q)
    return params.replace(layers=params.layers.replace(attention=attention))


def pass_heads(
    key: jax.Array, heads: int, *, depth: int = 12, n: int = 16, d: int = 64, uniform: bool = False
) -> jax.Array:
    """Measures the mean cosine of two tokens, [l], of post-norm attention at initialisation.

    Args:
        key: Random key for the weights and the tokens.
        heads, depth, n, d: H, layers, tokens, width.
        uniform: Whether attention is uniform, as the law assumes.
    """
    key_p, key_x = jax.random.split(key)
    config = rc.san_skip(depth, heads, d, norm_placement="post", norm="rms")
    params = rc.init(key_p, config)
    params = make_uniform(params) if uniform else params
    hidden = rc.apply(params, jax.random.normal(key_x, (n, d)), config).hidden
    return rc.profile(hidden, measures="token_cosine")["token_cosine"]


def compare_heads(
    key: jax.Array, few: int, many: int, *, networks: int = 32, **sizes: float
) -> jax.Array:
    """Computes the ln of the mean of 1 − ρ after the last layer at many heads, minus the same at
    few.

    Args:
        key: Random key for the weights and the tokens; both kinds of networks have the same tokens.
        few, many: Numbers of heads.
        networks: Number of networks of each kind, over which the mean is taken.
        **sizes: See `pass_heads`.
    """

    def measure(heads):
        keys = jax.random.split(key, networks)
        apart = jax.lax.map(lambda one: 1 - pass_heads(one, heads, **sizes)[-1], keys)
        return jnp.log(jnp.mean(apart))

    return measure(many) - measure(few)


def head_curves(seed: int, *, n: int = 16, depth: int = 12, draws: int = 12) -> list[Curve]:
    """Compares the token cosine of networks with 1 to 16 heads with one law that does not contain
    H.

    Args:
        seed: Seed of the draws.
        n: Number of tokens.
        depth: Number of layers.
        draws: Number of networks.
    """
    gains, layers = jnp.ones(depth), np.arange(depth + 1)
    keys = jax.random.split(jax.random.key(seed), draws)
    apart, start = {}, []
    for heads in HEADS:
        measure = jax.jit(jax.vmap(lambda key, h=heads: pass_heads(key, h, n=n, uniform=True)))
        cosine = measure(keys)
        apart[heads] = np.log(np.mean(1 - np.asarray(cosine), axis=0))
        start.append(jnp.mean(cosine[:, 0]))
    log_apart, _ = rc.collapse_law(float(np.mean(start)), n, gains, gains)
    law, last = np.asarray(log_apart), [values[-1] for values in apart.values()]
    return [
        *(Curve(f"H {h}, uniform", layers, law, values, "none") for h, values in apart.items()),
        Curve("after 12 layers, uniform", HEADS, law[-1], last, tolerance=0.15, panel=1),
    ]


def gain_curves(seed: int, *, n: int = 16, d: int = 64, draws: int = 6) -> list[Curve]:
    """Compares the share of differences by depth with the closed law, for gains 1 and 1/√L.

    Args:
        seed: Seed of the draws.
        n: Number of tokens.
        d: Their width.
        draws: Number of networks for each gain and depth.
    """
    depths, powers, laws, measured = (4, 16, 64), np.array([0.5, 0.0]), [], []
    keys = jax.random.split(jax.random.key(seed), draws)
    for depth in depths:

        def measure(key, gain, depth=depth):
            """Measures mean |x_i − x̄|² and mean |x_i|² of one draw after the last layer."""
            config = rc.san_skip(depth, 1, d, branch_gain=gain)
            key_p, key_x = jax.random.split(key)
            params = make_uniform(rc.init(key_p, config))
            last = rc.apply(params, jax.random.normal(key_x, (n, d)), config).hidden[-1]
            parts = rc.measures.residual(last), last
            return jnp.stack([jnp.mean(jnp.sum(part**2, axis=-1)) for part in parts])

        measure_draws = jax.jit(jax.vmap(measure, in_axes=(0, None)))
        parts = [jnp.mean(measure_draws(keys, depth**-power), axis=0) for power in powers]
        measured.append([float(jnp.log10(spread / size)) for spread, size in parts])
        # Sums of squares: differences stay, the mean token grows by 1 + a² in each layer.
        growth = (1 + depth ** (-2 * powers)) ** depth
        laws.append(np.log10((1 - 1 / n) / (1 - 1 / n + growth / n)))
    lines = zip(("gain 1/√L", "gain 1"), np.transpose(laws), np.transpose(measured), strict=True)
    return [Curve(name, depths, law, shares, tolerance=0.3) for name, law, shares in lines]


def pass_pair(
    key: jax.Array,
    time: float | jax.Array,
    *,
    d: int = 2,
    depth: int = 400,
    random: bool = True,
) -> jax.Array:
    """Measures the cosine of two tokens on the sphere after a time.

    Args:
        key: Random key for the tokens and the values.
        time: Layers × gain², or layers × gain where values are not noise.
        d, depth: Width, layers.
        random: Whether every layer has Gaussian values; else V = I.
    """
    key_v, key_x = jax.random.split(key)
    x = prescribed_networks.draw_sphere(key_x, 2, d)
    if random:
        config = prescribed_networks.make_sphere(
            depth, d, 1.0, jnp.sqrt(time / depth), layer_map=()
        )
        values = jax.random.normal(key_v, (depth, 1, d, d)) / jnp.sqrt(d)
        params = prescribed_networks.make_params(config, value=values)
    else:
        config = prescribed_networks.make_sphere(depth, d, 1.0, time / depth)
        params = prescribed_networks.make_params(config)
    return rc.token_cosine(rc.apply(params, x, config).hidden[-1])


def opposite_share(
    key: jax.Array, time: float | jax.Array, *, pairs: int = 256, **fields: Any
) -> jax.Array:
    """Measures the share of pairs of tokens whose cosine after a time is below 0.

    Args:
        key, time: See `pass_pair`.
        pairs: Independent networks, of two tokens each.
        **fields: See `pass_pair`.
    """
    cosines = jax.vmap(lambda key: pass_pair(key, time, **fields))(jax.random.split(key, pairs))
    return jnp.mean(cosines < 0)


def noise_curves(seed: int) -> list[Curve]:
    """Measures the cosine of two tokens under random values in every layer, and under V = I."""
    times, key, shares = np.array([0.0, 1.0, 2.0, 4.0, 8.0, 16.0]), jax.random.key(seed), {}
    for random in (True, False):
        measure = jax.jit(lambda time, random=random: opposite_share(key, time, random=random))
        shares[random] = np.array([float(measure(time)) for time in times])
    longest = shares[True][-1:]
    return [
        Curve("random values", times, np.nan, shares[True], "none"),
        Curve("V = I", times, np.nan, shares[False], "none"),
        Curve("longest time, above 0", times[-1:], 0.1, longest, "≥", 0, ordering=True),
    ]


THEOREMS = (
    Theorem(
        "heads",
        "Koubbi et al. 2026 (2604.01978), a question",
        "abstract",
        "At a fixed branch variance the law of collapse does not depend on the number of heads.",
        "1 − ρ' = (1 − ρ)/(1 + ρ + (1 − ρ)/n), `rc.collapse_law`",
        "Uniform attention, independent weights, large width; derived here, not in the paper",
        "`rc.apply` (post-norm), `rc.profile` token_cosine, `rc.collapse_law`",
        "Yes: choose the number of heads for other reasons.",
        (
            Panel("layer", "ln(1 − mean cosine of two tokens)"),
            Panel("heads H", "the same after 12 layers", "x"),
        ),
        head_curves,
        terms="The law of collapse predicts the mean cosine of two tokens after each layer. The "
        "branch variance is the variance of the vectors that the attention sublayer adds to the "
        "tokens.",
    ),
    Theorem(
        "depth_gains",
        "Noci et al. 2022 (2206.03126)",
        "memory",
        "A branch gain of 1/√L keeps tokens apart at any depth; a gain of 1 does not.",
        "differences keep their size, the mean token's square grows as (1 + a²)^L",
        "Uniform attention, no norm, independent weights",
        "`rc.apply` without norms, states after the last layer",
        "Yes: it is the gain of `rc.design` families and of depth rules.",
        (Panel("layers L", "log10 of the share of differences", "x"),),
        gain_curves,
        terms="The branch gain multiplies the output of each attention sublayer, and L is the "
        "number of layers.",
    ),
    Theorem(
        "noise",
        "Fedorov et al. 2026 (Clustering in deep stochastic Transformers, PMLR 306)",
        "abstract",
        "Random value matrices in every layer keep two tokens from becoming equal.",
        "two tokens end opposite with a positive probability",
        "Independent values, gain √(t/L), unit norm; small width",
        "`rc.apply` (post-norm, unit norm), `rc.token_cosine`",
        "Yes: collapse of the sphere with V = I is no model of an initialised network.",
        (Panel("time t", "share of pairs with cosine below 0"),),
        noise_curves,
        terms="Tokens are unit vectors. Each layer draws a new random value matrix.",
    ),
)
