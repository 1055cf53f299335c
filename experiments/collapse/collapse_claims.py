"""The statements, published values and finding of run_collapse."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import xarray as xr

from experiments.collapse.collapse_figures import (
    AXES,
    TIGHTNESS,
    choose_published,
    describe_published,
    raised_constant,
    without_skips,
)
from experiments.collapse.cubic_law import measured_constant
from experiments.lab import Finding, labelled
from experiments.verdicts import Comparison, Row, cases_row, power_law_wins, show_ratio
from rank_collapse.pretrained.published import PUBLISHED, published_curves
from rank_collapse.report.wording import power_of_ten, words

PUBLISHED_NAMES = {
    "san": "SAN",
    "san_mlp": "SAN+MLP",
    "san_skip": "SAN+skip",
    "transformer": "Transformer",
}

WITHOUT_SKIPS = ("san", "san_mlp")


def count_above(results: xr.Dataset, bound: str) -> xr.DataArray:
    """Counts the layers of a network that are above one of their bounds.

    Logarithms in float32 are known to about 1e-5 of their size.
    """
    margin = 1e-3 + 1e-5 * np.abs(results.log10_residual)
    return (results.log10_residual > results[bound] + margin).sum(["seed", "layer"])


def judge_claims(results: xr.Dataset) -> Iterator[Row]:
    """Tests rate, bounds, skips, MLPs and norms, for each norm placement and scale of the weights;
    variants with skips are tested at each gain, except at a gain of 0.

    Args:
        results: Over norm placement, weight scale, skip gain, variant, seed and layer.
    """
    skips, is_swept = results.sel(skip_gain=results.skip_gain != 0), results.sizes["skip_gain"] > 1
    results = without_skips(results)
    if not skips.sizes["skip_gain"]:
        skips = results.sel(variant=[v for v in WITHOUT_SKIPS if v in results.variant])
    elif not is_swept:
        skips = results
    # Without skips post- and pre-norm are one network up to an outer norm: the row of post-norm, as
    # published, is that of both.
    norms = list(results.norm_placement.values)
    distinct = [n for n in norms if not (n == "pre" and "post" in norms)]
    yield from claims_by_variant(skips, distinct)
    for key, variant in (("heads bound", "san"), ("mlp bound", "san_mlp")):
        if variant in results.variant and "admissible" in results:
            yield from bound_claims(key, variant, results.sel(variant=variant, drop=True))
    if "swept" in results and "san" in results.variant:
        yield from gain_claims(results, distinct)


def claims_by_variant(results: xr.Dataset, distinct: list[str]) -> Iterator[Row]:
    """Tests the local rate at the last layer and the remaining residual ratio, by variant.

    Args:
        results: Results of all networks; where there are several gains of the skips, over these
            gains.
        distinct: Norm placements that are different networks without skips.
    """
    log10_ratio = results.log10_residual - results.log10_size
    last, start = log10_ratio.isel(layer=-1, drop=True), log10_ratio.isel(layer=0, drop=True)
    rate, remaining = results.local_rate.isel(layer=-1, drop=True), 10.0 ** (last - start)
    is_power_law = labelled.apply_along(power_law_wins, 10.0**log10_ratio, "layer")
    variants = {*results.variant.values}
    plain, normed = (
        [n for n in distinct if (n == "none") is is_plain] for is_plain in (True, False)
    )
    for key, values, variant, norms, text in (
        ("rate", rate, "san", plain, ""),
        ("norm", rate, "san", normed, ""),
        ("mlp rate", rate, "san_mlp", distinct, ""),
        ("skips stop", remaining, "san_skip", results.norm_placement, ""),
        ("mlps and skips stop", remaining, "transformer", distinct, ""),
        ("mlps stop", remaining, "san_mlp", distinct, ""),
        ("law of the fall", is_power_law, "san_skip", results.norm_placement, ""),
    ):
        if variant in variants:
            values = values.sel(variant=variant, norm_placement=norms, drop=True)
            values = drop_gains(values, variant)
            yield from labelled.statement_rows(key, values, text)
    last = last.sel(norm_placement=distinct)
    for key, variant in (("skips", "san_skip"), ("mlps slow", "san_mlp")):
        if {"san", variant} <= variants:
            variant_last = last.sel(variant=variant, drop=True)
            san_last = last.sel(variant="san", drop=True)
            gained = drop_gains(variant_last, variant) - drop_gains(san_last, "san")
            yield from labelled.statement_rows(key, gained)


def drop_gains(values: xr.DataArray, variant: str) -> xr.DataArray:
    """Selects one of the skips' gains for a variant without skips, which do not differ in them."""
    if "skip_gain" not in values.dims or variant in ("san_skip", "transformer"):
        return values
    return values.isel(skip_gain=0, drop=True)


