"""Circle: a one-layer network that continues two walks along a circle, fed with its own output.

Reproduces the circle figure of Dong, Cordonnier and Loukas (2021, section 4.3): trained to predict
the next points of two walkers on the two halves of a circle, then applied to its own output 300
times. Do the two points fall together?

The commands are the published ones and train the published network: a skip around the attention in
every variant, dropout 0.1 on points, attention weights, branches and last state. --do_mlp adds an
MLP with its skip; --circle_skip is a skip around the recurrence: trained on the points plus those
of the batch before, fed with the sum of its last input and output. --compare runs "base",
"circle_skip" and "mlp" at widths 32, 64 and 128; --compare=theory takes the skip around the
attention away and adds it again, with and without an MLP.

    python -m experiments.run_circle --width 2 --depth 1 --num_labels 2 --seq_len 10 \\
        --n_epochs 70 --n_train_data 1000 --n_repeat 2 --n_eval_data 300 --hidden_dim 32
    python -m experiments.run_circle --compare --num_seeds=64

Two CPU cores: 260 s of CPU time for 64 seeds of the three variants at width 128, 50 s for 8 seeds
of --compare=theory at width 32. What to expect is a share of seeds, not a picture: the published
code itself, run with eight seeds, falls together in 1, 3, 1 of 8 at the three widths, with
--circle_skip in none, with --do_mlp in 2, 1, 2. The published picture rests on the seed of its
command, 2: of the eight at width 32 the one that falls. results.csv has a row per seed: the
multiplier of the difference of two points at the collapsed point and the steps it predicts, the
law's order, and the heads' τ = P_11 − P_21; arrays.npz the walks.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from matplotlib.figure import Figure

from experiments.shell import cli, vocabulary
from experiments.shell.experiment import Drawing, Experiment
from experiments.trained import arguments, training
from experiments.trained.training import Setup, diverged, kept
from rank_collapse.network import transformer
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.embedding import EmbeddingConfig
from rank_collapse.network.inputs import input_states
from rank_collapse.report import figures
from rank_collapse.report.claims import Row, of_mean, of_share, of_shares
from rank_collapse.report.page import Comparison
from rank_collapse.report.shares import fisher_exact, wilson_interval
from rank_collapse.theory import recurrence
from rank_collapse.training.tasks import circle
from rank_collapse.training.tasks.circle import RADIUS
from rank_collapse.training.training import Recipe, forward

# What the published code trains: a skip around the attention in each of them.
PUBLISHED = ("base", "circle_skip", "mlp")

# What the theory covers: the sublayers one by one, with and without a skip around the attention.
THEORY = ("attention", "attention+skip", "attention+mlp", "attention+skip+mlp")
COMPARED = {"published": PUBLISHED, "theory": THEORY, "all": (*PUBLISHED, *THEORY)}
WIDTHS = (32, 64, 128)
COLLAPSED_STEPS = 1000  # of equal tokens, to reach the fixed point near which a multiplier holds

# How often the published code itself lets the two walkers fall together: its three commands at
# three widths, with --seed 1 to 8 in each of the nine cells; fallen are those that end nearer than
# `TOGETHER`. The published picture is of one run at each width, and its README's command has
# --seed 2: of the eight seeds at width 32 the one, without a flag, that falls.
PUBLISHED_SEEDS = 8
PUBLISHED_FELL = {
    ("base", 32): 1, ("base", 64): 3, ("base", 128): 1,
    ("circle_skip", 32): 0, ("circle_skip", 64): 0, ("circle_skip", 128): 0,
    ("mlp", 32): 2, ("mlp", 64): 1, ("mlp", 128): 2,
}  # fmt: skip

TOGETHER = 0.01  # two points this near have fallen together: 1/60 of the circle's diameter
HIGH, LOW = 1e-2, 1e-6  # distances between which the steps of a fall are counted
AT_REST = 1e-5  # equal points that move less in a step are at a fixed point
SIGNIFICANT = 0.05
# {variant: (statement that it falls together less, the variant without what keeps it apart)}
APART = {
    "circle_skip": ("circle skip", "base"),
    "mlp": ("circle mlp", "base"),
    "attention+mlp": ("circle mlp", "attention"),
}
ORDERS = {"attention": "rate", "attention+mlp": "mlp rate"}  # without skips

FLAGS = arguments.make_flags(
    "circle", shows="distance_at_end", monitor=False, num_heads=2, depth=1, d_model=32,
    num_tokens=2, num_labels=2, n_train_data=1000, n_eval_data=300, n_epochs=70, batch_size=30,
    learning_rate=1e-5,
)  # fmt: skip
text = "A skip around the recurrence: each step's input is the sum of the last step's input and "
text += "output; trained on the points plus those of the batch before."
cli.definer(FLAGS)("boolean", "circle_skip", False, text)
vocabulary.optional_choice(
    FLAGS, "compare", "published", COMPARED,
    "Several variants at each of the --widths: the three published ones, the theory's (attention "
    "with and without a skip around it, with and without an MLP), or all.",
)  # fmt: skip
vocabulary.numbers(FLAGS, "widths", list(WIDTHS), "Model widths of --compare.", lower_bound=3)
vocabulary.unused(FLAGS, "n_repeat", "path_len", "n_paths", "no_sub_path")

Cases = Mapping[str, Setup]  # {"variant, d=width": what is trained}
Results = Mapping[str, Any]  # {case: as `training.results_of`}


def make_cases(options: flags.FlagValues) -> Cases:
    """{"variant, width": what is trained} of the flags.

    Raises:
        ValueError: Flags that do not fit each other.
    """
    if options.num_labels != 2:
        raise ValueError(f"num_labels={options.num_labels}: a point of the plane has 2 coordinates")
    if options.n_train_data < 4:
        raise ValueError(f"n_train_data={options.n_train_data} points make no two walks")
    pairs = [(variant_of(options), options.d_model)]
    if options.compare:
        variants = COMPARED[options.compare]
        pairs = [(variant, width) for width in options.widths for variant in variants]
    return {name_of(*pair): setup(options, *pair) for pair in pairs}


def name_of(variant: str, width: int) -> str:
    """A case's name, "base, d=32"."""
    return f"{variant}, d={width}"


