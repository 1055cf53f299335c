"""`rc.profile` of hidden states as every framework gives them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc

L, B, N, D = 3, 2, 5, 4
HIDDEN = np.random.default_rng(0).normal(size=(L, B, N, D)).astype(np.float32)
KEEP = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


def one_by_one(measure, keep=None):
    return [
        [measure(HIDDEN[l, b] if keep is None else HIDDEN[l, b][keep[b] == 1]) for b in range(B)]
        for l in range(L)
    ]


def test_batches_layers_lists_and_masks():
    want = one_by_one(rc.token_cosine)
    for hidden in (HIDDEN, jnp.asarray(HIDDEN), list(HIDDEN), tuple(jnp.asarray(HIDDEN))):
        found = rc.profile(hidden, measures="token_cosine")
        assert list(found) == ["token_cosine"]
        np.testing.assert_allclose(found["token_cosine"], want, rtol=1e-5)
    alone = rc.profile(HIDDEN[:, 0], measures=["residual_ratio", "effective_rank"])
    np.testing.assert_allclose(
        alone["effective_rank"][1], rc.effective_rank(HIDDEN[1, 0]), rtol=1e-5
    )
    masked = rc.profile(HIDDEN, mask=KEEP)["residual_ratio"]
    np.testing.assert_allclose(masked, one_by_one(rc.residual_ratio, KEEP), rtol=1e-5)
    low = rc.profile(jnp.asarray(HIDDEN, jnp.bfloat16))["residual_ratio"]
    np.testing.assert_allclose(low, one_by_one(rc.residual_ratio), rtol=3e-2)


def test_hidden_states_of_transformers():
    torch = pytest.importorskip("torch")
    hidden = tuple(torch.tensor(h, requires_grad=True) for h in HIDDEN)
    found = rc.profile(hidden)["residual_ratio"]
    np.testing.assert_allclose(found, one_by_one(rc.residual_ratio), rtol=1e-6)


def test_float64_is_not_cut_to_float32():
    noise = np.random.default_rng(1).normal(size=(6, 5))
    x = 1000 + 1e-6 * noise
    rest = x - x.mean(axis=0)

    def size(a):
        return np.sqrt(np.abs(a).sum(axis=0).max() * np.abs(a).sum(axis=1).max())

    want = size(rest) / size(x)
    np.testing.assert_allclose(rc.residual_ratio(x), want, rtol=1e-6)
    np.testing.assert_allclose(rc.profile(x[None])["residual_ratio"], [want], rtol=1e-6)
    for scale in (1e200, 1e-200):
        np.testing.assert_allclose(rc.residual_ratio(noise * scale), rc.residual_ratio(noise))
        np.testing.assert_allclose(rc.effective_rank(noise * scale), rc.effective_rank(noise))
        np.testing.assert_allclose(rc.token_cosine(noise * scale), rc.token_cosine(noise))
    assert rc.residual_ratio(noise).dtype == np.float64
    assert rc.residual_ratio(jnp.asarray(noise)).dtype == np.float32


@pytest.mark.parametrize("at", [1.0, 0.0], ids=["collapsed", "zero"])
@pytest.mark.parametrize(
    "measure",
    [rc.residual_ratio, rc.token_cosine, rc.composite_norm],
    ids=lambda f: f.__name__,
)
def test_gradients_at_collapsed_states_are_finite(measure, at):
    gradient = jax.grad(measure)(jnp.full((4, 3), at))
    assert np.isfinite(gradient).all()
    rest = jax.grad(lambda x: rc.composite_norm(rc.residual(x)))(jnp.full((4, 3), at))
    np.testing.assert_array_equal(rest, 0)


@pytest.mark.parametrize(
    ("hidden", "options", "message"),
    [
        (HIDDEN, {"measures": "colour"}, "'colour' is not one of"),
        (HIDDEN[0, 0], {}, r"\(5, 4\) are not \[l, n, d\] or \[l, b, n, d\]"),
        ([HIDDEN[0, 0], HIDDEN[0, 0, :3]], {}, "different shapes"),
        (HIDDEN, {"mask": np.ones((2, 4))}, "additive masks go to bias="),
        (HIDDEN, {"mask": np.ones((2, 4), int)}, r"mask of shape \(2, 4\) does not fit"),
    ],
)
def test_bad_input_is_named(hidden, options, message):
    with pytest.raises(ValueError, match=message):
        rc.profile(hidden, **options)
