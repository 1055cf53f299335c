import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx

import rank_collapse as rc
from rank_collapse import flax_adapters as adapters
from rank_collapse.measures.residuals import residual_ratio
from tests.oracles import draws
from tests.support.closeness import assert_close
from tests.support.refusals import each_is_refused

N, D, H = 5, 12, 3
X = draws.tokens(N, D)


def fill_leaves(tree):
    """Fills the tree with different values, so that a transposition shows."""
    leaves, treedef = jax.tree.flatten(tree)
    rng = np.random.default_rng(3)
    values = [jax.device_put(0.3 * rng.standard_normal(a.shape)) for a in leaves]
    return jax.tree.unflatten(treedef, values)


class Scanned(nn.Module):
    """A layer for nn.scan, whose output is a tuple of arrays."""

    @nn.compact
    def __call__(self, x, _):
        x = x + nn.MultiHeadDotProductAttention(num_heads=H, name="attention")(x)
        return x, (x, nn.softmax(x @ x.T))


def make_scan(axis):
    axes = {"params": axis, "intermediates": 0}
    return nn.scan(Scanned, variable_axes=axes, split_rngs={"params": True}, length=3)()


@pytest.mark.parametrize(("use_bias", "y"), [(True, X), (False, X), (True, draws.tokens(7, 8))])
def test_linen_attention_there_and_back(use_bias, y):
    module = nn.MultiHeadDotProductAttention(num_heads=H, use_bias=use_bias)
    variables = fill_leaves(jax.eval_shape(module.init, jax.random.key(1), X, y))
    ours = adapters.attention_from_linen(variables)
    output, _ = rc.network.multi_head_attention(ours, X, y)
    assert_close(output, module.apply(variables, X, y), atol=2e-6)
    back = adapters.attention_to_linen(ours, use_bias=use_bias)
    assert jax.tree.all(jax.tree.map(np.array_equal, back, variables["params"]))
    if not use_bias:
        none = ours.replace(b_q=None, b_k=None, b_v=None, b_o=None)
        for biases in (False, True):
            mine, other = (adapters.attention_to_linen(p, use_bias=biases) for p in (none, ours))
            assert jax.tree.all(jax.tree.map(np.array_equal, mine, other))


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_absent_biases_have_the_dtype_of_the_weights(dtype, x64):
    layer = draws.parameters(rc.san(1, 2, 6)).layers.attention
    layer = jax.tree.map(lambda a: a[0].astype(dtype), layer)
    theirs = adapters.attention_to_linen(layer.replace(b_q=None, b_k=None, b_v=None, b_o=None))
    assert all("bias" in part for part in theirs.values())
    assert {a.dtype.name for a in jax.tree.leaves(theirs)} == {dtype}
    bare = {name: {"kernel": part["kernel"]} for name, part in theirs.items()}
    ours = adapters.attention_from_linen(bare)
    assert ours.b_q.shape == (2, 3) and ours.b_o.shape == (6,)
    assert {a.dtype.name for a in jax.tree.leaves(ours)} == {dtype}


@pytest.mark.parametrize("use_bias", [True, False])
def test_nnx_attention_there_and_back(use_bias):
    def make(seed):
        return nnx.MultiHeadAttention(
            num_heads=H, in_features=D, decode=False, use_bias=use_bias, rngs=nnx.Rngs(seed)
        )

    module, other = make(0), make(1)
    state = nnx.state(module, nnx.Param)
    nnx.update(module, fill_leaves(state))
    ours = adapters.attention_from_nnx(module)
    output, _ = rc.network.multi_head_attention(ours, X, X)
    assert_close(output, module(X), atol=2e-6)
    adapters.attention_to_nnx(ours, other)
    np.testing.assert_array_equal(other(X), module(X))


