"""Causal attention: tokens move to the first one, stop near early ones, and forget their past."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import rank_collapse as rc
from experiments.theorems import prescribed_networks
from experiments.theorems.cases import compute_cases
from experiments.theorems.outcomes import DRAW, Curve, Panel, Theorem
from rank_collapse.runs import seeds

RENYI = 0.7475979202534114  # share of a long street that cars parked at random leave full
COUNTS = (8, 16, 32, 64, 128, 256)  # of repeated tokens
SCALES = (0.25, 0.5, 1.0, 2.0)  # of the weights, for the bound on the Jacobian


def first_token_curves(seed: int, *, n: int = 16, d: int = 8, draws: int = 3) -> list[Curve]:
    """Measures the least cosine to the first token by time, with random scores and V = I.

    Args:
        seed: Seed of the draws.
        n: Number of tokens.
        d: Their width.
        draws: Number of networks.
    """
    gain, times = 0.05, np.array([0, 5, 10, 15, 20, 30, 40])
    depth, keys = round(times[-1] / gain), seeds.seed_keys(seed, draws)
    least = {}
    for mask in ("causal", "none"):
        config = prescribed_networks.make_sphere(depth, d, 1.0, gain, mask=mask)

        def measure(key, config=config):
            """Measures the least cosine of one draw at the times."""
            key_m, key_x = jax.random.split(key)
            x = prescribed_networks.draw_sphere(key_x, n, d)
            params = prescribed_networks.make_params(config, jax.random.normal(key_m, (d, d)))
            states = prescribed_networks.pass_states(params, x, config, round(5 / gain))
            return jnp.min(states @ x[0], axis=-1)[times // 5]

        least[mask] = compute_cases(measure, keys).min(axis=0)
    return [
        Curve("causal, worst of the draws", times, np.nan, least["causal"], "none"),
        Curve("the same, last time", times[-1:], 1, least["causal"][-1:]),
        Curve("no mask, worst of the draws", times, np.nan, least["none"], "none"),
    ]


def park(angles: np.ndarray, distance: float) -> np.ndarray:
    """Lists the tokens that are farther than a distance from all earlier ones in the list.

    Args:
        angles: Angles of the tokens on the circle, in order.
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
    """Counts groups of angles on the circle that are separated by empty arcs above a gap."""
    ordered = np.sort(angles % (2 * np.pi))
    return int(np.sum(np.diff(ordered, append=ordered[0] + 2 * np.pi) > gap))


def parking_curves(seed: int, *, n: int = 200, beta: float = 64.0, draws: int = 100) -> list[Curve]:
    """Counts Rényi centres by the number of tokens, and follows a causal network in time.

    By time: number of groups, share of tokens near a centre, and how far centres have moved.

    Args:
        seed: Seed of the draws.
        n: Number of tokens on the circle.
        beta: Inverse temperature β; δ is 4/√β.
        draws: Number of lists of angles.
    """
    distance, gain, depth, stride = 4 / np.sqrt(beta), 0.05, 100, 20
    config = prescribed_networks.make_sphere(depth, 2, beta, gain, mask="causal")

    def measure(key):
        """Draws the angles of the tokens: (angles, states of their network)."""
        start = jax.random.uniform(key, (n,), maxval=2 * np.pi)
        tokens = jnp.stack([jnp.cos(start), jnp.sin(start)], axis=-1)
        params = prescribed_networks.make_params(config)
        return start, prescribed_networks.pass_states(params, tokens, config, stride)

    near, moved, clusters = [], [], []
    for start, states in zip(*compute_cases(measure, seeds.seed_keys(seed, draws)), strict=True):
        centres, tokens = park(start, distance), states[0]
        cosine = states @ tokens[centres].T
        near.append(np.mean(np.arccos(np.clip(cosine.max(axis=-1), -1, 1)) < distance, axis=-1))
        travelled = np.arccos(np.clip(np.sum(states * tokens, axis=-1), -1, 1))
        moved.append(travelled[:, centres].mean(axis=-1))
        angles = np.arctan2(states[..., 1], states[..., 0])
        clusters.append([count_clusters(one, distance / 4) for one in angles])
    near, moved, clusters = (np.array(values) for values in (near, moved, clusters))
    predicted, token_counts = RENYI * 2 * np.pi / distance, np.array([25, 50, 100, 200, 1000, 5000])
    numbers = np.array([count_centres(seed, count, distance, draws) for count in token_counts])
    mean, error = numbers.mean(axis=1), numbers[-1].std() / np.sqrt(draws)
    within, times = 3 * error / predicted, gain * np.arange(0, depth + 1, stride)
    return [
        Curve("5000 tokens", token_counts[-1:], predicted, mean[-1:], tolerance=within),
        Curve("fewer tokens", token_counts[:-1], np.nan, mean[:-1], "none"),
        Curve("groups of tokens", times[1:], np.nan, clusters.mean(0)[1:], "none", panel=1),
        Curve("tokens within δ of a centre", times, np.nan, near.mean(0), "none", panel=2),
        Curve("centres", times, np.nan, moved.mean(0) / distance, "none", panel=3),
    ]


