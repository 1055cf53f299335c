"""Theorem 2.1: counts, enumeration and the sum term by term."""

import json
import math
import os
from functools import partial
from pathlib import Path

import draws
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from published_weights import load_reference
from refusals import each_is_refused, is_refused, refused

import rank_collapse as rc
from rank_collapse import apply
from rank_collapse.paths import enumeration as rp
from rank_collapse.paths.sets import logits_of, path_set_logits


@pytest.mark.parametrize(("depth", "num_heads"), [(1, 1), (3, 2), (4, 3)])
def test_counts_are_those_of_the_enumeration(depth, num_heads):
    paths = rp.enumerate_paths(depth, num_heads)
    assert len(np.unique(paths, axis=0)) == len(paths) == (num_heads + 1) ** depth
    lengths = rp.path_length(paths, num_heads)
    assert tuple(np.bincount(lengths, minlength=depth + 1)) == rp.count_paths(depth, num_heads)
    for k in range(depth + 1):
        some = rp.enumerate_paths(depth, num_heads, length=k)
        assert len(some) == math.comb(depth, k) * num_heads**k
        assert (rp.path_length(some, num_heads) == k).all()
    plain = rp.enumerate_paths(depth, num_heads, skips=False)
    assert len(plain) == num_heads**depth == sum(rp.count_paths(depth, num_heads, skips=False))
    assert plain.max() < num_heads


def test_counts_of_large_networks_are_exact():
    assert sum(rp.count_paths(96, 96)) == 97**96
    assert rp.count_paths(12, 12)[1] == 144


