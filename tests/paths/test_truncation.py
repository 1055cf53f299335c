"""Truncated networks: K = L is the whole one, K = 0 has no attention, between them a slow walk."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import slow_if
from path_examples import DEPTH, N, config_of, example, relative
from refusals import each_is_refused

import rank_collapse as rc

CASES = {
    "post": {"norm_placement": "post", "mlp": "gelu", "attention_skip": True, "mlp_skip": True},
    "pre": {"norm_placement": "pre", "norm": "rms", "mlp": "swiglu", "final_norm": True}
    | {"attention_skip": True, "mlp_skip": True, "mask": "causal", "layer_map": (0, 1, 0)},
    "parallel experts": {"norm_placement": "pre", "mlp": "gelu", "parallel": True, "d_ff": 8}
    | {"num_experts": 4, "experts_per_token": 2, "windows": (1, 0, 2), "score_cap": 0.5}
    | {"attention_skip": True, "first_norm": False},
    "plain": {"attention_skip": True, "skip_gain": 0.7, "temperature": 0.8},
}


@pytest.mark.parametrize("case", slow_if(CASES, "parallel experts"))
def test_all_lengths_are_the_whole_network(case, x64):
    config = config_of(**CASES[case])
    params, x, _ = example(config)
    mask = jnp.arange(N) < N - 1
    every = rc.truncated(params, x, config, jnp.arange(DEPTH + 1), mask=mask)
    whole = rc.path_contributions(params, x, config, mask=mask)
    assert relative(every.output[-1], whole.output) < 1e-12
    assert relative(every.by_length[-1], whole.by_length) < 1e-12
    assert every.output.shape == (DEPTH + 1, *x.shape)
    for k in range(DEPTH):  # nothing is longer, and what was cut off changes the rest
        assert not every.by_length[k, k + 1 :].any() and every.by_length[k, k].any()
        # Without norms and MLPs length 0 asks for no attention, and the last layer's attention
        # comes from all the paths there are so far.
        # So it does where the last MLP reads what the last attention reads.
        frozen = {"plain": (0, DEPTH - 1), "parallel experts": (DEPTH - 1,)}.get(case, ())
        assert (relative(every.output[k], whole.up_to()[k]) < 1e-12) == (k in frozen)
    one = rc.truncated(params, x, config, 1, mask=mask)
    assert relative(one.output, every.output[1]) < 1e-12


def by_hand(params, x, config, longest):
    """Post-norm layers with skips, relu MLPs and biases: tokens as {length: part}, in numpy."""

    def norm(gain, bias, parts):
        total = sum(parts.values())
        sigma = total.std(axis=-1, keepdims=True)
        out = {k: (c - c.mean(axis=-1, keepdims=True)) / sigma * gain for k, c in parts.items()}
        return out | {"offset": out["offset"] + bias}

    def added(a, b):
        return {k: a.get(k, 0) + b.get(k, 0) for k in a | b}

    parts = {0: np.asarray(x), "offset": np.zeros_like(x)}
    for l in range(config.depth):
        p = jax.tree.map(np.asarray, rc.layer_params(params, config, l))
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
                branch = added(branch, part)
        parts = norm(p.attention_norm.gain, p.attention_norm.bias, added(parts, branch))
        m, total = p.mlp, sum(parts.values())
        gate = (total @ m.w_in + m.b_in > 0).astype(float)
        hidden = {
            k: gate * (c @ m.w_in + (m.b_in if k == "offset" else 0)) for k, c in parts.items()
        }
        out = {k: z @ m.w_out + (m.b_out if k == "offset" else 0) for k, z in hidden.items()}
        parts = norm(p.mlp_norm.gain, p.mlp_norm.bias, added(parts, out))
    return parts


@pytest.mark.parametrize("longest", [0, 1, 2])
def test_every_length_against_a_slow_walk(longest, x64):
    skips = {"attention_skip": True, "mlp_skip": True}
    config = config_of(norm_placement="post", mlp="relu", norm_eps=0.0, **skips)
    params, x, _ = example(config)
    found, wanted = rc.truncated(params, x, config, longest), by_hand(params, x, config, longest)
    for k in range(longest + 1):
        assert relative(found.by_length[k], wanted[k]) < 1e-10
    assert relative(found.offset, wanted["offset"]) < 1e-10
    assert relative(found.output, sum(wanted.values())) < 1e-10


def test_no_path_longer_than_0_sees_no_other_token(x64):
    """Heads then pass on what they get of biases and of the offset, which is the same for all."""
    config = config_of(norm_placement="none", attention_skip=True)
    params, x, _ = example(config)

    def token(x):
        return rc.truncated(params, x, config, 0).output[0]

    sight = jax.jacobian(token)(x)  # [d, n, d]
    assert float(jnp.abs(sight[:, 1:]).max()) < 1e-12 and float(jnp.abs(sight[:, 0]).max()) > 0.1


def test_what_truncation_refuses():
    config = config_of()
    params, x, _ = example(config)
    each_is_refused(
        (lambda: rc.truncated(params, x, config, [1, 4]), r"length=4 is not in 0\.\.3"),
        (lambda: rc.truncated(params, x, config, 1.0), "float32"),
    )