def parts_of(name: str) -> tuple[str, int]:
    """(variant, width) of a case's name."""
    variant, width = name.split(", d=")
    return variant, int(width)


def variant_of(options: flags.FlagValues) -> str:
    """The published variant that the two flags choose."""
    chosen = {"circle_skip": options.circle_skip, "mlp": options.do_mlp}
    return "+".join(name for name, wanted in chosen.items() if wanted) or "base"


def fed_with_sums(variant: str) -> bool:
    """Whether a skip leads around the recurrence."""
    return variant.startswith("circle_skip")


def setup(options: flags.FlagValues, variant: str, width: int) -> Setup:
    """One case: its network, and the walk it is trained on."""

    def make_data(_):
        walk = circle.make_examples(options.n_train_data)
        sums = circle.with_batch_before(walk, options.batch_size)
        return {"train": sums if fed_with_sums(variant) else walk, "walk": walk}

    return Setup(
        name=f"circle: {name_of(variant, width)}",
        title=name_of(variant, width),
        recipe=recipe(options, variant, width),
        make_data=make_data,
        metrics={},
        published={},
    )


def recipe(options: flags.FlagValues, variant: str, width: int) -> Recipe:
    """What is trained: post-norm layers on linearly embedded points, no positions."""
    published = not variant.startswith("attention")
    config = TransformerConfig(
        depth=options.depth,
        num_heads=options.num_heads,
        d_model=width,
        d_ff=width,
        mlp="gelu" if "mlp" in variant else "none",
        attention_skip=published or "skip" in variant,
        mlp_skip=True,
        norm_placement="post",
        init="reference",
        embedding=EmbeddingConfig(d_input=2, d_embed=width),
    )
    return Recipe(
        config, 2, options.batch_size, options.n_epochs, loss="squared_error",
        output_dropout=published,
    )  # fmt: skip


