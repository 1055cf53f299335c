"""What one does with exact path sums: leave out, accumulate, differentiate, vmap, compile once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from path_examples import HEADS, D, N, config_of, example, relative
from path_oracle import Oracle
from refusals import each_is_refused

import rank_collapse as rc
from rank_collapse.paths.contributions import path_contributions as eager_contributions
from rank_collapse.paths.direct import head_contributions

path_contributions = jax.jit(eager_contributions, static_argnames="count_mlps")


SMALL = config_of(
    depth=2, mlp="gelu", attention_skip=True, mlp_skip=True, norm_placement="post", skip_gain=0.8
)


@functools.cache
def _small_example(double):
    assert jax.config.jax_enable_x64 == double
    return example(SMALL)[:2]


def small_example():
    return _small_example(jax.config.jax_enable_x64)


def test_lengths_up_to_k_and_all_but_k():
    params, x = small_example()
    for count in (False, True):
        ours = path_contributions(params, x, SMALL, count_mlps=count)
        up_to, all_but = np.asarray(ours.up_to()), np.asarray(ours.all_but())
        c = np.asarray(ours.by_attention_length)
        np.testing.assert_allclose(up_to[1], c[0] + c[1] + ours.offset, atol=1e-5)
        np.testing.assert_allclose(up_to[-1], ours.output, atol=1e-5)
        np.testing.assert_allclose(all_but[1], c[0] + c[2] + ours.offset, atol=1e-5)


def test_what_is_left_out_is_what_passed_through_it(x64):
    """Dropping a head removes its paths, their sum is the gain's derivative, lengths add up."""
    params, x = small_example()
    full = path_contributions(params, x, SMALL)
    through = jax.jit(head_contributions)(params, x, SMALL)
    assert through.shape == (2, HEADS, N, D)
    trace = jax.jit(rc.apply)(params, x, SMALL)
    terms = list(Oracle(params, trace, SMALL).paths_through(layer=1, head=0))
    expected = sum(state for _, state in terms)
    dropped = path_contributions(params, x, SMALL, head_gain=jnp.ones((2, HEADS)).at[1, 0].set(0.0))
    assert relative(full.total - dropped.total, through[1, 0]) < 1e-12
    without_bias = full.by_length.sum(axis=0) - dropped.by_length.sum(axis=0)
    assert relative(without_bias, expected) < 1e-12
    none = path_contributions(params, x, SMALL, attention_gain=jnp.zeros(2))
    assert relative(none.by_length[0], full.by_length[0]) < 1e-12
    assert not np.any(none.by_length[1:])
    counted = path_contributions(params, x, SMALL, count_mlps=True)
    no_mlp = path_contributions(params, x, SMALL, mlp_gain=jnp.zeros(2))
    assert relative(no_mlp.by_length, counted.by_length[:, 0]) < 1e-12


def test_gradient_equals_finite_differences(x64):
    """Through attention, norms and gates too: what is frozen is a function of the parameters."""
    params, x = small_example()
    direction = jax.tree.map(lambda a: jnp.cos(jnp.arange(a.size)).reshape(a.shape), params)

    @jax.jit
    def measure(t):
        moved = jax.tree.map(lambda a, e: a + t * e, params, direction)
        return jnp.sin(path_contributions(moved, x, SMALL).by_length[1]).sum()

    h = 1e-5  # a stencil of fourth order: the direction is long and the function far from linear
    slope = (8 * (measure(h) - measure(-h)) - (measure(2 * h) - measure(-2 * h))) / (12 * h)
    assert jax.grad(measure)(0.0) == pytest.approx(float(slope), rel=1e-7)
    assert abs(float(slope)) > 1e-2
    gradients = jax.grad(lambda p: path_contributions(p, x, SMALL).by_length.sum())(params)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradients))


def test_permuting_tokens_permutes_contributions():
    params, x = small_example()
    order = jnp.array([3, 0, 4, 1, 2])
    a = path_contributions(params, x, SMALL).by_length[:, order]
    assert relative(path_contributions(params, x[order], SMALL).by_length, a) < 1e-5


def test_memory_does_not_grow_with_attention_matrices():
    """Temporaries beyond the weights: channels, and one layer's attention, not all layers'."""
    d, h, n = 8, 8, 96

    def temporaries(depth):
        config = rc.san_skip(depth, h, d)
        params = jax.eval_shape(lambda k: rc.init(k, config), jax.random.key(0))
        x = jax.ShapeDtypeStruct((n, d), jnp.float32)
        lowered = jax.jit(lambda p, x: path_contributions(p, x, config).by_length).lower(params, x)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    one_layer = 4 * h * n * n
    assert temporaries(16) - temporaries(4) < 2 * one_layer


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_gain": jnp.ones((3, HEADS))}, r"head_gain of shape \(3, 2\) is not \(2, 2\)"),
        ({"mlp_gain": jnp.ones(5)}, r"mlp_gain of shape \(5,\) is not \(2,\)"),
        ({"cross_gain": jnp.ones(2)}, "cross_gain is given but"),
        ({"mask": jnp.ones(9, bool)}, r"mask of shape \(9,\)"),
    ],
)
def test_bad_input_is_named(options, message):
    params, x = small_example()
    with pytest.raises(ValueError, match=message):
        path_contributions(params, x, SMALL, **options)


def test_missing_memory_and_wrong_width_are_named():
    params, x = small_example()
    each_is_refused(
        (
            lambda: path_contributions(params, x, SMALL.replace(cross_attention=True)),
            "needs a memory",
        ),
        (lambda: path_contributions(params, x[:, :5], SMALL), "d_model=8"),
    )
