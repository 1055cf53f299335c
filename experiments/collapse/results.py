"""What run_collapse makes of its measurements: rows, figures, headline numbers, its report entry.

`results` is {(norm, weight scale, skip gain): {"variant/measure": [s, L + 1]}}.
"""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments.shell.entry import Entry
from rank_collapse.pretrained.published import PUBLISHED, published_curves
from rank_collapse.report import figures
from rank_collapse.report.page import Comparison
from rank_collapse.theory.logdomain import local_rate

RATIO = r"$\|\mathrm{res}(X^l)\|_{1,\infty} \,/\, \|X^l\|_{1,\infty}$"
BOUNDS = ("log10_bound", "log10_layer_bound", "admissible")
SLOWER = "MLPs slow it"
PUBLISHED_NAMES = {
    "san": "SAN", "san_mlp": "SAN+MLP", "san_skip": "SAN+skip", "transformer": "Transformer",
}  # fmt: skip
COLLAPSED = 0.01  # a ratio below it counts as collapsed
Results = dict[tuple[str, float, float], dict[str, np.ndarray]]


def by_variant(found: dict[str, np.ndarray], measure: str) -> dict[str, np.ndarray]:
    """{variant: values} of one measure."""
    return {k.split("/")[0]: v for k, v in found.items() if k.endswith(f"/{measure}")}


def rates(log10_residual: np.ndarray) -> np.ndarray:
    """Local rates [s, L]; NaN where the logarithm is about to pass 0 and a rate means nothing."""
    with np.errstate(invalid="ignore", divide="ignore"):
        found = np.array(local_rate(jnp.asarray(log10_residual)), float)
        before, after = log10_residual[..., :-1], log10_residual[..., 1:]
        meaningful = (np.abs(before) > 1) & (before * after > 0) & np.isfinite(after)
    return np.where(meaningful, found, np.nan)


def rows_of(results: Results) -> Iterator[dict[str, Any]]:
    """One row per setting, variant, seed and layer."""
    measures = ("ratio", "log10_residual", "plain_log10_residual", *BOUNDS)
    for (norm, scale, gain), found in results.items():
        for variant, profile in by_variant(found, "log10_residual").items():
            rate = rates(profile)
            for seed, layer in np.ndindex(*profile.shape):
                row = {"norm": norm, "weight_scale": scale, "skip_gain": gain}
                row |= {"variant": variant, "seed": seed, "layer": layer}
                for measure in measures:
                    values = found.get(f"{variant}/{measure}")
                    row[measure] = "" if values is None else f"{values[seed, layer]:.8g}"
                row["local_rate"] = f"{rate[seed, layer - 1]:.6g}" if layer else ""
                yield row


def figures_of(results: Results) -> dict[str, Any]:
    """The paper's figure, the logarithmic one and the rates, at the first swept values; sweeps."""
    first = next(iter(results))[1:]
    panels = {f"norm: {norm}": found for (norm, *swept), found in results.items()
              if tuple(swept) == first}  # fmt: skip

    def curves(measure):
        return {panel: by_variant(found, measure) for panel, found in panels.items()}

    profiles = curves("log10_residual")
    drawn = {
        "residual_ratio": figures.residual_ratio_figure(curves("ratio"), RATIO),
        "log_residual": figures.log_residual_figure(
            profiles,
            curves("log10_layer_bound"),
            curves("log10_bound"),
            curves("plain_log10_residual"),
        ),
        "local_rate": figures.local_rate_figure(
            {p: {v: rates(a) for v, a in group.items()} for p, group in profiles.items()}
        ),
    }
    for position, name in ((1, "weight_scale"), (2, "skip_gain")):
        swept = sweep_curves(results, position, first)
        if len(next(iter(swept.values()))) > 1:
            drawn[f"sweep_{name}"] = figures.sweep_figure(swept, name.replace("_", " "), RATIO)
    return drawn


def sweep_curves(results: Results, position: int, first: tuple) -> dict[str, dict[str, Any]]:
    """{network: {swept value: ratio}} along one swept quantity, the other at its first value."""
    other = 3 - position
    panels: dict[str, dict[str, Any]] = {}
    for key, found in results.items():
        if key[other] == first[other - 1]:
            for variant, ratio in by_variant(found, "ratio").items():
                panels.setdefault(f"{variant}, norm: {key[0]}", {})[f"{key[position]:g}"] = ratio
    return panels


