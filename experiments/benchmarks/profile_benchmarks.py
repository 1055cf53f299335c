"""Benchmarks of residual profiles: many seeds in one call, and logarithms compared with a forward
pass."""

from collections.abc import Callable

import jax
import numpy as np
from absl.flags import FlagValues

import rank_collapse as rc
from experiments.benchmarks.timing import Report, compare_cases, median_ratio
from rank_collapse.runs.seeds import seed_keys

MOST_SEPARATE = 64  # seeds, beyond which those that take turns take the same time each


def time_collapse_sweep(
    options: FlagValues,
    depth: int = 32,
    num_tokens: int = 64,
    d_model: int = 64,
    num_seeds: int = 16,
) -> Report:
    """Measures the time of residual ratio and logarithm by layer of pure attention.

    Weights are drawn in the call. All seeds are in one program, vmapped or one after another, or
    each seed has its own call.

    Args:
        options: The flags of `experiments.benchmark`.
        depth, num_tokens, d_model: Sizes of the network.
        num_seeds: Random initialisations.
    """
    config = rc.san(depth, 4, d_model)

    def profile_seed(key):
        """Computes two profiles of one seed: residual ratios by layer, and their logarithms."""
        x = jax.random.normal(jax.random.fold_in(key, 1), (num_tokens, d_model))
        params = rc.init(key, config)
        hidden = rc.apply(params, x, config).hidden
        return jax.vmap(rc.residual_ratio)(hidden), rc.log_residual_profile(params, x, config)

    keys = seed_keys(0, num_seeds)
    compiled_seed = jax.jit(profile_seed).lower(keys[0]).compile()
    cases = {
        "a call for each seed": (lambda keys: [compiled_seed(key) for key in keys], (keys,)),
        "one call, vmapped": (jax.jit(jax.vmap(profile_seed)), (keys,)),
        "one call, one after another": (
            jax.jit(lambda keys: jax.lax.map(profile_seed, keys)),
            (keys,),
        ),
    }

    if num_seeds > MOST_SEPARATE:
        cases = {"one call, vmapped": cases["one call, vmapped"]}

    def make_figures(*timings):
        """Computes milliseconds per seed, and the difference between vmap and map."""
        if len(timings) == 1:
            return {"ms per seed, one call": (1e3 * timings[0].best / num_seeds, None)}
        _, vmapped, mapped = timings
        pairs = zip(vmapped.output, map(np.asarray, mapped.output), strict=True)
        differences = [np.abs(np.asarray(a) - b) / (1 + np.abs(b)) for a, b in pairs]
        return {
            "ms per seed, one call": (1e3 * min(vmapped.best, mapped.best) / num_seeds, None),
            "largest relative difference between vmapped and one after another": (
                float(np.max(differences)),
                None,
            ),
        }

    return compare_cases(cases, options.rounds, make_figures)


def time_log_profile(options: FlagValues, **sizes: int) -> Report:
    """Measures the time of residuals in logarithms, of one scale.

    The baseline is a forward pass with residual ratios.

    Args:
        options: The flags of `experiments.benchmark`.
        **sizes: See `make_profiles`.
    """
    cases = make_profiles(**sizes)
    del cases["proved"]
    return compare_cases(
        cases,
        options.rounds,
        lambda forward, one_scale: {
            "forward passes for one scale": (median_ratio(one_scale, forward), None)
        },
    )


def time_exact_profile(options: FlagValues, **sizes: int) -> Report:
    """Measures the time of residuals that are proved in ball arithmetic, and of a profile with one
    scale.

    It takes minutes.

    Args:
        options: The flags of `experiments.benchmark`.
        **sizes: See `make_profiles`.
    """
    cases = make_profiles(**sizes)

    def make_figures(one_scale, proved):
        difference = np.abs(np.asarray(one_scale.output) - proved.output)
        return {
            "seconds for every digit proved": (proved.best, 10.0),
            "largest difference of the logarithms": (float(difference.max()), None),
        }

    return compare_cases(
        {n: cases[n] for n in ("one scale", "proved")}, options.rounds, make_figures
    )


def make_profiles(
    depth: int = 12, num_tokens: int = 64, d_model: int = 64, num_heads: int = 4
) -> dict[str, tuple[Callable, tuple]]:
    """Makes three profiles of one network of attention alone: {name: (function, its arguments)}.

    Args:
        depth, num_tokens, d_model, num_heads: Sizes of the network.
    """
    config = rc.san(depth, num_heads, d_model)
    params = rc.init(jax.random.key(0), config)
    x = jax.random.normal(jax.random.key(1), (num_tokens, d_model))
    return {
        "forward pass with residual ratios": (
            jax.jit(lambda p, x: jax.vmap(rc.residual_ratio)(rc.apply(p, x, config).hidden)),
            (params, x),
        ),
        "one scale": (jax.jit(lambda p, x: rc.log_residual_profile(p, x, config)), (params, x)),
        "proved": (lambda p, x: rc.theory.exact_profile(p, x, config).profile, (params, x)),
    }
