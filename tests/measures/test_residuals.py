"""Norms, residuals, ranks, decompositions: against numpy, removed rows, and linear programs."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.measures import norms, residuals as rs
from tests.support.closeness import assert_close
from tests.support.refusals import is_refused, parametrize_refusals


def tokens(n=7, d=5, seed=0):
    return np.random.default_rng(seed).standard_normal((n, d)).astype(np.float32) + 0.4


NUMPY_NORMS = {
    "one": lambda a: np.abs(a).sum(0).max(),
    "inf": lambda a: np.abs(a).sum(1).max(),
    "composite": lambda a: np.sqrt(np.abs(a).sum(0).max() * np.abs(a).sum(1).max()),
    "frobenius": lambda a: np.sqrt((a**2).sum()),
    "spectral": lambda a: np.sqrt(np.linalg.eigvalsh(a.T @ a).max()),
    "max": lambda a: np.abs(a).max(),
}


def compute_ranks(a):
    s = np.sqrt(np.maximum(np.linalg.eigvalsh(a @ a.T if len(a) < a.shape[1] else a.T @ a), 0))
    p, q = s / s.sum(), s**2 / (s**2).sum()
    c = np.linalg.svd(a - a.mean(axis=0), compute_uv=False)[: min(len(a) - 1, a.shape[1])]
    unit = a / np.linalg.norm(a, axis=1, keepdims=True)
    pairs = [unit[i] @ unit[j] for i in range(len(a)) for j in range(len(a)) if i != j]
    return {
        rs.stable_rank: (s**2).sum() / s.max() ** 2,
        rs.effective_rank: np.exp(-(p * np.log(p)).sum()),
        rs.effective_rank_share: np.exp(-(c / c.sum() * np.log(c / c.sum())).sum()) / len(c),
        rs.matrix_entropy: -(q * np.log(q)).sum(),
        rs.token_cosine: np.mean(pairs),
        rs.rank_one_ratio: None,
    }


@pytest.mark.parametrize("shape", [(7, 5), (4, 9)])
def test_equals_numpy(shape):
    x = tokens(*shape)
    assert set(NUMPY_NORMS) == set(norms.NORMS)
    for norm, plain in NUMPY_NORMS.items():
        np.testing.assert_allclose(norms.matrix_norm(x, norm), plain(x), rtol=1e-5)
        want = plain(x - x.mean(0)) / plain(x)
        np.testing.assert_allclose(rc.residual_ratio(x, norm=norm), want, rtol=1e-5)
    assert_close(rc.residual(x), x - x.mean(0), atol=1e-6)
    for fn, want in compute_ranks(x).items():
        if want is not None:
            np.testing.assert_allclose(fn(x), want, rtol=1e-4, err_msg=fn.__name__)
    s = np.linalg.svd(x, compute_uv=False)
    np.testing.assert_allclose(rs.rank_one_ratio(x, norm="spectral"), s[1] / s[0], rtol=1e-4)
    np.testing.assert_allclose(
        rs.rank_one_ratio(x, norm="frobenius"),
        np.sqrt((s[1:] ** 2).sum() / (s**2).sum()),
        rtol=1e-4,
    )


@pytest.mark.full
def test_masked_rows_are_as_if_removed():
    x = tokens(8, 5) + np.float32([-4, -2, 0, 2, 4])  # no zero lies between features of one sign
    keep = np.array([1, 0, 1, 1, 0, 1, 1, 0], bool)
    spoiled = np.where(keep[:, None], x, 1e4)
    functions = [lambda a, m, f=f: f(a, mask=m) for f in compute_ranks(x)]
    functions += [lambda a, m, k=k: norms.matrix_norm(a, k, mask=m) for k in norms.NORMS]
    functions.append(lambda a, m: rc.residual_ratio(a, mask=m))
    masked = jax.jit(lambda a, m: [f(a, m) for f in functions])(spoiled, keep)
    plain = jax.jit(lambda a: [f(a, None) for f in functions])(x[keep])
    np.testing.assert_allclose(masked, plain, rtol=2e-4)
    residual = rc.residual(spoiled, mask=keep)
    assert_close(residual[keep], rc.residual(x[keep]), atol=1e-6)
    np.testing.assert_array_equal(residual[~keep], 0)


def test_the_mean_minimises_the_frobenius_norm():
    x = tokens(9, 4, seed=5) ** 3
    least, rng = norms.matrix_norm(rc.residual(x), "frobenius"), np.random.default_rng(0)
    for size in (1e-2, 0.3):
        moved = rc.residual(x) + size * rng.standard_normal((1, 4))
        assert norms.matrix_norm(moved, "frobenius") > least


def test_edges():
    one = np.ones((4, 3), np.float32)
    assert_close(rc.residual_ratio(one), 0, atol=1e-6)
    np.testing.assert_array_equal(rc.residual_ratio(0 * one), 0)
    np.testing.assert_allclose(rs.token_cosine(one), 1, rtol=1e-6)
    np.testing.assert_allclose(rs.effective_rank(np.eye(4)), 4, rtol=1e-5)
    for rank in (rs.effective_rank, rs.stable_rank):
        np.testing.assert_allclose(rank(one), 1, rtol=1e-4)
        np.testing.assert_array_equal(rank(0 * one), 0)
    outer = np.outer([1, -2, 3], [1, 1, 2]).astype(np.float32)
    assert rs.rank_one_ratio(outer) < 1e-6 < 0.5 < rc.residual_ratio(outer)
    assert rc.residual(one[:1]).shape == (1, 3)


@parametrize_refusals(
    [
        (lambda: rc.residual(np.ones(3)), r"\(3,\)"),
        (lambda: rc.residual(np.ones((0, 4))), r"\(0, 4\)"),
        (lambda: rc.composite_norm(np.array([[1.0, np.nan]])), "1 values that are not finite"),
        (lambda: rc.residual_ratio(np.ones((2, 2)), norm="two"), "norm='two'"),
        (lambda: rc.residual(np.ones((2, 2)), mask=np.ones(3, bool)), r"\(3,\)"),
        (lambda: rc.residual(np.ones((2, 2)), mask=np.zeros(2, bool)), "leaves no token"),
        (lambda: rc.residual(np.ones((2, 2)), mask=np.ones(2) / 2), "a mask is boolean"),
        (lambda: rc.token_cosine(np.ones((1, 2))), r"\(1, 2\)"),
    ]
)
def test_refusals_name_the_value(arguments, message):
    is_refused(message, *arguments)


def test_small_singular_values_of_float32_are_kept():
    """A direction below the square root of epsilon, in float32 3e-4."""
    small = np.array([[1, 1], [1, 1 + 2e-5]], np.float32)
    assert abs(norms.compute_singular_values(small)[1] - 1e-5) < 1e-6


def test_participation_ratio():
    x = np.random.default_rng(0).standard_normal((7, 4))
    squares = np.linalg.svd(x, compute_uv=False) ** 2
    expected = squares.sum() ** 2 / (squares**2).sum()
    assert_close(rc.participation_ratio(x), expected, rtol=1e-12)
    padded = np.concatenate([x, np.full((2, 4), 9.0)])
    ratio = rc.participation_ratio(padded, mask=np.arange(9) < 7)
    assert_close(ratio, expected, rtol=1e-12)
    assert float(rc.participation_ratio(np.eye(3, 5))) == pytest.approx(3)
    assert float(rc.participation_ratio(np.zeros((3, 5)))) == 0


RNG = np.random.default_rng(11)


X = RNG.normal(size=(2, 5, 3)) + 0.5


MASK = np.array([[1, 1, 0, 1, 1], [0, 1, 1, 0, 0]], bool)


# −3 and 4 are the largest entries, of different tokens and features
SMALL = np.array([[1.0, -3.0, 0.0], [2.0, 0.0, 0.5], [0.5, 1.0, 4.0]])


def ranks_by_hand(x):
    s = np.linalg.svd(x, compute_uv=False)
    s = s[s > 1e-12]
    p, q = s / s.sum(), s**2 / (s**2).sum()
    return {
        "stable_rank": (s**2).sum() / s[0] ** 2,
        "effective_rank": np.exp(-(p * np.log(p)).sum()),
        "matrix_entropy": -(q * np.log(q)).sum(),
        "participation_ratio": (s**2).sum() ** 2 / (s**4).sum(),
    }


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(3, 5), (5, 3)])
def test_ranks_of_masked_batches(shape, dtype):
    x = RNG.normal(size=(2, *shape)).astype(dtype)
    mask = np.arange(shape[0]) < np.array([[shape[0]], [2]])
    expected = [ranks_by_hand(a[m].astype(float)) for a, m in zip(x, mask, strict=True)]
    for name in expected[0]:
        values = rc.MEASURES[name](x, mask=mask)
        assert values.dtype == dtype
        want = [one[name] for one in expected]
        assert_close(values, want, rtol=2e-5 if dtype == np.float32 else 1e-9)
    orthogonal = np.linalg.qr(RNG.normal(size=(4, 4)))[0]
    for name, value in (("matrix_entropy", np.log(4)), ("participation_ratio", 4)):
        assert float(rc.MEASURES[name](orthogonal)) == pytest.approx(value)


def test_a_share_of_the_rank_is_of_the_most_that_the_tokens_allow():
    """Residuals of two tokens have rank 1 of 1, of many tokens in a plane 2 of 2."""
    assert float(rs.effective_rank_share([[1.0, 2, 3], [3, 1, 0]])) == pytest.approx(1)
    square = np.array([[1.0, 0], [-1, 0], [0, 1], [0, -1]])
    assert float(rs.effective_rank_share(square + 7)) == pytest.approx(1)
    tall = np.concatenate([square, np.zeros((4, 2))], axis=1) + 1  # rank 2 of min(3, 4)
    assert float(rs.effective_rank_share(tall)) == pytest.approx(2 / 3)
    mask = [True, True, True, False]
    assert float(rs.effective_rank_share(tall, mask=mask)) == pytest.approx(
        ranks_by_hand(tall[:3] - tall[:3].mean(axis=0))["effective_rank"] / 2
    )
    assert np.isnan(rs.effective_rank_share(tall[:1]))
    assert np.isnan(rs.effective_rank_share(tall, mask=[True, False, False, False]))
    assert float(rs.effective_rank_share(np.ones((3, 2)))) == 0


def cosine_by_hand(x):
    lengths = [np.linalg.norm(a) or 1 for a in x]
    pairs = itertools.permutations(range(len(x)), 2)
    return np.mean([x[i] @ x[j] / lengths[i] / lengths[j] for i, j in pairs])


def test_a_zero_token_has_cosine_0_with_each_other():
    zeros = np.concatenate([SMALL, np.zeros((2, 3))])
    for x in (SMALL, zeros, zeros[1:4], np.zeros((3, 2))):
        assert float(rc.token_cosine(x)) == pytest.approx(cosine_by_hand(x), abs=1e-15)
    masked = rc.token_cosine(np.stack([zeros, -zeros]), mask=MASK)
    expected = [cosine_by_hand(x[m]) for x, m in zip((zeros, -zeros), MASK, strict=True)]
    assert_close(masked, expected)
    assert np.isnan(rc.token_cosine(SMALL, mask=[0, 1, 0]))


def test_nothing_is_0_and_no_token_is_nan():
    zeros, none = np.zeros((3, 2)), np.zeros(3, bool)
    ratios = [rc.residual_ratio, rc.rank_one_ratio, rc.stable_rank, rc.effective_rank]
    for measure in (*ratios, rs.matrix_entropy, rc.participation_ratio, rs.stable_rank_bound):
        assert measure(zeros) == 0 and np.isnan(measure(zeros, mask=none))
        one = measure(zeros, mask=[1, 0, 0])
        assert np.isnan(one) if measure is rc.residual_ratio else one == 0
    assert np.isnan(rc.residual_ratio(np.ones((1, 2))))
    assert np.isnan(rc.profile(np.ones((2, 1, 2)))["residual_ratio"]).all()
    assert rc.measures.spike_token(zeros, mask=[0, 1, 1]) == 1
    assert rc.measures.spike_feature(zeros, mask=[0, 1, 1]) == 0
    for name in ("spike_share", "spike_norm", "spike_entry", "residual_spike"):
        assert np.isnan(rc.MEASURES[name](zeros)), name
    assert rc.measures.spike_token(zeros) == rc.measures.spike_feature(zeros) == 0
    is_refused("leaves no token", rc.residual, X, mask=np.array([[1] * 5, [0] * 5]))
    is_refused("leaves no token", rc.composite_norm, X, mask=np.zeros(5, bool))


def test_the_residual_of_a_batch_keeps_what_exists():
    tokens = 50 * X
    residuals = rc.residual(tokens, mask=MASK)
    for x, mask, residual in zip(tokens, MASK, residuals, strict=True):
        assert_close(residual[mask], x[mask] - x[mask].mean(axis=0), atol=1e-13)
        assert (residual[~mask] == 0).all()


def test_the_bound_of_the_stable_rank_takes_twenty_steps():
    """Of two singular values near each other, so that each step shows."""
    x = np.diag([1.0, 0.97, 0.5])
    v, gram = np.random.default_rng(0).standard_normal(3), x @ x
    bounds = []
    for _ in range(21):
        bounds.append(np.trace(gram) * (v @ v) / (v @ gram @ v))
        v = gram @ v
    assert float(rs.stable_rank_bound(x)) == pytest.approx(bounds[20], rel=1e-13)
    assert bounds[19] > bounds[20] * (1 + 1e-4) > rc.stable_rank(x)


L, B, N, D = 3, 2, 5, 4


HIDDEN = np.random.default_rng(0).normal(size=(L, B, N, D)).astype(np.float32)


KEEP = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


def test_no_size_of_float64_over_or_underflows():
    noise = np.random.default_rng(1).normal(size=(6, 5))
    for scale in (1e200, 1e-200):
        for measure in (rc.residual_ratio, rc.effective_rank, rc.token_cosine):
            assert_close(measure(noise * scale), measure(noise))


def residual_norm(x):
    return rc.composite_norm(rc.residual(x))


@pytest.mark.parametrize(
    "measure",
    [
        rc.residual_ratio,
        rc.token_cosine,
        rc.composite_norm,
        rc.stable_rank,
        rc.measures.stable_rank_bound,
        rc.rank_one_ratio,
    ],
    ids=lambda f: f.__name__,
)
def test_gradients_at_collapsed_states_are_finite(measure):
    """Of equal tokens and of zeros."""
    both = jax.jit(lambda x: (jax.grad(measure)(x), jax.grad(residual_norm)(x)))
    for at in (1.0, 0.0):
        gradient, norm_gradient = both(jnp.full((4, 3), at))
        assert np.isfinite(gradient).all()
        np.testing.assert_array_equal(norm_gradient, 0)


@pytest.mark.full
@pytest.mark.parametrize("norm", ["frobenius", "composite"])
def test_the_gradient_of_the_rank_one_ratio_is_that_of_differences(x64, norm):
    """Also at rank one with unequal rows, where it is that of the larger side."""
    x = HIDDEN[0, 0].astype(np.float64)
    direction = HIDDEN[1, 0].astype(np.float64)
    ratio = jax.jit(lambda t: rc.rank_one_ratio(x + t * direction, norm=norm))
    derivative = jax.jit(jax.grad(ratio))(0.0)
    np.testing.assert_allclose(derivative, (ratio(1e-5) - ratio(-1e-5)) / 2e-5, rtol=1e-6)
    one = np.outer(x[:, 0], x[1])
    assert np.isfinite(jax.jit(jax.grad(rc.rank_one_ratio))(one)).all()


def test_the_gradient_of_the_rank_one_ratio_by_torch_is_that_by_jax(x64):
    """Also of singular values that are equal, where the derivative of an SVD is infinite."""
    torch = pytest.importorskip("torch")
    x = np.zeros((5, 4))
    x[:2, 0], x[2, 1], x[3, 2] = (3, 2), 1, 1  # σ² = 13, 1, 1, 0
    tensor = torch.tensor(x, requires_grad=True)
    rc.rank_one_ratio(tensor, norm="frobenius").backward()
    gradient = jax.jit(jax.grad(lambda x: rc.rank_one_ratio(x, norm="frobenius")))(x)
    np.testing.assert_allclose(tensor.grad, gradient, rtol=1e-6, atol=1e-12)
    assert np.abs(gradient).max() > 0.1


@pytest.mark.full
@pytest.mark.parametrize("norm", ["composite", "max"])
def test_compiled_gradients_of_the_rank_one_ratio_are_those_of_differences(x64, optimized, norm):
    """A compiled program may round σ_1² once and keep all its digits another time: the gap of σ_1
    to itself, which is left out, must be 0 nevertheless."""

    def ratio(x):
        return rc.rank_one_ratio(x, norm=norm)

    by_reverse, by_forward = jax.jit(jax.grad(ratio)), jax.jit(lambda x, v: jax.jvp(ratio, (x,), v))
    for x, direction in np.random.default_rng(1).normal(size=(8, 2, 9, 5)):
        wanted = (ratio(x + 1e-6 * direction) - ratio(x - 1e-6 * direction)) / 2e-6
        np.testing.assert_allclose((by_reverse(x) * direction).sum(), wanted, rtol=1e-5, atol=1e-7)
        slope = by_forward(x, (direction,))[1]
        np.testing.assert_allclose(slope, wanted, rtol=1e-5, atol=1e-7)


@parametrize_refusals(
    [
        (HIDDEN[0, 0, 0], {}, r"x of shape \(4,\) is not \[..., n, d\]"),
        ([[1.0, 2.0], [3.0]], {}, "different lengths"),
        (HIDDEN[:, :0], {}, r"x of shape \(3, 0, 5, 4\) has no example"),
        (HIDDEN, {"mask": KEEP[:1]}, r"mask of shape \(1, 5\) does not fit tokens of \(3, 2, 5\)"),
    ]
)
def test_bad_tokens_are_named(arguments, message):
    x, options = arguments
    is_refused(message, lambda: rc.residual_ratio(x, **options))


@pytest.mark.full
def test_gradients_in_torch_are_those_of_jax():
    """Also of masks that leave less than full rank; finite at a zero token, a kink of the norm."""
    torch = pytest.importorskip("torch")
    x, mask = HIDDEN[0].copy(), np.broadcast_to(KEEP, (B, N)) == 1
    x[0, 1] = 0
    for measure in (rc.rank_one_ratio, rc.residual_ratio, rc.effective_rank, rc.stable_rank):
        tensor = torch.tensor(x, requires_grad=True)
        measure(tensor, mask=mask).sum().backward()
        wanted = jax.grad(lambda x: measure(x, mask=mask).sum())(jnp.asarray(x))  # noqa: B023
        size = float(abs(wanted).max())
        gradient, smooth = tensor.grad.numpy(), (x != 0).any(axis=-1)
        np.testing.assert_allclose(gradient[smooth], wanted[smooth], rtol=1e-4, atol=1e-5 * size)
        assert np.isfinite(gradient).all()