def summary_of(results: Results) -> dict[str, Any]:
    """Headline numbers of every setting and variant: means over seeds, spread where it matters."""
    settings = []
    for (norm, scale, gain), found in results.items():
        variants = {}
        for variant, profile in by_variant(found, "log10_residual").items():
            ratio, rate = found[f"{variant}/ratio"], rates(profile)
            numbers = {
                "ratio": [float(v) for v in ratio.mean(axis=0)],
                "ratio_std_last": float(ratio[:, -1].std()),
                "log10_residual_last": _number(profile[:, -1].mean()),
                "plain_log10_residual_last": _number(
                    found[f"{variant}/plain_log10_residual"][:, -1].mean()
                ),
                "local_rate_last": _number(rate[:, -1].mean()),
            }
            if f"{variant}/log10_bound" in found:
                numbers |= bound_numbers(profile, *(found[f"{variant}/{b}"] for b in BOUNDS))
            variants[variant] = numbers
        settings.append(
            {"norm": norm, "weight_scale": scale, "skip_gain": gain, "variants": variants}
        )
    return {"settings": settings}


def bound_numbers(
    profile: np.ndarray, stack: np.ndarray, layer: np.ndarray, admissible: np.ndarray
) -> dict[str, Any]:
    """How often the theorems' condition held, how often a bound then did not, and how far it is.

    The stack's bound needs the condition in every layer so far, a layer's in that layer only.
    Logarithms in float32 are known to about 1e-5 of their size.
    """
    room = 1e-3 + 1e-5 * np.abs(profile)
    here = admissible[:, 1:] > 0
    sofar = np.logical_and.accumulate(here, axis=1)
    above_stack = (profile > stack + room)[:, 1:]
    above_layer = (profile > layer + room)[:, 1:]
    return {
        "layers": int(here.size),
        "layers_admissible": int(here.sum()),
        "layers_above_their_bound": int((above_layer & here).sum()),
        "prefixes_admissible": int(sofar.sum()),
        "prefixes_above_the_stack_bound": int((above_stack & sofar).sum()),
        "log10_bound_last": _number(stack[:, -1].mean()),
        "log10_layer_bound_last": _number(layer[:, -1].mean()),
    }


def _number(value):
    """A float, or None where it is none: JSON has no NaN."""
    return float(value) if np.isfinite(value) else None


def compare(summary: dict[str, Any]) -> list[Comparison]:
    """Each of the paper's claims on each norm placement, beside BERT's published curve."""
    bert = published_curves(PUBLISHED["bert-base-cased"], 12)["init"]
    first = summary["settings"][0]
    rows = []
    for setting in summary["settings"]:
        if any(setting[k] != first[k] for k in ("weight_scale", "skip_gain")):
            continue
        where = f"norm {setting['norm']}"
        for variant, numbers in setting["variants"].items():
            last = len(numbers["ratio"]) - 1
            curve = bert[PUBLISHED_NAMES[variant]]
            published = curve[min(last, len(curve) - 1)]
            measured = numbers["ratio"][-1]
            rows.append(
                Comparison(
                    f"{variant}, {where}: residual ratio after {last} layers",
                    measured,
                    published,
                    (measured < COLLAPSED) == (published < COLLAPSED),
                    "published: BERT at initialisation (768 wide, 12 heads, post-norm); agrees if "
                    f"both or neither are below {COLLAPSED}",
                )
            )
        rows += _deep(setting, where)
    return rows


def _shown(value):
    return "nothing" if value is None else f"{value:.4g}"


