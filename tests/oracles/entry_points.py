"""Entry points of the library as functions of one seed's arrays, to be compiled or compared."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import rank_collapse as rc
from rank_collapse.theory.expectation import expected_pass


class EntryPoint(NamedTuple):
    """A function of one seed.

    Attributes:
        fn: A pure function of arrays.
        draw: Draws its arguments from a key.
    """

    fn: Callable[..., Any]
    draw: Callable[[Any], tuple]

    @property
    def shapes(self) -> tuple:
        """Shapes of the arguments of `fn`, in the default types that are switched on."""
        return jax.eval_shape(self.draw, jax.random.key(0))


def make_network_point(fn: Callable, config: rc.TransformerConfig, num_tokens: int) -> EntryPoint:
    """Makes the entry point of fn(params, x, config), with x of `num_tokens` tokens."""

    def draw(key):
        x = jax.random.normal(jax.random.fold_in(key, 1), (num_tokens, config.d_model))
        return rc.init(key, config), x

    return EntryPoint(lambda params, x: fn(params, x, config), draw)


def make_tokens_point(fn: Callable, num_tokens: int, d_model: int) -> EntryPoint:
    """Makes the entry point of fn(x), with x [n, d]."""
    return EntryPoint(fn, lambda key: (jax.random.normal(key, (num_tokens, d_model)),))


def output_change(params: Any, x: Any, config: rc.TransformerConfig) -> Any:
    """Computes the change of the output when weights grow by one percent."""
    return rc.network.output_change(params, jax.tree.map(lambda a: a * 1.01, params), x, config)


def admin_profile(params: Any, x: Any, config: rc.TransformerConfig) -> Any:
    """Computes the profile of one example, in float32."""
    return jax.tree.map(jnp.float32, rc.network.admin_profile(params, x[None], config))


def entry_points(
    depth: int, num_heads: int, d_model: int, num_tokens: int, d_ff: int
) -> dict[str, EntryPoint]:
    """Makes all entry points, by name.

    They are of a post-norm Transformer, or of pure attention where the theory is about that.
    """
    post = rc.transformer(depth, num_heads, d_model, d_ff=d_ff)
    san = rc.san(depth, num_heads, d_model)
    paths = jnp.arange(2 * depth).reshape(2, depth) % (num_heads + 1)
    networks = {
        "apply": rc.apply,
        "output_change": output_change,
        "layer_removal": rc.network.layer_removal,
        "layer_influence": rc.network.layer_influence,
        "path_contributions": rc.path_contributions,
        "head_contributions": rc.head_contributions,
        "direct_contributions": rc.direct_contributions,
        "path_set_states": lambda p, x, c: rc.paths.path_set_states(p, x, c, paths[None]),
        "path_state": lambda p, x, c: rc.paths.path_state(p, x, c, paths[0]),
        "truncated": lambda p, x, c: rc.truncated(p, x, c, 1),
        "expected_pass": expected_pass,
        "admin_profile": admin_profile,
    }
    pure = {
        "log_residual_profile": rc.log_residual_profile,
        "bound_report": rc.bound_report,
    }
    ranks = (rc.stable_rank, rc.effective_rank, rc.rank_one_ratio)
    tokens = {
        "ranks": lambda x: [f(x) for f in ranks],
        "monitor": rc.monitor,
        "participation_ratio": rc.participation_ratio,
    }
    skips = rc.san_skip(depth, num_heads, d_model)
    weights = (rc.attention_entropy, rc.sink_rate, rc.measures.largest_column)
    shape = num_heads, num_tokens, num_tokens
    attention = EntryPoint(
        lambda p: [f(p) for f in weights],
        lambda key: (jax.nn.softmax(jax.random.normal(key, shape)),),
    )
    return (
        {name: make_network_point(fn, post, num_tokens) for name, fn in networks.items()}
        | {name: make_network_point(fn, san, num_tokens) for name, fn in pure.items()}
        | {name: make_tokens_point(fn, num_tokens, d_model) for name, fn in tokens.items()}
        | {"attention": attention}
        | {"transverse_exponents": make_network_point(rc.transverse_exponents, skips, num_tokens)}
    )
