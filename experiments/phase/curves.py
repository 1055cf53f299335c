"""Published figures that are curves beside a theory: run_phase --figure=giorlandino4 and others.

Axis letters: c curves, s seeds, k points of a curve.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rank_collapse as rc
from experiments import small_task
from experiments.initial import tokens
from experiments.shell import tidy
from experiments.shell.executor import Executor
from experiments.shell.flag_values import Flags
from experiments.shell.statements import row_of
from rank_collapse.measures.updates import with_matrices
from rank_collapse.report import Comparison, figures
from rank_collapse.report.claims import Row
from rank_collapse.report.figures import Figure
from rank_collapse.report.statistics import slope
from rank_collapse.runs.folder import RunFolder
from rank_collapse.runs.seeds import QUICK
from rank_collapse.theory import mixing_rates, phases

Found = Mapping[str, np.ndarray]  # {curve: [s, k]}


@dataclass(frozen=True)
class Curves:
    """One figure.

    Attributes:
        options: The flags.
        names: Of the curves, in their order.
        x: Places of all curves [k].
        axes: Keywords of `Axes.set`.
        of_one_seed: Key → {curve: [k]}.
        theory: () → {curve: [k]} of each that has one.
        claims: {curve: [s, k]} → rows of statements.
        published: () → {curve: [k]}, as published.
        compared: The place at which `compare` shows each curve.
        extra: What beside the flags determines the results.
        trained: {curve: network}, whose cosines are shown while they train, in place of
            `of_one_seed`.
    """

    options: Flags
    names: Iterable[str]
    x: np.ndarray
    axes: Mapping[str, str]
    of_one_seed: Callable[[Any], Mapping[str, Any]]
    theory: Callable[[], Mapping[str, Any]]
    claims: Callable[[Found], list[Row]]
    published: Callable[[], Mapping[str, Any]] = dict
    compared: int = -1
    extra: Mapping[str, Any] | None = None
    trained: Mapping[str, small_task.Network] = field(default_factory=dict)

    def measure(self, run: RunFolder) -> Found:
        """{curve: [s, k]}."""
        if self.trained:
            trained = small_task.train_networks(self.options, self.trained, run)
            return {name: own["cosine"][:, :, -1] for name, own in trained.items()}
        with Executor(self.options, run, "curves") as executor:
            cells = {"curves": None}
            found = executor.measure(lambda key, _: self.of_one_seed(key), cells)["curves"]
        return {name: found[name] for name in self.names}

    def rows(self, found: Found) -> Iterator[dict[str, Any]]:
        """One row per curve, place and seed."""
        values = np.stack(list(found.values()), dtype=float).swapaxes(1, 2)  # [c, k, s]
        laws, none = self.theory(), np.full(len(self.x), np.nan)
        theory = np.stack([laws.get(name, none) for name in found], dtype=float)[..., None]
        arrays = {
            "curve": list(found),
            "x": self.x.astype(float),
            "value": values,
            "theory": theory,
        }
        return tidy.rows(arrays, ("curve", "x", "seed"), ("value", "theory"))

    def compare(self, found: Found) -> Iterator[Comparison]:
        """Each curve beside its theory at one place, the last where the theory is of all."""
        place = f"{plain(self.axes['xlabel'])} {self.x[self.compared]:g}"
        theory = {name: float(law[self.compared]) for name, law in self.theory().items()}
        for name, values in found.items():
            mean = float(values[:, self.compared].mean())
            yield Comparison(f"{plain(name)}, {place}", mean, theory.get(name), "the theory's")

    def figure(self, found: Found) -> Figure:
        """Each curve, dashed the theory's, dotted as published."""
        fig, axes = figures.figure(width=5.6, height=3.6)
        ax, theory, published = axes[0, 0], self.theory(), self.published()
        for index, (name, values) in enumerate(found.items()):
            marker = {"marker": ""} if len(self.x) > 20 else {}
            figures.band(ax, self.x, values, name, index, **marker)
            for lines, dash in ((theory, "--"), (published, ":")):
                if name in lines:
                    ax.plot(self.x, lines[name], ls=dash, color=figures.color(index), lw=1.2)
        ax.plot([], [], color="0.3", ls="--", label="theory")
        if published:
            ax.plot([], [], color="0.3", ls=":", label="published")
        ax.set(**self.axes)
        if self.axes.get("xscale") == "log":
            ax.set_xticks(self.x, [f"{x:g}" for x in self.x])
            ax.xaxis.minorticks_off()
        ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        return fig


def plain(label: str) -> str:
    """A label without TeX."""
    return label.replace(r"\sqrt{L}", "√L").replace(PERP, "A⊥").replace("$", "")


