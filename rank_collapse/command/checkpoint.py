"""A checkpoint that a command is given: opened, its texts as tokens, measured by layer, written."""

import argparse
import csv
import io
import json
import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from rank_collapse import __version__, pretrained
from rank_collapse.extras import required
from rank_collapse.measures.attention import attention_measures
from rank_collapse.measures.norms import composite_norm
from rank_collapse.measures.profiles import ProfilePass
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.passes import Each
from rank_collapse.paths.contributions import LengthPass
from rank_collapse.pretrained.hub import hub_folder, is_hub_name
from rank_collapse.runs import files
from rank_collapse.text import encoders, tokens, words

MEASURES = ("residual_ratio", "token_cosine", "effective_rank")
SPIKES = ("spike_entry", "spike_norm", "spike_share", "residual_spike")
# Means over the heads: {name in `attention_measures`: on the page}.
OF_ATTENTION = {
    "entropy": "attention entropy, nats",
    "first_column": "attention on the first token",
    "largest_column": "attention on the token with most",
}
WHOLE, ALONE = "whole network", "attention alone"  # SAN in the paper
READ = "what attention reads"  # N(x), after the last layer the output
NETWORKS = (WHOLE, READ, ALONE)
COLLAPSED = 0.01  # of the residual ratio


SOURCE = (
    "checkpoint folder as Hugging Face saves it, hf:NAME or hf:NAME@REVISION, or one of "
    f"{', '.join(pretrained.PUBLISHED)} at random initialisation"
)


class Checked(NamedTuple):
    """A checkpoint as it was measured."""

    source: str  # What it was asked for as
    made: str  # What its tokens are
    found: dict[str, Any]  # Of `measured`
    numbers: dict[str, Any]  # Of `numbers_of`
    folder: Path | None  # None where it is drawn anew

    def about(self, command: Sequence[str]) -> dict[str, Any]:
        """What is written as JSON."""
        line = shlex.join(["python", "-m", "rank_collapse", *command])
        about = {"source": self.source, "command": line, "tokens": self.made}
        return about | {"rank_collapse": __version__, "numbers": self.numbers}

    def layers(self) -> dict[str, np.ndarray]:
        """Means over texts [L + 1] by measure; NaN before the first layer where attention is."""
        columns = {f"residual ratio, {n}": self.found[n]["residual_ratio"] for n in NETWORKS}
        columns |= {m.replace("_", " "): self.found[WHOLE][m] for m in MEASURES[1:] + SPIKES}
        own = {text: self.found["attention"][m].mean(axis=0) for m, text in OF_ATTENTION.items()}
        means = {name: np.asarray(values.mean(axis=0)) for name, values in columns.items()}
        return means | {text: np.insert(values, 0, np.nan) for text, values in own.items()}


def add_arguments(parser: argparse.ArgumentParser, out: str, what: str) -> None:
    """The flags that say which tokens are measured, and where the numbers go."""
    for name, text in {
        "--text": "texts, one a paragraph, or a .tsv (default: a shipped one)",
        "--tokenizer": "folder whose tokenizer files are used (default: that of the checkpoint; "
        "where it has none: random token ids)",
        "--ids": "token ids of a text, such as 5,8,13, in place of --text; may be repeated",
    }.items():
        parser.add_argument(name, help=text, action="append" if name == "--ids" else "store")
    parser.add_argument("--num_texts", type=int, default=4, help="texts at most (default: 4)")
    parser.add_argument("--max_tokens", type=int, default=64, help="of each text (default: 64)")
    parser.add_argument("--out", default=out, help=f"{what} (default: %(default)s)")
    printed = parser.add_mutually_exclusive_group()
    printed.add_argument("--json", action="store_true", help="print the numbers, write no file")
    printed.add_argument("--csv", action="store_true", help="print the table, write no file")


