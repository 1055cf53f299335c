import re

import draws
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn, nnx

import rank_collapse as rc
from rank_collapse import flax_adapters as adapters
from rank_collapse.measures.residuals import residual_ratio

N, D, H = 5, 12, 3
X = draws.tokens(N, D)


def filled(tree):
    """The same tree with no two values alike, so that a transposition shows."""
    leaves, treedef = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(3), len(leaves))
    drawn = [0.3 * jax.random.normal(k, a.shape) for k, a in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(treedef, drawn)


class Scanned(nn.Module):
    """A layer as nn.scan wants it, with outputs that are not a plain array."""

    @nn.compact
    def __call__(self, x, _):
        x = x + nn.MultiHeadDotProductAttention(num_heads=H, name="attention")(x)
        return x, (x, nn.softmax(x @ x.T))


def scanned(axis):
    axes = {"params": axis, "intermediates": 0}
    return nn.scan(Scanned, variable_axes=axes, split_rngs={"params": True}, length=3)()


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.LayerNorm()(x + nn.MultiHeadDotProductAttention(num_heads=H)(x))


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(12):
            x = Block(name=f"block_{i}")(x)
        return x.mean(axis=-2)


def test_outputs_of_a_linen_model():
    x = jax.random.normal(jax.random.key(0), (2, N, D))
    variables = Model().init(jax.random.key(1), x)
    found = adapters.linen_intermediates(Model(), variables, x)
    blocks = {name: h for name, h in found.items() if re.search(r"^block_\d+/__call__", name)}
    assert list(blocks) == [f"block_{i}/__call__" for i in range(12)]
    mask = jnp.array([[True] * N, [True] * 3 + [False] * 2])
    last = blocks["block_11/__call__"]
    np.testing.assert_allclose(
        rc.profile(list(blocks.values()), mask=mask)["residual_ratio"][-1],
        [residual_ratio(last[0]), residual_ratio(last[1, :3])],
        rtol=1e-5,
    )
    only = lambda module, method: isinstance(module, Block) and method == "__call__"  # noqa: E731
    chosen = adapters.linen_intermediates(Model(), variables, x[0], select=only)
    assert list(chosen) == [f"block_{i}/__call__" for i in range(12)]


class NNXBlock(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(num_heads=H, in_features=D, decode=False, rngs=rngs)

    def __call__(self, x):
        return x + self.attention(x)


class NNXModel(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([NNXBlock(rngs) for _ in range(3)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_outputs_of_an_nnx_model():
    model = NNXModel(nnx.Rngs(0))
    x, found = X, adapters.nnx_intermediates(model, X)
    states = [h for name, h in found.items() if re.search(r"^blocks/\d+/__call__", name)]
    assert len(states) == 3
    for i, own in enumerate(states):
        x = model.blocks[i](x)
        np.testing.assert_allclose(own, x, rtol=1e-5)


def test_nested_outputs_are_found_by_name():
    stack = scanned(0)
    variables = stack.init(jax.random.key(1), X, None)
    last, (hidden, weights) = stack.apply(variables, X, None)
    found = adapters.linen_intermediates(stack, variables, X, None)
    nested = {"layer": {"__call__": ((last, (hidden, weights)),)}}
    named = adapters.named_arrays(nested)
    assert {k: v.shape for k, v in named.items()} == {
        "layer/__call__#0": (N, D),
        "layer/__call__#1.0": (3, N, D),
        "layer/__call__#1.1": (3, N, N),
    }
    assert any(v.shape == (3, N, D) for v in found.values())