# --- Giorlandino and Goldt 2025, figure 4: with and without what tokens share in attention's output

BETA, RHO, WEIGHT, BIAS = 0.1, 0.2, 0.2, 4e-4
# {curve: (norm placement, variant, placement in the theory)}
PLACEMENTS = {
    "post-LN": ("post", "softmax", "post"),
    "pre-LN": ("pre", "softmax", "pre"),
    "GC post-LN": ("post", "centred", "gain"),
    "GC pre-LN": ("pre", "centred", "gain_pre"),
}


def giorlandino4(options: Flags) -> Curves:
    """Cosine of two tokens by layer at β = 0.1, with and without what tokens share in the output of
    attention (gain-controlled, GC), bands of one standard deviation over seeds; dashed: the theory
    for as many tokens; dotted: as published, n → ∞. The published figure is theory alone."""
    depth, n, d = options.depth, options.num_tokens, options.d_model

    def config_of(placement, variant):
        config = rc.transformer(
            depth, 1, d, d_ff=d, mlp="relu", norm="rms", norm_placement=placement
        )
        return rc.variant(config, variant)

    def profiles(key):
        """Of all placements: their weights are the same."""
        configs = {name: config_of(*own[:2]) for name, own in PLACEMENTS.items()}
        key_params, key_x, key_in, key_out = jax.random.split(key, 4)
        params, x = rc.init(key_params, configs["post-LN"]), tokens(key_x, n, d, RHO)
        weight, std, mlp = math.sqrt(WEIGHT), math.sqrt(BIAS), params.layers.mlp
        mlp = {
            "w_in": weight * mlp.w_in,
            "w_out": weight * mlp.w_out,
            "b_in": std * jax.random.normal(key_in, mlp.b_in.shape),
            "b_out": std * jax.random.normal(key_out, mlp.b_out.shape),
        }
        w_q = BETA * math.sqrt(math.log(n)) * params.layers.attention.w_q
        params = with_matrices(params, {"attention": {"w_q": w_q}, "mlp": mlp})
        return {
            name: rc.token_cosine(rc.apply(params, x, config).hidden)
            for name, config in configs.items()
        }

    @functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
    def laws(num_tokens):
        gains = {"attention_skip": 1.0, "mlp_skip": 1.0, "weight": WEIGHT, "bias": BIAS}
        law = functools.partial(phases.phase_profile, BETA, depth, start=(1.0, RHO), **gains)
        return {
            name: law(placement=own[2], num_tokens=num_tokens)[1]
            for name, own in PLACEMENTS.items()
        }

    def claims(found):
        less = {p: found[f"GC {p}"][:, -1] - found[p][:, -1] for p in ("post-LN", "pre-LN")}
        return [row_of("gain control", f"{p}, {depth} layers", own) for p, own in less.items()]

    return Curves(
        options,
        sorted(PLACEMENTS),
        np.arange(depth + 1),
        {"xlabel": "layer", "ylabel": r"cosine $\rho$ of tokens"},
        profiles,
        lambda: laws(n),
        claims,
        lambda: laws(None),
    )


# --- Nait Saada et al. 2024: the gap of attention's spectrum in width

PUBLISHED, BEYOND = (20, 40, 60, 80, 100, 150), (150, 300, 600)  # the theorem is of n → ∞
SIZES = (*PUBLISHED, *BEYOND[1:])
STD = math.sqrt(math.log(2))  # of scores, so that weights vary by their mean
PERP = r"$A^\perp$"
MATRICES = ("A", "AX", "A(X)", PERP, f"{PERP}X")


