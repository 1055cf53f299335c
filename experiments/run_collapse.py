"""Rank collapse with depth: residual of the tokens, layer by layer, at initialisation.

Reproduces the residual figures of Dong, Cordonnier and Loukas (2021) on one network without any
checkpoint: relative residual by layer of pure attention (san), with MLPs (san_mlp), with skips
(san_skip) and of the full Transformer, for any norm placement. Draws what the paper could not: the
residual to any depth, in logarithms, beside the 3^L law and the theorems' bound.

    python -m experiments.run_collapse
    python -m experiments.run_collapse --depth=32 --num_seeds=64 --norm_placement=none,post,pre
    python -m experiments.run_collapse --weight_scale=0.25,0.5,1,2 --skip_gain=0,0.5,1

Half a minute on two cores at the defaults, nearly all of it compiling. Expect the ratio of san and
san_mlp at 0 after three layers, that of san_skip at 0.04 and of transformer at 0.13 after twelve
(more with smaller weights: --weight_scale), and a local rate of 3.00 for san.
"""

import math
from typing import Any, NamedTuple

from jax.sharding import Mesh

from experiments.collapse.ensemble import measure_all
from experiments.collapse.figures import figures_of
from experiments.collapse.results import rows_of, summary_of
from experiments.collapse.settings import VARIANTS, configs_of, gains_of, sweep_of
from experiments.shell import cli, inputs, vocabulary
from experiments.shell.experiment import Drawing, Experiment
from experiments.shell.flag_values import Flags
from experiments.shell.paper import said
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.layers import MLP_KINDS, NORM_PLACEMENTS
from rank_collapse.pretrained.published import PUBLISHED, published_curves
from rank_collapse.report.claims import (
    ABOVE_ZERO,
    CONTRADICTED,
    SUPPORTED,
    Claim,
    test_mean,
    test_never,
)
from rank_collapse.report.intervals import mean_interval
from rank_collapse.report.page import Comparison

PUBLISHED_NAMES = {
    "san": "SAN", "san_mlp": "SAN+MLP", "san_skip": "SAN+skip", "transformer": "Transformer",
}  # fmt: skip

GAINS = "--mlp_gain=0.25,0.5,1,2,4,8,16"
CUBIC = (2.5, 3.5)  # nearer to 3 than to the rate of any other power law

FLAGS = cli.make_flags(
    "collapse", num_seeds=8, shows="ratio,variant=last,layer=last",
    traced=("weight_scale", "skip_gain"), execution=("seed_chunk",),
)  # fmt: skip
define = cli.definer(FLAGS)
define("list", "variants", list(VARIANTS), f"Networks, out of {', '.join(VARIANTS)}.")
text = f"Norm placements, out of {', '.join(NORM_PLACEMENTS)}."
define("list", "norm_placement", ["none"], text)
vocabulary.alias(FLAGS, norm="norm_placement")
vocabulary.define(
    FLAGS, norm_kind="layer", depth=12, num_heads=4, d_model=64, d_ff=None, mask="none", window=2,
    init="lecun", bias_scale=0.0, memory_gb=None,
)  # fmt: skip
define("enum", "mlp", "gelu", "MLP of san_mlp and transformer.", MLP_KINDS[1:])
define("boolean", "san_mlp_skip", False, "Keep the MLP's own skip in san_mlp, as published.")
for name, default, text in (
    ("weight_scale", [1.0], "Multiplies every weight; several are a sweep."),
    ("skip_gain", [1.0], "Multiplies the skips; several are a sweep."),
    ("mlp_gain", [], "Gains of the MLPs at which san_mlp is measured too, without norms as it is, "
     "post-norm with the MLPs' own skip: where they begin to slow the collapse."),
):  # fmt: skip
    vocabulary.numbers(FLAGS, name, default, text, kind=float)
text = "Prove residuals that rounding decides in float64 too: ball arithmetic, a minute a seed."
define("boolean", "certify", False, text)
inputs.define_flags(define)
define("enum", "dtype", "float32", "Arithmetic of the forward pass.", list(inputs.DTYPES))
define("integer", "seed_chunk", 16, "Seeds in memory at the most.", lower_bound=1)


