"""The tables and page of `run_architectures`, from what its run folder holds."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments.architectures.figures import NAMES, Results, draw, slug
from experiments.shell import cli
from experiments.shell.entry import Entry
from rank_collapse import pretrained, report, runs
from rank_collapse.network.surgery import VARIANTS
from rank_collapse.report.page import Comparison


def write(run: Any, models: list, batches: Mapping[str, Any], options: Any) -> None:
    """results.csv, figures, summary.json and report.html of a run whose parts are all there."""
    rows, sections, summary = [], [], {}
    for model in models:
        results = Results(run.arrays, model.label)
        rows += table(model, results)
        drawn = draw(model, results)
        for name, (figure, _) in drawn.items():
            run.save_figure(figure, name)
        summary[model.label] = summarise(model, results, batches[model.label])
        files = [run.path / "figures" / f"{name}.png" for name in drawn]
        shown = [(f.read_bytes(), text) for f, (_, text) in zip(files, drawn.values(), strict=True)]
        sections.append(
            report.Section(
                name=slug(model.label),
                title=model.label,
                claim="Pure attention loses rank doubly exponentially with depth; MLPs slow it, "
                "skips stop it (Dong et al. 2021).",
                command=cli.command_line(),
                figures=shown,
                comparisons=compare({model.label: summary[model.label]}),
                reading=reading({model.label: summary[model.label]}),
                details="all numbers: results.csv and arrays.npz",
            )
        )
    run.write_rows(rows)
    title = "Rank collapse in architectures"
    intro = (
        "Residual ratios, path lengths and the theory's constants on the same weights and texts."
    )
    runs.write_atomically(run.path / "report.html", report.render(title, intro, sections).encode())
    run.finish(summary)


def table(model: Any, results: Results) -> list[dict[str, Any]]:
    """One row per model, weights, measure and layer (or path length): mean and spread."""
    rows = []
    for kind in results.kinds:
        for name in results.names(kind):
            values = results.get(kind, name)
            part, *rest, measure = name.split("/")
            variant, reading_ = rest or ("Transformer", "")
            for place in np.ndindex(values.shape[1:]):
                column = values[(slice(None), *place)].astype(np.float64)
                rows.append(
                    {
                        "model": model.label,
                        "weights": kind,
                        "part": part,
                        "variant": variant,
                        "reading": reading_,
                        "measure": measure,
                        "layer_or_length": place[0] if place else "",
                        "head_or_path": place[1] if len(place) > 1 else "",
                        "mean": float(column.mean()),
                        "std": float(column.std()),
                        "examples": len(column),
                    }
                )
    return rows


def summarise(model: Any, results: Results, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The means that the report and `reproduce` compare with what was published."""
    config = pretrained.config_of(model.settings, model.settings.get("part"))
    means = {
        kind: {
            name: np.mean(results.get(kind, name), axis=0, dtype=np.float64).tolist()
            for name in results.names(kind)
            if results.get(kind, name).ndim <= 3
        }
        for kind in results.kinds
    }
    x, mask = batch["x"], batch["mask"]
    tokens = x.shape[1] if mask is None else float(mask.sum(axis=1).mean())
    return {
        "family": model.settings["model_type"],
        "depth": config.depth,
        "heads": config.num_heads,
        "texts": len(x),
        "mean_tokens": tokens,
        "published": pretrained.published_curves(model.settings, config.depth),
        "means": means,
    }


def compare(summary: Mapping[str, Any]) -> list[Comparison]:
    """Residual ratios beside the published ones, and what the paths say."""
    rows = []
    for label, model in summary.items():
        for kind, means in model["means"].items():
            published = model["published"].get(kind)
            for variant in VARIANTS:
                ours = means.get(f"residuals/{variant}/published/residual_ratio")
                if ours is not None:
                    rows += _variant_rows(label, kind, variant, ours, published)
            if "lengths/size" in means:
                rows.append(
                    Comparison(
                        f"{label}, {NAMES[kind]}: error of the sum over all paths",
                        max(np.atleast_1d(means["lengths/error"]).tolist()),
                        0.0,
                        bool(np.max(means["lengths/error"]) < 1e-5),
                        f"(1+{model['heads']})^{model['depth']} paths, relative to the output",
                    )
                )
    return rows


def _variant_rows(label, kind, variant, ours, published):
    """Layer 1 and the last layer; collapse means below 0.01, as in the published figure."""
    rows = []
    for layer in (1, len(ours) - 1):
        theirs = published[variant][layer] if published else None
        agrees = None
        if theirs is not None:
            agrees = (ours[layer] < 0.01) == (theirs < 0.01) or abs(ours[layer] - theirs) < 0.1
        note = "agrees: both or neither below 0.01, or within 0.1" if published else ""
        what = f"{label}, {NAMES[kind]}, {variant}: residual ratio, layer {layer}"
        rows.append(Comparison(what, ours[layer], theirs, agrees, note))
    return rows


def reading(summary: Mapping[str, Any]) -> str:
    """What the numbers say against the paper, in a sentence or two."""
    said = []
    for label, model in summary.items():
        for kind, means in model["means"].items():
            curves = {v: means.get(f"residuals/{v}/published/residual_ratio") for v in VARIANTS}
            if curves["SAN"] is None:
                continue
            below = next((l for l, r in enumerate(curves["SAN"]) if r < 0.01), None)
            depth = "never" if below is None else f"at layer {below}"
            text = (
                f"{label} ({NAMES[kind]}): SAN falls below 0.01 {depth}; after the last layer "
                f"SAN+skip keeps {curves['SAN+skip'][-1]:.2g} and the Transformer "
                f"{curves['Transformer'][-1]:.2g}"
            )
            if "lengths/cosine_up_to" in means:
                close = np.array(means["lengths/cosine_up_to"])
                enough = int(np.argmax(close > 0.99))
                text += (
                    f"; paths of length up to {enough} give the output to a cosine of "
                    f"{close[enough]:.3f}"
                )
            said.append(text)
    return ". ".join(said) + "."


def show(run: Any) -> None:
    """Prints the headline numbers."""
    for line in reading(run.summary).removesuffix(".").split(". "):
        print(line)
    print(f"written to {run.path}; page: {run.path / 'report.html'}")


ENTRY = Entry(
    title="BERT, ALBERT and XLNet at initialisation",
    claim="Attention without skips and MLPs loses rank within a few layers in all three "
    "architectures; skips prevent it, and MLPs alone slow it at most (published figures of the "
    "relative residual by layer; unseeded initialisations, other texts).",
    presets={
        "quick": ("--num_texts=8", "--max_tokens=64", "--parts=residuals"),
        "paper": ("--num_seeds=4",),
    },
    compare=compare,
    reading=reading,
    captions={
        f"residuals_{name}": f"{name} at initialisation: relative residual by layer, mean ± one "
        "standard deviation over texts; the published curves in grey."
        for name in pretrained.PUBLISHED
    },
)
