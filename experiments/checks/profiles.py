"""Residual profiles of drawn networks, by each pass of the library and in ball arithmetic."""

import multiprocessing
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import rank_collapse as rc
from rank_collapse.network.config import TransformerConfig
from rank_collapse.runs.seeds import QUICK
from rank_collapse.theory import noise, pairs
from tests import ball_oracle

D, DEPTH, BIASES, OFFSET = 16, 6, 0.1, 0.3
SCALES = 0.3, 6.0
METHODS = ("one_scale", "replicas", "replicas64", "pairs32", "pairs64", "certified")
VERDICTS = ("right", "unproved", "refused", "wrong")


class Case(NamedTuple):
    """A kind of network; `skips` draws the skip's gain from 0, 1e-30, 1 and between 0 and 1."""

    num_tokens: int
    num_heads: int
    fields: Mapping[str, Any]
    skips: bool = False


SKIP = {"attention_skip": True}
MLP = {"mlp_skip": True, "d_ff": 2 * D}
CASES = {
    "SAN, 1 head, 6 tokens": Case(6, 1, {}),
    "SAN, 2 heads, 10 tokens": Case(10, 2, {}),
    "SAN, 4 heads, 16 tokens": Case(16, 4, {}),
    "skip, 2 heads, 6 tokens": Case(6, 2, SKIP, skips=True),
    "skip, 4 heads, 16 tokens": Case(16, 4, SKIP, skips=True),
    "post-LN": Case(6, 2, {"norm_placement": "post"}),
    "post-LN, skip": Case(8, 4, {"norm_placement": "post"} | SKIP, skips=True),
    "post-LN, skips, GELU": Case(6, 4, {"norm_placement": "post", "mlp": "gelu"} | SKIP | MLP),
    "pre-LN, skip": Case(6, 2, {"norm_placement": "pre"} | SKIP, skips=True),
    "pre-RMS, skips, SwiGLU, causal": Case(
        10, 2, {"norm_placement": "pre", "norm": "rms", "mlp": "swiglu", "mask": "causal"}
        | SKIP | MLP,
    ),
    "GELU": Case(6, 2, {"mlp": "gelu", "d_ff": D}),
    "ReLU": Case(6, 2, {"mlp": "relu", "d_ff": D}),
    "tanh": Case(6, 2, {"mlp": "tanh", "d_ff": D}),
    "causal": Case(10, 2, {"mask": "causal"}),
    "causal, skip": Case(16, 4, {"mask": "causal"} | SKIP, skips=True),
    "local": Case(8, 2, {"mask": "local", "window": 1}),
    "rotary, causal": Case(6, 2, {"mask": "causal", "position": "rotary"}),
    "post-LN, skips, ReGLU": Case(6, 2, {"norm_placement": "post", "mlp": "reglu"} | SKIP | MLP),
    "skips, SiLU": Case(6, 2, {"mlp": "silu"} | SKIP | MLP, skips=True),
    "tanh-form GELU": Case(6, 2, {"mlp": "gelu_tanh", "d_ff": D}),
    "QK-norm, skip": Case(6, 2, {"qk_norm": "head"} | SKIP, skips=True),
}  # fmt: skip


def draw(case: Case, keys: Any) -> tuple[Any, Any, TransformerConfig, Any]:
    """Parameters, tokens and configs (leading axis: draws) and weight scales, all float32."""
    config = rc.TransformerConfig(
        depth=DEPTH, num_heads=case.num_heads, d_model=D, **dict(case.fields)
    )

    def single(key):
        key_scale, key_gain, key_kind, key_params, key_tokens = jax.random.split(key, 5)
        low, high = np.log10(SCALES)
        scale = 10 ** jax.random.uniform(key_scale, minval=low, maxval=high)
        between = jax.random.uniform(key_gain)
        kinds = jnp.stack([jnp.zeros(()), jnp.asarray(1e-30), jnp.ones(()), between])
        gain = jax.random.choice(key_kind, kinds) if case.skips else jnp.ones(())
        x = OFFSET + jax.random.normal(key_tokens, (case.num_tokens, D))
        params = rc.init(key_params, config, scale, BIASES)
        return params, x, config.replace(skip_gain=gain), scale

    compiled = jax.jit(jax.vmap(single), compiler_options=QUICK)
    return jax.tree.map(np.asarray, compiled(keys))


