"""Architectures: the residual of BERT, ALBERT and XLNet by layer, with the published curves.

Reproduces the residual figures of BERT, ALBERT and XLNet in Dong, Cordonnier and Loukas (2021):
‖res(X)‖/‖X‖ by layer for SAN (attention alone), SAN+MLP, SAN+skip and the full model. All variants
have the same weights.

    python -m experiments.run_architectures
    python -m experiments.run_architectures --checkpoints=my-bert,hf:gpt2 --text=texts.txt

Without --checkpoints the command initialises the three published models at random, which takes
about 2 minutes on two cores. --checkpoints takes folders in the format of Hugging Face, names on
the hub such as hf:bert-base-cased (this needs the package huggingface_hub), or random:NAME for an
architecture with random weights. Each checkpoint is compared with its own random initialisation.
The command reads weights layer by layer, and uses one device unless --num_devices is set.
`rank-collapse check` and `rank-collapse depth` measure more about a checkpoint. Expect SAN to
collapse within three layers, and skips to prevent the collapse.
"""

import re
from collections.abc import Iterator, Sequence

import numpy as np

import rank_collapse as rc
from experiments.architectures.published_models import (
    NAMES,
    Curves,
    Model,
    Results,
    identity,
    make_models,
    measure,
)
from experiments.architectures.published_targets import (
    READ_OFF,
    Target,
    describe_test,
    published_targets,
)
from experiments.lab import (
    Experiment,
    Finding,
    Flags,
    Run,
    cli,
    describe_figures,
    open_run,
    shared_flags,
)
from experiments.verdicts import (
    ERROR,
    STATEMENTS,
    Comparison,
    Row,
    TableRow,
    curve_row,
    make_row,
    power_law_wins,
    show_ratio,
)
from rank_collapse.measures.rounding import rounding_limit
from rank_collapse.network.surgery import ABLATIONS, READINGS
from rank_collapse.pretrained import PUBLISHED, published_curves
from rank_collapse.report import figures
from rank_collapse.report.wording import words

THRESHOLD = rc.MEASURES["residual_ratio"].alarm.value  # below it tokens count as collapsed
ROUNDING = rounding_limit("float32")  # at most this of tokens that are equal but for rounding
# With so many draws the least p, 1/(draws + 1), of one network is below its share of `ERROR`.
FEWEST_DRAWS = round(len(STATEMENTS["curves"].settings) / ERROR)

FLAGS = cli.make_flags(
    "architectures",
    num_seeds=1,
    num_devices=1,  # one device whose matrix products use all cores
    shows="mean,layer=last",
    execution=("chunk",),
)
FLAGS.define("list", "checkpoints", [], "Checkpoint folders, hf:NAME of the hub, or random:NAME.")
FLAGS.define(
    "list",
    "models",
    list(PUBLISHED),
    f"Models to initialise without --checkpoints, out of {', '.join(PUBLISHED)}.",
)
shared_flags.define_text(
    FLAGS,
    "Texts: a .tsv with a header (RTE), or paragraphs (default: a text shipped with the package).",
)
FLAGS.define("string", "token_ids", None, "Token ids in place of --text, one text a line.")
FLAGS.define(
    "boolean", "join", False, "Join texts until each has --max_tokens, as the published ones had."
)
FLAGS.define("boolean", "initialisation", True, "Also each checkpoint's own random initialisation.")
for name, default, least, text in (
    ("num_texts", 32, 1, "Texts."),
    ("max_tokens", 128, 2, "Tokens kept of each."),
    ("chunk", 8, 1, "Texts at once: memory."),
):
    FLAGS.define("integer", name, default, text, lower_bound=least)


def mean_curves(curves: Curves, variant: str, reading: str = "published") -> np.ndarray:
    """Computes means over texts [seeds, L + 1] of one kind of weights."""
    return curves[variant, reading].mean(axis=1, dtype=float)