def roll_out(num_steps: int, setup: Setup, model: Any, data: Any, key: Any) -> dict[str, Any]:
    """One seed's continuation of its own output, after the points it was trained on.

    Returns:
        "trajectory" [t, 2, 2], "distance" [t] of its two points, and "error", √(E‖Δ‖² / 4) of one
        step on the training data, Δ the error of a point. Of the theory (see
        `rank_collapse.theory.recurrence`): "log10_distance" [t], with the logarithm carried;
        "head_gap" [t, l, h]; the Jacobians of a step of the recurrence, "jacobian_at_end" [4, 4]
        where the two points end, "jacobian_across" [2, 2] where equal points end that begin in
        their middle, and "equal_points_moved", the length of the last step of those.
    """
    config, skip = setup.recipe.config, fed_with_sums(setup.title)

    def step(points):
        return forward(model, points, config)

    def recurrent(points):
        return points + step(points) if skip else step(points)

    def weights(points):
        states = input_states(model.network, points, config)
        return transformer.apply(model.network, states, config).attention

    walk, train = data["walk"], data["train"]
    squared = (jax.vmap(step)(train.inputs) - train.labels) ** 2
    path = circle.roll_out(step, walk.inputs[0], num_steps, skip=skip)
    inputs = jnp.cumsum(path, axis=0) if skip else path
    middle = jnp.mean(inputs[-1], axis=0)
    collapsed, moved = recurrence.equal_tokens(recurrent, middle, COLLAPSED_STEPS)
    return {
        "trajectory": path,
        "distance": circle.distance(path),
        "error": jnp.sqrt(0.5) * jnp.sqrt(jnp.mean(squared)),
        "log10_distance": recurrence.log_roll_out(
            model.network, model.classifier, walk.inputs[0], config, num_steps, skip=skip
        ),
        "head_gap": circle.head_gap(jax.lax.map(weights, inputs)),
        "jacobian_at_end": recurrence.jacobian_matrix(recurrent, inputs[-1]),
        "jacobian_across": recurrence.transverse_jacobian(recurrent, collapsed),
        "equal_points_moved": moved,
    }


def measures_of(case: dict[str, Any]) -> dict[str, np.ndarray]:
    """What theory and measurement say of each seed of a case, arrays [s] (gaps [s, l, h]).

    "multiplier" is μ where equal points are at last; it predicts steps only where they are at rest.
    """
    distance, gaps = case["distance"], case["head_gap"]
    multiplier = recurrence.spectral_radius(case["jacobian_across"])
    at_rest = case["equal_points_moved"] < AT_REST
    predicted = recurrence.predicted_steps(multiplier, HIGH, LOW)
    fell = distance[:, -1] < TOGETHER

    def opposite(gap):
        return ((gap.min(axis=-1) < 0) & (gap.max(axis=-1) > 0)).any(axis=-1)

    return {
        "fell": fell,
        "measured_steps": recurrence.measured_steps(distance, HIGH, LOW),
        "predicted_steps": np.where(at_rest, predicted, np.nan),
        "multiplier": multiplier,
        "at_rest": at_rest,
        "radius_at_end": recurrence.spectral_radius(case["jacobian_at_end"]),
        "order": recurrence.fall_order(case["log10_distance"]),
        "opposite_at_start": opposite(gaps[:, 0]),
        "opposite_at_end": opposite(gaps[:, -1]),
        "gap_at_start": gaps[:, 0],
        "gap_at_end": gaps[:, -1],
    }


