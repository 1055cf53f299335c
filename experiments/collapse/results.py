"""What run_collapse makes of its measurements: rows, headline numbers, and figures.

`results` is {(norm, weight scale, skip gain): {"variant/measure": [s, L + 1]}}.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from rank_collapse.report import figures
from rank_collapse.report.figures import Figure
from rank_collapse.report.statistics import number, numbers as numbers_of, power_law_wins
from rank_collapse.theory import measured_constant
from rank_collapse.theory.logdomain import local_rate

BOUNDS = ("log10_bound", "log10_layer_bound", "log10_published_bound", "admissible")
# {measure: what it is the tightness of}
TIGHTNESS = {
    "tightness_paper": "sums over heads, γ*",
    "tightness_mean": "around the mean",
    "tightness_diameter": "diameter, tanh",
    "tightness_cubic_diameter": "diameter, c diam³",
}
LAW = ("log10_cubic", "log10_c")
Results = dict[tuple[str, float, float], dict[str, np.ndarray]]
RATIO = r"$\|\mathrm{res}(X^l)\|_{1,\infty} \,/\, \|X^l\|_{1,\infty}$"
NOTE = {"color": "#555555", "fontsize": 7}
# {measure beside the residual: (label, dashes, width)}; the theorem's bound leaves the axis where
# it says nothing.
BESIDE = {
    "plain_log10_residual": ("the same, plain arithmetic", ":", 1.1),
    "log10_layer_bound": ("layer bound, {}", (0, (5, 1, 1, 1)), 1.0),
    "log10_bound": ("stack bound, {}", (0, (1, 2, 5, 2)), 1.0),
}


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
    measures = ("ratio", "log10_residual", "plain_log10_residual", *BOUNDS, *TIGHTNESS, *LAW)
    for (norm, scale, gain), found in results.items():
        for variant, profile in by_variant(found, "log10_residual").items():
            rate, gaps = rates(profile), np.full(profile.shape, np.nan)
            for seed, layer in np.ndindex(*profile.shape):
                row = {"norm": norm, "weight_scale": scale, "skip_gain": gain}
                row |= {"variant": variant, "seed": seed, "layer": layer}
                for measure in measures:
                    value = found.get(f"{variant}/{measure}", gaps)[seed, layer]
                    row[measure] = "" if np.isnan(value) else f"{value:.8g}"
                row["local_rate"] = f"{rate[seed, layer - 1]:.6g}" if layer else ""
                yield row


def summary_of(results: Results) -> dict[str, Any]:
    """Headline numbers of every setting and variant: means over seeds, spread where it matters."""
    settings = []
    for (norm, scale, gain), found in results.items():
        variants = {v: numbers_of_variant(found, v) for v in by_variant(found, "log10_residual")}
        curves = gain_curves(found)
        swept = {"mlp_gain": gain_numbers(curves, found, norm)} if curves else {}
        where = {"norm": norm, "weight_scale": scale, "skip_gain": gain}
        settings.append(where | {"variants": variants} | swept)
    return {"settings": settings}


def numbers_of_variant(found: dict[str, np.ndarray], variant: str) -> dict[str, Any]:
    """Headline numbers of one variant; of bounds and the cubic law where they cover it."""
    own = {name.split("/")[1]: a for name, a in found.items() if name.startswith(f"{variant}/")}
    profile, ratio = own["log10_residual"], own["ratio"]
    relative = profile - own["log10_size"]
    by_seed = {
        "local_rate": rates(profile)[:, -1],
        "log10_ratio": relative[:, -1],
        "left": 10.0 ** (relative[:, -1] - relative[:, 0]),  # of the input's ratio
        "power_law_wins": power_law_wins(10.0**relative),
    }
    numbers = {
        "seeds": len(profile),
        "ratio": numbers_of(ratio.mean(axis=0)),
        "ratio_std_last": number(ratio[:, -1].std()),
        "log10_residual_last": number(profile[:, -1].mean()),
        "plain_log10_residual_last": number(own["plain_log10_residual"][:, -1].mean()),
        "local_rate_last": number(rates(profile)[:, -1].mean()),
        "by_seed": {name: numbers_of(values) for name, values in by_seed.items()},
    }
    if "log10_bound" in own:
        numbers |= bound_numbers(profile, *(own[b] for b in BOUNDS))
        numbers |= tightness_numbers({t: own[t] for t in TIGHTNESS})
    if "log10_cubic" in own:
        numbers |= law_numbers(profile, *(own.get(m) for m in LAW))
    return numbers


def gain_curves(found: dict[str, np.ndarray]) -> dict[float, np.ndarray]:
    """{gain of the MLPs: log10 of the residual [s, L + 1]}, ascending; empty without a sweep."""
    prefix = "mlp_gain/log10_residual_at_"
    curves = {float(k.removeprefix(prefix)): v for k, v in found.items() if k.startswith(prefix)}
    return dict(sorted(curves.items()))


def slowed(curves: dict[float, np.ndarray], found: dict[str, np.ndarray]) -> np.ndarray:
    """By how much MLPs of each gain raise Λ = log10‖R_L‖/3^L above pure attention's, [s, g]."""
    san = found["san/log10_residual"][:, -1]
    raised = np.stack([curve[:, -1] - san for curve in curves.values()], axis=1)
    return raised / 3.0 ** (found["san/log10_residual"].shape[1] - 1)


