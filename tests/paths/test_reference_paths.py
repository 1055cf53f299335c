"""Recomputed paths against logits of the paper's published code, in float64."""

import functools
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from published_weights import load_reference

from rank_collapse import apply
from rank_collapse.paths.sets import logits_of, path_set_logits

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


def test_every_case_equals_the_published_code(reference):
    compare(*reference)


@pytest.mark.slow
def test_as_users_compile(reference, optimized):
    """The same, at the usual optimisation."""
    compare(*reference)


def compare(data, meta, loaded):
    config, params, classifier = loaded
    inputs = jnp.asarray(data["input"])

    @jax.jit
    def whole(params, inputs):
        states = jax.vmap(lambda x: apply(params, x, config).output)(inputs)
        return logits_of(classifier, states, normalize=False)

    differences = {"logits/full": largest(whole(params, inputs), data["logits/full"])}

    @functools.partial(jax.jit, static_argnums=1)
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
