"""Operations on states in logarithms: against the same operations in many digits."""

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.network import layers
from rank_collapse.network.residual import ResidualSpec
from rank_collapse.theory import log_operations, log_operations as ops
from tests.oracles import mp_network
from tests.support.closeness import assert_close

EXISTS = np.array([False, True, True, False, True])


def join_tokens(state):
    """1·meanᵀ + e^s R of the tokens that exist; the others have to be 0 in R."""
    mean, residual, log_scale = jax.device_get((state.mean, state.residual, state.log_scale))
    assert not np.any(residual[~EXISTS])
    return (mean + np.exp(log_scale) * residual)[EXISTS]


def test_tokens_of_parts_are_renormalised_over_those_that_exist(x64):
    rng = np.random.default_rng(0)
    mean, parts, scales = (
        rng.standard_normal(3),
        rng.standard_normal((2, 5, 3)),
        np.array([0.3, -2]),
    )
    state = jax.jit(ops.renormalise_parts)(mean, parts, scales, EXISTS)
    tokens = (mean + np.einsum("p,pnd->nd", np.exp(scales), parts))[EXISTS]
    assert_close(join_tokens(state), tokens, rtol=1e-12)
    assert_close(state.residual.sum(axis=0), 0, atol=1e-14)
    assert_close(np.abs(state.residual).max(), 1)
    # the same far below float range, and of nothing
    tiny = jax.jit(ops.renormalise_parts)(mean, parts, scales - 2000, EXISTS)
    assert_close(tiny.log_scale, state.log_scale - 2000)
    assert_close(tiny.residual, state.residual, atol=1e-12)
    nothing = jax.jit(ops.renormalise_parts)(mean, 0 * parts, scales, EXISTS)
    assert nothing.log_scale == -np.inf and not np.any(nothing.residual)
    # around a mean token that is far larger, float32 leaves nothing of it in the residual
    far = np.float32([1000 + parts[0]])
    narrow = jax.jit(ops.renormalise_parts)(np.float32(mean), far, np.zeros(1, np.float32), EXISTS)
    assert np.abs(np.asarray(narrow.residual, float).sum(axis=0)).max() < 3e-7
    # tiny parts of a scale beyond float32
    small, scale = np.float32(1e-30) * far, np.float32([100])
    huge = jax.jit(ops.renormalise_parts)(np.float32(mean), small, scale, EXISTS)
    center = far[0, EXISTS].mean(axis=0) * 1e-30 * np.exp(100)
    np.testing.assert_allclose(huge.mean, center, rtol=1e-4)
    x = rng.standard_normal((5, 3))
    split = jax.jit(ops.around_mean)(x, EXISTS)
    assert_close(split.mean, x[EXISTS].mean(axis=0), rtol=1e-12)
    assert_close(join_tokens(split), x[EXISTS], rtol=1e-12)
    farthest = max(np.linalg.norm(a - b) for a in x[EXISTS] for b in x[EXISTS])
    assert_close(ops.log10_diameter(split), np.log10(farthest))
    size = rc.composite_norm(x[EXISTS] - x[EXISTS].mean(axis=0, keepdims=True))
    assert_close(ops.log10_norm(split), np.log10(size))


@pytest.mark.parametrize("norms", [False, True])
def test_branches_join_the_stream_unless_a_tenth_of_them_is_noise(norms, x64):
    rng = np.random.default_rng(0)
    x, branch = rng.standard_normal((2, 5, 3))
    skip, gain = rng.standard_normal(3), np.array([0.5, -4.0, 1.0])
    spec = ResidualSpec(None, None, skip, gain, "attention", True, "none", "layer", 0.01)
    state, part = (jax.jit(ops.around_mean)(a, EXISTS) for a in (x, branch))

    @jax.jit
    def compute(noise):
        parts = ops.LogParts(part.mean, part.residual[None], part.log_scale[None], noise)
        if norms:
            return ops.normalise_branch(spec.at_branch, parts, EXISTS)
        return ops.add_branch(spec, state, parts, EXISTS)

    quiet = jax.device_get(compute(-np.inf))
    if norms:
        size, largest = part.log_scale, 1.0
        tokens = join_tokens(ops.LogState(quiet.mean, quiet.parts[0], quiet.scales[0]))
        centred = branch - branch.mean(axis=1, keepdims=True)
        expected = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 0.01)
    else:
        size, largest = quiet.log_scale, 4.0
        tokens, expected = join_tokens(quiet), gain * branch + skip * x
    assert_close(tokens, expected[EXISTS], rtol=1e-10)
    for share, is_refused in ((0.09, False), (0.11, True)):
        noisy = compute(np.log(share / largest) + size)
        scale = noisy.scales[0] if norms else noisy.log_scale
        assert bool(np.isnan(scale)) == is_refused


