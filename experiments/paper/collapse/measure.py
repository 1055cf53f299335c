"""What run_collapse measures of one network: residuals, laws, bounds, and what rounding decides."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

import rank_collapse as rc
from experiments.lab import labelled
from experiments.lab.executor import Chunk, Mapped
from experiments.lab.progress import Progress
from experiments.paper.collapse import cubic_law
from rank_collapse.measures import residuals
from rank_collapse.runs import seeds
from rank_collapse.theory import bounds, logdomain

# {measure: why it may have no number}
REASONS = {
    "ratio": "the hidden states overflow",
    "log10_residual": "rounding decides it (--certify proves more), or states overflow",
}


def plain(params: Any, x: Any, config: rc.TransformerConfig, dtype: Any) -> dict[str, jax.Array]:
    """What the ordinary forward pass shows by layer [L + 1]."""
    low = jax.tree.map(lambda a: a.astype(dtype), (params, x))
    hidden = rc.apply(*low, config).hidden
    hidden = hidden.astype(jnp.promote_types(dtype, jnp.float32))
    size = jax.vmap(lambda h: rc.composite_norm(residuals.residual(h)))(hidden)
    return {
        "ratio": jax.vmap(residuals.residual_ratio)(hidden),
        "plain_log10_residual": jnp.log10(size),
        "log10_size": jnp.log10(jax.vmap(rc.composite_norm)(hidden)),
    }


def laws(
    params: Any, x: Any, config: rc.TransformerConfig, log: logdomain.LogTrace
) -> dict[str, jax.Array]:
    """The residual in logarithms by layer [L + 1]; the law 3^l and the bounds where they hold."""
    found = {"log10_residual": log.profile}
    if cubic_law.COVERS.refusal(config) is None:
        found["log10_cubic"] = cubic_law.closed_profile(params, x, config, log=log)[0]
    if bounds.not_covered(config):
        return found
    return found | bound_profiles(rc.bound_report(params, x, config, log=log))


def bound_profiles(report: rc.BoundReport) -> dict[str, jax.Array]:
    """Bounds by layer: of the stack so far, from the input; and from the measured layer before.

    `admissible` is 1 where the technical lemma's condition holds: the theorems' bound of layer l
    needs it in all layers up to l. `log10_published_bound` is that of the layer as published, with
    the largest γ* and the largest β of its heads in the place of sums over heads. `tightness_...`
    is how far each bound of one layer's attention lies above what it bounds, `log10_c` the c of the
    stack's bound so far.
    """
    depth = jnp.arange(report.log10_residual.shape[0])
    c = jax.lax.cummax(jnp.append(report.log10_c[:1], report.log10_c))
    stack = bounds.log10_power_law(report.log10_residual[0], c, depth)
    layer = report.log10_c + 3 * report.log10_input
    published = report.published_layer.log10_rhs + jnp.log10(report.lipschitz)
    tightness = {
        "paper": report.layer.tightness,
        "mean": report.mean_layer.tightness,
        "diameter": report.diameter_layer.tightness,
        "cubic_diameter": report.diameter_layer.tightness_cubic,
    }
    nothing = jnp.zeros(1, stack.dtype)  # the input is its own bound
    side_by_side = {f"tightness_{k}": jnp.append(nothing, v) for k, v in tightness.items()}
    return side_by_side | {
        "log10_c": c,
        "log10_bound": stack,
        "log10_published_bound": jnp.append(report.log10_residual[:1], published),
        "log10_layer_bound": jnp.append(report.log10_residual[:1], layer),
        "admissible": jnp.append(True, jnp.all(report.admissible, axis=1)).astype(stack.dtype),
    }


class Decided(NamedTuple):
    """The program of one norm placement; what rounding decides there is computed once more."""

    measured: Mapped
    networks: Mapping[str, rc.TransformerConfig]
    norm: str
    certify: bool
    progress: Progress

    def count_bytes(self, chunk: Chunk, size: int) -> int:
        return self.measured.count_bytes(chunk, size)

    def __call__(self, chunk: Chunk) -> dict[str, dict[str, np.ndarray]]:
        """As of `Mapped`, with residuals of float64, or proved, where float32 has none."""
        found, drawn = self.measured(chunk), None
        for variant, config in self.networks.items():
            profile = np.array(found["log10_residual"][variant])
            for row in undecided(profile, found["ratio"][variant]):
                if drawn is None:
                    drawn = seeds.to_host(self.measured.laid_out(chunk)[0], len(chunk.seeds))
                x, params = jax.tree.map(lambda a, i=row: a[i], drawn)
                network = config.replace(skip_gain=chunk.floats[1][row])
                what = f"{variant} (norm={self.norm}), seed {chunk.seeds[row]}"
                profile[row] = self.decided(what, profile[row], params, x, network)
            found["log10_residual"][variant] = profile
        return found

    def decided(self, what: str, profile: Any, *network: Any) -> np.ndarray:
        """The profile of one network with what its logarithms in float64, and balls, know."""
        with self.progress.time_activity(f"{what}: residuals in float64"):
            profile = in_float64(profile, *network)
        if self.certify and (np.isnan(profile) | (profile == np.inf)).any():
            with self.progress.time_activity(f"{what}: residuals in ball arithmetic"):
                profile, line = proved(profile, *network)
            self.progress.say(f"{what}: {line}")
        return profile


def undecided(profile: np.ndarray, ratio: np.ndarray) -> np.ndarray:
    """Seeds whose residuals rounding decides in some layer, but for those whose states overflow."""
    lost = np.isnan(profile) | (profile == np.inf)
    return np.flatnonzero(lost.any(axis=1) & np.isfinite(ratio).all(axis=1))


_log_profile = jax.jit(logdomain.log_residual_profile)


def in_float64(
    profile: np.ndarray,
    params: rc.network.TransformerParams,
    x: np.ndarray,
    config: rc.TransformerConfig,
) -> np.ndarray:
    """log10 of the residual [L + 1] of one network in float64, where more layers are known then."""
    if profile.dtype == np.float64:
        return profile

    def wide(a):
        return np.asarray(a, np.float64) if np.issubdtype(np.asarray(a).dtype, np.floating) else a

    with jax.enable_x64(True):
        found = np.asarray(_log_profile(*jax.tree.map(wide, (params, x, config))))
    known = np.where(profile == np.inf, np.nan, profile)
    better = np.isnan(found).sum() <= np.isnan(known).sum()
    return found.astype(profile.dtype) if better else known


def proved(
    profile: np.ndarray,
    params: rc.network.TransformerParams,
    x: np.ndarray,
    config: rc.TransformerConfig,
    max_seconds: float = 60.0,
) -> tuple[np.ndarray, str]:
    """The profile [L + 1] of one network by `rc.theory.exact_profile`, and what became of it.

    Args:
        max_seconds: No further attempt is begun that would take longer.
    """
    found = rc.theory.exact_profile(params, x, config, max_seconds=max_seconds)
    known = ~np.isnan(found.profile)
    line = f"proved to layer {known.sum() - 1} with {found.digits} digits"
    return np.where(known, found.profile, profile).astype(profile.dtype), line


def gaps(found: xr.Dataset) -> Iterator[str]:
    """Why curves have gaps: one line for each variant whose residuals are not known to the end."""
    for measure, why in REASONS.items():
        for point, unknown in labelled.iterate_points(found[measure].isnull(), "seed", "layer"):
            if lost := np.flatnonzero(unknown.any("layer")).tolist():
                layer = unknown[lost[0]].values.argmax()
                yield (
                    f"{labelled.describe_point(point)}: no {measure} in {len(lost)} of "
                    f"{len(unknown)} seeds, first in seed {lost[0]} from layer {layer}: {why}"
                )


def rates(profile: xr.DataArray) -> xr.DataArray:
    """Compute `rc.local_rate` at layers 2 .. L; NaN where it means nothing.

    That is before layer 2, and where the logarithm before is not yet beyond ±1 or of another sign.
    """
    before = profile.shift(layer=1)
    has_rate = (abs(before) > 1) & (before * profile > 0) & np.isfinite(profile)
    by_layer = profile.transpose(..., "layer")
    padding = [(0, 0)] * (profile.ndim - 1) + [(2, 0)]
    with np.errstate(invalid="ignore"):  # -inf less -inf
        rate = np.pad(rc.local_rate(by_layer.values), padding, constant_values=np.nan)
    return by_layer.copy(data=rate).where(has_rate).transpose(*profile.dims)
