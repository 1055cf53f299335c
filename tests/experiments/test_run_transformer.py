"""run_transformer and run_width at tiny size: what they write, show again and refuse."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from experiments import run_transformer as binary
from experiments.lab.experiment import read_run
from rank_collapse.runs import metrics
from rank_collapse.runs.seeds import seed_keys
from rank_collapse.training import load_models
from rank_collapse.training.models import decode_pairs, exact_share
from rank_collapse.training.tasks.sequences import SequencePairs
from tests.support.closeness import assert_close
from tests.support.runs import SIZES, arrays, finished, parsed, result_of, rows, seed_of

ARGUMENTS = (
    *SIZES,
    "--depth=1",
    "--task=translation",
    "--n_train_data=12",
    "--n_epochs=2",
    "--batch_sz=4",
)


folder = finished(binary, *ARGUMENTS, "--keep_models", "--monitor")


@pytest.mark.full
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


@pytest.mark.full
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


@pytest.mark.full
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


@pytest.mark.parametrize("task", ["sort", "translation"])
def test_pairs_are_of_the_flags_and_of_keys_of_their_own(task, monkeypatch):
    """A translation's lexicon has a key of its own, too."""
    calls = []

    def make_pairs(key, count, **fields):
        calls.append((key, count, fields))
        return f"{count} pairs"

    monkeypatch.setattr(binary.sequences, "make_pairs", make_pairs)
    monkeypatch.setattr(binary.grammar, "make_pairs", make_pairs)
    monkeypatch.setattr(binary.grammar, "make_lexicon", lambda key: ("lexicon", key))
    sizes = {"num_tokens": 7, "num_labels": 5, "min_len": 3, "n_train_data": 11, "n_eval_data": 4}
    options, key = SimpleNamespace(task=task, **sizes), jax.random.key(6)
    assert binary.make_data(options, key) == {"train": "11 pairs", "eval": "4 pairs"}
    key_lexicon, key_train, key_eval = jax.random.split(key, 3)
    fields = {"seq_len": 7, "num_letters": 5, "task": task, "min_len": 3}
    if task == "translation":
        fields = {"lexicon": ("lexicon", key_lexicon)}
    assert calls == [(key_train, 11, fields), (key_eval, 4, fields)]


def test_what_is_measured_of_a_seed_is_of_its_held_out_pairs(monkeypatch):
    """Means over the first pairs alone, each without its padding; maps of the first pair."""
    rng = np.random.default_rng(4)
    count, m, n = binary.NUM_PROFILED + 2, 4, 6
    lengths = rng.integers(2, m + 1, count)
    lengths[0] = 3
    mask, target_mask = (np.arange(k) < (lengths + e)[:, None] for k, e in ((m, 0), (n, 2)))
    source, target = rng.integers(3, 9, (count, m)) * mask, rng.integers(3, 9, (count, n))
    pairs = SequencePairs(*map(jnp.asarray, (source, mask, target * target_mask, target_mask)))
    written = jnp.asarray(rng.integers(0, 9, (count, n - 1)))
    config, model = SimpleNamespace(), SimpleNamespace()

    def fake_apply(params, source, inputs, network, *, source_mask, target_mask):
        assert params is model and network is config

        def make_half(tokens, keep, scale):
            x = jnp.where(keep[:, None], jnp.outer(tokens, jnp.array([1.0, -2, 0.5])), 100.0)
            hidden = jnp.stack([x + layer * scale * (x[:, :1] ** 2) for layer in range(3)])
            weights = jnp.broadcast_to(tokens.astype(float), (2, 5, len(tokens), len(tokens)))
            return SimpleNamespace(hidden=hidden, attention=scale * weights)

        decoder = make_half(inputs, target_mask, 2.0)
        shape = 2, 5, len(inputs), len(source)
        decoder.cross_attention = jnp.broadcast_to(7.0 * source, shape)
        return SimpleNamespace(encoder=make_half(source, source_mask, 1.0), decoder=decoder)

    def decode(params, examples, network):
        assert params is model and network is config and examples is pairs
        return SimpleNamespace(tokens=written)

    monkeypatch.setattr(binary.rc.network.encoder_decoder, "apply", fake_apply)
    monkeypatch.setattr(binary.models, "decode_pairs", decode)
    monkeypatch.setattr(binary.models, "exact_share", lambda answer, examples: len(examples) / 64)
    task = SimpleNamespace(recipe=SimpleNamespace(config=config))
    measured = binary.measure_seed(task, model, {"eval": pairs, "train": None}, None)
    assert measured["exact"] == count / 64
    read = (target * target_mask)[:, :-1]
    tokens = {"encoder": (source, mask, 1.0), "decoder": (read, target_mask[:, :-1], 2.0)}
    for half, (ids, keep, scale) in tokens.items():
        ratios = []
        for row, exists in zip(ids[: binary.NUM_PROFILED], keep, strict=False):
            x = row[exists, None] * np.array([1.0, -2, 0.5])
            states = [x + layer * scale * x[:, :1] ** 2 for layer in range(3)]
            ratios.append([float(rc.residual_ratio(state)) for state in states])
        assert_close(measured["residual"][half], np.mean(ratios, axis=0), rtol=1e-5)
    first = {"encoder": source[0], "decoder": 2.0 * (target * target_mask)[0, :-1]}
    for kind, row in (first | {"cross": 7.0 * source[0]}).items():
        weights = measured["attention"][kind]
        assert_close(weights, np.broadcast_to(row, weights.shape))
        assert weights.shape[:2] == (2, 5)
    shown = {name: np.asarray(values).tolist() for name, values in measured["shown"].items()}
    assert shown == {
        "source": source[0].tolist(),
        "inputs": (target * target_mask)[0, :-1].tolist(),
        "labels": (target * target_mask)[0, 1:].tolist(),
        "written": written[0].tolist(),
    }


