"""Trained networks that experiments know, and the texts that they read."""

import contextlib
import importlib
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from experiments.trained import opened_networks
from experiments.verdicts import STATEMENTS
from tests.support.refusals import each_is_refused, is_refused


def test_all_trained_networks_are_registered():
    directions = STATEMENTS["frozen direction"].settings
    lengths = {*STATEMENTS["exact lengths"].settings}
    assert {*directions} == {*opened_networks.PACKAGES}
    assert lengths == {*STATEMENTS["frozen lengths"].settings}
    assert {*directions} - lengths == {"whisper-tiny-en"}


def test_texts_are_disjoint_pieces_or_the_last_of_a_file(tmp_path, monkeypatch):
    """Every word of the texts has a number of its own, so that overlaps show."""
    numbers = [str(i) for i in range(1, 1001)]
    monkeypatch.setattr(opened_networks.words, "default_text", lambda: " ".join(numbers))
    asked = []
    monkeypatch.setattr(
        opened_networks.encoders,
        "load_tokenizer",
        lambda *place: asked.append(place) or (lambda text: [int(w) for w in text.split()]),
    )
    monkeypatch.setattr(
        opened_networks.pretrained, "open_checkpoint", lambda _: SimpleNamespace(settings="of it")
    )
    pieces = opened_networks.load_network(tmp_path, None, num_texts=32, max_tokens=64).inputs["x"]
    assert pieces.shape == (15, 64) and len(np.unique(pieces)) == pieces.size
    assert asked == [(tmp_path, "of it")]
    longer = opened_networks.load_network(tmp_path, None, 32, 2000).inputs["x"]
    assert longer.tolist() == [[*map(int, numbers)]]  # a piece at least
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(" ".join(numbers[i : i + 3]) for i in range(0, 30, 3)))
    last_first = [28, 29, 30, 25, 26, 27]
    for are_last, expected in ((False, [1, 2, 3, 4, 5, 6]), (True, last_first)):
        network = opened_networks.load_network(tmp_path, str(path), 2, 64, are_last=are_last)
        assert network.inputs["x"].ravel().tolist() == expected
        wide = opened_networks.load_network(
            tmp_path, str(path), 2, 5, are_last=are_last, is_widened=True
        )
        assert wide.inputs["x"][:, :3].ravel().tolist() == expected
        assert wide.inputs["mask"].tolist() == [[True] * 3 + [False] * 2] * 2
    (tmp_path / "ids.txt").write_text(path.read_text())
    network = opened_networks.load_network(tmp_path, None, 2, 64, are_last=True)
    assert network.inputs["x"].ravel().tolist() == last_first


def make_options(place, **values):
    """Makes the flags of a run on the networks of a folder."""
    defaults = {"networks": [], "text": None, "last_texts": False, "max_tokens": 6, "seed": 3}
    defaults |= {"num_texts": 4, "num_few": 3, "flags": SimpleNamespace(grows=False)}
    return SimpleNamespace(**defaults | {"folder": place} | values)


def write_folders(folder, *names):
    for name in names:
        (folder / name).mkdir()
        (folder / name / "config.json").write_text("{}")


