"""What each way to exclude a key does to attention, and in which layers it is done."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr

import rank_collapse as rc
from experiments import run_sinks
from experiments.trained.opened_networks import Network, make_untrained
from rank_collapse import pretrained
from tests.support.closeness import assert_close
from tests.support.counted import record_progress
from tests.support.runs import parsed


def exclude_first_key(how, start, weights, layer):
    """Changes weights [h, n, m] after the softmax: of the queries after the first, from `start`."""
    key = (jnp.arange(weights.shape[-1]) == 0)[None]
    is_later = (jnp.arange(weights.shape[-2]) > 0)[:, None]
    without = jnp.where(key & is_later, 0, weights)
    changed = {
        "hidden": without / without.sum(axis=-1, keepdims=True),
        "dropped": without,
        "thinned": jnp.where(is_later, weights * (1 - weights[..., :1]), weights),
    }[how]
    return jnp.where(layer >= start, changed, weights)


def mean_cosine(states):
    """Computes the mean cosine of two tokens [n, d], from the third token on."""
    unit = states[2:] / np.linalg.norm(states[2:], axis=1, keepdims=True)
    return (unit @ unit.T)[~np.eye(len(unit), dtype=bool)].mean()


@pytest.mark.parametrize("how", ["hidden", "dropped", "thinned"])
def test_a_key_is_excluded_as_the_flag_says(how):
    arguments = ["--untrained", "--num_texts=2", "--max_tokens=8", "--start=0.4", f"--how={how}"]
    options = parsed(run_sinks, *arguments)
    network = make_untrained("llama", options)
    key = jax.random.key(options.seed)
    config, params = pretrained.random_like(network.source.settings, key)
    start = round(0.4 * config.depth)
    assert 0 < start < config.depth
    edit = {"weights": lambda weights, layer: exclude_first_key(how, start, weights, layer)}
    arrays = run_sinks.measure_network(options, network, "random", 0)
    ids = jnp.asarray(network.inputs["x"])
    for prefix, edited in (("", edit), ("whole_", None)):
        hidden = jax.jit(jax.vmap(lambda x, e=edited: rc.apply(params, x, config, edit=e).hidden))
        for text, states in enumerate(np.asarray(hidden(ids), float)):
            np.testing.assert_allclose(
                arrays[f"{prefix}token_cosine"][text],
                [mean_cosine(state) for state in states],
                rtol=1e-4,
                atol=1e-5,
            )


def test_further_texts_are_measured_as_in_one_run(monkeypatch):
    """Texts from the second on have the same keys as before, and the networks of --seed."""
    arguments = ["--untrained", "--num_texts=4", "--max_tokens=16", "--key=random", "--seed=3"]
    options, measured = parsed(run_sinks, *arguments, "--start=0.6"), []
    network = make_untrained("llama", options)

    def measure_texts(params, config, replaced, texts):
        ids, changed, (keys, start, *_) = texts
        measured.append((params, replaced))
        values = {"keys": keys[:, None] + start[:, None], "change": changed != ids, "ids": ids}
        return values | {"output": ids[..., None]}

    def token_losses(unembedding, output, targets, counted):
        read.append(unembedding)
        return output[..., 0].sum(axis=-1) + targets.sum(axis=-1)[:, None], counted

    def open_random(settings, key):
        assert settings == network.source.settings
        return SimpleNamespace(unembedding=jax.random.key_data(key).tolist())

    read = []
    monkeypatch.setattr(run_sinks, "measure_texts", measure_texts)
    monkeypatch.setattr(run_sinks.pretrained, "open_random", open_random)
    monkeypatch.setattr(run_sinks.pretrained, "token_losses", token_losses)
    for weights in ("trained", "random"):  # no folder: both at random
        whole = run_sinks.measure_network(options, network, weights, 0)
        further_texts = run_sinks.measure_network(options, network, weights, 1)
        assert whole.keys() == further_texts.keys() and len({*whole["keys"].ravel()}) > 1
        for name, values in whole.items():
            np.testing.assert_array_equal(further_texts[name], values[1:], err_msg=name)
        np.testing.assert_array_equal(whole["change"].any(axis=0), np.arange(16) == 2)
        assert whole["loss"].shape == (4,) and len({*whole["loss"]}) > 1
        draw, start = np.random.default_rng(3), 2  # of the layers the nearest to 0.6 · 3
        assert network.source.config.depth == 3
        keys = [draw.choice([3, 4, 5, 6, 7]) for _ in range(4)]  # but the token that is replaced
        assert (whole["keys"].ravel() - start).tolist() == keys
    key = jax.random.key(3)
    _, expected = pretrained.random_like(network.source.settings, key)
    for params, replaced in measured:
        jax.tree.map(np.testing.assert_array_equal, params, expected)
        assert replaced == 2
    assert read == [jax.random.key_data(key).tolist()] * 8


def test_the_finding_has_paired_changes_after_the_last_layer():
    """Of the first network's trained weights, its first key and late layers."""
    labels = ["small, trained weights", "small, random weights"]
    axes = {"start": [0.0, 0.4], "how": ["dropped", "hidden", "thinned"]}
    axes |= {"key": ["first", "random"], "network": labels, "seed": [0, 1], "layer": [0, 1, 2]}
    shape = [len(values) for values in axes.values()]
    rng = np.random.default_rng(0)
    names = ("token_cosine", "whole_token_cosine", "spread", "whole_spread")
    results = xr.Dataset({n: ([*axes], rng.normal(size=shape)) for n in names}, axes)
    results.token_cosine[..., 2] = results.whole_token_cosine[..., 2] + rng.normal(size=shape[:-1])
    changes = [
        (results[name] - results[f"whole_{name}"]).values[1, how, 0, 0, :, 2].mean()
        for name in ("token_cosine", "spread")
        for how in (1, 0)
    ]
    finding = run_sinks.make_finding(results, [SimpleNamespace(label="small")])
    hidden, dropped, wider, lost = (f"{change:+.3f}" for change in changes)
    assert finding.figure == "cosine" and finding.sentence == (
        f"In small the mean cosine of two tokens changes by {hidden} where the first key is hidden "
        f"from later layers, and by {dropped} where its weight is lost; the spread of a changed "
        f"token by {wider} and {lost}."
    )
    for cut in ({"how": ["hidden"]}, {"how": ["dropped"]}, {"start": [0.0]}, {"key": ["random"]}):
        networks = [SimpleNamespace(label="small")]
        assert run_sinks.make_finding(results.sel(cut), networks) is None