def test_seeds_that_diverged_are_left_out_of_figures_and_comparisons():
    task = SimpleNamespace(title="Reverse", options=SimpleNamespace(task="reverse"))
    residual = {"encoder": np.array([[1.0, 0.5], [1, np.nan], [1, 0.25]])}
    results = {
        "diverged_at": np.array([-1, 1, -1]),
        "exact": np.array([0.5, np.nan, 0.75]),
        "losses": np.array([[2.0, 1], [np.nan, np.nan], [4, 3]]),
        "whole": {"accuracy": np.array([0.25, np.nan, 0.5])},
        "curves": {
            "loss": np.array([[3.0, 2], [9, 9], [5, 4]]),
            "accuracy": np.array([[0.125, 0.25], [0, 0], [0.25, 0.5]]),
        },
        "residual": residual | {"decoder": residual["encoder"] / 2},
        "shown": {
            name: np.array([[0, 1], [0, 2], [3, 4 + i]])
            for i, name in enumerate(("source", "inputs", "labels", "written"))
        },
        "attention": {
            kind: np.arange(3 * 6 * 2 * 2 * 2, dtype=float).reshape(3, 6, 2, 2, 2) + 1000 * i
            for i, kind in enumerate(binary.KINDS)
        },
    }
    lines = binary.compare_results(results, task)
    assert [line.measured for line in lines] == [0.375, 0.625, 0.375, 0.1875]
    assert lines[0].note == "standard deviation 0.125 over 2 seed(s), task reverse"
    rows_by_seed = binary.make_rows(results)
    assert [row["diverged"] for row in rows_by_seed] == [0, 1, 0]
    assert rows_by_seed[2] == {
        "seed": 2,
        "diverged": 0,
        "exact": 0.75,
        "accuracy": 0.5,
        "residual_encoder": 0.25,
        "residual_decoder": 0.125,
    }
    fig = binary.curves_figure(results, task)
    loss, share = fig.axes
    assert fig.get_suptitle() == "Reverse, 2 seeds"
    assert_close(loss.lines[0].get_ydata(), [np.sqrt(2 * 4), np.sqrt(1 * 3)])
    assert_close(loss.lines[1].get_ydata(), [np.sqrt(3 * 5), np.sqrt(2 * 4)])
    assert_close(share.lines[0].get_ydata(), [0.1875, 0.375])
    point, _, (bar,) = share.containers[0].lines
    assert point.get_xydata().tolist() == [[2, 0.625]]
    assert_close(bar.get_segments()[0], [[2, 0.5], [2, 0.75]])  # one standard deviation
    assert share.containers[0].get_label() == "sequences written exactly, at the end (0.62)"
    results["diverged_at"] = np.array([3, 1, -1])
    assert binary.curves_figure(results, task).get_suptitle() == "Reverse, 1 seed"
    untrained = results | {"losses": results["losses"][:, :0]}
    assert binary.curves_figure(untrained, task) is None
    fig = binary.attention_figure(results, task)  # of the first seed that learned
    assert fig.get_suptitle() == "Reverse, seed 2: answer 0 3, written 0 4"
    shown = [ax for ax in fig.axes if ax.images]
    assert len(shown) == 4 * 3  # of six layers
    for index, (ax, layer) in enumerate(zip(shown, np.repeat([0, 2, 3, 5], 3), strict=True)):
        kind = [*binary.KINDS][index % 3]
        expected = results["attention"][kind][2, layer].mean(axis=0)
        assert_close(ax.images[0].get_array(), expected)
        assert not any(line.get_visible() for line in [*ax.get_xgridlines(), *ax.get_ygridlines()])
        assert ax.get_title().endswith(f"layer {layer + 1}")
    words = [[t.get_text() for t in ax.get_xticklabels()] for ax in shown[:3]]
    assert words == [["0", "1"], ["0", "2"], ["0", "1"]]
    words = [[t.get_text() for t in ax.get_yticklabels()] for ax in shown[:3]]
    assert words == [["0", "1"], ["0", "2"], ["0", "2"]]
    (ax,) = binary.residual_figure(results, task).axes
    assert [line.get_label() for line in ax.lines] == ["encoder", "decoder"]
    assert_close(ax.lines[0].get_ydata(), [1, 0.25])
    assert all(tick == round(tick) for tick in ax.get_xticks())
    assert binary.token_words([0, 1, 2, 3, 12]) == ["·", "⊢", "⊣", "0", "9"]
