"""run_trained and trained_weights: small networks, and the ALBERT of a package where it is there.

`pip install --no-deps rxnmapper==0.4.3` (3 MB) makes the last test run.
"""

import json
import random
import threading
import warnings
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import rank_collapse as rc
from experiments import run_trained
from experiments.lab import progress
from experiments.trained import (
    generated_texts,
    opened_networks,
    packages,
    text_measures,
    trained_results,
)
from experiments.verdicts import PROTOCOL
from rank_collapse import pretrained
from rank_collapse.text import tokens
from tests.oracles.frozen_paths import softmax
from tests.support.closeness import assert_close
from tests.support.counted import record_progress
from tests.support.runs import parsed, result_of, rows, run

ALBERT = "albert-reactions"


@pytest.mark.full
def test_all_lengths_are_the_whole_network_and_rows_have_intervals(tmp_path):
    tiny = [*run_trained.EXPERIMENT.presets["tiny"], "--networks=llama"]
    assert run(run_trained, tiny, tmp_path) == 0
    measures, opened = result_of(run_trained, tmp_path)
    for network in opened:  # the causal one; the other is that of test_contract
        arrays, depth = measures[network.label], network.source.config.depth
        assert arrays["paths/lengths"][0][-1] == depth
        for name in ("loss", "right"):
            for kind in ("frozen", "recomputed"):
                longest = arrays[f"paths/{name}_{kind}"][:, -1]
                np.testing.assert_allclose(longest, arrays[f"paths/{name}"], rtol=1e-4)
        # What is seen in floating point agrees with what is kept in logarithms, layer 1
        source, inputs = network.source, network.inputs
        group = pretrained.Group(
            (("states", text_measures.LogNorm()), ("ratio", text_measures.ProfilePass())),
            pretrained.AblationSpec("SAN", "text"),
        )
        ratios = pretrained.stream(source, inputs, {"": group})[""]["ratio"]["residual_ratio"]
        assert_close(arrays["log10_ratio/alone"][:, 1], np.log10(ratios[:, 1]), atol=1e-4)
    table = rows(tmp_path)
    assert {row["network"] for row in table} == {"llama"}
    assert all(float(r["low"]) <= float(r["mean"]) <= float(r["high"]) for r in table if r["low"])


@pytest.mark.full
def test_an_albert_is_judged_in_both_readings_each_with_its_own_skips(tmp_path):
    """Two readings of an ALBERT, each with arrays of its ablation; one of other networks."""
    flags = [*run_trained.EXPERIMENT.presets["tiny"], "--networks=albert,llama"]
    options = parsed(run_trained, *flags)
    opened = run_trained.open_networks(options)
    arrays = {n.label: text_measures.measure_residuals(n.source, n.inputs, 3) for n in opened}
    claims = []
    for network in opened:
        residuals = arrays[network.label]
        claims += trained_results.judge_ablations(
            network.label, residuals, network.source.config.mask == "causal"
        )
    settings = {row.setting for row in claims if row.key == "trained skips stop"}
    assert settings == {"albert, as the text says", "albert, as published", "llama"}
    source, inputs = opened[0].source, opened[0].inputs
    for name, reading in (("skips", "text"), ("skips, as published", "published")):
        ablation = pretrained.AblationSpec("SAN+skip", reading)
        group = pretrained.Group((("ratio", text_measures.ProfilePass()),), ablation)
        ratios = pretrained.stream(source, inputs, {"": group})[""]["ratio"]["residual_ratio"]
        np.testing.assert_allclose(10 ** arrays["albert"][f"log10_ratio/{name}"], ratios, rtol=1e-5)
    assert "log10_ratio/skips, as published" not in arrays["llama"]


