"""The numbers of run_trained: by network, with intervals over texts, and rows of statements."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

import rank_collapse as rc
from experiments.lab.experiment import Finding
from experiments.lab.statements import make_row
from experiments.paper.trained.measure import VARIANTS
from experiments.verdicts import Comparison
from experiments.verdicts.claims import Row, cases_row
from rank_collapse.pretrained.path_lengths import compute_length_laws
from rank_collapse.report.intervals import Interval, mean_interval, share_interval

LOSS, RIGHT = 0.05, 0.02  # nats, share of tokens: within which short paths suffice
LARGE, TIMES, SINK = 100, 1000, 0.3  # Sun et al. 2024; Gu et al. 2025
Found = Mapping[str, np.ndarray]  # Arrays [texts, ...] of one network, by name


def rate(log10_residual: np.ndarray) -> np.ndarray:
    """Compute `rc.local_rate` at the last layer, [b]."""
    return rc.local_rate(np.asarray(log10_residual, np.float64))[:, -1]


def chain_slope(found: Found) -> np.ndarray:
    """Slope over lengths 1 .. L of log10 of the median residual ratio of a path's product, [b]."""
    median = np.median(found["chains/residual"], axis=-1).astype(np.float64)
    logs = np.log10(np.maximum(median, np.finfo(np.float32).tiny))
    return np.polyfit(np.arange(logs.shape[1]), logs.T, 1)[0]


def scalars(found: Found, config: rc.TransformerConfig) -> dict[str, np.ndarray]:
    """One number of each text, [b], by what it says."""
    numbers = {
        f"log10 residual ratio, {name}, last layer over input": a[:, -1] - a[:, 0]
        for name, a in ((name, found[f"log10_ratio/{name}"]) for name in VARIANTS)
    }
    numbers["rate of attention alone"] = rate(found["log10_residual/alone"])
    numbers["rate with MLPs"] = rate(found["log10_residual/mlps"])
    if "chains/residual" not in found:
        return numbers
    entry = found["spikes/spike_entry"]
    first, any_key = found["sinks/first_column"], found["sinks/largest_column"]
    numbers |= {
        "slope of chains, decades a length": chain_slope(found),
        "share of heads with a sink at the first token": (first > SINK).mean(axis=(1, 2)),
        "share of heads with a sink anywhere": (any_key > SINK).mean(axis=(1, 2)),
        "largest entry": found["spikes/largest"].max(axis=1),
        "largest entry over the median": entry.max(axis=1),
        "layer of it": entry.argmax(axis=1),
        "token of it": found["spikes/spike_token"][range(len(entry)), entry.argmax(axis=1)],
    }
    if "paths/loss" not in found:
        return numbers
    counts = np.array(rc.count_paths(config.depth, config.num_heads), float)
    laws = length_laws(found, config)
    lengths = np.arange(config.depth + 1)
    numbers |= {f"mean path length, {name}": law @ lengths for name, law in laws.items()}
    numbers["path length that the loss needs"] = needed_lengths(found)
    numbers["length of most paths"] = np.full(len(entry), counts.argmax())
    numbers["length of the largest residual"] = found["paths/log10_residual"].argmax(axis=1)
    for name, text in {"loss": "loss, nats", "right": "share of right tokens"}.items():
        numbers[f"{text}, whole network"] = found[f"paths/{name}"]
        for kind in ("frozen", "recomputed"):
            values = found[f"paths/{name}_{kind}"].T
            for k, own in zip(found["paths/lengths"][0], values, strict=True):
                numbers[f"{text}, up to {k} heads, {kind}"] = own
    return numbers


def length_laws(found: Found, config: rc.TransformerConfig) -> dict[str, np.ndarray]:
    """Computes {weighting: [b, L + 1]}, the share of each path length."""
    shares, sizes = found["paths/attention_share"], found["paths/path_size"]
    return compute_length_laws(config.num_heads, shares, sizes)


def needed_lengths(found: Found) -> np.ndarray:
    """Returns the least measured k from which on paths of up to k heads have the loss, [b].

    Within `LOSS` nats, attention frozen; NaN where the longest measured paths do not suffice.
    """
    lengths = found["paths/lengths"][0]
    is_far = np.abs(found["paths/loss_frozen"] - found["paths/loss"][:, None]) >= LOSS
    after_last_far = is_far.shape[1] - np.argmax(is_far[:, ::-1], axis=1)
    first = np.where(is_far.any(axis=1), after_last_far, 0)
    return np.append(lengths, np.nan)[first]


def interval_of(name: str, values: np.ndarray) -> Interval:
    """Computes the interval of a mean over texts; that of a share does not leave [0, 1].

    Args:
        name: The measure, as `scalars` names it.
        values: One of each text.
    """
    return share_interval(values) if name.startswith("share of") else mean_interval(values)


