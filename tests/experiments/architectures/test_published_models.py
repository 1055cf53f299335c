"""Models of run_architectures: their weights, inputs and names."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from experiments import run_architectures
from experiments.architectures import published_models
from experiments.architectures.published_models import Model, ablation_name
from experiments.lab import cli
from rank_collapse.text import encoders
from tests.support.folders import GOLDEN


def read_flags(*arguments):
    return cli.parse_flags(run_architectures.FLAGS, list(arguments))


def make_model(label, has_weights, family="bert"):
    return Model(label, label, {"model_type": family}, has_weights, {})


def test_the_first_seed_chooses_the_initialisations():
    options = read_flags("--first_seed=3", "--num_seeds=2")
    weights = published_models.list_weights(options, [make_model("a", False)])
    assert [w.name for w in weights] == ["a/init3", "a/init4"]
    models = [make_model("a", True), make_model("b", False)]
    options = read_flags("--num_seeds=1", "--initialisation=false")
    names = [w.name for w in published_models.list_weights(options, models)]
    assert names == ["a/pretrained0", "b/init0"]
    options = read_flags("--num_seeds=1", "--initialisation=true")
    names = [w.name for w in published_models.list_weights(options, models)]
    assert names == ["a/pretrained0", "a/init0", "b/init0"]


def test_measured_weights_are_counted_and_stacked_by_model_kind_and_seed(monkeypatch):
    """ALBERT has more ablations than BERT; each set of weights is one step, also a stored one."""
    models = [make_model("a", True), make_model("b", False, "albert")]
    options = read_flags("--num_seeds=2", "--initialisation=true")
    sets = published_models.list_weights(options, models)

    def measure_weights(options, weights):
        number = sets.index(weights)
        return {
            f"{ablation_name(pair)}/residual_ratio": np.full((3, 4), 100 * number + i)
            for i, pair in enumerate(weights.model.ablations)
        }

    stored, computed = {sets[1].name: measure_weights(options, sets[1])}, []

    def read_or_compute(part, compute):
        if part not in stored:
            computed.append(part)
        return stored.get(part) or compute()

    reports = []

    class Reports(published_models.Progress):
        def advance(self, *args, **values):
            super().advance(*args, **values)
            reports.append((self.n, self.total))

        def say(self, message):
            reports.append(message)

    monkeypatch.setattr(published_models, "measure_weights", measure_weights)
    monkeypatch.setattr(published_models, "Progress", Reports)
    folder = SimpleNamespace(part=stored.get, cached=read_or_compute, log=lambda line: None)
    results = published_models.measure(options, models, folder)
    names = [weights.name for weights in sets]
    assert names == ["a/pretrained0", "a/init0", "a/init1", "b/init0", "b/init1"]
    assert computed == [name for name in names if name != "a/init0"]
    assert reports == [
        *(names[0], (1, 5), (2, 5), names[2], (3, 5), names[3], (4, 5), names[4], (5, 5))
    ]
    assert {label: list(kinds) for label, kinds in results.items()} == {
        "a": ["pretrained", "init"],
        "b": ["init"],
    }
    for label, kind, first in (("a", "pretrained", 0), ("a", "init", 1), ("b", "init", 3)):
        model = models[label == "b"]
        curves = results[label][kind]
        assert list(curves) == model.ablations
        for i, pair in enumerate(model.ablations):
            numbers = 100 * np.arange(first, first + (kind == "init") + 1) + i
            assert curves[pair].shape == (len(numbers), 3, 4)
            np.testing.assert_array_equal(curves[pair][:, 0, 0], numbers)


def test_the_run_is_identified_by_each_model_its_inputs_and_its_files(tmp_path, monkeypatch):
    """Files count by name, size and time of change, wherever the folder is; random weights have
    none."""

    def make_folder(name):
        folder = tmp_path / name
        folder.mkdir()
        for index in range(3):
            path = folder / f"{index}.bin"
            path.write_bytes(bytes(index + 1))
            os.utime(path, ns=(10**18 + index, 10**18 + index))
        return folder

    def open_weights(source):
        paths = sorted(Path(source).iterdir())
        entries = [SimpleNamespace(path=path) for path in [*paths, *paths]]
        return SimpleNamespace(entries=dict(enumerate(entries)))

    monkeypatch.setattr(published_models, "open_weights", open_weights)

    def identify(folder, settings=(1, 1), tokens=(3, 3)):
        models = [
            Model("a", str(tmp_path / folder), {"size": settings[0]}, True, {"x": np.array([3])}),
            Model("b", "random:b", {"size": settings[1]}, False, {"x": np.array([tokens[0]])}),
            Model("c", "random:c", {"size": 1}, False, {"x": np.array([tokens[1]])}),
        ]
        return published_models.identity(models)

    for name in ("usual", "moved", "longer", "later"):
        make_folder(name)
    usual = identify("usual")
    assert identify("moved") == usual
    path = tmp_path / "longer" / "2.bin"
    path.write_bytes(bytes(9))
    os.utime(path, ns=(10**18 + 2, 10**18 + 2))
    os.utime(tmp_path / "later" / "1.bin", ns=(10**18, 10**18))
    for other in (identify("longer"), identify("later"), identify("usual", settings=(1, 2))):
        assert other["settings"] != usual["settings"] and other["inputs"] == usual["inputs"]
    for tokens in ((4, 3), (3, 4)):
        other = identify("usual", tokens=tokens)
        assert other["inputs"] != usual["inputs"] and other["settings"] == usual["settings"]


def test_names_of_the_hub_and_equal_names_make_labels(monkeypatch, tmp_path):
    """A name of the hub stands for its folder; a network without a table of positions cuts no
    text."""
    path = tmp_path / "ids.txt"
    path.write_text(" ".join(["1"] * 30) + "\n3 4\n")
    asked = []

    def hub_folder(name):
        asked.append(name)
        return GOLDEN / "xlnet"

    monkeypatch.setattr(published_models, "hub_folder", hub_folder)
    names = ("hf:someone/bert", GOLDEN / "bert", "hf:bert", f"random:{GOLDEN / 'bert'}")
    models = published_models.make_models(
        read_flags(f"--checkpoints={','.join(map(str, names))}", f"--token_ids={path}")
    )
    assert asked == ["hf:someone/bert", "hf:bert"]
    assert [model.label for model in models] == ["bert", "bert+", "bert++", "bert+++"]
    hub, folder = str(GOLDEN / "xlnet"), str(GOLDEN / "bert")
    assert [model.source for model in models] == [hub, folder, hub, f"random:{folder}"]
    assert [model.has_weights for model in models] == [True, True, True, False]
    assert [model.inputs["x"].shape for model in models] == [(2, 30), (2, 20), (2, 30), (2, 20)]


def test_texts_need_a_tokenizer_or_token_ids():
    folder = GOLDEN / "bert"
    with pytest.raises(ValueError, match=f"{folder} has none of .*; pass --token_ids"):
        published_models.make_models(read_flags(f"--checkpoints={folder}"))


def test_token_ids_are_cut_to_the_positions_and_refused_beyond_the_vocabulary(tmp_path):
    folder = GOLDEN / "bert"
    limits = json.loads((folder / "config.json").read_text())
    positions, vocab_size = limits["max_position_embeddings"], limits["vocab_size"]
    path = tmp_path / "ids.txt"
    path.write_text(" ".join(["1"] * (positions + 5)) + "\n3 4 5\n6 7\n")
    common = (f"--checkpoints={folder},{folder}/", f"--token_ids={path}", "--num_texts=2")
    first, second = published_models.make_models(read_flags(*common, "--max_tokens=1000"))
    assert [first.label, second.label] == ["bert", "bert+"]
    assert first.has_weights and first.source == str(folder)
    assert first.inputs["x"].shape == (2, positions)
    np.testing.assert_array_equal(first.inputs["x"][1], [3, 4, 5] + [0] * (positions - 3))
    np.testing.assert_array_equal(first.inputs["mask"].sum(axis=1), [positions, 3])
    (few,) = published_models.make_models(
        read_flags(f"--checkpoints={folder}", f"--token_ids={path}", "--max_tokens=2")
    )
    assert few.inputs["x"].tolist() == [[1, 1], [3, 4], [6, 7]]
    for text, reason in (
        (f"1 2\n{vocab_size} 1", f"token id {vocab_size} of text 1 is not below"),
        ("1 2\n5\n", "text 1 has fewer than 2 tokens"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=reason):
            published_models.make_models(read_flags(*common))


def test_texts_are_joined_and_cut_by_the_tokenizer_of_the_model(tmp_path, monkeypatch):
    path = tmp_path / "texts.txt"
    path.write_text("a bb\nccc d\ne ff g h\ni j\n")
    read = []

    def load_tokenizer(source, settings):
        read.append((source, settings["model_type"]))
        return lambda text: [len(word) for word in text.split()]

    monkeypatch.setattr(encoders, "load_tokenizer", load_tokenizer)
    common = (f"--checkpoints={GOLDEN / 'bert'}", f"--text={path}", "--max_tokens=3")
    (model,) = published_models.make_models(read_flags(*common, "--num_texts=2", "--join=false"))
    assert model.inputs["x"].tolist() == [[1, 2], [3, 1]]
    (model,) = published_models.make_models(read_flags(*common, "--num_texts=2", "--join"))
    assert model.inputs["x"].tolist() == [[1, 2, 1], [1, 2, 1]]  # the last token of each stays
    assert read == [(str(GOLDEN / "bert"), "bert")] * 2


@pytest.mark.parametrize("kind", ["pretrained", "init"])
def test_weights_are_streamed_in_chunks_of_the_flag(monkeypatch, kind):
    """A checkpoint is opened; an initialisation has a key of the run's seed and its own."""
    keys, asked = [], []
    model = make_model("a", True, "albert")

    def open_random(settings, key):
        keys.append(jax.random.key_data(key).tolist())
        return "source of init", settings

    def stream(source, inputs, groups, *, chunk):
        asked.append((source, inputs, [group.ablation for group in groups.values()], chunk))
        return {name: {"residuals": {"residual_ratio": i}} for i, name in enumerate(groups)}

    monkeypatch.setattr(published_models.pretrained, "open_checkpoint", lambda name: f"of {name}")
    monkeypatch.setattr(published_models.pretrained, "open_random", open_random)
    monkeypatch.setattr(published_models.pretrained, "stream", stream)
    options = read_flags("--chunk=3", "--seed=5")
    measured = published_models.measure_weights(options, published_models.Weights(model, kind, 7))
    specs = [published_models.pretrained.AblationSpec(*pair) for pair in model.ablations]
    source = "of a" if kind == "pretrained" else ("source of init", model.settings)
    assert asked == [(source, model.inputs, specs, 3)]
    key = jax.random.fold_in(jax.random.key(5), 7)
    assert keys == [jax.random.key_data(key).tolist()] * (kind == "init")
    names = [f"{ablation_name(pair)}/residual_ratio" for pair in model.ablations]
    assert measured == {name: i for i, name in enumerate(names)}
