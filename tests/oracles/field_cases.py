"""Configurations that set every field away from its default, with the fields that it needs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rank_collapse as rc
from rank_collapse.network.residual import Gains
from tests.oracles.path_examples import D, config_of, example


def mix_by_tanh(q, k, v, context):
    """A user's attention, far from a softmax; its output is gate · (M v), not (gate · M) v."""
    m = jnp.tanh(jnp.einsum("hnk,hmk->hnm", q, k)) / 3 + jnp.eye(q.shape[1])[None]
    m = m if context.mask is None else m * context.mask.reshape(-1, *m.shape[1:])
    gate = jax.nn.sigmoid(q.sum(axis=-1, keepdims=True))
    return gate * m, gate * jnp.einsum("hnm,hmv->hnv", m, v)


def normalise_by_sigmoid(scores, context):
    """A user's weights: their rows sum to less than one, and differ from head to head."""
    share = context.broadcast_to_heads(jnp.array([[0.5, 0.8], [0.6, 0.9]]), len(scores))
    return share * jax.nn.sigmoid(scores)


def bump(z):
    return z * jnp.exp(-jnp.square(z))


def l1_norm(x):
    return 1 / (0.1 + jnp.mean(jnp.abs(x), axis=-1, keepdims=True))


SKIPS = {"attention_skip": True, "mlp_skip": True, "mlp": "gelu"}
POST = SKIPS | {"norm_placement": "post"}
PRE = SKIPS | {"norm_placement": "pre", "final_norm": True, "norm_eps": 1e-5}
EXPERTS = POST | {"mlp": "swiglu", "d_ff": 9, "num_experts": 3, "experts_per_token": 2}
CASES: dict[str, dict[str, Any]] = {
    "attention alone": {},
    "attention_skip": {"attention_skip": True},
    "mlp": {"mlp": "tanh"},
    "mlp_skip, norm_placement post": POST,
    "norm_placement pre, final_norm, norm": SKIPS
    | {"norm_placement": "pre", "final_norm": True, "norm": "rms"},
    "norm_placement sandwich, first_norm": SKIPS
    | {"norm_placement": "sandwich", "first_norm": False},
    "norm_placement branch": SKIPS | {"norm_placement": "branch"},
    "parallel": SKIPS | {"norm_placement": "pre", "parallel": True},
    "skip_gain, branch_gain, norm_gain": POST
    | {"skip_gain": 1.3, "branch_gain": 0.6, "norm_gain": 0.8},
    "learned_skip_gain, learned_branch_gain, learned_per_feature": POST
    | {"learned_skip_gain": 1.2, "learned_branch_gain": 0.7, "learned_per_feature": True},
    "mask causal": {"mask": "causal"},
    "mask local, window": {"mask": "local", "window": 1, "attention_skip": True},
    "windows": POST | {"windows": (1, 0)},
    "windows, local_theta": POST | {"windows": (1, 0), "position": "rotary", "local_theta": 20.0},
    "position rotary": POST
    | {"position": "rotary", "rotary_theta": 50.0, "rotary_width": 2, "rotary_factor": 1.5}
    | {"rotary_scaling": (2.0,)},
    "rotary_layers": {"position": "rotary", "rotary_layers": (False, True)},
    "rotary_tables": {"position": "rotary", "rotary_tables": ((9, (0.5, 0.1)),)},
    "position relative_bias": {"position": "relative_bias", "num_buckets": 4, "max_distance": 3},
    "position relative_key": {"position": "relative_key", "clamp_distance": 2},
    "score": {"score": "additive"},
    "score, qk_norm": {"score": "additive", "qk_norm": "head"},
    "scale_scores, temperature": {"scale_scores": False, "temperature": 2.0},
    "qk_norm head": POST | {"qk_norm": "head"},
    "qk_norm width": POST | {"qk_norm": "width"},
    "score_cap": {"score_cap": 0.5},
    "mixing": POST | {"mixing": rc.network.Mixing(0.4, 0.7, -0.2)},
    "mix": POST | {"mix": mix_by_tanh},
    "normalise": POST | {"normalise": normalise_by_sigmoid},
    "norm_placement both": SKIPS | {"norm_placement": "both"},
    "mlp of one's own": POST | {"mlp": bump, "norm": l1_norm},
    "num_kv_heads": POST | {"num_kv_heads": 1},
    "num_experts, experts_per_token": EXPERTS,
    "router, d_shared": EXPERTS | {"router": "all", "d_shared": 3, "d_ff": 12},
    "cross_attention": POST | {"cross_attention": True},
    "cross_skip": POST | {"cross_attention": True, "cross_skip": False},
}

