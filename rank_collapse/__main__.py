"""One page about one checkpoint: `python -m rank_collapse FOLDER_OR_NAME [--text FILE]`.

    python -m rank_collapse bert-base-cased-folder
    python -m rank_collapse hf:gpt2 --text my.txt --out gpt2.html
    python -m rank_collapse my-run/checkpoint --tokenizer bert-base-cased-folder
    python -m rank_collapse my-run/checkpoint --ids 5,8,13 --ids 7,7,1,2
    python -m rank_collapse bert-base-cased       (published sizes at random initialisation)

By layer, on a few texts: residual ratio, token cosine and effective rank before the final norm, of
the whole network, of what its attention reads, and of its attention alone; spikes, with the layers
where the residual ratio is of one token; entropy and sinks of attention; and the size of all paths
of each length. The same numbers are written beside the page as a table (.csv) and with their means
(.json). Weights are read layer by layer. `python -m experiments.run_architectures` in a clone
measures more.
"""

import argparse
import csv
import importlib
import io
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rank_collapse import __version__, pretrained
from rank_collapse.extras import MissingPackage
from rank_collapse.measures.attention import attention_measures
from rank_collapse.measures.norms import composite_norm
from rank_collapse.measures.profiles import ProfilePass
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.passes import Each
from rank_collapse.paths.contributions import LengthPass
from rank_collapse.pretrained.hub import hub_folder, is_hub_name
from rank_collapse.printed import one_line, print_anything
from rank_collapse.runs import files, limits
from rank_collapse.runs.drawn import drawn
from rank_collapse.text import encoders, tokens, words

try:
    importlib.import_module("matplotlib")  # which the others import where they draw
    from rank_collapse import report
    from rank_collapse.report import figures
except ModuleNotFoundError as error:
    print(f"error: {MissingPackage('the page', error, 'report')}", file=sys.stderr)
    raise SystemExit(2) from None
