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
from experiments.shell.options import Flags
from experiments.shell.statements import row_of
from rank_collapse.measures.updates import with_matrices
from rank_collapse.report import Comparison, figures
from rank_collapse.report.claims import Row
from rank_collapse.report.figures import Figure
from rank_collapse.report.statistics import slope
from rank_collapse.runs.folder import RunFolder
from rank_collapse.runs.seeds import QUICK
from rank_collapse.theory import mixing_rates, phases

Found = Mapping[str, np.ndarray]  # {curve: [s, k]}, of the first k places


@dataclass(frozen=True)
class Curves:
    """One figure.

    Attributes:
        options: The flags.
        names: Of the curves, in their order.
        x: Places of the longest curve [k].
        axes: Keywords of `Axes.set`.
        of_one_seed: Key → {curve: [k]}, and what else `theory` takes.
        theory: What is measured [s, ...] → {curve: [k]} of each that has one.
        claims: {curve: [s, k]} → rows of statements.
        published: () → {curve: [k]}, as published.
        compared: The place at which `compare` shows each curve.
        extra: What beside the flags determines the results.
        trained: {curve: network}, whose cosines are shown while they train, in place of those of
            `of_one_seed`.
    """

    options: Flags
    names: Iterable[str]
    x: np.ndarray
    axes: Mapping[str, str]
    of_one_seed: Callable[[Any], Mapping[str, Any]]
    theory: Callable[[Found], Mapping[str, Any]]
    claims: Callable[[Found], list[Row]]
    published: Callable[[], Mapping[str, Any]] = dict
    compared: int = -1
    extra: Mapping[str, Any] | None = None
    trained: Mapping[str, small_task.Network] = field(default_factory=dict)

    def measure(self, run: RunFolder, setup_of: Any) -> Found:
        """{curve: [s, k]}, and what else `theory` takes."""
        with Executor(self.options, run, "curves") as executor:
            cells = {"curves": None}
            found = executor.measure(lambda key, _: self.of_one_seed(key), cells)["curves"]
        if self.trained:
            trained = small_task.train_networks(self.options, self.trained, run)
            found |= {name: own["cosine"][:, :, -1] for name, own in trained.items()}
        return found

    def rows(self, found: Found) -> Iterator[dict[str, Any]]:
        """One row per curve, place and seed."""
        laws, none = self.theory(found), np.full(len(self.x), np.nan)
        for name in self.names:
            values = found[name]
            law = np.asarray(laws.get(name, none[: values.shape[1]]), float)[:, None]
            arrays = {"x": self.x.astype(float), "value": values.T.astype(float), "theory": law}
            for row in tidy.rows(arrays, ("x", "seed"), ("value", "theory")):
                yield {"curve": name} | row

    def compare(self, found: Found) -> Iterator[Comparison]:
        """Each curve beside its theory at one place, the last where the theory is of all."""
        theory = {name: float(law[self.compared]) for name, law in self.theory(found).items()}
        for name in self.names:
            mean, x = float(found[name][:, self.compared].mean()), self.x[: found[name].shape[1]]
            place = f"{plain(name)}, {plain(self.axes['xlabel'])} {x[self.compared]:g}"
            yield Comparison(place, mean, theory.get(name), "the theory's")

    def figure(self, found: Found) -> Figure:
        """Each curve, dashed the theory's, dotted as published."""
        fig, axes = figures.figure(width=5.6, height=3.6)
        ax, theory, published = axes[0, 0], self.theory(found), self.published()
        for index, name in enumerate(self.names):
            x = self.x[: found[name].shape[1]]
            marker = {"markevery": [-1]} if len(self.x) > 20 else {}
            figures.band(ax, x, found[name], name, index, **marker)
            for lines, dash in ((theory, "--"), (published, ":")):
                if name in lines:
                    ax.plot(x, lines[name], ls=dash, color=figures.color(index), lw=1.2)
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
# {curve: placement in the theory}, of each norm placement with γ = 0 and 1 of M = P − γ C
PLACEMENTS = {
    "post-LN": "post",
    "GC post-LN": "gain",
    "pre-LN": "pre",
    "GC pre-LN": "gain_pre",
}


