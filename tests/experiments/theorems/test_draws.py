"""Settings of the theorems that are registered."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.run_theorems import THEOREMS
from experiments.theorems import causal, draws, mixing, one_layer, sphere
from experiments.verdicts import STATEMENTS
from tests.support.closeness import assert_close

pytestmark = pytest.mark.usefixtures("x64")


def test_registered_settings_are_those_that_are_measured():
    for key, statistic in draws.STATISTICS.items():
        statement = STATEMENTS[key]
        assert [*statistic.settings] == [*statement.settings], key
        assert statement.experiments == ("run_theorems",) and statistic.theorem in THEOREMS
    listed = [(key, [*s]) for key, _, s, _ in draws.list_draws({"width": 0, "noise": 0})]
    widths = [("noise apart", [f"width {d}"]) for d in (2, 4)]
    assert listed == [*widths, ("width law", ["layer 1", "layer 2", "layer 3"])]


def test_settings_that_differ_in_a_traced_size_share_a_program():
    """Together they have all sizes of their setting, each program others than the next."""
    for key, statistic in draws.STATISTICS.items():
        programs = [p for p in draws.list_draws({statistic.theorem: 0}) if p[0] == key]
        sizes = {
            setting: compute.keywords | traced
            for _, compute, settings, _ in programs
            for setting, traced in settings.items()
        }
        fixed = getattr(statistic.compute, "keywords", {})
        assert sizes == {s: fixed | one for s, one in statistic.settings.items()}, key
        assert [*sizes] == [*statistic.settings], key
    levels = {key: level for key, *_, level in draws.list_draws(THEOREMS)}
    assert levels.pop("head number") == 1  # a draw takes longer than the compilation
    assert {*levels.values()} == {0}
    (energy, more), (ends, deep) = (
        [*draws.list_draws({name: 0})] for name in ("multi_head_energy", "position")
    )
    assert energy[2] == {"1 head, β 1": {"beta": 1.0}}
    assert more[2] == {"4 heads, β 1": {"beta": 1.0}, "4 heads, β 4": {"beta": 4.0}}
    assert [*ends[2].values()] == [*deep[2].values()] == [{"end": 0}, {"end": 1}]


def test_statistics_of_a_draw_are_those_of_the_parts(monkeypatch):
    """Each is a number of the functions of its theorem, whose tests have their values."""
    key = jax.random.key(3)
    computed = {k: s.compute for k, s in draws.STATISTICS.items()}
    energies = [
        np.array([[1.0, 2], [2, 1 + drop], [3, 3]])
        for drop in np.asarray(jax.vmap(jax.random.uniform)(jax.random.split(key, draws.NETWORKS)))
    ]

    def fake_energies(one, *, normalise, beta):
        assert normalise is None and beta == 4.0
        return jnp.array([[1, 2], [2, 1 + jax.random.uniform(one)], [3, 3]])

    monkeypatch.setattr(sphere, "pass_energies", fake_energies)
    least = min(np.diff(e.sum(axis=1)).min() / e[0].sum() for e in energies)
    assert_close(draws.least_energy_increment(key, beta=4.0), least)

    def fake_distances(one, numbers, *, depth):
        assert numbers == (512, 1024) and depth == 2
        return jnp.array([3.0, 0.5])

    monkeypatch.setattr(causal, "repeated_distances", fake_distances)
    assert_close(computed["repeated power"](key, depth=2), np.log2(0.5 / 3.0))

    row = jnp.array([4.0, 1, 2, 0.5, 1, 1, 1, 3])
    monkeypatch.setattr(one_layer, "last_row", lambda one, *, depth: row * depth)
    compute = computed["position ends"]
    assert_close([compute(key, end=end, depth=5) for end in (0, 1)], [2.0, 1.5])

    def fake_pass(one, n, *, layer):
        return jnp.array([7.0, 5.0, 3.0])[layer - 1] / n

    monkeypatch.setattr(mixing, "pass_markov", fake_pass)
    values = [computed["width law"](key, layer=layer) for layer in (1, 2, 3)]
    assert_close(values, [7 / 256 / (2 / 256), 5 / 256 / (3 / 256**3), 3 / 256 / (4 / 256**5)])