def make_rows(results: Results) -> Iterator[TableRow]:
    """Makes a row for each model, weights, ablation and layer: over weights and texts.

    Args:
        results: Curves of each model.
    """
    for label, by_kind in results.items():
        for kind, curves in by_kind.items():
            for (variant, reading), values in curves.items():
                flat = values.reshape(-1, values.shape[-1]).astype(float)
                for layer, column in enumerate(flat.T):
                    yield {
                        "model": label,
                        "weights": kind,
                        "variant": variant,
                        "reading": reading,
                        "layer": layer,
                        "mean": float(column.mean()),
                        "std": float(column.std()),
                        "rounding": float((column <= ROUNDING).mean()),
                        "examples": len(flat),
                    }


def are_published(models: Sequence[Model]) -> bool:
    """Returns whether these are models of the paper, not a user's checkpoints."""
    return all(model.label in PUBLISHED for model in models)


@figures.styled
def collapse_figure(results: Results, models: Sequence[Model]) -> figures.Figure | None:
    """Residual ratio (vertical axis) by layer (horizontal axis) at initialisation, for attention
    alone (solid) and attention with skips (dashed). Lines are means and bands are standard
    deviations over draws of the weights."""
    if not are_published(models):
        return None
    fig, ((ax,),) = figures.figure(1, 1)
    for index, model in enumerate(models):
        for variant, text, dash in (("SAN", "alone", "-"), ("SAN+skip", "with skips", "--")):
            values = mean_curves(results[model.label]["init"], variant)
            layers, label = np.arange(values.shape[1]), f"{words(model.label)}, {text}"
            figures.band(ax, layers, values, label, index, linestyle=dash)
    ax.set(xlabel="layer", ylabel="residual ratio of attention", ylim=(-0.03, 1.03))
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=7)
    return fig


@figures.styled
def residuals_figure(results: Results, model: Model) -> figures.Figure:
    """Relative residual by layer, mean ± one standard deviation over weights and texts, and the
    published curves (grey). Where the code of the paper differs from its text, the dotted lines
    follow the text."""
    depth = model.config.depth
    fig, axes = figures.figure(1, 4, width=2.9, height=2.5, sharey=True)
    published, layers = published_curves(model.settings, depth), np.arange(depth + 1)
    for variant, ax in zip(ABLATIONS, axes[0], strict=True):
        for kind, curves in results[model.label].items():
            if kind in published:
                style = {"ls": "-" if kind == "pretrained" else "--", "color": "#9A9A9A", "lw": 3}
                text = f"published, {NAMES[kind]}"
                ax.plot(layers, published[kind][variant], label=text, **style)
            for reading in (name for name in READINGS if (variant, name) in curves):
                flat = curves[variant, reading].reshape(-1, depth + 1)
                text = NAMES[kind] if reading == "published" else None
                style = {"linestyle": "-" if text else ":", "marker": ""}
                figures.band(ax, layers, flat, text, [*NAMES].index(kind), **style)
        ax.set(title=words(variant), xlabel="layer")
        figures.integer_ticks(ax)
    axes[0, 0].set(ylim=(-0.03, None), ylabel="residual ratio ‖res(X)‖ / ‖X‖")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    by_label = dict(zip(labels, handles, strict=True))  # each once
    fig.legend(by_label.values(), by_label.keys(), loc="outside lower center", ncols=3)
    return fig


def residuals_name(label: str) -> str:
    """Names the figure of a model."""
    return f"residuals_{re.sub(r'[^A-Za-z0-9.+_-]', '_', label)}"


def describe_residuals(label: str) -> str:
    """Writes the caption of the figure of a model."""
    return (
        f"{label}: residual ratio (vertical axis) by layer (horizontal axis). Each panel shows one "
        "variant of the network. Lines are means, and bands are one standard deviation, over "
        "draws of the weights and texts. Grey lines are the published curves. The published code "
        "removes skips and MLPs in another way than the text of the paper says. Dotted lines show "
        "the way of the text, where the two differ."
    )


