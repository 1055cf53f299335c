"""Table, summary and printed lines of the attention forms.

`results` is {"random": what `measure_widths` gives, "trained": what `train_widths` gives}.
"""

from typing import Any

import numpy as np
from absl import flags

from experiments.attention_forms.forms import FORMS
from experiments.attention_forms.measure import MEASURES
from rank_collapse.report.intervals import mean_interval
from rank_collapse.theory.score_variance import score_variance

# Compared seed by seed: the first ahead of the second.
PAIRS = (
    ("additive", "dot"),
    ("scaled_dot", "dot"),
    ("additive", "scaled_dot"),
    ("additive_unscaled", "dot"),
)


def law_of(form: str, d_k: int) -> Any:
    """The closed form of a form's score variance."""
    return score_variance(d_k, **FORMS[form].options(d_k))


def rows_of(results: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per part, form, width and seed."""
    rows = []
    for form, found in results["random"].items():
        for i, d_k in enumerate(found["d_k"].tolist()):
            law = law_of(form, d_k)
            for seed in range(len(found["variance"])):
                rows.append(
                    {"part": "random", "form": form, "d_k": d_k, "seed": seed}
                    | {name: float(found[name][seed, i]) for name in MEASURES}
                    | {"variance_law": law.total, "variance_within_rows_law": law.within_rows}
                )
    for d_k, forms in results["trained"].items():
        for form, found in forms.items():
            for seed, losses in enumerate(found["losses"]):
                rows.append(
                    {"part": "trained", "form": form, "d_k": d_k, "seed": seed}
                    | {"accuracy": float(found["accuracy"][seed])}
                    | {"diverged": int(not np.isfinite(losses).all())}
                )
    return rows


def differences(trained: dict[str, Any], first: str, second: str) -> np.ndarray:
    """Accuracy of one form less that of another, seed by seed, at one width."""
    return trained[first]["accuracy"].astype(float) - trained[second]["accuracy"].astype(float)


def summary_of(results: dict[str, Any], options: flags.FlagValues) -> dict[str, Any]:
    """Means over seeds with 95 % intervals, and the paired differences of accuracies."""
    random = {
        form: {"d_k": found["d_k"].tolist()}
        | {name: [_mean(found[name][:, i]) for i in range(len(found["d_k"]))] for name in MEASURES}
        | {"variance_law": [law_of(form, int(d_k)).total for d_k in found["d_k"]]}
        for form, found in results["random"].items()
    }
    trained = {}
    for d_k, forms in results["trained"].items():
        trained[str(d_k)] = {
            "accuracy": {form: _mean(found["accuracy"]) for form, found in forms.items()},
            "diverged": {
                form: int((~np.isfinite(found["losses"]).all(axis=1)).sum())
                for form, found in forms.items()
            },
            "ahead": {f"{a} - {b}": _mean(differences(forms, a, b)) for a, b in PAIRS},
        }
    return {
        "seeds": options.num_seeds,
        "num_tokens": options.num_tokens,
        "saturation": options.saturation,
        "random": random,
        "trained": trained,
    }


def _mean(values):
    """[mean, low, high] over seeds; without an interval where one seed gives none."""
    values = [float(v) for v in values]
    low, high = mean_interval(values)
    return [float(np.mean(values)), *((low, high) if np.isfinite(low) else (None, None))]


def between(mean: list[Any], digits: int = 3) -> str:
    """A mean with its interval, "0.123 (0.1 to 0.2)"."""
    value, low, high = mean
    if low is None:
        return f"{value:.{digits}f} (one seed)"
    return f"{value:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def show(summary: dict[str, Any]) -> None:
    """Prints the ends of the sweep, and the accuracies."""
    for form, found in summary["random"].items():
        for i in sorted({0, len(found["d_k"]) - 1}):
            print(
                f"{form:>17s}, d_k {found['d_k'][i]:>4d}: variance {found['variance'][i][0]:.4g} "
                f"(law {found['variance_law'][i]:.4g}), entropy {found['entropy'][i][0]:.3f}, "
                f"saturated {found['saturated'][i][0]:.3f}, gradient to queries "
                f"{found['query_gradient'][i][0]:.3g} "
                f"(median {found['median_query_gradient'][i][0]:.3g})"
            )
    for d_k, found in summary["trained"].items():
        for form, accuracy in found["accuracy"].items():
            print(f"{form:>17s}, d_k {d_k:>4s}: trained accuracy {between(accuracy)}")
        for pair, ahead in found["ahead"].items():
            print(f"    {pair}, seed by seed: {between(ahead)}")