BY_FEATURE = np.linspace(-0.3, 0.4, D)  # what gains of features differ by
GAINS = Gains(
    attention=np.array([1.3, 0.8]),
    cross=np.array([0.9, 1.2]),
    mlp=np.array([[0.6], [1.1]]) + BY_FEATURE,
)
OTHER_GAINS = Gains(
    attention=np.array([[0.8], [1.4]]) - BY_FEATURE,
    cross=np.array([[1.2]]) - BY_FEATURE,
    mlp=np.array([1.1, 0.7]),
)
ALL_GAINS = {"skip_gain": OTHER_GAINS, "branch_gain": GAINS, "norm_gain": OTHER_GAINS}
ROTARY = {"position": "rotary", "rotary_theta": 50.0, "rotary_width": 2, "rotary_factor": 1.5}
BIAS = {"position": "relative_bias", "num_buckets": 4, "max_distance": 3}
TABLES = {"position": "rotary", "rotary_tables": ((9, (0.5, 0.1)),)}
BY_LAYER_AND_HEAD = np.array([[0.4, 0.1], [0.2, 0.3]])
# Networks of many fields at once, each in parts: a pass is tested with the parts that it covers.
NETWORKS: dict[str, tuple[dict[str, Any], ...]] = {
    "decoder": (
        SKIPS | {"norm_placement": "pre", "final_norm": True, "norm": "rms", "norm_eps": 0.3},
        {"mask": "causal"},
        {"num_kv_heads": 1},
        {"layer_map": (1, 0)},
        ROTARY | {"rotary_scaling": (2.0,)},
        {"qk_norm": "head"},
        {"mlp": "swiglu"},
        EXPERTS | {"router": "all", "d_shared": 3, "d_ff": 12, "norm_placement": "pre"},
        {"windows": (1, 0), "local_theta": 20.0},
        {"score_cap": 0.5},
        {"skip_gain": GAINS, "branch_gain": OTHER_GAINS},
        {"temperature": np.array([0.7, 1.6])},
    ),
    "encoder": (
        POST | {"norm_eps": 0.3},
        {"mask": "local", "window": 1},
        ALL_GAINS,
        {"position": "relative_key", "clamp_distance": 2},
        {"mixing": rc.network.Mixing(0.4, BY_LAYER_AND_HEAD, np.array([-0.2, 0.3]))},
        {"qk_norm": "width"},
        {"mlp": "geglu"},
        {"learned_skip_gain": 1.2, "learned_branch_gain": 0.7},
        {"scale_scores": False, "temperature": 2.0},
    ),
    "sandwich": (
        SKIPS | {"norm_placement": "sandwich", "first_norm": False, "final_norm": True},
        BIAS,
        {"mask": "causal"},
        {"normalise": normalise_by_sigmoid},
        {"mlp": "quick_gelu"},
        {"norm_gain": OTHER_GAINS},
        {"parallel": True},
        {"learned_skip_gain": 1.2, "learned_branch_gain": 0.7, "learned_per_feature": True},
        {"mixing": rc.network.Mixing(BY_LAYER_AND_HEAD, 0.7, -0.2)},
        TABLES | {"rotary_layers": (False, True)},
    ),
    "both norms": (
        SKIPS | {"norm_placement": "both", "norm": "rms"},
        ALL_GAINS,
        {"score": "additive", "qk_norm": "head"},
        {"mix": mix_by_tanh},
        {"mlp": bump},
        {"num_kv_heads": 1},
    ),
    "norms of branches": (
        SKIPS | {"norm_placement": "branch", "final_norm": True, "mlp": "silu"},
        {"norm": l1_norm},
        TABLES,
        {"rotary_layers": (False, True)},
        {"windows": (0, 1)},
        {"score_cap": 0.5},
        {"branch_gain": GAINS},
        EXPERTS | {"norm_placement": "branch", "experts_per_token": 1},
    ),
    "skips of MLPs alone": (
        {"mlp": "tanh", "mlp_skip": True, "norm_placement": "post", "norm": "rms"},
        ALL_GAINS,
        {"temperature": np.array([0.7, 1.6])},
        {"num_kv_heads": 1, "d_v": 3},
    ),
    "cross-attention": (
        POST,
        {"cross_attention": True},
        {"mask": "causal"},
        ALL_GAINS,
        {"num_kv_heads": 1},
        {"temperature": np.array([0.7, 1.6])},
        {"qk_norm": "head"},
        {"windows": (1, 0)},
        {"score_cap": 0.5},
        BIAS,
        {"cross_skip": False},
        {"mix": mix_by_tanh},  # of the attention to the tokens, not of that to the memory
    ),
}


def covered_parts(name, covers):
    """Lists which parts of one of `NETWORKS` a pass covers together, the first ones first."""
    fields, parts = {}, []
    for i, part in enumerate(NETWORKS[name]):
        if covers.refusal(config_of(depth=2, **(fields | part))) is None:
            fields |= part
            parts.append(i)
    return tuple(parts)


LEARNED = "learned_skip_gain, learned_branch_gain, learned_per_feature"
TOGETHER = {"learned gains, windows": CASES[LEARNED] | CASES["windows, local_theta"]}


@functools.cache
def network(case, parts=()):
    """Draws (parameters, tokens, config, other inputs) in float64.

    Of one of `NETWORKS`, `parts` lists which parts it has.
    """
    fields = (CASES | TOGETHER).get(case, {})
    for part in parts:
        fields = fields | NETWORKS[case][part]
    with jax.enable_x64(True):
        config = config_of(depth=2, **fields)
        params, x, extra = example(config)
        return params, x, config, extra