class Setup(NamedTuple):
    """What the flags ask for.

    Attributes:
        networks: {norm placement: {variant: configuration}}.
        sweep: Pairs (weight scale, skip gain).
        ids: Token ids of the text; None for Gaussian tokens.
        source: What identifies the input.
        mesh: Of the devices that share the seeds.
    """

    networks: dict[str, dict[str, TransformerConfig]]
    sweep: list[tuple[float, float]]
    ids: Any
    source: dict[str, str]
    mesh: Mesh


def setup_of(options: Flags) -> Setup:
    """The networks, the sweep and the tokens of the flags.

    Raises:
        ValueError: Flags that do not fit each other, or a text that cannot be read.
    """
    ids, source = inputs.read_tokens(options)
    sweep = sweep_of(options)
    gains_of(options)
    networks = {n: configs_of(options, n, options.variants) for n in options.norm_placement}
    return Setup(networks, sweep, ids, source, cli.mesh(options))


def compare(summary: dict[str, Any]) -> list[Comparison]:
    """Residual ratios beside BERT's published curve, and what only the logarithms show."""
    bert = published_curves(PUBLISHED["bert-base-cased"], 12)["init"]
    rows = []
    for setting in first_settings(summary):
        where = f"norm {setting['norm']}"
        for variant, numbers in setting["variants"].items():
            last = len(numbers["ratio"]) - 1
            curve = bert[PUBLISHED_NAMES[variant]]
            if numbers["ratio"][-1] is not None:  # else a gap of the curve
                rows.append(
                    Comparison(
                        f"{variant}, {where}: residual ratio after {last} layers",
                        numbers["ratio"][-1], curve[min(last, len(curve) - 1)],
                        "published: BERT at initialisation (768 wide, 12 heads, post-norm)",
                    )
                )  # fmt: skip
            rows += _logarithms(f"{variant}, {where}", numbers)
    return rows