def judge_claims(results: Results, models: Sequence[Model]) -> list[Row]:
    """Tests the published curves against ours at initialisation, and the claims about the curves.

    A checkpoint has no rows: it is one network, which has no interval. Layer 0 is the embedding, of
    other texts than the published ones. The published curves of a network's variants are joined and
    tested as one curve. The test runs only if there are enough initialisations to reject one of the
    networks.

    Args:
        results: Curves of each model.
        models: The models.
    """
    rows, compared = [], []
    for model in (model for model in models if not model.has_weights):
        label, curves = model.label, results[model.label]["init"]
        published = published_curves(model.settings, model.config.depth).get("init", {})
        if published:  # all variants of one initialisation are one curve
            curve = np.concatenate([values[1:] for values in published.values()])
            draws = np.concatenate([mean_curves(curves, name)[:, 1:] for name in published], axis=1)
            compared.append(curve_row("curves", label, curve, draws, READ_OFF))
        bare, skips = (mean_curves(curves, name) for name in ("SAN", "SAN+skip"))
        remaining = skips[:, -1] / skips[:, 0]
        rows += [
            make_row("collapse", label, 1 - bare[:, -1] / bare[:, 0]),
            make_row("skips stop", label, remaining),
            make_row("law of the fall", label, power_law_wins(skips)),
            judge_skips(label, skips[:, -1], bare[:, -1]),
        ]
    fewest = len(compared) / ERROR
    return [row for row in compared if row.draws + 1 >= fewest] + rows


def judge_skips(label: str, with_skips: np.ndarray, bare: np.ndarray) -> Row:
    """Tests how many powers of ten more remain with skips.

    Ratios of attention alone below float32's rounding count as the rounding, "at least".

    Args:
        label: Label of the model.
        with_skips: Residual ratios after the last layer, one for each seed.
        bare: Residual ratios of attention alone, one for each seed.
    """
    note = "at least: attention alone is below float32's rounding" * bool((bare <= ROUNDING).any())
    decades = np.log10(with_skips) - np.log10(np.maximum(bare, ROUNDING))
    return make_row("skips", label, decades, note=note)


def compare_results(results: Results, models: Sequence[Model]) -> Iterator[Comparison]:
    """Compares residual ratios with the published ones, and reports where attention has collapsed.

    The comparison is at layer 1 and at the last layer; for pretrained weights at all layers, with
    the tolerance that other texts explain.

    Args:
        results: Curves of each model.
        models: The models.
    """
    for model in models:
        for kind, curves in results[model.label].items():
            targets, note = find_targets(model, kind, curves)
            for variant, reading in curves:
                yield from compare_curve(model, kind, curves, (variant, reading), targets)
            if note:
                off = sum(target.differs for target in targets)
                count = f"{off} of {len(targets)}" if targets else "not compared"
                text = f"{model.label}, {NAMES[kind]}: values that differ from the published ones"
                yield Comparison(text, count, 0 if targets else None, note)


def compare_curve(
    model: Model, kind: str, curves: Curves, ablation: tuple[str, str], targets: Sequence[Target]
) -> Iterator[Comparison]:
    """Compares one curve with the published one.

    Args:
        model: The model.
        kind: Kind of its weights.
        curves: Curves of these weights.
        ablation: Variant and reading of the curve.
        targets: Published values of pretrained weights.
    """
    (variant, reading), depth = ablation, model.config.depth
    published = published_curves(model.settings, depth).get(kind)
    ratios = mean_curves(curves, variant, reading)
    text = f"{model.label}, {NAMES[kind]}, {words(variant)}" + ", as the text says" * (
        reading == "text"
    )
    by_layer = {t.layer: t for t in targets if (t.variant, "published") == ablation}
    for layer in by_layer or (1, depth):
        low, high = ratios[:, layer].min(), ratios[:, layer].max()
        is_measured = low < high and high > ROUNDING
        note = f"{low:.4g} to {high:.4g} over seeds" if is_measured else ""
        if by_layer:
            target = by_layer[layer]
            note = "differs; " * target.differs + f"other texts explain ± {target.tolerance:.2g}"
        yield Comparison(
            f"{text}: residual ratio, layer {layer}",
            show_ratio(ratios[:, layer].mean()),
            published and published[variant][layer],
            note,
        )
    if variant == "SAN":
        text = f"{text}: first layer with a residual ratio below {THRESHOLD:g}"
        layer = collapsed_layer(ratios)
        yield Comparison(text, "none" if layer is None else layer)


