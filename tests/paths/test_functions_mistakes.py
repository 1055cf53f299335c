"""Paths through other people's functions: every wrong use is refused with a line."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl

import rank_collapse as rc
from tests.oracles.function_paths import (
    W8,
    attn,
    ranks_of_others as ranks_of_others,
)
from tests.oracles.jax_layers import D, N, tokens
from tests.support.refusals import is_refused, parametrize_refusals


def wrong(fn, message, *, x=None, branches="attn", **options):
    x = tokens() if x is None else x
    return fn, x, branches, options, message


def linear_attention(x):
    with jax.named_scope("attn"):
        return (x @ x.T) @ x


def kernel(x):
    def double(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    return pl.pallas_call(double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def feature_attention(order):
    def fn(x):
        phi_q, phi_k = jax.nn.elu(x @ W8) + 1, jax.nn.elu(x) + 1
        with jax.named_scope("attn"):
            a = (phi_q @ phi_k.T) @ x if order == "weights first" else phi_q @ (phi_k.T @ x)
        return x + a

    return fn


def nested_kinds(x):
    with jax.named_scope("attn"), jax.named_scope("mlp"):
        a = x @ W8
    return x + a


def decode(x):
    """Attends token by token, with a cache of the keys and values of earlier tokens."""

    def step(cache, inputs):
        place, token = inputs
        with jax.named_scope("attn"):
            keys, values = (c.at[place].set(token @ W8) for c in cache)
            weights = jax.nn.softmax(jnp.where(jnp.arange(N) <= place, keys @ token, -jnp.inf))
            out = weights @ values
        return (keys, values), token + out

    return jax.lax.scan(step, (jnp.zeros((N, D)),) * 2, (jnp.arange(N), x))[1]


def in_parts(x):
    with jax.named_scope("attn"):
        q, v = x @ W8, x @ W8.T
    with jax.named_scope("attn"):
        a = q + jnp.flip(v)
    return x + a


def donated(x=None):
    x = tokens() + 0
    x.delete()
    return x


def near_names(x):
    with jax.named_scope("self_attention"):
        return x + x @ W8


class LinenDropout(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dropout(0.5, deterministic=False)(nn.Dense(D, name="attn")(x))


@nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
def run_stack(x, linear):
    return x + linear(x)


def make_stack():
    return nnx.vmap(lambda key: nnx.Linear(D, D, rngs=nnx.Rngs(key)))(jax.random.split(KEY, 2))


def nnx_dropout(x):
    return attn(NNX_DROPOUT(x))


KEY = jax.random.key(0)
NNX_DROPOUT = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
STACK = make_stack()
LINEN_PARAMS = {"params": {"attn": {"kernel": W8, "bias": jnp.zeros(D)}}}
BOTH = {"attention": "attn", "mlp": "mlp"}


frozen = jax.lax.stop_gradient
COMPLEX = np.ones((N, D)) * 1j


@jax.jit
def sort_tokens(x):
    return jnp.sort(x, 0)


def name_lengths(*names):
    return lambda x: x + sum(checkpoint_name(x @ W8, name) for name in names)


def fail_with(error):
    def fn(x):
        raise error

    return fn


def name_frozen(number):
    return lambda x: x + sum(checkpoint_name(frozen(x), f"a{i}") for i in range(number))


WRONG = [
    wrong(
        near_names,
        "'atention' matches no scope or name; the nearest are 'self_att",
        branches="atention",
    ),
    wrong(near_names, "'Q' matches no scope or name; fn has 'self_att", branches="Q"),
    wrong(
        lambda x: x + x @ W8,
        "matches no scope or name, because fn has none; put the branch into `with",
    ),
    wrong(
        lambda x: x + checkpoint_name(x @ W8, "attn_out"),
        "'attn_in' matches no scope or name; the nearest are 'attn_out'",
        branches="attn_in",
    ),
    wrong(
        lambda x: x + checkpoint_name(checkpoint_name(x @ W8, "attn_in"), "attn_out"),
        "'attn_oot' matches no scope or name; the nearest are 'attn_out', 'attn_in'$",
        branches="attn_oot",
    ),
    wrong(
        name_lengths(*(f"attn_{i}" for i in range(7))),
        r"'attn_x' matches no scope or name; the nearest are '\w+'(, '\w+'){4}$",
        branches="attn_x",
    ),
    wrong(
        name_lengths("SelfAttention", "b"),
        "'selfAtention' matches no scope or name; the nearest are 'SelfAttention'$",
        branches="selfAtention",
    ),
    wrong(name_lengths("self_attn"), "the nearest are 'self_attn'$", branches="SELF_ATTENTION"),
    wrong(name_lengths("attention"), "the nearest are 'attention'$", branches="att"),
    wrong(
        name_lengths(*(f"b{chr(i)}" for i in range(97, 110))),
        "'Q' matches no scope or name; fn has 'ba', 'bb'.*, 'bk', 'bl'$",
        branches="Q",
    ),
    wrong(
        fail_with(ValueError("one line\n  and another")),
        r"fn fails for x of float(32|64)\[5, 8\] with ValueError: one line and another; fn must",
    ),
    wrong(fail_with(RuntimeError("a" * 300)), "with RuntimeError: a{200}; fn must be a JAX"),
    wrong(lambda x: attn(sort_tokens(x)), r"sort of values .*\.py:\d+:\d+ \(sort_tokens\)"),
    wrong(
        lambda x: attn(jax.lax.igamma_grad_a(x, x + 1)),
        r"fn computes igamma_grad_a at .*\.py:\d+.*, which JAX cannot differentiate: Diff",
        freeze=False,
    ),
    wrong(name_frozen(5), "matches 'a0', 'a1', 'a2', 'a3', 'a4', but no path", branches="a[0-9]"),
    wrong(name_frozen(6), "matches 'a0', 'a1', 'a2', 'a3', 'a4', …, but no p", branches="a[0-9]"),
    wrong(attn, "branches='\\(' is not a regular expression: ", branches="("),
    wrong(attn, "branches='' is not a regular expression", branches=""),
    wrong(attn, "branches=3 is not a regular expression", branches=3),
    wrong(attn, "branches={} must have the key 'attention'", branches={}),
    wrong(attn, "branches={'mlp': 'm'} must have the key 'attention'", branches={"mlp": "m"}),
    wrong(
        attn, "'heads'.* must have the key 'attention'", branches={"attention": "a", "heads": "h"}
    ),
    wrong(attn, "'m' matches no scope", branches={"attention": "attn", "mlp": "m"}),
    wrong(nested_kinds, "scope 'attn/mlp' matches the patterns of both", branches=BOTH),
    wrong(
        lambda x: x + checkpoint_name(x @ W8, "b"),
        "name 'b' matches the patterns of both",
        branches={"attention": "b", "mlp": ".*"},
    ),
    wrong(in_parts, "fn enters the scope 'attn' twice and passes several values"),
    wrong(decode, "a loop in fn passes several values from the scope 'attn' in one step to"),
    wrong(
        lambda x: x + checkpoint_name(jax.nn.softmax(x @ x.T), "attn") @ x,
        "matches 'attn', but no path passes through it; .* output of the attention branch",
    ),
    wrong(
        linear_attention,
        r"fn computes a product of two values .* at .*test_functions_mistakes.py:\d+.*in the scope "
        "'attn', so its output is not a sum of paths; freeze an argument of this operation with "
        "jax.lax.stop_gradient",
    ),
    wrong(feature_attention("weights first"), "a product of two values .* in the scope 'attn'"),
    wrong(feature_attention("states first"), "a product of two values .* in the scope 'attn'"),
    wrong(
        lambda x: attn(x) * (x @ W8),
        r"a product of two values .* at .*\.py:\d+:\d+ \(<lambda>\), so",
    ),
    wrong(lambda x: attn(jax.nn.relu(x) * jax.nn.relu(x @ W8)), "a product of two values"),
    wrong(
        lambda x: attn(x) + x.max(0),
        "reduce_max of values .*; freeze an argument of this operation with jax.lax.stop_gradient",
    ),
    wrong(lambda x: attn(jnp.sort(x, 0)), "sort of values that depend on x"),
    wrong(lambda x: attn(jax.lax.top_k(x, D)[0]), "top_k of values that depend on x"),
    wrong(lambda x: attn(jnp.cumprod(x, 0)), "cumprod of values that depend on x"),
    wrong(lambda x: attn(jnp.exp(x)), "exp of a value that depends on x"),
    wrong(lambda x: attn(kernel(x)), 'pallas_call of .* implementation="xla"'),
    wrong(
        lambda x: attn(jax.lax.while_loop(lambda x: x.sum() > 9, lambda x: x / 2, x)),
        "while of .* use jax.lax.scan",
    ),
    wrong(
        lambda x: attn(jnp.linalg.qr(x.T @ x)[0][:N]),
        "fn computes qr of a value .* no rule for paths through qr",
    ),
    wrong(lambda x: attn(jnp.linalg.inv(x @ x.T) @ x), "there is no rule for paths through"),
    wrong(
        lambda x: attn(jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)),
        "there is no rule for paths through pure_callback; freeze its arguments",
    ),
    wrong(
        attn,
        "x is int32, but must be real floats; for token ids, pass their embeddings",
        x=jnp.arange(5),
    ),
    wrong(attn, "x is bool, but must be real floats", x=jnp.ones(3, bool)),
    wrong(attn, "x is complex(64|128), but must be real floats", x=COMPLEX),
    wrong(attn, "x is dict, not one array", x={"x": np.ones(3)}),
    wrong(attn, "x is list, not one array", x=[1.0, 2.0]),
    wrong(attn, "x is tuple, not one array", x=()),
    wrong(attn, "x was deleted, because it was donated", x=donated),
    wrong(
        lambda x: (attn(x), x),
        r"fn returns 2 arrays, but must return one; .* lambda x: fn\(x\)\[0\]",
    ),
    wrong(lambda x: None, "fn returns 0 arrays, but must return one$"),
    wrong(lambda x: attn(x).argmax(), "fn returns int32, but must return real floats"),
    wrong(lambda x: attn(x) * 1j, "fn returns complex(64|128), but must return real floats"),
    wrong("attn", "fn is str, not a function of x"),
    wrong(attn, "longest=-1", longest=-1),
    wrong(attn, "longest=1.5", longest=1.5),
    wrong(attn, "longest=True", longest=True),
    wrong(
        attn,
        "longest={'mlp': 1} has the key 'mlp', but branches has only 'attention'",
        longest={"mlp": 1},
    ),
    wrong(
        attn,
        r"direction is float(32|64)\[2\], but must be floats of the shape of x, \[5, 8\]",
        direction=np.ones(2),
    ),
    wrong(
        attn,
        r"direction is int(32|64)\[5, 8\], but must be floats of the shape of x, \[5, 8\]",
        direction=np.ones((N, D), int),
    ),
    wrong(attn, "direction is str, not one array", direction="x"),
    wrong(attn, "direction is dict, not one array", direction={"x": np.ones(2)}),
    wrong(attn, "direction is list, not one array", direction=[[1.0], [1.0, 2.0]]),
    wrong(attn, "x is str, not one array of floats", x="x"),
    wrong(
        attn,
        "x is ShapeDtypeStruct, not one array of floats",
        x=jax.ShapeDtypeStruct((N, D), jnp.float32),
    ),
    wrong(
        lambda x: attn(x) if x.sum() > 0 else x,
        r"fn fails for x of float(32|64)\[.* with TracerBoolConversionError: .*; fn reads",
    ),
    wrong(
        lambda x: attn(np.asarray(x)),
        "fn fails for x of .* with TracerArrayConversionError: .*jax.numpy",
    ),
    wrong(lambda x: attn(x) * float(x.sum()), "fn fails for x of .*; fn reads values"),
    wrong(
        lambda x: attn(x @ W8[:3]),
        "fn fails for x of .* with TypeError: dot_general .*JAX function of one array",
    ),
    wrong(lambda x: LinenDropout().apply(LINEN_PARAMS, x), "InvalidRngError.*deterministic=True"),
    wrong(lambda x: attn(eqx.nn.Dropout(0.5)(x)), "fn fails .*RuntimeError.*eqx.nn.inference_mode"),
    wrong(nnx_dropout, r"fn fails for x of .*RngCount.*model\.eval\(\)"),
    wrong(lambda x: run_stack(x, STACK), r"trace level.*; call nnx.clone\(model\) inside of fn"),
    wrong(
        lambda x, y: attn(x),
        "fn fails for x of .* with TypeError: .*missing 1 required .*'y'; fn must",
    ),
    wrong(
        lambda x: attn(jnp.tanh(x) * jnp.tanh(x @ W8)),
        r"a product of two values .* at .*\.py:\d+:\d+ \(<lambda>\), so",
    ),
    wrong(
        lambda x: attn(jax.nn.relu(x) * jnp.tanh(x @ W8)),
        r"a product of two values .* at .*\.py:\d+:\d+ \(<lambda>\), so",
    ),
    wrong(lambda x: rc.residual(x[0]) + attn(x), r"^x of shape \(8,\) is not \[\.\.\., n, d\]"),
    wrong(
        lambda x: (
            jax.lax.cond(x[0, 0] > 0, lambda x: 0 * x, lambda x: 0 * x + 1, frozen(x))
            + 0 * frozen(attn(x))
        ),
        "depends on it only through frozen values",
    ),
    wrong(attn, "freeze='no' is not True or False", freeze="no"),
    wrong(
        lambda x: attn(jax.lax.stop_gradient(x)),
        "no path leads from x to the output of fn, because",
    ),
    wrong(
        lambda x: attn(np.ones((N, D))),
        "because fn does not depend on x or depends on it only through frozen values",
    ),
]


def measure_wrong(fn, x, branches, options):
    x = x() if callable(x) else x
    return rc.function_contributions(fn, x, branches=branches, **options)


@parametrize_refusals(WRONG)
def test_a_wrong_use_is_refused(arguments, message):
    is_refused(message, measure_wrong, *arguments)
