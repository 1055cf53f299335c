"""What run_stability makes of its measurements: exponents with intervals, rows, and a summary.

`results` is {case: {measure: [s, ...]}}, as `measure.measure_all` gives it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from experiments.stability.cases import KINDS, Case
from rank_collapse.measures.dependency import centre_of_mass, dependency
from rank_collapse.report.intervals import mean_interval
from rank_collapse.report.statistics import number, numbers, slope
from rank_collapse.theory.stability import output_change_law

UPDATES = ("random", "gradient")  # of equal relative size; "sgd" is of one rate
LAWS = ("O(N)", "O(log N)", "O(1)")
VISIBLE = 1e-11  # 1 − cosine below it is rounding of float32 states
GRADIENT_VISIBLE = 1e-5  # and there gradients of queries are: they fall to 1e-7 of the values'


def by_design(cases: list[Case]) -> dict[str, list[Case]]:
    """The networks of each design, shallow first."""
    found = {}
    for case in sorted(cases, key=lambda c: c.depth):
        found.setdefault(case.design, []).append(case)
    return found


def by_kind(cases: list[Case]) -> dict[str, list[Case]]:
    """The encoders, and the encoder-decoders, those that there are."""
    found = {kind: [case for case in cases if case.kind == kind] for kind in KINDS}
    return {kind: own for kind, own in found.items() if own}


def curve(results: Mapping[Case, Any], cases: list[Case], name: str) -> np.ndarray:
    """[s, depths] of a number measured at every depth."""
    return np.stack([results[case][name] for case in cases], axis=1)


def branches_of(cases: list[Case]) -> np.ndarray:
    """N of each network."""
    return np.array([case.branches for case in cases])


def exponents(branches: np.ndarray, values: np.ndarray) -> np.ndarray:
    """[s], the slope of ln values against ln N of each seed, by least squares."""
    logs = np.log(np.maximum(values, np.finfo(float).tiny))
    return slope(np.log(branches), logs - logs.mean(axis=1, keepdims=True))


def law_values(branches: np.ndarray) -> dict[str, np.ndarray]:
    """Σ_i β_ii² in closed form at these N, by law."""
    found = [output_change_law(np.zeros(count)) for count in branches]
    return {law: np.array([values[law] for values in found]) for law in LAWS}


def law_exponents(branches: np.ndarray) -> dict[str, float]:
    """What `exponents` makes of the closed forms at these N: 1 for N, less for ln N."""
    return {law: float(exponents(branches, v[None])[0]) for law, v in law_values(branches).items()}


def interval(values: np.ndarray) -> list[float] | None:
    """95 % of the mean over seeds; None of one seed."""
    return list(mean_interval(values.tolist())) if len(values) > 1 else None


def rows_of(results: Mapping[Case, Any], cases: list[Case]) -> Iterator[dict[str, Any]]:
    """One row per network, seed and layer; what is measured of the whole network on the last."""
    for case in cases:
        found = results[case]
        for seed, layer in np.ndindex(*found["apart"].shape):
            row = case._asdict() | {"seed": seed, "layer": layer}
            for name, values in found.items():
                if values.ndim == 2 and values.shape[1] == case.depth + 1:
                    row[name] = f"{values[seed, layer]:.8g}"
                elif (
                    values.ndim == 2 and values.shape[1] == case.depth
                ):  # of the layer that ends here
                    row[name] = f"{values[seed, layer - 1]:.8g}" if layer else ""
                elif values.ndim == 1:
                    row[name] = f"{values[seed]:.8g}" if layer == case.depth else ""
            yield row


def summary_of(results: Mapping[Case, Any], cases: list[Case]) -> dict[str, Any]:
    """{kind: {"designs", "law_exponents"}} and "seeds": see `_designs`."""
    kinds = {}
    for kind, own in by_kind(cases).items():
        branches = branches_of(next(iter(by_design(own).values())))
        kinds[kind] = {"designs": _designs(results, own), "law_exponents": law_exponents(branches)}
    return kinds | {"seeds": len(results[cases[0]]["apart"])}


def _designs(results, cases):
    """Exponents with intervals, how far the law is from networks, and where outputs depend."""
    designs = {}
    for name, own in by_design(cases).items():
        branches = branches_of(own)
        found = {"branches": branches.tolist()}
        for update in (*UPDATES, "sgd"):
            slopes = exponents(branches, curve(results, own, f"change.{update}"))
            found[f"exponent_{update}"] = float(slopes.mean())
            found[f"exponents_{update}"] = slopes.tolist()
            found[f"change_{update}"] = curve(results, own, f"change.{update}").mean(0).tolist()
        expected = curve(results, own, "expected_change")
        found["exponent_expected"] = number(exponents(branches, expected).mean())
        found["change_over_gradient_bound"] = _ratios(
            curve(results, own, "change.gradient"), curve(results, own, "gradient_bound")
        )
        found["change_over_expected"] = _ratios(curve(results, own, "change.random"), expected)
        found["law"] = _law(results, own[-1])
        found |= _by_layer(results, own)
        designs[name] = found
    return designs


def _ratios(measured, expected):
    """exp of the mean over seeds of ln measured/expected, by position."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return numbers(np.exp(np.mean(np.log(measured) - np.log(expected), axis=0)))


