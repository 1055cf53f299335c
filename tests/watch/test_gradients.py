"""Norms of gradients by layer and part, of trees of every framework."""

from functools import partial

import jax
import numpy as np
import pytest
from flax import linen as nn, nnx
from jax.sharding import NamedSharding, PartitionSpec

import rank_collapse as rc
from rank_collapse.watch.names import PARTS
from tests.support.closeness import assert_close, near
from tests.support.refusals import each_is_refused, is_refused, parametrize_refusals


def draw_normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_gradients_of_boxed_and_plain_trees_are_the_same():
    """A box's path ends in ".value", which is no value projection."""
    attention = {
        name: {"kernel": draw_normal(4, 2, 3, seed=i), "bias": draw_normal(2, 3, seed=9 + i)}
        for i, name in enumerate(("query", "key", "value", "out"))
    }
    want = {
        f"{name}_gradient": np.sqrt(sum((a**2).sum() for a in attention[name].values()))
        for name in ("query", "key", "value")
    }
    nnx_state = nnx.State(jax.tree.map(nnx.Param, attention))
    boxed = jax.tree.map(lambda a: nn.Partitioned(a, ("x",) * a.ndim), attention)
    for tree in (attention, nnx_state, boxed):
        norms = rc.monitor_gradients(tree)
        assert norms.keys() == want.keys()
        near(norms, want, rtol=1e-6)


LIBRARIES = {  # names of the projections, and parts of their paths
    "rank_collapse": ("w_q", "w_k", "w_v"),
    "nanodo": ("wq", "wk", "wv"),
    "one letter": ("q", "k", "v"),
    "BERT": ("query", "key", "value"),
    "Llama": ("q_proj", "k_proj", "v_proj"),
    "DistilBERT": ("q_lin", "k_lin", "v_lin"),
    "diffusers": ("to_q", "to_k", "to_v"),
    "Equinox": ("query_proj", "key_proj", "value_proj"),
    "ESPnet": ("linear_q", "linear_k", "linear_v"),
    "annotated": ("q_linear", "k_linear", "v_linear"),
}
ALONE = ("q_a_proj", "q_b_proj", "q_attn", "in_proj_q")  # of queries


def test_every_name_of_a_projection_is_known():
    names = {part: [n[i] for n in LIBRARIES.values()] for i, part in enumerate(PARTS)}
    names["query"] += ALONE
    assert {part: set(named) for part, named in PARTS.items()} == {
        part: set(named) for part, named in names.items()
    }
    for names in LIBRARIES.values():
        tree = {f"layers.0.{name}.weight": np.full(4, i + 1.0) for i, name in enumerate(names)}
        norms = rc.monitor_gradients(tree | {"layers.0.o_proj.weight": np.full(4, 9.0)})
        want = {f"{part}_gradient": 2 * (i + 1.0) for i, part in enumerate(PARTS)}
        assert norms.keys() == want.keys()
        near(norms, want, rtol=1e-6)


def test_gradients_of_modules_are_by_layer():
    """In natural order of the paths; NaN where a layer has no such part."""
    trees = [{"attention": {n: draw_normal(4, 4, seed=i) for n in "qkv"}} for i in range(11)]
    del trees[2]["attention"]["k"]
    norms = rc.monitor_gradients({"layers": trees, "head": np.ones(3)}, by_layer=True)
    for name, part in (("q", "query"), ("k", "key"), ("v", "value")):
        want = [np.linalg.norm(tree["attention"].get(name, np.nan)) for tree in trees]
        np.testing.assert_allclose(norms[f"{part}_gradient"], want, rtol=1e-6)
    flat = {f"block_{i}.q_proj.kernel": np.full(4, float(i)) for i in range(12)}
    flat |= {f"block_{i}.k_proj.kernel": np.full(4, 1.0) for i in range(12)}
    flat |= {"block_3.q_proj.bias": np.full(4, 3.0)}
    norms = rc.monitor_gradients(flat, by_layer=True)
    want = [2 * i * (2**0.5 if i == 3 else 1) for i in range(12)]
    np.testing.assert_allclose(norms["query_gradient"], want, rtol=1e-6)
    np.testing.assert_allclose(norms["key_gradient"], [2] * 12, rtol=1e-6)
    is_refused("layer_axis=", lambda: rc.monitor_gradients(flat, by_layer=True, layer_axis=0))


