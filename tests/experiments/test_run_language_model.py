"""run_language_model: what it measures by NumPy, the data, and rows that can come out otherwise."""

import jax
import numpy as np
import pytest
from scipy.special import log_softmax
from trained_runs import answered, parsed

import rank_collapse as rc
from experiments import run_language_model
from experiments.trained import language
from rank_collapse.report.claims import FAILS, HOLDS, OPEN
from rank_collapse.training import Hyper, Recipe, init_model

SIZES = ("--depth=2", "--num_heads=2", "--d_model=8", "--d_ff=12", "--num_tokens=6")


def rms(x, gain):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5) * gain


@pytest.mark.parametrize("variant", ["gated", "qk_norm"])
def test_what_is_measured_by_numpy(variant):
    options = parsed(run_language_model, *SIZES)
    data = language.data_of(language.bytes_of(None), 6, 3)
    recipe = Recipe(language.network_of(options, variant), language.BYTES, 1, 1)
    model = init_model(jax.random.key(0), recipe, init_scale=3.0)
    tokens = 40 * model.network.embedding.tokens
    embedding = model.network.embedding.replace(tokens=tokens)
    model = model.replace(network=model.network.replace(embedding=embedding))
    found = language.make_measure(recipe)(model, data, Hyper(dropout=None), None)

    w, params = np.asarray(model.classifier.w), model.network
    each = []
    for ids, labels in zip(data["eval"].inputs, np.asarray(data["eval"].labels), strict=True):
        trace = rc.apply(params, ids, recipe.config)
        x, first = np.asarray(trace.hidden), np.asarray(trace.attention)[..., 0].mean(axis=-1)
        gains = np.asarray(params.layers.attention_norm.gain)
        output = rms(x, np.asarray(params.final_norm.gain))
        read = np.stack([*(rms(a, g) for a, g in zip(x[:-1], gains, strict=True)), output[-1]])
        log_p = log_softmax(output @ w, axis=-1)
        unit = x / np.linalg.norm(x, axis=-1, keepdims=True)
        each.append(
            {
                "loss": -log_p[-1][np.arange(6), labels].mean(),
                "largest": abs(x).max(axis=(1, 2)),
                "spike_entry": abs(x).max(axis=(1, 2)) / np.median(abs(x), axis=(1, 2)),
                "residual_ratio": [rc.residual_ratio(a) for a in x],
                "unit_residual_ratio": [rc.residual_ratio(a) for a in unit],
                "read_residual_ratio": [rc.residual_ratio(a) for a in read],
                "effective_rank": [rc.effective_rank(a) for a in x],
                "sink_rate": (first > 0.3).mean(axis=-1),
                "first_column": first.mean(axis=-1),
                "lens_kl": (np.exp(log_p) * (log_p - log_p[-1])).sum(axis=-1).mean(axis=-1),
            }
        )
    assert found.keys() == {*each[0], "loss_up_to"} and len(each) == 3
    for name in each[0]:
        mean = np.mean([own[name] for own in each], axis=0)
        np.testing.assert_allclose(found[name], mean, rtol=2e-4, atol=2e-5, err_msg=name)
    up_to = np.asarray(found["loss_up_to"])
    assert up_to[-1] == pytest.approx(float(found["loss"]), rel=1e-4)
    assert np.all(np.abs(np.diff(up_to)) > 1e-4)


def test_windows_follow_each_other_and_the_last_tenth_is_held_out():
    text = np.arange(101, dtype=np.uint8)
    data = language.data_of(text, 5, 1)
    whole = np.concatenate([data["train"].inputs, data["eval"].inputs]).ravel()
    assert len(data["train"]) == 18 and len(data["eval"]) == 1
    np.testing.assert_array_equal(whole[:90], text[:90])
    for own in data.values():
        np.testing.assert_array_equal(own.labels, own.inputs + 1)
    assert 90 <= int(data["eval"].inputs[0, 0]) <= 95
    with pytest.raises(ValueError, match="101 bytes has fewer than two windows of num_tokens=60"):
        language.data_of(text, 60, 1)


def test_depth_used_by_hand():
    found = {
        "loss": np.array([[2.0, np.nan]]),
        "lens_kl": np.array([[[5.0, 0.6, 0.4, 0.0], [np.nan] * 4]]),
        "loss_up_to": np.array([[[3.0, 2.01, 2.5, 2.0], [np.nan] * 4]]),
    }
    used = language.depth_used(found)
    np.testing.assert_array_equal(used["lens"], [[2, np.nan]])
    np.testing.assert_array_equal(used["paths"], [[3, np.nan]])


def results(sinks, largest, times, seeds=8):
    """Of a network of two layers after training: its sink rate, and its third state's spikes."""

    def at_both_looks(values):
        return np.tile(np.asarray(values, float), (seeds, 2, 1))

    states = ("residual_ratio", "unit_residual_ratio", "read_residual_ratio", "effective_rank")
    found = dict.fromkeys((*states, "lens_kl", "loss_up_to"), at_both_looks([3.0, 2.0, 1.0]))
    return found | {
        "losses": np.ones((seeds, 4)),
        "loss": np.ones((seeds, 2)),
        "first_column": at_both_looks([0.5, 0.5]),
        "sink_rate": at_both_looks([0.0, 2 * sinks]),
        "largest": at_both_looks([200.0, 1.0, largest]),
        "spike_entry": at_both_looks([1.0, 2000.0, times]),
    }


@pytest.mark.parametrize(
    ("plain", "answers"),
    [
        (results(0.11, 101, 1001), [HOLDS, HOLDS]),
        (results(0.09, 99, 1e6), [FAILS, FAILS]),
        (results(0.5, 1e6, 999), [HOLDS, FAILS]),
        (results(0.5, 1e6, 1e6, seeds=4), [OPEN, OPEN]),
    ],
)
def test_sinks_and_spikes_may_appear_or_not(plain, answers):
    setup = run_language_model.setup_of(parsed(run_language_model, *SIZES))
    cure = results(0.0, 10, 10, seeds=4)
    rows = list(run_language_model.claims({"softmax": plain, "gated": cure}, setup))
    assert list(answered(rows)[1].values())[:2] == answers
    by_key = {row.key: row for row in rows[2:]}
    own = run_language_model.columns_of(plain)
    assert by_key["sink cures"].estimate == pytest.approx(-own["sink_rate"][0, -1])
    spikes = np.log10(2000 / own["spike_entry"][0, -1])
    assert by_key["spike cures"].estimate == pytest.approx(spikes)
    assert by_key["loss of cures"].estimate == 0 and by_key["loss of cures"].draws == 4
    assert not list(run_language_model.claims({"gated": cure}, setup))


def test_steps_of_the_looks():
    found = {"losses": np.ones((1, 10)), "loss": np.ones((1, 6))}
    assert run_language_model.steps_of(found).tolist() == [0, 50, 100, 150, 200, 250]
    found = {"losses": np.ones((1, 9)), "loss": np.ones((1, 6))}
    assert run_language_model.steps_of(found).tolist() == [0, 50, 100, 150, 200, 225]
