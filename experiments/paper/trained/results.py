"""The numbers of run_trained: by network, with intervals over texts, and rows of statements."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

import rank_collapse as rc
from experiments.paper.trained.measure import VARIANTS
from experiments.shell.statements import row_of
from experiments.shell.statements_trained import LOSS, RIGHT
from rank_collapse.report import Comparison
from rank_collapse.report.claims import Row, of_cases
from rank_collapse.report.intervals import mean_interval

LARGE, TIMES, SINK = 100, 1000, 0.3  # Sun et al. 2024; Gu et al. 2025
Found = Mapping[str, np.ndarray]  # Arrays [texts, ...] of one network, by name


def rate(log10_residual: np.ndarray) -> np.ndarray:
    """Change of log‖res‖ in the last layer over that in the layer before, [b]."""
    change = np.diff(np.asarray(log10_residual, np.float64), axis=1)
    return change[:, -1] / change[:, -2]


def short_paths(found: Found, longest: int) -> np.ndarray:
    """Loss above the whole network's, or share of right tokens below it, of paths recomputed of at
    most that length, [b], in units of what statement "trained short suffice" allows."""
    name, sign, unit = ("loss", 1, LOSS) if found["causal"][0] else ("right", -1, RIGHT)
    place = list(found["paths/lengths"][0]).index(longest)
    return sign * (found[f"paths/{name}_recomputed"][:, place] - found[f"paths/{name}"]) / unit


def chain_slope(found: Found) -> np.ndarray:
    """Slope over lengths 1 .. L of log10 of the median residual ratio of a path's product, [b]."""
    median = np.median(found["chains/residual"], axis=-1).astype(np.float64)
    logs = np.log10(np.maximum(median, np.finfo(np.float32).tiny))
    return np.polyfit(np.arange(logs.shape[1]), logs.T, 1)[0]


def scalars(found: Found, depth: int, num_heads: int) -> dict[str, np.ndarray]:
    """One number of each text, by what it says: [b]."""
    ratio = {name: found[f"log10_ratio/{name}"] for name in VARIANTS}
    numbers = {
        f"log10 residual ratio, {name}, last layer over input": a[:, -1] - a[:, 0]
        for name, a in ratio.items()
    }
    numbers["rate of attention alone"] = rate(found["log10_residual/alone"])
    numbers["rate with MLPs"] = rate(found["log10_residual/mlps"])
    if "sinks/first_column" in found:
        numbers["slope of chains, decades a length"] = chain_slope(found)
        sinks = found["sinks/first_column"] > SINK
        numbers["share of heads that are sinks"] = sinks.mean(axis=(1, 2))
        numbers["largest entry"] = found["spikes/largest"].max(axis=1)
        numbers["largest entry over the median"] = found["spikes/spike_entry"].max(axis=1)
        numbers["layer of it"] = found["spikes/spike_entry"].argmax(axis=1)
        most = found["spikes/spike_entry"].argmax(axis=1)[:, None]
        numbers["token of it"] = np.take_along_axis(found["spikes/spike_token"], most, 1)[:, 0]
    if "paths/loss" not in found:
        return numbers
    numbers["length of most paths"] = np.full(len(most), rc.count_paths(depth, num_heads).argmax())
    numbers["length of the largest residual"] = found["paths/log10_residual"].argmax(axis=1)
    for name, text in {"loss": "loss, nats", "right": "share of right tokens"}.items():
        numbers[f"{text}, whole network"] = found[f"paths/{name}"]
        for kind in ("frozen", "recomputed"):
            by_length = zip(found["paths/lengths"][0], found[f"paths/{name}_{kind}"].T, strict=True)
            for k, values in by_length:
                numbers[f"{text}, paths of up to {k} heads, {kind}"] = values
    return numbers


def rows_of(results: Mapping[str, Found], setup: Any) -> Iterator[dict[str, Any]]:
    """One row a network and measure, and layer or length where it has them: mean and interval."""
    for network in setup.networks:
        found = results[network.label]
        config = network.source.config
        columns = {n: a[:, None] for n, a in scalars(found, config.depth, config.num_heads).items()}
        columns |= {n: a for n, a in found.items() if a.ndim == 2 and n.startswith("log10_ratio/")}
        columns |= {n: a for n, a in found.items() if a.ndim == 2 and n.startswith("spikes/")}
        for name, values in columns.items():
            for layer, column in enumerate(values.T):
                known = column[np.isfinite(column)].astype(float)
                low, high = mean_interval(known)
                yield {
                    "network": network.label,
                    "measure": name,
                    "layer": layer if values.shape[1] > 1 else "",
                    "mean": float(known.mean()) if known.size else "",
                    "low": low if np.isfinite(low) else "",
                    "high": high if np.isfinite(high) else "",
                    "texts": len(known),
                }


def compare(results: Mapping[str, Found], setup: Any) -> Iterator[Comparison]:
    """The numbers of each network, means over texts with 95 % intervals."""
    for row in rows_of(results, setup):
        if row["layer"] == "":
            ends = f"{row['low']:.4g} to {row['high']:.4g}" if row["low"] != "" else "all equal"
            note = f"{ends} over {row['texts']} texts"
            yield Comparison(f"{row['network']}: {row['measure']}", row["mean"], note=note)


def claims(results: Mapping[str, Found], setup: Any) -> Iterator[Row]:
    """The statements on trained weights; draws are texts of one network."""
    for network in setup.networks:
        label, found, config = network.label, results[network.label], network.source.config
        own = scalars(found, config.depth, config.num_heads)
        left = {
            name: own[f"log10 residual ratio, {name}, last layer over input"] for name in VARIANTS
        }
        if config.mask == "none":
            yield row_of("trained rate", label, own["rate of attention alone"])
            yield row_of("trained mlp rate", label, own["rate with MLPs"])
        yield row_of("trained skips", label, left["skips"] - left["alone"])
        yield row_of("trained skips stop", label, 10 ** left["skips"])
        yield row_of("trained collapse", label, 1 - 10 ** left["alone"])
        if "chains/residual" in found:
            yield row_of("trained chains", label, chain_slope(found))
        if "paths/loss" in found:
            largest, most = (
                own["length of " + what] for what in ("the largest residual", "most paths")
            )
            yield row_of("trained short at first", label, largest - most)
            yield row_of("trained short suffice", label, short_paths(found, config.depth // 4))
        if found["causal"][0]:
            sizes = found["spikes/largest"] / LARGE, found["spikes/spike_entry"] / TIMES
            yield row_of("trained sinks", label, own["share of heads that are sinks"])
            yield row_of("trained spikes", label, np.minimum(*sizes).max(axis=1))
        for key, measure, against in (
            ("trained lemma", "lemma", lambda a: a > 0),
            ("trained bounds", "head", lambda a: a < 0),
        ):
            kinds = [kind for kind in ("whole", "alone") if f"bounds/{kind}/head" in found]
            cases = [
                against(found[f"bounds/{kind}/{measure}"][found[f"bounds/{kind}/admissible"]])
                for kind in kinds
            ]
            if cases:
                cases = np.concatenate(cases)
                yield of_cases(key, label, int(cases.sum()), len(cases), setup.options.num_few)