def make_network(label, lengths, is_causal_lm=True):
    mask = np.arange(6) < np.array(lengths)[:, None]
    ids = np.where(mask, np.arange(len(lengths))[:, None] + 1, 0)
    source = SimpleNamespace(is_causal_lm=is_causal_lm)
    return Network(label, source, {"x": ids, "mask": mask}, None)


def test_texts_are_whole_ones_after_those_that_are_skipped(monkeypatch):
    """Skipped texts are whole ones too; short texts and masked models are left out."""
    networks, asked = [make_network("masked", [6] * 9, False)], []
    monkeypatch.setattr(
        run_sinks, "load_networks", lambda options, count: asked.append(count) or networks
    )
    flags = ("--num_texts=2", "--skip_texts=1", "--max_tokens=6", "--folder=here")
    options = parsed(run_sinks, *flags)
    with pytest.raises(ValueError, match="--folder=here has no causal language model"):
        run_sinks.open_networks(options)
    networks.append(make_network("causal", [3, 6, 6, 5, 6, 6]))
    (network,) = run_sinks.open_networks(options)
    assert asked == [3 * run_sinks.READ] * 2 and network.label == "causal"
    assert network.inputs["x"].tolist() == [[3] * 6, [5] * 6]
    assert network.inputs["mask"].shape == (2, 6) and network.inputs["mask"].all()
    networks[1] = make_network("causal", [6, 6, 5, 5])
    with pytest.raises(ValueError, match="causal: only 1 text of 6 tokens"):
        run_sinks.open_networks(options)


def test_layers_of_a_shallow_network_are_followed_by_gaps():
    values = np.arange(6.0).reshape(2, 3)
    padded = run_sinks.pad_layers(values, 5)
    np.testing.assert_array_equal(padded[:, :3], values)
    assert np.isnan(padded[:, 3:]).all() and padded.shape == (2, 5)
    np.testing.assert_array_equal(run_sinks.pad_layers(values[0], 5), values[0])  # one a text


def test_trained_weights_are_those_of_the_folder_and_random_ones_of_their_shape(monkeypatch):
    """The head that predicts the next token is that of the weights."""
    options = parsed(run_sinks, "--untrained", "--num_texts=2", "--max_tokens=8", "--start=1")
    network = make_untrained("llama", options)._replace(folder="here")
    network = network._replace(
        source=SimpleNamespace(
            config=network.source.config, settings="settings", unembedding="head of the folder"
        )
    )
    measured, heads = [], []

    def measure_texts(params, config, replaced, texts):
        measured.append(params)
        return {"output": texts[0][..., None]}

    def token_losses(unembedding, output, targets, counted):
        heads.append(unembedding)
        return jnp.zeros((2, 1)), counted

    library = run_sinks.pretrained
    monkeypatch.setattr(run_sinks, "measure_texts", measure_texts)
    monkeypatch.setattr(library, "load", lambda folder: ("config", f"weights of {folder}"))
    monkeypatch.setattr(library, "random_like", lambda settings, key: ("config", settings))
    monkeypatch.setattr(
        library, "open_random", lambda settings, key: SimpleNamespace(unembedding="random head")
    )
    monkeypatch.setattr(library, "token_losses", token_losses)
    for weights in ("trained", "random"):
        run_sinks.measure_network(options, network, weights, 0)
    assert measured == ["weights of here"] * 2 + ["settings"] * 2  # as it is, and changed
    assert heads == ["head of the folder"] * 2 + ["random head"] * 2