def mindthegap(options: Flags) -> Curves:
    """Second over first singular value of random softmax attention A, of AX with as many features
    as tokens, of attention A(X) of Gaussian tokens, and without 11ᵀ/n, bands of one standard
    deviation over seeds; dashed: the theory to leading order in n, which A(X) has none of. The
    published code has n of 20 to 150; its values are not at hand."""

    def of_size(key, n):
        # One draw, since random numbers take longest to compile.
        drawn = jax.vmap(lambda own: jax.random.normal(own, (n, n)))(jax.random.split(key, 4))
        scores, x, w_q, w_k = drawn
        a = jax.nn.softmax(STD * scores, axis=-1)
        q, k = (x @ w / math.sqrt(n) for w in (w_q, w_k))
        of_tokens, centred = jax.nn.softmax(STD * q @ k.T / math.sqrt(n), axis=-1), a - 1 / n
        # One call each: batches of them in one call never came back on two busy cores.
        matrices = (a, a @ x, of_tokens, centred, centred @ x)
        values = [jnp.linalg.svd(matrix, compute_uv=False) for matrix in matrices]
        return jnp.stack([value[1] / value[0] for value in values])

    def of_one_seed(key):
        ratios = [of_size(jax.random.fold_in(key, n), n) for n in SIZES]
        return dict(zip(MATRICES, jnp.stack(ratios, axis=1), strict=True))

    def theory():
        ratio = functools.partial(mixing_rates.spectral_ratio, STD, np.array(SIZES))
        flat = np.ones(len(SIZES))
        return {"A": ratio(), "AX": ratio(1.0), PERP: flat, f"{PERP}X": flat}

    def claims(found):
        slopes = {
            f"{plain(name)}, n from {n[0]} to {n[-1]}": slope(
                np.log(n), np.log(own[:, [SIZES.index(size) for size in n]])
            )
            for n in (PUBLISHED, BEYOND)
            for name, own in found.items()
        }
        return [row_of("gap removed" if "⊥" in at else "gap", at, v) for at, v in slopes.items()]

    return Curves(
        options,
        sorted(MATRICES),
        np.array(SIZES),
        {
            "xlabel": "tokens $n$",
            "ylabel": r"$\sigma_2/\sigma_1$",
            "xscale": "log",
            "yscale": "log",
        },
        of_one_seed,
        theory,
        claims,
        extra={"sizes": list(SIZES)},
    )


# --- Noci et al. 2022, figure 1: tokens align in deeper Post-LN networks, with Adam

DEPTHS = (6, 12, 24)
SCALED = r", $1/\sqrt{L}$"


def noci1(options: Flags) -> Curves:
    """Cosine of the tokens after the last layer while Post-LN networks train with Adam, bands of
    one standard deviation over seeds; dashed: expected at initialisation. The published networks
    translate IWSLT'14 (German to English), these name the letter before; the published values are
    not at hand."""
    n = options.train_tokens
    steps = small_task.steps_of(options)[: None if options.train_steps else 1]
    sizes = options.num_heads, options.d_model
    configs = {
        f"L = {depth}{end}": rc.design(rc.transformer(depth, *sizes, mlp=options.mlp), name)
        for depth in DEPTHS
        for end, name in (("", "post"), (SCALED, "depth_scaled"))
    }
    # Each layer is drawn from a key of its own: networks that differ in depth alone are the first
    # layers of the deepest one, and all curves are one program.
    deepest = [
        own.replace(depth=DEPTHS[-1], embedding=small_task.embedding_of(own, n))
        for own in configs.values()
    ]
    gains = jax.tree.map(lambda *a: np.float32(a), *deepest)

    def curves(key, count, measure):
        """{curve: measure(parameters, `count` sequences, network) [L + 1] of its last layer}."""
        key_params, key_data = jax.random.split(key)
        given = rc.init(key_params, deepest[0]), small_task.examples_of(key_data, count, n).inputs
        found = jax.lax.map(functools.partial(measure, *given), gains)
        by_name = zip(configs.items(), found, strict=True)
        return {name: values[config.depth] for (name, config), values in by_name}

    def cosine(params, letters, config):
        one = jax.vmap(lambda own: rc.token_cosine(rc.apply(params, own, config).hidden))
        return one(letters).mean(axis=0)[:, None]

    def expected(params, letters, config):
        return rc.theory.expected_pass(params, letters[0], config).log_one_minus_cosine

    @functools.cache
    def theory():
        """Of one sequence; the same before and while the networks train."""
        quick = jax.jit(curves, static_argnums=(1, 2), compiler_options=QUICK)
        logs = quick(jax.random.key(options.seed), 1, expected)
        return {name: np.full(len(steps), 1 - math.exp(log)) for name, log in logs.items()}

    def claims(found):
        first = {name: own[:, 0] for name, own in found.items()}
        low, _, high = names = [f"L = {depth}" for depth in DEPTHS]
        deeper = row_of("deeper aligns", f"{high} less {low}", first[high] - first[low])
        scaled = [row_of("scaling helps", p, first[f"{p}{SCALED}"] - first[p]) for p in names]
        return [deeper, *scaled]

    return Curves(
        options,
        configs,
        steps,
        {"xlabel": "step", "ylabel": "cosine of tokens, last layer"},
        lambda key: curves(key, small_task.EVAL, cosine),
        theory,
        claims,
        compared=0,
        trained={n: small_task.Network(c) for n, c in configs.items() if options.train_steps},
    )


CURVES = {make.__name__: make for make in (giorlandino4, mindthegap, noci1)}
