"""What `rc.monitor` of every layer adds to a training step."""

from typing import Any

import jax
import jax.numpy as jnp

import rank_collapse as rc
from experiments.benchmarks.timing import Report, compared


def monitor(
    options: Any, depth: int = 12, num_heads: int = 12, d_model: int = 768, tokens: int = 512
) -> Report:
    """A step of gradient descent of a network of BERT-base's size, with and without it.

    Pre-norm, gelu, one example of 512 tokens in float32. The scalars are computed inside of each
    layer; "states" leaves the attention out.
    """
    config = rc.transformer(depth, num_heads, d_model, norm_placement="pre", mlp="gelu")
    params = rc.init(jax.random.key(0), config)
    x, target = jax.random.normal(jax.random.key(1), (2, tokens, d_model))

    def step(params, watched):
        def loss(params):
            if watched:
                output, scalars = rc.monitored(params, x, config, attention=watched == "all")
            else:
                output, scalars = rc.apply(params, x, config).output, {}
            return jnp.mean((output - target) ** 2), scalars

        (value, scalars), gradient = jax.value_and_grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, gradient), value, scalars

    cases = {
        f"step, {name}": (jax.jit(lambda p, w=watched: step(p, w)), (params,))
        for name, watched in (("plain", ""), ("states", "states"), ("states and attention", "all"))
    }
    return compared(
        cases,
        options.rounds,
        lambda plain, *others: {
            f"seconds of {other.name} over plain": (other.best / plain.best, 1.02)
            for other in others
        },
    )