def check_output(given: argparse.Namespace, what: str, suffix: str) -> None:
    """Checks the flags, before anything is measured.

    Raises:
        ValueError: --out names no file in an existing folder, or there are no texts.
        MissingPackage: It has to be drawn, and nothing is there that draws.
    """
    out = Path(given.out)
    if not out.absolute().parent.is_dir() or out.is_dir() or out.suffix in (".csv", ".json"):
        raise ValueError(f"--out {out} is no {what} ({suffix}) in an existing folder")
    if given.num_texts < 1:
        raise ValueError(f"--num_texts {given.num_texts} is not positive")
    if not (given.json or given.csv):
        check_drawing(f"the {what}", "--json and --csv do without")


def check_drawing(what: str, instead: str = "") -> None:
    """Whether figures can be drawn here.

    Raises:
        MissingPackage: Without matplotlib.
        ValueError: Of matplotlib, about its variable.
    """
    try:
        required("matplotlib", what, "report", instead)
    except ValueError as error:
        raise ValueError(f"MPLBACKEND: {error}") from None


def checked(
    given: argparse.Namespace, name: str, source: pretrained.OpenCheckpoint, folder: Path | None
) -> Checked:
    """Measures what `opened` has opened.

    Raises:
        FileNotFoundError, ValueError: As `batch_of`.
    """
    batch, made = batch_of(given, source, folder)
    found = measured(source, batch)
    return Checked(name, made, found, numbers_of(source.config, found, batch), folder)


def opened(name: str) -> tuple[pretrained.OpenCheckpoint, Path | None]:
    """A model of texts and its folder; None where it is drawn anew.

    Raises:
        FileNotFoundError, ValueError: What cannot be read, or is no model of texts.
    """
    folder = None
    if name in pretrained.PUBLISHED and not Path(name).is_dir():
        source = pretrained.open_random(name, jax.random.key(0))
    else:
        folder = hub_folder(name) if is_hub_name(name) else Path(name)
        source = pretrained.open_checkpoint(folder)
    embedding = source.config.embedding
    if embedding is None or embedding.d_input:
        raise ValueError(f"{name} is no model of texts: python -m experiments.run_architectures")
    return source, folder


def batch_of(
    given: argparse.Namespace, source: pretrained.OpenCheckpoint, folder: Path | None
) -> tuple[tokens.Tokens, str]:
    """The tokens that a command asks for, and a sentence about what they are.

    Raises:
        FileNotFoundError, ValueError: Texts or tokenizer files that are not there, or tokens that
            the model does not have.
    """
    embedding = source.config.embedding
    known = {"vocab_size": embedding.vocab_size}
    longest = min(given.max_tokens, embedding.num_positions or given.max_tokens)
    if given.ids:
        if given.text or given.tokenizer:
            raise ValueError("--ids excludes --text and --tokenizer")
        batch, made = tokens.pad(tokens.ids_of(given.ids, "--ids"), **known), "The ids of --ids."
    else:
        if given.text:
            texts = tokens.read_texts(given.text, limit=given.num_texts)
        else:
            texts = words.windows(words.default_text(), given.num_texts, given.max_tokens)
        place = given.tokenizer or folder
        if place is None:
            encoder, made = encoders.trained_tokenizer(texts, **known), "A vocabulary of the texts."
        else:
            encoder, made = encoders.tokenizer_of(place, source.settings), f"Texts by {place}."
        if encoder is None:
            none = f"{place} has none of {encoders.FILES}"
            if given.text or given.tokenizer:
                raise ValueError(f"{none}; give --tokenizer=FOLDER or --ids=5,8,13")
            made = f"Random token ids, since {none}; --tokenizer=FOLDER or --ids=5,8,13."
            drawn_ids = np.random.default_rng(0).integers(
                embedding.vocab_size, size=(given.num_texts, longest)
            )
            batch = tokens.pad(drawn_ids.tolist(), **known)
        else:
            batch = tokens.encode(texts, encoder, max_tokens=longest, **known)
    if int(batch.lengths.min()) < 2:
        raise ValueError(f"text {int(batch.lengths.argmin())} has fewer than 2 tokens")
    return batch, made