def rows_of(results: Results, cases: Cases) -> list[dict[str, Any]]:
    """One row per case and seed; where the walkers went step by step is in arrays.npz."""
    rows = []
    for name, case in results.items():
        found = measures_of(case)
        variant, width = parts_of(name)
        for seed, distance in enumerate(case["distance"]):
            row = {
                "case": name, "variant": variant, "width": width, "seed": seed,
                "diverged": int(seed in diverged(case)), "step_error": float(case["error"][seed]),
                "distance_at_start": float(distance[0]), "distance_at_end": float(distance[-1]),
                "first_below_1e-2": _first(distance, HIGH),
                "first_below_1e-6": _first(distance, LOW),
            }  # fmt: skip
            for key, values in found.items():
                if not key.startswith("gap"):
                    row[key] = values[seed].item()
            for when in ("start", "end"):
                for (layer, head), gap in np.ndenumerate(found[f"gap_at_{when}"][seed]):
                    row[f"tau_{when}_l{layer}_h{head}"] = float(gap)
            rows.append({key: _cell(value) for key, value in row.items()})
    return rows


def _cell(value):
    if isinstance(value, bool):
        return int(value)
    return None if isinstance(value, float) and np.isnan(value) else value


def _first(distance, bound):
    below = np.flatnonzero(distance < bound)
    return int(below[0]) if below.size else None


def summary_of(results: Results, cases: Cases) -> dict[str, Any]:
    """Per case: how many seeds fell, beside the published code's count, and how they fell."""
    out = {}
    for name, case in results.items():
        seeds = kept(case)
        found = {key: values[seeds] for key, values in measures_of(case).items()}
        distance, fell = case["distance"][seeds], found["fell"]
        steps = np.stack([found["measured_steps"], found["predicted_steps"]], axis=1)[fell]
        out[name] = {
            "seeds": len(seeds),
            "diverged": list(diverged(case)),
            "step_error": float(case["error"][seeds].mean()),
            "distance_at_start": float(distance[:, 0].mean()),
            "distance_at_end": float(np.median(distance[:, -1])),
            "fell": int(fell.sum()),
            "interval": list(wilson_interval(int(fell.sum()), len(seeds))),
            "attracting": int((found["at_rest"] & (found["multiplier"] < 1)).sum()),
            "at_rest": int(found["at_rest"].sum()),
            "steps": steps[np.isfinite(steps).all(axis=1)].tolist(),  # measured, predicted
            "orders": found["order"][fell & np.isfinite(found["order"])].tolist(),
            "radius_at_end": np.quantile(found["radius_at_end"], [0, 0.5, 1]).tolist(),
            "opposite_at_start": _table(found["opposite_at_start"], fell),
            # Equal tokens have τ = 0: at the end it says something of those apart alone.
            "opposite_at_end_apart": int((found["opposite_at_end"] & ~fell).sum()),
        }
        count = PUBLISHED_FELL.get(parts_of(name))
        if count is not None:
            p = fisher_exact(int(fell.sum()), len(seeds), count, PUBLISHED_SEEDS)
            out[name]["published"] = {"fell": count, "seeds": PUBLISHED_SEEDS, "p": p}
    return {"cases": out, "seconds": sum(float(c["seconds"]["all"]) for c in results.values())}


def _table(opposite, fell):
    """[fell, seeds] where heads' τ have opposite signs, and where all have the same."""
    return {
        "opposite": [int((opposite & fell).sum()), int(opposite.sum())],
        "alike": [int((~opposite & fell).sum()), int((~opposite).sum())],
    }


def law_text(case: dict[str, Any]) -> str:
    """How the seeds of a case fell: steps measured and predicted, and the law's order."""
    parts = []
    if case["steps"]:
        measured, predicted = np.array(case["steps"]).T
        parts.append(
            f"steps from 1e-2 to 1e-6 {_span(measured, 'g')} (predicted {_span(predicted, '.1f')}, "
            f"median error {np.median(np.abs(measured - predicted)):.2g})"
        )
    if case["orders"]:
        parts.append(f"order {_span(case['orders'], '.4f')}")
    return ", ".join(parts)


