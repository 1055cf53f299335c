"""What `jax_watch` measures of NNX: masks that are arguments of the attention, no gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rank_collapse import jax_watch
from tests.oracles import draws

X = draws.normal(2, 5, 8)


class Model(nnx.Module):
    def __init__(self, **options):
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
        self.options = nnx.data(options)

    def __call__(self, x):
        return x + self.attention(x, **self.options)


@pytest.mark.full
def test_a_causal_flag_masks_as_the_mask_does():
    mask = jnp.tril(jnp.ones((5, 5), bool))[None, None]
    (out, flagged), (expected, masked), (_, free) = (
        jax_watch.nnx_monitored(Model(**options), X)
        for options in ({"is_causal": True}, {"mask": mask}, {})
    )
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6)
    for name, values in masked.items():
        np.testing.assert_allclose(flagged[name], values, rtol=1e-5, err_msg=name)
    assert float(free["attention_entropy"][0]) > float(masked["attention_entropy"][0]) + 0.1


@pytest.mark.parametrize("weight", [1.0, 10.0])
def test_scalars_have_no_gradient(weight):
    """Of the loss and weight times the scalars it is that of the loss."""
    model = Model(is_causal=True)

    def losses(model, weight):
        out, scalars = jax_watch.nnx_monitored(model, X)
        extra = sum(jnp.sum(values) for values in scalars.values())
        return jnp.sum(out**2) + weight * extra

    plain, watched = (
        jax.tree.leaves(nnx.grad(lambda m, w=w: losses(m, w))(model)) for w in (0.0, weight)
    )
    assert any(np.abs(gradient).max() > 0.1 for gradient in plain)
    for expected, gradient in zip(plain, watched, strict=True):
        np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-6)