def count_centres(seed: int, count: int, distance: float, draws: int) -> list[int]:
    """Counts the Rényi centres of some draws of uniform tokens on the circle.

    Args:
        seed, draws: Seed and number of draws.
        count: Tokens.
        distance: δ.
    """
    angles = (np.random.default_rng((seed, i)).uniform(0, 2 * np.pi, count) for i in range(draws))
    return [len(park(one, distance)) for one in angles]


def make_pre_norm(depth: int, d: int, heads: int) -> rc.TransformerConfig:
    """Makes a causal pre-norm network without positions."""
    return rc.san_skip(depth, heads, d, norm_placement="pre", norm="rms", mask="causal")


def repeated_distances(
    key: jax.Array, counts: Sequence[int], *, depth: int = 4, d: int = 32
) -> jax.Array:
    """Measures the distance between the last states of 1…1 0 with k and with k + 1 ones, by k.

    Args:
        key: Random key for the two embeddings and the network's weights.
        counts: The numbers k.
        depth, d: Layers and width.
    """
    config = make_pre_norm(depth, d, 4)
    key_e, key_p = jax.random.split(key)
    zero, one = jax.random.normal(key_e, (2, d))
    params = rc.init(key_p, config)

    def pass_repeated(count):
        is_one = jnp.arange(counts[-1] + 2) < count  # what follows the zero is not seen
        return rc.apply(params, jnp.where(is_one[:, None], one, zero), config).hidden[-1][count]

    def compare(count):
        return jnp.linalg.norm(pass_repeated(count) - pass_repeated(count + 1))

    return jax.lax.map(compare, jnp.asarray(counts))


def repeated_curves(seed: int, *, draws: int = 4) -> list[Curve]:
    """Measures the distance of two last states by the number of ones, and how fast it falls."""
    keys, counts = seeds.seed_keys(seed, draws), np.array(COUNTS)
    distances = compute_cases(lambda key: repeated_distances(key, COUNTS), keys)
    mean = np.exp(np.mean(np.log(distances), axis=0))
    ratios, powers = mean[1:] / mean[:-1], np.diff(np.log2(distances), axis=1)
    law = mean[-1] * (counts / counts[-1]) ** -2.0
    slopes = [np.polyfit(np.log(counts[2:]), np.log(row[2:]), 1)[0] for row in distances]
    return [
        Curve("mean of the draws, beside k⁻²", counts, law, mean, "none"),
        Curve("distance goes to 0", counts[1:], 1, ratios, "≤", 0, ordering=True, panel=1),
        Curve("k⁻²: one fourth", counts[1:], 0.25, ratios, "none", panel=1),
        Curve("from k/2 to k, mean of the draws", counts[1:], -2, powers.mean(0), "none", panel=2),
        Curve("power of k from 32 to 256", np.arange(draws), -2, slopes, "none", panel=3),
    ]


def path_bound(attention: jax.Array, sizes: jax.Array) -> jax.Array:
    """Computes Π_l (I + w_l P_l) as a multiple of `rc.rollout`, [n, n].

    Args:
        attention: Weights [l, 1, n, n].
        sizes: w_l = ‖W_V W_O‖₂ of each layer.
    """
    return jnp.prod(1 + sizes) * rc.rollout(attention, sizes / (1 + sizes))


