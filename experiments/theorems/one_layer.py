"""One layer: norms and affine rank, Lipschitz constants, spread of scores, weight by position."""

import tomllib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

import rank_collapse as rc
from experiments.theorems import prescribed_networks
from experiments.theorems.cases import compute_cases
from experiments.theorems.outcomes import Curve, Panel, Theorem

# Three tokens on a line, whose normalised images are three points of a circle.
COLLINEAR = np.array([[1.0, 0, 0], [1, 1, 0], [1, 2, 0]])
NUMBERS = (4, 8, 16, 32)  # of tokens
SPREADS = (0.0, 0.5, 1.0, 2.0, 4.0)
SHARES = Path(__file__).with_name("position_shares.toml")  # of BLOOM and MPT, by layer


def affine_rank(x: np.ndarray) -> int:
    """Computes the rank of the tokens minus their mean."""
    return int(np.linalg.matrix_rank(np.asarray(rc.measures.residual(x)), tol=1e-9))


def normalise_tokens(x: ArrayLike, kind: str) -> jax.Array:
    """Passes tokens through a norm alone: a post-norm layer whose branch has the gain 0."""
    config = prescribed_networks.make_network(
        1, x.shape[1], attention_skip=True, norm_placement="post", norm=kind, branch_gain=0.0
    )
    params = prescribed_networks.make_params(config)
    return prescribed_networks.pass_states(params, jnp.asarray(x), config)[1]


def draw_rank(key: jax.Array, rank: int, n: int, d: int) -> jax.Array:
    """Draws tokens [n, d] of an affine rank."""
    keys = jax.random.split(key, 3)
    spread = jax.random.normal(keys[0], (n, rank)) @ jax.random.normal(keys[1], (rank, d))
    return jax.random.normal(keys[2], (1, d)) + spread


def affine_rank_curves(seed: int, *, n: int = 10, d: int = 16) -> list[Curve]:
    """Counts affine ranks before and after LayerNorm, matrix ranks under RMSNorm, and the span.

    Args:
        seed: Seed of the draws.
        n: Number of tokens.
        d: Their width.
    """
    ranks, tokens = (1, 2, 3), (2, 4, 6, 8)

    def normalise_draws(seed):
        """Draws tokens of each rank.

        Returns:
            (tokens [rank, n, d], their LayerNorm, their RMSNorm, the LayerNorm of `COLLINEAR`).
        """
        keys = [jax.random.fold_in(jax.random.key(seed), rank) for rank in ranks]
        drawn = [draw_rank(key, rank, n, d) for key, rank in zip(keys, ranks, strict=True)]
        norms = [jax.vmap(partial(normalise_tokens, kind=kind)) for kind in ("layer", "rms")]
        x = jnp.stack(drawn)
        return x, *(norm(x) for norm in norms), normalise_tokens(COLLINEAR, "layer")

    def attend(count):
        """Draws 8 tokens, and attends from the first `count` of them to each other.

        Returns:
            (tokens [8, d], their states after attention of the first `count` to each other)
        """
        key, config = jax.random.fold_in(jax.random.key(seed), count), rc.san(1, 1, d)
        keys = jax.random.split(key)
        x = jax.random.normal(keys[0], (tokens[-1], d))
        exists = jnp.arange(tokens[-1]) < count
        return x, rc.apply(rc.init(keys[1], config), x, config, mask=exists).hidden[1]

    (x,), (layer,), (rms,), (collinear,) = compute_cases(normalise_draws, [seed])
    before, after = ([affine_rank(one) for one in stack] for stack in (x, layer))
    matrix_before = [np.linalg.matrix_rank(one) for one in x]
    matrix_after = [np.linalg.matrix_rank(one, tol=1e-9) for one in rms]
    attended = compute_cases(attend, tokens)
    spans = [
        np.linalg.matrix_rank(np.concatenate([x[:count], branch[:count]]))
        for count, x, branch in zip(tokens, *attended, strict=True)
    ]
    line, small = affine_rank(COLLINEAR), affine_rank(collinear)
    name = "10 tokens, d 16, RMSNorm"
    return [
        Curve("3 tokens on a line, d 3", [line], line, [small], tolerance=0),
        Curve("10 tokens, d 16, LayerNorm", before, before, after, tolerance=0),
        Curve(name, matrix_before, matrix_before, matrix_after, tolerance=0, instead=True, panel=1),
        Curve("tokens and their attention, d 16", tokens, tokens, spans, "≤", 0, panel=2),
    ]


