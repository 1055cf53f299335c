"""run_lens: shares, cosines and ranks against Jacobians, and the file of the Jacobian lens."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import jax
import numpy as np
import pytest

from experiments import run_lens
from experiments.lens import influence, lens_file, lens_results
from experiments.trained.opened_networks import Network
from tests.support.counted import record_progress
from tests.support.runs import parsed, result_of, rows, run


@pytest.mark.full
def test_a_run_writes_rows_and_lenses(tmp_path, capsys):
    tiny = [*run_lens.EXPERIMENT.presets["tiny"], "--max_tokens=18", "--start=0.13"]
    lenses = tmp_path / "lenses"
    assert run(run_lens, [*tiny, f"--lens_folder={lenses}"], tmp_path / "a") == 0
    assert [path.name for path in lenses.iterdir()] == ["llama.pt"]
    printed = capsys.readouterr().out
    assert "llama (not a setting of the statement): " in printed
    assert "effective rank of the Jacobian" in printed
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
    options = parsed(run_lens, "--untrained", "--lens_folder=x", "--max_tokens=17")
    with pytest.raises(ValueError, match="--lens_folder needs --max_tokens=18 or more, not 17"):
        run_lens.open_networks(options)
    for flag in ("--init=gpt5", "--networks=gpt5"):
        options = parsed(run_lens, "--untrained", flag)
        with pytest.raises(ValueError, match=f"{flag} is not one of"):
            run_lens.open_networks(options)


def make_network(label="small", depth=6, mask=True, **fields):
    x = np.arange(8.0).reshape(4, 2)
    source = SimpleNamespace(
        config=SimpleNamespace(depth=depth), settings=f"settings of {label}", is_causal_lm=True
    )
    inputs = {"x": x, "mask": np.ones((4, 2), bool) if mask else None}
    return Network(label, source, inputs, None, **fields)


@pytest.mark.parametrize("mask", [True, False])
def test_texts_that_are_added_have_the_probes_of_their_own_numbers(mask, monkeypatch):
    """Probes are drawn for all texts, and cut; states of spectrograms have no rows of a head."""
    network, counts, calls = make_network(mask=mask), np.array([5, 6, 7, 8]), {}
    options = SimpleNamespace(seed=7, start=0.5, num_ranked=3)

    def draw_probe(source, ids, counts, seed):
        calls["probe"] = source, ids, counts.tolist(), seed
        first = 10 * np.arange(len(counts))
        return influence.Probe(first, first + 1, first + 2)

    def record(name):
        def measure(params, config, inputs, *arguments):
            calls[name] = params, config, inputs, arguments
            return name

        return measure

    def count_tokens(params, config, inputs):
        return counts[: len(inputs["x"])]

    monkeypatch.setattr(run_lens, "load_params", lambda options, network: network.label)
    for name, stub in (
        ("draw_probe", draw_probe),
        ("count_tokens", count_tokens),
        ("measure_texts", record("texts")),
        ("measure_ranks", record("ranks")),
    ):
        monkeypatch.setattr(influence, name, stub)
    x, exists = network.inputs["x"], network.inputs["mask"]
    assert run_lens.measure_network(options, network, 1) == "texts"
    source, ids, all_counts, seed = calls["probe"]
    assert source is network.source and seed == 7 and all_counts == counts.tolist()
    assert ids is (x if mask else None)
    params, config, inputs, (probe, layer) = calls["texts"]
    assert (params, config, layer) == ("small", network.source.config, 3)
    np.testing.assert_array_equal(inputs["x"], x[1:])
    assert inputs["mask"] is None if not mask else inputs["mask"].shape == (3, 2)
    assert [a.tolist() for a in probe] == [[10, 20, 30], [11, 21, 31], [12, 22, 32]]
    assert run_lens.measure_ranks(options, network) == {"rank": "ranks"}
    assert calls["probe"] == (network.source, None, [5, 6, 7], 7)
    params, config, inputs, (sources, few_counts, layer) = calls["ranks"]
    assert (params, config, layer) == ("small", network.source.config, 3)
    np.testing.assert_array_equal(inputs["x"], x[:3])
    assert inputs["mask"] is None if exists is None else len(inputs["mask"]) == 3
    assert sources.tolist() == [0, 10, 20] and few_counts.tolist() == [5, 6, 7]


def test_ranks_are_of_the_early_start_alone_and_texts_are_extended(monkeypatch):
    networks, asked = [make_network("a"), make_network("b")], []

    def extend_part(folder, part, count, measure):
        asked.append((part, count))
        return {"share": measure(0)}

    monkeypatch.setattr(run_lens, "extend_part", extend_part)
    monkeypatch.setattr(run_lens, "measure_network", lambda o, network, first: network.label)
    monkeypatch.setattr(run_lens, "measure_ranks", lambda o, network: f"rank {network.label}")
    monkeypatch.setattr(
        lens_results, "join_networks", lambda parts, networks, start: (parts, start)
    )

    def read_or_compute(part, compute):
        asked.append(part)
        return {"rank": compute()}

    folder = SimpleNamespace(log=lambda line: None, cached=read_or_compute)
    events = record_progress(monkeypatch, run_lens)
    early, texts = lens_results.EARLY, [("a, texts", 4), ("b, texts", 4)]
    for start, num_ranked, has_ranks in ((early, 2, True), (0.5, 2, False), (early, 0, False)):
        asked.clear()
        events.clear()
        options = SimpleNamespace(start=start, num_ranked=num_ranked)
        parts, place = run_lens.measure(options, networks, folder)
        activities = [(f"measuring {label}", folder.log) for label in "ab"]
        steps = activities[0], "step", activities[1], "step"
        assert events == [(2, "influence", folder.log), *steps, "end"]
        ranks = ["a, ranks", "b, ranks"] if has_ranks else []
        assert [a for a in asked if isinstance(a, tuple)] == texts and place == start
        assert [a for a in asked if isinstance(a, str)] == ranks
        for label in "ab":
            rank = {"rank": f"rank {label}"} if has_ranks else {}
            assert parts[label] == {"share": label} | rank


def test_lenses_are_of_causal_networks_and_those_that_are_there_stay(tmp_path, monkeypatch, capsys):
    networks = [make_network(label) for label in ("new", "old", "masked")]
    networks[2].source.is_causal_lm = False
    (tmp_path / "lenses").mkdir()
    (tmp_path / "lenses" / "old.pt").write_text("before")
    monkeypatch.setattr(run_lens, "load_params", lambda options, network: network.label)
    monkeypatch.setattr(
        lens_file, "mean_jacobians", lambda params, config, inputs: (params, len(inputs["x"]))
    )
    monkeypatch.setattr(
        lens_file, "write_lens", lambda path, *content: path.write_text(str(content))
    )
    run_lens.write_lenses(SimpleNamespace(lens_folder=tmp_path / "lenses"), networks)
    written = {path.name: path.read_text() for path in (tmp_path / "lenses").iterdir()}
    assert written == {"new.pt": "('new', 4)", "old.pt": "before"}
    further = tmp_path / "a" / "b"
    run_lens.write_lenses(SimpleNamespace(lens_folder=str(further)), networks[:1])
    assert [path.name for path in further.iterdir()] == ["new.pt"]
    assert capsys.readouterr().out.splitlines() == [
        f"written to {tmp_path / 'lenses' / 'new.pt'}",
        f"the lens of old is there: {tmp_path / 'lenses' / 'old.pt'}",
        "no lens of masked: it is not a causal language model",
        f"written to {further / 'new.pt'}",
    ]


@pytest.mark.parametrize(
    ("folder", "is_writing", "is_written"), [("a", True, 1), ("a", False, 0), ("", True, 0)]
)
def test_a_run_that_is_only_read_writes_no_lenses(folder, is_writing, is_written, monkeypatch):
    written, run = [], MagicMock(is_writing=is_writing)
    run.measure.return_value = [MagicMock(results="results", setup="networks")]
    run.__enter__.return_value = run
    monkeypatch.setattr(run_lens, "open_run", lambda *_: run)
    monkeypatch.setattr(run_lens, "write_lenses", lambda *arguments: written.append(arguments))
    monkeypatch.setattr(run_lens, "lens_results", MagicMock())
    options = SimpleNamespace(grows=False, lens_folder=folder)
    assert run_lens.main(options) is run.finish()
    assert written == [(options, "networks")] * is_written


def test_weights_are_those_of_the_folder_or_drawn_by_the_seed(monkeypatch):
    monkeypatch.setattr(run_lens.pretrained, "load", lambda folder: ("config", f"of {folder}"))
    monkeypatch.setattr(
        run_lens.pretrained, "random_like", lambda settings, key: (0, (settings, key))
    )
    options = SimpleNamespace(seed=5)
    assert run_lens.load_params(options, make_network(folder="here")) == "of here"
    settings, key = run_lens.load_params(options, make_network())
    assert settings == "settings of small" and key == jax.random.key(5)


def test_texts_that_are_skipped_are_loaded_first(monkeypatch):
    loaded = []

    def load_networks(options, num_texts):
        loaded.append(num_texts)
        return [make_network("a"), make_network("b")]

    monkeypatch.setattr(run_lens, "load_networks", load_networks)
    monkeypatch.setattr(run_lens, "make_initialised", lambda name, options: f"init {name}")
    flags = ("--num_texts=2", "--skip_texts=1", "--init=bert-base-cased,albert-base-v2")
    first, second, *initialised = run_lens.open_networks(parsed(run_lens, *flags))
    assert loaded == [3] and [first.label, second.label] == ["a", "b"]
    assert initialised == ["init bert-base-cased", "init albert-base-v2"]
    for opened in (first, second):
        np.testing.assert_array_equal(opened.inputs["x"], make_network().inputs["x"][1:])
