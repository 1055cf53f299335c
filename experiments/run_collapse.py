"""Rank collapse with depth: residual of the tokens, layer by layer, at initialisation.

Reproduces the residual figures of Dong, Cordonnier and Loukas (2021) on one network without any
checkpoint: relative residual by layer of pure attention (san), with MLPs (san_mlp), with skips
(san_skip) and of the full Transformer, for any norm placement. Also draws the
logarithm of the residual to any depth, with the 3^L law and the theorems' bound.

    python -m experiments.run_collapse
    python -m experiments.run_collapse --depth=32 --num_seeds=64 --norm_placement=none,post,pre
    python -m experiments.run_collapse --weight_scale=0.25,0.5,1,2 --skip_gain=0,0.5,1

Half a minute on two cores at the defaults, nearly all of it compiling. Expect the ratio of san and
san_mlp at 0 after three layers, that of san_skip at 0.04 and of transformer at 0.13 after twelve
(more with smaller weights: --weight_scale), and a local rate of 3.00 for san.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from experiments.collapse import figures
from experiments.collapse.figures import TIGHTNESS, rates, slowed
from experiments.collapse.measure import SWEPT, VARIANTS, Results, Setup, measure_all, setup_of
from experiments.shell import cli, inputs, tidy, vocabulary
from experiments.shell.experiment import Drawing, Experiment
from experiments.shell.statements import row_of
from rank_collapse.network.layers import MLP_KINDS, NORM_PLACEMENTS
from rank_collapse.pretrained.published import PUBLISHED, published_curves
from rank_collapse.report.claims import ABOVE_ZERO, OUTSIDE, WITHIN, judged, of_cases, of_mean
from rank_collapse.report.page import Comparison
from rank_collapse.report.statistics import between, mean_and_ends, power_law_wins
from rank_collapse.theory import measured_constant

PUBLISHED_NAMES = {
    "san": "SAN",
    "san_mlp": "SAN+MLP",
    "san_skip": "SAN+skip",
    "transformer": "Transformer",
}

# What is said of networks without skips, or compared with them. Post- and pre-norm are then one
# network up to an outer norm: the row of post-norm, as published, is that of both.
WITHOUT_SKIPS = ("norm", "mlp rate", "skips", "mlps stop", "mlps slow")

COLUMNS = (
    "ratio",
    "log10_residual",
    "plain_log10_residual",
    "log10_bound",
    "log10_layer_bound",
    "log10_published_bound",
    "admissible",
    *TIGHTNESS,
    "log10_cubic",
    "log10_c",
    "local_rate",
)

FLAGS = cli.make_flags(
    "collapse",
    num_seeds=8,
    shows="ratio,variant=last,layer=last",
    traced=("weight_scale", "skip_gain"),
    execution=("seed_chunk",),
)
define = cli.definer(FLAGS)
define("list", "variants", list(VARIANTS), f"Networks, out of {', '.join(VARIANTS)}.")
text = f"Norm placements, out of {', '.join(NORM_PLACEMENTS)}."
define("list", "norm_placement", ["none"], text)
vocabulary.alias(FLAGS, norm="norm_placement")
vocabulary.define(
    FLAGS,
    norm_kind="layer",
    depth=12,
    num_heads=4,
    d_model=64,
    d_ff=None,
    mask="none",
    window=2,
    init="lecun",
    bias_scale=0.0,
    memory_gb=None,
)
define("enum", "mlp", "gelu", "MLP of san_mlp and transformer.", MLP_KINDS[1:])
define("boolean", "san_mlp_skip", False, "Keep the MLP's own skip in san_mlp, as published.")
for name, default, text in (
    ("weight_scale", [1.0], "Multiplies every weight; several are a sweep."),
    ("skip_gain", [1.0], "Multiplies the skips; several are a sweep."),
    (
        "mlp_gain",
        [],
        "Gains of the MLPs at which san_mlp is measured too, without norms as it is, "
        "post-norm with the MLPs' own skip: where they begin to slow the collapse.",
    ),
):
    vocabulary.numbers(FLAGS, name, default, text, kind=float)
text = "Prove residuals that rounding decides in float64 too: ball arithmetic, a minute a seed."
define("boolean", "certify", False, text)
inputs.define_flags(define)
define("enum", "dtype", "float32", "Arithmetic of the forward pass.", list(inputs.DTYPES))
define("integer", "seed_chunk", 16, "Largest number of seeds in memory.", lower_bound=1)


def rows_of(results: Results, setup: Setup) -> Iterator[dict[str, Any]]:
    """One row per setting, variant, seed and layer."""
    for setting, found in results.items():
        for variant in setup.networks[setting.norm]:
            rate = texts_of(rates(found[variant]["log10_residual"]), digits=6, nothing="nan")
            texts = {name: texts_of(a) for name, a in found[variant].items()}
            texts["local_rate"] = np.insert(rate, 0, "", axis=1)
            # A column that does not cover the variant is empty.
            for row in tidy.rows(dict.fromkeys(COLUMNS, "") | texts, ("seed", "layer"), COLUMNS):
                yield setting._asdict() | {"variant": variant} | row


@partial(np.vectorize, otypes=[object])
def texts_of(value, digits=8, nothing=""):
    """Each number as the table has it."""
    return nothing if np.isnan(value) else f"{value:.{digits}g}"


def text_of(value):
    """A number as a comparison has it."""
    return f"{value:.4g}" if np.isfinite(value) else "nothing"


def violations(measures: Mapping[str, np.ndarray]) -> dict[str, int]:
    """How often the theorems' condition held, and how often a bound then did not.

    The stack's bound needs the condition in every layer so far, a layer's in that layer only.
    Logarithms in float32 are known to about 1e-5 of their size.
    """
    profile, here = measures["log10_residual"], measures["admissible"][:, 1:] > 0
    margin = 1e-3 + 1e-5 * np.abs(profile)

    def above(bound, where):
        return int(((profile > measures[bound] + margin)[:, 1:] & where).sum())

    return {
        "admissible": int(here.sum()),
        "published": above("log10_published_bound", here),
        "layer": above("log10_layer_bound", here),
        "stack": above("log10_bound", np.logical_and.accumulate(here, axis=1)),
    }


def compare(results, setup):
    """Residual ratios beside BERT's published curve, and what only the logarithms show, at the
    first of the swept values."""
    return [
        row
        for setting, found in results.items()
        if setting[1:] == setup.sweep[0]
        for variant in setup.networks[setting.norm]
        for row in _rows_of(variant, f"{variant}, norm {setting.norm}", found[variant])
    ]


def _rows_of(variant, what, measures):
    profile = measures["log10_residual"]
    ratio, last = float(measures["ratio"][:, -1].mean()), profile.shape[1] - 1
    if np.isfinite(ratio):  # else a gap of the curve
        curve = published_curves(PUBLISHED["bert-base-cased"], 12)["init"][PUBLISHED_NAMES[variant]]
        yield Comparison(
            f"{what}: residual ratio after {last} layers",
            ratio,
            curve[min(last, len(curve) - 1)],
            "published: BERT at initialisation (768 wide, 12 heads, post-norm)",
        )
    yield Comparison(
        f"{what}: log10 of the residual at the last layer",
        text_of(profile[:, -1].mean()),
        note=f"plain arithmetic shows {text_of(measures['plain_log10_residual'][:, -1].mean())}",
    )
    if "admissible" in measures:
        broken = violations(measures)
        yield Comparison(
            f"{what}: layers and depths above the bound with sums over heads (derived here)",
            broken["layer"] + broken["stack"],
            0,
            f"where the lemma's condition holds, in {broken['admissible']} of "
            f"{profile[:, 1:].size} layers",
        )
        tightness = {n: measures[n][:, 1:] for n in TIGHTNESS}
        tightness = {n: values[~np.isnan(values)] for n, values in tightness.items()}
        free = np.concatenate([a for name, a in tightness.items() if name != "tightness_paper"])
        mean, paper = (
            text_of(np.median(a)) if a.size else "nothing"
            for a in (tightness["tightness_mean"], tightness["tightness_paper"])
        )
        yield Comparison(
            f"{what}: layers above a bound that needs no condition (derived here)",
            int((free < -1e-3).sum()),  # float32 knows a tightness to about 1e-3
            0,
            f"of {free.size}; powers of ten above what is bounded, medians: {mean} around the "
            f"mean, {paper} the sums over heads with γ*",
        )
    if "log10_cubic" in measures and "log10_c" in measures:
        (rate, c), (closed_rate, closed_c) = (
            (float(np.mean(found.log10_lambda)), float(np.mean(found.log10_c_eff)))
            for found in map(measured_constant, (profile, measures["log10_cubic"]))
        )
        theorem = float(measures["log10_c"][:, -1].mean())
        if np.isfinite([c, theorem]).all():
            yield Comparison(
                f"{what}: log10 c_eff of the 3^L law, beside the theorem's",
                c,
                theorem,
                f"in closed form {text_of(closed_c)}; log10 Λ measured {text_of(rate)}, in closed "
                f"form {text_of(closed_rate)}",
            )


def claims(results, setup):
    """Rate, bounds, skips, MLPs and norms, on each norm placement and scale of the weights, with
    the first of the skips' gains."""
    scales = {scale for scale, _ in setup.sweep}
    return [
        row
        for setting, found in results.items()
        if setting.skip_gain == setup.sweep[0][1]
        for row in _of_setting(setting, found, len(scales) > 1)
        if row.key not in WITHOUT_SKIPS or setting.norm != "pre" or "post" not in setup.networks
    ]