def crossings(gains: np.ndarray, raised: np.ndarray) -> np.ndarray:
    """The least gain of each seed from which on MLPs slow the collapse [s]; NaN for none.

    Between the gains that were swept the change is taken as linear in the gain's logarithm; gains
    at which the residual is no number are left out.
    """
    found = np.full(len(raised), np.nan)
    for seed, own in enumerate(raised):
        known = np.isfinite(own)
        logs, values = np.log(gains[known]), own[known]
        up = np.flatnonzero((values[:-1] < 0) & (values[1:] >= 0))
        if len(up):
            g, (a, b) = logs[up[-1] : up[-1] + 2], values[up[-1] : up[-1] + 2]
            found[seed] = np.exp(g[0] - a * (g[1] - g[0]) / (b - a))
    return found


def gain_numbers(
    curves: dict[float, np.ndarray], found: dict[str, np.ndarray], norm: str
) -> dict[str, Any]:
    """How the MLPs' gain changes Λ, seed by seed, and where it crosses 0."""
    if "san/log10_residual" not in found:
        return {}
    gains, raised = np.array(list(curves)), slowed(curves, found)
    return published_form(curves, found, norm) | {
        "gains": gains.tolist(),
        "raised": [numbers_of(row) for row in raised],
        "crossing": numbers_of(crossings(gains, raised)),
    }


def published_form(
    curves: dict[float, np.ndarray], found: dict[str, np.ndarray], norm: str
) -> dict[str, Any]:
    """Of MLPs of gain 1 with their own skip, as published, which post-norm is swept with: what is
    left of the residual, and its log10 less that of pure attention, seed by seed.

    Post-norm gives all states one size up to that of their mean, so that differences of residuals
    are those of their ratios.
    """
    if norm == "none" or 1.0 not in curves:
        return {}
    own, san = curves[1.0], found["san/log10_residual"]
    raised, left = own[:, -1] - san[:, -1], 10.0 ** (own[:, -1] - own[:, 0])
    return {"published": {"log10_raised": numbers_of(raised), "left": numbers_of(left)}}


def bound_numbers(
    profile: np.ndarray,
    stack: np.ndarray,
    layer: np.ndarray,
    published: np.ndarray,
    admissible: np.ndarray,
) -> dict[str, Any]:
    """How often the theorems' condition held, how often a bound then did not, and how far it is.

    The stack's bound needs the condition in every layer so far, a layer's in that layer only.
    Logarithms in float32 are known to about 1e-5 of their size.
    """
    margin = 1e-3 + 1e-5 * np.abs(profile)
    here = admissible[:, 1:] > 0
    sofar = np.logical_and.accumulate(here, axis=1)

    def above(bound, where):
        return int(((profile > bound + margin)[:, 1:] & where).sum())

    return {
        "layers": int(here.size),
        "layers_admissible": int(here.sum()),
        "layers_above_their_bound": above(layer, here),
        "prefixes_admissible": int(sofar.sum()),
        "prefixes_above_the_stack_bound": above(stack, sofar),
        "layers_above_the_published_bound": above(published, here),
        "log10_bound_last": number(stack[:, -1].mean()),
        "log10_layer_bound_last": number(layer[:, -1].mean()),
    }


def tightness_numbers(found: dict[str, np.ndarray]) -> dict[str, Any]:
    """How far each bound of a layer is above what it bounds, the median over layers and seeds, and
    how often one that needs no condition was not; float32 knows a tightness to about 1e-3."""
    values = {name: a[:, 1:][~np.isnan(a[:, 1:])] for name, a in found.items()}
    free = np.concatenate([a for name, a in values.items() if name != "tightness_paper"])
    medians = {
        f"{name}_median": number(np.median(a)) if a.size else None for name, a in values.items()
    }
    return medians | {"free_bounds": int(free.size), "free_violations": int((free < -1e-3).sum())}


def constants(
    profile: np.ndarray, cubic: np.ndarray, c: np.ndarray | None
) -> dict[str, np.ndarray]:
    """Λ as each depth l shows it, [s, L + 1]: log10‖R_l‖/3^l measured and in closed form, and
    log10‖R_0‖ + ½ log10 c of the theorem where it covers the network."""
    power = 3.0 ** np.arange(profile.shape[-1])
    found = {"measured": profile / power, "closed form": cubic / power}
    return found if c is None else found | {"theorem": profile[:, :1] + c / 2}