def collapsed_layer(ratios: np.ndarray) -> int | None:
    """Finds the first layer whose mean residual ratio is below the alarm; None for none."""
    below = np.flatnonzero(ratios.mean(axis=0) < THRESHOLD)
    return int(below[0]) if below.size else None


def find_targets(model: Model, kind: str, curves: Curves) -> tuple[list[Target], str]:
    """Finds the published values that pretrained weights are compared with, layer by layer.

    Args:
        model: The model.
        kind: Kind of its weights.
        curves: Curves of these weights.

    Returns:
        The values; and a sentence about how they fail, or why there are none. ([], "") for other
        weights.
    """
    if kind != "pretrained":
        return [], ""
    published_readings = {variant: curves[variant, "published"][0] for variant in ABLATIONS}
    try:
        targets = published_targets(model.settings, published_readings)
    except ValueError as error:
        return [], str(error)
    return targets, describe_test()


def make_finding(results: Results, models: Sequence[Model]) -> Finding | None:
    """Reports where attention alone has lost all but a hundredth, and how much skips keep.

    Args:
        results: Curves of each model.
        models: The models.

    Returns:
        The finding; None if these are not the published models.
    """
    if not are_published(models):
        return None
    falls, ends = [], []
    for model in models:
        curves = results[model.label]["init"]
        layer = collapsed_layer(mean_curves(curves, "SAN"))
        place = "at no layer" if layer is None else f"at layer {layer}"
        falls.append(f"{place} in {words(model.label)}")
        ends.append(f"{mean_curves(curves, 'SAN+skip').mean(axis=0)[-1]:.2f}")
    text = f"At initialisation the residual ratio of attention alone falls below {THRESHOLD:g} "
    text += f"{', '.join(falls)}; with skips the last layer keeps {', '.join(ends)}."
    return Finding("collapse", text)


EXPERIMENT = Experiment(
    order=40,
    title="BERT, ALBERT and XLNet at initialisation",
    brief="residual by layer in BERT, ALBERT and XLNet, at initialisation or from a checkpoint "
    "folder, with the published curves",
    claim="In all three architectures attention alone, without skips and MLPs, loses rank "
    "within a few layers. Skips prevent this collapse. MLPs without skips may slow the "
    "collapse but do not prevent it. The published figures show the residual ratio by "
    "layer. The networks in these figures were initialised without a fixed seed, and read "
    "other texts than our networks.",
    presets={
        # The fewest draws of which a share can be decided beside the rows of run_collapse, and as
        # many tokens as show the curves: their residuals are those of longer texts.
        "quick": "--num_seeds=7 --num_texts=1 --max_tokens=32",
        # What differs between initialisations is far more than what differs between texts.
        "reported": f"--seed=3000 --num_seeds={FEWEST_DRAWS} --num_texts=1",
        "tiny": "--models=albert-base-v2 --num_texts=2 --max_tokens=8",
    },
    figures=describe_figures(collapse_figure)
    | {residuals_name(label): describe_residuals(label) for label in PUBLISHED},
)


def main(options: Flags) -> Run:
    """Measures the points, the combinations of flag values, that the run folder lacks; saves the
    table, figures and claims."""
    with open_run(options, make_models, identity) as run:
        for point in run.measure(measure):
            results, models = point.results, point.setup
            point.save_table(make_rows(results))
            point.save_figure("collapse", collapse_figure, results, models)
            for model in models:
                point.save_figure(residuals_name(model.label), residuals_figure, results, model)
            point.save_claims(judge_claims(results, models))
            point.save_comparisons(compare_results(results, models))
            point.save_finding(make_finding(results, models))
        return run.finish()


if __name__ == "__main__":
    cli.run(main, FLAGS)