def test_networks_of_a_folder_are_those_of_the_packages_and_then_the_others(
    tmp_path, monkeypatch, capsys
):
    calls, (first, second, *_) = [], opened_networks.PACKAGES

    def load(folder, text, num_texts, max_tokens, **fields):
        calls.append((folder.name, text, num_texts, max_tokens, fields))
        if folder.name == "broken":
            raise ValueError("two\nlines")
        if folder.name == "bare":
            raise ModuleNotFoundError("no tokenizers")
        return folder.name

    monkeypatch.setattr(opened_networks, "load_network", load)
    write_folders(tmp_path, "zeta", "broken", second, first, "alpha", "bare")
    opened = opened_networks.load_networks(make_options(tmp_path), 5)
    assert opened == [first, second, "alpha", "zeta"]
    assert calls[0] == (first, None, 5, 6, {"are_last": False, "is_widened": False})
    skipped = capsys.readouterr().out.splitlines()
    assert sum("its package is" in line for line in skipped) == len(opened_networks.PACKAGES) - 2
    assert skipped[-2] == "skipped: bare: no tokenizers"
    assert skipped[-1].startswith("skipped: broken: two") and "lines" in skipped[-1]
    path = tmp_path / "text.txt"
    path.write_text("words")
    chosen = make_options(
        tmp_path,
        networks=["zeta", first],
        text=str(path),
        last_texts=True,
        flags=SimpleNamespace(grows=True),
    )
    assert opened_networks.load_networks(chosen, 2) == ["zeta", first]
    assert calls[-1] == (first, str(path), 2, 6, {"are_last": True, "is_widened": True})


def test_networks_that_are_not_there_are_refused(tmp_path, monkeypatch):
    def load(folder, *_, **__):
        raise OSError("damaged")

    monkeypatch.setattr(opened_networks, "load_network", load)
    write_folders(tmp_path, "beta", "alpha")

    def open_with(**values):
        return lambda: opened_networks.load_networks(make_options(tmp_path, **values), 2)

    each_is_refused(
        (open_with(flags=SimpleNamespace(grows=True)), "--until=decided needs --text"),
        (open_with(networks=["none"]), "--networks=none is not in .*, which has alpha, beta"),
    )
    each_is_refused(
        (open_with(folder=tmp_path / "nowhere"), "nowhere does not exist: python -m"),
        (open_with(text="absent.txt"), "--text=absent.txt does not exist"),
        (open_with(networks=["beta"]), "holds no checkpoint folder that can be read: damaged"),
        error=FileNotFoundError,
    )

    def load(folder, *_, **__):
        raise ValueError(f"{folder.name} is damaged")

    monkeypatch.setattr(opened_networks, "load_network", load)
    each_is_refused(
        (open_with(networks=["beta", "alpha"]), "can be read: beta is damaged"),  # the first reason
        error=FileNotFoundError,
    )
    package = next(iter(opened_networks.PACKAGES))
    each_is_refused(
        (open_with(networks=[package]), "that can be read: it is empty"), error=FileNotFoundError
    )


def test_the_first_texts_are_left_out_and_texts_are_identified():
    inputs = {"x": np.arange(6).reshape(3, 2), "mask": np.ones((3, 2), bool)}
    network = opened_networks.Network("a", None, inputs, None)
    left = opened_networks.skip_texts(network, 2)
    assert left.inputs["x"].tolist() == [[4, 5]] and left.inputs["mask"].shape == (1, 2)
    spectra = opened_networks.Network("b", None, {"x": np.ones((3, 2)), "mask": None}, None)
    assert opened_networks.skip_texts(spectra, 1).inputs["mask"] is None
    is_refused("a has no more than --skip_texts=3 texts", opened_networks.skip_texts, network, 3)
    identify = opened_networks.identify_texts
    longer = network._replace(inputs={"x": np.arange(8).reshape(4, 2)})
    assert identify([network, spectra]).keys() == {"a", "b"}
    assert identify([network]) != identify([longer]) and identify([network], 3) == identify(
        [longer], 3
    )
    assert identify([network], 2) != identify([network])


@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("name", ["run_lens", "run_lipschitz", "run_sinks", "run_trained"])
def test_a_run_that_grows_is_identified_by_the_texts_of_its_first_round(name, grows, monkeypatch):
    module = importlib.import_module(f"experiments.{name}")
    ids = np.arange(3 * module.PROTOCOL.rounds[0]).reshape(-1, 1)
    network = opened_networks.Network("a", None, {"x": ids, "mask": None}, None)
    shorter = network._replace(inputs={"x": ids[: module.PROTOCOL.rounds[0]], "mask": None})
    identified = []

    @contextlib.contextmanager
    def open_run(options, open_networks, identify):
        identified.extend(identify([one]) for one in (network, shorter))
        yield SimpleNamespace(measure=lambda *arguments, **options: (), finish=lambda: None)

    monkeypatch.setattr(module, "open_run", open_run)
    module.main(SimpleNamespace(grows=grows))
    first, second = identified
    assert (first == second) is grows