@pytest.mark.parametrize("largest", [1e30, 1e-30])
def test_norms_of_leaves_of_any_sizes_neither_overflow_nor_vanish(largest):
    """A leaf of 0 comes first, whose size must not be the scale of all."""
    for layers, options in (((), {}), ((2,), {"layer_axis": 0})):
        leaf = np.zeros((*layers, 2), np.float32)
        tree = {"q_proj": {"bias": leaf, "kernel": leaf + np.float32([3, 4]) * largest}}
        norm = rc.monitor_gradients(tree, **options)["query_gradient"]
        np.testing.assert_allclose(norm, np.full(layers, 5 * largest), rtol=1e-6)


def test_a_leaf_of_float64_makes_the_norm_float64(x64):
    small, large = np.ones(3, np.float32), np.array([3e100, 4e100])
    for pair in ((small, large), (large, small)):
        tree = {"q_proj": dict(zip(("bias", "kernel"), pair, strict=True))}
        norm = rc.monitor_gradients(tree)["query_gradient"]
        assert_close(norm, 5e100, rtol=1e-15)


def test_the_innermost_name_of_a_path_counts():
    tree = {"q": {"k_proj": np.full(4, 1.0)}, "value": {"q_proj": np.full(4, 2.0)}}
    near(rc.monitor_gradients(tree), {"query_gradient": 4.0, "key_gradient": 2.0})
    towers = {f"q.h.{i}": {"q": np.full(4, i + 1.0)} for i in range(2)}  # of layers inside of "q"
    near(rc.monitor_gradients(towers, by_layer=True), {"query_gradient": [2.0, 4.0]})
    haiku = {f"block{i}/~/attention/query": {"w": np.full(4, i + 1.0)} for i in range(2)}
    near(rc.monitor_gradients(haiku, by_layer=True), {"query_gradient": [2.0, 4.0]})


def test_leaves_of_few_bits_have_norms_in_float32():
    leaf = jax.numpy.full((2, 200), 1.01, "bfloat16")
    for tree in ({"q": leaf}, {"q": {"a": leaf, "b": np.zeros(2, "float16")}}):
        norm = rc.monitor_gradients(tree)["query_gradient"]
        assert norm.dtype == np.float32
        near(norm, 20 * float(leaf[0, 0]), rtol=1e-6)


def test_the_first_leaves_are_examples_of_what_is_not_named():
    tree = {name: np.ones(2) for name in "abcde"}
    message = "no leaf is named after queries, keys or values: a, b, c, ...; parts= may name them"
    is_refused(f"^{message}$", lambda: rc.monitor_gradients(tree))


@pytest.mark.parametrize("axis", [0, 2])
def test_axes_of_layers_count_from_either_end(axis):
    """The axis of layers has the length of the three shares too, and is no axis to split."""
    fused = np.moveaxis(draw_normal(3, 5, 6), 0, axis)
    options = {"parts": {"c_attn": tuple(PARTS)}}
    first, last = (
        rc.monitor_gradients({"c_attn": fused}, layer_axis=a, **options) for a in (axis, axis - 3)
    )
    for name, piece in zip(PARTS, np.split(draw_normal(3, 5, 6), 3, axis=2), strict=True):
        want = np.sqrt((piece**2).sum(axis=(1, 2)))
        np.testing.assert_allclose(first[f"{name}_gradient"], want, rtol=1e-6)
        np.testing.assert_array_equal(last[f"{name}_gradient"], first[f"{name}_gradient"])


@pytest.mark.parametrize("layers", [(), (3,)])
def test_gradients_of_fused_matrices_are_split_as_the_caller_says(layers):
    q, kv = draw_normal(*layers, 7, 8), draw_normal(*layers, 7, 8, seed=1)
    k, v = np.split(kv, 2, axis=-1)
    tree = {"h.attn.c_attn.weight": np.concatenate([q, kv], axis=-1), "h.mlp.weight": q}
    options = {"layer_axis": 0 if layers else None}
    for shares, axis in (
        ({"query": 8, "key": 4, "value": 4}, {}),
        ({"query": 2, "key": 1, "value": 1}, {"axis": -1}),
        ({"query": 2, "key": 1, "value": 1}, {"axis": 1 + len(layers)}),
    ):
        norms = rc.monitor_gradients(tree, parts={"c_attn": shares}, **options, **axis)
        for part, gradient in (("query", q), ("key", k), ("value", v)):
            want = np.sqrt((gradient**2).sum(axis=(-2, -1)))
            np.testing.assert_allclose(norms[f"{part}_gradient"], want, rtol=1e-6)
    bias = {"in_proj_bias": np.concatenate([q[..., 0, :]] * 3, axis=-1)}
    norms = rc.monitor_gradients(bias, parts={"in_proj_bias": tuple(PARTS)}, **options)
    assert_close(norms["key_gradient"], norms["query_gradient"])
    for wrong in (("query", "keys"), ("query", "key", "value"), {"query": 5, "key": 2}, "keys"):
        call = partial(rc.monitor_gradients, tree, parts={"c_attn": wrong}, axis=-1, **options)
        is_refused(r"c_attn.weight of shape .* does not hold", call)
    each_is_refused(
        (
            lambda: rc.monitor_gradients(tree, parts={"c_attn": {"query": 2, "key": 2}}, **options),
            r"does not hold .* side by side, one axis alone, which",
        ),
        (lambda: rc.monitor_gradients(tree), r"no leaf is named after.*parts= may name them"),
    )


