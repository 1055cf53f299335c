"""Cures as networks: residual designs and attention variants by name, and what is measured of them.

Axis letters: s seeds, l layers.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

import rank_collapse as rc
from experiments import initial
from experiments.initial import FLOOR, kept_and_gradients, mean_path_length
from experiments.shell.executor import Executor
from experiments.shell.options import Flags
from experiments.small_task import Network
from rank_collapse.report.statistics import mean_and_ends
from rank_collapse.runs.folder import RunFolder

DESIGNS = [name for name in rc.DESIGNS if name != "admin"]  # its ω are of a batch
VARIANTS = [name for name in rc.VARIANTS if name != "critical"]  # its weights are the identity
MEASURES = {
    "log10_residual": r"$\log_{10}$ residual kept",
    "slope": r"$\log_{10}$ residual per layer",
    "log10_gradient": r"$\log_{10}$ gradient of queries / values",
    "rank": "effective rank / largest",
    "entropy": r"entropy of attention / $\ln n$",
    "length": "mean path length / layers",
}
SHARES = ("rank", "entropy", "length")  # of `MEASURES`, in [0, 1]
DEEP = 40  # layers from which on faster programs are worth their longer compiling


class Case(NamedTuple):
    """One cure at one depth, or one cell of a factorial design."""

    kind: str  # "design", "variant" or "cell"
    name: str
    depth: int
    config: rc.TransformerConfig

    @property
    def label(self) -> str:
        """What it is called in the figures, at any depth."""
        return f"{self.name} attention" if self.kind == "variant" else self.name

    @property
    def network(self) -> Network:
        """It, with the attention parameters that it starts from."""
        variant = rc.VARIANTS[self.name if self.kind == "variant" else "softmax"]
        return Network(self.config, _start(variant.start))


Cases = Mapping[str, Case]


@functools.cache  # programs are shared by networks that start by one function
def _start(of_attention):
    def start(params, _):
        layers = params.layers
        return params.replace(layers=layers.replace(attention=of_attention(layers.attention)))

    return start


def cases_of(options: Flags, depths: list[int], width: int, num_tokens: int) -> dict[str, Case]:
    """{name: case} of every cure and depth.

    Raises:
        ValueError: A design or variant that the network cannot have.
    """
    found = []
    for depth in depths:
        base = initial.network_of(
            options, depth, norm_placement=options.norm_placement, d_model=width
        )
        for name in options.designs:
            found.append(Case("design", name, depth, rc.design(base, name)))
        for name in options.variants:
            sizes = {"num_tokens": num_tokens} if name == "a_perp" else {}
            config = rc.variant(base, name, key=jax.random.key(options.seed), **sizes)
            found.append(Case("variant", name, depth, config))
    return {f"{case.label}, L={case.depth}": case for case in found}


def measure_cases(options: Flags, cases: Cases, run: RunFolder) -> dict[str, dict[str, np.ndarray]]:
    """{case: `measures_of` all seeds}; one program for cases that differ in numbers alone."""

    def measure(start, key, floats):
        config, cosine = floats
        key_params, key_x, key_goal = jax.random.split(key, 3)
        params = start(rc.init(key_params, config), None)
        x = initial.tokens(key_x, options.num_tokens, config.d_model, cosine)
        found = kept_and_gradients(params, x, config, key_goal)
        return found | {"length": mean_path_length(params, x, config)}

    found: dict[str, dict[str, np.ndarray]] = {}
    with Executor(options, run, "cures", len(cases) * options.num_seeds) as executor:
        for configs in initial.by_program({name: case.network for name, case in cases.items()}):
            first = cases[next(iter(configs))]
            one = functools.partial(measure, first.network.start)

            def cells_of(own, configs=configs):
                return {name: (config, np.float32(own.cosine)) for name, config in configs.items()}

            # Of shallow networks compiling is most of the time.
            found |= executor.measure(one, cells_of, level=int(first.depth >= DEEP))
    return {name: measures_of(found[name]) for name in cases}


def measures_of(found: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """{name of `MEASURES`: [s]} of one case, "kept" [s, l + 1], the residual by layer over that of
    the input, and whether its last is a "limit" [s].

    The slope is that of a line through log10 of the residual by layer, from the first layer to the
    last that is above what float32 rounds away.
    """
    kept = initial.kept_of(found["residual"])
    return initial.measures_of(found) | {
        "slope": np.array([slope_of(curve) for curve in np.log10(kept)]),
        "length": found["length"] / (kept.shape[1] - 1),
        "limit": initial.limits_of(found),
        "kept": kept,
    }


def ends(values: Any, *, share: bool = False) -> list[float | None]:
    """`mean_and_ends` over seeds; None where a seed has no number."""
    return mean_and_ends(values, share=share) if np.isfinite(values).all() else [None] * 3


def slope_of(log10_kept: np.ndarray) -> float:
    """Of a line through log10 residuals, up to the first that is rounded away."""
    low = np.flatnonzero(log10_kept <= math.log10(FLOOR))
    curve = log10_kept[: max(2, low[0])] if len(low) else log10_kept
    return float(np.polyfit(np.arange(len(curve)), curve, 1)[0])
