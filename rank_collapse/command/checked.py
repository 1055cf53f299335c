"""The measurements of a checkpoint: its numbers by layer, and its verdict in a sentence."""

import shlex
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rank_collapse import __version__, pretrained
from rank_collapse.command.inputs import Inputs, Opened
from rank_collapse.measures.listings import Spike
from rank_collapse.measures.profiles import Profile
from rank_collapse.measures.rounding import rounding_limit
from rank_collapse.measures.table import MEASURES
from rank_collapse.pretrained.report import BY_NORM, mean_lengths, tabulate_lengths
from rank_collapse.printed import escape_text, format_count

# Means over the heads: {name in `measure_heads`: on the page}.
ATTENTION_LABELS = {
    "entropy": "attention entropy, nats",
    "first_column": "attention on the first token",
    "largest_column": "attention on the token with most",
}
WHOLE, ALONE = "full model", "attention alone"  # SAN in the paper
READ = "what attention reads"  # N(x), after the last layer the output
NETWORKS = (WHOLE, READ, ALONE)
STATE_MEASURES = (
    "token_cosine",
    "effective_rank",
    "spike_entry",
    "spike_norm",
    "spike_share",
    "residual_spike",
    "bulk_ratio",
)
LAST = f"residual ratio after the last layer, {WHOLE}"
FINAL = "residual ratio after the final norm"
LAST_ALONE = f"residual ratio after the last layer, {ALONE}"
COLLAPSED = MEASURES["residual_ratio"].alarm.value
FIRST_LAYER = f"first layer below {COLLAPSED:g}, {ALONE}"
# {kind of published curves: how they are introduced}
PUBLISHED_KINDS = {
    "pretrained": "published of trained models: ",
    "init": "published of random weights: ",
}
MAX_SPIKES = 8  # rows of the list of massive activations