except ValueError as error:  # matplotlib's, of its variable
    print(f"error: MPLBACKEND: {error}", file=sys.stderr)
    raise SystemExit(2) from None

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


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    given = parsed(arguments)
    try:
        limits.check_address_space()
        out = Path(given.out)
        if not out.absolute().parent.is_dir() or out.is_dir() or out.suffix in (".csv", ".json"):
            raise ValueError(f"--out {out} is no page (.html) in an existing folder")
        if given.num_texts < 1:
            raise ValueError(f"--num_texts {given.num_texts} is not positive")
        source, folder = opened(given.source)
        batch, made = batch_of(given, source, folder)
        found = measured(source, batch)
        command = shlex.join(["python", "-m", "rank_collapse", *(arguments or sys.argv[1:])])
        numbers = numbers_of(source.config, found, batch)
        about = {"source": given.source, "command": command, "tokens": made}
        about |= {"rank_collapse": __version__, "numbers": numbers}
        for path, text in {
            out: page(given.source, found, made, numbers, command),
            out.with_suffix(".csv"): table_of(found),
            out.with_suffix(".json"): json.dumps(about, indent=1) + "\n",
        }.items():
            files.write_atomically(path, text.encode())
    except (ValueError, OSError, MemoryError, ModuleNotFoundError, files.RunError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print(f"error: out of memory: {one_line(error, 300)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    print(f"{made}\nwritten to {out}, {out.with_suffix('.csv')} and {out.with_suffix('.json')}")
    return 0


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(
        prog="python -m rank_collapse", description=__doc__.partition("\n\n    python")[0]
    )
    parser.add_argument(
        "source",
        metavar="FOLDER_OR_NAME",
        help="checkpoint folder as Hugging "
        f"Face saves it, hf:NAME, or one of {', '.join(pretrained.PUBLISHED)} "
        "at random initialisation",
    )
    for name, text in {
        "--text": "texts, one a paragraph, or a .tsv (default: a shipped one)",
        "--tokenizer": "folder whose tokenizer files are used (default: that of the checkpoint; "
        "where it has none: random token ids)",
        "--ids": "token ids of a text, such as 5,8,13, in place of --text; may be repeated",
    }.items():
        parser.add_argument(name, help=text, action="append" if name == "--ids" else "store")
    parser.add_argument("--num_texts", type=int, default=4, help="texts at most (default: 4)")
    parser.add_argument("--max_tokens", type=int, default=64, help="of each text (default: 64)")
    parser.add_argument(
        "--out",
        default="rank_collapse.html",
        help="the page, beside it .csv and .json (default: %(default)s)",
    )
    return parser.parse_args(arguments)


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


def table_of(found: Mapping[str, Any]) -> str:
    """All numbers as CSV, one a row: of which network, measure, text, and layer or path length."""
    measures = {f"{p}/{m}": a for p in (*NETWORKS, "attention") for m, a in found[p].items()}
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow(("network", "measure", "text", "layer_or_length", "value"))
    for name, values in (measures | {f"{WHOLE}/path_size": found["sizes"]}).items():
        network, _, measure = name.replace("attention/", f"{WHOLE}/attention_").partition("/")
        first = found["sizes"].shape[1] - values.shape[1]  # a layer's attention: from 1
        for (text, place), value in np.ndenumerate(values):
            writer.writerow((network, measure, text, first + place, float(value)))
    return written.getvalue()


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


def page(
    name: str, found: Mapping[str, Any], made: str, numbers: Mapping[str, Any], command: str
) -> str:
    """The page as HTML."""
    columns = {f"residual ratio, {name}": found[name]["residual_ratio"] for name in NETWORKS}
    columns |= {name.replace("_", " "): found[WHOLE][name] for name in MEASURES[1:] + SPIKES}
    means = {name: values.mean(axis=0).tolist() for name, values in columns.items()}
    means |= {  # there is no attention before the first layer
        text: [None, *found["attention"][name].mean(axis=0).tolist()]
        for name, text in OF_ATTENTION.items()
    }
    rows = [
        {"layer": layer} | dict(zip(means, row, strict=True))
        for layer, row in enumerate(zip(*means.values(), strict=True))
    ]
    section = report.Section(
        name="checkpoint",
        title=name,
        claim="Pure attention loses rank doubly exponentially with depth; skips keep the residual "
        "(Dong et al. 2021).",
        figures=[
            (
                drawn(by_layer(found))[".png"],
                f"Residual ratio by layer, also of {READ}, N(x), and without skips and MLPs. "
                "Right: the largest token's share of the squared norm, and of the residual's; "
                "where that is above 1/2, the residual ratio is of one token. Bands over texts.",
            ),
            (
                drawn(by_path_length(found["sizes"]))[".png"],
                "Share of the size ‖C_k‖ of all paths of length k, exact sums; bands over texts.",
            ),
            (
                drawn(of_attention(found["attention"]))[".png"],
                "Entropy of attention, and its weight on the first token (a sink) and on the token "
                "that gets most; means over heads and queries, bands over texts.",
            ),
        ],
        comparisons=[report.Comparison(quantity, value) for quantity, value in numbers.items()],
        table=rows,
        command=command,
    )
    return report.render(
        f"Rank collapse in {name}",
        "Means over texts, in float32: residual ratios below about 1e-7 are rounding. States by "
        f"layer are those before the final norm, where there is one. {made}"
        + "".join(f" {row}: {where}." for row, where in of_one_token(found).items()),
        [section],
    )


@figures.styled
def by_layer(found: Mapping[str, Any]):
    """Residual ratio by layer, and the largest token's share."""
    shown = {name: np.maximum(found[name]["residual_ratio"], 1e-8) for name in NETWORKS}
    groups = {
        "residual ratio": shown,
        "largest token's share": {
            "of ‖X‖²": found[WHOLE]["spike_share"],
            "of ‖res(X)‖²": found[WHOLE]["residual_spike"],
        },
    }
    fig, ((ratios, spikes),) = figures.curves(
        groups, ylabel="‖res(X)‖₁,∞ / ‖X‖₁,∞", width=4.2, height=3.4
    )
    ratios.set(yscale="log")
    spikes.set(ylim=(0, 1.05))
    spikes.axhline(0.5, color="#9A9A9A", lw=1)
    figures.finish((ratios, spikes), "layer")
    return fig


@figures.styled
def by_path_length(sizes: np.ndarray):
    """Share of the size of all paths by length, from their sizes [b, L + 1]."""
    shown = {"": {"": sizes / sizes.sum(axis=1, keepdims=True)}}
    labels = {"xlabel": "path length k", "ylabel": "share of Σ ‖C_k‖"}
    return figures.curves(shown, width=6.5, height=3.0, **labels)[0]


@figures.styled
def of_attention(found: Mapping[str, Any]):
    """Entropy and sinks of attention by layer."""
    fig, axes = figures.figure(1, 2, width=3.3, height=3.0)
    for index, (name, label) in enumerate(OF_ATTENTION.items()):
        ax = axes[0, min(index, 1)]
        figures.band(ax, np.arange(1, found[name].shape[1] + 1), found[name], label, index)
        ax.set(ylim=(0, 1 if index else 1.2 * found[name].max()))
    figures.finish(tuple(axes[0]), "layer")
    return fig


if __name__ == "__main__":
    print_anything()
    sys.exit(main())
