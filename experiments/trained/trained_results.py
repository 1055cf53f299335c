"""The numbers of run_trained: by network, with intervals over texts, and rows of statements."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

import rank_collapse as rc
from experiments.lab import Finding
from experiments.trained.opened_networks import Network
from experiments.trained.text_measures import ABLATED, AS_PUBLISHED
from experiments.verdicts import Comparison, Row, TableRow, cases_row, make_row
from experiments.verdicts.share_intervals import share_interval
from rank_collapse.pretrained.report import compute_length_laws
from rank_collapse.report.intervals import Interval, mean_interval
from rank_collapse.report.wording import words

LOSS, RIGHT = 0.05, 0.02  # nats, share of tokens: within which short paths suffice
LARGE, TIMES, SINK = 100, 1000, 0.3  # Sun et al. 2024; Gu et al. 2025
Arrays = Mapping[str, np.ndarray]  # Arrays [texts, ...] of one network, by name


def final_rate(log10_residual: np.ndarray) -> np.ndarray:
    """Compute `rc.local_rate` at the last layer, [b]."""
    return rc.local_rate(np.asarray(log10_residual, np.float64))[:, -1]


def chain_slope(arrays: Arrays) -> np.ndarray:
    """Fits the slope over lengths 1 .. L of log10 of the median residual ratio of a path's product,
    [b].
    """
    median = np.median(arrays["chains/residual"], axis=-1).astype(np.float64)
    logs = np.log10(np.maximum(median, np.finfo(np.float32).tiny))
    return np.polyfit(np.arange(logs.shape[1]), logs.T, 1)[0]


def text_measures(arrays: Arrays, config: rc.TransformerConfig) -> dict[str, np.ndarray]:
    """Computes one number of each text, {measure in words: [b]}.

    A network that reads no tokens has only residuals; a network that predicts none has no paths.

    Args:
        arrays: Arrays of one network, as `measure` names them: "spikes/spike_entry" [b, L + 1].
        config: The network.
    """
    numbers = {
        f"log10 residual ratio, {name_ablation(ablation)}, last layer over input": change
        for ablation, change in ratio_changes(arrays).items()
    }
    numbers["rate of attention alone"] = final_rate(arrays["log10_residual/alone"])
    numbers["rate with MLPs"] = final_rate(arrays["log10_residual/mlps"])
    if "chains/residual" not in arrays:
        return numbers
    # [b, L + 1]: the largest |entry| of a state over its median; [b, L, h]: attention to one key
    over_median = arrays["spikes/spike_entry"]
    first_key, most_attended = arrays["sinks/first_column"], arrays["sinks/largest_column"]
    numbers |= {
        "slope of chains, decades a length": chain_slope(arrays),
        "share of heads with a sink at the first token": (first_key > SINK).mean(axis=(1, 2)),
        "share of heads with a sink anywhere": (most_attended > SINK).mean(axis=(1, 2)),
        "largest entry": arrays["spikes/largest"].max(axis=1),
        "largest entry over the median": over_median.max(axis=1),
        "layer of the largest ratio of entry to median": over_median.argmax(axis=1),
        "token of the largest ratio of entry to median": arrays["spikes/spike_token"][
            range(len(over_median)), over_median.argmax(axis=1)
        ],
    }
    if "paths/loss" not in arrays:
        return numbers
    counts = np.array(rc.count_paths(config.depth, config.num_heads), float)
    laws = length_laws(arrays, config)
    lengths = np.arange(config.depth + 1)
    numbers |= {f"mean path length, {name}": law @ lengths for name, law in laws.items()}
    numbers["path length that the loss needs"] = needed_lengths(arrays)
    numbers["length of most paths"] = np.full(len(over_median), counts.argmax())
    numbers["length of the largest residual"] = arrays["paths/log10_residual"].argmax(axis=1)
    for name, text in {"loss": "loss, nats", "right": "share of right tokens"}.items():
        numbers[f"{text}, full model"] = arrays[f"paths/{name}"]
        for kind in ("frozen", "recomputed"):
            values = arrays[f"paths/{name}_{kind}"].T
            for k, measure in zip(arrays["paths/lengths"][0], values, strict=True):
                numbers[f"{text}, up to {k} heads, {kind}"] = measure
    return numbers


def name_ablation(ablation: str) -> str:
    """Puts an ablation in words: "attention and MLPs, as published"."""
    name, *reading = ablation.split(", ")
    return ", ".join([words(ABLATED[name]), *reading])


def ratio_changes(arrays: Arrays) -> dict[str, np.ndarray]:
    """Computes {ablation: [b]}, log10 of the last layer's residual ratio over the input's."""
    prefix = "log10_ratio/"
    return {
        name.removeprefix(prefix): ratios[:, -1] - ratios[:, 0]
        for name, ratios in arrays.items()
        if name.startswith(prefix)
    }


def length_laws(arrays: Arrays, config: rc.TransformerConfig) -> dict[str, np.ndarray]:
    """Computes {weighting: [b, L + 1]}, the share of each path length."""
    shares, sizes = arrays["paths/attention_share"], arrays["paths/path_size"]
    return compute_length_laws(config.num_heads, shares, sizes)


def needed_lengths(arrays: Arrays) -> np.ndarray:
    """Returns the least measured k from which paths of up to k heads have the full model's loss,
    [b].

    The loss is within `LOSS` nats, with frozen attention; NaN if the longest measured paths do not
    suffice.
    """
    lengths = arrays["paths/lengths"][0]
    is_far = np.abs(arrays["paths/loss_frozen"] - arrays["paths/loss"][:, None]) >= LOSS
    after_last_far = is_far.shape[1] - np.argmax(is_far[:, ::-1], axis=1)
    first = np.where(is_far.any(axis=1), after_last_far, 0)
    return np.append(lengths, np.nan)[first]


def measure_interval(name: str, values: np.ndarray) -> Interval:
    """Computes the interval of a mean over texts; the interval of a share stays in [0, 1].

    Args:
        name: The measure, as `text_measures` names it.
        values: One value for each text.
    """
    return share_interval(values) if name.startswith("share of") else mean_interval(values)


def make_rows(results: Mapping[str, Arrays], networks: Sequence[Network]) -> Iterator[TableRow]:
    """Makes a row for each network and measure, and layer where it has them.

    Args:
        results: Arrays by network.
        networks: The networks.
    """
    for network in networks:
        arrays = results[network.label]
        columns = {n: a[:, None] for n, a in text_measures(arrays, network.source.config).items()}
        by_layer = ("log10_ratio/", "random/log10_ratio/", "spikes/")
        columns |= {n: a for n, a in arrays.items() if n.startswith(by_layer)}
        for name, values in columns.items():
            for layer, column in enumerate(np.asarray(values, np.float64).T):
                numbers = column[np.isfinite(column)]
                ends = (v if np.isfinite(v) else "" for v in measure_interval(name, numbers))
                yield {
                    "network": network.label,
                    "measure": name,
                    "layer": layer if values.shape[1] > 1 else "",
                    "mean": numbers.mean() if numbers.size else "",
                    **dict(zip(("low", "high"), ends, strict=True)),
                    "texts": len(numbers),
                }


def compare_results(
    results: Mapping[str, Arrays], networks: Sequence[Network]
) -> Iterator[Comparison]:
    """Lists the numbers of each network, means over texts with 95 % intervals."""
    for row in make_rows(results, networks):
        if row["layer"] == "":
            ends = "{low:.4g} to {high:.4g}".format(**row) if row["low"] != "" else "all equal"
            note = f"{ends}, {row['texts']} texts"
            yield Comparison(f"{row['network']}: {row['measure']}", row["mean"], note=note)


def judge_claims(results: Mapping[str, Arrays], networks: Sequence[Network]) -> list[Row]:
    """Tests the statements on trained weights; draws are texts of one network.

    Args:
        results: Arrays by network.
        networks: The networks.
    """
    rows = []
    for network in networks:
        label, arrays, config = network.label, results[network.label], network.source.config
        measures, causal = text_measures(arrays, config), config.mask == "causal"
        rows += judge_ablations(label, arrays, causal)
        draws = {} if causal else {"trained mlp rate": measures["rate with MLPs"]}
        if "chains/residual" in arrays:
            draws["trained chains"] = measures["slope of chains, decades a length"]
        if "paths/loss" in arrays:
            short = f"up to {config.depth // 4} heads, recomputed"
            name, unit = ("loss, nats", LOSS) if causal else ("share of right tokens", -RIGHT)
            excess = measures[f"{name}, {short}"] - measures[f"{name}, full model"]
            draws["trained short suffice"] = excess / unit
            largest = measures["length of the largest residual"]
            draws["trained short at first"] = largest - measures["length of most paths"]
        if causal and "sinks/first_column" in arrays:
            sizes = arrays["spikes/largest"] / LARGE, arrays["spikes/spike_entry"] / TIMES
            draws["trained sinks"] = measures["share of heads with a sink at the first token"]
            draws["trained spikes"] = np.minimum(*sizes).max(axis=1)
        rows += [make_row(key, label, values) for key, values in draws.items()]
        if "bounds/alone/head" in arrays:
            kinds, num_texts = ("whole", "alone"), len(arrays["bounds/alone/head"])
            is_admissible = np.stack([arrays[f"bounds/{kind}/admissible"] for kind in kinds])
            for key, measure, sign in (
                ("trained lemma", "lemma", 1),
                ("trained bounds", "head", -1),
            ):
                excess = sign * np.stack([arrays[f"bounds/{kind}/{measure}"] for kind in kinds])
                cases = excess[is_admissible] > 0
                count = int(cases.sum())
                rows.append(cases_row(key, label, count, cases.size, num_texts))
    return rows


def judge_ablations(label: str, arrays: Arrays, causal: bool) -> list[Row]:
    """Tests the claims about attention alone and with skips, in each reading of these ablations.

    Args:
        label: Label of the network.
        arrays: Arrays of the network.
        causal: Whether its attention is causal; its rate is then not tested.
    """
    changes, rows = ratio_changes(arrays), []
    readings = {"": label}
    if "skips" + AS_PUBLISHED in changes:
        readings = {"": f"{label}, as the text says", AS_PUBLISHED: f"{label}{AS_PUBLISHED}"}
    for reading, setting in readings.items():
        attention_alone, skips = changes["alone" + reading], changes["skips" + reading]
        draws = {
            "trained skips": skips - attention_alone,
            "trained skips stop": 10**skips,
            "trained collapse": 1 - 10**attention_alone,
        }
        if not causal:
            draws["trained rate"] = final_rate(arrays[f"log10_residual/alone{reading}"])
        rows += [make_row(key, setting, values) for key, values in draws.items()]
    return rows


def make_finding(results: Mapping[str, Arrays], networks: Sequence[Network]) -> Finding | None:
    """Reports how attention alone falls, and how short paths may be: the two panels of the figure.

    Args:
        results: Arrays by network.
        networks: The networks.

    Returns:
        The finding; None if no encoder, or no loss of paths, was measured.
    """
    encoders = [n.label for n in networks if n.source.config.mask == "none"]
    rates = [np.median(final_rate(results[label]["log10_residual/alone"])) for label in encoders]
    losses = [arrays for arrays in results.values() if "paths/loss" in arrays]
    if not rates or not losses:
        return None
    excess = [arrays["paths/loss_recomputed"][:, -1] - arrays["paths/loss"] for arrays in losses]
    num_near = sum(difference.mean() < LOSS for difference in excess)
    most_heads = max(arrays["paths/lengths"].max() for arrays in losses)
    return Finding(
        "trained",
        f"In {len(rates)} trained networks without a causal mask the logarithm of the residual of "
        f"attention alone grows {min(rates):.2f} to {max(rates):.2f} times in the last layer "
        f"(median text). Paths through at most {most_heads} heads have the whole loss within "
        f"{LOSS:g} nats in {num_near} of {len(losses)} networks that predict tokens.",
    )
