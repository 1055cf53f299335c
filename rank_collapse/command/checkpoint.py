"""A checkpoint as a command measures it, by layer: its numbers, its verdict, its files."""

import argparse
import csv
import io
import json
import math
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rank_collapse import __version__, pretrained
from rank_collapse.command.inputs import Inputs, Opened
from rank_collapse.measures.profiles import Profile, rounding_of
from rank_collapse.measures.table import MEASURES
from rank_collapse.pretrained.streaming import State
from rank_collapse.runs import files
from rank_collapse.runs.drawn import check_drawing

# Means over the heads: {name in `attention_measures`: on the page}.
OF_ATTENTION = {
    "entropy": "attention entropy, nats",
    "first_column": "attention on the first token",
    "largest_column": "attention on the token with most",
}
WHOLE, ALONE = "whole network", "attention alone"  # SAN in the paper
READ = "what attention reads"  # N(x), after the last layer the output
NETWORKS = (WHOLE, READ, ALONE)
OF_STATES = ("token_cosine", "effective_rank", "spike_entry", "spike_norm", "spike_share")
OF_STATES += ("residual_spike",)
MOST_TOKENS = 10**6

SOURCE = (
    "checkpoint folder as Hugging Face saves it, hf:NAME or hf:NAME@REVISION, or one of "
    f"{', '.join(pretrained.PUBLISHED)} at random initialisation"
)


class Checked(NamedTuple):
    """A checkpoint as it was measured."""

    opened: Opened
    inputs: Inputs
    report: pretrained.CheckpointReport

    @property
    def networks(self) -> dict[str, Profile]:
        """{the whole network, what its attention reads, its attention alone: profile}."""
        states = self.report.states
        return dict(
            zip(NETWORKS, (states["Transformer"], self.report.read, states["SAN"]), strict=True)
        )

    def about(self, command: Sequence[str]) -> dict[str, Any]:
        """What is written as JSON."""
        line = shlex.join(["python", "-m", "rank_collapse", *command])
        about = {"source": self.opened.name, "command": line, "tokens": self.inputs.made}
        return about | {"rank_collapse": __version__, "numbers": self.numbers()}

    def ratio(self, network: str, layer: int) -> float | str:
        """Residual ratio, mean over texts; where rounding decides all of them its bound."""
        profile = self.networks[network]
        if profile.rounding[:, layer].all():
            return f"≤ {rounding_of(self.opened.source.weights.dtype):.2g}"
        return float(profile["residual_ratio"][:, layer].mean())

    def layers(self) -> dict[str, np.ndarray]:
        """Means over texts [L + 1] by measure; NaN before the first layer where attention is."""
        networks = self.networks
        columns = {f"residual ratio, {n}": networks[n]["residual_ratio"] for n in NETWORKS}
        columns |= {m.replace("_", " "): networks[WHOLE][m] for m in OF_STATES}
        means = {name: np.asarray(values.mean(axis=0)) for name, values in columns.items()}
        own = {text: self.attention(m).mean(axis=0) for m, text in OF_ATTENTION.items()}
        return means | {text: np.insert(values, 0, np.nan) for text, values in own.items()}

    def attention(self, measure: str) -> np.ndarray:
        """[b, L], means over heads."""
        return self.report.attention[measure].mean(axis=-1)

    def numbers(self) -> dict[str, Any]:
        """The headline numbers, means over texts."""
        config, report = self.opened.source.config, self.report
        below, limit = report.collapsed_at("SAN"), MEASURES["residual_ratio"].alarm.value
        return {
            "layers, heads, width": f"{config.depth}, {config.num_heads}, {config.d_model}",
            "inputs": self.inputs.counts,
            "residual ratio after the last layer, before the final norm": self.ratio(WHOLE, -1),
            "residual ratio after the final norm": self.ratio(READ, -1),
            f"residual ratio of {ALONE}, before the final norm": self.ratio(ALONE, -1),
            f"first layer below {limit:g}, of {ALONE}": "none" if below is None else below,
            **self.of_one_token(),
            "mean path length, by size": report.mean_path_length(),
            "mean path length, by number": config.depth * config.num_heads / (1 + config.num_heads),
        } | {f"{text}, mean": float(self.attention(m).mean()) for m, text in OF_ATTENTION.items()}

    def of_one_token(self) -> dict[str, str]:
        """Where one token holds more than half of ‖res(X)‖_F², if anywhere: layers, positions."""
        rows = {}
        for name in (WHOLE, READ):
            flags, position = self.networks[name].spiked, self.networks[name]["spike_token"]
            layers, positions = np.flatnonzero(flags.any(axis=0)), np.unique(position[flags])
            if len(layers):
                rows[f"Layers whose residual ratio is of one token, {name}"] = (
                    f"{', '.join(map(str, layers))}; largest entry at position "
                    f"{', '.join(f'{p:.0f}' for p in positions)}, "
                    f"in {flags.any(axis=1).sum()} of {len(flags)} texts"
                )
        return rows

    def verdict(self) -> str:
        """What was found, in one sentence made of numbers and the thresholds of `MEASURES`."""
        report, depth = self.report, self.opened.source.config.depth
        alarms = {name: MEASURES[name].alarm for name in ("residual_ratio", "attention_entropy")}
        limit = alarms["residual_ratio"].value
        ratio = number(self.ratio(WHOLE, -1))
        found = f"tokens stay apart: residual ratio {ratio} after {depth} layers"
        if (below := report.collapsed_at()) is not None:
            found = f"tokens collapse: residual ratio below {limit:g} at layer {below}"
            found += f", {ratio} after {depth}"
        alone, last = report.collapsed_at("SAN"), number(self.ratio(ALONE, -1))
        parts = [found, f"attention alone stays at {last}"]
        if alone is not None:
            parts[1] = f"attention alone falls below {limit:g} at layer {alone} ({last} at the end)"
        share = self.networks[WHOLE]["spike_share"].mean(axis=0)
        if share.max() > 0.5:
            layer = int(share.argmax())
            parts.append(f"one token holds {number(float(share.max()))} of ‖X‖² at layer {layer}")
        entropy = self.attention("entropy").mean(axis=0)
        least, layer = float(entropy.min()), int(entropy.argmin()) + 1
        side = "collapses to" if least < alarms["attention_entropy"].value else "is at least"
        parts.append(f"the entropy of attention {side} {number(least)} nats (layer {layer})")
        half = f"{self.opened.half}: " if self.opened.half else ""
        return f"{half}{'; '.join(parts)}."