def lipschitz_curves(seed: int, *, draws: int = 8) -> list[Curve]:
    """Compares the norm of the Jacobian of an attention layer with the bound, by tokens."""
    d, radius, most = 2, 2.0, max(NUMBERS)
    config, key = prescribed_networks.make_network(1, d), jax.random.key(seed)

    def measure(count, key):
        """Measures the norm of the attention's Jacobian for one draw of some tokens."""
        key_a, key_x = jax.random.split(key)
        a = jax.random.normal(key_a, (d, d))
        params = prescribed_networks.make_params(config, a / jnp.linalg.norm(a, ord=2))
        # The same first tokens for every number; the others do not exist.
        x = radius * prescribed_networks.draw_sphere(key_x, most, d)
        exists = jnp.arange(most) < count

        def attend(x):
            branch = rc.apply(params, x, config, mask=exists).attention_branch[0]
            return jnp.where(exists[:, None], branch, 0)

        return jnp.linalg.norm(jax.jacfwd(attend)(x).reshape(most * d, most * d), ord=2)

    def measure_draws(count):
        return jax.lax.map(partial(measure, count), jax.random.split(key, draws))

    largest, n = compute_cases(measure_draws, NUMBERS).max(axis=1), np.array(NUMBERS)
    bounds = np.sqrt(3 * (radius**4 * (4 * n + 1) + n))
    return [Curve(f"largest of {draws} draws", NUMBERS, bounds, largest, "≤", 1e-9)]


def spread_curves(seed: int, *, n: int = 32, d: int = 32, depth: int = 6) -> list[Curve]:
    """Measures entropy and cosine by the spread of the eigenvalues of W_QK, at one trace.

    Args:
        seed: Seed of the draws.
        n: Number of tokens.
        d: Their width.
        depth: Number of layers.
    """
    config = prescribed_networks.make_network(
        depth, d, attention_skip=True, norm_placement="post", norm="rms", temperature=np.sqrt(d)
    )

    def measure(spread):
        """Passes tokens: (attention weights of the first layer, last state)."""
        keys = jax.random.split(jax.random.key(seed), 4)
        x = jax.random.normal(keys[0], (n, d))
        basis, _ = jnp.linalg.qr(jax.random.normal(keys[1], (d, d)))
        deviations = jax.random.normal(keys[2], (d,))
        deviations = (deviations - deviations.mean()) / deviations.std()
        value = jax.random.normal(keys[3], (d, d)) / jnp.sqrt(d)
        scores = basis * (1 + spread * deviations)[None] @ basis.T
        trace = rc.apply(prescribed_networks.make_params(config, scores, value), x, config)
        return trace.attention[0], trace.hidden[-1]

    weights, states = compute_cases(measure, SPREADS)
    entropies = rc.attention_entropy(weights).mean(axis=1)
    return [
        Curve("first layer", SPREADS, np.nan, entropies, "none"),
        Curve("after 6 layers", SPREADS, np.nan, rc.token_cosine(states), "none", panel=1),
    ]


def last_row(key: jax.Array, *, n: int = 64, d: int = 32, depth: int = 8) -> jax.Array:
    """Computes the rollout's last row [n] of a random causal network without positions.

    Tokens are independent Gaussians; the attention has the shares of the network.

    Args:
        key: Random key for the weights and the tokens.
        n, d, depth: Tokens, width, layers.
    """
    config = rc.san_skip(depth, 4, d, norm_placement="pre", norm="rms", mask="causal")
    key_p, key_x = jax.random.split(key)
    params, x = rc.init(key_p, config), jax.random.normal(key_x, (n, d))
    trace = rc.apply(params, x, config)
    shares = rc.branch_shares(trace, params, config).attention
    return rc.rollout(trace.attention, shares)[-1]