def test_small_networks_read_random_tokens_of_the_seed(monkeypatch, tmp_path):
    monkeypatch.setattr(
        opened_networks.pretrained, "open_random", lambda settings, key: (settings, key)
    )
    network = opened_networks.make_untrained("llama", make_options(tmp_path))
    settings, key = network.source
    assert settings["model_type"] == "llama" and settings["hidden_size"] == 8
    assert key == jax.random.key(3) and network.label == "llama" and network.mask_id == 0
    expected = np.random.default_rng(3).integers(1, 20, (4, 6))
    np.testing.assert_array_equal(network.inputs["x"], expected)
    assert network.inputs["mask"].all() and network.inputs["mask"].shape == (4, 6)
    assert network.folder is None and not network.is_initialised


def test_published_architectures_read_pieces_of_the_shipped_text(monkeypatch, tmp_path):
    config = SimpleNamespace(embedding=SimpleNamespace(vocab_size=50))
    opened = []

    def open_random(name, key):
        opened.append((name, key))
        return SimpleNamespace(config=config)

    monkeypatch.setattr(opened_networks.pretrained, "open_random", open_random)
    network = opened_networks.make_initialised("bert-base-cased", make_options(tmp_path))
    assert opened == [(f"{opened_networks.RANDOM}bert-base-cased", jax.random.key(3))]
    assert network.label == "bert-base-cased at init" and network.is_initialised
    ids, mask = network.inputs["x"], network.inputs["mask"]
    assert len(ids) == 3 and ids.shape == mask.shape and ids.shape[1] <= 6
    assert ids.max() < 50 and mask.any(axis=1).all() and network.mask_id is None


def test_spectra_are_cut_to_two_frames_a_token(tmp_path, monkeypatch):
    monkeypatch.setattr(
        opened_networks.pretrained, "open_checkpoint", lambda _: SimpleNamespace(settings={})
    )
    features = np.arange(5 * 4 * 20).reshape(5, 4, 20)
    np.save(tmp_path / "features.npy", features)
    network = opened_networks.load_network(tmp_path, None, 2, 3)
    np.testing.assert_array_equal(network.inputs["x"], features[:2, :, :6].transpose(0, 2, 1))
    assert network.inputs["mask"] is None and network.folder == tmp_path
    network = opened_networks.load_network(tmp_path, None, 2, 30, are_last=True)
    np.testing.assert_array_equal(network.inputs["x"], features[[4, 3]].transpose(0, 2, 1))


def test_texts_of_ids_have_one_width_where_more_may_follow(tmp_path, monkeypatch):
    monkeypatch.setattr(
        opened_networks.pretrained, "open_checkpoint", lambda _: SimpleNamespace(settings={})
    )
    monkeypatch.setattr(opened_networks.encoders, "load_tokenizer", lambda *_: None)
    is_refused(
        "has no tokenizer and no ids.txt", opened_networks.load_network, tmp_path, None, 2, 3
    )
    (tmp_path / "ids.txt").write_text("5 6\n7 8 9 4 3\n")
    (tmp_path / "vocab.txt").write_text("[PAD]\na\n[MASK]\nb")
    network = opened_networks.load_network(tmp_path, None, 1, 3)
    assert network.inputs["x"].tolist() == [[5, 6]] and network.mask_id == 2
    network = opened_networks.load_network(tmp_path, None, 1, 3, is_widened=True)
    assert network.inputs["x"].tolist() == [[5, 6, 0, 0, 0]]
    assert network.inputs["mask"].tolist() == [[True, True, False, False, False]]