def bound_ratio(
    key: jax.Array,
    scale: float | jax.Array,
    *,
    freeze: bool,
    depth: int = 3,
    n: int = 10,
    d: int = 8,
) -> jax.Array:
    """Measures the largest ‖∂y_i/∂x_j‖ over its bound by path products, of a causal network.

    It starts at the state after the first layer, from which `transport` computes the Jacobian
    through the later layers.

    Args:
        key: Random key for the weights and the tokens.
        scale: Scale of the weights, times 1/√fan-in.
        freeze: Whether the weights of attention are constants; False for the exact Jacobian.
        depth, n, d: Layers, tokens, width.
    """
    config = rc.san_skip(depth, 1, d, mask="causal")
    key_p, key_x = jax.random.split(key)
    params, x = rc.init(key_p, config, scale), jax.random.normal(key_x, (n, d))
    attention = params.layers.attention
    products = attention.w_v[:, 0] @ attention.w_o[:, 0]
    sizes = jnp.linalg.norm(products, ord=2, axis=(-2, -1))
    bound = path_bound(rc.apply(params, x, config).attention[1:], sizes[1:])
    fn = rc.paths.name_states(params, config)

    def move(direction):
        moved = rc.paths.transport(
            fn, x, direction, layer=0, branches="attention", first_position=0, freeze=freeze
        )
        return moved.by_position.sum(axis=0)

    jacobian = jax.vmap(move)(jnp.eye(n * d).reshape(n * d, n, d))
    blocks = jacobian.reshape(n, d, n, d).transpose(2, 0, 1, 3)  # output i, input j
    # One by one: LAPACK's batches wait for ever where two devices of a CPU call them at once.
    norms = jax.lax.map(lambda block: jnp.linalg.norm(block, ord=2), blocks.reshape(-1, d, d))
    norms = norms.reshape(n, n)
    return jnp.max(jnp.where(np.tril(np.ones((n, n), bool)), norms / bound, 0))


def jacobian_curves(seed: int) -> list[Curve]:
    """Compares the bound by path products with the Jacobian, exact and at fixed weights."""
    key, scales, ratios = jax.random.key(seed), np.array(SCALES), {}
    for freeze in (True, False):
        measure = partial(bound_ratio, key, freeze=freeze)
        ratios[freeze] = compute_cases(measure, scales)
    return [
        Curve("weights of attention fixed", scales, 1, ratios[True], "≤", 1e-9),
        Curve("exact Jacobian", scales, 1, ratios[False], "≤", 1e-9, beyond=True),
    ]


def first_mass_curves(seed: int, *, n: int = 32, depth: int = 64) -> list[Curve]:
    """Measures the rollout's weight on the first token by depth, without skips and with them.

    Args:
        seed: Seed of the draws.
        n: Number of tokens.
        depth: Number of layers.
    """
    config = prescribed_networks.make_network(
        depth, 8, num_heads=1, mask="causal", attention_skip=False
    )

    def pass_tokens(seed):
        """Computes the attention weights of all layers."""
        x = prescribed_networks.draw_sphere(jax.random.key(seed), n, 8)
        return rc.apply(prescribed_networks.make_params(config), x, config).attention

    (weights,) = compute_cases(pass_tokens, [seed])
    depths, lower = np.array([1, 2, 4, 8, 16, 32, 64]), np.tril(np.ones((n, n), bool))
    least = weights[..., 0].min()
    without_skips = [1 - rc.rollout(weights[:k], 1.0)[-1, 0] for k in depths]
    shared = [1 - rc.rollout(weights[:k], 1 / depth)[-1, 0] for k in depths]
    bound = (1 - least) ** depths
    uniform = lower / np.arange(1, n + 1)[:, None]
    stack = np.broadcast_to(uniform, (depth, n, n))
    second = [rc.rollout(stack[:k], 0.5)[1, 1] for k in depths]
    return [
        Curve("weight off the first token, no skips", depths, bound, without_skips, "≤", 1e-9),
        Curve("the same, share 1/L of attention", depths, np.nan, shared, "none"),
        Curve("uniform weights, share ½ of attention", depths, 0.75**depths, second, panel=1),
    ]


