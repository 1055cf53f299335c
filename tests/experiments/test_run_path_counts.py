"""Exact counts of paths follow the binomial law."""

import math

import pytest

from experiments import run_path_counts
from experiments.lab.experiment import read_run
from experiments.run_path_counts import ARCHITECTURES, binomial, path_table
from tests.support.runs import parsed, result_of, rows, run


@pytest.mark.full
def test_the_binary_writes_exact_counts(tmp_path):
    assert run(run_path_counts, [], tmp_path) == 0
    table = rows(tmp_path)
    assert len(table) == sum(layers + 1 for _, layers in ARCHITECTURES.values())
    gpt = [r for r in table if r["architecture"] == "GPT-3"]
    assert sum(int(r["paths"]) for r in gpt) == 97**96  # 191 digits
    assert int(gpt[95]["paths"]) == 96 * 96**95
    law, *lengths = read_run(run_path_counts, tmp_path).comparisons
    assert (
        law.measured < 1e-12 and law.published == 0 and len(lengths) == 9 + 5
    )  # counted, weighted
    assert lengths[0].measured == pytest.approx(6 * 12 / 13, rel=1e-12)  # DistilBERT
    tables, sizes = result_of(run_path_counts, tmp_path)
    tables["DeiT-T"][3]["share"] += 1e-3
    assert next(run_path_counts.compare_results(tables, sizes)).measured == pytest.approx(1e-3)


def test_a_network_has_at_most_a_thousand_layers():
    options = parsed(run_path_counts, "--heads=1,2", "--layers=1000,3")
    sizes = {"1 head, 1000 layers": (1, 1000), "2 heads, 3 layers": (2, 3)}
    assert run_path_counts.make_sizes(options) == sizes
    options = parsed(run_path_counts, "--heads=1", "--layers=1001")
    with pytest.raises(ValueError, match="--layers=1001 is above 1000"):
        run_path_counts.make_sizes(options)


def test_lengths_are_whole_numbers():
    fig = run_path_counts.path_counts_figure({"small": path_table(1, 2)})
    assert all(tick == round(tick) for tick in fig.axes[0].get_xticks())


@pytest.mark.parametrize(("heads", "layers"), [(1, 1), (3, 12), (128, 24), (96, 96), (1, 1000)])
def test_counts_follow_the_binomial_law(heads, layers):
    table = path_table(heads, layers)
    assert math.fsum(r["share"] for r in table) == pytest.approx(1, abs=1e-12)
    for row, law in zip(table, binomial(layers, heads), strict=True):
        assert row["share"] == pytest.approx(law, rel=1e-10, abs=1e-300)