def number(value: float | str) -> str:
    """Three digits of a number."""
    return value if isinstance(value, str) else f"{value:.3g}"


def add_arguments(parser: argparse.ArgumentParser, out: str, what: str) -> None:
    """The flags that say what is measured, and where the numbers go."""
    for name, text in {
        "--text": "texts, one a paragraph, or a .tsv (default: a shipped one)",
        "--tokenizer": "folder whose tokenizer files are used (default: that of the checkpoint; "
        "where it has none: random token ids)",
        "--token_ids": "file of token ids, a text a line, in place of --text",
        "--inputs": "of models of images or sound: .npy, images [b, channels, height, width] or "
        "features [b, frames, bins] (default: drawn)",
    }.items():
        parser.add_argument(name, help=text)
    ids = "token ids of a text, such as 5,8,13, in place of --text; may be repeated"
    parser.add_argument("--ids", help=ids, action="append")
    parser.add_argument("--num_texts", type=int, default=4, help="texts at most (default: 4)")
    parser.add_argument("--max_tokens", type=int, default=64, help="of each text (default: 64)")
    parser.add_argument("--out", default=out, help=f"{what} (default: %(default)s)")
    printed = parser.add_mutually_exclusive_group()
    printed.add_argument("--json", action="store_true", help="print the numbers, write no file")
    printed.add_argument("--csv", action="store_true", help="print the table, write no file")


def check_output(given: argparse.Namespace, suffixes: Sequence[str] = (".html",)) -> None:
    """Checks the flags, before anything is measured.

    Raises:
        ValueError: --out names no such file in an existing folder, or there are no texts.
        MissingPackage: It has to be drawn, and nothing is there that draws.
    """
    out = Path(given.out)
    if not out.absolute().parent.is_dir() or out.is_dir() or out.suffix not in suffixes:
        kinds = " or ".join(suffixes)
        raise ValueError(f"--out {out} is no {kinds} file in an existing folder")
    for name in vars(given).keys() & {"num_texts", "max_tokens"}:
        if not 1 <= getattr(given, name) <= MOST_TOKENS:
            raise ValueError(f"--{name} {getattr(given, name)} is not from 1 to {MOST_TOKENS}")
    if not (given.json or given.csv):
        check_drawing(f"--out {out}", "--json and --csv do without")


def checked(one: Opened, inputs: Inputs) -> Checked:
    """Measures a checkpoint; says on standard error how far it is."""
    given, shown = {"x": inputs.x, "mask": inputs.mask}, progress(one, inputs)
    return Checked(one, inputs, pretrained.checkpoint_report(one.source, given, **shown))


def progress(one: Opened, inputs: Inputs) -> dict[str, Any]:
    """Says what is begun; `done` of its stream, on a terminal, which layer is done."""
    depth = one.source.config.depth
    print(f"{one.name}: {depth} layers, {inputs.counts}", file=sys.stderr, flush=True)
    if not sys.stderr.isatty():
        return {}

    def done(state: State) -> None:
        end = "\n" if state.layers == depth else ""
        print(f"\r\x1b[Klayer {state.layers} of {depth}", end=end, file=sys.stderr, flush=True)

    return {"done": done}


def write(
    given: argparse.Namespace,
    lines: Iterable[Mapping[str, Any]],
    rows: Iterable[Sequence[Any]],
    drawn: Callable[[Path], Mapping[Path, bytes]],
    said: Iterable[str],
) -> None:
    """Prints or writes what was measured.

    Args:
        given: The flags.
        lines: What --json prints, an object a line; numbers may be arrays.
        rows: Of the table, its head first.
        drawn: What else is written: its files, of --out.
        said: Lines that are printed when all is written.
    """
    if given.json:
        for line in lines:
            print(json.dumps(plain(line)))
        return
    written = io.StringIO()
    csv.writer(written, lineterminator="\n").writerows(rows)
    if given.csv:
        print(written.getvalue(), end="")
        return
    out = Path(given.out)
    table = {out.with_suffix(".csv"): written.getvalue().encode()}
    contents = drawn(out) | table
    new = [path for path in contents if not path.exists()]
    try:
        for path, content in contents.items():
            files.write_atomically(path, content)
    except files.RunError:  # such as of a full disk: no part of it without the others
        for path in new:
            path.unlink(missing_ok=True)
        raise
    beside = [str(path) for path in contents if path != out]
    print(*said, f"written to {', '.join([str(out), *beside[:-1]])} and {beside[-1]}", sep="\n")


def plain(value: Any) -> Any:
    """What JSON has for it: null for a number that is not finite."""
    if isinstance(value, Mapping):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, np.ndarray):
        return [plain(part) for part in value.tolist()]
    return None if isinstance(value, float) and not math.isfinite(value) else value
