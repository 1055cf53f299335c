"""The figures of run_stability: dependency, output change, gradients, profiles, and the one law.

Each takes the results of networks of one kind, see `results`.
"""

from typing import Any

import numpy as np

from experiments.stability import results
from experiments.stability.results import (
    GRADIENT_VISIBLE,
    VISIBLE,
    Results,
    branches_of,
    by_design,
    by_layer,
    curve,
    ends,
)
from rank_collapse.measures.dependency import dependency
from rank_collapse.report import figures
from rank_collapse.report.figures import Figure
from rank_collapse.report.statistics import geometric_mean, mean_of

# Where the law's gradients of W_Q and W_K hold: see `theory.stability.expected_gradient_norms`.
QUERY_LAW = "law: first order in the scores,\nnot below some 10 tokens"
DASHES = {"O(N)": ":", "O(log N)": "--", "O(1)": "-."}
GRADIENTS = {
    "attention.w_q": "$W_Q$",
    "attention.w_k": "$W_K$",
    "attention.w_v": "$W_V$",
    "attention.w_o": "$W_O$",
    "cross.w_q": "$W_Q$ to the memory",
    "cross.w_k": "$W_K$ of the memory",
    "cross.w_v": "$W_V$ of the memory",
    "cross.w_o": "$W_O$ from the memory",
    "mlp.w_in": "MLP",
}
# (axis, title) of the residual ratio, the token cosine and the residual
PROFILES = (
    (
        r"$\|\mathrm{res}(X)\|/\|X\|$ in $\|\cdot\|_{1,\infty}$",
        "residual ratio (dotted: law, Frobenius)",
    ),
    ("mean cosine of two tokens", "token cosine (dotted: law)"),
    (r"$\log_{10}\|\mathrm{res}(X)\|_{1,\infty}$", "residual"),
)


def deepest(found: Results) -> dict[str, dict[str, Any]]:
    """What was measured of the deepest network of each design."""
    return {name: ends(own)[1] for name, own in by_design(found).items()}


def points(ax: Any, x: Any, y: Any, index: int, **options: Any) -> None:
    """A design's points."""
    marker = figures.MARKERS[index % len(figures.MARKERS)]
    ax.plot(x, y, color=figures.color(index), marker=marker, linestyle="", **options)


def law(ax: Any, x: Any, y: Any, index: int, **options: Any) -> None:
    """What is expected of a design, a dotted line."""
    ax.plot(x, y, **{"color": figures.color(index), "ls": ":", "lw": 1.2} | options)


def expected_apart(found: dict[str, Any]) -> np.ndarray:
    """The law's 1 − token cosine by layer, mean over seeds."""
    return np.exp(found["expected_log_apart"].astype(float)).mean(axis=0)