@pytest.mark.parametrize("skip", [False, True])
def test_theorem_2_1_term_by_term(skip, x64):
    """Σ P_path X W_path + 1bᵀ is the output, and per length equals the fast sums."""
    config = rc.TransformerConfig(
        depth=3, num_heads=2, d_model=6, attention_skip=skip, skip_gain=0.6, branch_gain=1.4
    )

    params, x = draws.parameters(config, bias_scale=0.5), draws.normal(4, 6)
    trace = rc.apply(params, x, config)
    by_length, fast_offset = rc.path_contributions(params, x, config)
    p = jax.tree.map(np.asarray, params.layers.attention)
    skips = np.broadcast_to(0.6 * skip * np.eye(6), (3, 1, 6, 6))
    maps = np.concatenate([1.4 * p.w_v @ p.w_o, skips], axis=1)
    lengths, offset = np.zeros((4, 4, 6)), np.zeros(6)
    for path in rp.enumerate_paths(3, 2, skips=skip):
        weight = np.linalg.multi_dot([maps[l, h] for l, h in enumerate(path)])
        lengths[rp.path_length(path, 2)] += rp.path_attention(trace.attention, path) @ x @ weight
    for l in range(3):
        own = p.b_o[l] + np.einsum("hv,hvd->d", p.b_v[l], p.w_o[l])
        offset = offset @ maps[l].sum(axis=0) + 1.4 * own
    np.testing.assert_allclose(lengths.sum(axis=0) + offset, trace.output, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(fast_offset, np.tile(offset, (4, 1)), atol=1e-12)
    np.testing.assert_allclose(by_length, lengths, atol=1e-12)
    assert bool(np.any(by_length[:3])) == skip
    assert np.abs(offset).max() > 0.1


def test_products_multiply_in_the_order_of_the_theorem(x64):
    """The last layer's attention stands leftmost."""
    config = rc.san_skip(2, 2, 4, skip_gain=0.5)
    attention = rc.apply(draws.parameters(config), draws.normal(3, 4), config).attention
    path = np.array([1, 0])
    expected = attention[1, 0] @ attention[0, 1]
    np.testing.assert_allclose(rp.path_attention(attention, path), expected, atol=1e-14)
    np.testing.assert_array_equal(rp.path_attention(attention, np.array([2, 2])), np.eye(3))
    assert abs(attention[1, 0] @ attention[0, 1] - attention[0, 1] @ attention[1, 0]).max() > 1e-3


test_bad_requests_name_the_number = refused(
    [
        (lambda: rp.enumerate_paths(12, 12), r"13\^12 = 23298085122481 paths .* 1000000"),
        (lambda: rp.enumerate_paths(3, 2, limit=26), r"3\^3 = 27 paths .* limit of 26"),
        (lambda: rp.enumerate_paths(3, 2, length=4), "length=4 .* depth=3"),
        (lambda: rp.enumerate_paths(3, 2, length=-1), "length=-1 needs 4 skips in depth=3"),
        (lambda: rp.count_paths(0, 2), "depth=0"),
        (lambda: rp.count_paths(2, 0), "num_heads=0"),
    ]
)


def test_bad_paths_name_the_choice():
    attention = jnp.full((3, 2, 4, 4), 0.25)
    is_refused(
        r"choice -1 is not a head 0\.\.1, 2 \(skip\)$",
        rc.paths.path_attention,
        attention,
        [0, 2, -1],
    )
    for paths, message in (
        (np.zeros((5, 4), int), r"shape \(5, 4\) .* depth=3"),
        (np.array([0, 3, 1]), r"choice 3 is not a head 0\.\.1"),
        (np.array([0, -2, 1]), "choice -2"),
        (np.zeros(3, np.float32), "float32 are not integers"),
    ):
        each_is_refused(
            (partial(rp.check_paths, paths, 3, 2), message),
            (partial(rc.paths.path_attention, attention, paths), message),
        )
    np.testing.assert_array_equal(rp.check_paths([0, 2, -1], 3, 2), [0, 2, -1])
    np.testing.assert_allclose(rc.paths.path_attention(attention, [0, 2, 1]), attention[0, 0])


def test_a_layer_that_is_not_there_has_no_parameters():
    config = rc.san(3, 2, 4)
    params = draws.parameters(config)
    each_is_refused(
        (lambda: rc.network.layer_params(params, config, 3), "layer=3 of a network of depth=3"),
        (lambda: rc.network.layer_params(params, config, -4), "layer=-4 of a network of depth=3"),
    )
    last = rc.network.layer_params(params, config, -1)
    np.testing.assert_array_equal(last.attention.w_q, params.layers.attention.w_q[2])


# Recomputed paths against logits of the paper's published code, in float64.


DEFAULT = Path(__file__).resolve().parents[3] / "shared" / "data" / "reference_paths"
FOLDER = Path(os.environ.get("RANK_COLLAPSE_REFERENCE_PATHS", DEFAULT))
FILES = sorted(FOLDER.glob("*.npz"))


@pytest.fixture(params=FILES or [None], ids=lambda f: "absent" if f is None else f.stem)
def reference(request, x64):
    if request.param is None:
        pytest.skip(f"no .npz in {FOLDER}")
    data = np.load(request.param)
    meta = json.loads(data["meta"].tobytes())
    tensors = {n.removeprefix("param/"): data[n] for n in data.files if n.startswith("param/")}
    loaded = load_reference(tensors, meta["width"], meta.get("layer_norm_eps", 1e-12))
    assert loaded[0].depth == meta["depth"]
    return data, meta, loaded


def largest(ours, theirs):
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype == np.float64
    return float(np.max(np.abs(np.asarray(ours) - theirs)))


@pytest.mark.parametrize(
    "as_users", [False, pytest.param(True, marks=pytest.mark.full)], ids=["quick", "optimized"]
)
def test_every_case_equals_the_published_code(reference, as_users, request):
    """At the usual optimisation too."""
    if as_users:
        request.getfixturevalue("optimized")
    data, meta, (config, params, classifier) = reference
    inputs = jnp.asarray(data["input"])

    @jax.jit
    def whole(params, inputs):
        states = jax.vmap(lambda x: apply(params, x, config).output)(inputs)
        return logits_of(classifier, states, normalize=False)

    differences = {"logits/full": largest(whole(params, inputs), data["logits/full"])}

    @partial(jax.jit, static_argnums=1)
    def evaluate(sets, no_sub_path):
        def single(x):
            given = params, classifier, x, config, sets
            return path_set_logits(*given, no_sub_path=no_sub_path)

        return jax.vmap(single)(inputs)

    def logits(paths, no_sub_path):
        return evaluate(jnp.asarray(paths)[None], no_sub_path)[:, 0]

    every = np.full((1, config.depth), -1)
    name = "allheads_nosub/logits"
    if name in data.files:
        differences[name] = largest(logits(every, True), data[name])
    for case in meta["cases"]:
        key = case["key"]
        ours = logits(data[f"{key}/paths"], case["no_sub_path"])
        differences[key] = largest(ours, data[f"{key}/logits"])
    print(f"\n{meta['name']}: largest difference {max(differences.values()):.2e}")
    assert max(differences.values()) < 1e-9, differences
