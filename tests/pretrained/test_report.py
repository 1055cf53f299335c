"""How long the paths of a checkpoint are, by three weightings, against the library's own sums."""

import jax
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.pretrained.report import (
    BY_NORM,
    COUNTED,
    ROLLOUT,
    compute_length_laws,
    mean_lengths,
    tabulate_lengths,
)
from rank_collapse.report.path_lengths import path_length_figure
from tests.support.closeness import assert_close


def test_three_weightings_of_two_layers_by_hand():
    """H = 1: counted 1/4, 1/2, 1/4; shares 1/2, 0: coins; sums of norms 1, 2, 1."""
    laws = compute_length_laws(1, np.array([[0.5, 0.0]]), np.array([[1.0, 2.0, 1.0]]))
    assert_close(laws[COUNTED], [[0.25, 0.5, 0.25]])
    assert_close(laws[ROLLOUT], [[0.5, 0.5, 0.0]])
    assert_close(laws[BY_NORM], [[0.25, 0.5, 0.25]])
    assert mean_lengths(laws) == pytest.approx({COUNTED: 1.0, ROLLOUT: 0.5, BY_NORM: 1.0})
    assert [row["99 % at most"] for row in tabulate_lengths(laws)] == [2, 1, 2]
    (ax,) = path_length_figure(laws).axes
    assert [line.get_label() for line in ax.lines] == [COUNTED, ROLLOUT, BY_NORM]


def test_a_checkpoint_has_the_shares_and_spikes_of_each_text():
    settings = {"model_type": "gpt2", "n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 60}
    source = rc.pretrained.open_random(settings, jax.random.key(0))
    config, params = rc.pretrained.random_like(settings, jax.random.key(0))
    ids = np.array([[5, 8, 13, 7, 21, 0], [3, 1, 4, 9, 15, 16]])
    mask = np.arange(6) < np.array([[5], [6]])
    report = rc.pretrained.checkpoint_report(source, {"x": ids, "mask": mask})
    for text in range(2):
        trace = rc.apply(params, ids[text], config, mask=mask[text])
        share = rc.branch_shares(trace, params, config, mask=mask[text]).attention
        np.testing.assert_allclose(report.attention_share[text], share, rtol=1e-4)
        listed = [spike[:3] for spike in rc.spikes(trace, mask=mask[text])]
        assert [spike[:3] for spike in report.spikes[text]] == listed