def law_numbers(profile: np.ndarray, cubic: np.ndarray, c: np.ndarray | None) -> dict[str, Any]:
    """Λ and c_eff, measured and in closed form, and the theorem's c: means over seeds."""
    numbers = {}
    for name, values in (("", profile), ("_closed", cubic)):
        found = measured_constant(values)
        numbers[f"log10_lambda{name}"] = number(np.mean(found.log10_lambda))
        numbers[f"log10_lambda{name}_error"] = number(np.max(found.error))
        numbers[f"log10_c_eff{name}"] = number(np.mean(found.log10_c_eff))
    difference = measured_constant(profile).log10_lambda - measured_constant(cubic).log10_lambda
    numbers["log10_lambda_difference_std"] = number(np.std(difference))
    return numbers if c is None else numbers | {"log10_c_theorem": number(c[:, -1].mean())}


def first_panels(results: Results) -> dict[str, dict[str, np.ndarray]]:
    """{norm: measures} at the first of the swept values."""
    first = next(iter(results))[1:]
    return {f"norm: {k[0]}": found for k, found in results.items() if k[1:] == first}


def laws_of(results: Results) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """{network: ({bound: tightness [s, L]}, {how: Λ [s, L + 1]})} of those with a closed form."""
    laws = {}
    for panel, found in first_panels(results).items():
        for variant in by_variant(found, "log10_cubic"):
            bounds = {text: found.get(f"{variant}/{name}") for name, text in TIGHTNESS.items()}
            law = (found.get(f"{variant}/{m}") for m in ("log10_residual", *LAW))
            tightness = {text: a[:, 1:] for text, a in bounds.items() if a is not None}
            laws[f"{variant}, {panel}"] = tightness, constants(*law)
    return laws


def raised_of(results: Results) -> dict[str, tuple[list[float], np.ndarray]]:
    """{norm: (gains [g], by how much they raise Λ [s, g])} where MLPs were swept."""
    return {
        panel: (list(curves), slowed(curves, found))
        for panel, found in first_panels(results).items()
        if (curves := gain_curves(found)) and "san/log10_residual" in found
    }


def swept_of(results: Results, position: int) -> dict[str, dict[str, Any]]:
    """{network: {swept value: ratio}} along one place of the keys, the other at its first value."""
    other = 3 - position
    first, found = next(iter(results))[other], {}
    for key, own in results.items():
        if key[other] == first:
            for variant, ratio in by_variant(own, "ratio").items():
                found.setdefault(f"{variant}, norm: {key[0]}", {})[f"{key[position]:g}"] = ratio
    return found if len(next(iter(found.values()))) > 1 else {}


@figures.styled
def residual_ratio_figure(results: Results, setup: Any) -> Figure:
    """The paper's figure: relative residual by layer, mean and standard deviation over seeds, on
    English text at initialisation."""
    groups = {panel: by_variant(own, "ratio") for panel, own in first_panels(results).items()}
    fig, axes = figures.curves(groups, ylabel=RATIO, width=3.6, height=3.0, sharey=True)
    axes[0, 0].set_ylim(-0.03, None)
    axes[0, -1].legend(loc="best")
    return fig


@figures.styled
def log_residual_figure(results: Results, setup: Any) -> Figure:
    """The same residuals in logarithms to any depth. Dashed: the law 3^l. Dotted: what an ordinary
    float32 forward pass shows. Dash-dotted: the theorems' bound."""
    panels = first_panels(results)
    groups = {panel: by_variant(own, "log10_residual") for panel, own in panels.items()}
    fig, axes = figures.curves(
        groups,
        ylabel=r"$\log_{10} \|\mathrm{res}(X^l)\|_{1,\infty}$",
        width=3.9,
        height=3.4,
        sharey=True,
    )
    for ax, found, group in zip(axes[0], panels.values(), groups.values(), strict=True):
        ax.set_yscale("symlog", linthresh=1.0, linscale=0.6)
        for index, variant in enumerate(group):
            for measure, (text, dashes, width) in BESIDE.items():
                values = found.get(f"{variant}/{measure}")
                label = text.format(variant) if "{}" in text or not index else None
                if values is not None:
                    ax.plot(
                        np.mean(values, axis=0),
                        label=label,
                        color=figures.color(index),
                        linestyle=dashes,
                        linewidth=width,
                        marker="",
                    )
        _draw_law(ax, group)
    known = [v[np.isfinite(v)] for group in groups.values() for v in group.values()]
    known = np.concatenate([[-1.0, 1.0], *known])  # the others are gaps
    axes[0, 0].set_ylim(10 * known.min(), 5 * known.max())
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right center")
    return fig


