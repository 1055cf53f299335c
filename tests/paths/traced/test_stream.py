"""Branches by patterns that span scopes around and inside of nested programs."""

import jax
import jax.numpy as jnp
import pytest

import rank_collapse as rc
from rank_collapse.agree.recording import open_recording
from tests.oracles.function_paths import ranks_of_others as ranks_of_others
from tests.oracles.jax_layers import D, draw, tokens
from tests.support.closeness import assert_close
from tests.support.marks import full_but

WEIGHTS = draw(70, 3, D, D, scale=0.3)


def attend(x, w):
    with jax.named_scope("attention"), jax.named_scope("out"):
        return x @ w


def add_plain(x, w, call=attend):
    """A layer of a branch that the scopes layer/attention/out hold, and another sum outside."""
    with jax.named_scope("layer"):
        return x + call(x, w)


def by_jit(x, w):
    return add_plain(x, w, jax.jit(attend))


def by_jit_twice(x, w):
    """A program in a program: each has one of the scopes."""

    def inner(x, w):
        with jax.named_scope("attention"):
            return jax.jit(lambda x, w: jax.named_call(jnp.matmul, name="out")(x, w))(x, w)

    return add_plain(x, w, jax.jit(inner))


def by_remat(x, w):
    return add_plain(x, w, jax.checkpoint(attend))


def by_condition(x, w):
    return add_plain(x, w, lambda x, w: jax.lax.cond(w[0, 0] < 9, attend, jnp.matmul, x, w))


def by_scan(x, w):
    """A scan of one step inside of the scope, a jitted function inside of the scan."""

    def call(x, w):
        return jax.lax.scan(lambda c, w: (jax.jit(attend)(x, w), None), x, w[None])[0]

    return add_plain(x, w, call)


def by_jitted_layer(x, w):
    return jax.jit(by_jit)(x, w)


LAYERS = (add_plain, by_jit, by_jit_twice, by_remat, by_condition, by_scan, by_jitted_layer)


def apply_in_turn(layer):
    def fn(x):
        for w in WEIGHTS:
            with jax.named_scope("stack"):
                x = layer(x, w)
        return x

    return fn


def apply_in_scan(layer):
    def fn(x):
        with jax.named_scope("stack"):
            return jax.lax.scan(lambda x, w: (layer(x, w), None), x, WEIGHTS)[0]

    return fn


CASES = {f"turn, {layer.__name__}": apply_in_turn(layer) for layer in LAYERS}
CASES |= {f"scan, {layer.__name__}": apply_in_scan(layer) for layer in LAYERS[:-1]}
PATTERNS = ("stack/layer/attention", "layer/attention/out", "attention/out", "layer/.*/out")


@pytest.mark.parametrize("name", full_but(CASES, "turn, by_jit_twice", "scan, by_scan"))
@pytest.mark.parametrize("pattern", full_but(PATTERNS, PATTERNS[0]))
def test_a_recording_has_the_branches_of_nested_programs(x64, tmp_path, name, pattern):
    """Against the states of layers without nested programs."""
    path, state = tmp_path / "a.safetensors", tokens()
    rc.record_function(CASES[name], state[None], path, branches=pattern)
    layers = list(open_recording(path).read_layers())
    assert len(layers) == len(WEIGHTS)
    for recorded, w in zip(layers, WEIGHTS, strict=True):
        branch = recorded.branches["attention_branch"]
        for array, wanted in (
            (recorded.before, state),
            (branch, state @ w),
            (recorded.after, state + state @ w),
        ):
            assert_close(array.reshape(wanted.shape), wanted, rtol=1e-5, atol=1e-6)
        state = state + state @ w


@pytest.mark.full
@pytest.mark.parametrize("fn", CASES.values(), ids=CASES)
def test_paths_pass_through_the_branches_of_nested_programs(x64, fn):
    """Every pattern finds the branches of layers without nested programs."""
    sums = [tokens()]
    for w in WEIGHTS:
        taken = [s @ w for s in sums]
        sums = [a + b for a, b in zip([*sums, 0], [0, *taken], strict=True)]
    for pattern in PATTERNS:
        result = rc.function_contributions(fn, tokens(), branches=pattern)
        assert_close(result.by_length, sums, atol=1e-12, err_msg=pattern)
