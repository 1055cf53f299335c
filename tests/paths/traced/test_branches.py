"""Branches of a function: which names and scopes are one, and what passes from one to the next."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

import rank_collapse as rc
from tests.oracles.function_paths import (
    W8,
    attn,
    contributions,
    ranks_of_others as ranks_of_others,
)
from tests.oracles.jax_layers import D, tokens
from tests.support.closeness import assert_close


def test_branches_inside_of_branches_and_names_of_scopes_count_once(x64):
    x = tokens()

    def fn(x):
        with jax.named_scope("attn_block"), jax.named_scope("attn"):
            a = checkpoint_name(x @ W8, "attn_out")
        return x + checkpoint_name(a, "attn_after")

    result = contributions(fn, x, "attn.*")
    assert_close(result.by_length, [x, x @ W8], atol=1e-12)


def test_a_name_that_only_begins_as_the_pattern_is_no_branch(x64):
    x = tokens()

    def fn(x):
        x = x + checkpoint_name(x @ W8, "attn")
        return x + checkpoint_name(x @ W8, "attn_2")

    result = contributions(fn, x, "attn")
    skip = jnp.eye(D) + W8
    assert_close(result.by_length, [x @ skip, x @ W8 @ skip], atol=1e-12)


def test_a_name_of_what_a_branch_of_its_kind_reads_counts_nothing_more(x64):
    x = tokens()

    def fn(x):
        with jax.named_scope("attn"):
            a = checkpoint_name(x, "attn_input") @ W8
        return x + a

    result = contributions(fn, x, "attn.*")
    assert_close(result.by_length, [x, x @ W8], atol=1e-12)


def name_by_both(x):
    with jax.named_scope("attn"):
        a = x @ W8
    return x + checkpoint_name(a, "mlp")


def join_gates(x):
    with jax.named_scope("attn"):
        a = jnp.concatenate([jnp.tanh(x @ W8)[:2], jax.nn.silu(x)[2:]])
    return x + a


def enter_twice(x):
    with jax.named_scope("attn"):
        q, table = x @ W8, jnp.cos(jnp.arange(D) * 1.0)
    with jax.named_scope("attn"):
        a = q * table
    return x + a


def scale_by_loops_of_constants(x):
    table = jax.lax.scan(lambda c, _: (c + 1.0, c), 0.0, length=D)[1]
    table = jax.lax.cond(table[0] < 1, lambda t: t + 1, lambda t: t, table)
    return x + checkpoint_name(table * x, "attn")


def bend_twice(x):
    """Functions of one state leave branches of both kinds."""
    h = x @ W8
    with jax.named_scope("attn"):
        a = jnp.tanh(h)
    with jax.named_scope("mlp"):
        m = jnp.sin(h)
    return x + a + m


def pass_two_values(x):
    """From one branch to the next, which is another scope."""
    with jax.named_scope("attn_1"):
        q, k = x @ W8, x @ W8.T
    with jax.named_scope("attn_2"):
        return x + (q - k[::-1])


def pass_on_twice(x):
    """One value to the second entry, another one to the third."""
    with jax.named_scope("attn"):
        q, k = x @ W8, x @ W8.T
    with jax.named_scope("attn"):
        a = 2 * q
    with jax.named_scope("attn"):
        b = 3 * k
    return x + a + b


BOTH = {"attention": "attn", "mlp": "mlp"}
EDGES = {  # (function, branches, (index of a length, its sum) of all that are not 0)
    "one kind in a dictionary": (
        lambda x: x + attn(x),
        {"attention": "attn"},
        lambda x: {0: x, 1: x @ W8},
    ),
    "a name of the other kind": (name_by_both, BOTH, lambda x: {(0, 0): x, (1, 1): x @ W8}),
    "one state in branches of both kinds": (
        bend_twice,
        BOTH,
        lambda x: {(0, 0): x, (1, 0): np.tanh(x @ W8), (0, 1): np.sin(x @ W8)},
    ),
    "two values for the next branch": (
        pass_two_values,
        r"attn_\d",
        lambda x: {1: x, 2: x @ W8 - (x @ W8.T)[::-1]},
    ),
    "values for two entries": (
        pass_on_twice,
        "attn",
        lambda x: {0: x, 2: 2 * x @ W8 + 3 * x @ W8.T},
    ),
    "joined gates": (
        join_gates,
        "attn",
        lambda x: {0: x, 1: np.concatenate([np.tanh(x @ W8)[:2], x[2:] / (1 + np.exp(-x[2:]))])},
    ),
    "a number with a name": (
        lambda x: attn(x) + checkpoint_name(1.0, "attn"),
        "attn",
        lambda x: {1: x @ W8},
    ),
    "a constant from one entry to the next": (
        enter_twice,
        "attn",
        lambda x: {0: x, 2: x @ W8 * np.cos(np.arange(D))},
    ),
    "loops of constants": (
        scale_by_loops_of_constants,
        "attn",
        lambda x: {0: x, 1: np.arange(1, D + 1) * x},
    ),
}


def test_edges_of_branches(x64):
    x = np.asarray(tokens())
    sums = jax.jit(
        lambda x: {
            name: rc.function_contributions(fn, x, branches=branches).by_length
            for name, (fn, branches, _) in EDGES.items()
        }
    )(x)
    for name, (_, _, list_sums) in EDGES.items():
        want = np.zeros(sums[name].shape)
        for length, part in list_sums(x).items():
            want[length] = part
        assert_close(sums[name], want, atol=1e-12, err_msg=name)