def bound_claims(key: str, variant: str, results: xr.Dataset) -> Iterator[Row]:
    """Counts the layers above the published bound, where the lemma's condition holds.

    A case is one layer of one seed. Each row has the number of cases above the bound, out of all.

    Args:
        key: Key of the statement.
        variant: Variant whose layers are tested.
        results: Results of this variant.
    """
    has_bound = {"layer": slice(1, None)}  # layer 0 is the input
    admissible = results.where(results.admissible > 0).isel(has_bound)
    cases = admissible.admissible.count(["seed", "layer"])
    is_covered = results.admissible.notnull().any(["seed", "layer"])
    for point, count in labelled.iterate_points(count_above(admissible, "log10_published_bound")):
        if is_covered.sel(point):
            text = f"layers of {words(variant)}, {labelled.describe_point(point)}"
            total = int(cases.sel(point))
            yield cases_row(key, text, int(count), total, results.sizes["seed"])


def gain_claims(results: xr.Dataset, distinct: list[str]) -> Iterator[Row]:
    """Tests from which gain on MLPs slow the collapse, and what they do at the published gain.

    Args:
        results: Results, which hold the residual at each gain of the MLPs as "swept".
        distinct: Norm placements that are different networks without skips.
    """
    raised = raised_constant(results)
    gains = labelled.apply_along(partial(crossing, raised.mlp_gain.values), raised, "mlp_gain")
    yield from labelled.statement_rows("mlp gain", gains)
    if 1 not in results.mlp_gain:
        return
    # Post-norm gives all states one size up to that of their mean, so that differences of
    # residuals are those of their ratios.
    norms = [n for n in distinct if n not in ("none", "pre")]
    published = results.swept.sel(mlp_gain=1, norm_placement=norms)
    gained = published - results.log10_residual.sel(variant="san", drop=True)
    text = "MLPs with their own skip, as published"
    yield from labelled.statement_rows("mlps slow", gained.isel(layer=-1), text)
    change = published.isel(layer=-1) - published.isel(layer=0)
    yield from labelled.statement_rows("mlps stop", 10.0**change, text)


def crossing(gains: np.ndarray, raised: np.ndarray) -> np.ndarray:
    """Finds the least gain [...] from which on MLPs slow the collapse; NaN for none.

    Between the gains that were swept the change [..., g] is taken as linear in the gain's
    logarithm; gains at which the residual is no number are left out.

    Args:
        gains: Ascending [g].
        raised: Rise of the law's constant at each gain [..., g].
    """
    crossings = np.full(raised.shape[:-1], np.nan)
    for place in np.ndindex(crossings.shape):
        is_finite = np.isfinite(raised[place])
        logs, values = np.log(gains[is_finite]), raised[place][is_finite]
        upward = np.flatnonzero((values[:-1] < 0) & (values[1:] >= 0))
        if len(upward):
            i = upward[-1]
            rise = values[i + 1] - values[i]
            crossings[place] = np.exp(logs[i] - values[i] * (logs[i + 1] - logs[i]) / rise)
    return crossings


