"""What run_collapse says of its measurements: statements, published values, the finding."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import xarray as xr

from experiments.lab import labelled
from experiments.lab.experiment import Finding
from experiments.lab.labelled import apply_along, compare_means, iterate_points, statement_rows
from experiments.paper.collapse.cubic_law import measured_constant
from experiments.paper.collapse.figures import TIGHTNESS, as_published, first, slowed
from experiments.verdicts.claims import Row, cases_row
from experiments.verdicts.page import Comparison
from experiments.verdicts.statistics import power_law_wins
from rank_collapse.pretrained.published import PUBLISHED, published_curves

PUBLISHED_NAMES = {
    "san": "SAN",
    "san_mlp": "SAN+MLP",
    "san_skip": "SAN+skip",
    "transformer": "Transformer",
}


def above(found: xr.Dataset, bound: str) -> xr.DataArray:
    """How many layers of a network are above a bound of theirs.

    Logarithms in float32 are known to about 1e-5 of their size.
    """
    margin = 1e-3 + 1e-5 * np.abs(found.log10_residual)
    return (found.log10_residual > found[bound] + margin).sum(["seed", "layer"])


def claims(found: xr.Dataset, setup: Any) -> Iterator[Row]:
    """Rate, bounds, skips, MLPs and norms, on each norm placement and scale of the weights, with
    the first of the skips' gains."""
    found = found.isel(skip_gain=0, drop=True)
    relative = found.log10_residual - found.log10_size
    last, start = relative.isel(layer=-1, drop=True), relative.isel(layer=0, drop=True)
    rate, left = found.local_rate.isel(layer=-1, drop=True), 10.0 ** (last - start)
    falls, own = apply_along(power_law_wins, 10.0**relative, "layer"), set(found.variant.values)
    # Without skips post- and pre-norm are one network up to an outer norm: the row of post-norm, as
    # published, is that of both.
    once = [
        n
        for n in found.norm_placement.values
        if not (n == "pre" and "post" in found.norm_placement)
    ]
    plain, normed = ([n for n in once if (n == "none") is is_plain] for is_plain in (True, False))
    for key, values, variant, norms, what in (
        ("rate", rate, "san", plain, ""),
        ("norm", rate, "san", normed, ""),
        ("mlp rate", rate, "san_mlp", once, ""),
        ("skips stop", left, "san_skip", found.norm_placement, ""),
        ("mlps stop", left, "transformer", once, "skips and MLPs"),
        ("mlps stop", left, "san_mlp", once, "MLPs alone"),
        ("law of the fall", falls, "san_skip", found.norm_placement, ""),
    ):
        if variant in own:
            yield from statement_rows(
                key, values.sel(variant=variant, norm_placement=norms, drop=True), what
            )
    for key, variant in (("skips", "san_skip"), ("mlps slow", "san_mlp")):
        if {"san", variant} <= own:
            with_, without = (
                last.sel(variant=v, norm_placement=once, drop=True) for v in (variant, "san")
            )
            yield from statement_rows(key, with_ - without)
    for key, variant in (("heads bound", "san"), ("mlp bound", "san_mlp")):
        if variant in own and "admissible" in found:
            here = found.sel(variant=variant, drop=True)
            here = here.where(here.admissible > 0).isel(layer=slice(1, None))
            cases = here.admissible.count(["seed", "layer"])
            broken = above(here, "log10_published_bound")
            covered = found.admissible.sel(variant=variant).notnull().any(["seed", "layer"])
            for point, count in iterate_points(broken):
                if covered.sel(point):
                    where = f"layers of {variant}, {labelled.describe_point(point)}"
                    total = int(cases.sel(point))
                    yield cases_row(key, where, int(count), total, found.sizes["seed"])
    if "swept" in found and "san" in own:
        raised = slowed(found).dropna("norm_placement", how="all")
        yield from statement_rows(
            "mlp gain", apply_along(partial(crossing, raised.mlp_gain.values), raised, "mlp_gain")
        )
    if "swept" in found and "san" in own and 1 in found.mlp_gain:
        # Post-norm gives all states one size up to that of their mean, so that differences of
        # residuals are those of their ratios.
        as_published = found.swept.sel(
            mlp_gain=1, norm_placement=[n for n in once if n not in ("none", "pre")]
        )
        gained = as_published - found.log10_residual.sel(variant="san", drop=True)
        what = "MLPs with their own skip, as published"
        yield from statement_rows("mlps slow", gained.isel(layer=-1), what)
        change = as_published.isel(layer=-1) - as_published.isel(layer=0)
        yield from statement_rows("mlps stop", 10.0**change, what)


