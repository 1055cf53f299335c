"""Published figures that are curves beside a theory: run_phase --figure=giorlandino4 and others.

Axis letters: s seeds, k points of a curve.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rank_collapse as rc
from experiments import small_task
from experiments.initial import tokens
from experiments.shell.executor import Executor
from experiments.shell.flag_values import Flags
from experiments.small_task import Network
from rank_collapse.network.inputs import input_states
from rank_collapse.report import figures
from rank_collapse.report.figures import Figure
from rank_collapse.report.statistics import mean_and_ends, slope
from rank_collapse.runs.folder import RunFolder
from rank_collapse.theory import mixing_rates, phases

Found = Mapping[str, np.ndarray]  # {curve: [s, k]}


@dataclass(frozen=True)
class Curves:
    """One figure.

    Attributes:
        options: The flags.
        x: Places of all curves [k].
        axes: Keywords of `Axes.set`.
        measure: (options, run) → {curve: [s, k]}.
        laws: () → {curve: [k]}, the theory of each that has one.
        published: () → {curve: [k]}, as published.
        answers: {curve: [s, k]} → (statement, setting, values by seed).
        compared: First places, that the theory is of; all by default.
        extra: What beside the flags determines the results.
        note: What the figure shows and what of it is not the paper's.
    """

    options: Flags
    x: np.ndarray
    axes: Mapping[str, str]
    measure: Callable[[Flags, RunFolder], Found]
    laws: Callable[[], Mapping[str, np.ndarray]]
    answers: Callable[[Found], list[tuple[str, str, Any]]]
    note: str
    published: Callable[[], Mapping[str, np.ndarray]] = dict
    compared: int | None = None
    extra: Mapping[str, Any] | None = None

    @functools.cached_property
    def theory(self) -> Mapping[str, np.ndarray]:
        """`laws`, computed once."""
        return {name: np.asarray(own) for name, own in self.laws().items()}


def at_start(measure: Callable[[Any], Mapping[str, Any]]) -> Callable[[Flags, RunFolder], Found]:
    """The `Curves.measure` of what a key gives, {curve: [k]}."""

    def of_all(options, run):
        with Executor(options, run, "curves") as executor:
            found = executor.measure(lambda key, _: measure(key), {"curves": None})
        return found["curves"]

    return of_all


# --- Giorlandino and Goldt 2025, figure 4: with and without what tokens share in attention's output

BETA, RHO, WEIGHT, BIAS = 0.1, 0.2, 0.2, 4e-4
PLACEMENTS = {
    "post-LN": ("post", "softmax", "post"),
    "pre-LN": ("pre", "softmax", "pre"),
    "GC post-LN": ("post", "centred", "gain"),
    "GC pre-LN": ("pre", "centred", "gain_pre"),
}


def giorlandino4(options: Flags) -> Curves:
    """Cosine of tokens by layer; the published curves are the theory's limit n → ∞."""
    depth, n, d = options.depth, options.num_tokens, options.d_model

    def measure(key):
        return {name: profile(key, *own[:2]) for name, own in PLACEMENTS.items()}

    def profile(key, placement, variant):
        config = rc.variant(
            rc.transformer(depth, 1, d, d_ff=d, mlp="relu", norm="rms", norm_placement=placement),
            variant,
        )
        key_params, key_x, key_in, key_out = jax.random.split(key, 4)
        params = rc.init(key_params, config)
        layers = params.layers
        w_q = BETA * math.sqrt(math.log(n)) * layers.attention.w_q
        mlp, std = layers.mlp, math.sqrt(BIAS)
        mlp = mlp.replace(
            w_in=math.sqrt(WEIGHT) * mlp.w_in,
            w_out=math.sqrt(WEIGHT) * mlp.w_out,
            b_in=std * jax.random.normal(key_in, mlp.b_in.shape),
            b_out=std * jax.random.normal(key_out, mlp.b_out.shape),
        )
        layers = layers.replace(attention=layers.attention.replace(w_q=w_q), mlp=mlp)
        x = tokens(key_x, n, d, RHO)
        return rc.token_cosine(rc.apply(params.replace(layers=layers), x, config).hidden)

    def laws(num_tokens):
        return {
            name: phases.phase_profile(
                BETA,
                depth,
                attention_skip=1.0,
                mlp_skip=1.0,
                weight=WEIGHT,
                bias=BIAS,
                start=(1.0, RHO),
                placement=own[2],
                num_tokens=num_tokens,
            )[1]
            for name, own in PLACEMENTS.items()
        }

    def answers(found):
        last = {name: own[:, -1] for name, own in found.items()}
        return [
            ("gain control", f"{p}, {depth} layers", last[f"GC {p}"] - last[p])
            for p in ("post-LN", "pre-LN")
        ]

    return Curves(
        options,
        np.arange(depth + 1),
        {"xlabel": "layer", "ylabel": r"cosine $\rho$ of tokens"},
        at_start(measure),
        lambda: laws(n),
        answers,
        f"Cosine of two tokens by layer at β = {BETA} with and without what tokens share in the "
        "output of attention (gain-controlled, GC), bands of one standard deviation over seeds; "
        f"dashed: the theory for {n} tokens; dotted: as published, n → ∞. The published figure is "
        "theory alone.",
        lambda: laws(None),
    )