def _span(values, form):
    """ "1 to 14", or "1"."""
    low, high = (format(f(values), form) for f in (np.min, np.max))
    return low if low == high else f"{low} to {high}"


def _grid(results):
    """(variants, widths, {(variant, width): results})."""
    cases = {parts_of(name): case for name, case in results.items()}
    variants, widths = (list(dict.fromkeys(keys)) for keys in zip(*cases, strict=True))
    return variants, widths, cases


def _fell(case):
    """Of the seeds that did not diverge, which fell."""
    return case["distance"][kept(case), -1] < TOGETHER


@figures.styled
def share_figure(results: Results, cases: Cases) -> Figure:
    """Share of seeds that fell together, ours and the published code's, with 95 % intervals."""
    variants, widths, cases = _grid(results)
    fig, axes = figures.figure(
        1, len(widths), width=max(2.4, 0.7 * len(variants)), height=3.6, sharey=True
    )
    for ax, width in zip(axes.flat, widths, strict=True):
        for i, variant in enumerate(variants):
            fell = _fell(cases[variant, width])
            counts = [("here", 0, int(fell.sum()), len(fell))]
            if (variant, width) in PUBLISHED_FELL:
                theirs = PUBLISHED_FELL[variant, width]
                counts.append(("published code", 1, theirs, PUBLISHED_SEEDS))
            for label, index, count, total in counts:
                shown = f"{label}, {total} seeds" if i == 0 else None
                ends = wilson_interval(count, total)
                figures.interval(ax, i + 0.16 * index, count / total, ends, shown, index)
        ax.set_xticks(range(len(variants)), variants, rotation=20 if len(variants) < 4 else 75)
        ax.set(title=f"d={width}", ylim=(-0.04, 1.04), xlim=(-0.5, len(variants) - 0.4))
    axes.flat[0].set_ylabel("share of seeds together")
    fig.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return fig


@figures.styled
def steps_figure(results: Results, cases: Cases) -> Figure:
    """Steps from a distance of 1e-2 to 1e-6 against ln(1e-4)/ln μ, a point per seed that fell."""
    variants, widths, cases = _grid(results)
    fig, axes = figures.figure(1, 1, width=6.6, height=3.8)
    ax, shown = axes[0, 0], []
    for (variant, width), case in cases.items():
        found = measures_of(case)
        predicted, measured = found["predicted_steps"], found["measured_steps"]
        # A multiplier of 0, pure attention's, predicts no number of steps: its law is cubic.
        fits = found["fell"] & np.isfinite(predicted) & np.isfinite(measured) & (predicted >= 0.5)
        fits[np.setdiff1d(np.arange(len(fits)), kept(case))] = False
        if fits.any():
            shown += [*predicted[fits], *measured[fits]]
            ax.plot(
                predicted[fits], measured[fits], linestyle="none", alpha=0.7, markersize=5,
                color=figures.color(variants.index(variant)),
                marker=figures.MARKERS[widths.index(width)], label=f"{variant}, d={width}",
            )  # fmt: skip
    ends = [min(shown, default=1) / 1.2, max(shown, default=300) * 1.2]
    ax.plot(ends, ends, color="gray", linewidth=0.8, label="equal")
    ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends, ylabel="steps measured")
    ax.set_xlabel("steps predicted, ln(1e-4) / ln μ")
    ax.set_title("From a distance of 1e-2 to 1e-6")
    fig.legend(*ax.get_legend_handles_labels(), loc="outside right upper")
    return fig