@pytest.mark.full
def test_the_lemma_is_asked_of_the_attention_and_of_the_mean_token():
    """The first layer against numpy, where P̃ is one row: the softmax of the mean token's scores."""
    settings = run_trained.UNTRAINED["albert"] | {"initializer_range": 0.5}
    ids, key = np.arange(1, 7), jax.random.key(0)
    bounds = text_measures.measure_bounds(pretrained.open_random(settings, key), ids[None], 1)
    config, params = pretrained.random_like(settings, key)
    x = np.asarray(rc.apply(params, ids, config).hidden[0], np.float64)
    attention, mean_token = (
        jax.tree.map(np.asarray, rc.network.layer_params(params, config, 0).attention),
        x.mean(axis=0),
    )

    for head in range(config.num_heads):
        w_q, w_k = attention.w_q[head], attention.w_k[head] / np.sqrt(attention.w_k.shape[-1])
        weights, common = (
            softmax(x @ w_q @ (x @ w_k).T),
            softmax(mean_token @ w_q @ ((x - mean_token) @ w_k).T),
        )
        deviation = (x - mean_token) @ w_q @ ((x - mean_token) @ w_k).T
        spread = np.ptp(deviation, axis=1, keepdims=True)
        excess = np.maximum((1 - spread) * common - weights, weights - (1 + 2 * spread) * common)
        measured = bounds["bounds/whole/lemma"][0, 0, head] + text_measures.ROUNDING
        assert_close(measured, excess.max(), atol=1e-5)
        assert spread.max() > 0.1


