"""run_lens: shares, cosines and ranks against Jacobians, and the file of the Jacobian lens."""

import numpy as np
import pytest

from experiments import run_lens
from tests.support.runs import parsed, result_of, rows, run


@pytest.mark.full
def test_a_run_writes_rows_and_lenses(tmp_path, capsys):
    tiny = [*run_lens.EXPERIMENT.presets["tiny"], "--max_tokens=18", "--start=0.13"]
    lenses = tmp_path / "lenses"
    assert run(run_lens, [*tiny, f"--lens_folder={lenses}"], tmp_path / "a") == 0
    assert [path.name for path in lenses.iterdir()] == ["llama.pt"]
    printed = capsys.readouterr().out
    assert "llama: " in printed and "effective rank of the Jacobian" in printed
    results, _ = result_of(run_lens, tmp_path / "a")
    table = rows(tmp_path / "a")
    first = next(row for row in table if row["direction"] == "random" and row["cosine"])
    shares = results.share_exact.isel(start=0, network=0, seed=0)
    shares = shares.sel(direction="random", position=first["position"])
    mean = float((shares * shares.length).sum())
    np.testing.assert_allclose(float(first["mean_length_exact"]), mean, rtol=1e-5)
    assert run(run_lens, [*tiny, "--max_tokens=17", f"--lens_folder={lenses}"], tmp_path / "b") == 2
    assert "--lens_folder needs --max_tokens=18 or more, not 17" in capsys.readouterr().err


def test_networks_and_texts_that_are_not_there_are_named(tmp_path):
    for flags, reason in (
        ([f"--folder={tmp_path / 'none'}"], "--folder=.*none does not exist"),
        ([f"--folder={tmp_path}", "--text=nowhere.tsv"], "--text=nowhere.tsv does not exist"),
    ):
        options = parsed(run_lens, *flags)
        with pytest.raises(FileNotFoundError, match=reason):
            run_lens.open_networks(options)
    for flag in ("--init=gpt5", "--networks=gpt5"):
        options = parsed(run_lens, "--untrained", flag)
        with pytest.raises(ValueError, match=f"{flag} is not one of"):
            run_lens.open_networks(options)
