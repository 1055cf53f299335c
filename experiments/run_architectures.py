"""Architectures: the residual of BERT, ALBERT and XLNet by layer, beside the published curves.

Reproduces the residual figures of BERT, ALBERT and XLNet of Dong, Cordonnier and Loukas (2021):
‖res(X)‖/‖X‖ by layer for SAN, SAN+MLP, SAN+skip and the whole Transformer, on the same weights.

    python -m experiments.run_architectures
    python -m experiments.run_architectures --checkpoints=bert-base-cased --text_file=texts.txt

Without --checkpoints: the three published models at random initialisation, about 2 minutes on two
cores. Otherwise folders as Hugging Face saves them, or --checkpoints=hf:bert-base-cased with the
package huggingface_hub, each beside its own random initialisation. Weights are read layer by layer.
All else about a checkpoint: `rank-collapse check` and `rank-collapse depth`. Expect SAN to collapse
within 3 to 6 layers, and skips to stop it.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

import rank_collapse as rc
from experiments.lab import cli
from experiments.lab.experiment import Experiment, Finding, Shown, name_figures, open_run
from experiments.lab.flags import Flags
from experiments.lab.statements import make_row
from experiments.paper.architectures.models import NAMES, Model, identity, measure_all, models_of
from experiments.verdicts import Comparison
from experiments.verdicts.claims import ERROR, Row, curve_row
from experiments.verdicts.statistics import clipped_log10, power_law_wins
from rank_collapse.network.surgery import ABLATIONS, READINGS
from rank_collapse.pretrained import PUBLISHED, Target, published_curves, published_targets
from rank_collapse.pretrained.published import READ_OFF
from rank_collapse.report import figures
from rank_collapse.report.figures import Figure
from rank_collapse.report.wording import words

FEWEST_DRAWS = 240  # with which one of 12 curves can be refused at 5 % of all of them

FLAGS = cli.make_flags("architectures", num_seeds=1, shows="mean,layer=last", execution=("chunk",))
FLAGS["num_devices"].default = 1  # one device whose matrix products use all cores
define = cli.definer(FLAGS)
define("list", "checkpoints", [], "Checkpoint folders, or hf:NAME of the Hugging Face hub.")
text = f"Models to initialise without --checkpoints, out of {', '.join(PUBLISHED)}."
define("list", "models", list(PUBLISHED), text)
text = (
    "Texts: a .tsv with a header (RTE), or paragraphs (default: a text shipped with the package)."
)
define("string", "text_file", None, text)
define("list", "columns", [], "Columns of the .tsv that hold text.")
define("string", "token_ids", None, "Token ids in place of --text_file, one text a line.")
text = "Join texts until each has --max_tokens, as the published ones had."
define("boolean", "join", False, text)
define("boolean", "initialisation", True, "Also each checkpoint's own random initialisation.")
for name, default, least, text in (
    ("num_texts", 32, 1, "Texts."),
    ("max_tokens", 128, 2, "Tokens kept of each."),
    ("chunk", 8, 1, "Texts at once: memory."),
):
    define("integer", name, default, text, lower_bound=least)


class Results:
    """The curves [seeds, texts, L + 1] of one model, by kind of weights and ablation."""

    def __init__(self, arrays: dict[str, np.ndarray], model: Model):
        self.model, self.curves = model, {kind: {} for kind in NAMES}
        for kind, variant, reading in ((k, *own) for k in NAMES for own in model.ablations):
            name = f"residuals/{variant}/{reading}/residual_ratio"
            own = [a for n, a in arrays.items() if _is_of(n, f"{model.label}/{kind}", name)]
            if own:
                self.curves[kind][variant, reading] = np.stack(own)

    def by_seed(self, kind: str, variant: str, reading: str = "published") -> np.ndarray | None:
        """[seeds, L + 1], means over texts; None where it was not measured."""
        values = self.curves[kind].get((variant, reading))
        return None if values is None else values.mean(axis=1, dtype=float)


def _is_of(name, before, after):
    return name.startswith(before) and name[len(before) :].lstrip("0123456789") == f"/{after}"


def results_of(arrays: dict[str, np.ndarray], models: Sequence[Model]) -> list[Results]:
    """Of each model."""
    return [Results(arrays, model) for model in models]


def rows_of(arrays: dict[str, np.ndarray], models: Sequence[Model]) -> Iterator[dict[str, Any]]:
    """One row per model, weights, ablation and layer: mean and spread over weights and texts."""
    for found in results_of(arrays, models):
        for kind, curves in found.curves.items():
            for (variant, reading), values in curves.items():
                flat = values.reshape(-1, values.shape[-1]).astype(float)
                about = {"model": found.model.label, "weights": kind, "variant": variant}
                for layer, column in enumerate(flat.T):
                    own = {"mean": float(column.mean()), "std": float(column.std())}
                    yield (
                        about | {"reading": reading, "layer": layer} | own | {"examples": len(flat)}
                    )


def compare(arrays: dict[str, np.ndarray], models: Sequence[Model]) -> Iterator[Comparison]:
    """Residual ratios beside the published ones, at layer 1 and at the last, of pretrained weights
    at all, with the tolerance that other texts explain; and from which layer on attention alone has
    collapsed."""
    threshold = rc.MEASURES["residual_ratio"].alarm.value
    for found in results_of(arrays, models):
        model, depth = found.model, found.model.config.depth
        for kind, curves in found.curves.items():
            published = published_curves(model.settings, depth).get(kind)
            targets, why = targets_of(found, kind)
            for variant, reading in curves:
                ours = found.by_seed(kind, variant, reading)
                where = f"{model.label}, {NAMES[kind]}, {variant}"
                where += ", as the text says" * (reading == "text")
                own = {
                    t.layer: t for t in targets if (t.variant, "published") == (variant, reading)
                }
                for layer in own or (1, depth):
                    low, high = ours[:, layer].min(), ours[:, layer].max()
                    spread = f"{low:.4g} to {high:.4g} over seeds" * bool(low < high)
                    yield Comparison(
                        f"{where}: residual ratio, layer {layer}",
                        float(ours[:, layer].mean()),
                        published and published[variant][layer],
                        noted(own[layer]) if own else spread,
                    )
                if variant == "SAN":
                    below = np.flatnonzero(ours.mean(axis=0) < threshold)
                    what = f"{where}: first layer with a residual ratio below {threshold:g}"
                    yield Comparison(what, int(below[0]) if below.size else "none")
            if why:
                off = sum(t.differs for t in targets)
                count = f"{off} of {len(targets)}" if targets else "not compared"
                what = f"{model.label}, {NAMES[kind]}: values that differ from the published ones"
                yield Comparison(what, count, 0 if targets else None, why)


def targets_of(found: Results, kind: str) -> tuple[list[Target], str]:
    """(the published values beside those of pretrained weights, what makes a failure of them or why
    there are none); ([], "") of other weights."""
    if kind != "pretrained" or not found.curves[kind]:
        return [], ""
    own = {variant: found.curves[kind][variant, "published"][0] for variant in ABLATIONS}
    try:
        targets = published_targets(found.model.settings, own)
    except ValueError as error:
        return [], str(error)
    return targets, (
        "one is a failure: by chance 5 % of models with the published weights have one, if 32 "
        "texts of wiki_bio differ from the mean of these as one more of these does"
    )


def noted(target: Target) -> str:
    """What is to be said of a published value beside the measured one."""
    return "differs; " * target.differs + f"other texts explain ± {target.tolerance:.2g}"


def claims(arrays: dict[str, np.ndarray], models: Sequence[Model]) -> list[Row]:
    """The published curves against ours at initialisation, and what the curves are to show.

    A checkpoint has no rows: it is one network, of which nothing can be said with an interval.
    Layer 0 is the embedding, of other texts than the published ones. Whether a curve is one of ours
    is asked only with so many initialisations that one of all the curves could be refused.
    """
    rows, compared = [], []
    for found in results_of(arrays, [model for model in models if not model.has_weights]):
        label, settings = found.model.label, found.model.settings
        published = published_curves(settings, found.model.config.depth).get("init", {})
        for variant, curve in published.items():
            ours = found.by_seed("init", variant)
            if ours is not None:
                row = (f"{label}, {variant}", curve[1:], ours[:, 1:], READ_OFF)
                compared.append(curve_row("curves", *row))
        bare, skips = (found.by_seed("init", name) for name in ("SAN", "SAN+skip"))
        if bare is None:
            continue
        rows += [
            make_row("collapse", label, 1 - bare[:, -1] / bare[:, 0]),
            make_row("skips stop", label, skips[:, -1] / skips[:, 0]),
            make_row("law of the fall", label, power_law_wins(skips)),
            make_row("skips", label, clipped_log10(skips[:, -1]) - clipped_log10(bare[:, -1])),
        ]
    fewest = len(compared) / ERROR
    return [row for row in compared if row.draws + 1 >= fewest] + rows


def residual_figure(arrays: dict[str, np.ndarray], model: Model) -> Figure:
    """Relative residual by layer, mean ± one standard deviation over weights and texts, on the
    published curves (grey). Dotted: as the paper's text says, where its code differs."""
    found, depth = Results(arrays, model), model.config.depth
    fig, axes = figures.figure(1, 4, width=2.9, height=2.5, sharey=True)
    published, layers = published_curves(model.settings, depth), np.arange(depth + 1)
    for variant, ax in zip(ABLATIONS, axes[0], strict=True):
        for index, (kind, curves) in enumerate(found.curves.items()):
            if curves and kind in published:
                style = {"ls": "-" if kind == "pretrained" else "--", "color": "#9A9A9A", "lw": 3}
                text = f"published, {NAMES[kind]}"
                ax.plot(layers, published[kind][variant], label=text, **style)
            for reading in (own for own in READINGS if (variant, own) in curves):
                flat = curves[variant, reading].reshape(-1, depth + 1)
                text = NAMES[kind] if reading == "published" else None
                style = {"linestyle": "-" if text else ":", "marker": ""}
                figures.band(ax, layers, flat, text, index, **style)
        ax.set(title=words(variant), xlabel="layer")
        figures.integer_ticks(ax)
    axes[0, 0].set(ylim=(-0.03, None), ylabel="residual ratio ‖res(X)‖ / ‖X‖")
    handles = dict(zip(*axes[0, 0].get_legend_handles_labels()[::-1], strict=True))
    fig.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3)
    return fig