def measured(source: pretrained.OpenCheckpoint, batch: tokens.Tokens) -> dict[str, Any]:
    """{WHOLE, READ and ALONE: {measure, or "spiked": [b, L + 1]}, "attention": {measure: [b, L]},
    means over heads, "sizes": ‖C_k‖_{1,∞} [b, L + 1]}.

    Of hidden states before the final norm; of READ the last are those after it. "spiked" where one
    token holds more than half of ‖res(X)‖_F².
    """
    names = (*MEASURES, *SPIKES, "spike_token", "spike_feature")
    passes = {
        WHOLE: ProfilePass(names),
        READ: ProfilePass(names, tokens="read"),
        "sums": LengthPass(source.biased),
        "attention": Each(attention_measures),
    }
    groups = {
        WHOLE: pretrained.Group(tuple(passes.items())),
        ALONE: pretrained.Group(((ALONE, passes[WHOLE]),), pretrained.AblationSpec("SAN")),
    }
    found = pretrained.stream(source, {"x": batch.ids, "mask": batch.mask}, groups)
    whole = found[WHOLE] | found[ALONE]
    size = jax.vmap(lambda lengths, mask: jax.vmap(lambda c: composite_norm(c, mask=mask))(lengths))
    return {name: {**whole[name], **whole[name].notes} for name in NETWORKS} | {
        "attention": {name: whole["attention"][name].mean(axis=-1) for name in OF_ATTENTION},
        "sizes": np.asarray(size(whole["sums"].by_length, batch.mask)),
    }


def numbers_of(
    config: TransformerConfig, found: Mapping[str, Any], batch: tokens.Tokens
) -> dict[str, Any]:
    """The headline numbers, means over texts."""
    ratio, read, bare = (found[name]["residual_ratio"].mean(axis=0) for name in NETWORKS)
    below = np.flatnonzero(bare < COLLAPSED)
    share = (found["sizes"] / found["sizes"].sum(axis=1, keepdims=True)).mean(axis=0)
    return {
        "layers, heads, width": f"{config.depth}, {config.num_heads}, {config.d_model}",
        "texts, tokens": f"{len(batch.ids)}, {int(batch.mask.sum())}",
        "residual ratio after the last layer, before the final norm": float(ratio[-1]),
        "residual ratio after the final norm": float(read[-1]),
        f"residual ratio of {ALONE}, before the final norm": float(bare[-1]),
        f"first layer below {COLLAPSED:g}, of {ALONE}": int(below[0]) if len(below) else "none",
        **of_one_token(found),
        "mean path length, by size": float(share @ np.arange(config.depth + 1)),
        "mean path length, by number": config.depth * config.num_heads / (1 + config.num_heads),
    } | {f"{text}, mean": float(found["attention"][m].mean()) for m, text in OF_ATTENTION.items()}


def of_one_token(found: Mapping[str, Any]) -> dict[str, str]:
    """Where one token holds more than half of ‖res(X)‖_F², if anywhere: layers and positions."""
    rows = {}
    for name in (WHOLE, READ):
        flags, position = (found[name][measure] for measure in ("spiked", "spike_token"))
        layers, positions = np.flatnonzero(flags.any(axis=0)), np.unique(position[flags])
        if len(layers):
            rows[f"Layers whose residual ratio is of one token, {name}"] = (
                f"{', '.join(map(str, layers))}; largest entry at position "
                f"{', '.join(f'{p:.0f}' for p in positions)}, "
                f"in {flags.any(axis=1).sum()} of {len(flags)} texts"
            )
    return rows


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
    contents = table | drawn(out)
    for path, content in contents.items():
        files.write_atomically(path, content)
    beside = [str(path) for path in contents if path != out]
    print(*said, f"written to {', '.join([str(out), *beside[:-1]])} and {beside[-1]}", sep="\n")


def plain(value: Any) -> Any:
    """What JSON has for it: null for a number that is not finite."""
    if isinstance(value, Mapping):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, np.ndarray):
        return [plain(part) for part in value.tolist()]
    return None if isinstance(value, float) and not math.isfinite(value) else value
