"""Truncated networks: against the whole network, slow walks and every path."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.network.inputs import prepare_inputs
from rank_collapse.network.passes import run_pass
from rank_collapse.paths.contributions import path_contributions
from rank_collapse.paths.truncation import TruncatedPass
from tests.oracles import draws
from tests.oracles.path_examples import DEPTH, HEADS, N, config_of, example, relative
from tests.oracles.path_sums import Oracle
from tests.support.closeness import assert_close
from tests.support.refusals import each_is_refused

SMALL = config_of(
    depth=2, mlp="gelu", attention_skip=True, mlp_skip=True, norm_placement="post", skip_gain=0.8
)


def small_example():
    return example(SMALL)[:2]


CASES = {
    "post": {"norm_placement": "post", "mlp": "gelu", "attention_skip": True, "mlp_skip": True},
    "pre": {"norm_placement": "pre", "norm": "rms", "mlp": "swiglu", "final_norm": True}
    | {"attention_skip": True, "mlp_skip": True, "mask": "causal", "layer_map": (0, 1, 0)},
    "parallel experts": {"norm_placement": "pre", "mlp": "gelu", "parallel": True, "d_ff": 8}
    | {"num_experts": 4, "experts_per_token": 2, "windows": (1, 0, 2), "score_cap": 0.5}
    | {"attention_skip": True, "first_norm": False},
    "plain": {"attention_skip": True, "skip_gain": 0.7, "temperature": 0.8},
}


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_all_lengths_are_the_whole_network(case, x64):
    config = config_of(**CASES[case])
    params, x, _ = example(config)
    inputs = {"mask": jnp.arange(N) < N - 1, "bias": draws.normal(HEADS, N, N, seed=3)}
    truncations = rc.truncated(params, x, config, jnp.arange(DEPTH + 1), **inputs)
    contributions = rc.path_contributions(params, x, config, **inputs)
    assert relative(truncations.output[-1], contributions.output) < 1e-12
    assert relative(truncations.by_length[-1], contributions.by_length) < 1e-12
    assert truncations.output.shape == (DEPTH + 1, *x.shape)
    for k in range(DEPTH):  # nothing is longer, and what was cut off changes the rest
        assert not truncations.by_length[k, k + 1 :].any() and truncations.by_length[k, k].any()
        # Without norms and MLPs, length 0 needs no attention, and at the longest length but one
        # the last attention reads a complete state. In parallel layers the last MLP does too.
        frozen = {"plain": (0, DEPTH - 1), "parallel experts": (DEPTH - 1,)}.get(case, ())
        assert (relative(truncations.output[k], contributions.up_to()[k]) < 1e-12) == (k in frozen)
    single = rc.truncated(params, x, config, 1, **inputs)
    assert relative(single.output, truncations.output[1]) < 1e-12
    params, prepared = prepare_inputs(params, x, config, **inputs)
    assert relative(run_pass(TruncatedPass(1), params, prepared, config), single.output) < 1e-12


def compute_by_hand(params, x, config, longest):
    """Walks post-norm layers with skips, ReLU MLPs and biases in numpy, for {length: part}."""

    def norm(gain, bias, parts):
        total = sum(parts.values())
        sigma = total.std(axis=-1, keepdims=True)
        out = {k: (c - c.mean(axis=-1, keepdims=True)) / sigma * gain for k, c in parts.items()}
        return out | {"offset": out["offset"] + bias}

    def add_parts(a, b):
        return {k: a.get(k, 0) + b.get(k, 0) for k in a | b}

    parts = {0: np.asarray(x), "offset": np.zeros_like(x)}
    for l in range(config.depth):
        p = jax.tree.map(np.asarray, rc.network.layer_params(params, config, l))
        a, total = p.attention, sum(parts.values())
        branch = {"offset": np.tile(a.b_o, (len(x), 1))}
        for h in range(config.num_heads):
            q, k = total @ a.w_q[h] + a.b_q[h], total @ a.w_k[h] + a.b_k[h]
            scores = np.exp(q @ k.T / np.sqrt(q.shape[1]))
            weights = scores / scores.sum(axis=1, keepdims=True)
            for length, c in parts.items():
                if length == "offset":
                    part = {"offset": weights @ (c @ a.w_v[h] + a.b_v[h]) @ a.w_o[h]}
                elif length < longest:
                    part = {length + 1: weights @ c @ a.w_v[h] @ a.w_o[h]}
                else:
                    continue
                branch = add_parts(branch, part)
        parts = norm(p.attention_norm.gain, p.attention_norm.bias, add_parts(parts, branch))
        m, total = p.mlp, sum(parts.values())
        gate = (total @ m.w_in + m.b_in > 0).astype(float)
        hidden = {
            k: gate * (c @ m.w_in + (m.b_in if k == "offset" else 0)) for k, c in parts.items()
        }
        out = {k: z @ m.w_out + (m.b_out if k == "offset" else 0) for k, z in hidden.items()}
        parts = norm(p.mlp_norm.gain, p.mlp_norm.bias, add_parts(parts, out))
    return parts


def normalise_squares(scores, context):
    squares = jnp.where(jnp.broadcast_to(context.mask, scores.shape), jnp.square(scores), 0)
    return squares / squares.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("normalise", [None, normalise_squares])
def test_the_longest_truncation_has_the_weights_of_the_whole_network(normalise, x64):
    """C of `Mixing` is uniform over what the mask allows; scores have all their options."""
    mixing = rc.network.Mixing(0.4, 0.7, -0.2)
    options = {"temperature": 0.8, "score_cap": 0.5, "normalise": normalise}
    config = config_of(mixing=mixing, mask="causal", attention_skip=True, **options)
    params, x, _ = example(config)
    inputs = {"mask": jnp.arange(N) < N - 1, "bias": draws.normal(HEADS, N, N, seed=3)}
    truncation = rc.truncated(params, x, config, DEPTH, **inputs)
    assert relative(truncation.output, rc.apply(params, x, config, **inputs).output) < 1e-12


@pytest.mark.parametrize("longest", [0, 1, 2])
def test_every_length_against_a_slow_walk(longest, x64):
    skips = {"attention_skip": True, "mlp_skip": True}
    config = config_of(norm_placement="post", mlp="relu", norm_eps=0.0, **skips)
    params, x, _ = example(config)
    truncation, expected = (
        rc.truncated(params, x, config, longest),
        compute_by_hand(params, x, config, longest),
    )
    for k in range(longest + 1):
        assert relative(truncation.by_length[k], expected[k]) < 1e-10
    assert relative(truncation.offset, expected["offset"]) < 1e-10
    assert relative(truncation.output, sum(expected.values())) < 1e-10


@pytest.mark.full
def test_paths_from_the_memory_pass_the_final_norm_by_themselves(x64):
    config = config_of(
        depth=2,
        norm_placement="pre",
        cross_attention=True,
        attention_skip=True,
        final_norm=True,
        mlp="relu",
        mlp_skip=True,
    )
    params, x, extra = example(config)
    trace = rc.apply(params, x, config, **extra)
    sums, from_memory, offset = Oracle(params, trace, config, extra["memory"]).sums()
    ours = path_contributions(params, x, config, count_mlps=True, **extra)
    for computed, expected in (
        (ours.by_length, sums),
        (ours.from_memory, from_memory),
        (ours.offset, offset),
        (ours.total, trace.output),
    ):
        assert_close(computed, expected, atol=1e-10)


def test_the_shape_of_the_result_is_not_traced():
    params, x = small_example()
    plain = inspect.unwrap(path_contributions)  # the tests' check of types refuses it before
    compute = jax.jit(lambda count: plain(params, x, SMALL, count_mlps=count))
    each_is_refused((lambda: compute(True), "count_mlps"))


def test_what_truncation_refuses():
    config = config_of()
    params, x, _ = example(config)
    each_is_refused(
        (
            lambda: rc.truncated(params, x, config, [1, 4]),
            "length=4 is not a whole number from 0 to 3",
        ),
        (lambda: rc.truncated(params, x, config, 1.0), "length=1.0 is not a whole number"),
        (
            lambda: rc.truncated(params, x, config, [[1]]),
            r"length=\[1\] is not a whole number from 0 to 3",
        ),
        *[
            (
                lambda traced=traced: jax.jit(lambda k: rc.truncated(params, x, config, k))(traced),
                rf"length is {traced.dtype} of shape \({shape}\), but must be an integer",
            )
            for traced, shape in ((np.ones((1, 1), np.int32), "1, 1"), (np.float32(1), ""))
        ],
    )