def one_law_figure(found: Results, setup: Any) -> Figure:
    """Left: 1 − mean token cosine by layer of the deepest networks (markers, bands over seeds) and
    the law that predicts it from the gains alone (lines). Middle and right: output change and
    gradients of W_Q, measured against expected from the same recursion, geometric means over seeds
    (gradients where 1 − cosine is above 1e-5: below it float32 rounds them). Of W_Q and W_K the law
    has the first order in the scores' variance alone: at variance 1 networks have .86 to .91 of it
    at 17 tokens and 1.06 to 1.10 at 64, .74 to .89 with a causal mask, .55 to .74 at 3, where it is
    not to be used."""
    fig, ((collapse, change, query),) = figures.figure(1, 3, width=4.1, height=3.5)
    for index, (name, own) in enumerate(by_design(found).items()):
        deep, pair = ends(own)[1], ("expected_change", "change.random")
        apart = np.where(deep["apart"] > VISIBLE, deep["apart"], np.nan)
        layers = np.arange(apart.shape[1])
        every = max(1, layers[-1] // 12)
        marks = {"linestyle": "", "markevery": (index % every, every)}
        figures.log_band(collapse, layers, apart, name, index, **marks)
        law(collapse, layers, expected_apart(deep), index, ls="-", lw=1.0)
        points(change, *(geometric_mean(curve(own, n)) for n in pair), index)
    for index, deep in enumerate(deepest(by_layer(found)).values()):
        norms = (deep[f"{n}.attention.w_q"] for n in ("expected_gradients", "gradients"))
        seen = deep["apart"][:, :-1] > GRADIENT_VISIBLE
        points(query, *(geometric_mean(np.where(seen, own, np.nan)) for own in norms), index)
    collapse.set(
        yscale="log",
        xlabel="layer",
        ylabel=r"1 $-$ token cosine",
        title="tokens: networks, and the law (lines)",
    )
    collapse.set_ylim(max(collapse.get_ylim()[0], VISIBLE / 10), 2)
    change.set(title=r"output change, every depth", ylabel=r"measured $E|\delta \hat x|^2/d$")
    query.set(title=r"gradient of $W_Q$, every layer", ylabel=r"measured $\|\partial W_Q\|_F$")
    query.annotate(QUERY_LAW, (0.97, 0.03), xycoords="axes fraction", ha="right", fontsize=8)
    for ax in (change, query):
        ax.set(xscale="log", yscale="log", xlabel="expected from the law")
        ax.plot(*2 * [ax.get_xlim()], color="#555555", lw=0.9, ls="--")
    collapse.legend(loc="lower left")
    return fig


def dependency_figure(found: Results, setup: Any) -> Figure:
    """Dependency of the stream after branch i on branch j: β_ij from variances, as published, and
    the exact share of variance."""
    designs = by_design(by_layer(found))
    fig, axes = figures.figure(2, len(designs), width=2.3, height=2.3, sharex=True, sharey=True)
    for column, (name, own) in zip(axes.T, designs.items(), strict=True):
        shallow = ends(own)[0]
        published = np.mean([np.sqrt(dependency(s)) for s in shallow["shares"]], axis=0)
        exact = shallow["exact_shares"][:, :, :-1].mean(axis=0)
        for ax, values in zip(column, (published, exact), strict=True):
            hidden = np.triu(np.ones(values.shape, bool), 1)
            image = ax.imshow(np.ma.masked_array(values, hidden), vmin=0, vmax=1, cmap="viridis")
            ax.grid(visible=False)
            figures.integer_ticks(ax)
            ax.yaxis.get_major_locator().set_params(integer=True)
        column[0].set_title(f"{name}, {next(iter(own)).depth} layers", fontsize=8)
        column[1].set_xlabel("branch j (0: input)")
    axes[0, 0].set_ylabel(r"$\beta_{ij}$ as published" + "\nafter branch i")
    axes[1, 0].set_ylabel("exact share of variance\nafter branch i")
    fig.colorbar(image, ax=axes, shrink=0.7)
    return fig


def change_figure(found: Results, setup: Any) -> Figure:
    """Change of the output after an update of every matrix by the same relative size, against the
    number of branches; black the three published laws. Dotted: of random updates the law's
    expectation; of steps along the gradient what they do at least, e² (Σ‖W‖‖∂W‖)²/‖u‖². Right:
    fitted exponents, 95 % over seeds."""
    fig, ((*axes, slopes),) = figures.figure(1, 3, width=4.0, height=3.5)
    designs = by_design(found)
    branches = branches_of(next(iter(designs.values())))
    for column, (ax, update) in enumerate(zip(axes, results.UPDATES, strict=True)):
        for index, (name, own) in enumerate(designs.items()):
            values = curve(own, f"change.{update}")
            first = geometric_mean(values)[0]
            figures.log_band(ax, branches, values / first, name, index)
            expected = curve(own, "expected_change").mean(axis=0)
            least = geometric_mean(curve(own, "gradient_bound"))
            beside = expected / expected[0] if update == "random" else least / first
            law(ax, branches, beside, index, ls=(0, (1, 1)), lw=0.8)
            mean, ends = mean_of(results.exponents(branches, values))
            style = {"color": figures.color(index), "marker": figures.MARKERS[column]}
            height = index + 0.2 * (column - 0.5)
            if ends.known:
                slopes.plot(ends, [height, height], color=style["color"], lw=2)
            slopes.plot(mean, height, **style)
        for name, values in results.law_values(branches).items():
            line = {"color": "black", "lw": 0.9, "ls": DASHES[name], "label": name}
            ax.plot(branches, values / values[0], **line)
        ax.set(
            xscale="log",
            yscale="log",
            xlabel="residual branches N",
            ylabel=r"$E|\delta \hat x|^2$ over that at the smallest N",
            title=f"{update} update of equal relative size",
        )
        ax.set_xticks(branches, labels=[str(n) for n in branches])
        ax.set_xticks([], minor=True)
    axes[0].legend()
    slopes.set_yticks(range(len(designs)), labels=list(designs), fontsize=8)
    for name, slope in results.law_exponents(branches).items():
        slopes.axvline(slope, color="black", lw=0.9, ls=DASHES[name])
    title, label = "circles: random, squares: gradient", "exponent of N (95 % over seeds)"
    slopes.set(xlabel=label, ylim=(-0.5, len(designs) - 0.5), title=title)
    return fig


def gradient_figure(found: Results, setup: Any) -> Figure:
    """Gradient norms by layer of the deepest networks, dotted what the law expects (of W_Q and W_K
    to first order in the scores' variance, as above); last: those of queries over those of values
    against 1 − token cosine."""
    designs = deepest(by_layer(found))
    first = next(iter(designs.values()))
    shown = {name: title for name, title in GRADIENTS.items() if f"gradients.{name}" in first}
    fig, axes = figures.figure(2, -(-(len(shown) + 1) // 2), width=3.9, height=2.9)
    last = axes.flat[-1]
    for ax, (name, title) in zip(axes.flat, shown.items(), strict=False):
        for index, (design, own) in enumerate(designs.items()):
            norms = own[f"gradients.{name}"]
            layers = 1 + np.arange(norms.shape[1])
            figures.log_band(ax, layers, norms, design, index, marker="")
            law(ax, layers, own[f"expected_gradients.{name}"].mean(axis=0), index)
        ax.set(yscale="log", xlabel="layer", ylabel=r"$\|\partial\|_F$", title=title)
        if name.endswith(("w_q", "w_k")):
            ax.annotate(QUERY_LAW, (0.03, 0.03), xycoords="axes fraction", fontsize=8)
    for index, (design, own) in enumerate(designs.items()):
        ratio = own["gradients.attention.w_q"] / own["gradients.attention.w_v"]
        apart = own["apart"][:, :-1].ravel()
        points(last, apart, ratio.ravel(), index, markersize=1.5, label=design)
    line = np.geomspace(1e-6, 1, 20)
    last.plot(line, line, color="#555555", lw=0.9, ls="--", label=r"$\propto 1 - \rho$")
    last.set(
        xscale="log",
        yscale="log",
        xlabel=r"1 $-$ token cosine of the layer's input",
        ylabel=r"$\|\partial W_Q\|/\|\partial W_V\|$",
        title="queries beside values",
        xlim=(VISIBLE, 2),
    )
    last.legend(loc="lower right", markerscale=3)
    for ax in axes.flat[len(shown) : -1]:
        ax.set_axis_off()
    return fig


def layer_figure(found: Results, setup: Any) -> Figure:
    """Residual ratio, token cosine and residual by layer of the same networks."""
    fig, ((ratio, cosine, residual),) = figures.figure(1, 3, width=3.9, height=3.2)
    for index, (name, own) in enumerate(deepest(by_layer(found)).items()):
        layers = np.arange(own["apart"].shape[1])
        shown = own["ratio"], 1 - own["apart"], own["log10_residual"]
        for ax, values in zip((ratio, cosine, residual), shown, strict=True):
            figures.band(ax, layers, values, name, index, marker="")
        law(ratio, layers, own["expected_frobenius"].mean(axis=0), index)
        law(cosine, layers, 1 - expected_apart(own), index)
    for ax, (label, title) in zip((ratio, cosine, residual), PROFILES, strict=True):
        ax.set(xlabel="layer", ylabel=label, title=title)
        figures.integer_ticks(ax)
    residual.legend(loc="lower left")
    return fig


def omega_figure(found: Results, setup: Any) -> Figure:
    """Gains of the skips by sublayer; of Admin profiled on a batch of each seed's own."""
    designs = deepest(by_layer(found))
    kept = [n for n, v in designs.items() if any(np.any(v[k] != 1) for k in v if "omega." in k)]
    parts = {"": "encoder"}
    if "encoder.apart" in next(iter(designs.values())):
        parts = {"encoder.": "encoder", "": "decoder"}
    fig, axes = figures.figure(1, len(parts), width=4.0, height=3.2, sharey=True)
    for ax, (half, title) in zip(axes[0], parts.items(), strict=True):
        for index, design in enumerate(kept or designs):  # those with gains, if any
            own = designs[design].items()
            kinds = np.stack([v for name, v in own if name.startswith(f"{half}omega.")], axis=2)
            gains = kinds.reshape(len(kinds), -1)
            figures.band(ax, 1 + np.arange(gains.shape[1]), gains, design, index, marker="")
        ax.set(xlabel="branch, in the order passed", title=title)
    axes[0, 0].set_ylabel(r"gain of the skip, $\omega$")
    axes[0, 0].set_ylim(0, 1.35 * axes[0, 0].get_ylim()[1])
    axes[0, 0].legend(ncols=2, loc="upper left")
    return fig