def ends_over_middle(row: jax.Array) -> jax.Array:
    """Divides the first and the last weight of a row [n] by the largest of the middle half, [2]."""
    n = row.shape[0]
    return jnp.stack([row[0], row[-1]]) / row[n // 4 : 3 * n // 4].max()


def rollout_row(shares: Sequence[float], heads: int, n: int) -> np.ndarray:
    """Computes the rollout's last row [n] in causal layers that attend by distance alone.

    The weights are those of ALiBi without content, softmax_j(−s_h (i − j)) with s_h = 2^(−8h/H).

    Args:
        shares: Shares of the attention, by layer.
        heads, n: H and the number of tokens.
    """
    places, slopes = np.arange(n), 2.0 ** (-8 * np.arange(1, heads + 1) / heads)
    distances = places[:, None] - places
    weights = np.where(distances < 0, 0, np.exp(-slopes[:, None, None] * abs(distances)))
    weights /= weights.sum(axis=-1, keepdims=True)
    stack = np.broadcast_to(weights.mean(axis=0), (len(shares), n, n))
    return rc.rollout(stack, np.array(shares))[-1]


def published_row(name: str, n: int) -> np.ndarray:
    """Computes `rollout_row` with the shares of a trained model.

    Args:
        name: Name of the model, in `SHARES`.
        n: Tokens.
    """
    published = tomllib.loads(SHARES.read_text("utf-8"))[name]
    return rollout_row(published["shares"], published["heads"], n)


def position_curves(seed: int, *, n: int = 64) -> list[Curve]:
    """Measures the rollout's last row by position, of random and of published causal networks."""
    (row,) = compute_cases(lambda seed: last_row(jax.random.key(seed), n=n), [seed])
    ends, middle = [row[0], row[-1]], row[n // 4 : 3 * n // 4].max()
    curves = [
        Curve("random network, iid tokens", np.arange(n), np.nan, row, "none"),
        Curve("both ends above the middle half", [0, n - 1], middle, ends, "≥", 0, ordering=True),
    ]
    for name in ("bloom-7b1", "mpt-7b"):
        row = published_row(name, 256)
        curves.append(Curve(name, np.arange(256), np.nan, row, "none", panel=1))
    return curves


THEOREMS = (
    Theorem(
        "affine_rank",
        "Cirrincione 2026 (2604.23681)",
        "abstract",
        "LayerNorm keeps the affine rank; attention adds no direction to the span of the tokens.",
        "rank(LN(X) − mean) = rank(X − mean); rank([X; SA(X)]) = rank(X)",
        "None in the abstract; its definitions could not be read",
        "`rc.apply` (a post-norm layer of branch gain 0), `rc.measures.residual`",
        "No: use the matrix rank, which RMSNorm keeps.",
        (
            Panel("affine rank before LayerNorm", "affine rank after it"),
            Panel("matrix rank before RMSNorm", "matrix rank after it"),
            Panel("rank of the tokens", "rank of tokens and attention"),
        ),
        affine_rank_curves,
        terms="The affine rank is the rank of the tokens minus their mean. The span of the tokens "
        "is the set of their linear combinations.",
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
        (Panel("tokens n", "largest singular value of the Jacobian", "xy"),),
        lipschitz_curves,
        terms="The Lipschitz constant is the largest singular value of the Jacobian, and n is the "
        "number of tokens.",
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
        (
            Panel("spread of the eigenvalues of W_QK", "entropy of attention, nats"),
            Panel("spread of the eigenvalues of W_QK", "mean cosine of two tokens"),
        ),
        spread_curves,
        terms="W_QK is the product of the query matrix and the transposed key matrix. Entropy "
        "collapse means that each query attends to very few keys.",
    ),
    Theorem(
        "position",
        "2605.09213 (2026)",
        "abstract",
        "The first and last of independent tokens count more in the last state than every token in "
        "the middle half.",
        "rollout of the last row at both ends ≥ its largest value in the middle half",
        "Random causal network without positions, iid tokens",
        "`rc.rollout` with `rc.branch_shares`",
        "With care: put what matters first. In 24 layers the middle outweighs the last token.",
        (
            Panel("position of 64", "weight in the rollout's last row", "y"),
            Panel("position of 256", "weight in the rollout's last row", "y"),
        ),
        position_curves,
        terms="The tokens are independent and have the same distribution. Attention is causal. "
        "The weight of a token is its entry in the last row of the rollout, which is the product "
        "of the attention matrices of all layers with their skips. "
        "Left: one random network with 64 tokens. Right: the published shares of two language "
        "models, BLOOM-7B and MPT-7B, with 256 tokens.",
    ),
)
