"""record_function: every function that cannot be recorded is refused with a line."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import rank_collapse as rc
from tests.oracles.plain_layers import BOTH, WEIGHTS, X, attend, run_plain
from tests.support.refusals import is_refused


def test_what_cannot_be_recorded_is_one_line(tmp_path):
    path = tmp_path / "a.npz"

    def record(model=run_plain, branches=BOTH, x=X):
        rc.record_function(model, x, path, branches=branches)

    is_refused("matches no scope or name", record, branches={"attention": "atten", "mlp": "mlp"})
    is_refused("an MLP; match the MLP as well", record, lambda x: run_plain(x).sum(), "att")
    is_refused("fn is int", record, 3)

    def with_skip(x):
        with jax.named_scope("att"):
            return x + attend(WEIGHTS[0], x)

    is_refused("the scope of a branch must not contain its skip", record, with_skip, "att")

    def product(x):
        with jax.named_scope("att"):
            a = jnp.tanh(x)
        with jax.named_scope("mlp"):
            m = jnp.sin(x)
        return x + a * m

    is_refused("no branch is added to a state of its shape", record, product)

    def in_order(*layers):
        """Adds branches of the kinds att and mlp, by the letters of each layer; d doubles x."""

        def model(x):
            for letter in "".join(layers):
                if letter == "d":
                    x = jnp.concatenate([x, x], axis=1)
                    continue
                with jax.named_scope({"a": "att", "m": "mlp"}[letter]):
                    branch = jnp.tanh(x)
                x = x + branch
            return x

        return model

    other_kinds = "layer 1 does not have the same kinds of branches as layer 0"
    for layers in (("am", "a"), ("a", "am"), ("ma", "ma")):
        is_refused(other_kinds, record, in_order(*layers))
    is_refused(
        r"states of the shapes \[5, 8\] and \[5, 16\], but", record, in_order("am", "d", "am")
    )
    batched = jax.vmap(jax.vmap(run_plain))
    is_refused(r"must be \[tokens, width\]", record, batched, BOTH, X[None, None])
    with pytest.raises(ValueError, match="outside of jit"):
        jax.jit(lambda x: record(x=x))(X)
    assert not path.exists()


def attend_within(x):
    with jax.named_scope("attention"):
        return jnp.tanh(x)


NESTED = {
    "plain": attend_within,
    "jit": jax.jit(attend_within),
    "remat": jax.checkpoint(attend_within),
    "scan": lambda x: jax.lax.scan(lambda h, _: (attend_within(h), None), x, length=2)[0],
    "cond": lambda x: jax.lax.cond(x[0, 0] < 99, attend_within, jnp.sin, x),
    "while": lambda x: jax.lax.while_loop(lambda h: h.max() > 0.5, attend_within, x),
    "choice that is not made": lambda x: jax.lax.cond(x[0, 0] > 99, attend_within, jnp.sin, x),
    "loop of no steps": lambda x: jax.lax.while_loop(lambda h: h.max() > 99, attend_within, x),
    "shard_map": jax.shard_map(
        attend_within, mesh=jax.make_mesh((1,), ("a",)), in_specs=P(), out_specs=P()
    ),
}
NO_RULE = ("while", "loop of no steps", "shard_map")  # for paths


@pytest.mark.parametrize("name", NESTED)
def test_an_attention_inside_an_mlp_is_refused_through_programs(tmp_path, name):
    """For contributions of paths too."""

    def model(x):
        with jax.named_scope("layer"):
            a = NESTED[name](x)
        return x + a

    patterns = {"attention": "attention", "mlp": "layer"}
    message = "the scope 'layer/attention' matches the patterns of both 'attention' and 'mlp'"
    path = tmp_path / "a.npz"
    is_refused(message, rc.record_function, model, X, path, branches=patterns)
    if name not in NO_RULE:
        is_refused(message, rc.function_contributions, model, X, branches=patterns)


@pytest.mark.parametrize("name", ["choice that is not made", "loop of no steps", "shard_map"])
def test_a_branch_inside_what_is_not_read_is_named(tmp_path, name):
    def model(x):
        return run_plain(x) + NESTED[name](x)

    message = "'attention' matches 'attention' only inside an operation that is not opened"
    patterns = {"attention": "attention", "mlp": BOTH["mlp"]}
    is_refused(message, rc.record_function, model, X, tmp_path / "a.npz", branches=patterns)
