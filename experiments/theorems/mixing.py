"""Collapse by mixing: random matrices in width, masks, one fixed matrix in all layers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import rank_collapse as rc
from experiments.theorems import prescribed_networks
from experiments.theorems.cases import compute_cases
from experiments.theorems.outcomes import DRAW, Curve, Panel, Theorem
from rank_collapse.runs import seeds

WIDTHS = (64, 128, 256)


def draw_markov(key: jax.Array, layers: int, n: int) -> jax.Array:
    """Draws random Markov matrices [l, 1, n, n] from exponential entries, of variance mean²."""
    entries = jax.random.exponential(key, (layers, 1, n, n))
    return entries / entries.sum(axis=-1, keepdims=True)


def pass_markov(
    key: jax.Array,
    n: int,
    mixing: rc.network.Mixing | None = None,
    layer: int | jax.Array | None = None,
) -> jax.Array:
    """Measures the stable rank of XXᵀ minus 1, after 1 to 3 random mixings of orthonormal tokens.

    Args:
        key: Random key.
        n: Number of tokens, and of features.
        mixing: `Mixing` of the weights, as in the configuration.
        layer: Number of mixings; None for each number.

    Returns:
        [3], or [] after one layer.
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
    states = prescribed_networks.pass_states(params, jnp.eye(n), config)
    states = states[1:] if layer is None else states[layer]
    return rc.stable_rank(states @ jnp.swapaxes(states, -1, -2)) - 1


def width_law(layer: int | jax.Array, width: float | np.ndarray) -> float | np.ndarray | jax.Array:
    """Computes (ℓ + 1) T^{1−2ℓ}, the stable rank of X_ℓ X_ℓᵀ minus 1.

    Singular values of a product of ℓ matrices of independent entries of variance 1/T² have the
    Fuss-Catalan moment Σ_k s_k⁴ = (ℓ + 1) T^{1−2ℓ}; the first, of the mean token, is 1.

    Args:
        layer: ℓ, from 1.
        width: T.
    """
    return (layer + 1) * width ** (1.0 - 2 * layer)


def width_curves(seed: int) -> list[Curve]:
    """Compares the stable rank by width with its law, and removes the gap."""
    widths, layers, measured = np.array(WIDTHS), (1, 2, 3), []
    for n in WIDTHS:

        def measure(uniform, n=n):
            """Measures the excess with weights plus a multiple of 11ᵀ/T: 0, or −1 for centred."""
            key = jax.random.fold_in(jax.random.key(seed), n)
            return pass_markov(key, n, rc.network.Mixing(uniform=uniform))

        measured.append(compute_cases(measure, (0.0, -1.0)))
    excess, without = np.stack(measured, axis=1)
    curves = [
        Curve(f"layer {i}", widths, width_law(i, widths), excess[:, i - 1], tolerance=0.3)
        for i in layers
    ]
    # A stable rank that does not fall with T: at least half of what the first width has.
    for i in layers:
        values = without[:, i - 1]
        least = [np.nan, *np.full(len(WIDTHS) - 1, values[0] / 2)]
        curves.append(Curve(f"layer {i}, A − 11ᵀ/T", widths, least, values, "≥", 0, panel=1))
    return curves


MASKS = {  # {name: (fields, layers after which every token has seen one common token)}
    "full": ({}, 1),
    "causal": ({"mask": "causal"}, 1),
    "causal, window 3": ({"mask": "causal", "window": 3}, 5),
}


def mask_curves(seed: int, *, n: int = 16, d: int = 8) -> list[Curve]:
    """Compares the contraction of tokens over r layers with 1 − ε^r, by the kind of mask.

    Args:
        seed: Seed of the draws.
        n: Number of tokens.
        d: Their width.
    """
    bounds, worst, halving = [], [], []
    for fields, radius in MASKS.values():
        depth = 10 * radius
        fields = dict(fields)
        if window := fields.pop("window", None):
            fields["windows"] = (window,) * depth
        config = prescribed_networks.make_network(
            depth, d, attention_skip=False, layer_map=(), **fields
        )

        def pass_tokens(seed, config=config):
            """Passes random tokens: (attention weights, states) of all layers."""
            key_m, key_x = jax.random.split(jax.random.key(seed))
            m = jax.random.normal(key_m, (config.depth, 1, d, d)) / jnp.sqrt(d)
            x = jax.random.normal(key_x, (n, d))
            trace = rc.apply(prescribed_networks.make_params(config, m), x, config)
            return trace.attention, trace.hidden

        (weights,), (states,) = compute_cases(pass_tokens, [seed])
        epsilon = weights[weights > 0].min()
        ranges = np.ptp(states, axis=1)
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
        Curve("range is halved", x, *np.transpose(halving), "≤", 1e-9, panel=1),
    ]