def _law(results, case):
    """1 − cosine of the deepest network, measured over expected, where float32 sees it."""
    found = results[case]
    measured, expected = found["apart"], np.exp(found["expected_log_apart"].astype(float))
    seen = (measured > VISIBLE).all(axis=0)
    ratio = np.exp(np.log(measured[:, seen]).mean(axis=0) - np.log(expected[:, seen]).mean(axis=0))
    last = int(np.flatnonzero(seen)[-1])
    return {
        "layers_seen": last,
        "one_minus_cosine_last": float(measured[:, last].mean()),
        "expected_last": number(expected[:, last].mean()),
        "log10_expected_deepest": number(found["expected_log_apart"][:, -1].mean() / np.log(10)),
        "largest_ratio": number(max(ratio.max(), 1 / ratio.min())),
        "largest_ratio_below_layer": int(np.argmax(np.abs(np.log(ratio)))),
    }


def _by_layer(results, own):
    """What only networks that were measured by layer have."""
    own = [case for case in own if "exact_shares" in results[case]]
    if not own:
        return {}
    shallow, deep = (results[own[i]] for i in (0, -1))
    published = np.stack([dependency(s) for s in shallow["shares"]])
    rows = shallow["exact_shares"].sum(axis=2)
    q, v = (deep[f"gradients.attention.{name}"] for name in ("w_q", "w_v"))
    apart = deep["apart"][:, :-1]
    with np.errstate(divide="ignore", invalid="ignore"):
        slopes = [_slope(np.log(a), np.log(r)) for a, r in zip(apart, q / v, strict=True)]
    return {
        "heat_depth": own[0].depth,
        "profile_depth": own[-1].depth,
        "centre_of_mass": float(np.mean([centre_of_mass(p) for p in published])),
        "last_branch": float(published[:, -1, -1].mean()),
        "input_share": float(published[:, -1, 0].mean()),
        "largest_row_error": float(np.abs(rows - 1).max()),
        "exact_minus_published": float(
            np.abs(shallow["exact_shares"][:, :, :-1] - published).mean(axis=0).max()
        ),
        "query_over_value_first": float((q / v)[:, 0].mean()),
        "query_over_value_last": float((q / v)[:, -1].mean()),
        "query_over_value_slope": _mean(slopes),
        "query_gradient_over_expected": _ratios(
            np.where(apart > GRADIENT_VISIBLE, q, np.nan), deep["expected_gradients.attention.w_q"]
        ),
        "value_gradient_over_expected": _ratios(v, deep["expected_gradients.attention.w_v"]),
        "log10_residual_last": float(deep["log10_residual"][:, -1].mean()),
        "ratio_last": float(deep["ratio"][:, -1].mean()),
        "depends_on": _by_part(shallow, published[:, -1]),
        "gradients": {
            name.replace("gradients.", ""): float(np.exp(np.log(values).mean()))
            for name, values in deep.items()
            if "gradients." in name and "expected" not in name
        },
        "omega": {
            name.replace("omega.", ""): [float(values[:, i].mean()) for i in (0, -1)]
            for name, values in deep.items()
            if "omega." in name
        },
    }


def _by_part(found, last_row):
    """{part: Σ β_Nj² over its branches}: what the output depends on, mean over seeds."""
    parts = [n.removeprefix("omega.") for n in found if n.startswith("omega.")]
    mean = last_row.mean(axis=0)
    shares = {part: float(mean[1 + i :: len(parts)].sum()) for i, part in enumerate(parts)}
    return {"input": float(mean[0])} | shares


def _mean(values):
    """Of those that are known; None where none is."""
    known = [v for v in values if np.isfinite(v)]
    return float(np.mean(known)) if known else None


def _slope(x, y):
    """Of y against x where both are known; NaN where x hardly moves."""
    seen = np.isfinite(x) & np.isfinite(y) & (x > np.log(GRADIENT_VISIBLE))
    x, y = x[seen], y[seen]
    if len(x) < 2 or np.ptp(x) < 0.5:
        return np.nan
    x = x - x.mean()
    return float(x @ y / (x @ x))