@pytest.mark.parametrize("axis", [0, 1])
def test_parameters_of_scanned_blocks(axis):
    stack = make_scan(axis)
    variables = fill_leaves(jax.eval_shape(stack.init, jax.random.key(1), X, None))
    theirs = variables["params"]["attention"]
    ours = adapters.attention_from_linen(theirs, layer_axis=axis)
    config = rc.san_skip(3, H, D)
    params = rc.network.TransformerParams(layers=rc.network.BlockParams(attention=ours))
    assert_close(rc.apply(params, X, config).output, stack.apply(variables, X, None)[0], atol=1e-5)
    for l in range(3):
        single = jax.tree.map(lambda a, l=l: np.take(np.asarray(a), l, axis), theirs)
        want = adapters.attention_from_linen(single)
        mine = rc.network.layer_params(params, config, l).attention
        assert jax.tree.all(jax.tree.map(np.array_equal, mine, want))


def test_parameters_of_nnx_blocks_made_together():
    @nnx.vmap(axis_size=3)
    def make(key):
        return nnx.MultiHeadAttention(H, D, decode=False, rngs=nnx.Rngs(key))

    modules = make(jax.random.split(jax.random.key(0), 3))
    nnx.update(modules, fill_leaves(nnx.state(modules, nnx.Param)))
    ours = adapters.attention_from_nnx(modules, layer_axis=0)
    x = draws.normal(N, D)
    definition, state = nnx.split(modules)
    for l in range(3):
        single = nnx.merge(definition, jax.tree.map(lambda a, l=l: a[l], state))
        mine, _ = rc.network.multi_head_attention(jax.tree.map(lambda a, l=l: a[l], ours), x, x)
        assert_close(mine, single(x), atol=2e-6)


@pytest.mark.full
def test_keys_and_values_of_groups_are_written_for_each_head():
    config = rc.san(1, 4, D, num_kv_heads=2)
    grouped = rc.network.layer_params(draws.parameters(config), config, 0).attention
    assert grouped.w_k.shape[0] == grouped.b_v.shape[0] == 2
    ours = adapters.attention_from_linen(adapters.attention_to_linen(grouped))
    expected, _ = rc.network.multi_head_attention(grouped, X, X)
    assert_close(rc.network.multi_head_attention(ours, X, X)[0], expected, atol=2e-6)
    np.testing.assert_array_equal(ours.w_k, np.asarray(grouped.w_k)[[0, 0, 1, 1]])
    np.testing.assert_array_equal(ours.b_v, np.asarray(grouped.b_v)[[0, 0, 1, 1]])


def test_what_flax_cannot_hold_is_refused():
    def heads(**fields):
        config = rc.san(1, H, D, **fields)
        return rc.network.layer_params(draws.parameters(config), config, 0).attention

    one = jnp.eye(D)[0]  # all other entries are 0
    biased = heads().replace(b_q=None, b_k=None, b_v=None, b_o=one)
    wider = nnx.MultiHeadAttention(num_heads=H, in_features=24, decode=False, rngs=nnx.Rngs(0))
    to_linen, from_linen = adapters.attention_to_linen, adapters.attention_from_linen
    each_is_refused(
        (lambda: to_linen(heads(d_qk=2, d_v=4)), "d_qk=2 must equal d_v=4"),
        (lambda: to_linen(heads(), use_bias=False), "b_q is not zero"),
        (lambda: to_linen(biased, use_bias=False), "b_o is not zero"),
        (lambda: to_linen(heads(score="additive")), "additive or relative attention has no"),
        (lambda: to_linen(heads(position="relative_key")), "additive or relative attention has no"),
        (lambda: to_linen(heads(qk_norm="head")), "RMSNorm of queries and keys has no"),
        (lambda: from_linen({"Dense_0": {}}), "not those of multi-head attention"),
        (lambda: from_linen({**to_linen(heads()), "query": {}}), "not those of multi-head"),
        *[
            (lambda name=name: from_linen({**to_linen(heads()), name: {}}), "normalize_qk=True")
            for name in ("query_ln", "key_ln")
        ],
        (lambda: adapters.attention_to_nnx(heads(), wider), "other shapes"),
    )


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.LayerNorm()(x + nn.MultiHeadDotProductAttention(num_heads=H)(x))


class Model(nn.Module):
    @nn.compact
    def __call__(self, x, scale=1.0):
        for i in range(12):
            x = Block(name=f"block_{i}")(x)
        return self.average(x, scale)

    def average(self, x, scale):
        return scale * x.mean(axis=-2)


