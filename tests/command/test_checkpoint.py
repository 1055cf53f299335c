"""Rows of `rank-collapse check` of made-up profiles: over texts or over layers."""

from types import SimpleNamespace

import numpy as np

from rank_collapse.command.checked import READ, WHOLE, Checked


def test_layers_of_one_token_are_counted_over_layers_and_over_texts():
    """Flags are [texts, layers]: three layers in two of three texts."""
    flags = np.array([[0, 1, 1, 0], [0, 0, 1, 1], [0, 0, 0, 0]], bool)
    position = np.array([[9, 5, 5, 9], [9, 9, 2, 2], [9, 9, 9, 9]])

    class Profile(dict):
        spiked = flags

    none = Profile(spike_token=position)
    none.spiked = np.zeros_like(flags)
    checked = SimpleNamespace(networks={WHOLE: Profile(spike_token=position), READ: none})
    (text,) = Checked.find_one_token_layers(checked).values()
    assert text == "1, 2, 3; largest entry at position 2, 5, in 2 of 3 texts"
