"""run_transformer and run_width at tiny size: what they write, show again and refuse."""

import jax
import numpy as np
import pytest

import rank_collapse as rc
from experiments import run_transformer as binary
from experiments.lab.experiment import read_run
from rank_collapse.runs import metrics
from rank_collapse.runs.seeds import seed_keys
from rank_collapse.training import load_models
from rank_collapse.training.models import decode_pairs, exact_share
from tests.support.closeness import assert_close
from tests.support.runs import SMALL, arrays, finished, parsed, result_of, rows, seed_of

pytestmark = pytest.mark.full

SIZES = [a for a in SMALL if "n_repeat" not in a and "n_paths" not in a and "depth" not in a]
ARGUMENTS = (
    *SIZES,
    "--depth=1",
    "--task=translation",
    "--n_train_data=12",
    "--n_epochs=2",
    "--batch_sz=4",
)


folder = finished(binary, *ARGUMENTS, "--keep_models", "--monitor")


def test_rows_and_summary_are_of_the_kept_weights(folder):
    config, models = load_models(folder / "models.safetensors")
    options = parsed(binary, *ARGUMENTS)
    keys = seed_keys(0, 2)
    decode = jax.jit(lambda m, p: exact_share(decode_pairs(m, p, config), p))
    for seed, row in enumerate(rows(folder)):
        held_out = binary.make_data(options, jax.random.split(keys[seed])[0])["eval"]
        assert_close(float(row["exact"]), decode(seed_of(models, seed), held_out))
        assert 0 <= float(row["accuracy"]) <= 1 and row["diverged"] == "0"
    results, setup = result_of(binary, folder)
    assert setup.options.task == "translation" and results["curves"]["accuracy"].shape == (2, 2)
    accuracy = results["whole"]["accuracy"]
    np.testing.assert_array_equal(results["curves"]["accuracy"][:, -1], accuracy)
    assert results["residual"]["encoder"].shape == (2, 2)
    means = [accuracy.mean(), results["exact"].mean()]
    means += [results["residual"][half][:, -1].mean() for half in ("encoder", "decoder")]
    assert [c.measured for c in read_run(binary, folder).comparisons] == means


def test_what_is_watched_is_of_both_halves(folder):
    lines = metrics.read(folder / metrics.NAME)
    assert [(x["seed"], x["step"]) for x in lines] == [(s, e) for s in (0, 1) for e in range(3)]
    config, models = load_models(folder / "models.safetensors")
    options = parsed(binary, *ARGUMENTS)
    pairs = binary.make_data(options, jax.random.split(seed_keys(0, 2)[1])[0])["eval"]
    model, ratios = seed_of(models, 1), {"encoder": [], "decoder": []}
    for pair in (jax.tree.map(lambda a, i=i: a[i], pairs) for i in range(len(pairs))):
        mask = pair.target_mask[:-1]
        trace = rc.network.encoder_decoder.apply(
            model,
            pair.source,
            pair.target[:-1],
            config,
            source_mask=pair.source_mask,
            target_mask=mask,
        )
        ratios["encoder"].append(rc.residual_ratio(trace.encoder.output, mask=pair.source_mask))
        ratios["decoder"].append(rc.residual_ratio(trace.decoder.output, mask=mask))
    for half, values in ratios.items():
        aux = lines[-1][f"{half}.residual_ratio"]
        np.testing.assert_allclose(aux, [np.mean(values)], rtol=1e-4)


def test_attention_maps_are_distributions_over_what_exists(folder):
    saved = arrays(folder)
    attention = {name.split("/")[-1]: a for name, a in saved.items() if "/attention/" in name}
    source = next(a for name, a in saved.items() if name.endswith("shown/source"))
    assert set(attention) == {"encoder", "decoder", "cross"}
    for name, maps in attention.items():
        np.testing.assert_allclose(maps.sum(axis=-1), 1, rtol=1e-5)
        if name == "decoder":
            assert (np.triu(maps, 1) == 0).all()
        else:
            for seed, tokens in enumerate(source):
                assert (maps[seed][..., tokens == 0] == 0).all()
