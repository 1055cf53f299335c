"""Networks for the passes that follow small residuals: each field that they cover, by itself."""

import jax.numpy as jnp
import numpy as np

import rank_collapse as rc
from rank_collapse.network import layers
from tests.oracles import draws

N, D, H, L = 4, 6, 2, 3
SKIPS = {"attention_skip": True, "mlp_skip": True}
MLP = {"mlp": "gelu", "d_ff": 5}
KEEP = np.array([0, 1, 1, 1, 0], bool)
BLIND = np.ones((N, N), bool)
BLIND[2] = False
ANY_MASK = np.tril(np.ones((N, N), bool)) | np.eye(N, k=2, dtype=bool)
BIAS = np.random.default_rng(3).standard_normal((H, N, N)).astype(np.float32)
SEGMENTS = np.array([0, 0, 1, 0])
EACH = {
    "attention": np.float32([2, 1, 0.5]),
    "mlp": np.linspace(0.25, 2, 6, dtype=np.float32)[None],
}

# (fields, inputs): every covered field has another value than its default in one of them
CASES = {
    "attention alone": ({}, {}),
    "one layer of other widths": ({"depth": 1, "d_qk": 3, "d_v": 5, "scale_scores": False}, {}),
    **{f"{kind} MLP": ({"mlp": kind, "d_ff": 5}, {}) for kind in layers.MLP_KINDS[1:]},
    "pre-LN, skips": ({"norm_placement": "pre", "final_norm": True} | SKIPS | MLP, {}),
    "post-RMS, skips": (
        {"norm_placement": "post", "norm": "rms", "norm_eps": 0.01} | SKIPS | MLP,
        {},
    ),
    "sandwich, bare first layer": (
        {"norm_placement": "sandwich", "first_norm": False, "norm_gain": 0.5} | SKIPS | MLP,
        {},
    ),
    "norms of branches": (
        {"norm_placement": "branch", "norm": "rms"} | SKIPS | MLP | {"mlp": "relu"},
        {},
    ),
    "parallel": ({"norm_placement": "pre", "parallel": True, "attention_skip": True} | MLP, {}),
    "gains": (
        {
            "skip_gain": rc.Gains(**EACH),
            "branch_gain": 0.5,
            "temperature": np.float32([3, 1, 0.5]),
            "init_gain": 2.0,
        }
        | SKIPS
        | MLP,
        {},
    ),
    "learned gains": (
        {"learned_skip_gain": 1.0, "learned_branch_gain": 1.0, "learned_per_feature": True}
        | SKIPS
        | MLP,
        {},
    ),
    "skip gain 0, shared layers": (
        {"attention_skip": True, "skip_gain": 0.0, "layer_map": (0, 1, 0)},
        {},
    ),
    "branch gain 0": ({"attention_skip": True, "branch_gain": 0.0}, {}),
    "causal": ({"mask": "causal"}, {}),
    "local": ({"mask": "local", "window": 1}, {}),
    "a mask of tokens": (MLP, {"mask": KEEP}),
    "a mask of tokens, causal, rotary": (
        {"mask": "causal", "position": "rotary", "d_qk": 4},
        {"mask": KEEP},
    ),
    "any mask": ({}, {"mask": ANY_MASK}),
    "a mask for each head": ({}, {"mask": np.stack([ANY_MASK, np.ones((N, N), bool)])}),
    "a token that sees nothing": ({}, {"mask": BLIND}),
    "windows, part rotated": (
        {"position": "rotary", "d_qk": 4, "windows": (1, 0, 2), "rotary_width": 2}
        | {"local_theta": 3.0, "rotary_theta": 50.0, "rotary_factor": 1.5}
        | {"rotary_scaling": (2.0,)},
        {"positions": np.array([3, 1, 0, 7])},
    ),
    "rotary tables": ({"position": "rotary", "d_qk": 4, "rotary_tables": ((9, (0.5, 0.1)),)}, {}),
    "relative bias": ({"position": "relative_bias", "num_buckets": 4, "max_distance": 3}, {}),
    "relative key": ({"position": "relative_key", "clamp_distance": 2}, {"segments": SEGMENTS}),
    "score bias": ({}, {"bias": BIAS}),
    "normalised queries": ({"qk_norm": "head"}, {}),
    "normalised together, rotary": ({"qk_norm": "width", "position": "rotary", "d_qk": 4}, {}),
    "additive": ({"score": "additive"}, {}),
    "additive, rotary, normalised, capped": (
        {"score": "additive", "position": "rotary", "qk_norm": "head", "d_qk": 2}
        | {"score_cap": 0.5},
        {},
    ),
    "capped": ({"score_cap": 0.5}, {"bias": BIAS}),
    "relative key, capped, causal": (
        {"position": "relative_key", "score_cap": 2.0, "mask": "causal"},
        {},
    ),
    "embedding": ({"embedding": rc.EmbeddingConfig(vocab_size=7, d_embed=D)}, {}),
}


def config_of(case):
    return rc.TransformerConfig(**({"depth": L, "num_heads": H, "d_model": D} | CASES[case][0]))


def network(case, scale=1.0):
    config, inputs = config_of(case), CASES[case][1]
    params = draws.parameters(config, len(case), scale)
    x = draws.tokens(5 if inputs.get("mask") is KEEP else N, D)
    if config.embedding is not None:
        x = jnp.array([2, 0, 6, 2])
    return params, x, config, inputs
