"""One layer: norms and affine rank, Lipschitz constants, spread of scores, weight by position."""

import jax
import jax.numpy as jnp
import numpy as np

import rank_collapse as rc
from experiments.theorems import prescribed_networks
from experiments.theorems.outcomes import Curve, Theorem

# Three tokens on a line, whose normalised images are three points of a circle.
COLLINEAR = np.array([[1.0, 0, 0], [1, 1, 0], [1, 2, 0]])
NUMBERS = (4, 8, 16, 32)  # of tokens
SPREADS = (0.0, 0.5, 1.0, 2.0, 4.0)


def affine_rank(x: np.ndarray) -> int:
    """Computes the rank of the tokens less their mean."""
    return int(np.linalg.matrix_rank(np.asarray(rc.measures.residual(x)), tol=1e-9))


def normalise_tokens(x: np.ndarray, kind: str) -> np.ndarray:
    """Passes tokens through a norm alone: a post-norm layer whose branch has the gain 0."""
    config = prescribed_networks.make_network(
        1, x.shape[1], attention_skip=True, norm_placement="post", norm=kind, branch_gain=0.0
    )
    x = jnp.asarray(x)
    return np.asarray(
        prescribed_networks.pass_states(prescribed_networks.make_params(config), x, config)[1]
    )


def affine_rank_curves(seed: int, *, n: int = 10, d: int = 16) -> list[Curve]:
    """Counts affine ranks before and after LayerNorm, and the rank of tokens under RMSNorm."""
    before, after, matrix_before, matrix_after = [], [], [], []
    for rank in (1, 2, 3):
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), rank), 3)
        spread = jax.random.normal(keys[0], (n, rank)) @ jax.random.normal(keys[1], (rank, d))
        x = np.asarray(jax.random.normal(keys[2], (1, d)) + spread)
        before.append(affine_rank(x))
        after.append(affine_rank(normalise_tokens(x, "layer")))
        matrix_before.append(np.linalg.matrix_rank(x))
        matrix_after.append(np.linalg.matrix_rank(normalise_tokens(x, "rms"), tol=1e-9))
    small = affine_rank(normalise_tokens(COLLINEAR, "layer"))
    keys = jax.random.split(jax.random.key(seed))
    config = rc.san(1, 1, d)
    x = jax.random.normal(keys[0], (6, d))
    branch = rc.apply(rc.init(keys[1], config), x, config).hidden[1]
    span = np.linalg.matrix_rank(np.concatenate([x, branch]))
    return [
        Curve("3 tokens on a line, d 3", [1], affine_rank(COLLINEAR), [small], tolerance=0),
        Curve("10 tokens, d 16, LayerNorm", [1, 2, 3], before, after, tolerance=0),
        Curve("6 tokens and their attention: span", [6], 6, [span], "≤", 0),
        Curve(
            "10 tokens, d 16, RMSNorm: matrix rank",
            [1, 2, 3],
            matrix_before,
            matrix_after,
            tolerance=0,
            instead=True,
        ),
    ]


def lipschitz_curves(seed: int, *, draws: int = 8) -> list[Curve]:
    """Compares the norm of the Jacobian of an attention layer with the bound, by tokens."""
    d, radius, bounds, largest = 2, 2.0, [], []
    for n in NUMBERS:
        config = prescribed_networks.make_network(1, d)

        def measure(key, config=config, n=n):
            key_a, key_x = jax.random.split(key)
            a = jax.random.normal(key_a, (d, d))
            x = radius * prescribed_networks.draw_sphere(key_x, n, d)
            params = prescribed_networks.make_params(config, a)
            branch = jax.jacfwd(lambda x: rc.apply(params, x, config).attention_branch[0])
            jacobian = branch(x).reshape(n * d, n * d)
            size = jnp.linalg.norm(a, ord=2)
            bound = jnp.sqrt(3 * (size**2 * radius**4 * (4 * n + 1) + n))
            return jnp.linalg.norm(jacobian, ord=2), bound

        keys = jax.random.split(jax.random.key(seed), draws)
        norms, limits = jax.jit(jax.vmap(measure))(keys)
        worst = int(jnp.argmax(norms / limits))
        bounds.append(float(limits[worst]))
        largest.append(float(norms[worst]))
    return [Curve("‖Jacobian‖, worst of the draws", NUMBERS, bounds, largest, "≤", 1e-9)]


