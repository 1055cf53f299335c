"""The results of run_lens: one Dataset, rows of its table and of its statements.

Results are over start, network, direction, position, seed (texts) and length. Arrays of the same
name are shares, sizes, cosines and ranks, as `influence.compare_kinds` has them.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import xarray as xr

from experiments.lab import Finding, labelled
from experiments.lens import influence
from experiments.trained.opened_networks import Network
from experiments.verdicts import Comparison, Row, TableRow, finite_or_none
from rank_collapse.report.intervals import describe_interval, mean_interval

EARLY = 0.13  # share of the layers after whose state the paths of statements start
MOST = 3  # attentions; a network must have more after that state, or nothing could be longer
PLACE = {"direction": "random", "position": "later"}  # of statements
AXES = ("start", "network", "seed", "direction", "position")
DIRECTIONS = {
    "random": "random direction",
    "state": "direction of the state",
    "next": "direction of the next token",
}
SUMMARIES = {
    "mean_length_frozen": "mean length, frozen",
    "mean_length_exact": "mean length, exact",
    "cancelled_frozen": "sizes of the parts over that of the sum, frozen",
    "cancelled_exact": "sizes of the parts over that of the sum, exact",
    "cosine": "cosine of frozen and exact",
    "size_ratio": "size of frozen over exact",
}


def join_networks(
    parts: Mapping[str, Mapping[str, np.ndarray]], networks: Sequence[Network], start: float
) -> xr.Dataset:
    """Joins the arrays of all networks, and adds mean lengths and the cancellation.

    Args:
        parts: {network: {"name/direction/position" or "rank": [texts, ...]}}.
        networks: The networks.
        start: Share of the layers after whose state paths start.
    """
    datasets = []
    for network in networks:
        arrays = dict(parts[network.label])
        ranks = arrays.pop("rank", None)
        dataset = labelled.make_dataset(arrays, ("direction", "position", "length"))
        num_texts, depth = dataset.sizes["seed"], network.source.config.depth
        dataset = dataset.assign_coords(
            length=np.arange(dataset.sizes["length"]), seed=np.arange(num_texts)
        )
        layer = influence.choose_layer(depth, start) + 1
        dataset["from_layer"] = ("seed", np.full(num_texts, float(layer)))
        if ranks is not None:
            values = np.full((num_texts, ranks.shape[1]), np.nan)
            values[: len(ranks)] = ranks[:num_texts]
            dataset["rank"] = xr.DataArray(
                values, {"distance": [*influence.DISTANCES]}, ("seed", "distance")
            )
        datasets.append(dataset)
    names = xr.Variable("network", [network.label for network in networks])
    joined = xr.concat(datasets, names, data_vars="all", join="outer")
    for kind in influence.KINDS:
        share, size = joined[f"share_{kind}"], joined[f"size_{kind}"]
        joined[f"mean_length_{kind}"] = (share * joined.length).sum("length", min_count=1)
        joined[f"cancelled_{kind}"] = size.sum("length", min_count=1)
    return joined


def select_early(results: xr.Dataset) -> xr.Dataset | None:
    """Selects the first measured start of statements; None where it was not measured."""
    if EARLY not in results.start:
        return None
    return results.sel(start=EARLY, drop=True)


def judge_claims(results: xr.Dataset, networks: Sequence[Network]) -> Iterator[Row]:
    """Tests the lengths of paths to later tokens, and the cosine of frozen and exact sums.

    Networks at their initialisation have no claims. Lengths of a network that has at most three
    attentions after the state are not tested, because they could not fail.

    Args:
        results: The results.
        networks: The networks and their texts.
    """
    early = select_early(results)
    if early is None:
        return
    for network in networks:
        if network.is_initialised:
            continue
        values = early.sel(network=network.label, **PLACE, drop=True)
        depth = network.source.config.depth
        can_be_longer = depth - 1 - influence.choose_layer(depth, EARLY) > MOST
        for statement, name, is_tested in (
            ("frozen lengths", "mean_length_frozen", can_be_longer),
            ("exact lengths", "mean_length_exact", can_be_longer),
            ("frozen direction", "cosine", True),
        ):
            if is_tested:
                yield from labelled.statement_rows(statement, values[name], network.label)


def compare_results(results: xr.Dataset, networks: Sequence[Network]) -> Iterator[Comparison]:
    """Lists means over texts: all measures of the paths in the statements, and cosines of other
    paths.

    Args:
        results: The results.
        networks: The networks and their texts.
    """
    for network in networks:
        all_points = results.sel(network=network.label, drop=True)
        for point, values in labelled.iterate_points(all_points[[*SUMMARIES]], "seed"):
            is_random = all(point[axis] == value for axis, value in PLACE.items())
            is_early = point["start"] == EARLY
            names = SUMMARIES if is_random and is_early else ("cosine",)
            place = f"{network.label}, from {point['start']:.0%} of the layers, "
            place += f"{point['position']} tokens, {DIRECTIONS[point['direction']]}"
            for name in names if is_random or is_early else ():
                draws = values[name].dropna("seed").values
                if not draws.size:
                    continue
                note = describe_interval(mean_interval(draws.tolist()))
                yield Comparison(f"{place}: {SUMMARIES[name]}", float(draws.mean()), note=note)
        for point, values in labelled.iterate_points(list_ranks(all_points), "seed"):
            rank = finite_or_none(values.mean())
            if rank is not None:
                yield Comparison(
                    f"{network.label}, from {point['start']:.0%} of the layers, distance "
                    f"{point['distance']}: effective rank of the Jacobian",
                    rank,
                    network.source.config.d_model,
                    source="width",
                )


def list_ranks(results: xr.Dataset) -> xr.DataArray:
    """Returns the ranks; none where they were not measured."""
    if "rank" in results:
        return results["rank"]
    empty = {"start": results.start, "distance": []}
    shape = (len(results.start), 0, results.sizes["seed"])
    return xr.DataArray(np.zeros(shape), empty, ("start", "distance", "seed"))


def make_rows(results: xr.Dataset) -> Iterator[TableRow]:
    """Makes a row for each direction and position, for each length of them, and of ranks."""
    yield from labelled.table_rows(results, AXES, ("from_layer", *SUMMARIES))
    columns = [f"{name}_{kind}" for name in ("share", "size") for kind in influence.KINDS]
    yield from labelled.table_rows(results, (*AXES, "length"), columns)
    if "rank" in results:
        yield from labelled.table_rows(results, ("start", "network", "seed", "distance"), ("rank",))


def make_finding(results: xr.Dataset, networks: Sequence[Network]) -> Finding | None:
    """Reports cosines and lengths in the trained networks, medians over networks.

    Args:
        results: The results.
        networks: The networks and their texts.

    Returns:
        The finding; None if there is no early state, or no trained network.
    """
    early = select_early(results)
    labels = [network.label for network in networks if not network.is_initialised]
    if early is None or not labels:
        return None
    means = early.sel(network=labels, **PLACE, drop=True).mean("seed")
    cosine, frozen, exact = (
        means[name] for name in ("cosine", "mean_length_frozen", "mean_length_exact")
    )
    return Finding(
        "cosine",
        f"Of the influence on later tokens, parts of the exact Jacobian have mean lengths from "
        f"{float(exact.min()):.2f} to {float(exact.max()):.2f} attentions in {len(labels)} "
        f"networks, frozen ones from {float(frozen.min()):.2f} to {float(frozen.max()):.2f}. The "
        f"cosine of the two sums is {float(cosine.min()):.2f} to {float(cosine.max()):.2f}.",
    )