def _deep(setting, where):
    """What only the logarithms show."""
    rows, variants = [], setting["variants"]
    for variant, numbers in variants.items():
        rate = numbers["local_rate_last"]
        if variant == "san" and rate is not None:
            note = (
                f"log10 of the residual is {_shown(numbers['log10_residual_last'])} there; "
                f"plain arithmetic shows {_shown(numbers['plain_log10_residual_last'])}"
            )
            rows.append(
                Comparison(
                    f"{variant}, {where}: local rate at the last layer",
                    rate, 3, abs(rate - 3) < 0.05, note,
                )
            )  # fmt: skip
        if "layers" in numbers:
            theorem = "Theorem 2.3" if variant == "san" else "Corollary 3.2"
            above = numbers["layers_above_their_bound"] + numbers["prefixes_above_the_stack_bound"]
            rows.append(
                Comparison(
                    f"{variant}, {where}: residuals above the bound of {theorem}",
                    above, 0, above == 0,
                    f"the lemma's condition held in {numbers['layers_admissible']} of "
                    f"{numbers['layers']} layers; at the last one log10 of the residual is "
                    f"{_shown(numbers['log10_residual_last'])}, the layer's bound "
                    f"{_shown(numbers['log10_layer_bound_last'])}, the stack's "
                    f"{_shown(numbers['log10_bound_last'])}",
                )
            )  # fmt: skip
    deep = {v: variants.get(v, {}).get("log10_residual_last") for v in ("san", "san_mlp")}
    if None not in deep.values():
        rows.append(
            Comparison(
                f"{where}: log10 residual at the end, san_mlp beside san",
                f"{deep['san_mlp']:.4g} and {deep['san']:.4g}",
                SLOWER,
                deep["san_mlp"] > deep["san"],
            )
        )
    return rows


def reading(summary: dict[str, Any]) -> str:
    """One or two sentences against the paper, from the numbers."""
    first = summary["settings"][0]
    ends: dict[str, list[float]] = {}
    for setting in summary["settings"]:
        if all(setting[k] == first[k] for k in ("weight_scale", "skip_gain")):
            for variant, numbers in setting["variants"].items():
                ends.setdefault(variant, []).append(numbers["ratio"][-1])

    def names(chosen):
        return " and ".join(chosen) if chosen else "none"

    down = [v for v, e in ends.items() if max(e) < COLLAPSED]
    up = [v for v, e in ends.items() if min(e) >= COLLAPSED]
    norms = ", ".join(dict.fromkeys(s["norm"] for s in summary["settings"]))
    text = f"With norm {norms}: collapsed at the last layer: {names(down)}; not: {names(up)}"
    mixed = [v for v in ends if v not in down + up]
    text += f"; depends on the norm: {names(mixed)}." if mixed else "."
    rate = first["variants"].get("san", {}).get("local_rate_last")
    if rate is not None:
        text += f" Pure attention's local rate is {rate:.3f}; the theorems' bound has 3."
    slower = [c.agrees for c in compare(summary) if c.published == SLOWER]
    if slower:
        text += (
            f" MLPs slow the collapse in {sum(slower)} of {len(slower)} of these placements: the "
            "corollary allows it, and small slopes do the opposite."
        )
    return text


ENTRY = Entry(
    title="Rank collapse with depth",
    claim="Pure attention loses rank doubly exponentially with depth (Theorems 2.2 and 2.3); MLPs "
    "slow the collapse (Corollary 3.2), skips stop it, LayerNorm does not (section 3; residual "
    "figures of BERT, ALBERT and XLNet).",
    # BERT draws its weights with deviation 0.02 at a width of 768: 0.55 of 1/√fan-in.
    presets={
        "quick": ("--norm=none,post,pre", "--weight_scale=0.55,1", "--num_seeds=8"),
        "paper": (
            "--norm=none,post,pre",
            "--weight_scale=0.55,1",
            "--num_seeds=64",
            "--d_model=768",
            "--num_heads=12",
            "--num_tokens=128",
            "--seed_chunk=2",
        ),
    },
    compare=compare,
    reading=reading,
    captions={
        "residual_ratio": "The paper's figure: relative residual by layer, mean and standard "
        "deviation over seeds, on English text at initialisation.",
        "log_residual": "The same residuals in logarithms to any depth. Dashed: the law 3^l. "
        "Dotted: what an ordinary float32 forward pass shows. Dash-dotted: the theorems' bound.",
        "local_rate": "Local rate of the logarithms: 3 is doubly exponential collapse.",
        "sweep_weight_scale": "Relative residual at BERT's weight scale (0.55) and at 1/√fan-in.",
    },
)