def spread_curves(seed: int, *, n: int = 32, d: int = 32, depth: int = 6) -> list[Curve]:
    """Measures entropy and cosine by the spread of the eigenvalues of W_QK, at one trace."""
    entropies, cosines = [], []
    config = prescribed_networks.make_network(
        depth, d, attention_skip=True, norm_placement="post", norm="rms", temperature=np.sqrt(d)
    )
    keys = jax.random.split(jax.random.key(seed), 4)
    x = jax.random.normal(keys[0], (n, d))
    basis, _ = jnp.linalg.qr(jax.random.normal(keys[1], (d, d)))
    deviations = jax.random.normal(keys[2], (d,))
    deviations = (deviations - deviations.mean()) / deviations.std()
    value = jax.random.normal(keys[3], (d, d)) / jnp.sqrt(d)
    for spread in SPREADS:
        scores = basis * (1 + spread * deviations)[None] @ basis.T
        trace = rc.apply(prescribed_networks.make_params(config, scores, value), x, config)
        entropies.append(jnp.mean(rc.attention_entropy(trace.attention[0])))
        cosines.append(rc.token_cosine(trace.hidden[-1]))
    return [
        Curve("entropy of the first layer, nats", SPREADS, np.nan, entropies, "none"),
        Curve("token cosine after 6 layers", SPREADS, np.nan, cosines, "none"),
    ]


def position_curves(seed: int, *, n: int = 64, d: int = 32, depth: int = 8) -> list[Curve]:
    """Measures the rollout's last row by position in a random causal network of iid tokens."""
    config = rc.san_skip(depth, 4, d, norm_placement="pre", norm="rms", mask="causal")
    keys = jax.random.split(jax.random.key(seed))
    params, x = rc.init(keys[0], config), jax.random.normal(keys[1], (n, d))
    trace = rc.apply(params, x, config)
    shares = rc.branch_shares(trace, params, config).attention
    row = np.asarray(rc.rollout(trace.attention, shares))[-1]
    middle = row[n // 4 : 3 * n // 4].max()
    ends = [row[0], row[-1]]
    return [
        Curve("ends above the middle half", [0, n - 1], middle, ends, "≥", 0, ordering=True),
        Curve("weight by position", np.arange(n), np.nan, row, "none"),
    ]


THEOREMS = (
    Theorem(
        "affine_rank",
        "Cirrincione 2026 (2604.23681)",
        "abstract",
        "Layer normalisation keeps the affine rank; attention adds no direction to the span.",
        "rank(LN(X) − mean) = rank(X − mean); rank([X; SA(X)]) = rank(X)",
        "None in the abstract; its definitions could not be read",
        "`rc.apply` (a post-norm layer of branch gain 0), `rc.measures.residual`",
        "No: use the matrix rank, which RMSNorm keeps.",
        ("affine rank before, or tokens", "rank after"),
        affine_rank_curves,
    ),
    Theorem(
        "lipschitz",
        "Castin et al. 2024 (2312.14820), theorem 3.3",
        "memory",
        "The Lipschitz constant of attention grows at most as √n.",
        "√3 ‖V‖ √(‖A‖² R⁴ (4n + 1) + n) on tokens of norm at most R",
        "One head, scores x_iᵀ A x_j",
        "exact Jacobian of `rc.apply`'s attention branch",
        "No: the bound is far above; the growth with n of a trained network is the question.",
        ("tokens n", "‖Jacobian‖"),
        lipschitz_curves,
        "xy",
    ),
    Theorem(
        "score_spread",
        "Bao et al. 2024 (2402.02098)",
        "memory",
        "A small spread of the eigenvalues of W_QK prevents rank and entropy collapse.",
        "none that could be read: entropy and cosine by spread, at one trace",
        "Symmetric W_QK of trace d",
        "`rc.attention_entropy`, `rc.token_cosine` of `rc.apply`",
        "To be judged on trained networks.",
        ("spread of the eigenvalues", "entropy, cosine"),
        spread_curves,
    ),
    Theorem(
        "position",
        "2605.09213 (2026)",
        "abstract",
        "Of iid tokens the first and the last carry more of the last state than the middle.",
        "rollout of the last row at both ends ≥ its largest value in the middle half",
        "Random causal network without positions, iid tokens",
        "`rc.rollout` with `rc.branch_shares`",
        "Yes: put what matters at an end of the prompt.",
        ("position", "weight in the last row"),
        position_curves,
    ),
)
