"""Statistics of the theorems' registered statements: one number for each draw, by setting.

A draw is a seed. `experiments/verdicts/statements.toml` has the ranges, fixed before the run on
fresh seeds.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from experiments.theorems import causal, initial, mixing, one_layer, sphere
from experiments.theorems.outcomes import Theorem

LARGE = (512, 1024)  # numbers of repeated tokens
NETWORKS = 16  # of a draw of the energy


class Statistic(NamedTuple):
    """The statistic of a statement.

    Attributes:
        theorem: The statistic is measured if this theorem is selected.
        compute: (key, **sizes) → its value in one draw.
        settings: {setting: sizes}.
        traced: Names of the sizes that are arguments of a compiled program, which settings that
            differ in them alone share.
        level: How hard XLA optimises, see `runs.seeds.run_seeds`: 0 unless a draw takes longer than
            the compilation.
    """

    theorem: str
    compute: Callable[..., jax.Array]
    settings: Mapping[str, Mapping[str, float]]
    traced: tuple[str, ...] = ()
    level: int = 0


def least_energy_increment(key: jax.Array, **sizes: float | jax.Array) -> jax.Array:
    """Computes the least increment of a layer over E(0) in 16 networks with softmax."""
    measure = partial(sphere.pass_energies, normalise=None, **sizes)
    keys = jax.random.split(key, NETWORKS)
    return jnp.min(jax.lax.map(lambda one: sphere.least_increment(measure(one)), keys))


def repeated_power(key: jax.Array, **sizes: float) -> jax.Array:
    """Computes the power of k at which the last states of 1…1 0 come together at large k."""
    near, far = causal.repeated_distances(key, LARGE, **sizes)
    return jnp.log(far / near) / jnp.log(LARGE[1] / LARGE[0])


def end_over_middle(key: jax.Array, *, end: int | jax.Array, **sizes: float) -> jax.Array:
    """Computes the weight of the first (end 0) or last (end 1) position divided by the largest in
    the middle."""
    return one_layer.ends_over_middle(one_layer.last_row(key, **sizes))[end]


def excess_over_law(key: jax.Array, *, layer: int | jax.Array, n: int) -> jax.Array:
    """Computes the stable rank minus 1 after a layer, divided by the law of the width."""
    return mixing.pass_markov(key, n, layer=layer) / mixing.width_law(layer, n)


STATISTICS = {
    "head number": Statistic(
        "heads",
        partial(initial.compare_heads, few=1, many=16),
        {
            "12 layers, width 64": {},
            "12 layers, width 256": {"d": 256},
            "24 layers, width 64": {"depth": 24},
        },
        level=1,
    ),
    "rollout bound": Statistic(
        "path_products",
        partial(causal.bound_ratio, scale=1.0, freeze=False),
        {
            "3 layers, width 8": {},
            "6 layers, width 8": {"depth": 6},
            "3 layers, width 16": {"d": 16},
        },
    ),
    "softmax energy": Statistic(
        "multi_head_energy",
        least_energy_increment,
        {
            f"{heads} head{'s' * (heads > 1)}, β {beta:g}": {"heads": heads, "beta": beta}
            for heads, beta in ((1, 1.0), (4, 1.0), (4, 4.0))
        },
        traced=("beta",),
    ),
    "repeated power": Statistic(
        "repeated",
        repeated_power,
        {"2 layers": {"depth": 2}, "4 layers": {}},
    ),
    "position ends": Statistic(
        "position",
        end_over_middle,
        {
            f"{name} of 64 tokens, {depth} layers": {"end": end, "depth": depth}
            for depth in (8, 24)
            for end, name in enumerate(("first", "last"))
        },
        traced=("end",),
    ),
    "noise apart": Statistic(
        "noise",
        partial(initial.opposite_share, time=16.0),
        {f"width {d}": {"d": d} for d in (2, 4)},
    ),
    "width law": Statistic(
        "width",
        partial(excess_over_law, n=256),
        {f"layer {i}": {"layer": i} for i in (1, 2, 3)},
        traced=("layer",),
    ),
}


def list_draws(
    theorems: Mapping[str, Theorem],
) -> Iterator[tuple[str, Callable, dict[str, dict[str, float]], int]]:
    """Lists the programs of the statements of some theorems.

    Args:
        theorems: Theorems by name.

    Yields:
        (statement, function of a key and of traced sizes, {setting: its traced sizes}, level).
    """
    for key, statistic in STATISTICS.items():
        if statistic.theorem not in theorems:
            continue
        programs: dict[tuple, dict[str, dict[str, float]]] = {}
        for setting, sizes in statistic.settings.items():
            traced = {name: sizes[name] for name in statistic.traced}
            fixed = tuple((name, size) for name, size in sizes.items() if name not in traced)
            programs.setdefault(fixed, {})[setting] = traced
        for fixed, settings in programs.items():
            yield key, partial(statistic.compute, **dict(fixed)), settings, statistic.level