def test_outputs_of_a_linen_model():
    x = draws.normal(2, N, D)
    variables = fill_leaves(jax.eval_shape(Model().init, jax.random.key(1), x))
    outputs = adapters.linen_intermediates(Model(), variables, x, scale=3.0)
    assert "__call__" in outputs and "average" not in outputs
    blocks = {name: h for name, h in outputs.items() if re.search(r"^block_\d+/__call__", name)}
    assert list(blocks) == [f"block_{i}/__call__" for i in range(12)]
    mask = jnp.array([[True] * N, [True] * 3 + [False] * 2])
    last = blocks["block_11/__call__"]
    np.testing.assert_allclose(outputs["__call__"], 3 * last.mean(axis=-2), rtol=1e-5)
    np.testing.assert_allclose(
        rc.profile(list(blocks.values()), mask=mask)["residual_ratio"][-1],
        [residual_ratio(last[0]), residual_ratio(last[1, :3])],
        rtol=1e-5,
    )
    is_block_call = lambda module, method: isinstance(module, Block) and method == "__call__"  # noqa: E731
    chosen = adapters.linen_intermediates(Model(), variables, x[0], select=is_block_call)
    assert list(chosen) == [f"block_{i}/__call__" for i in range(12)]


class NNXBlock(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(num_heads=H, in_features=D, decode=False, rngs=rngs)

    def __call__(self, x):
        return x + self.attention(x)


class NNXModel(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([NNXBlock(rngs) for _ in range(3)])

    def __call__(self, x, scale=1.0):
        for block in self.blocks:
            x = block(x)
        return scale * x


def test_outputs_of_an_nnx_model():
    model = NNXModel(nnx.Rngs(0))
    x, outputs = X, adapters.nnx_intermediates(model, X, scale=3.0)
    np.testing.assert_allclose(outputs["__call__"], 3 * outputs["blocks/2/__call__"], rtol=1e-6)
    states = [h for name, h in outputs.items() if re.search(r"^blocks/\d+/__call__", name)]
    assert len(states) == 3
    for i, state in enumerate(states):
        x = model.blocks[i](x)
        np.testing.assert_allclose(state, x, rtol=1e-5)


def test_nested_outputs_are_found_by_name():
    stack = make_scan(0)
    variables = fill_leaves(jax.eval_shape(stack.init, jax.random.key(1), X, None))
    last, (hidden, weights) = stack.apply(variables, X, None)
    outputs = adapters.linen_intermediates(stack, variables, X, None)
    nested = {"layer": {"__call__": ((last, (hidden, weights)),)}}
    named = adapters.named_arrays(nested)
    assert {k: v.shape for k, v in named.items()} == {
        "layer/__call__#0": (N, D),
        "layer/__call__#1.0": (3, N, D),
        "layer/__call__#1.1": (3, N, N),
    }
    assert any(v.shape == (3, N, D) for v in outputs.values())


def test_arrays_are_named_by_their_place_and_nothing_else_is():
    """One output has the name of its call, several have numbers; layers in natural order."""
    one, two, three = (jnp.full(i, float(i)) for i in (1, 2, 3))
    tree = {
        "layer_10": {"__call__": (one,), "other": [two]},
        "layer_2": {"__call__": (one, two), "bare": three, "text": ("name", 3, two)},
        "layer_1": {"nested": ({"b": one, "a": (two, three)},), "none": (None,), "number": 2.0},
    }
    assert {name: len(a) for name, a in adapters.named_arrays(tree).items()} == {
        "layer_1/nested#a.0": 2,
        "layer_1/nested#a.1": 3,
        "layer_1/nested#b": 1,
        "layer_2/__call__#0": 1,
        "layer_2/__call__#1": 2,
        "layer_2/bare": 3,
        "layer_2/text#2": 2,
        "layer_10/__call__": 1,
        "layer_10/other": 2,
    }
    assert next(reversed(adapters.named_arrays(tree))).startswith("layer_10")
