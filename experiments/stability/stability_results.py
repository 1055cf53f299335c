"""The results of run_stability: networks by design, exponents, and table rows.

`results` are {case: {measure: [s, ...]}} from `measure_all`, or a part of them.
"""

import math
from collections.abc import Iterator, Mapping

import numpy as np

from experiments.stability.padded_designs import Case
from experiments.verdicts import TableRow
from experiments.verdicts.share_intervals import slope

UPDATES = ("random", "gradient")  # of equal relative size; "sgd" is of one rate
LAWS = ("O(N)", "O(log N)", "O(1)")
VISIBLE = 1e-11  # 1 − cosine below it is rounding of float32 states
ByCase = Mapping[Case, dict[str, np.ndarray]]


def by_design(results: ByCase) -> dict[str, ByCase]:
    """Groups the networks by design, shallow first."""
    designs: dict[str, dict[Case, dict[str, np.ndarray]]] = {}
    for case in sorted(results, key=lambda c: c.depth):
        designs.setdefault(case.design, {})[case] = results[case]
    return designs


def first_and_last(results: ByCase) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns the measurements of the shallowest and of the deepest network of one design."""
    return next(iter(results.values())), list(results.values())[-1]


def depth_curve(results: ByCase, name: str) -> np.ndarray:
    """Stacks a number measured at every depth of one design, [s, depths]."""
    return np.stack([measures[name] for measures in results.values()], axis=1)


def branch_counts(results: ByCase) -> np.ndarray:
    """Returns N of each network."""
    return np.array([case.branches for case in results])


def fit_exponents(branches: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Fits the slope of ln values against ln N of each seed by least squares, [s].

    Args:
        branches: N of each network.
        values: [s, networks].
    """
    logs = np.log(np.maximum(values, np.finfo(float).tiny))
    return slope(np.log(branches), logs - logs.mean(axis=1, keepdims=True))


def sum_shares(results: ByCase) -> np.ndarray:
    """Computes Σ_i β_ii² [s, depths] of one design.

    By theorem 2 of Liu et al. 2020 this is the change of the output, up to the factor C.
    """
    return np.stack([measures["shares"].sum(axis=1) for measures in results.values()], axis=1)


def output_change_law(count: int) -> dict[str, float]:
    """Computes Σ_i β_ii² of N branches in closed form: N/2, ln N, and 1.

    Post-LN with equal branches has β_ii² = ½: N/2. Pre-LN and Admin's ω² = i have 1/(i + 1):
    H_{N+1} − 1 ~ ln N. ω² = N has 1/(N + 1) each: N/(N + 1).

    Args:
        count: N.
    """
    return {
        "O(N)": count / 2,
        "O(log N)": math.fsum(1 / (i + 1) for i in range(1, count + 1)),
        "O(1)": count / (count + 1),
    }


def law_values(branches: np.ndarray) -> dict[str, np.ndarray]:
    """Computes Σ_i β_ii² in closed form at these N, by law."""
    laws_by_count = [output_change_law(count) for count in branches.tolist()]
    return {law: np.array([values[law] for values in laws_by_count]) for law in LAWS}


def law_exponents(branches: np.ndarray) -> dict[str, float]:
    """Fits the exponents of the closed forms at these N: 1 for N, less for ln N."""
    return {
        law: float(fit_exponents(branches, v[None])[0]) for law, v in law_values(branches).items()
    }


def place_between(exponent: float, laws: Mapping[str, float]) -> float:
    """Places an exponent between the exponents of the laws: 0 at O(1), 1 at O(log N), 2 at O(N).

    Args:
        exponent: Exponent to place; linear between the laws and beyond them.
        laws: Exponents of the laws.
    """
    constant, log, linear = (laws[name] for name in reversed(LAWS))
    if exponent < log:
        return (exponent - constant) / (log - constant)
    return 1 + (exponent - log) / (linear - log)


def geometric_ratios(measured: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Computes exp of the mean over seeds of ln measured/expected, by position."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.exp(np.mean(np.log(measured) - np.log(expected), axis=0))


def make_rows(results: ByCase) -> Iterator[TableRow]:
    """Makes a row for each network, seed and layer; numbers of the full network are in the row of
    the last layer.

    Args:
        results: {case: {measure: [s, ...]}}.
    """
    for case, measures in results.items():
        flat, layers = {n: v.reshape(len(v), -1) for n, v in measures.items()}, case.depth + 1
        columns = {n: v for n, v in flat.items() if v.shape[1] in (1, case.depth, layers)}
        for seed, layer in np.ndindex(*measures["apart"].shape):
            row = case._asdict() | {"seed": seed, "layer": layer}
            for name, values in columns.items():
                index = layer - (layers - values.shape[1])  # of the layer that ends here
                row[name] = f"{values[seed, index]:.8g}" if index >= 0 else ""
            yield row