# --- Nait Saada et al. 2024: the gap of attention's spectrum in width

PUBLISHED, BEYOND = (20, 40, 60, 80, 100, 150), (150, 300, 600)  # the theorem is of n → ∞
SIZES = (*PUBLISHED, *BEYOND[1:])
STD = math.sqrt(math.log(2))  # of scores, so that weights vary by their mean
PERP = r"$A^\perp$"


def mindthegap(options: Flags) -> Curves:
    """σ₂/σ₁ against the number of tokens n, of d = n."""

    def ratio(a):
        values = jnp.linalg.svd(a, compute_uv=False)
        return values[1] / values[0]

    def of_size(key, n):
        key_scores, key_x, key_q, key_k = jax.random.split(key, 4)
        a = jax.nn.softmax(STD * jax.random.normal(key_scores, (n, n)), axis=-1)
        x = jax.random.normal(key_x, (n, n))
        q, k = (x @ jax.random.normal(key, (n, n)) / math.sqrt(n) for key in (key_q, key_k))
        own = jax.nn.softmax(STD * q @ k.T / math.sqrt(n), axis=-1)
        return {
            "A": ratio(a),
            "AX": ratio(a @ x),
            "A(X)": ratio(own),
            PERP: ratio(a - 1 / n),
            f"{PERP}X": ratio((a - 1 / n) @ x),
        }

    def measure(key):
        found = [of_size(jax.random.fold_in(key, n), n) for n in SIZES]
        return {name: jnp.stack([own[name] for own in found]) for name in found[0]}

    def laws():
        n = np.array(SIZES)
        return {
            "A": mixing_rates.spectral_ratio(STD, n),
            "AX": mixing_rates.spectral_ratio(STD, n, 1.0),
            PERP: np.ones(len(n)),
            f"{PERP}X": np.ones(len(n)),
        }

    def answers(found):
        rows = []
        for sizes in (PUBLISHED, BEYOND):
            places = [SIZES.index(n) for n in sizes]
            for name, own in found.items():
                key = "gap removed" if PERP in name else "gap"
                setting = f"{name.replace(PERP, 'A⊥')}, n from {sizes[0]} to {sizes[-1]}"
                rows.append((key, setting, slope(np.log(sizes), np.log(own[:, places]))))
        return rows

    return Curves(
        options,
        np.array(SIZES),
        {
            "xlabel": "tokens $n$",
            "ylabel": r"$\sigma_2/\sigma_1$",
            "xscale": "log",
            "yscale": "log",
        },
        at_start(measure),
        laws,
        answers,
        "Second over first singular value of random softmax attention A, of AX with as many "
        "features as tokens, of attention A(X) of Gaussian tokens, and without 11ᵀ/n, bands of one "
        "standard deviation over seeds; dashed: the theory to leading order in n, which A(X) has "
        "none of. The published code has n of 20 to 150; its values are not at hand.",
        extra={"sizes": list(SIZES)},
    )


# --- Noci et al. 2022, figure 1: tokens align in deeper Post-LN networks, with Adam

DEPTHS = (6, 12, 24)
SCALED = r", $1/\sqrt{L}$"


