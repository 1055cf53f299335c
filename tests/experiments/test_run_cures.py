"""run_cures at tiny size: a row of its table is one network's, whatever program it shares."""

import jax
import numpy as np
import pytest
from trained_runs import rows, run, summary

import rank_collapse as rc
from experiments import run_cures
from experiments.run_phase import signals, tokens
from experiments.shell import cli
from rank_collapse.runs.seeds import seed_keys

TINY = run_cures.EXPERIMENT.presets["tiny"]


def cases(*arguments):
    return run_cures.cases_of(cli.parse(run_cures.FLAGS, [*TINY, *arguments]))


def test_a_table_at_tiny_size(tmp_path):
    assert run(run_cures, [*TINY, "--variants=softmax"], tmp_path) == 0
    found = summary(tmp_path)
    assert found.keys() == {"post, L=2", "depth_scaled, L=2", "softmax attention, L=2"}
    post, scaled, softmax = (found[n]["log10_residual"][0] for n in found)
    assert post == softmax < scaled  # a smaller branch takes less of the residual
    assert {p.stem for p in (tmp_path / "figures").iterdir()} == {"cures", "curves"}


@pytest.mark.slow
def test_a_row_is_a_network_of_its_own(tmp_path):
    assert run(run_cures, TINY, tmp_path) == 0
    found = {(r["cure"], int(r["seed"])): r for r in rows(tmp_path)}
    assert len(found) == 6 and len(summary(tmp_path)) == 3
    key_params, key_x, key_goal = jax.random.split(seed_keys(0, 2)[1], 3)
    for name, start in (("depth_scaled", "softmax"), ("shaped", "shaped")):
        config = next(c.config for c in cases().values() if c.name == name)
        params = rc.init_variant(key_params, config, start)
        own = signals(params, tokens(key_x, 3, 4, 0.2), config, key_goal)
        row = {n: float(found[name, 1][n]) for n in run_cures.MEASURES}
        kept = np.log10(own["residual"] / own["residual"][0])
        np.testing.assert_allclose(row["log10_residual"], kept[-1], atol=1e-4)
        np.testing.assert_allclose(row["slope"], np.polyfit(range(3), kept, 1)[0], atol=1e-4)
        np.testing.assert_allclose(row["entropy"], own["entropy"].mean(), atol=1e-4)
        np.testing.assert_allclose(row["rank"], own["rank"], atol=1e-4)


def test_programs_are_shared_where_numbers_alone_differ():
    found = cases("--designs=post,depth_scaled", "--variants=centred,attn_scale,shaped,sigmoid")
    programs = {name.split(",")[0]: case.program for name, case in found.items()}
    assert programs["post"] == programs["depth_scaled"] != programs["sigmoid attention"]
    assert programs["centred attention"] == programs["attn_scale attention"]
    assert programs["shaped attention"] not in (programs["centred attention"], programs["post"])


def test_a_slope_ends_where_float32_does():
    assert run_cures.slope_of(np.array([0.0, -1, -2, -3])) == pytest.approx(-1)
    assert run_cures.slope_of(np.array([0.0, -2, -4, -6, -6, -6])) == pytest.approx(-2)
    assert run_cures.slope_of(np.array([0.0, -6, -6])) == pytest.approx(-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--designs=admin",), "--designs=admin is not one of"),
        (("--variants=soft",), "--variants=soft is not one of"),
        (("--variants=ssd", "--mask=none"), "does not cover mask='none'"),
        (("--designs=",), "--designs is empty"),
    ],
)
def test_what_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        cases(*arguments)
