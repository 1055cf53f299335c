"""Collapse in depth and in width: random mixing, masks, tied weights, heads, gains, noise."""

import jax
import jax.numpy as jnp
import numpy as np

import rank_collapse as rc
from experiments.theorems import prescribed_networks
from experiments.theorems.outcomes import Curve, Theorem

WIDTHS = (64, 128, 256)
HEADS = (1, 4, 16)


def draw_markov(key: jax.Array, layers: int, n: int) -> jax.Array:
    """Draws random Markov matrices [l, 1, n, n] from exponential entries, of variance mean²."""
    entries = jax.random.exponential(key, (layers, 1, n, n))
    return entries / entries.sum(axis=-1, keepdims=True)


def pass_markov(key: jax.Array, n: int, mixing: rc.network.Mixing | None) -> np.ndarray:
    """Measures the stable rank of XXᵀ, less 1, after 1 to 3 random mixings of orthonormal tokens.

    Args:
        key: Random key.
        n: Tokens, as many as features.
        mixing: What the network makes of the weights, as of the configuration.
    """
    normalise = prescribed_networks.fix_attention(draw_markov(key, 3, n))
    fields = {"normalise": normalise, "mixing": mixing, "attention_skip": False}
    # Queries and keys have one feature: prescribed weights do not read scores.
    config = rc.TransformerConfig(depth=3, num_heads=1, d_model=n, d_qk=1, d_v=n, **fields)
    params = rc.init(jax.random.key(0), config)
    attention = params.layers.attention
    identity = jnp.broadcast_to(jnp.eye(n), attention.w_v.shape)
    attention = attention.replace(w_v=identity, w_o=identity)
    params = params.replace(layers=params.layers.replace(attention=attention))
    states = prescribed_networks.pass_states(params, jnp.eye(n), config)[1:]
    return np.asarray(rc.stable_rank(states @ jnp.swapaxes(states, 1, 2))) - 1


def width_curves(seed: int) -> list[Curve]:
    """Compares the stable rank by width with (ℓ + 1) T^{1−2ℓ}, and removes the gap.

    The law: singular values of a product of ℓ matrices of independent entries of variance 1/T² have
    the Fuss-Catalan moment Σ_k s_k⁴ = (ℓ + 1) T^{1−2ℓ}; the first, of the mean token, is 1.
    """
    key, widths = jax.random.key(seed), np.array(WIDTHS)
    centred = rc.network.Mixing(identity=0.0, weights=1.0, uniform=-1.0)
    excess = np.array([pass_markov(jax.random.fold_in(key, n), n, None) for n in WIDTHS])
    without = np.array([pass_markov(jax.random.fold_in(key, n), n, centred) for n in WIDTHS])
    curves = []
    for index in range(3):
        law = (index + 2) * widths ** (-1.0 - 2 * index)
        curves.append(Curve(f"layer {index + 1}", widths, law, excess[:, index], tolerance=0.3))
    # A stable rank that does not fall with T.
    for index in range(3):
        values = without[:, index]
        name = f"layer {index + 1}, A − 11ᵀ/T"
        curves.append(Curve(name, widths[1:], values[0] / 2, values[1:], "≥", 0))
    return curves


MASKS = {  # {name: (fields, layers after which every token has seen one common token)}
    "full": ({}, 1),
    "causal": ({"mask": "causal"}, 1),
    "causal, window 3": ({"mask": "causal", "window": 3}, 5),
}


def mask_curves(seed: int, *, n: int = 16, d: int = 8) -> list[Curve]:
    """Compares the contraction of tokens over r layers with 1 − ε^r, by the kind of mask."""
    bounds, worst, halving = [], [], []
    for fields, radius in MASKS.values():
        depth = 10 * radius
        fields = dict(fields)
        if window := fields.pop("window", None):
            fields["windows"] = (window,) * depth
        config = prescribed_networks.make_network(
            depth, d, attention_skip=False, layer_map=(), **fields
        )
        key_m, key_x = jax.random.split(jax.random.key(seed))
        m = jax.random.normal(key_m, (depth, 1, d, d)) / jnp.sqrt(d)
        trace = rc.apply(
            prescribed_networks.make_params(config, m), jax.random.normal(key_x, (n, d)), config
        )
        weights = np.asarray(trace.attention)
        allowed = weights > 0
        epsilon = weights[allowed].min()
        ranges = np.ptp(np.asarray(trace.hidden), axis=1)
        is_number = ranges[:-radius] > 1e-10  # below it rounding decides
        factors = ranges[radius:] / np.where(is_number, ranges[:-radius], np.inf)
        bounds.append(1 - epsilon**radius)
        worst.append(factors.max())
        # How many layers the bound says, and how many it takes, to halve the range.
        logs = np.log1p(-(epsilon**radius)), np.log(worst[-1])
        halving.append([radius * np.log(0.5) / log for log in logs])
    x = np.arange(len(MASKS))
    return [
        Curve("largest factor over r layers", x, bounds, worst, "none"),
        Curve("layers until the range is halved", x, *np.transpose(halving), "≤", 1e-9),
    ]