def compare(case: Case, keys: Any, *, max_digits: int, workers: int) -> dict[str, np.ndarray]:
    """Profiles [s, L + 1] of every method and of the oracle, scales and gains [s]."""
    params, x, config, scale = draw(case, keys)
    out = {
        "one_scale": _run(_one_scale, params, x, config),
        "replicas": _run(rc.log_residual_profile, params, x, config),
        "pairs32": _run(_pairs, params, x, config),
    }
    wide = jax.tree.map(lambda a: a.astype(np.float64), (params, x, config))
    with jax.enable_x64(True):
        out["replicas64"] = _run(rc.log_residual_profile, *wide)
        out["pairs64"] = _run(_pairs, *wide)
    # what `pairs.certified_profiles` does, seed by seed
    out["certified"], out["passed"] = np.array(out["replicas"]), np.zeros(len(x), int)
    for number, name in enumerate(("replicas64", "pairs32", "pairs64"), start=1):
        left = ~np.asarray(pairs.known(out["certified"]))
        out["certified"][left], out["passed"][left] = out[name][left], number
    seen = np.where(np.isfinite(out["pairs64"]), out["pairs64"], 0)
    digits = np.clip(60 - 1.3 * seen.min(axis=1), 200, max_digits).astype(int)
    out["proved"] = _proofs(params, x, config, digits, max_digits, workers)
    if config.position != "none":  # whose float64 tables are other numbers
        out["proved64"] = _proofs(*wide, digits, max_digits, workers)
    return out | {"scale": scale, "gain": np.asarray(config.skip_gain)}


def _run(fn, params, x, config):
    compiled = jax.jit(jax.vmap(fn), compiler_options=QUICK)
    return jax.tree.map(np.asarray, compiled(params, x, config))


def _one_scale(params, x, config):
    return rc.log_residual_profile(params, x, config, replicas=0)


def _pairs(params, x, config):
    return pairs.pair_profile(params, x, config)


def _proofs(params, x, config, digits, max_digits, workers):
    tasks = [
        (*jax.tree.map(lambda a, s=s: a[s], (params, x, config)), int(d), max_digits)
        for s, d in enumerate(digits)
    ]
    if workers == 1:
        return np.stack([_proof(task) for task in tasks])
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        return np.stack(pool.map(_proof, tasks, chunksize=1))


def _proof(task):
    params, x, config, digits, max_digits = task
    with jax.enable_x64(x.dtype == np.float64):
        return ball_oracle.profile(params, x, config, digits=digits, max_digits=max_digits)


def verdicts(profile: np.ndarray, proved: np.ndarray) -> np.ndarray:
    """Index into `VERDICTS` of each draw [s].

    wrong: a number that differs from a proved one by more than the passes promise, in any layer.
    Else refused: NaN in any layer; unproved: all numbers, of which the oracle's digits did not
    reach some; right: all numbers, all proved.
    """
    known = ~np.isnan(profile) & ~np.isnan(proved) & (profile != proved)
    error = np.abs(np.where(known, profile, 0) - np.where(known, proved, 0))
    tolerance = np.maximum(noise.ABSOLUTE, noise.RELATIVE * np.abs(np.where(known, proved, 0)))
    wrong = (error > tolerance).any(axis=1)
    refused, unproved = (np.isnan(a).any(axis=1) for a in (profile, proved))
    return np.where(wrong, 3, np.where(refused, 2, np.where(unproved, 1, 0)))


def rows_of(parts: Mapping[str, Mapping[str, np.ndarray]]) -> list[dict[str, Any]]:
    """One row per case, method and half of the scales, with counts of the verdicts."""
    rows = []
    for name, part in parts.items():
        for method in METHODS:
            own = "proved64" if method.endswith("64") and "proved64" in part else "proved"
            verdict = verdicts(part[method], part[own])
            for label, chosen in (
                ("up to 3", part["scale"] <= 3),
                ("above 3", part["scale"] > 3),
            ):
                counts = np.bincount(verdict[chosen], minlength=len(VERDICTS))
                row = {"case": name, "method": method, "scales": label}
                rows.append(row | dict(zip(VERDICTS, map(int, counts), strict=True)))
    return rows


def summary_of(parts: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, float]:
    """Totals of every method: draws, wrong ones, and the share refused at scales up to 3."""
    rows, out = rows_of(parts), {}
    for method in METHODS:
        own = [row for row in rows if row["method"] == method]
        for verdict in VERDICTS:
            out[f"{method}/{verdict}"] = sum(row[verdict] for row in own)
        low = [row for row in own if row["scales"] == "up to 3"]
        drawn = sum(row[verdict] for row in low for verdict in VERDICTS)
        out[f"{method}/refused_share_up_to_3"] = sum(row["refused"] for row in low) / max(drawn, 1)
    passed = np.concatenate([part["passed"] for part in parts.values()])
    return out | {
        f"certified/by_pass_{p}": int((passed == p).sum()) for p in range(len(pairs.PASSES))
    }