def _draw_law(ax, group: Mapping[str, np.ndarray]) -> None:
    """The line ∝ 3^l through the end of the first curve that falls like it."""
    for values in group.values():
        mean = np.asarray(values, float).mean(axis=0)
        falls = mean < -3.0
        if falls[-2:].all() and mean[-1] < 2.5 * mean[-2]:
            layers = np.arange(np.argmax(falls), len(mean))
            line = mean[-1] * 3.0 ** (layers - layers[-1])
            ax.plot(layers, line, "k--", lw=1, label=r"$\propto 3^{l}$", zorder=5)
            return


@figures.styled
def local_rate_figure(results: Results, setup: Any) -> Figure:
    """Local rate of the logarithms: 3 is doubly exponential collapse."""
    groups = {
        panel: {variant: rates(a) for variant, a in by_variant(own, "log10_residual").items()}
        for panel, own in first_panels(results).items()
    }
    label = r"$\log\|\mathrm{res}(X^{l})\| \,/\, \log\|\mathrm{res}(X^{l-1})\|$"
    fig, axes = figures.curves(groups, first=1, ylabel=label, width=3.6, height=2.8, sharey=True)
    for ax in axes[0]:
        for level, text in ((3.0, "3: doubly exponential"), (1.0, "1: exponential or none")):
            ax.axhline(level, color="#555555", lw=0.9, ls="--")
            ax.annotate(
                text,
                (1.0, level),
                xycoords=("axes fraction", "data"),
                xytext=(0, -2),
                textcoords="offset points",
                ha="right",
                va="top",
                **NOTE,
            )
        ax.set(ylim=(0, 4))
    fig.legend(*axes[0, -1].get_legend_handles_labels(), loc="outside right center")
    return fig


@figures.styled
def law_figure(laws: dict[str, tuple[Any, Any]], setup: Any) -> Figure:
    """Above: how many powers of ten the bounds of one layer lie above what they bound (all but the
    paper's need no condition). Below: the constant of the 3^l law as each depth shows it, measured,
    from the closed recursion of the covariance, and as the theorem has it."""
    fig, axes = figures.figure(2, len(laws), width=3.6, height=2.8, sharey="row")
    for (above, below), (panel, (tightness, constant)) in zip(axes.T, laws.items(), strict=True):
        for index, (label, values) in enumerate(tightness.items()):
            figures.band(above, np.arange(1, values.shape[1] + 1), values, label, index)
        for index, (label, values) in enumerate(constant.items()):
            dashed = {"linestyle": "--", "marker": ""} if label == "closed form" else {}
            figures.band(below, np.arange(values.shape[1]), values, label, index, **dashed)
        if not tightness:
            text = "the bounds do not\ncover norms or masks"
            above.text(0.5, 0.5, text, ha="center", va="center", transform=above.transAxes, **NOTE)
        above.set(xlabel="layer", title=panel)
        below.set(xlabel="depth l")
        figures.integer_ticks(above, below)
    axes[0, 0].set_ylabel(r"$\log_{10}$ bound $-$ $\log_{10}$ of what it bounds")
    axes[1, 0].set_ylabel(r"$\Lambda$: $\log_{10}\|\mathrm{res}(X^l)\| \,/\, 3^l$")
    for ax in (next((a for a in axes[0] if a.lines), axes[1, 0]), axes[1, 0]):
        ax.legend(loc="best")
    return fig


@figures.styled
def sweep_figure(curves: dict[str, dict[str, Any]], setup: Any, *, swept: str) -> Figure:
    """One panel per network, one shade per swept value."""
    fig, axes = figures.curves(
        curves,
        columns=4,
        ylabel=RATIO,
        width=3.0,
        height=2.7,
        sharey=True,
        style=lambda index, count: {"color": figures.shades(count)[index], "marker": ""},
    )
    axes[0, -1].legend(title=swept, loc="best")
    return fig


@figures.styled
def gain_figure(found: dict[str, tuple[Any, Any]], setup: Any) -> Figure:
    """By how much MLPs raise the constant Λ above pure attention's, against their gain: above 0
    they slow the collapse (post-norm: with a skip of their own)."""
    fig, axes = figures.figure(1, len(found), width=3.4, height=2.8, sharey=True)
    for ax, (panel, (gains, values)) in zip(axes[0], found.items(), strict=True):
        ax.axhline(0, color="#555555", lw=0.9, ls="--")
        figures.band(ax, np.asarray(gains), values, f"{len(values)} seeds", 0)
        ax.set_xscale("log", base=2)
        ax.set(xlabel="gain of the MLPs", title=panel)
    text = r"$\Lambda$ with MLPs $-$ $\Lambda$ of pure attention"
    axes[0, 0].set_ylabel(text + "\n(above 0: slower, below: faster)")
    return fig