def tied_curves(seed: int, *, n: int = 12, d: int = 6, depth: int = 400) -> list[Curve]:
    """Measures the residual after many passes of one layer of fixed weights, by the sign of W."""
    curves = []
    for name, sign, draws in (("W ⪰ 0", 1, 4), ("W ⪯ 0", -1, 4)):
        predicted, measured = [], []
        for draw in range(draws):
            keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), draw), 3)
            weights = jax.nn.softmax(jax.random.normal(keys[0], (n, n)), axis=-1)
            root = jax.random.normal(keys[1], (d, d))
            w = root @ root.T
            w = sign * w / jnp.linalg.norm(w, ord=2)
            config = prescribed_networks.make_network(
                depth,
                d,
                attention_skip=True,
                normalise=prescribed_networks.fix_attention(weights[None, None]),
            )
            params = prescribed_networks.make_params(config, value=w)
            x = jax.random.normal(keys[2], (n, d))
            last = prescribed_networks.pass_states(params, x, config, depth)[-1]
            measured.append(float(rc.residual_ratio(last, norm="frobenius")))
            token_values, token_vectors = np.linalg.eig(np.asarray(weights))
            sizes = np.abs(1 + np.outer(token_values, np.linalg.eigvalsh(np.asarray(w))))
            vector = token_vectors[:, np.unravel_index(sizes.argmax(), sizes.shape)[0]]
            predicted.append(float(np.std(vector) < 1e-9))
        x = np.arange(draws)
        equal = [float(value < 1e-6) for value in measured]
        curves.append(Curve(f"{name}: tokens equal", x, predicted, equal, tolerance=0))
        curves.append(Curve(f"{name}: residual ratio", x, np.nan, measured, "none"))
    return curves


def head_curves(seed: int, *, n: int = 16, d: int = 64, depth: int = 12, draws: int = 12):
    """Compares the token cosine of networks of 1 to 16 heads with one law that has no H."""
    gains = jnp.ones(depth)

    def measure(key, heads):
        key_p, key_x = jax.random.split(key)
        config = rc.san_skip(depth, heads, d, norm_placement="post", norm="rms")
        # Scores of variance 0: attention is uniform, as the law assumes.
        params = rc.init(key_p, config)
        attention = params.layers.attention
        attention = attention.replace(w_q=0 * attention.w_q)
        params = params.replace(layers=params.layers.replace(attention=attention))
        hidden = rc.apply(params, jax.random.normal(key_x, (n, d)), config).hidden
        return rc.profile(hidden, measures="token_cosine")["token_cosine"]

    keys = jax.random.split(jax.random.key(seed), draws)
    apart, start = [], []
    for heads in HEADS:
        cosine = jax.jit(jax.vmap(lambda key, h=heads: measure(key, h)))(keys)
        apart.append(jnp.mean(1 - cosine, axis=0))
        start.append(jnp.mean(cosine[:, 0]))
    log_apart, _ = rc.collapse_law(float(np.mean(start)), n, gains, gains)
    last = np.log([float(a[-1]) for a in apart])
    return [Curve("ln(1 − cosine) after 12 layers", HEADS, log_apart[-1], last, tolerance=0.15)]


def gain_curves(seed: int, *, n: int = 16, d: int = 64, draws: int = 6) -> list[Curve]:
    """Compares 1 − cosine by depth with the closed law, for gains 1 and 1/√L of the branch."""
    depths, curves = (4, 16, 64), []
    keys = jax.random.split(jax.random.key(seed), draws)
    for power in (0.5, 0.0):
        law, measured = [], []
        for depth in depths:
            config = rc.san_skip(depth, 1, d, branch_gain=depth**-power)

            def measure(key, config=config):
                key_p, key_x = jax.random.split(key)
                params = rc.init(key_p, config)
                attention = params.layers.attention
                attention = attention.replace(w_q=0 * attention.w_q)
                params = params.replace(layers=params.layers.replace(attention=attention))
                last = rc.apply(params, jax.random.normal(key_x, (n, d)), config).hidden[-1]
                parts = rc.measures.residual(last), last
                return jnp.stack([jnp.mean(jnp.sum(part**2, axis=-1)) for part in parts])

            spread, size = jnp.mean(jax.jit(jax.vmap(measure))(keys), axis=0)
            measured.append(float(jnp.log10(spread / size)))
            # Sums of squares: differences stay, the mean token grows by 1 + a² in each layer.
            growth = (1 + depth ** (-2 * power)) ** depth
            law.append(np.log10((1 - 1 / n) / (1 - 1 / n + growth / n)))
        name = "gain 1/√L" if power else "gain 1"
        curves.append(Curve(f"log10 of the share, {name}", depths, law, measured, tolerance=0.3))
    return curves


