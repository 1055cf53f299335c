"""The measurements of run_collapse in one network: residuals, laws, bounds, and residuals that
rounding decides."""

from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jax.typing import DTypeLike

import rank_collapse as rc
from experiments.collapse import cubic_law
from experiments.lab import Chunk, Mapped, Progress, labelled
from rank_collapse.measures import residuals
from rank_collapse.runs import seeds
from rank_collapse.theory import bounds, logdomain, reports

# {measure: why it may have no number}
REASONS = {
    "ratio": "the hidden states overflow",
    "log10_residual": "rounding decides it in float64 too, or states overflow",
}


def measure_plain(
    params: rc.network.TransformerParams,
    x: jax.Array,
    config: rc.TransformerConfig,
    dtype: DTypeLike,
) -> dict[str, jax.Array]:
    """Measures the residuals that the ordinary forward pass shows, by layer [L + 1].

    Args:
        params, x, config: See `rank_collapse.apply`.
        dtype: Dtype of the forward pass.

    Returns:
        "ratio", the residual ratio; log10 of the residual and of the states' size.
    """
    low = jax.tree.map(lambda a: a.astype(dtype), (params, x))
    hidden = rc.apply(*low, config).hidden
    hidden = hidden.astype(jnp.promote_types(dtype, jnp.float32))
    size = jax.vmap(lambda h: rc.composite_norm(residuals.residual(h)))(hidden)
    return {
        "ratio": jax.vmap(residuals.residual_ratio)(hidden),
        "plain_log10_residual": jnp.log10(size),
        "log10_size": jnp.log10(jax.vmap(rc.composite_norm)(hidden)),
    }


def measure_laws(
    params: rc.network.TransformerParams,
    x: jax.Array,
    config: rc.TransformerConfig,
    log: logdomain.LogTrace,
) -> dict[str, jax.Array]:
    """Measures the residual in logarithms by layer [L + 1], its law 3^l and the bounds.

    The law and the bounds exist only for networks that they cover.

    Args:
        params, x, config: See `rank_collapse.apply`.
        log: The pass in logarithms.
    """
    profiles = {"log10_residual": log.profile}
    if config.mlp == "none" and cubic_law.COVERS.refusal(config) is None:
        profiles["log10_cubic"] = cubic_law.closed_profile(params, x, config, log=log)[0]
    if bounds.not_covered(config):
        return profiles
    return profiles | bound_profiles(reports.report_from_log(params, x, config, log))


def bound_profiles(report: rc.BoundReport) -> dict[str, jax.Array]:
    """Computes bounds by layer [L + 1]: for the stack so far, and from the measured layer before.

    `admissible` is 1 if the technical lemma's condition holds; the theorems' bound of layer l needs
    it in all layers up to l. `log10_published_bound` is the published bound of the layer, with the
    largest γ* and the largest β of its heads instead of sums over heads. `tightness_...` is how far
    each bound of one layer's attention lies above the residual, and `log10_c` is the constant c of
    the stack's bound so far.

    Args:
        report: Bounds of one network.
    """
    depth = jnp.arange(report.log10_residual.shape[0])
    c = jax.lax.cummax(jnp.append(report.log10_c[:1], report.log10_c))
    stack = bounds.log10_power_law(report.log10_residual[0], c, depth)
    layer = report.log10_c + 3 * report.log10_input
    published = report.published_layer.log10_rhs + jnp.log10(report.lipschitz)
    tightness = {
        "tightness_paper": report.layer.tightness,
        "tightness_mean": report.mean_layer.tightness,
        "tightness_diameter": report.diameter_layer.tightness,
        "tightness_cubic_diameter": report.diameter_layer.tightness_cubic,
    }
    zero = jnp.zeros(1, stack.dtype)  # the input is its own bound
    return {name: jnp.append(zero, values) for name, values in tightness.items()} | {
        "log10_c": c,
        "log10_bound": stack,
        "log10_published_bound": jnp.append(report.log10_residual[:1], published),
        "log10_layer_bound": jnp.append(report.log10_residual[:1], layer),
        "admissible": jnp.append(True, jnp.all(report.admissible, axis=1)).astype(stack.dtype),
    }