@figures.styled
def trajectory_figure(results: Results, cases: Cases) -> Figure:
    """The two points of one seed, a panel per case: the first that fell, else the first."""
    variants, widths, cases = _grid(results)
    fig, axes = figures.figure(len(widths), len(variants), width=2.8, height=2.9)
    angle = np.linspace(0, 2 * np.pi, 200)
    panels = [(variant, width) for width in widths for variant in variants]
    for ax, (variant, width) in zip(axes.flat, panels, strict=True):
        case = cases[variant, width]
        fell = _fell(case)
        seed = kept(case)[np.argmax(fell)]
        ax.plot(RADIUS * np.cos(angle), RADIUS * np.sin(angle), color="lightgray", linewidth=4)
        for walker in range(2):
            path = case["trajectory"][seed, :, walker]
            ax.plot(*path.T, color=figures.color(walker), marker=".", markersize=3, linewidth=0.5,
                    label=f"sequence {walker + 1}")  # fmt: skip
            ax.plot(*path[0], color=figures.color(walker), marker="o", markersize=6)
        count = f"{fell.sum()} of {len(fell)} fell"
        ax.set_title(f"{variant}, d={width}\nseed {seed}; {count}", fontsize=9)
        ax.set(xlim=(-0.56, 0.56), ylim=(-0.56, 0.56), xlabel="x", ylabel="y")
        ax.set_aspect("equal")
    axes.flat[0].legend(loc="upper right", fontsize=7)
    return fig


@figures.styled
def distance_figure(results: Results, cases: Cases) -> Figure:
    """Distance of the two points by step: a panel per case, a line per seed.

    A median of seeds that fell and seeds that did not would be the distance of neither.
    """
    variants, widths, cases = _grid(results)
    fig, axes = figures.figure(
        len(widths), len(variants), width=2.8, height=2.2, sharex=True, sharey=True
    )
    for row, width in zip(axes, widths, strict=True):
        for ax, variant in zip(row, variants, strict=True):
            case = cases[variant, width]
            for fallen, index in ((False, 7), (True, 0)):
                lines = case["distance"][kept(case)][_fell(case) == fallen]
                ax.plot(
                    np.maximum(lines, 1e-9).T, color=figures.color(index), linewidth=0.7, alpha=0.6
                )
            ax.set_title(f"{variant}, d={width}", fontsize=9)
            ax.set(yscale="log")
    figures.outer_labels(axes, "step", "distance")
    return fig


def claims(summary: dict[str, Any]) -> list[Row]:
    """How many fall, as published and as pure attention, fewer with a skip or an MLP, how fast."""
    cases, found = {parts_of(name): case for name, case in summary["cases"].items()}, []
    for (variant, width), case in cases.items():
        where = f"{variant}, d={width}"
        key, other = APART.get(variant, (None, None))
        if variant in ("base", "attention"):
            found.append(of_share("circle", where, case["fell"], case["seeds"]))
        if (other, width) in cases:
            without = cases[other, width]
            counts = (case["fell"], case["seeds"], without["fell"], without["seeds"])
            found.append(of_shares(key, where, *counts))
        if variant in ORDERS:
            found.append(of_mean(ORDERS[variant], f"recurrent, {where}", case["orders"]))
    return found


def compare(summary: dict[str, Any]) -> list[Comparison]:
    """Counts beside the published code's, and what was derived here of how they fall."""
    cases = {parts_of(name): case for name, case in summary["cases"].items()}
    return [*_counts(cases), *_laws(cases), *_heads(cases)]


def _counts(cases):
    """Whether our shares and the published code's can be one."""
    for (variant, width), case in cases.items():
        if "published" in case:
            theirs, (low, high) = case["published"], case["interval"]
            yield Comparison(
                f"{variant}, d={width}: seeds that fell together",
                _share(case), f"{theirs['fell']} of {theirs['seeds']}",
                f"share {low:.2f} to {high:.2f} (95 %); published: the published code, run with "
                f"seeds 1 to 8; Fisher's exact p that both shares are one: {theirs['p']:.2g}",
            )  # fmt: skip


