"""run_collapse's part of the report: measured beside BERT's published curves."""

from typing import Any

from experiments.shell.entry import Entry
from rank_collapse.pretrained.published import PUBLISHED, published_curves
from rank_collapse.report.page import Comparison

SLOWER = "MLPs slow it"
PUBLISHED_NAMES = {
    "san": "SAN", "san_mlp": "SAN+MLP", "san_skip": "SAN+skip", "transformer": "Transformer",
}  # fmt: skip
COLLAPSED = 0.01  # a ratio below it counts as collapsed


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
            if measured is None:  # not known: a gap of the curve
                continue
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
        if "free_bounds" in numbers:
            rows.append(
                Comparison(
                    f"{variant}, {where}: layers above a bound that needs no condition",
                    numbers["free_violations"], 0, numbers["free_violations"] == 0,
                    f"of {numbers['free_bounds']}, around the mean token and of the diameter; "
                    "powers of ten above what is bounded, medians: around the mean "
                    f"{_shown(numbers['tightness_mean_median'])}, the paper's with γ* "
                    f"{_shown(numbers['tightness_paper_median'])}",
                )
            )  # fmt: skip
        if numbers.get("log10_c_theorem") is not None and numbers["log10_c_eff"] is not None:
            rows.append(
                Comparison(
                    f"{variant}, {where}: log10 c_eff of the 3^L law, at most the theorem's",
                    numbers["log10_c_eff"], numbers["log10_c_theorem"],
                    numbers["log10_c_eff"] <= numbers["log10_c_theorem"],
                    f"in closed form {_shown(numbers['log10_c_eff_closed'])}; log10 Λ measured "
                    f"{_shown(numbers['log10_lambda'])}, in closed form "
                    f"{_shown(numbers['log10_lambda_closed'])}",
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
                if numbers["ratio"][-1] is not None:
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
        "bounds_and_constant": "Above: how many powers of ten the bounds of one layer lie above "
        "what they bound (all but the paper's need no condition). Below: the constant of the 3^l "
        "law as each depth shows it, measured, from the closed recursion of the covariance, and as "
        "the theorem has it.",
        "sweep_weight_scale": "Relative residual at BERT's weight scale (0.55) and at 1/√fan-in.",
    },
)