def noise_curves(seed: int, *, depth: int = 400, draws: int = 64) -> list[Curve]:
    """Measures the cosine of two tokens under random values in every layer, and under V = I."""
    times, d = (1.0, 4.0, 16.0), 2
    keys = jax.random.split(jax.random.key(seed), draws)
    shares, fixed = [], []
    for time in times:
        gain = float(np.sqrt(time / depth))
        config = prescribed_networks.make_sphere(depth, d, 1.0, gain, layer_map=())
        tied = prescribed_networks.make_sphere(depth, d, 1.0, time / depth)

        def measure(key, config=config, tied=tied):
            key_v, key_x = jax.random.split(key)
            x = prescribed_networks.draw_sphere(key_x, 2, d)
            values = jax.random.normal(key_v, (depth, 1, d, d)) / jnp.sqrt(d)
            params = (
                prescribed_networks.make_params(config, value=values),
                prescribed_networks.make_params(tied),
            )
            pairs = zip(params, (config, tied), strict=True)
            return [rc.token_cosine(rc.apply(p, x, c).hidden[-1]) for p, c in pairs]

        random, same = jax.jit(jax.vmap(measure))(keys)
        shares.append(float(jnp.mean(random < 0)))
        fixed.append(float(jnp.mean(same < 0)))
    return [
        Curve("random values: share of pairs with cosine below 0", times, np.nan, shares, "none"),
        Curve("V = I: the same", times, np.nan, fixed, "none"),
        Curve(
            "random values, longest time, above 0",
            times[-1:],
            0.1,
            shares[-1:],
            "≥",
            0,
            ordering=True,
        ),
    ]


THEOREMS = (
    Theorem(
        "width",
        "Nait Saada et al. 2024 (2410.07799)",
        "memory",
        "With random attention tokens collapse in width, in one layer; A − 11ᵀ/T does not.",
        "stable rank of X_ℓ X_ℓᵀ minus 1 = O(T^{1−2ℓ}); (ℓ + 1) T^{1−2ℓ} (derived here)",
        "Random Markov matrices, orthonormal input, V = I, T tokens of width T",
        "`rc.apply` with `normalise=` and `mixing=`, `rc.stable_rank`",
        "Yes: long contexts collapse at initialisation; centred attention removes it.",
        ("width T", "stable rank of XXᵀ minus 1"),
        width_curves,
        "xy",
    ),
    Theorem(
        "masks",
        "Wu et al. 2024 (2405.18781), theorem 1",
        "abstract",
        "Masked attention collapses exponentially, and local masks slow it down.",
        "range of a feature over r layers ≤ 1 − ε^r of what it was",
        "V = I, all weights at least ε, r layers connect every token with a common one",
        "`rc.apply` without skips, its attention and states",
        "No: the bound is so near 1 that it says nothing of a depth that exists.",
        ("0 full, 1 causal, 2 causal with window 3", "factor, or layers"),
        mask_curves,
        "y",
    ),
    Theorem(
        "tied",
        "Dovonon et al. 2024 (2401.04301)",
        "abstract",
        "With tied weights the dominant eigenvalue of I + A ⊗ W decides whether tokens collapse.",
        "tokens become equal if the dominant eigenvector of A is 1",
        "One fixed A and W in all layers, skip, diagonalisable",
        "`rc.apply` with `layer_map` and `normalise=`, `rc.residual_ratio`",
        "Yes, of loops: the sign of W_V W_O along the residual decides; see `rc.loop_report`.",
        ("draw", "tokens equal (1), or residual ratio"),
        tied_curves,
    ),
    Theorem(
        "heads",
        "Koubbi et al. 2026 (2604.01978) names the question",
        "abstract",
        "At one branch variance the number of heads does not enter the law of collapse.",
        "1 − ρ' = (1 − ρ)/(1 + ρ + (1 − ρ)/n), `rc.collapse_law`",
        "Uniform attention, independent weights, large width; derived here, not in the paper",
        "`rc.apply` (post-norm), `rc.profile` token_cosine, `rc.collapse_law`",
        "Yes: choose the number of heads for other reasons.",
        ("heads H", "ln(1 − mean token cosine)"),
        head_curves,
        "x",
    ),
    Theorem(
        "depth_gains",
        "Noci et al. 2022 (2206.03126)",
        "memory",
        "A branch gain of 1/√L keeps tokens apart at any depth, a gain of 1 does not.",
        "differences keep their size, the mean token's square grows as (1 + a²)^L",
        "Uniform attention, no norm, independent weights",
        "`rc.apply` without norms, states after the last layer",
        "Yes: it is the gain of `rc.design` families and of depth rules.",
        ("layers L", "log10 of the share of differences"),
        gain_curves,
        "x",
    ),
    Theorem(
        "noise",
        "Fedorov et al. 2026 (Clustering in deep stochastic Transformers, PMLR 306)",
        "abstract",
        "Random value matrices in every layer keep two tokens from becoming one.",
        "two tokens end opposite with a positive probability",
        "Independent values, gain √(t/L), unit norm; small width",
        "`rc.apply` (post-norm, unit norm), `rc.token_cosine`",
        "Yes: collapse of the sphere with V = I is no model of an initialised network.",
        ("time", "share of pairs with negative cosine"),
        noise_curves,
    ),
)