def noci1(options: Flags) -> Curves:
    """Cosine of tokens while networks of several depths train, branches plain and scaled."""
    configs = {}
    for depth in DEPTHS:
        base = rc.transformer(depth, options.num_heads, options.d_model, mlp=options.mlp)
        configs[f"L = {depth}"] = rc.design(base, "post")
        configs[f"L = {depth}{SCALED}"] = rc.design(base, "depth_scaled")

    def measure(options, run):
        if not options.train_steps:
            return before_training(options, run)
        networks = {name: Network(config) for name, config in configs.items()}
        found = small_task.train_networks(options, networks, run)
        return {name: own["cosine"][:, :, -1] for name, own in found.items()}

    def drawn(key, config, count):
        """(parameters, states of `count` sequences, the network that takes them)."""
        n, (key_params, key_data) = options.train_tokens, jax.random.split(key)
        config = config.replace(embedding=small_task.embedding_of(config, n))
        params = rc.init(key_params, config)
        letters = small_task.examples_of(key_data, count, n).inputs
        x = jax.vmap(lambda own: input_states(params, own, config))(letters)
        return params, x, config.replace(embedding=None)

    def before_training(options, run):
        def cosine(key, config):
            params, x, config = drawn(key, config, small_task.EVAL)
            last = jax.vmap(lambda own: rc.token_cosine(rc.apply(params, own, config).hidden[-1]))
            return {"cosine": last(x).mean()[None]}

        found = {}
        with Executor(options, run, "cosines", len(configs) * options.num_seeds) as executor:
            for depth in DEPTHS:  # a program each
                own = {n: c for n, c in configs.items() if c.depth == depth}
                own = {n: jax.tree.map(np.float32, config) for n, config in own.items()}
                found |= executor.measure(cosine, own)
        return {name: own["cosine"] for name, own in found.items()}

    def law(config):
        """Of one seed's tokens; the same before and while the network trains."""
        params, x, config = drawn(jax.random.key(options.seed), config, 1)
        found = rc.theory.expected_pass(params, x[0], config)
        return np.full(len(steps), 1 - math.exp(found.log_one_minus_cosine[-1]))

    def answers(found):
        first = {name: own[:, 0] for name, own in found.items()}
        low, high = (f"L = {depth}" for depth in (min(DEPTHS), max(DEPTHS)))
        return [("deeper aligns", f"{high} less {low}", first[high] - first[low])] + [
            ("scaling helps", f"L = {d}", first[f"L = {d}{SCALED}"] - first[f"L = {d}"])
            for d in DEPTHS
        ]

    steps = small_task.steps_of(options) if options.train_steps else np.zeros(1)
    return Curves(
        options,
        steps,
        {"xlabel": "step", "ylabel": "cosine of tokens, last layer"},
        measure,
        lambda: {name: law(config) for name, config in configs.items()},
        answers,
        "Cosine of the tokens after the last layer while Post-LN networks train with Adam, bands "
        "of one standard deviation over seeds; dashed: expected at initialisation. The published "
        "networks translate IWSLT'14 (German to English), these name the letter before; the "
        "published values are not at hand.",
        compared=1,
    )


CURVES = {"giorlandino4": giorlandino4, "mindthegap": mindthegap, "noci1": noci1}


def rows_of(found: Found, curves: Curves) -> list[dict[str, Any]]:
    """One row per curve, place and seed."""
    return [
        {"curve": name, "x": float(x), "seed": seed, "value": float(own[seed, k])}
        | ({"theory": float(curves.theory[name][k])} if name in curves.theory else {})
        for name, own in found.items()
        for k, x in enumerate(curves.x)
        for seed in range(len(own))
    ]


def summary_of(found: Found, curves: Curves) -> dict[str, Any]:
    """Of each curve its end, and how far from theory it is at the most; answers by seed."""
    own = {}
    for name, values in found.items():
        away = (values.mean(axis=0) - curves.theory.get(name, np.nan))[: curves.compared]
        known = np.isfinite(away).all()
        own[name] = {
            "last": mean_and_ends(values[:, -1]),
            "farthest": float(away[np.argmax(np.abs(away))]) if known else None,
            "at": float(curves.x[np.argmax(np.abs(away))]) if known else None,
        }
    answers = [[key, setting, np.asarray(v).tolist()] for key, setting, v in curves.answers(found)]
    about = {"places": curves.axes["xlabel"], "note": curves.note}
    return {"curves": own, "answers": answers} | about


@figures.styled
def curves_figure(found: Found, curves: Curves) -> Figure:
    """Each curve, dashed the theory's, dotted as published."""
    fig, axes = figures.figure(width=5.6, height=3.6)
    ax, published = axes[0, 0], curves.published()
    for index, (name, values) in enumerate(found.items()):
        marker = {"marker": ""} if len(curves.x) > 20 else {}
        figures.band(ax, curves.x, values, name, index, **marker)
        style = {"color": figures.color(index), "lw": 1.2}
        for lines, dash in ((curves.theory, "--"), (published, ":")):
            if name in lines:
                ax.plot(curves.x, lines[name], ls=dash, **style)
    ax.plot([], [], color="0.3", ls="--", label="theory")
    if published:
        ax.plot([], [], color="0.3", ls=":", label="published")
    ax.set(**curves.axes)
    if curves.axes.get("xscale") == "log":
        ax.set_xticks(curves.x, [f"{x:g}" for x in curves.x])
        ax.xaxis.minorticks_off()
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return fig


def reading(summary: dict[str, Any]) -> str:
    """What is shown, and where the theory is missed most."""
    said = [
        f"{name} by {own['farthest']:+.3f} at {summary['places']} {own['at']:g}"
        for name, own in summary["curves"].items()
        if own["farthest"] is not None
    ]
    return f"{summary['note']} Farthest from theory: {'; '.join(said)}."