def _laws(cases):
    """How they fall: the order of the law, and the speed from the multiplier."""
    for (variant, width), case in cases.items():
        if case["orders"]:
            order = 3 if variant in ("attention", "attention+mlp") else 1
            yield Comparison(
                f"{variant}, d={width}: order p of d' ~ d^p, median",
                float(np.median(case["orders"])), f"theory: {order}", law_text(case),
            )  # fmt: skip


def _heads(cases):
    """Whether heads of opposite sign, δ' = Σ_h τ_h δ W_h, keep two walkers apart."""
    for (variant, width), case in cases.items():
        (k, n), (k_alike, n_alike) = (case["opposite_at_start"][x] for x in ("opposite", "alike"))
        if case["fell"] and n and n_alike:
            p = fisher_exact(k, n, k_alike, n_alike)
            yield Comparison(
                f"{variant}, d={width}: fell, of those whose heads' τ begin with opposite signs",
                f"{k} of {n}", "theory: fewer",
                f"of the same sign {k_alike} of {n_alike}; Fisher's exact p = {p:.2g}"
                f"; apart at the end and of opposite sign there: {case['opposite_at_end_apart']} "
                f"of {case['seeds'] - case['fell']}",
            )  # fmt: skip


def _share(case):
    return f"{case['fell']} of {case['seeds']}"


def reading(summary: dict[str, Any]) -> str:
    """What the counts say against the paper."""
    shares = "; ".join(f"{name}: {_share(case)}" for name, case in summary["cases"].items())
    known = [case for case in summary["cases"].values() if "published" in case]
    differ = [case for case in known if case["published"]["p"] < SIGNIFICANT]
    return (
        f"Seeds that fell together: {shares}. The published code itself, run with seeds 1 to 8, "
        "falls in 1, 3, 1 of 8 at widths 32, 64, 128, in none with circle_skip, and in 2, 1, 2 "
        "with an MLP: the published picture rests on its command's seed 2, the one of eight that "
        "falls at width 32 without a flag. The published network has a skip around its attention "
        "in all three; what differs is a skip around the recurrence. "
        f"Of {len(known)} cells run here {len(differ)} differ from the published code's at "
        f"p < {SIGNIFICANT}."
    )


EXPERIMENT = Experiment(
    about=__doc__,
    name="circle",
    order=80,
    brief="a layer fed with its own output, as published and as the theory has it: share of seeds "
    "that collapse, at which rate",
    title="Circle: recurrent attention",
    claim="Section 4.3: a one-layer network fed with its own output lets the two walkers fall "
    "together when it is pure attention; a skip or an MLP counteracts that.",
    flags=FLAGS,
    presets={
        "quick": ("--compare", "--widths=32", "--num_seeds=8"),
        "paper": ("--compare=all", "--num_seeds=64"),
        "tiny": ("--num_seeds=2", "--d_model=4", "--n_train_data=6", "--n_eval_data=4",
                 "--n_epochs=1", "--batch_size=3", "--widths=4"),
    },
    setup=make_cases,
    open_run=training.open_run,
    measure=lambda options, cases, run: training.results_by_case(
        options, cases, run, functools.partial(roll_out, options.n_eval_data)
    ),
    table=rows_of,
    summary=summary_of,
    figures={
        "shares": Drawing(
            share_figure, "Share of seeds whose two walkers end together, with 95 % intervals."
        ),
        "steps": Drawing(
            steps_figure,
            "Steps from a distance of 1e-2 to 1e-6 of the seeds that fell, against the prediction "
            "from the multiplier at the collapsed point.",
        ),
        "trajectories": Drawing(
            trajectory_figure,
            "The two sequences of one seed, fed with their own continuation: the first that fell, "
            "where one did.",
        ),
        "distance": Drawing(
            distance_figure,
            "Distance between the two sequences by step, one line per seed; blue: fell.",
        ),
    },
    claims=claims,
    compare=compare,
    reading=reading,
)  # fmt: skip
main = EXPERIMENT.main

if __name__ == "__main__":
    cli.run(main, FLAGS)