def tied_curves(seed: int, *, n: int = 12, d: int = 6, depth: int = 400) -> list[Curve]:
    """Measures the residual after many passes of one layer of fixed weights, by the sign of W.

    Args:
        seed: Seed of the draws.
        n: Number of tokens.
        d: Their width.
        depth: Number of passes of the layer.
    """
    draws, steps = 4, np.array([0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 400])
    keys = seeds.seed_keys(seed, draws)

    def pass_tokens(sign, key):
        """Draws A and W: (A, W, states of their network)."""
        keys = jax.random.split(key, 3)
        weights = jax.nn.softmax(jax.random.normal(keys[0], (n, n)), axis=-1)
        root = jax.random.normal(keys[1], (d, d))
        w = root @ root.T
        w = sign * w / jnp.linalg.norm(w, ord=2)
        normalise = prescribed_networks.fix_attention(weights[None, None])
        config = prescribed_networks.make_network(
            depth, d, attention_skip=True, normalise=normalise
        )
        params = prescribed_networks.make_params(config, value=w)
        x = jax.random.normal(keys[2], (n, d))
        return weights, w, prescribed_networks.pass_states(params, x, config)

    def pass_draws(sign):
        return jax.lax.map(partial(pass_tokens, sign), keys)

    def predict(weights, w):
        """Tests whether the dominant eigenvector of A is 1."""
        values, vectors = np.linalg.eig(weights)
        sizes = np.abs(1 + np.outer(values, np.linalg.eigvalsh(w)))
        vector = vectors[:, np.unravel_index(sizes.argmax(), sizes.shape)[0]]
        return float(np.std(vector) < 1e-9)

    curves, x = [], np.arange(draws)
    by_sign = zip(*compute_cases(pass_draws, (1.0, -1.0)), strict=True)
    for name, (weights, w, states) in zip(("W ⪰ 0", "W ⪯ 0"), by_sign, strict=True):
        ratios = rc.residual_ratio(states, norm="frobenius")
        predicted = [predict(*pair) for pair in zip(weights, w, strict=True)]
        equal = (ratios[:, -1] < 1e-6).astype(float)
        first = np.maximum(ratios[0, steps], 1e-17)  # an exact 0 has no logarithm
        curves += [
            Curve(f"{name}: residual ratio by layer", steps, np.nan, first, "none"),
            Curve(f"{name}: residual ratio", x, np.nan, ratios[:, -1], "none", panel=1),
            Curve(f"{name}: tokens equal", x, predicted, equal, tolerance=0, panel=2),
        ]
    return curves


THEOREMS = (
    Theorem(
        "width",
        "Nait Saada et al. 2024 (2410.07799)",
        "memory",
        "Many tokens collapse in one layer of random attention A, but not with A − 11ᵀ/T.",
        "stable rank of X_ℓ X_ℓᵀ minus 1 = O(T^{1−2ℓ}); (ℓ + 1) T^{1−2ℓ} (derived here)",
        "Random Markov matrices, orthonormal input, V = I, T tokens of width T",
        "`rc.apply` with `normalise=` and `mixing=`, `rc.stable_rank`",
        "Yes: long contexts collapse at initialisation; centred attention removes it.",
        (
            Panel("width T", "stable rank of XXᵀ minus 1", "xy"),
            Panel("width T", "the same with A − 11ᵀ/T", "xy"),
        ),
        width_curves,
        terms="T is the number of tokens, A holds random attention weights, and 11ᵀ/T is the "
        "matrix whose entries are all 1/T. The stable rank measures the collapse. It is 1 if all "
        "singular values but the first are 0.",
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
        (
            Panel("mask", "factor of the range over r layers", names=tuple(MASKS)),
            Panel("mask", "layers until the range is halved", "y", tuple(MASKS)),
        ),
        mask_curves,
        terms="The range of a feature is its largest value minus its least value over tokens. It "
        "is 0 if all tokens are equal. A local mask allows attention only to near tokens.",
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
        (
            Panel("layer, first draw", "residual ratio (Frobenius)", "y"),
            Panel(DRAW, "residual ratio after 400 layers"),
            Panel(DRAW, "tokens equal: 1 yes, 0 no"),
        ),
        tied_curves,
        terms="With tied weights all layers have the same attention matrix A and the same "
        "value-output matrix W. ⊗ is the Kronecker product, and I is the identity, which "
        "stands for the skip.",
    ),
)