def by_seed(measures: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What statements take of one variant, [s] each: its last local rate, log10 of its last
    residual ratio, what that is of the input's ratio, and by which law the ratio falls."""
    relative = measures["log10_residual"] - measures["log10_size"]
    return {
        "local_rate": rates(measures["log10_residual"])[:, -1],
        "log10_ratio": relative[:, -1].astype(float),
        "left": 10.0 ** (relative[:, -1] - relative[:, 0]),
        "power_law_wins": power_law_wins(10.0**relative),
    }


def _of_setting(setting, found, several):
    norm, where = setting.norm, "no norm" if setting.norm == "none" else f"{setting.norm}-norm"
    where += f", weights × {setting.weight_scale:g}" if several else ""
    measured = {variant: by_seed(found[variant]) for variant in VARIANTS if variant in found}
    for key, variant, measure, what in (
        ("rate" if norm == "none" else "norm", "san", "local_rate", ""),
        ("mlp rate", "san_mlp", "local_rate", ""),
        ("skips stop", "san_skip", "left", ""),
        ("mlps stop", "transformer", "left", ", skips and MLPs"),
        ("mlps stop", "san_mlp", "left", ", MLPs alone"),
        ("law of the fall", "san_skip", "power_law_wins", ""),
    ):
        if variant in measured:
            yield row_of(key, where + what, measured[variant][measure])
    for key, variant in (("skips", "san_skip"), ("mlps slow", "san_mlp")):
        if {"san", variant} <= measured.keys():
            raised = measured[variant]["log10_ratio"] - measured["san"]["log10_ratio"]
            yield row_of(key, where, raised)
    for key, variant in (("heads bound", "san"), ("mlp bound", "san_mlp")):
        if "admissible" in found.get(variant, {}):
            broken, draws = violations(found[variant]), len(found[variant]["ratio"])
            what = f"layers of {variant}, {where}"
            yield of_cases(key, what, broken["published"], broken["admissible"], draws)
    gains, raised = slowed(found)
    if gains.size:
        crossing = crossings(gains, raised)
        yield row_of("mlp gain", where, crossing, why=crossing_text(gains, raised, crossing))
    if gains.size and norm != "none" and 1.0 in gains:
        # Post-norm gives all states one size up to that of their mean, so that differences of
        # residuals are those of their ratios.
        where += ", MLPs with their own skip, as published"
        curve, san = found[SWEPT]["log10_residual_at_1"], found["san"]["log10_residual"]
        yield row_of("mlps slow", where, curve[:, -1] - san[:, -1])
        yield row_of("mlps stop", where, 10.0 ** (curve[:, -1] - curve[:, 0]))


def crossings(gains: np.ndarray, raised: np.ndarray) -> np.ndarray:
    """The least gain of each seed from which on MLPs slow the collapse [s]; NaN for none.

    Between the gains that were swept the change is taken as linear in the gain's logarithm; gains
    at which the residual is no number are left out.
    """
    crossing = np.full(len(raised), np.nan)
    for seed, changes in enumerate(raised):
        known = np.isfinite(changes)
        logs, values = np.log(gains[known]), changes[known]
        up = np.flatnonzero((values[:-1] < 0) & (values[1:] >= 0))
        if len(up):
            g, (a, b) = logs[up[-1] : up[-1] + 2], values[up[-1] : up[-1] + 2]
            crossing[seed] = np.exp(g[0] - a * (g[1] - g[0]) / (b - a))
    return crossing


def crossing_text(gains: np.ndarray, raised: np.ndarray, crossing: np.ndarray) -> str:
    """From which gain of the MLPs on they slow the collapse, over seeds."""
    rows = [of_mean("", f"{gain:g}", values) for gain, values in zip(gains, raised.T, strict=True)]
    parts = []
    for verdict, word in ((WITHIN, "slower"), (OUTSIDE, "faster")):
        where = [j.row.setting for j in judged(rows, ABOVE_ZERO) if j.verdict == verdict]
        if where:
            parts.append(f"{word} at gains {', '.join(where)}")
    known = crossing[np.isfinite(crossing)]
    text = f"{len(known)} of {len(crossing)} seeds cross from faster to slower"
    if len(known) == len(crossing):
        text = f"crossing at gain {between(mean_and_ends(known), 2)}"
    return "; ".join([*parts, text])


EXPERIMENT = Experiment(
    about=__doc__,
    flags=FLAGS,
    order=10,
    brief="residual by depth of four variants, norms none/post/pre, on text or Gaussian tokens; "
    "3^L law, bounds, local rate; sweeps of weight scale and skip gain",
    title="Rank collapse with depth",
    claim="Pure attention loses rank doubly exponentially with depth (Theorems 2.2 and 2.3); MLPs "
    "slow the collapse (Corollary 3.2), skips stop it, LayerNorm does not (section 3; residual "
    "figures of BERT, ALBERT and XLNet).",
    # BERT draws its weights with deviation 0.02 at a width of 768: 0.55 of 1/√fan-in.
    presets={
        # Gains beside which MLPs begin to slow the collapse, and that of the published form.
        "quick": "--norm_placement=none,post --weight_scale=0.55,1 --num_seeds=8 "
        "--mlp_gain=1,2,4,8 --num_tokens=32",
        "paper": "--norm_placement=none,post,pre --weight_scale=0.55,1 --num_seeds=8 --d_model=768 "
        "--num_heads=12 --num_tokens=128 --seed_chunk=2 --mlp_gain=0.25,0.5,1,2,4,8,16",
        "tiny": "--num_seeds=2 --depth=2 --num_heads=2 --d_model=4 --d_ff=4 --num_tokens=4",
    },
    extra=lambda setup: setup.source,
    setup=setup_of,
    measure=measure_all,
    table=rows_of,
    claims=claims,
    compare=compare,
    figures={
        **Drawing.all(
            figures.residual_ratio_figure, figures.log_residual_figure, figures.local_rate_figure
        ),
        "bounds_and_constant": Drawing.described(figures.law_figure, figures.laws_of),
        "mlp_gain": Drawing.described(figures.gain_figure, figures.raised_of),
        "sweep_weight_scale": Drawing.of_part(
            partial(figures.swept_of, position=1),
            partial(figures.sweep_figure, swept="weight scale"),
            "Relative residual at BERT's weight scale (0.55) and at 1/√fan-in.",
        ),
        "sweep_skip_gain": Drawing.of_part(
            partial(figures.swept_of, position=2),
            partial(figures.sweep_figure, swept="skip gain"),
            "",
        ),
    },
)
main = EXPERIMENT.main

if __name__ == "__main__":
    cli.run(main, FLAGS)