def residuals_of(label: str) -> Callable[..., Figure | None]:
    """Makes the function that draws the residuals of a model, where the run has it."""

    def draw(arrays: dict[str, np.ndarray], models: Sequence[Model]) -> Figure | None:
        own = [model for model in models if model.label == label]
        return residual_figure(arrays, own[0]) if own else None

    draw.__doc__ = (
        f"{label}: relative residual by layer, mean ± one standard deviation over weights and "
        "texts; the published curves in grey."
    )
    return draw


def figures_of(labels: Iterable[str]) -> dict[str, Callable[..., Figure | None]]:
    """Names the figures of models."""
    return {
        f"residuals_{re.sub(r'[^A-Za-z0-9.+_-]', '_', label)}": residuals_of(label)
        for label in labels
    }


def are_published(arrays: dict[str, np.ndarray], models: Sequence[Model]) -> bool:
    """Whether these are models of the paper, in place of anybody's checkpoints."""
    return all(model.label in PUBLISHED for model in models)


def collapse_figure(arrays: dict[str, np.ndarray], models: Sequence[Model]) -> Figure | None:
    """Residual ratio by layer at initialisation, mean and standard deviation over draws: attention
    alone (solid) and with skips (dashed)."""
    if not are_published(arrays, models):
        return None
    fig, ((ax,),) = figures.figure(1, 1)
    for index, found in enumerate(results_of(arrays, models)):
        for variant, text, dash in (("SAN", "alone", "-"), ("SAN+skip", "with skips", "--")):
            values = found.by_seed("init", variant)
            if values is not None:
                layers, label = np.arange(values.shape[1]), f"{words(found.model.label)}, {text}"
                figures.band(ax, layers, values, label, index, linestyle=dash)
    ax.set(xlabel="layer", ylabel="residual ratio of attention", ylim=(-0.03, 1.03))
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=7)
    return fig


