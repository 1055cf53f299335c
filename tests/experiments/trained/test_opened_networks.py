"""Trained networks that experiments know, and the texts that they read."""

from types import SimpleNamespace

import numpy as np
import pytest

from experiments.trained import opened_networks
from experiments.verdicts import STATEMENTS


def test_all_trained_networks_are_registered():
    directions = STATEMENTS["frozen direction"].settings
    lengths = {*STATEMENTS["exact lengths"].settings}
    assert {*directions} == {*opened_networks.PACKAGES}
    assert lengths == {*STATEMENTS["frozen lengths"].settings}
    assert {*directions} - lengths == {"whisper-tiny-en"}


@pytest.mark.full
def test_texts_are_disjoint_pieces_or_the_last_of_a_file(tmp_path, monkeypatch):
    """Every word of the texts has a number of its own, so that overlaps show."""
    numbers = [str(i) for i in range(1, 1001)]
    monkeypatch.setattr(opened_networks.words, "default_text", lambda: " ".join(numbers))
    monkeypatch.setattr(
        opened_networks.encoders,
        "load_tokenizer",
        lambda *_: lambda text: [int(word) for word in text.split()],
    )
    monkeypatch.setattr(
        opened_networks.pretrained, "open_checkpoint", lambda _: SimpleNamespace(settings={})
    )
    pieces = opened_networks.load_network(tmp_path, None, num_texts=32, max_tokens=64).inputs["x"]
    assert pieces.shape == (15, 64) and len(np.unique(pieces)) == pieces.size
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(" ".join(numbers[i : i + 3]) for i in range(0, 30, 3)))
    last_first = [28, 29, 30, 25, 26, 27]
    for are_last, expected in ((False, [1, 2, 3, 4, 5, 6]), (True, last_first)):
        network = opened_networks.load_network(tmp_path, str(path), 2, 64, are_last=are_last)
        assert network.inputs["x"].ravel().tolist() == expected
    (tmp_path / "ids.txt").write_text(path.read_text())
    network = opened_networks.load_network(tmp_path, None, 2, 64, are_last=True)
    assert network.inputs["x"].ravel().tolist() == last_first
