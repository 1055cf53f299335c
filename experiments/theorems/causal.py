"""Causal attention: tokens go to the first, park near early ones, forget and squash their past."""

import jax
import jax.numpy as jnp
import numpy as np

import rank_collapse as rc
from experiments.theorems import prescribed_networks
from experiments.theorems.outcomes import Curve, Theorem

RENYI = 0.7475979202534114  # share of a long street that cars parked at random leave full
COUNTS = (8, 16, 32, 64, 128, 256)  # of repeated tokens
SCALES = (0.25, 0.5, 1.0, 2.0)  # of the weights, for the bound on the Jacobian


def first_token_curves(seed: int, *, n: int = 16, d: int = 8, draws: int = 3) -> list[Curve]:
    """Measures the least cosine to the first token by time, with random scores and V = I."""
    gain, times = 0.05, np.array([5, 10, 20, 40])
    curves = []
    for mask in ("causal", "none"):
        cosines = []
        for draw in range(draws):
            key_m, key_x = jax.random.split(jax.random.fold_in(jax.random.key(seed), draw))
            x = prescribed_networks.draw_sphere(key_x, n, d)
            config = prescribed_networks.make_sphere(
                round(times[-1] / gain), d, 1.0, gain, mask=mask
            )
            params = prescribed_networks.make_params(config, jax.random.normal(key_m, (d, d)))
            states = prescribed_networks.pass_states(params, x, config, round(times[0] / gain))
            cosines.append(jnp.min(states @ x[0], axis=-1)[times // times[0]])
        least = np.min(cosines, axis=0)
        if mask == "causal":
            curves.append(Curve("causal, worst of the draws, last time", times[-1:], 1, least[-1:]))
            curves.append(Curve("causal, worst of the draws", times, np.nan, least, "none"))
        else:
            curves.append(Curve("no mask, worst of the draws", times, np.nan, least, "none"))
    return curves


def park(angles: np.ndarray, distance: float) -> np.ndarray:
    """Lists the tokens that are farther than a distance from all earlier ones in the list.

    Args:
        angles: Of tokens on the circle, in their order.
        distance: δ, in radians.

    Returns:
        Indices of the Rényi centres.
    """
    centres: list[int] = []
    for index, angle in enumerate(angles):
        gaps = np.abs(angles[centres] - angle)
        if not len(gaps) or np.minimum(gaps, 2 * np.pi - gaps).min() > distance:
            centres.append(index)
    return np.array(centres)


def count_clusters(angles: np.ndarray, gap: float) -> int:
    """Counts groups of angles on the circle that empty arcs above a gap separate."""
    ordered = np.sort(angles % (2 * np.pi))
    return int(np.sum(np.diff(ordered, append=ordered[0] + 2 * np.pi) > gap))


def parking_curves(seed: int, *, n: int = 200, beta: float = 64.0, draws: int = 100) -> list[Curve]:
    """Counts Rényi centres, and how many tokens of a causal network are near one after a time."""
    distance, gain, depth = 4 / np.sqrt(beta), 0.05, 100
    config = prescribed_networks.make_sphere(depth, 2, beta, gain, mask="causal")
    params = prescribed_networks.make_params(config)
    numbers, near, moved, clusters = [], [], [], []
    for draw in range(draws):
        key = jax.random.fold_in(jax.random.key(seed), draw)
        start = np.asarray(jax.random.uniform(key, (n,), maxval=2 * np.pi))
        centres = park(start, distance)
        numbers.append(len(centres))
        tokens = jnp.stack([jnp.cos(start), jnp.sin(start)], axis=-1)
        last = np.asarray(prescribed_networks.pass_states(params, tokens, config, depth)[-1])
        cosine = last @ np.asarray(tokens)[centres].T
        near.append(np.mean(np.arccos(np.clip(cosine.max(axis=1), -1, 1)) < distance))
        moved.append(np.arccos(np.clip(np.sum(last * tokens, axis=1), -1, 1))[centres].mean())
        clusters.append(count_clusters(np.arctan2(last[:, 1], last[:, 0]), distance / 4))
    predicted = RENYI * 2 * np.pi / distance
    many = [
        len(park(np.random.default_rng((seed, i)).uniform(0, 2 * np.pi, 5000), distance))
        for i in range(draws)
    ]
    errors = [np.std(counts) / np.sqrt(draws) for counts in (many, numbers)]
    within = 3 * errors[0] / predicted
    return [
        Curve("centres among 5000 tokens", draws, predicted, np.mean(many), tolerance=within),
        Curve("centres among 200 tokens", draws, np.nan, np.mean(numbers), "none"),
        Curve("its standard error", draws, np.nan, errors[1], "none"),
        Curve("clusters after t = 5", draws, np.nan, np.mean(clusters), "none"),
        Curve("share of tokens within δ of a centre", draws, np.nan, np.mean(near), "none"),
        Curve("centres moved by, in δ", draws, np.nan, np.mean(moved) / distance, "none"),
    ]


def make_pre_norm(depth: int, d: int, heads: int) -> rc.TransformerConfig:
    """Makes a causal pre-norm network without positions."""
    return rc.san_skip(depth, heads, d, norm_placement="pre", norm="rms", mask="causal")


def repeated_curves(seed: int, *, draws: int = 4) -> list[Curve]:
    """Measures how far the last states of 1…1 0 with k and with k + 1 ones are apart."""
    depth, heads, d = 4, 4, 32
    config = make_pre_norm(depth, d, heads)
    distances = []
    last = jax.jit(lambda params, x: rc.apply(params, x, config).hidden[-1])
    for draw in range(draws):
        key_e, key_p = jax.random.split(jax.random.fold_in(jax.random.key(seed), draw))
        zero, one = jax.random.normal(key_e, (2, d))
        params = rc.init(key_p, config)

        def pass_repeated(count, params=params, zero=zero, one=one):
            is_one = jnp.arange(COUNTS[-1] + 2) < count  # what follows the zero is not seen
            return last(params, jnp.where(is_one[:, None], one, zero))[count]

        distances.append([jnp.linalg.norm(pass_repeated(k) - pass_repeated(k + 1)) for k in COUNTS])
    mean = np.exp(np.mean(np.log(distances), axis=0))
    slopes = [np.polyfit(np.log(COUNTS[2:]), np.log(row[2:]), 1)[0] for row in np.array(distances)]
    law = mean[-1] * (np.array(COUNTS) / COUNTS[-1]) ** -2.0
    return [
        Curve("distance goes to 0", COUNTS[1:], mean[:-1], mean[1:], "≤", 0, ordering=True),
        Curve("power of k from 32 to 256", np.arange(draws), -2, slopes, "none"),
        Curve("distance beside k⁻²", COUNTS, law, mean, "none"),
    ]


def path_bound(attention: jax.Array, sizes: jax.Array) -> jax.Array:
    """Computes Π_l (I + w_l P_l) as a multiple of `rc.rollout`, [n, n].

    Args:
        attention: Weights [l, 1, n, n].
        sizes: w_l = ‖W_V W_O‖₂ of each layer.
    """
    return jnp.prod(1 + sizes) * rc.rollout(attention, sizes / (1 + sizes))


def jacobian_curves(seed: int, *, n: int = 10, d: int = 8, depth: int = 3) -> list[Curve]:
    """Compares the bound by path products with the Jacobian, exact and at fixed weights."""
    config = rc.san_skip(depth, 1, d, mask="causal")
    exact, frozen = [], []
    for scale in SCALES:
        key_p, key_x = jax.random.split(jax.random.key(seed))
        params, x = rc.init(key_p, config, scale), jax.random.normal(key_x, (n, d))
        attention = params.layers.attention
        products = attention.w_v[:, 0] @ attention.w_o[:, 0]
        sizes = jnp.linalg.norm(products, ord=2, axis=(-2, -1))
        # From the state after the first layer, which `transport` moves through those behind it.
        bound = path_bound(rc.apply(params, x, config).attention[1:], sizes[1:])
        allowed = np.tril(np.ones((n, n), bool))

        fn = rc.paths.name_states(params, config)

        def move(direction, fn=fn, freeze=False, x=x):
            moved = rc.paths.transport(
                fn, x, direction, layer=0, branches="attention", skip=0, freeze=freeze
            )
            return moved.by_position.sum(axis=0)

        basis = jnp.eye(n * d).reshape(n * d, n, d)
        for values, freeze in ((exact, False), (frozen, True)):
            jacobian = jax.jit(jax.vmap(lambda v, f=freeze: move(v, freeze=f)))(basis)
            blocks = jacobian.reshape(n, d, n, d).transpose(2, 0, 1, 3)  # output i, input j
            norms = jnp.linalg.norm(blocks, ord=2, axis=(-2, -1))
            values.append(float(jnp.max(jnp.where(allowed, norms / bound, 0))))
    scales = np.array(SCALES)
    return [
        Curve("weights of attention fixed", scales, 1, frozen, "≤", 1e-9),
        Curve("exact Jacobian", scales, 1, exact, "≤", 1e-9, beyond=True),
    ]


def first_mass_curves(seed: int, *, n: int = 32, depth: int = 64) -> list[Curve]:
    """Measures the rollout's weight on the first token by depth, without skips and with them."""
    config = prescribed_networks.make_network(
        depth, 8, num_heads=1, mask="causal", attention_skip=False
    )
    x = prescribed_networks.draw_sphere(jax.random.key(seed), n, 8)
    trace = rc.apply(prescribed_networks.make_params(config), x, config)
    depths = np.array([1, 2, 4, 8, 16, 32, 64])
    weights = trace.attention
    least = float(jnp.min(jnp.where(np.tril(np.ones((n, n), bool)), weights, 1)))
    alone = [1 - float(rc.rollout(weights[:k], 1.0)[-1, 0]) for k in depths]
    shared = [1 - float(rc.rollout(weights[:k], 1 / depth)[-1, 0]) for k in depths]
    bound = np.minimum(1, n * (1 - least) ** depths)
    uniform = np.tril(np.ones((n, n))) / np.arange(1, n + 1)[:, None]
    stack = jnp.broadcast_to(uniform, (depth, n, n))
    second = [float(rc.rollout(stack[:k], 0.5)[1, 1]) for k in depths]
    return [
        Curve("weight off the first token, no skips", depths, bound, alone, "≤", 1e-9),
        Curve("the same, share 1/L of attention", depths, np.nan, shared, "none"),
        Curve("uniform weights, row 2 on itself", depths, 0.75**depths, second, "="),
    ]


THEOREMS = (
    Theorem(
        "first_token",
        "Karagodin et al. 2024 (2411.04990), V = I",
        "memory",
        "With a causal mask and V = I all tokens go to the first, whatever Q and K.",
        "cos(x_i(t), x_1(0)) → 1 for almost all starts",
        "Causal mask, V = I, any Q and K, unit norm, small gain",
        "`rc.apply` (post-norm, unit norm, causal)",
        "Yes: a causal stack of value matrices near I copies its first token; look at sinks.",
        ("time", "least cosine to the first token"),
        first_token_curves,
    ),
    Theorem(
        "parking",
        "Karagodin et al. 2024 (2411.04990), Rényi centres",
        "memory",
        "Tokens gather at those that are far from all earlier ones, as many as parked cars.",
        "0.7476 · 2π/δ centres of distance δ = 4/√β",
        "Circle, causal, Q = K = V = I, many uniform tokens, large β; a long time, not for ever",
        "`rc.apply` (post-norm, unit norm, causal), positions of its states",
        "Little: it counts the groups that a long causal context keeps.",
        ("draws", "number, share or distance"),
        parking_curves,
    ),
    Theorem(
        "repeated",
        "Barbero et al. 2024 (2406.04267), theorem 4.2",
        "abstract",
        "The last states of 1…1 0 with k and with k + 1 ones become one state.",
        "distance → 0; k⁻² at large k (derived here)",
        "Causal, no positions, fixed weights",
        "`rc.apply` (pre-norm, causal, no positions)",
        "Yes: counts above some k are one number in bfloat16; no prompt repairs that.",
        ("number k of repeated tokens", "distance of the last states"),
        repeated_curves,
        "xy",
    ),
    Theorem(
        "path_products",
        "Barbero et al. 2024 (2406.04267), theorem 5.1",
        "memory",
        "The Jacobian from token i to the last is below the sum over paths of attention weights.",
        "‖∂y_n/∂x_i‖ ≤ Π_l (I + w_l P_l)_{ni} = Π_l (1 + w_l) · rollout, w_l = ‖W_V W_O‖",
        "The weights of attention do not depend on the tokens (stated as an assumption)",
        "`rc.rollout`, `rc.paths.transport` with freeze=True and without",
        "Only with care: the rollout says nothing of what goes through the scores.",
        ("scale of the weights", "largest ‖Jacobian‖ over the bound"),
        jacobian_curves,
        "xy",
    ),
    Theorem(
        "first_mass",
        "Wu et al. 2025 (2502.01951); Herasimchyk et al. 2026 (2602.16837)",
        "abstract",
        "Products of causal attention go to the first token exponentially; skips slow that.",
        "1 − (P_L ⋯ P_1)_{n1} ≤ n (1 − ε)^L, ε the least weight; with uniform weights exact",
        "Causal mask, all weights at least ε",
        "`rc.rollout` of the attention of `rc.apply`",
        "Yes: at a share 1/L of attention the first token does not take over.",
        ("layers L", "weight that is not on the first token"),
        first_mass_curves,
        "xy",
    ),
)