def first_settings(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """The settings of every norm at the first of the swept values."""
    first = summary["settings"][0]
    swept = ("weight_scale", "skip_gain")
    return [s for s in summary["settings"] if all(s[k] == first[k] for k in swept)]


def _shown(value):
    return "nothing" if value is None else f"{value:.4g}"


def _logarithms(what, numbers):
    """What only the logarithms show."""
    rows = [
        Comparison(
            f"{what}: log10 of the residual at the last layer",
            _shown(numbers["log10_residual_last"]),
            note=f"plain arithmetic shows {_shown(numbers['plain_log10_residual_last'])}",
        )
    ]
    if "free_bounds" in numbers:
        rows.append(
            Comparison(
                f"{what}: layers above a bound that needs no condition (derived here)",
                numbers["free_violations"], 0,
                f"of {numbers['free_bounds']}; powers of ten above what is bounded, medians: "
                f"{_shown(numbers['tightness_mean_median'])} around the mean, "
                f"{_shown(numbers['tightness_paper_median'])} the sums over heads with γ*",
            )
        )  # fmt: skip
    if numbers.get("log10_c_theorem") is not None and numbers["log10_c_eff"] is not None:
        rows.append(
            Comparison(
                f"{what}: log10 c_eff of the 3^L law, beside the theorem's",
                numbers["log10_c_eff"], numbers["log10_c_theorem"],
                f"in closed form {_shown(numbers['log10_c_eff_closed'])}; log10 Λ measured "
                f"{_shown(numbers['log10_lambda'])}, in closed form "
                f"{_shown(numbers['log10_lambda_closed'])}",
            )
        )  # fmt: skip
    return rows


def claims(summary: dict[str, Any]) -> list[Claim]:
    """Rate, bounds, skips, MLPs and norms, on each norm placement at the first swept values."""
    found = []
    for setting in first_settings(summary):
        norm, variants = setting["norm"], setting["variants"]
        where = "no norm" if norm == "none" else f"{norm}-norm"
        found += _rates(variants, norm, where)
        found += _bounds(variants, where)
        found += _skips(variants, where)
        found += _mlps(setting, norm, where)
    return found


def _rates(variants, norm, where):
    if "san" in variants:
        yield test_mean(
            variants["san"]["by_seed"]["local_rate"], CUBIC,
            statistic="local rate log‖res_L‖/log‖res_{L−1}‖ of san at the last layer",
            null="1 if it fell exponentially, 2 if quadratically",
            **said("rate" if norm == "none" else "norm", where),
        )  # fmt: skip


def _bounds(variants, where):
    for variant, name in (("san", "bound"), ("san_mlp", "mlp bound")):
        numbers = variants.get(variant, {})
        if "layers" in numbers:
            yield test_never(
                numbers["layers_above_their_bound"] + numbers["prefixes_above_the_stack_bound"],
                numbers["layers_admissible"] + numbers["prefixes_admissible"],
                numbers["seeds"],
                statistic=f"layers and depths of {variant} above their bound, where the lemma's "
                "condition holds",
                why=f"it holds in {numbers['layers_admissible']} of {numbers['layers']} layers",
                **said(name, where),
            )


def _skips(variants, where):
    if "san" in variants and "san_skip" in variants:
        yield test_mean(
            _differences(variants, "san_skip", "san"), ABOVE_ZERO,
            statistic="log10‖res‖ at the last layer, san_skip less san of the same weights",
            null="0", **said("skips", where),
        )  # fmt: skip
    if "san_skip" in variants:
        yield _no_fall(variants, "san_skip", said("skips stop", where))


def _no_fall(variants, variant, about):
    return test_mean(
        variants[variant]["by_seed"]["fall"], (-1e-12, math.inf),
        statistic=f"change of log10 of {variant}'s residual ratio in a layer, over the second half",
        null="below 0: it goes on falling", **about,
    )  # fmt: skip


def _mlps(setting, norm, where):
    variants, swept = setting["variants"], setting.get("mlp_gain")
    if "san_mlp" in variants:
        yield _no_fall(variants, "san_mlp", said("mlps stop", where))
    if "san" in variants and "san_mlp" in variants:
        yield test_mean(
            _differences(variants, "san_mlp", "san"), ABOVE_ZERO,
            statistic="log10‖res‖ at the last layer, san_mlp less san of the same weights",
            null="0, or less if they speed it up",
            why=crossing_text(swept) if swept and norm == "none" else "",
            **said("mlps slow", f"{where}, no skip at all"),
        )  # fmt: skip
    if swept and norm != "none" and 1.0 in swept["gains"]:
        position = swept["gains"].index(1.0)
        yield test_mean(
            [row[position] for row in swept["raised"]], ABOVE_ZERO,
            statistic="Λ = log10‖res‖/3^L of attention and MLPs with a skip of their own, less "
            "that of san", null="0, or less if they speed it up", why=crossing_text(swept),
            **said("mlps slow", f"{where}, MLPs with their own skip, as published"),
        )  # fmt: skip


def crossing_text(swept: dict[str, Any]) -> str:
    """From which gain of the MLPs on they slow the collapse, over seeds."""
    gains, columns = swept["gains"], zip(*swept["raised"], strict=True)
    said_of = [test_mean(list(c), statistic="", null="", section="", statement="").verdict
               for c in columns]  # fmt: skip
    parts = []
    for verdict, word in ((SUPPORTED, "slower"), (CONTRADICTED, "faster")):
        where = [f"{g:g}" for g, v in zip(gains, said_of, strict=True) if v == verdict]
        if where:
            parts.append(f"{word} at gains {', '.join(where)}")
    known = [c for c in swept["crossing"] if c is not None]
    if known and len(known) == len(swept["crossing"]):
        at = f"{sum(known) / len(known):.3g}"
        if len(known) > 1:
            at += " ({:.3g} to {:.3g})".format(*mean_interval(known))
        parts.append(f"crossing at gain {at}")
    else:
        parts.append(f"{len(known)} of {len(swept['crossing'])} seeds cross from faster to slower")
    return "; ".join(parts)


def _differences(variants, one, other):
    """log10‖res‖ at the last layer of two networks, seed by seed."""
    pairs = zip(*(variants[v]["by_seed"]["log10_residual"] for v in (one, other)), strict=True)
    return [None if None in pair else pair[0] - pair[1] for pair in pairs]


def reading(summary: dict[str, Any]) -> str:
    """Two or three sentences against the paper, from the numbers."""
    settings = first_settings(summary)
    norms = ", ".join(s["norm"] for s in settings)
    ends = {}
    for setting in settings:
        for variant, numbers in setting["variants"].items():
            if numbers["ratio"][-1] is not None:
                ends.setdefault(variant, []).append(numbers["ratio"][-1])
    shown = ", ".join(f"{v} {min(e):.2g} to {max(e):.2g}" for v, e in ends.items())
    text = f"Residual ratio at the last layer, with norm {norms}: {shown}."
    rate = settings[0]["variants"].get("san", {}).get("local_rate_last")
    if rate is not None:
        text += f" Pure attention's local rate is {rate:.3f}; the theorems' bound has 3."
    swept = [f"{s['norm']}: {crossing_text(s['mlp_gain'])}" for s in settings if s.get("mlp_gain")]
    if swept:
        text += f" MLPs by their gain, with norm {' | '.join(swept)}."
    return text


CAPTIONS = {
    "residual_ratio": "The paper's figure: relative residual by layer, mean and standard deviation "
    "over seeds, on English text at initialisation.",
    "log_residual": "The same residuals in logarithms to any depth. Dashed: the law 3^l. "
    "Dotted: what an ordinary float32 forward pass shows. Dash-dotted: the theorems' bound.",
    "local_rate": "Local rate of the logarithms: 3 is doubly exponential collapse.",
    "bounds_and_constant": "Above: how many powers of ten the bounds of one layer lie above what "
    "they bound (all but the paper's need no condition). Below: the constant of the 3^l law as "
    "each depth shows it, measured, from the closed recursion of the covariance, and as the "
    "theorem has it.",
    "mlp_gain": "By how much MLPs raise the constant Λ above pure attention's, against their gain: "
    "above 0 they slow the collapse (post-norm: with a skip of their own).",
    "sweep_weight_scale": "Relative residual at BERT's weight scale (0.55) and at 1/√fan-in.",
    "sweep_skip_gain": "",
}
EXPERIMENT = Experiment(
    about=__doc__,
    name="collapse",
    order=10,
    brief="residual by depth of four variants, norms none/post/pre, on text or Gaussian tokens; "
    "3^L law, bounds, local rate; sweeps of weight scale and skip gain",
    title="Rank collapse with depth",
    claim="Pure attention loses rank doubly exponentially with depth (Theorems 2.2 and 2.3); MLPs "
    "slow the collapse (Corollary 3.2), skips stop it, LayerNorm does not (section 3; residual "
    "figures of BERT, ALBERT and XLNet).",
    flags=FLAGS,
    # BERT draws its weights with deviation 0.02 at a width of 768: 0.55 of 1/√fan-in.
    presets={
        "quick": ("--norm_placement=none,post", "--weight_scale=0.55,1", "--num_seeds=8", GAINS),
        "paper": ("--norm_placement=none,post,pre", "--weight_scale=0.55,1", "--num_seeds=64",
                  "--d_model=768", "--num_heads=12", "--num_tokens=128", "--seed_chunk=2", GAINS),
        "tiny": ("--num_seeds=2", "--depth=2", "--num_heads=2", "--d_model=4", "--d_ff=4",
                 "--num_tokens=4"),
    },
    setup=setup_of,
    extra=lambda setup: setup.source,
    execution=("seed_chunk",),
    measure=lambda options, setup, run: measure_all(
        options, setup.networks, setup.sweep, setup.ids, setup.mesh, run
    ),
    table=lambda results, setup: rows_of(results),
    summary=lambda results, setup: summary_of(results),
    figures={n: Drawing.named(figures_of, n, caption) for n, caption in CAPTIONS.items()},
    claims=claims,
    compare=compare,
    reading=reading,
)  # fmt: skip
main = EXPERIMENT.main

if __name__ == "__main__":
    cli.run(main, FLAGS)