def compare_results(results: xr.Dataset) -> Iterator[Comparison]:
    """Compares residual ratios with BERT's published curve, if skips have a gain of 1 as there, and
    lists the numbers that only logarithms show.

    Args:
        results: Over norm placement, weight scale, skip gain, variant, seed and layer.
    """
    end, depth = results.isel(layer=-1), results.sizes["layer"] - 1
    curves = published_curves(PUBLISHED["bert-base-cased"], 12)["init"]
    curves = {v: curves[PUBLISHED_NAMES[v]] for v in results.variant.values}
    ends = [curve[min(depth, len(curve) - 1)] for curve in curves.values()]
    published = xr.DataArray(ends, {"variant": [*curves]})
    is_alike = (results.skip_gain == 1) | published.variant.isin(WITHOUT_SKIPS)
    published = published.where(is_alike)
    note = "the published network is BERT at initialisation (768 wide, 12 heads, post-norm)"
    show = partial(show_ratio, dtype=end.ratio.dtype)
    yield from labelled.compare_means(
        f"residual ratio after {depth} layers", end.ratio, published, note, show
    )
    yield from labelled.compare_means("log10 of the residual at the last layer", end.log10_residual)
    yield from labelled.compare_means(
        "log10 of the residual at the last layer, in plain arithmetic", end.plain_log10_residual
    )
    # What follows is of networks without skips.
    results = without_skips(results)
    if "admissible" in results:
        admissible = results.where(results.admissible > 0).isel(layer=slice(1, None))
        # The stack's bound needs the condition in every layer so far, a layer's in that one only.
        is_so_far = admissible.admissible.cumprod("layer", skipna=False) > 0
        broken = count_above(admissible, "log10_layer_bound")
        broken = broken + count_above(admissible.where(is_so_far), "log10_bound")
        broken = broken.where(results.admissible.notnull().any(["seed", "layer"]))
        text = "layers and depths above the bound with sums over heads (derived here)"
        yield from labelled.compare_means(text, broken.expand_dims("seed"), 0, source="expected")
        tightness = results[list(TIGHTNESS)].isel(layer=slice(1, None)).to_dataarray("bound")
        free = (tightness.drop_sel(bound="tightness_paper") < -1e-3).sum(["bound", "layer"])
        free = free.where(tightness.notnull().any(["bound", "layer"]))
        text = "layers above a bound that needs no condition (derived here)"
        yield from labelled.compare_means(text, free, 0, source="expected")
        text = "powers of ten above the bounded quantity, median over layers"
        in_words = tightness.assign_coords(bound=[*TIGHTNESS.values()])
        yield from labelled.compare_means(text, in_words.median("layer"))
    if "log10_c" not in results:
        return
    # The law is that of networks without skips, its closed form that of attention alone.
    for variant, profile, name in (
        ("san", "log10_residual", "attention alone"),
        ("san_mlp", "log10_residual", "attention and MLPs"),
        ("san", "log10_cubic", "attention alone, in closed form"),
    ):
        if variant in results.variant:
            network = results.sel(variant=variant, drop=True)
            c = labelled.apply_along(
                lambda p: measured_constant(p).log10_c_eff, network[profile], "layer"
            )
            theorem = network.log10_c.isel(layer=-1).mean("seed")
            text = f"log10 of the constant of the 3^L law, {name}"
            yield from labelled.compare_means(text, c, theorem, source="theorem")


def make_finding(results: xr.Dataset) -> Finding | None:
    """Reports the remaining residual of attention alone and of attention with skips of gain 1.

    Args:
        results: Over norm placement, weight scale, skip gain, variant, seed and layer.

    Returns:
        The finding; None if the results lack the published point or one of the two variants.
    """
    chosen = choose_published(results)
    if chosen is None or not {"san", "san_skip"} <= {*results.variant.values}:
        return None
    end = chosen.squeeze(AXES, drop=True).mean("seed").isel(layer=-1)
    lost = float((end.log10_residual - end.log10_size).sel(variant="san"))
    rate = float(end.local_rate.sel(variant="san"))
    point = describe_published(results)
    text = f"{point}: after" if point else "After"
    text += f" {results.sizes['layer'] - 1} layers attention alone keeps {power_of_ten(lost)} of "
    text += "the differences between tokens, with skips "
    text += f"{float(end.ratio.sel(variant='san_skip')):.2f}"
    if np.isfinite(rate):
        text += f": without them the logarithm grows by a factor of {rate:.2f} a layer"
    return Finding("depth", f"{text[0].upper()}{text[1:]}.")