@pytest.mark.parametrize("name", layers.ACTIVATIONS)
def test_divided_differences_on_both_sides_of_zero(name, x64):
    z, u = (a.ravel() for a in np.meshgrid([-2, -0.4, 0.5, 3], [-2.2, -0.3, 0.7]))
    phi = layers.get_activation(name).fn

    @jax.jit
    def compute_both(z, u, eps):
        divided = log_operations._divided_difference(name, z, u[None], eps)[0]
        return divided, (phi(z + eps * u) - phi(z)) / eps

    for eps in (1e-3, 0.3, 1.0):
        assert_close(*compute_both(z, u, eps), atol=1e-10)
    slope = u * jax.jvp(phi, (jnp.asarray(z),), (jnp.ones(len(z)),))[1]
    assert_close(compute_both(z, u, 0.0)[0], slope, atol=1e-10)


@pytest.mark.parametrize("kind", ["identity", "relu", "reglu", "swiglu"])
def test_an_mlp_of_split_tokens_has_noise_where_its_features_may_underflow(kind, x64):
    rng = np.random.default_rng(3)
    shapes = {"w_in": (3, 7), "b_in": (7,), "w_out": (7, 3), "b_out": (3,)}
    gates = {"w_gate": (3, 7), "b_gate": (7,)} if kind in layers.GATED else {}
    params = layers.MLPParams(**{n: 2 * rng.normal(size=s) for n, s in (shapes | gates).items()})
    mean, residual, scale = rng.normal(size=3), rng.normal(size=(5, 3)), 0.4
    state = ops.LogState(*map(jnp.asarray, (mean, residual, np.log(scale))))
    part = ops.mlp_parts(params, state, kind)
    (tokens,) = np.asarray(part.mean) + scale * np.asarray(part.parts)
    assert_close(tokens, layers.apply_mlp(params, mean + scale * residual, kind), atol=1e-9)
    assert_close(part.scales, [np.log(scale)])
    expected = -np.inf
    if kind == "swiglu":
        units = np.abs(residual @ params.w_in).max()
        smallest = np.finfo(float).tiny * np.abs(params.w_out).max() * max(1, units)
        expected = np.log(scale) + np.log(smallest)
    assert_close(part.noise, expected)


@pytest.mark.full
def test_the_one_scale_pass_keeps_the_digits_of_saturated_features():
    """Both ends in one tail, where φ(z + εu) and φ(z) agree in most digits or are all but 0."""
    rng = np.random.default_rng(2)
    z = (rng.choice([-1, 1], 60) * rng.uniform(4, 15, 60)).astype(np.float32)
    u = rng.uniform(-3, 3, 60).astype(np.float32)
    for name in layers.ACTIVATIONS:
        phi = mp_network.activation(name)
        for eps in np.float32([1e-12, 0.01, 1]):
            got = log_operations._divided_difference(name, jnp.asarray(z), u[None], eps)[0]
            with mpmath.workdps(150):
                points = zip(z, u, strict=True)
                ends = [
                    (mpmath.mpf(float(a)), mpmath.mpf(float(b)) * float(eps)) for a, b in points
                ]
                want = np.float64([(phi(a + s) - phi(a)) / float(eps) for a, s in ends])
            in_range = np.abs(want) > 1e-34  # above what float32 holds
            assert in_range.mean() > 0.4
            np.testing.assert_allclose(np.asarray(got)[in_range], want[in_range], rtol=1e-3)