def giorlandino4(options: Flags) -> Curves:
    """Cosine of two tokens by layer at β = 0.1, with and without what tokens share in the output of
    attention (gain-controlled, GC), bands of one standard deviation over seeds; dashed: the theory
    for as many tokens; dotted: as published, n → ∞. The published figure is theory alone."""
    depth, n, d = options.depth, options.num_tokens, options.d_model

    def profiles(key):
        """Of all placements: their weights are the same."""
        configs = {
            placement: rc.transformer(
                depth, 1, d, d_ff=d, mlp="relu", norm="rms", norm_placement=placement
            )
            for placement in ("post", "pre")
        }
        key_params, key_x, key_in, key_out = jax.random.split(key, 4)
        params, x = rc.init(key_params, configs["post"]), tokens(key_x, n, d, RHO)
        weight, std, mlp = math.sqrt(WEIGHT), math.sqrt(BIAS), params.layers.mlp
        mlp = {
            "w_in": weight * mlp.w_in,
            "w_out": weight * mlp.w_out,
            "b_in": std * jax.random.normal(key_in, mlp.b_in.shape),
            "b_out": std * jax.random.normal(key_out, mlp.b_out.shape),
        }
        w_q = BETA * math.sqrt(math.log(n)) * params.layers.attention.w_q
        params = with_matrices(params, {"attention": {"w_q": w_q}, "mlp": mlp})

        def profile(config, gamma):
            config = rc.variant(config, "shaped", alpha=0.0, gamma=gamma)
            return rc.token_cosine(rc.apply(params, x, config).hidden)

        gammas = jnp.array([0.0, 1.0])
        found = [jax.lax.map(functools.partial(profile, own), gammas) for own in configs.values()]
        return dict(zip(PLACEMENTS, jnp.concatenate(found), strict=True))

    @functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
    def laws(num_tokens):
        gains = {"attention_skip": 1.0, "mlp_skip": 1.0, "weight": WEIGHT, "bias": BIAS}
        law = functools.partial(phases.phase_profile, BETA, depth, start=(1.0, RHO), **gains)
        return {
            name: law(placement=own, num_tokens=num_tokens)[1] for name, own in PLACEMENTS.items()
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
        lambda found: laws(n),
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

    def drawn(key, sizes):
        """{n: [4, n, n]}: draws of the largest size, of which the others have the beginning, since
        random numbers take longest to compile."""
        keys = jnp.stack([jax.random.split(jax.random.fold_in(key, n), 4) for n in sizes])
        draw = functools.partial(jax.random.normal, shape=(sizes[-1] ** 2,))
        flat = jax.vmap(jax.vmap(draw))(keys)
        return {n: a[:, : n * n].reshape(4, n, n) for n, a in zip(sizes, flat, strict=True)}

    def ratios(scores, x, w_q, w_k):
        n = len(x)
        a = jax.nn.softmax(STD * scores, axis=-1)
        q, k = (x @ w / math.sqrt(n) for w in (w_q, w_k))
        of_tokens, centred = jax.nn.softmax(STD * q @ k.T / math.sqrt(n), axis=-1), a - 1 / n
        # One call each: batches of them in one call never came back on two busy cores.
        matrices = (a, a @ x, of_tokens, centred, centred @ x)
        values = [jnp.linalg.svd(matrix, compute_uv=False) for matrix in matrices]
        return jnp.stack([value[1] / value[0] for value in values])

    def of_one_seed(key):
        groups = (PUBLISHED, *((n,) for n in BEYOND[1:]))
        draws = [own for sizes in groups for own in drawn(key, sizes).values()]
        found = jnp.stack([ratios(*own) for own in draws], axis=1)
        return dict(zip(MATRICES, found, strict=True))

    @jax.jit
    def laws():
        ratio = functools.partial(mixing_rates.spectral_ratio, STD, np.array(SIZES))
        flat = jnp.ones(len(SIZES))
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
        lambda found: laws(),
        claims,
        extra={"sizes": list(SIZES)},
    )


# --- Noci et al. 2022, figure 1: tokens align in deeper Post-LN networks, with Adam

DEPTHS = (6, 12, 24)
SCALED = r", $1/\sqrt{L}$"


def noci1(options: Flags) -> Curves:
    """Cosine of the tokens after the last layer while Post-LN networks train with Adam, without
    training by layer at initialisation; bands of one standard deviation over seeds, dashed what is
    expected at initialisation. The published networks translate IWSLT'14 (German to English), these
    name the letter before; the published values are not at hand."""
    n, by_layer = options.train_tokens, not options.train_steps
    places = np.arange(DEPTHS[-1] + 1) if by_layer else small_task.steps_of(options)
    start = -1 if by_layer else 0  # the place of the last layer at initialisation
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

    def of_one_seed(key):
        """The cosine of each network by layer, and as expected of the first sequence."""
        key_params, key_data = jax.random.split(key)
        params = rc.init(key_params, deepest[0])
        letters = small_task.examples_of(key_data, small_task.EVAL, n).inputs

        def measure(config):
            one = jax.vmap(lambda own: rc.token_cosine(rc.apply(params, own, config).hidden))
            law = rc.theory.expected_pass(params, letters[0], config).log_one_minus_cosine
            return one(letters).mean(axis=0), -jnp.expm1(law)

        found, (cosines, laws) = {}, jax.lax.map(measure, gains)
        for (name, config), own, law in zip(configs.items(), cosines, laws, strict=True):
            layers = slice(config.depth + 1)
            found |= {name: own[layers], f"expected {name}": law[layers]}
        return found

    def theory(found):
        laws = {name: found[f"expected {name}"].mean(axis=0) for name in configs}
        return laws if by_layer else {n: np.full(len(places), law[-1]) for n, law in laws.items()}

    def claims(found):
        first = {name: own[:, start] for name, own in found.items()}
        low, _, high = names = [f"L = {depth}" for depth in DEPTHS]
        deeper = row_of("deeper aligns", f"{high} less {low}", first[high] - first[low])
        scaled = [row_of("scaling helps", p, first[f"{p}{SCALED}"] - first[p]) for p in names]
        return [deeper, *scaled]

    axes = {"xlabel": "step", "ylabel": "cosine of tokens, last layer"}
    return Curves(
        options,
        configs,
        places,
        {"xlabel": "layer", "ylabel": "cosine of tokens"} if by_layer else axes,
        of_one_seed,
        theory,
        claims,
        compared=start,
        trained={} if by_layer else {n: small_task.Network(c) for n, c in configs.items()},
    )


CURVES = {make.__name__: make for make in (giorlandino4, mindthegap, noci1)}
