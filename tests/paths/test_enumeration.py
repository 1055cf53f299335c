"""Theorem 2.1: counts, enumeration and the sum term by term."""

import json
import os
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse import apply
from rank_collapse.paths import enumeration as rp
from rank_collapse.paths.sets import classify_states, path_set_logits
from tests.oracles import draws
from tests.oracles.path_sums import enumerate_paths, path_attention
from tests.oracles.published_weights import load_reference
from tests.support.closeness import assert_close
from tests.support.folders import SHARED_DATA
from tests.support.refusals import is_refused, parametrize_refusals


@pytest.mark.parametrize(("depth", "num_heads"), [(1, 1), (3, 2), (4, 3)])
def test_counts_are_those_of_the_enumeration(depth, num_heads):
    paths = enumerate_paths(depth, num_heads)
    assert len(np.unique(paths, axis=0)) == len(paths) == (num_heads + 1) ** depth
    lengths = rp.path_length(paths, num_heads)
    assert tuple(np.bincount(lengths, minlength=depth + 1)) == rp.count_paths(depth, num_heads)
    plain = enumerate_paths(depth, num_heads, skips=False)
    assert rp.count_paths(depth, num_heads, skips=False) == (0,) * depth + (len(plain),)


def test_counts_of_large_networks_are_exact():
    assert sum(rp.count_paths(96, 96)) == 97**96
    assert rp.count_paths(96, np.int64(96)) == rp.count_paths(96, 96)
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
    for path in enumerate_paths(3, 2, skips=skip):
        weight = np.linalg.multi_dot([maps[l, h] for l, h in enumerate(path)])
        lengths[rp.path_length(path, 2)] += path_attention(trace.attention, path) @ x @ weight
    for l in range(3):
        attention_bias = p.b_o[l] + np.einsum("hv,hvd->d", p.b_v[l], p.w_o[l])
        offset = offset @ maps[l].sum(axis=0) + 1.4 * attention_bias
    assert_close(lengths.sum(axis=0) + offset, trace.output, rtol=1e-12, atol=1e-12)
    assert_close(fast_offset, np.tile(offset, (4, 1)), atol=1e-12)
    assert_close(by_length, lengths, atol=1e-12)
    assert bool(np.any(by_length[:3])) == skip
    assert np.abs(offset).max() > 0.1


@parametrize_refusals(
    [
        (lambda: rp.count_paths(0, 2), "depth=0"),
        (lambda: rp.count_paths(2, 0), "num_heads=0"),
        (lambda: rp.count_paths(2.5, 2), "depth=2.5"),
        (lambda: rp.count_paths(2, 2, skips="no"), "skips=.no. is not one of"),
    ]
)
def test_counts_of_nothing(arguments, message):
    is_refused(message, *arguments)


@parametrize_refusals(
    [
        (lambda: rp.check_paths(np.zeros((5, 4), int), 3, 2), r"shape \(5, 4\), .* depth=3"),
        (
            lambda: rp.check_paths(np.array([0, 3, 1]), 3, 2),
            "choice 3, but .* a head from 0 to 1,",
        ),
        (lambda: rp.check_paths(np.array([0, -2, 1]), 3, 2), "choice -2"),
        (lambda: rp.check_paths(1, 3, 2), r"shape \(\), .* depth=3"),
        (
            lambda: rp.check_paths([0, 7, 9], 3, 4),
            "choice 7, but .* a head from 0 to 3, or 4 for the skip or -1 for all heads",
        ),
        (
            lambda: rp.check_paths(np.zeros(3, np.float32), 3, 2),
            "paths are float32, but",
        ),
        (lambda: rp.check_paths([0, 2, -1], 3, 2, all_heads=False), "choice -1"),
        (
            lambda: rc.paths.sample_path(jax.random.key(0), 4, 3, 2),
            "length=4 is not a whole number",
        ),
        (lambda: rc.paths.sample_path(jax.random.key(0), 1.5, 3, 2), "length=1.5 is not a whole"),
        (lambda: rc.paths.sample_path(jax.random.key(0), 1, 3, 0), "num_heads=0"),
        (
            lambda: rc.paths.sample_path_sets(jax.random.key(0), [1], 1.5, 2, 3, 2),
            "num_repeats=1.5",
        ),
    ]
)
def test_bad_paths_name_the_choice(arguments, message):
    is_refused(message, *arguments)


def test_paths_that_fit_come_back():
    np.testing.assert_array_equal(rp.check_paths([0, 2, -1], 3, 2), [0, 2, -1])
    np.testing.assert_array_equal(rp.check_paths([[2, 0]], 2, 2, all_heads=False), [[2, 0]])
    lengths = rp.path_length(np.array([[0, 2, -1], [2, 2, 2], [1, 1, 0]]), 2)
    np.testing.assert_array_equal(lengths, [2, 0, 3])  # all heads at once are passed too


# Recomputed paths against logits of the paper's published code, in float64.


DEFAULT = SHARED_DATA / "reference_paths"
FOLDER = Path(os.environ.get("RANK_COLLAPSE_REFERENCE_PATHS", DEFAULT))
FILES = sorted(FOLDER.glob("*.npz"))


QUICK = "hull_w3d6_ffn2", "sort_w2d3_mlp"


def name_file(file):
    return "absent" if file is None else file.stem


def mark_file(file):
    is_quick = file is None or file.stem in QUICK
    return pytest.param(file, marks=() if is_quick else pytest.mark.full)


@pytest.fixture(params=map(mark_file, FILES or [None]), ids=name_file)
def reference(request, x64):
    if request.param is None:
        pytest.skip(f"no .npz in {FOLDER}")
    with np.load(request.param) as file:
        data = dict(file)
    meta = json.loads(data["meta"].tobytes())
    tensors = {n.removeprefix("param/"): data[n] for n in data if n.startswith("param/")}
    loaded = load_reference(tensors, meta["width"], meta.get("layer_norm_eps", 1e-12))
    assert loaded[0].depth == meta["depth"]
    return data, meta, loaded


def compare_logits(ours, theirs):
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
    def compute_logits(params, inputs):
        states = jax.vmap(lambda x: apply(params, x, config).output)(inputs)
        return classify_states(classifier, states, normalise=False)

    differences = {
        "logits/full": compare_logits(compute_logits(params, inputs), data["logits/full"])
    }

    @partial(jax.jit, static_argnums=1)
    def evaluate(sets, no_sub_path):
        def single(x):
            arguments = params, x, config, sets, classifier
            return path_set_logits(*arguments, no_sub_path=no_sub_path)

        return jax.vmap(single)(inputs)

    def compute_path_logits(paths, no_sub_path):
        return evaluate(jnp.asarray(paths)[None], no_sub_path)[:, 0]

    all_heads = np.full((1, config.depth), -1)
    name = "allheads_nosub/logits"
    if name in data:
        differences[name] = compare_logits(compute_path_logits(all_heads, True), data[name])
    for case in meta["cases"]:
        key = case["key"]
        ours = compute_path_logits(data[f"{key}/paths"], case["no_sub_path"])
        differences[key] = compare_logits(ours, data[f"{key}/logits"])
    print(f"\n{meta['name']}: largest difference {max(differences.values()):.2e}")
    assert max(differences.values()) < 1e-9, differences