class Checked(NamedTuple):
    """A checkpoint as it was measured."""

    opened: Opened
    inputs: Inputs
    report: pretrained.CheckpointReport

    @property
    def networks(self) -> dict[str, Profile]:
        """Return {the full model, what its attention reads, its attention alone: profile}."""
        states = self.report.states
        profiles = (states["Transformer"], self.report.read, states["SAN"])
        return dict(zip(NETWORKS, profiles, strict=True))

    def describe(self, command: Sequence[str]) -> dict[str, object]:
        """Return the object to write as JSON."""
        return describe_measurement(self.opened, self.inputs, command) | {
            "inputs": self.inputs.counts,
            "verdict": self.write_verdict(),
            "numbers": self.headline_numbers(),
            "upper_bounds": sorted(self.upper_bounds()),
            "one_token": self.find_one_token_layers(),
            "path_lengths": tabulate_lengths(self.length_laws),
            "spikes": self.spike_rows(),
        }

    def mean_ratio(self, network: str, layer: int) -> float:
        """Compute the mean residual ratio over texts, or a bound for it where rounding decides all
        of them.

        Args:
            network: One of `NETWORKS`.
            layer: Index of a state; −1 for the last.
        """
        if self.is_bound(network, layer):
            return float(rounding_limit(self.opened.source.weights.dtype))
        return float(self.networks[network]["residual_ratio"][:, layer].mean())

    def is_bound(self, network: str, layer: int) -> bool:
        """Check whether rounding decides the ratio of all texts; the true ratio is then at most
        `mean_ratio`."""
        return bool(self.networks[network].rounding[:, layer].all())

    def format_ratio(self, network: str, layer: int) -> str:
        """Format the ratio in three digits, with "≤" before a bound."""
        sign = "≤ " if self.is_bound(network, layer) else ""
        return f"{sign}{self.mean_ratio(network, layer):.3g}"

    def layer_means(self) -> dict[str, np.ndarray]:
        """Compute means over texts [L + 1] by measure; NaN at layer 0, which has no attention."""
        networks = self.networks
        columns = {
            **{f"residual ratio, {n}": networks[n]["residual_ratio"] for n in NETWORKS},
            **{m.replace("_", " "): networks[WHOLE][m] for m in STATE_MEASURES},
        }
        means = {name: np.asarray(values.mean(axis=0)) for name, values in columns.items()}
        for measure, label in ATTENTION_LABELS.items():
            means[label] = np.insert(self.mean_attention(measure).mean(axis=0), 0, np.nan)
        return means

    @property
    def length_laws(self) -> dict[str, np.ndarray]:
        """Return the laws of the path length by weighting, [b, L + 1] each."""
        return self.report.length_laws(self.opened.source.config.num_heads)

    def spike_rows(self) -> list[dict[str, object]]:
        """List the largest massive activations, one row for each text, token and feature.

        Returns:
            At most `MAX_SPIKES` rows, by falling ratio: text, token, feature, the layers where the
            entry stands out, and its value at the layer where its ratio to the median is largest.
        """
        by_entry: dict[tuple[int, int, int], list[Spike]] = {}  # by falling ratio
        for text, text_spikes in enumerate(self.report.spikes):
            for spike in text_spikes:
                by_entry.setdefault((text, spike.token, spike.feature), []).append(spike)
        rows = []
        for (text, token, feature), spikes in by_entry.items():
            layers = [spike.layer for spike in spikes]
            rows.append(
                {
                    "text": text,
                    "token": token,
                    "feature": feature,
                    "layers": f"{min(layers)} to {max(layers)}",
                    "value": spikes[0].value,
                    "times the median": spikes[0].ratio,
                }
            )
        return sorted(rows, key=lambda row: -row["times the median"])[:MAX_SPIKES]

    def mean_attention(self, measure: str) -> np.ndarray:
        """Return a measure of attention [b, L], means over heads."""
        return self.report.attention[measure].mean(axis=-1)

    def headline_numbers(self) -> dict[str, float | int | None]:
        """Return the headline numbers, means over texts; those in `upper_bounds` are bounds."""
        config, report = self.opened.source.config, self.report
        return {
            "layers": config.depth,
            "heads": config.num_heads,
            "width": config.d_model,
            LAST: self.mean_ratio(WHOLE, -1),
            FINAL: self.mean_ratio(READ, -1),
            LAST_ALONE: self.mean_ratio(ALONE, -1),
            FIRST_LAYER: report.collapsed_at("SAN"),
            "mean path length, by size": mean_lengths(self.length_laws)[BY_NORM],
            **{
                f"{label}, mean": float(self.mean_attention(measure).mean())
                for measure, label in ATTENTION_LABELS.items()
            },
        }

    def upper_bounds(self) -> set[str]:
        """Return the headline numbers that rounding decides; the true numbers are at most
        these."""
        networks = {LAST: WHOLE, FINAL: READ, LAST_ALONE: ALONE}
        return {name for name, network in networks.items() if self.is_bound(network, -1)}

    def find_references(self) -> dict[str, str]:
        """Return texts to compare each headline number with: published models, and equal
        attention.

        Returns:
            {name of the number: text}. Inputs that are arrays have no reference for attention,
            because the embedding may add tokens to them.
        """
        config = self.opened.source.config
        ratios, alone_ratios, layers = [], [], []
        kind = "init" if self.opened.source.has_random_weights else "pretrained"
        for name, curves in read_reference_curves(kind).items():
            ratios.append(f"{name} {curves['Transformer'][-1]:.2g}")
            alone_ratios.append(f"{name} {curves['SAN'][-1]:.2g}")
            layers.append(f"{name} {np.argmax(np.array(curves['SAN']) < COLLAPSED)}")
        counted = config.depth * config.num_heads / (1 + config.num_heads)
        trained = PUBLISHED_KINDS[kind]
        references = {
            LAST: f"0 where all tokens are equal; {trained}{', '.join(ratios)}",
            LAST_ALONE: "the same weights without skips and MLPs; "
            f"{trained}{', '.join(alone_ratios)}",
            FIRST_LAYER: f"{trained}{', '.join(layers)}",
            "mean path length, by size": f"{counted:.3g}, by number of paths",
        }
        if self.inputs.mask is None:  # of arrays, whose embedding may add tokens
            return references
        uniform, first = uniform_attention(self.inputs.lengths, config.mask == "causal")
        equal = "with equal weights on all tokens"
        return references | {
            f"{ATTENTION_LABELS['entropy']}, mean": f"{uniform:.3g} {equal}, 0 with one token",
            f"{ATTENTION_LABELS['first_column']}, mean": f"{first:.3g} {equal}",
        }

    def find_one_token_layers(self) -> dict[str, str]:
        """Find the layers and positions where one token holds more than half of ‖res(X)‖_F²."""
        rows = {}
        for name in (WHOLE, READ):
            flags, position = self.networks[name].spiked, self.networks[name]["spike_token"]
            layers, positions = np.flatnonzero(flags.any(axis=0)), np.unique(position[flags])
            if len(layers):
                rows[f"Layers whose residual ratio is of one token, {name}"] = (
                    f"{', '.join(map(str, layers))}; largest entry at position "
                    f"{', '.join(f'{p:.0f}' for p in positions)}, "
                    f"in {flags.any(axis=1).sum()} of {format_count(len(flags), 'text')}"
                )
        return rows

    def describe_bulk(self, ablation: str, layer: int) -> str:
        """Return the ratio without a few tokens where these tokens decide the ratio of all; else
        "".

        Args:
            ablation: See `CheckpointReport.collapsed_at`.
            layer: Index of a state.
        """
        ratios = self.report.states[ablation]["residual_ratio"][:, layer]
        decisive = self.report.decisive_ratios(ablation)[:, layer]
        count = int((decisive != ratios).sum())
        if not count:
            return ""
        texts = "" if count == len(ratios) else f" in {count} of {len(ratios)} texts"
        return f" ({decisive.mean():.3g} without the few tokens that decide it{texts})"

    def write_verdict(self) -> str:
        """Return the measurements in one sentence, by the thresholds of `MEASURES`."""
        report, depth = self.report, self.opened.source.config.depth
        last, alone_ratio = self.format_ratio(WHOLE, -1), self.format_ratio(ALONE, -1)
        tokens = f"tokens stay apart: residual ratio {last} after {format_count(depth, 'layer')}"
        tokens += self.describe_bulk("Transformer", -1)
        layer = report.collapsed_at()
        if layer is not None:
            bulk = self.describe_bulk("Transformer", layer)
            tokens = (
                f"{'nearly all ' if bulk else ''}tokens collapse: residual ratio below "
                f"{COLLAPSED:g} at layer {layer}{bulk}, {last} after {depth}"
            )
        attention = f"attention alone (without skips and MLPs) stays at {alone_ratio}"
        attention += self.describe_bulk("SAN", -1)
        layer = report.collapsed_at("SAN")
        if layer is not None:
            attention = (
                f"attention alone (without skips and MLPs) falls below {COLLAPSED:g} at layer "
                f"{layer}{self.describe_bulk('SAN', layer)} ({alone_ratio} at the end)"
            )
        parts = [tokens, attention]
        share = self.networks[WHOLE]["spike_share"].mean(axis=0)
        if share.max() > 0.5:
            parts.append(f"one token holds {share.max():.3g} of ‖X‖² at layer {share.argmax()}")
        entropy = self.mean_attention("entropy").mean(axis=0)
        collapsed = entropy.min() < MEASURES["attention_entropy"].alarm.value
        side = "collapses to" if collapsed else "is at least"
        layer = entropy.argmin() + 1
        parts.append(f"the entropy of attention {side} {entropy.min():.3g} nats (layer {layer})")
        return f"{self.opened.about}{'; '.join(parts)}."


