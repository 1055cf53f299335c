"""Architectures: rank collapse of BERT, ALBERT, XLNet and others, pretrained and at initialisation.

Reproduces the residual figures of BERT, ALBERT and XLNet of Dong, Cordonnier and Loukas (2021):
||res(X)||/||X|| by layer for SAN, SAN+MLP, SAN+skip and the whole Transformer, on the same
weights. Also on the same weights and texts: the exact contribution of all paths of each length to
the output, to a language model's next token and to its gradient; the effective depth; each layer's
influence, and the output without it; token cosine and ranks; entropy and sinks of attention; the
theory's constants, condition and bound per layer and head; chained attention; and the sizes of
paths predicted from alpha.

    python -m experiments.run_architectures
    python -m experiments.run_architectures --checkpoints=bert-base-cased,gpt2 --text_file=texts.txt

Without --checkpoints: the three published models at random initialisation, about 2 minutes on two
cores. Otherwise folders as Hugging Face saves them (BERT, RoBERTa, ALBERT, XLNet, DistilBERT, T5,
GPT-2, GPT-NeoX, ViT, DeiT, DINOv2, Llama, Mistral, Mixtral, Qwen2, Qwen3, Phi-3, OLMo 2, Gemma 2
and 3, ModernBERT, Whisper's encoder). To get one on a machine with internet: `hf download
bert-base-cased --local-dir bert-base-cased`, or --checkpoints=hf:bert-base-cased with the package
huggingface_hub. Weights are read layer by layer, so that a model may be larger than memory; an
interrupted run resumes at its layer. Folders of one model by step (step1000,
checkpoint-500) also give curves over its training. Expect SAN to collapse within 3 to 6 layers, and
skips to stop it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from experiments.lab import cli
from experiments.lab.experiment import Drawing, Experiment, Finding
from experiments.lab.statements import STATEMENTS, row_of
from experiments.paper.architectures.figures import (
    ALONE_AND_SKIPS,
    collapse_figure,
    figures_of,
    ratios,
)
from experiments.paper.architectures.measure import PARTS, measure_all, setup_of
from experiments.paper.architectures.models import identity
from experiments.paper.architectures.page import page, training_figures
from experiments.paper.architectures.results import COLLAPSED, NAMES, Results, rows_of
from rank_collapse.network.surgery import VARIANTS, variants_of
from rank_collapse.pretrained import PUBLISHED, Target, published_curves, published_targets
from rank_collapse.pretrained.published import READ_OFF
from rank_collapse.report import Comparison, answers_of
from rank_collapse.report.claims import ERROR, Row, of_curve
from rank_collapse.report.statistics import log10, power_law_wins
from rank_collapse.report.wording import words

FEWEST_DRAWS = 240  # with which one of 12 curves can be refused at 5 % of all of them
KNOWN = ", ".join(PUBLISHED)

FLAGS = cli.make_flags(
    "architectures", num_seeds=1, shows="mean,measure=last", execution=("chunk",)
)
FLAGS["num_devices"].default = 1  # one device whose matrix products use all cores
define = cli.definer(FLAGS)
for kind, name, default, text, *choices in (
    (
        "list",
        "checkpoints",
        [],
        "Checkpoint folders, or hf:NAME or hf:NAME@REVISION of the Hugging "
        "Face hub; none for random initialisations.",
    ),
    (
        "list",
        "models",
        list(PUBLISHED),
        f"Published models to initialise without --checkpoints, out of {KNOWN}.",
    ),
    (
        "string",
        "text_file",
        None,
        "Texts: a .tsv with a header (RTE), or paragraphs; default: "
        "overlapping pieces of a text shipped with the package.",
    ),
    ("list", "columns", [], "Columns of the .tsv that hold text."),
    ("string", "token_ids", None, "Ready token ids in place of --text_file, one text a line."),
    (
        "string",
        "images",
        None,
        "Inputs of a ViT, DeiT or DINOv2: .npy of normalised images [b, channels, height, width].",
    ),
    (
        "string",
        "features",
        None,
        "Inputs of Whisper's encoder: .npy of log-mel spectrograms [b, mel bins, frames].",
    ),
    (
        "boolean",
        "join",
        False,
        "Join texts until each has --max_tokens, as the published ones had.",
    ),
    (
        "list",
        "parts",
        list(PARTS),
        f"What to measure, out of {', '.join(PARTS)}; "
        "and read: residuals of what attention reads, N(x), too.",
    ),
    (
        "boolean",
        "initialisation",
        True,
        "Also measure each checkpoint's own random initialisation.",
    ),
    (
        "enum",
        "part",
        "encoder",
        "Which half of a T5; the decoder attends to the encoder's output on the same text.",
        ("encoder", "decoder"),
    ),
    (
        "enum",
        "dtype",
        "float32",
        "What is computed in; weights stay as they are on disk.",
        ("float32", "float64"),
    ),
):
    define(kind, name, default, text, *choices)
for name, default, least, text in (
    ("num_texts", 32, 1, "Texts."),
    ("max_tokens", 128, 2, "Tokens kept of each."),
    ("num_path_texts", 8, 1, "Texts for path sums, bounds and chains."),
    ("num_path_seeds", 4, 1, "Initialisations on which more than the residuals is measured."),
    ("chunk", 8, 1, "Texts at once: memory."),
):
    define("integer", name, default, text, lower_bound=least)


def compare(results: Sequence[Results], setup: Any = None) -> Iterator[Comparison]:
    """Residual ratios beside the published ones, at layer 1 and at the last, of pretrained weights
    at all, with the tolerance that other texts explain; from which layer on pure attention has
    collapsed; how well the sum over all paths gives the output."""
    for found, kind in [(own, kind) for own in results for kind in own.kinds]:
        model, config = f"{found.model.label}, {NAMES[kind]}", found.model.config
        published = published_curves(found.model.settings, config.depth).get(kind)
        targets, why = targets_of(found, kind)
        for variant, reading in variants_of(found.model.family):
            curves = found.by_seed(kind, f"residuals/{variant}/{reading}/residual_ratio")
            if curves is None:
                continue
            where = f"{model}, {variant}" + ", as the text says" * (reading == "text")
            ours, low, high = curves.mean(axis=0), curves.min(axis=0), curves.max(axis=0)
            own = {t.layer: t for t in targets if (t.variant, "published") == (variant, reading)}
            for layer in own or (1, config.depth):
                spread = f"{low[layer]:.4g} to {high[layer]:.4g} over seeds"
                yield Comparison(
                    f"{where}: residual ratio, layer {layer}",
                    float(ours[layer]),
                    published and published[variant][layer],
                    noted(own[layer]) if own else spread * bool(low[layer] < high[layer]),
                )
            if variant == "SAN":
                below = np.flatnonzero(ours < COLLAPSED)
                what = f"{where}: first layer with a residual ratio below {COLLAPSED:g}"
                yield Comparison(what, int(below[0]) if below.size else "none")
        if why:
            off = sum(t.differs for t in targets)
            what = f"{model}: values that differ from the published ones"
            if targets:
                yield Comparison(what, f"{off} of {len(targets)}", 0, why)
            else:
                yield Comparison(what, "not compared", note=why)
        error = found.mean(kind, "lengths/error")
        if error is not None:
            yield Comparison(
                f"{model}: error of the sum over all paths",
                float(error.max()),
                0.0,
                f"(1+{config.num_heads})^{config.depth} paths, relative to the output",
            )


def targets_of(found: Results, kind: str) -> tuple[list[Target], str]:
    """(the published values beside those of pretrained weights, what makes a failure of them or why
    there are none); ([], "") of other weights, and where the residuals were not measured."""
    names = {v: f"residuals/{v}/published/residual_ratio" for v in VARIANTS}
    curves = {variant: found.get(kind, name) for variant, name in names.items()}
    curves = {variant: values for variant, values in curves.items() if values is not None}
    if kind != "pretrained" or not curves:
        return [], ""
    try:
        targets = published_targets(found.model.settings, curves)
    except ValueError as error:
        return [], str(error)
    return targets, (
        "one is a failure: by chance 5 % of models with the published weights have one, if 32 "
        "texts of wiki_bio differ from the mean of these as one more of these does"
    )


def noted(target: Target) -> str:
    """What is to be said of a published value beside the measured one."""
    return "differs; " * target.differs + f"other texts explain ± {target.tolerance:.2g}"


def claims(results: Sequence[Results], setup: Any = None) -> list[Row]:
    """The published curves against ours at initialisation, and what the curves are to show.

    A checkpoint is one network, of which nothing can be said with an interval. Layer 0 is the
    embedding, of other texts than the published ones. Whether a curve is one of ours is asked only
    with so many initialisations that one of all the curves could be refused.
    """
    rows, compared = [], []
    for found in results:
        label, config = found.model.label, found.model.config
        names = {v: f"residuals/{v}/published/residual_ratio" for v in ("SAN", "SAN+skip")}
        published = published_curves(found.model.settings, config.depth).get("init", {})
        for variant, curve in published.items():
            ours = found.by_seed("init", f"residuals/{variant}/published/residual_ratio")
            if ours is not None:
                row = (f"{label}, {variant}", curve[1:], ours[:, 1:], READ_OFF)
                compared.append(of_curve("curves", *row))
        bare, skips = (found.by_seed("init", name) for name in names.values())
        if bare is None:
            continue
        left, more = skips[:, -1] / skips[:, 0], log10(skips[:, -1]) - log10(bare[:, -1])
        rows += [
            row_of("collapse", label, 1 - bare[:, -1] / bare[:, 0]),
            row_of("skips stop", label, left),
            row_of("law of the fall", label, power_law_wins(skips)),
            row_of("skips", label, more),
        ]
    fewest = len(compared) / ERROR
    return [row for row in compared if row.draws + 1 >= fewest] + rows


def finding(results: Sequence[Results], setup: Any) -> Finding | None:
    """Where attention alone has lost all but a hundredth, and what skips keep."""
    layers, left = {}, {}
    for found in results:
        alone, skips = (ratios(found, variant) for variant in ALONE_AND_SKIPS)
        if alone is not None and skips is not None:
            name, mean = words(found.model.label), alone.mean(axis=0)
            layers[name] = f"{int(np.argmax(mean < COLLAPSED))}" if mean.min() < COLLAPSED else "no"
            left[name] = f"{skips.mean(axis=0)[-1]:.2f}"
    if not layers:
        return None
    text = f"At initialisation attention alone has a residual ratio below {COLLAPSED} at layer "
    text += ", ".join(f"{layer} in {name}" for name, layer in layers.items())
    return Finding(
        "collapse", f"{text}; with skips the last layer keeps {', '.join(left.values())}."
    )


EXPERIMENT = Experiment(
    about=__doc__,
    flags=FLAGS,
    order=40,
    brief="BERT, ALBERT, XLNet and others, at initialisation or from a checkpoint folder",
    title="BERT, ALBERT and XLNet at initialisation",
    claim="Attention without skips and MLPs loses rank within a few layers in all three "
    "architectures; skips prevent it, and MLPs alone slow it at most (published figures of the "
    "relative residual by layer; unseeded initialisations, other texts).",
    presets={
        # The fewest draws of which a share can be decided beside the rows of run_collapse, and as
        # many tokens as show the curves: their residuals are those of longer texts.
        "quick": ("--num_seeds=7", "--num_texts=1", "--max_tokens=32", "--parts=residuals"),
        # What differs between initialisations is far more than what differs between texts.
        "paper": (f"--num_seeds={FEWEST_DRAWS}", "--num_texts=4", "--parts=residuals"),
        "tiny": ("--models=albert-base-v2", "--num_texts=2", "--max_tokens=8", "--parts=residuals"),
    },
    extra=lambda setup: identity(setup.models, setup.batches),
    setup=setup_of,
    measure=measure_all,
    table=rows_of,
    claims=claims,
    compare=compare,
    finding=finding,
    figures={"collapse": Drawing.described(collapse_figure)}
    | {
        f"residuals_{name}": Drawing(
            lambda results, setup, name=name: figures_of(results)[f"residuals_{name}"](),
            f"{name} at initialisation: relative residual by layer, mean ± one standard deviation "
            "over initialisations and texts; the published curves in grey.",
            lambda results, setup, name=name: f"residuals_{name}" in figures_of(results),
        )
        for name in PUBLISHED
    },
    further=lambda results, setup: figures_of(results) | training_figures(results),
    files=lambda results, setup, run: {
        "report.html": lambda: page(
            results,
            compare,
            answers_of(STATEMENTS, claims(results)),
            run.path / "figures",
            cli.command_line(),
        )
    },
)