def rows_of(results: Mapping[str, Found], setup: Any) -> Iterator[dict[str, Any]]:
    """One row a network and measure, and layer where it has them: mean and interval over texts."""
    for network in setup.networks:
        found = results[network.label]
        columns = {n: a[:, None] for n, a in scalars(found, network.source.config).items()}
        by_layer = ("log10_ratio/", "random/log10_ratio/", "spikes/")
        columns |= {n: a for n, a in found.items() if n.startswith(by_layer)}
        for name, values in columns.items():
            for layer, column in enumerate(np.asarray(values, np.float64).T):
                known = column[np.isfinite(column)]
                ends = (v if np.isfinite(v) else "" for v in interval_of(name, known))
                yield {
                    "network": network.label,
                    "measure": name,
                    "layer": layer if values.shape[1] > 1 else "",
                    "mean": known.mean() if known.size else "",
                    **dict(zip(("low", "high"), ends, strict=True)),
                    "texts": len(known),
                }


def compare(results: Mapping[str, Found], setup: Any) -> Iterator[Comparison]:
    """The numbers of each network, means over texts with 95 % intervals."""
    for row in rows_of(results, setup):
        if row["layer"] == "":
            ends = "{low:.4g} to {high:.4g}".format(**row) if row["low"] != "" else "all equal"
            note = f"{ends}, {row['texts']} texts"
            yield Comparison(f"{row['network']}: {row['measure']}", row["mean"], note=note)


def claims(results: Mapping[str, Found], setup: Any) -> list[Row]:
    """The statements on trained weights; draws are texts of one network."""
    rows = []
    for network in setup.networks:
        label, found, config = network.label, results[network.label], network.source.config
        own, causal = scalars(found, config), config.mask == "causal"
        left = {n: own[f"log10 residual ratio, {n}, last layer over input"] for n in VARIANTS}
        draws = {
            "trained skips": left["skips"] - left["alone"],
            "trained skips stop": 10 ** left["skips"],
            "trained collapse": 1 - 10 ** left["alone"],
        }
        if not causal:
            draws["trained rate"] = own["rate of attention alone"]
            draws["trained mlp rate"] = own["rate with MLPs"]
        if "chains/residual" in found:
            draws["trained chains"] = own["slope of chains, decades a length"]
        if "paths/loss" in found:
            short = f"up to {config.depth // 4} heads, recomputed"
            name, unit = ("loss, nats", LOSS) if causal else ("share of right tokens", -RIGHT)
            more = own[f"{name}, {short}"] - own[f"{name}, whole network"]
            draws["trained short suffice"] = more / unit
            largest, most = own["length of the largest residual"], own["length of most paths"]
            draws["trained short at first"] = largest - most
        if causal and "sinks/first_column" in found:
            sizes = found["spikes/largest"] / LARGE, found["spikes/spike_entry"] / TIMES
            draws["trained sinks"] = own["share of heads with a sink at the first token"]
            draws["trained spikes"] = np.minimum(*sizes).max(axis=1)
        rows += [make_row(key, label, values) for key, values in draws.items()]
        if "bounds/alone/head" in found:
            kinds, draws = ("whole", "alone"), len(found["bounds/alone/head"])
            where = np.stack([found[f"bounds/{kind}/admissible"] for kind in kinds])
            for key, measure, sign in (
                ("trained lemma", "lemma", 1),
                ("trained bounds", "head", -1),
            ):
                excess = sign * np.stack([found[f"bounds/{kind}/{measure}"] for kind in kinds])
                cases = excess[where] > 0
                count = int(cases.sum())
                rows.append(cases_row(key, label, count, cases.size, draws))
    return rows


def finding(results: Mapping[str, Found], setup: Any) -> Finding | None:
    """The two-panel figure: the fall of attention alone, and how short paths may be."""
    alone = [n.label for n in setup.networks if n.source.config.mask == "none"]
    rates = [np.median(rate(results[label]["log10_residual/alone"])) for label in alone]
    losses = [found for found in results.values() if "paths/loss" in found]
    if not rates or not losses:
        return None
    more = [found["paths/loss_recomputed"][:, -1] - found["paths/loss"] for found in losses]
    near, most = sum(a.mean() < LOSS for a in more), max(a["paths/lengths"].max() for a in losses)
    return Finding(
        "trained",
        f"In {len(rates)} trained networks without a causal mask the logarithm of the residual of "
        f"attention alone grows {min(rates):.2f} to {max(rates):.2f} times in the last layer "
        f"(median text). Paths through at most {most} heads have the whole loss within {LOSS:g} "
        f"nats in {near} of {len(losses)} networks that predict tokens.",
    )
