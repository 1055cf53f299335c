"""Benchmark of `rc.monitor`: the time that it adds to a training step in every layer."""

import jax
import jax.numpy as jnp
from absl.flags import FlagValues

import rank_collapse as rc
from experiments.benchmarks.timing import Report, compare_cases


def time_monitor(
    options: FlagValues, depth: int = 12, num_heads: int = 12, d_model: int = 768, tokens: int = 512
) -> Report:
    """Measures the time of a training step with and without `rc.monitor` of every layer.

    Pre-norm, gelu, float32. The scalars are computed inside each layer; "states" leaves attention
    out.

    Args:
        options: The flags of `experiments.benchmark`.
        depth, num_heads, d_model: Sizes of the network.
        tokens: Number of tokens in the one example.
    """
    config = rc.transformer(depth, num_heads, d_model, norm_placement="pre", mlp="gelu")
    params = rc.init(jax.random.key(0), config)
    x, target = jax.random.normal(jax.random.key(1), (2, tokens, d_model))

    def step(params, monitored):
        """Makes one training step, with or without scalars.

        Returns:
            (parameters after the step, loss, scalars; {} where they are not measured).
        """

        def loss(params):
            """Computes the squared error, and the scalars: {} where they are not measured."""
            if monitored:
                output, scalars = rc.monitored(params, x, config, attention=monitored == "all")
            else:
                output, scalars = rc.apply(params, x, config).output, {}
            return jnp.mean((output - target) ** 2), scalars

        (value, scalars), gradient = jax.value_and_grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, gradient), value, scalars

    parts = {"plain": "", "states": "states", "states and attention": "all"}
    cases = {
        f"step, {name}": (jax.jit(lambda p, m=monitored: step(p, m)), (params,))
        for name, monitored in parts.items()
    }
    return compare_cases(
        cases,
        options.rounds,
        lambda plain, *others: {
            f"seconds of {other.name} over plain": (other.best / plain.best, 1.02)
            for other in others
        },
    )