def describe_measurement(
    checkpoint: Opened, inputs: Inputs, command: Sequence[str]
) -> dict[str, str]:
    """Describe a measurement: the checkpoint, the command and the version that made it.

    Args:
        checkpoint: The measured checkpoint.
        inputs: The inputs on which it was measured.
        command: Words of the command line.
    """
    line = escape_text(shlex.join(["python", "-m", "rank_collapse", *command]))
    return {
        "source": checkpoint.name,
        "weights": checkpoint.weights,
        "command": line,
        "tokens": inputs.description,
        "rank_collapse": __version__,
    }


def read_reference_curves(kind: str) -> dict[str, object]:
    """Read the residual ratios by layer of the networks of Dong et al. 2021.

    Args:
        kind: "pretrained", or "init" of random weights.

    Returns:
        {name of the model: {variant: residual ratios}}.
    """
    names = {"bert-base-cased": "BERT", "albert-base-v2": "ALBERT", "xlnet-base-cased": "XLNet"}
    return {
        name: pretrained.published_curves(pretrained.PUBLISHED[model], 12)[kind]
        for model, name in names.items()
    }


def uniform_attention(lengths: np.ndarray, causal: bool) -> tuple[float, float]:
    """Compute the mean entropy and weight on the first token of attention with equal weights.

    With a causal mask row i of n has weight 1/i on i tokens; without a mask it has 1/n on n tokens.

    Args:
        lengths: Tokens n of each text, [b].

    Returns:
        Mean over texts and rows of log i and 1/i, or of log n and 1/n.
    """
    rows = [np.arange(1, n + 1) if causal else np.array([n]) for n in lengths]
    entropy = np.mean([np.log(row).mean() for row in rows])
    return float(entropy), float(np.mean([(1 / row).mean() for row in rows]))