def crossing(gains: np.ndarray, raised: np.ndarray) -> np.ndarray:
    """The least gain [...] from which on MLPs slow the collapse; NaN for none.

    Between the gains that were swept the change [..., g] is taken as linear in the gain's
    logarithm; gains at which the residual is no number are left out.
    """
    found = np.full(raised.shape[:-1], np.nan)
    for place in np.ndindex(found.shape):
        known = np.isfinite(raised[place])
        logs, values = np.log(gains[known]), raised[place][known]
        up = np.flatnonzero((values[:-1] < 0) & (values[1:] >= 0))
        if len(up):
            g, (a, b) = logs[up[-1] : up[-1] + 2], values[up[-1] : up[-1] + 2]
            found[place] = np.exp(g[0] - a * (g[1] - g[0]) / (b - a))
    return found


def compare(found: xr.Dataset, setup: Any) -> Iterator[Comparison]:
    """Residual ratios beside BERT's published curve, and what only the logarithms show, at the
    first of the swept values."""
    found = first(found)
    end, depth = found.isel(layer=-1), found.sizes["layer"] - 1
    curves = published_curves(PUBLISHED["bert-base-cased"], 12)["init"]
    theirs = {v: curves[PUBLISHED_NAMES[v]] for v in found.variant.values}
    ends = [curve[min(depth, len(curve) - 1)] for curve in theirs.values()]
    published = xr.DataArray(ends, {"variant": [*theirs]})
    note = "published: BERT at initialisation (768 wide, 12 heads, post-norm)"
    yield from compare_means(f"residual ratio after {depth} layers", end.ratio, published, note)
    yield from compare_means("log10 of the residual at the last layer", end.log10_residual)
    yield from compare_means("the same in plain arithmetic", end.plain_log10_residual)
    if "admissible" in found:
        here = found.where(found.admissible > 0).isel(layer=slice(1, None))
        # The stack's bound needs the condition in every layer so far, a layer's in that one only.
        so_far = here.where(here.admissible.cumprod("layer", skipna=False) > 0)
        broken = above(here, "log10_layer_bound") + above(so_far, "log10_bound")
        text = "layers and depths above the bound with sums over heads (derived here)"
        yield from compare_means(text, broken.expand_dims("seed"), 0)
        tightness = found[list(TIGHTNESS)].isel(layer=slice(1, None)).to_dataarray("bound")
        free = (tightness.drop_sel(bound="tightness_paper") < -1e-3).sum(["bound", "layer"])
        yield from compare_means(
            "layers above a bound that needs no condition (derived here)", free, 0
        )
        text = "powers of ten above what is bounded, median over layers"
        yield from compare_means(text, tightness.median("layer"))
    if "log10_c" in found:
        for name, profile in (("", "log10_residual"), (", in closed form", "log10_cubic")):
            c = apply_along(lambda own: measured_constant(own).log10_c_eff, found[profile], "layer")
            text = f"log10 c_eff of the 3^L law{name}, beside the theorem's"
            yield from compare_means(text, c, end.log10_c.mean("seed"))


def finding(found: xr.Dataset, setup: Any) -> Finding | None:
    """What is left of attention alone and of attention with skips."""
    own = as_published(found).squeeze("norm_placement").mean("seed").isel(layer=-1)
    if not {"san", "san_skip"} <= {*own.variant.values}:
        return None
    lost = float((own.log10_residual - own.log10_size).sel(variant="san"))
    return Finding(
        "depth",
        f"After {found.sizes['layer'] - 1} layers attention alone keeps "
        f"10^{float(f'{lost:.2g}'):,.0f} of the differences between tokens, with "
        f"skips {float(own.ratio.sel(variant='san_skip')):.2f}: without them the logarithm grows "
        f"by a factor of {float(own.local_rate.sel(variant='san')):.2f} a layer.",
    )