THEOREMS = (
    Theorem(
        "first_token",
        "Karagodin et al. 2024 (2411.04990), V = I",
        "memory",
        "With a causal mask and V = I all tokens go to the first token, for any Q and K.",
        "cos(x_i(t), x_1(0)) → 1 for almost all starts",
        "Causal mask, V = I, any Q and K, unit norm, small gain",
        "`rc.apply` (post-norm, unit norm, causal)",
        "Yes: a causal stack of value matrices near I copies its first token; look at sinks.",
        (Panel("time t (layers × gain)", "least cosine to the first token"),),
        first_token_curves,
        terms="V, Q and K are the matrices of values, queries and keys, and I is the identity. To "
        "“go to” a token means that the cosine with it goes to 1.",
    ),
    Theorem(
        "parking",
        "Karagodin et al. 2024 (2411.04990), Rényi centres",
        "memory",
        "Tokens gather at centres far from all earlier tokens, as many as cars parked at random.",
        "0.7476 · 2π/δ centres of distance δ = 4/√β",
        "Circle, causal, Q = K = V = I, many uniform tokens, large β; a long time, not for ever",
        "`rc.apply` (post-norm, unit norm, causal), positions of its states",
        "Little: it counts the groups that a long causal context keeps.",
        (
            Panel("tokens n", "Rényi centres (mean of 100 draws)", "x"),
            Panel("time t (layers × gain)", "groups of 200 tokens"),
            Panel("time t (layers × gain)", "share of 200 tokens"),
            Panel("time t (layers × gain)", "distance moved, in δ"),
        ),
        parking_curves,
        terms="Tokens lie on a circle. A centre is a token that is farther than a distance δ from "
        "all earlier centres. The cars have the length δ, and park at random along the circle "
        "until no place is left.",
    ),
    Theorem(
        "repeated",
        "Barbero et al. 2024 (2406.04267), theorem 4.2",
        "abstract",
        "The last states of the texts 1…1 0 with k and with k + 1 ones become equal as k grows.",
        "distance → 0; k⁻² at large k (derived here)",
        "Causal, no positions, fixed weights",
        "`rc.apply` (pre-norm, causal, no positions)",
        "Yes: counts above some k are one number in bfloat16; no prompt repairs that.",
        (
            Panel("number k of repeated tokens", "distance of the last states", "xy"),
            Panel("number k of repeated tokens", "distance at k over that at k/2", "x"),
            Panel("number k of repeated tokens", "power of k", "x"),
            Panel(DRAW, "fitted power of k"),
        ),
        repeated_curves,
        terms="A text 1…1 0 repeats the token 1 and ends with the token 0. We compare a text that "
        "has k ones with a text that has k + 1 ones. The network is causal and has no positions.",
    ),
    Theorem(
        "path_products",
        "Barbero et al. 2024 (2406.04267), theorem 5.1",
        "memory",
        "The Jacobian from token i to the last is at most a sum over paths of attention weights.",
        "‖∂y_n/∂x_i‖ ≤ Π_l (I + w_l P_l)_{ni} = Π_l (1 + w_l) · rollout, w_l = ‖W_V W_O‖",
        "The weights of attention do not depend on the tokens (stated as an assumption)",
        "`rc.rollout`, `rc.paths.transport` with freeze=True and without",
        "Only with care: the rollout says nothing of what goes through the scores.",
        (Panel("scale of the weights, over 1/√fan-in", "largest ‖∂yᵢ/∂xⱼ‖ over its bound", "xy"),),
        jacobian_curves,
        terms="The Jacobian is the derivative of the last token's last state with respect to the "
        "input of token i. The bound multiplies the attention weights along each path from token i "
        "to the last token, adds up these products over all paths, and multiplies the sum by a "
        "factor for the sizes of the value matrices.",
    ),
    Theorem(
        "first_mass",
        "Wu et al. 2025 (2502.01951); Herasimchyk et al. 2026 (2602.16837)",
        "abstract",
        "Under a causal mask all weight moves to the first token, exponentially with depth; "
        "skips slow this down.",
        "1 − (P_L ⋯ P_1)_{n1} ≤ (1 − ε)^L, ε the least weight of token 1; exact if uniform",
        "Causal mask, all weights of the first token at least ε",
        "`rc.rollout` of the attention of `rc.apply`",
        "Yes: at a share 1/L of attention the first token does not take over.",
        (
            Panel("layers L", "weight of the last row off the first token", "xy"),
            Panel("layers L", "weight of token 2 on itself", "xy"),
        ),
        first_mass_curves,
        terms="The weight of an input token in the last state is its entry in the last row of the "
        "product of all attention matrices.",
    ),
)
