"""Direct contributions, heads, gradients by length: logits, derivatives and closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from tests.oracles import draws
from tests.oracles.path_examples import config_of, example
from tests.support.closeness import assert_close
from tests.support.refusals import is_refused, parametrize_refusals

NETWORKS = {
    "sandwich of RMSNorms": {
        "norm_placement": "sandwich",
        "norm": "rms",
        "mlp": "swiglu",
        "final_norm": True,
        "attention_skip": True,
        "mlp_skip": True,
        "mask": "causal",
    },
    "parallel experts": {
        "norm_placement": "pre",
        "mlp": "swiglu",
        "parallel": True,
        "d_ff": 8,
        "num_experts": 2,
        "windows": (1, 0, 2),
        "first_norm": False,
        "attention_skip": True,
        "final_norm": True,
    },
    "decoder": {
        "norm_placement": "post",
        "mlp": "gelu",
        "cross_attention": True,
        "attention_skip": True,
        "mlp_skip": True,
        "skip_gain": 0.7,
        "branch_gain": np.array([1.0, 0.5, 2.0]),
    },
}


def square_middle_layer(value, layer):
    """Edits a value by a function that is neither linear nor the same in every layer."""
    return jnp.where(layer == 1, value * value - 0.3, value)


EDITED = ("v", "attention_branch", "after_attention", "cross_v", "cross_head_output")
EDITED += ("cross_branch", "mlp_input", "mlp_hidden", "mlp_branch", "residual")
EDIT = dict.fromkeys(EDITED, square_middle_layer)


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("sandwich of RMSNorms", None),
        ("decoder", EDIT),
        pytest.param("parallel experts", None, marks=pytest.mark.full),
    ],
)
def test_parts_and_lengths_sum_to_the_logits(x64, name, edit):
    config = config_of(**NETWORKS[name])
    params, x, extra = example(config)
    passes = rc.apply, rc.direct_contributions, rc.path_contributions
    trace, direct, lengths = (
        jax.device_get(compute(params, x, config, edit=edit, **extra)) for compute in passes
    )
    output = trace.output
    assert_close(direct.total, output, atol=1e-10)
    w, b = draws.tokens(config.d_model, 3, 5), np.array([0.5, -1.0, 2.0])
    logits = output @ w + b[None]
    for parts in (direct, lengths):
        assert_close(rc.logit_attribution(parts, (w, b)).total, logits, atol=1e-10)
        pair = rc.paths.Classifier(w[:, [2]] - w[:, [0]], b[2:] - b[0])
        attribution = rc.logit_attribution(parts, pair)
        assert_close(attribution.total[:, 0], logits[:, 2] - logits[:, 0], atol=1e-10)
    assert_close(
        rc.logit_attribution(lengths, (w, b)).output, logits, atol=1e-10
    )  # the shares of the lengths sum to it
    without_bias = rc.logit_attribution(lengths, w)
    assert_close(without_bias.output, output @ w, atol=1e-10)
    assert_close(without_bias.by_length, lengths.by_length @ w, atol=1e-10)
    assert (without_bias.from_memory is None) == (not extra)
    assert_close(rc.logit_attribution(lengths, [w, b]).output, logits, atol=1e-10)
    attribution = rc.logit_attribution(direct.heads, w[:, [1]])
    assert_close(attribution[..., 0], direct.heads @ w[:, 1], atol=1e-12)


def test_without_norms_parts_are_what_the_trace_holds(x64):
    skips = {"attention_skip": True, "cross_skip": True, "mlp_skip": True}
    config = config_of(mlp="relu", cross_attention=True, **skips)
    params, x, extra = example(config)
    trace = jax.device_get(rc.apply(params, x, config, keep=("head_output",), **extra))
    direct = jax.device_get(rc.direct_contributions(params, x, config, **extra))
    assert_close(direct.heads, trace.kept["head_output"], atol=1e-12)
    assert_close(direct.mlps, trace.mlp_branch, atol=1e-12)
    assert_close(direct.cross, trace.layers.cross_branch, atol=1e-12)
    assert_close(direct.start, x)
    bias = params.layers.attention.b_o
    assert_close(direct.offset, np.tile(bias.sum(0), (len(x), 1)), atol=1e-12)
    assert_close(
        trace.attention_branch, trace.kept["head_output"].sum(axis=1) + bias[:, None], atol=1e-12
    )
    assert sorted(trace.kept) == ["head_output"]
    # of a stack of networks the total is one of each
    stack = jax.tree.map(lambda a: np.stack([a, 2 * a]), direct)
    totals = np.stack([direct.total, 2 * direct.total])
    assert_close(stack.total, totals, atol=1e-12)


SHORT = config_of(attention_skip=True, mlp="none")
CROSS = SHORT.replace(cross_attention=True)


@parametrize_refusals(
    [
        (
            lambda p, x: rc.logit_attribution(jnp.zeros((2, 3, 4)), jnp.zeros((5, 2))),
            r"shape \(5, 2\), but must be \[d, c\], .* d=4",
        ),
        (
            lambda p, x: rc.logit_attribution(jnp.zeros((2, 3, 4)), (jnp.zeros((4, 2)), x[0, :3])),
            r"w of shape \(4, 2\) and b of shape \(3,\)",
        ),
        (
            lambda p, x: rc.logit_attribution(jnp.zeros((2, 3, 4)), jnp.zeros(4)),
            r"shape \(4,\), but must be \[d, c\], .* d=4",
        ),
        (
            lambda p, x: rc.logit_attribution(jnp.zeros((2, 3, 4)), jnp.zeros((4, 2, 3))),
            r"shape \(4, 2, 3\), but must be \[d, c\], .* d=4",
        ),
        (
            lambda p, x: rc.logit_attribution(
                rc.direct_contributions(p, x, SHORT), jnp.zeros((5, 2))
            ),
            r"shape \(5, 2\), but must be \[d, c\], .* d=8$",
        ),
        (
            lambda p, x: rc.head_contributions(p, x, SHORT, chunk=0),
            "chunk=0 is not a whole number from 1 on",
        ),
        (
            lambda p, x: rc.head_contributions(p, x, SHORT, edit={"head_output": lambda v, l: v}),
            "head_contributions does not cover",
        ),
        (
            lambda p, x: rc.head_contributions(
                *example(CROSS)[:2],
                CROSS,
                edit={"cross_head_output": lambda v, l: v},
                **example(CROSS)[2],
            ),
            "head_contributions does not cover",
        ),
    ]
)
def test_what_does_not_fit_is_named(arguments, message):
    (call,) = arguments
    is_refused(message, lambda: call(*example(SHORT)[:2]))


def test_without_mlps_and_memory_their_parts_are_absent():
    params, x, _ = example(SHORT)
    direct = rc.direct_contributions(params, x, SHORT)
    assert direct.mlps is None and direct.cross is None
    assert_close(direct.total, rc.apply(params, x, SHORT).output, atol=1e-5)


def test_dropped_weights_are_those_of_the_heads():
    config = config_of()
    params, x, _ = example(config)
    trace = rc.apply(
        params, x, config, keep=("head_output",), dropout_key=jax.random.key(0), dropout_rate=0.5
    )
    branch = trace.kept["head_output"].sum(axis=1) + params.layers.attention.b_o[:, None]
    assert_close(trace.attention_branch, branch, atol=1e-5)