@pytest.mark.parametrize("axis", [0, -1])
def test_of_several_axes_that_fit_the_caller_names_one_or_its_whole_length_does(axis):
    """Both axes are divisible by the shares; one alone has the sum of the widths."""
    leaf = draw_normal(4, 12)
    for shares, options, ends in (
        (("query", "value"), {"axis": axis}, (0, 1, 1, 2)),
        ({"query": 1, "value": 1}, {"axis": axis}, (0, 1, 1, 2)),
        ({"key": 1, "query": 3}, {}, (1, 4, 0, 1)),
    ):
        norms = rc.monitor_gradients({"c_attn": leaf}, parts={"c_attn": shares}, **options)
        blocks = np.split(leaf, leaf.shape[options.get("axis", 0)], axis=options.get("axis", 0))
        unit = len(blocks) // ends[-1] if options else 1
        other = "value" if "value" in shares else "key"
        for part, (start, end) in (("query", ends[:2]), (other, ends[2:])):
            want = np.linalg.norm(blocks[start * unit : end * unit])
            assert_close(norms[f"{part}_gradient"], want)


SHARED = {"parts": {"c_attn": tuple(PARTS)}}


TWO_AXES = r"c_attn of shape .* one axis alone, which axis= may"


UNEVEN = {"a": {"q_proj": np.ones((2, 4))}, "q_proj": np.ones((3, 4))}
FEWER = {"a": {"q_proj": np.ones((3, 4))}, "q_proj": np.ones((2, 4))}


@parametrize_refusals(
    [
        ({"c_attn": np.ones((48, 24))}, SHARED, TWO_AXES),
        ({"c_attn": np.ones((36, 4, 12))}, SHARED, TWO_AXES),
        ({"c_attn": np.ones((6, 6))}, SHARED, TWO_AXES),
        ({"c_attn": np.ones((6, 6))}, {"parts": {"c_attn": ()}}, TWO_AXES),
        (UNEVEN, {"layer_axis": 2}, r"q_proj of shape \(2, 4\) has no axis layer_axis=2"),
        (UNEVEN, {"layer_axis": 0}, r"q_proj of shape \(3, 4\) does not have 2 layers"),
        (FEWER, {"layer_axis": 0}, r"q_proj of shape \(2, 4\) does not have 3 layers"),
    ]
)
def test_axes_that_are_not_there_or_not_known_are_refused(arguments, message):
    tree, options = arguments
    is_refused(message, lambda: rc.monitor_gradients(tree, **options))


def test_a_name_of_the_caller_counts_before_that_of_the_table():
    gradients = {"layer": {"value": np.full(4, 3.0, np.float32)}}
    norms = rc.monitor_gradients(gradients, parts={"value": "query"})
    near(norms, {"query_gradient": 6.0})
    parts = {"c_attn": ("query", "key", "value")}  # of an axis of length 0 no share is taken
    norms = rc.monitor_gradients({"c_attn": np.zeros((0, 6), np.float32)}, parts=parts)
    near(norms, dict.fromkeys(norms, 0.0))


def test_gradients_with_explicit_axes_are_those_of_one_device():
    """Also where the axis that is spread over devices is split, or is that of the layers."""
    mesh = jax.make_mesh((2,), ("x",))
    packed = draw_normal(4, 2, 6)

    def measure(gradient):
        parts = {"c_attn": ("query", "key", "value")}
        options = {"parts": parts, "axis": -1, "layer_axis": 0}
        return rc.monitor_gradients({"c_attn": gradient}, **options)

    for spec in (("x",), (None, "x"), (None, None, "x")):
        spread = jax.device_put(packed, NamedSharding(mesh, PartitionSpec(*spec)))
        for compute in (measure, jax.jit(measure)):
            near(compute(spread), measure(packed), rtol=1e-5)