def measure_chunk(
    mapped: Mapped,
    chunk: Chunk,
    networks: Mapping[str, rc.TransformerConfig],
    norm: str,
    progress: Progress,
) -> dict[str, dict[str, np.ndarray]]:
    """Measures a chunk, with residuals of float64 where rounding decides those of float32.

    Args:
        mapped: Function that computes a chunk in the dtype of the flags.
        chunk: Seeds of points of the axes.
        networks: {variant: its configuration}.
        norm: Norm placement of the networks, for messages.
        progress: Where messages go.
    """
    results, draws = mapped(chunk), None
    for variant, config in networks.items():
        profile = np.array(results["log10_residual"][variant])
        for row in find_undecided(profile, results["ratio"][variant]):
            if draws is None:
                draws = seeds.to_host(mapped.laid_out(chunk)[0], len(chunk.seeds))
            x, params = jax.tree.map(lambda a, i=row: a[i], draws)
            network = config.replace(skip_gain=chunk.floats[1][row])
            text = f"{variant} (norm={norm}), seed {chunk.seeds[row]}"
            with progress.time_activity(f"{text}: residuals in float64"):
                profile[row] = measure_in_float64(profile[row], params, x, network)
        results["log10_residual"][variant] = profile
    return results


def find_undecided(profile: np.ndarray, ratio: np.ndarray) -> np.ndarray:
    """Lists the seeds whose residuals rounding decides in some layer, and whose states are finite.

    Args:
        profile: log10 of the residuals [s, L + 1].
        ratio: Residual ratios [s, L + 1].
    """
    is_lost = np.isnan(profile) | (profile == np.inf)
    return np.flatnonzero(is_lost.any(axis=1) & np.isfinite(ratio).all(axis=1))


_log_profile = jax.jit(logdomain.log_residual_profile)


def measure_in_float64(
    profile: np.ndarray,
    params: rc.network.TransformerParams,
    x: np.ndarray,
    config: rc.TransformerConfig,
) -> np.ndarray:
    """Computes the profile [L + 1] of one network in float64, where that knows more layers.

    Args:
        profile: Known values, in the arithmetic of the run.
        params, x, config: The network and its tokens.
    """
    if profile.dtype == np.float64:
        return profile

    def widen(a):
        return np.asarray(a, np.float64) if np.issubdtype(np.asarray(a).dtype, np.floating) else a

    with jax.enable_x64(True):
        wide = np.asarray(_log_profile(*jax.tree.map(widen, (params, x, config))))
    narrow = np.where(profile == np.inf, np.nan, profile)
    is_better = np.isnan(wide).sum() <= np.isnan(narrow).sum()
    return wide.astype(profile.dtype) if is_better else narrow


def describe_gaps(results: xr.Dataset) -> Iterator[str]:
    """Reports why curves have gaps: a line for each variant with residuals that are not known.

    Args:
        results: Over the axes of the run, seeds and layers.
    """
    for measure, reason in REASONS.items():
        for point, unknown in labelled.iterate_points(results[measure].isnull(), "seed", "layer"):
            if seeds_lost := np.flatnonzero(unknown.any("layer")).tolist():
                layer = unknown[seeds_lost[0]].values.argmax()
                yield (
                    f"{labelled.describe_point(point)}: no {measure} in {len(seeds_lost)} of "
                    f"{len(unknown)} seeds, first in seed {seeds_lost[0]} from layer {layer}: "
                    f"{reason}"
                )


def local_rates(profile: xr.DataArray) -> xr.DataArray:
    """Compute `rc.local_rate` at layers 2 .. L; NaN where it means nothing.

    This is before layer 2, and where the logarithm before is within ±1 or has another sign.
    """
    before = profile.shift(layer=1)
    has_rate = (abs(before) > 1) & (before * profile > 0) & np.isfinite(profile)
    by_layer = profile.transpose(..., "layer")
    padding = [(0, 0)] * (profile.ndim - 1) + [(2, 0)]
    with np.errstate(invalid="ignore"):  # -inf less -inf
        rate = np.pad(rc.local_rate(by_layer.values), padding, constant_values=np.nan)
    return by_layer.copy(data=rate).where(has_rate).transpose(*profile.dims)