def test_every_network_is_measured_with_both_weights_and_padded_to_the_deepest(monkeypatch):
    networks = [
        Network(label, SimpleNamespace(config=SimpleNamespace(depth=depth)), {"x": [0] * 2}, None)
        for label, depth in (("shallow", 1), ("deep", 3))
    ]
    asked = []

    def extend_part(folder, part, count, measure):
        asked.append((part, count))
        return measure(0)

    def measure_network(options, network, weights, first_text):
        layers = network.source.config.depth + 1
        value = 10.0 * (network.label == "deep") + (weights == "random")
        return {"spread": np.full((2, layers), value), "loss": np.full(2, value + 0.5)}

    monkeypatch.setattr(run_sinks, "extend_part", extend_part)
    monkeypatch.setattr(run_sinks, "measure_network", measure_network)
    folder = SimpleNamespace(log="log")
    events = record_progress(monkeypatch, run_sinks)
    results = run_sinks.measure(SimpleNamespace(), networks, folder)
    names = [f"{n}, {w} weights" for n in ("shallow", "deep") for w in ("trained", "random")]
    assert asked == [(name, 2) for name in names] and results.layer.values.tolist() == [0, 1, 2, 3]
    assert events[0] == (4, "networks, trained and at random", "log")
    steps = ((f"measuring {name}", "log") for name in names)
    assert events[1:] == [event for step in steps for event in (step, "step")] + ["end"]
    for name, value, layers in zip(names, (0, 1, 10, 11), (2, 2, 4, 4), strict=True):
        network = results.sel(network=name)
        spread = network.spread.transpose("seed", "layer").values
        np.testing.assert_array_equal(spread, [[value] * layers + [np.nan] * (4 - layers)] * 2)
        assert network.loss.values.tolist() == [value + 0.5] * 2


def test_statements_are_of_trained_weights_at_the_points_that_were_measured():
    """Changes are paired by text; a network whose deepest layers are gaps counts by its last."""
    labels = [f"{n}, {w} weights" for n in ("a", "b") for w in ("trained", "random")]
    axes = {"start": [0.0, 0.4], "how": ["hidden", "dropped", "thinned"]}
    axes |= {"key": ["first", "random"], "network": labels, "seed": [0, 1, 2], "layer": [0, 1, 2]}
    shape = [len(values) for values in axes.values()]
    rng = np.random.default_rng(0)
    names = ("token_cosine", "whole_token_cosine", "spread", "whole_spread")
    results = xr.Dataset({n: ([*axes], rng.normal(size=shape)) for n in names}, axes)
    is_there = (results.layer < 2) | ~results.network.isin(labels[:2])
    results = results.where(is_there).transpose(*axes)
    networks = [SimpleNamespace(label=label) for label in "ab"]
    points = {
        "sinks mix": ("token_cosine", 0.4, "hidden", "first"),
        "sinks spread": ("spread", 0.4, "hidden", "first"),
        "sinks drop": ("token_cosine", 0.4, "dropped", "first"),
        "sinks drop spread": ("spread", 0.4, "dropped", "first"),
        "sinks thin": ("token_cosine", 0.4, "thinned", "first"),
        "sinks thin spread": ("spread", 0.4, "thinned", "first"),
        "sinks move": ("token_cosine", 0.0, "hidden", "first"),
        "sinks control": ("token_cosine", 0.4, "hidden", "random"),
    }
    rows = list(run_sinks.judge_claims(results, networks))
    assert [(r.setting, r.key) for r in rows] == [(n, key) for n in "ab" for key in points]
    for row in rows:
        name, start, how, key = points[row.key]
        point = {"start": start, "how": how, "key": key, "layer": 1 + (row.setting == "b")}
        chosen = results.sel(point, drop=True).sel(network=f"{row.setting}, trained weights")
        change = (chosen[name] - chosen[f"whole_{name}"]).values
        if row.note:  # of shares, and of medians
            assert f" {change.min():.3g} to {change.max():.3g}" in row.note, row
        else:
            assert row.estimate == pytest.approx(change.mean())
    few = results.sel(how=["dropped"], key=["first"])
    keys = [row.key for row in run_sinks.judge_claims(few, networks[:1])]
    assert keys == ["sinks drop", "sinks drop spread"]
    assert not list(run_sinks.judge_claims(results.sel(start=[0.0], key=["random"]), networks))
    drawn = run_sinks.cosine_figure(results.sel(how=["hidden"], start=[0.4]))
    curves = {line.get_label(): line.get_ydata() for line in drawn.axes[2].lines}
    assert [*curves] == ["hidden from 0.4 L on", "as it is"]
    b = results.sel(key="first", how="hidden", start=0.4, network=labels[2])
    assert_close(curves["hidden from 0.4 L on"], b.token_cosine.mean("seed"))
    assert_close(curves["as it is"], b.whole_token_cosine.mean("seed"))
    assert all(tick == round(tick) for tick in drawn.axes[2].get_xticks())
    assert run_sinks.cosine_figure(results.sel(key=["random"])) is None