def finding(arrays: dict[str, np.ndarray], models: Sequence[Model]) -> Finding | None:
    """Where attention alone has lost all but a hundredth, and what skips keep."""
    threshold = rc.MEASURES["residual_ratio"].alarm.value
    layers, left = [], []
    for found in results_of(arrays, models):
        alone, skips = (found.by_seed("init", variant) for variant in ("SAN", "SAN+skip"))
        if alone is not None:
            below = np.flatnonzero(alone.mean(axis=0) < threshold)
            where = f"at layer {below[0]}" if below.size else "at no layer"
            layers.append(f"{where} in {words(found.model.label)}")
            left.append(f"{skips.mean(axis=0)[-1]:.2f}")
    if not (layers and are_published(arrays, models)):
        return None
    text = f"At initialisation the residual ratio of attention alone falls below {threshold:g} "
    text += f"{', '.join(layers)}; with skips the last layer keeps {', '.join(left)}."
    return Finding("collapse", text)


EXPERIMENT = Experiment(
    order=40,
    title="BERT, ALBERT and XLNet at initialisation",
    brief="BERT, ALBERT and XLNet, at initialisation or from a checkpoint folder, beside the "
    "published curves",
    claim="Attention without skips and MLPs loses rank within a few layers in all three "
    "architectures; skips prevent it, and MLPs alone slow it at most (published figures of the "
    "relative residual by layer; unseeded initialisations, other texts).",
    presets={
        # The fewest draws of which a share can be decided beside the rows of run_collapse, and as
        # many tokens as show the curves: their residuals are those of longer texts.
        "quick": "--num_seeds=7 --num_texts=1 --max_tokens=32",
        # What differs between initialisations is far more than what differs between texts.
        "paper": f"--num_seeds={FEWEST_DRAWS} --num_texts=4",
        "tiny": "--models=albert-base-v2 --num_texts=2 --max_tokens=8",
    },
)
FIGURES = name_figures(collapse_figure) | figures_of(PUBLISHED)


def main(options: Flags) -> Shown:
    """Measures what the run lacks, and shows it."""
    with open_run(options, models_of, identity) as run:
        points = run.measure(measure_all)
        return run.publish(
            points,
            table=rows_of,
            figures=FIGURES | figures_of(model.label for model in run.points[0].setup),
            claims=claims,
            compare=compare,
            finding=finding,
        )


if __name__ == "__main__":
    cli.run(main, FLAGS)