def test_texts_are_of_the_vocabulary_and_masks_of_the_texts():
    draw, words = random.Random(0), set()
    for kind in generated_texts.KINDS.values():
        words |= {word for _ in range(200) for word in kind(draw)}
    listed = sorted(words | {"[CLS]", "[SEP]"})
    for kind in generated_texts.KINDS:
        lines = generated_texts.write_ids(kind, listed, 5).splitlines()
        assert len(lines) == 5 and lines == generated_texts.write_ids(kind, listed, 5).splitlines()
        assert {line.split()[0] for line in lines} == {str(listed.index("[CLS]"))}
    batch = tokens.pad_sequences([list(range(1, 9)), list(range(1, 6))], vocab_size=20)
    source = pretrained.open_random(run_trained.UNTRAINED["albert"], jax.random.key(0))
    task = text_measures.make_task(source, {"x": batch.ids, "mask": batch.mask}, 19, 2)
    assert (task.inputs["x"] == 19).sum(axis=1).tolist() == [1, 1, 1, 1]
    assert (task.targets == np.repeat(batch.ids, 2, axis=0)).all()
    assert ((task.inputs["x"] == 19) == task.chosen).all()
    assert not task.chosen[:, 0].any() and not task.chosen[2:, 4:].any()


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--folder=nowhere"], "nowhere"),
        (["--networks=none"], "none"),
        (["--text=absent.tsv", "--networks=bare"], "--text=absent.tsv"),
        (["--text=trained/bare/config.json", "--networks=bare"], "bare"),
    ],
)
def test_mistakes_are_one_line(arguments, named, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "trained" / "bare"
    source.mkdir(parents=True)
    (source / "config.json").write_text(json.dumps(run_trained.UNTRAINED["llama"]))
    assert run(run_trained, arguments, tmp_path / "out") == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert named in line


@pytest.fixture(scope="module")
def albert(tmp_path_factory):
    """The folder of rxnmapper's ALBERT, whose weights torch reads."""
    pytest.importorskip("torch")
    weights = packages.find_weights(packages.PACKAGES[ALBERT], None)
    if weights is None:
        pytest.skip("rxnmapper is not installed")
    folder = tmp_path_factory.mktemp("albert")
    packages.PACKAGES[ALBERT].make(weights, folder)
    return folder


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_a_trained_albert_in_transformers_and_its_numbers(albert):
    """Its rate of collapse is 3; its accuracy and loss are those of transformers."""
    network = opened_networks.load_network(albert, None, num_texts=2, max_tokens=32)
    source, inputs = network.source, network.inputs
    task = text_measures.make_task(source, inputs, network.mask_id, 1)
    measures = text_measures.measure_paths(source, task, [12], 4)
    log10_residual = text_measures.measure_residuals(source, inputs, 2)["log10_residual/alone"]
    assert np.abs(trained_results.final_rate(log10_residual) - 3).max() < 0.05
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch = pytest.importorskip("torch")
        transformers = pytest.importorskip("transformers")
        model = transformers.AlbertForMaskedLM.from_pretrained(albert, attn_implementation="eager")
    torch_inputs = {
        "input_ids": task.inputs["x"],
        "attention_mask": task.inputs["mask"].astype(int),
    }
    with torch.no_grad():
        logits = model.eval()(
            **{n: torch.from_numpy(np.asarray(a)) for n, a in torch_inputs.items()}
        ).logits
    right = logits.argmax(dim=-1).numpy() == task.targets
    shares = [row[chosen].mean() for row, chosen in zip(right, task.chosen, strict=True)]
    np.testing.assert_allclose(measures["paths/right"], shares, rtol=1e-6)
    log_p = torch.log_softmax(logits.double(), dim=-1).numpy()
    nats = -np.take_along_axis(log_p, task.targets[..., None], axis=-1)[..., 0]
    loss = [row[chosen].mean() for row, chosen in zip(nats, task.chosen, strict=True)]
    np.testing.assert_allclose(measures["paths/loss"], loss, rtol=1e-4)


@pytest.mark.parametrize(
    ("depth", "lengths"),
    [(1, [0, 1]), (3, [0, 1, 2, 3]), (12, [0, 1, 2, 3, 4, 6]), (40, [0, 1, 2, 3, 4, 6, 10])],
)
def test_what_is_measured_of_the_texts_from_a_number_on(depth, lengths, monkeypatch):
    """Paths of a task that is made of all texts; spectrograms have residuals alone."""
    x, calls = np.arange(12.0).reshape(6, 2), []

    def record(name, result):
        def measure(*arguments):
            calls.append((name, arguments))
            return {name: result}

        return measure

    class Task:
        def __init__(self, *arguments):
            self.arguments = arguments

        def leave_out(self, start):
            return (*self.arguments[1:], start)

    for name in ("residuals", "states", "paths"):
        monkeypatch.setattr(text_measures, f"measure_{name}", record(name, [1.0]))
    monkeypatch.setattr(text_measures, "make_task", Task)
    source = SimpleNamespace(config=SimpleNamespace(depth=depth))
    options = SimpleNamespace(chunk=3, num_paths=2, num_copies=5)
    network = opened_networks.Network("a", source, {"x": x, "mask": x > -1}, 9)
    arrays = run_trained.measure_network(options, network, 4)
    assert list(arrays) == ["residuals", "states", "paths"]
    assert all(values.tolist() == [1.0] for values in arrays.values())
    (_, residuals), (_, states), (_, paths) = calls
    for source_argument, inputs, *others in (residuals, states):
        assert source_argument is source and inputs["x"].tolist() == x[4:].tolist()
        assert inputs["mask"].shape == (2, 2) and others in ([3], [3, 2])
    source_argument, (inputs, mask_id, num_copies, start), measured, chunk = paths
    assert source_argument is source and inputs is network.inputs and measured == lengths
    assert (mask_id, num_copies, start, chunk) == (9, 5, 4, 3)
    calls.clear()
    monkeypatch.setattr(text_measures, "make_task", lambda *_: None)
    assert list(run_trained.measure_network(options, network, 0)) == ["residuals", "states"]
    spectrograms = network._replace(inputs={"x": x, "mask": None})
    assert list(run_trained.measure_network(options, spectrograms, 0)) == ["residuals"]


def test_few_texts_have_random_weights_and_bounds_of_their_shortest_length(monkeypatch):
    x = np.arange(15).reshape(3, 5)
    mask = np.arange(5) < np.array([4, 3, 1])[:, None]
    calls = {}

    def record(name, result):
        def measure(*arguments):
            calls[name] = arguments
            return result

        return measure

    monkeypatch.setattr(run_trained.pretrained, "open_random", record("random", "drawn"))
    monkeypatch.setattr(text_measures, "measure_residuals", record("residuals", {"ratio": [2.0]}))
    monkeypatch.setattr(text_measures, "measure_bounds", record("bounds", {"bounds/c": [3.0]}))
    source = SimpleNamespace(settings="settings")
    network = opened_networks.Network("a", source, {"x": x, "mask": mask}, None)
    options = SimpleNamespace(num_few=2, seed=11, chunk=4)
    arrays = run_trained.measure_few(options, network)
    values = {name: a.tolist() for name, a in arrays.items()}
    assert values == {"random/ratio": [2.0], "bounds/c": [3.0]}
    assert calls["random"] == ("settings", jax.random.key(11))
    drawn, few, chunk = calls["residuals"]
    assert (drawn, chunk) == ("drawn", 4) and few["x"].tolist() == x[:2].tolist()
    source_argument, ids, chunk = calls["bounds"]
    assert source_argument is source and ids.tolist() == x[:2, :3].tolist() and chunk == 4
    spectrograms = network._replace(inputs={"x": x, "mask": None})
    assert list(run_trained.measure_few(options, spectrograms)) == ["random/ratio"]


def test_each_network_has_its_own_texts_and_weights_at_random(monkeypatch):
    options = SimpleNamespace(untrained=False)
    networks = [
        opened_networks.Network(label, None, {"x": np.zeros((count, 1))}, None)
        for label, count in (("a", 2), ("b", 3))
    ]
    monkeypatch.setattr(
        run_trained, "measure_network", lambda o, n, start: {"texts": [n.label, start, o]}
    )
    monkeypatch.setattr(run_trained, "measure_few", lambda o, n: {"few": [n.label, o]})
    monkeypatch.setattr(
        run_trained,
        "extend_part",
        lambda folder, part, count, compute: {"part": part, "count": count} | compute(7),
    )
    folder = SimpleNamespace(log="log", cached=lambda part, compute: {"cached": part} | compute())
    events = record_progress(monkeypatch, run_trained)
    assert run_trained.measure(options, networks, folder) == {
        label: {
            "part": f"{label}, texts",
            "count": count,
            "texts": [label, 7, options],
            "cached": f"{label}, few",
            "few": [label, options],
        }
        for label, count in (("a", 2), ("b", 3))
    }
    steps = ("measuring a", "log"), "step", ("measuring b", "log"), "step"
    assert events == [(2, "trained networks", "log"), *steps, "end"]


def test_skipped_texts_are_read_beside_those_that_are_measured(monkeypatch):
    inputs = {"x": np.arange(5)[:, None], "mask": np.ones((5, 1), bool)}
    opened = [opened_networks.Network(label, None, inputs, None) for label in "ab"]
    asked = []
    monkeypatch.setattr(
        run_trained, "load_networks", lambda options, count: asked.append(count) or opened
    )
    options = SimpleNamespace(untrained=False, num_texts=3, skip_texts=2)
    left = run_trained.open_networks(options)
    assert asked == [5] and [network.label for network in left] == ["a", "b"]
    assert all(network.inputs["x"].ravel().tolist() == [2, 3, 4] for network in left)
    monkeypatch.setattr(run_trained, "make_untrained", lambda name, options: name)
    with pytest.raises(ValueError, match="--networks=gpt5 is not one of albert, llama"):
        run_trained.open_networks(parsed(run_trained, "--untrained", "--networks=gpt5"))
    for flag, names in (("", ["albert", "llama"]), ("--networks=llama", ["llama"])):
        parsed_options = parsed(run_trained, "--untrained", *flag.split())
        assert run_trained.open_networks(parsed_options) == names


@pytest.mark.parametrize("grows", [True, False])
def test_texts_that_may_grow_are_identified_by_those_of_the_first_round(grows, monkeypatch):
    """Further texts then belong to the same run."""
    identified = []

    def open_run(options, make_setup, identify):
        identified.append(identify(networks))
        raise InterruptedError

    def network_of(x):
        return opened_networks.Network("a", None, {"x": x, "mask": None}, None)

    monkeypatch.setattr(run_trained, "open_run", open_run)
    first = PROTOCOL.rounds[0]
    for count in (first, first + 1):
        networks = [network_of(np.arange(count))]
        with pytest.raises(InterruptedError):
            run_trained.main(SimpleNamespace(grows=grows))
    assert (identified[0] == identified[1]) is grows


def test_a_network_that_takes_long_is_named_in_the_log(monkeypatch):
    lines, is_logged = [], threading.Event()

    def log(line):
        lines.append(line)
        if line.startswith("measuring"):
            is_logged.set()

    monkeypatch.setattr(progress, "SILENCE", 0.01)
    monkeypatch.setattr(run_trained, "extend_part", lambda *_: {"texts": is_logged.wait(5)})
    folder = SimpleNamespace(
        log=log,
        cached=lambda name, compute: {"few": name},
    )
    network = SimpleNamespace(label="bert", inputs={"x": np.zeros((3, 4))})
    results = run_trained.measure(None, [network], folder)
    assert results == {"bert": {"texts": True, "few": "bert, few"}}
    assert "measuring bert, 00:00" in lines
