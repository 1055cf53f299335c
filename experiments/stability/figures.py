"""The figures of run_stability: dependency, output change, gradients, profiles, and the one law."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.stability.cases import Case
from experiments.stability.results import (
    GRADIENT_VISIBLE,
    UPDATES,
    VISIBLE,
    branches_of,
    by_design,
    curve,
    exponents,
    interval,
    law_exponents,
    law_values,
)
from rank_collapse.measures.dependency import dependency
from rank_collapse.report import figures
from rank_collapse.report.statistics import geometric_mean

# Where the law's gradients of W_Q and W_K hold: see `theory.stability.expected_gradient_norms`.
QUERY_LAW = "law: first order in the scores,\nnot below some 10 tokens"
DASHES = {"O(N)": ":", "O(log N)": "--", "O(1)": "-."}


def measured_by_layer(results: Mapping[Case, Any], cases: list[Case]) -> list[Case]:
    """Those of the networks of which every layer was measured."""
    return [case for case in cases if "exact_shares" in results[case]]


def deepest(cases: list[Case]) -> dict[str, Case]:
    """The deepest network of each design."""
    return {name: own[-1] for name, own in by_design(cases).items()}


@figures.styled
def one_law_figure(results: Mapping[Case, Any], cases: list[Case]) -> Figure:
    """Token cosines, output change and gradients of queries, measured against expected."""
    fig, axes = figures.figure(1, 3, width=4.1, height=3.5)
    collapse, change, query = axes[0]
    layered = measured_by_layer(results, cases)
    for index, (name, case) in enumerate(deepest(cases).items()):
        found, color = results[case], figures.color(index)
        apart = np.where(found["apart"] > VISIBLE, found["apart"], np.nan)
        layers = np.arange(case.depth + 1)
        every = max(1, case.depth // 12)
        marks = (index % every, every)
        figures.log_band(collapse, layers, apart, name, index, linestyle="", markevery=marks)
        expected = np.exp(found["expected_log_apart"].astype(float)).mean(axis=0)
        collapse.plot(layers, expected, color=color, lw=1.0)
        own = by_design(cases)[name]
        measured, there = (
            geometric_mean(curve(results, own, n)) for n in ("change.random", "expected_change")
        )
        style = {"color": color, "marker": figures.MARKERS[index % 8], "linestyle": ""}
        change.plot(there, measured, **style)
    for index, (name, case) in enumerate(deepest(layered).items()):
        found = results[case]
        style = {"color": figures.color(index), "marker": figures.MARKERS[index % 8]}
        q, there = (
            np.where(found["apart"][:, :-1] > GRADIENT_VISIBLE, found[f"{n}.attention.w_q"], np.nan)
            for n in ("gradients", "expected_gradients")
        )
        query.plot(geometric_mean(there), geometric_mean(q), linestyle="", label=name, **style)
    collapse.set(yscale="log", xlabel="layer", ylabel=r"1 $-$ token cosine",
                 title="tokens: networks, and the law (lines)")  # fmt: skip
    collapse.set_ylim(max(collapse.get_ylim()[0], VISIBLE / 10), 2)
    change.set(title=r"output change, every depth", ylabel=r"measured $E|\delta \hat x|^2/d$")
    query.set(title=r"gradient of $W_Q$, every layer", ylabel=r"measured $\|\partial W_Q\|_F$")
    query.annotate(QUERY_LAW, (0.97, 0.03), xycoords="axes fraction", ha="right", fontsize=7)
    for ax in (change, query):
        ax.set(xscale="log", yscale="log", xlabel="expected from the law")
        low, high = ax.get_xlim()
        ax.plot([low, high], [low, high], color="#555555", lw=0.9, ls="--")
    collapse.legend(fontsize=7, loc="lower left")
    return fig


@figures.styled
def dependency_figure(results: Mapping[Case, Any], cases: list[Case]) -> Figure:
    """β_ij of the shallowest networks as published, and their exact shares of variance."""
    layered = measured_by_layer(results, cases)
    shallow = {name: own[0] for name, own in by_design(layered).items()}
    fig, axes = figures.figure(2, len(shallow), width=2.3, height=2.3, sharex=True, sharey=True)
    for column, (name, case) in enumerate(shallow.items()):
        found = results[case]
        published = np.mean([np.sqrt(dependency(s)) for s in found["shares"]], axis=0)
        exact = found["exact_shares"][:, :, :-1].mean(axis=0)
        for row, values in enumerate((published, exact)):
            ax = axes[row, column]
            hidden = np.triu(np.ones(values.shape, bool), 1)
            image = ax.imshow(np.ma.masked_array(values, hidden), vmin=0, vmax=1, cmap="viridis")
            ax.grid(visible=False)
        axes[0, column].set_title(f"{name}, {case.depth} layers", fontsize=8)
        axes[1, column].set_xlabel("branch j (0: input)")
        for ax in axes[:, column]:
            figures.integer_ticks(ax)
            ax.yaxis.get_major_locator().set_params(integer=True)
    axes[0, 0].set_ylabel(r"$\beta_{ij}$ as published" + "\nafter branch i")
    axes[1, 0].set_ylabel("exact share of variance\nafter branch i")
    fig.colorbar(image, ax=axes, shrink=0.7)
    return fig


@figures.styled
def change_figure(results: Mapping[Case, Any], cases: list[Case]) -> Figure:
    """Output change against the number of branches, and the exponents of both kinds of update."""
    fig, axes = figures.figure(1, 3, width=4.0, height=3.5)
    designs = by_design(cases)
    for ax, update in zip(axes[0], UPDATES, strict=False):
        for index, (name, own) in enumerate(designs.items()):
            values = curve(results, own, f"change.{update}")
            figures.log_band(ax, branches_of(own), values / geometric_mean(values)[0], name, index)
            style = {"color": figures.color(index), "lw": 0.8, "ls": (0, (1, 1))}
            if update == "random":
                expected = curve(results, own, "expected_change").mean(axis=0)
                ax.plot(branches_of(own), expected / expected[0], **style)
            else:
                least = geometric_mean(curve(results, own, "gradient_bound"))
                ax.plot(branches_of(own), least / geometric_mean(values)[0], **style)
        branches = branches_of(next(iter(designs.values())))
        for law, values in law_values(branches).items():
            ax.plot(branches, values / values[0], color="black", lw=0.9, ls=DASHES[law], label=law)
        ax.set(xscale="log", yscale="log", xlabel="residual branches N",
               ylabel=r"$E|\delta \hat x|^2$ over that at the smallest N",
               title=f"{update} update of equal relative size")  # fmt: skip
        ax.set_xticks(branches, labels=[str(n) for n in branches])
        ax.set_xticks([], minor=True)
    axes[0, 0].legend(fontsize=7)
    ax = axes[0, 2]
    for row, (name, own) in enumerate(designs.items()):
        for index, update in enumerate(UPDATES):
            slopes = exponents(branches_of(own), curve(results, own, f"change.{update}"))
            low, high = interval(slopes) or (slopes[0], slopes[0])
            height = row + 0.2 * (index - 0.5)
            style = {"color": figures.color(row), "marker": figures.MARKERS[index]}
            ax.plot([low, high], [height, height], color=style["color"], lw=2)
            ax.plot(slopes.mean(), height, **style)
        ax.annotate(name, (0.02, row + 0.22), xycoords=("axes fraction", "data"), fontsize=7)
    for law, slope in law_exponents(branches_of(next(iter(designs.values())))).items():
        ax.axvline(slope, color="black", lw=0.9, ls=DASHES[law])
    ax.set(xlabel="exponent of N (95 % over seeds)", yticks=[], ylim=(-0.5, len(designs)),
           title="circles: random, squares: gradient")  # fmt: skip
    return fig


@figures.styled
def gradient_figure(results: Mapping[Case, Any], cases: list[Case]) -> Figure:
    """Gradient norms by layer, with what the law expects, and queries beside values."""
    layered = measured_by_layer(results, cases)
    found = {name: results[case] for name, case in deepest(layered).items()}
    first = next(iter(found.values()))
    panels = {"attention.w_q": "$W_Q$", "attention.w_k": "$W_K$", "attention.w_v": "$W_V$",
              "attention.w_o": "$W_O$", "cross.w_q": "$W_Q$ to the memory",
              "cross.w_k": "$W_K$ of the memory", "cross.w_v": "$W_V$ of the memory",
              "cross.w_o": "$W_O$ from the memory", "mlp.w_in": "MLP"}  # fmt: skip
    panels = {name: title for name, title in panels.items() if f"gradients.{name}" in first}
    fig, axes = figures.figure(2, -(-(len(panels) + 1) // 2), width=3.9, height=2.9)
    for ax, (name, title) in zip(axes.flat, panels.items(), strict=False):
        for index, (design, values) in enumerate(found.items()):
            norms = values[f"gradients.{name}"]
            layers = 1 + np.arange(norms.shape[1])
            figures.log_band(ax, layers, norms, design, index, marker="")
            expected = values[f"expected_gradients.{name}"].mean(axis=0)
            ax.plot(layers, expected, color=figures.color(index), ls=":", lw=1.2)
        ax.set(yscale="log", xlabel="layer", ylabel=r"$\|\partial\|_F$", title=title)
        if name.endswith(("w_q", "w_k")):
            ax.annotate(QUERY_LAW, (0.03, 0.03), xycoords="axes fraction", fontsize=7)
    last = axes.flat[-1]
    for index, (design, values) in enumerate(found.items()):
        ratio = values["gradients.attention.w_q"] / values["gradients.attention.w_v"]
        apart = values["apart"][:, :-1]
        last.plot(apart.ravel(), ratio.ravel(), linestyle="", color=figures.color(index),
                  marker=figures.MARKERS[index % 8], markersize=1.5, label=design)  # fmt: skip
    line = np.geomspace(1e-6, 1, 20)
    last.plot(line, line, color="#555555", lw=0.9, ls="--", label=r"$\propto 1 - \rho$")
    last.set(xscale="log", yscale="log", xlabel=r"1 $-$ token cosine of the layer's input",
             ylabel=r"$\|\partial W_Q\|/\|\partial W_V\|$", title="queries beside values",
             xlim=(VISIBLE, 2))  # fmt: skip
    last.legend(fontsize=6, loc="lower right", markerscale=3)
    for ax in axes.flat[len(panels) : -1]:
        ax.set_axis_off()
    return fig


@figures.styled
def layer_figure(results: Mapping[Case, Any], cases: list[Case]) -> Figure:
    """Residual ratio, token cosine and residual in logarithms, by layer of the same networks."""
    layered = measured_by_layer(results, cases)
    fig, axes = figures.figure(1, 3, width=3.9, height=3.2)
    for index, (name, case) in enumerate(deepest(layered).items()):
        found = results[case]
        layers = np.arange(case.depth + 1)
        style = {"marker": ""}
        figures.band(axes[0, 0], layers, found["ratio"], name, index, **style)
        figures.band(axes[0, 1], layers, 1 - found["apart"], name, index, **style)
        figures.band(axes[0, 2], layers, found["log10_residual"], name, index, **style)
        expected = found["expected_frobenius"].mean(axis=0)
        axes[0, 0].plot(layers, expected, color=figures.color(index), ls=":", lw=1.2)
        expected = 1 - np.exp(found["expected_log_apart"].astype(float)).mean(axis=0)
        axes[0, 1].plot(layers, expected, color=figures.color(index), ls=":", lw=1.2)
    axes[0, 0].set(ylabel=r"$\|\mathrm{res}(X)\|/\|X\|$ in $\|\cdot\|_{1,\infty}$",
                   title="residual ratio (dotted: law, Frobenius)")  # fmt: skip
    axes[0, 1].set(ylabel="mean cosine of two tokens", title="token cosine (dotted: law)")
    axes[0, 2].set(ylabel=r"$\log_{10}\|\mathrm{res}(X)\|_{1,\infty}$", title="residual")
    for ax in axes[0]:
        ax.set_xlabel("layer")
        figures.integer_ticks(ax)
    axes[0, 1].legend(fontsize=7)
    return fig


@figures.styled
def omega_figure(results: Mapping[Case, Any], cases: list[Case]) -> Figure:
    """Gains of the skips by sublayer, in the order passed: of the encoder and of the decoder."""
    layered = measured_by_layer(results, cases)
    found = {name: results[case] for name, case in deepest(layered).items()}
    first = next(iter(found.values()))
    kept = [n for n, v in found.items() if any(np.any(v[k] != 1) for k in v if "omega." in k)]
    found = {name: found[name] for name in kept or found}  # those with gains, if there are any
    two = "encoder.apart" in first
    parts = [("encoder.", "encoder"), ("", "decoder")] if two else [("", "encoder")]
    fig, axes = figures.figure(1, len(parts), width=4.0, height=3.2, sharey=True)
    for ax, (half, title) in zip(axes[0], parts, strict=True):
        for index, (design, values) in enumerate(found.items()):
            kinds = [name for name in values if name.startswith(f"{half}omega.")]
            gains = np.stack([values[name] for name in kinds], axis=2)
            gains = gains.reshape(len(gains), -1)
            figures.band(ax, 1 + np.arange(gains.shape[1]), gains, design, index, marker="")
        ax.set(xlabel="branch, in the order passed", title=title)
    axes[0, 0].set_ylabel(r"gain of the skip, $\omega$")
    axes[0, 0].set_ylim(0, 1.35 * axes[0, 0].get_ylim()[1])
    axes[0, 0].legend(fontsize=7, ncols=2, loc="upper left")
    return fig
