"""How long the paths of a checkpoint are, by three weightings, against the library's own sums."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.measures.profiles import Profile
from rank_collapse.pretrained import report as checkpoint_measures
from rank_collapse.pretrained.report import (
    BY_NORM,
    COUNTED,
    ROLLOUT,
    CheckpointReport,
    compute_length_laws,
    mean_lengths,
    tabulate_lengths,
)
from rank_collapse.report.path_lengths import path_length_figure
from tests.oracles import draws
from tests.support.closeness import assert_close


def test_three_weightings_of_two_layers_by_hand():
    """H = 1: counted 1/4, 1/2, 1/4; shares 1/2, 0: coins; sums of norms 1, 2, 1."""
    laws = compute_length_laws(1, np.array([[0.5, 0.0]]), np.array([[1.0, 2.0, 1.0]]))
    assert_close(laws[COUNTED], [[0.25, 0.5, 0.25]])
    assert_close(laws[ROLLOUT], [[0.5, 0.5, 0.0]])
    assert_close(laws[BY_NORM], [[0.25, 0.5, 0.25]])
    assert mean_lengths(laws) == pytest.approx({COUNTED: 1.0, ROLLOUT: 0.5, BY_NORM: 1.0})
    assert [row["99 % at most"] for row in tabulate_lengths(laws)] == [2, 1, 2]
    assert [row["median"] for row in tabulate_lengths(laws)] == [1, 0, 1]  # half of them and more
    (ax,) = path_length_figure(laws).axes
    assert [line.get_label() for line in ax.lines] == [COUNTED, ROLLOUT, BY_NORM]


def test_a_collapse_begins_where_the_mean_of_the_decisive_ratios_is_below_the_alarm():
    """Texts are averaged; a ratio that a few tokens make gives way to that of the others."""
    full = np.array([[1.0, 0.5, 0.004, 0.004], [1.0, 0.5, 0.018, 0.001]])
    alone = np.array([[1.0, 0.03, 0.02, 0.02], [1.0, 0.01, 0.02, 0.02]])
    profiles = {
        "Transformer": Profile({"residual_ratio": full, "bulk_ratio": full}),
        "SAN": Profile({"residual_ratio": alone, "bulk_ratio": np.array([1, 0.1, 0.6, 1]) * alone}),
    }
    report = CheckpointReport(profiles, None, {}, np.ones((2, 4)), np.ones((2, 3)), [])
    assert report.collapsed_at() == 3  # 0.011 on average in the layer before
    decisive = alone * np.array([1, 0.1, 1, 1])
    np.testing.assert_array_equal(report.decisive_ratios("SAN"), decisive)
    np.testing.assert_array_equal(report.decisive_ratios(), full)
    assert report.collapsed_at("SAN") == 1
    profiles["SAN"] = Profile({"residual_ratio": alone, "bulk_ratio": alone})
    assert report.collapsed_at("SAN") is None
    assert_close(report.length_laws(3)[BY_NORM], np.full((2, 4), 0.25))


def test_laws_that_a_text_lacks_are_absent_from_the_table():
    laws = compute_length_laws(2, np.array([[0.5], [2.0]]), np.array([[1.0, 1.0], [0.0, 0.0]]))
    assert_close(laws[ROLLOUT], [[0.5, 0.5], [0.0, 1.0]])  # shares are at most 1
    assert np.isnan(laws[BY_NORM][1]).all()
    counted, _, by_norm = tabulate_lengths(laws)
    assert counted == {
        "paths weighted": COUNTED,
        "mean length": pytest.approx(2 / 3),
        "median": 1,
        "99 % at most": 1,
    }
    assert by_norm.pop("paths weighted") == BY_NORM and set(by_norm.values()) == {None}


@pytest.mark.full
def test_a_batch_without_a_mask_is_one_whose_tokens_all_exist():
    config = rc.transformer(2, 2, 8)
    params, x = draws.parameters(config), np.asarray(draws.normal(2, 5, 8))
    source = rc.pretrained.InMemory(params, config)
    done = []
    options = {"chunk": 1, "done": lambda state: done.append((state.layers, len(state.hidden)))}
    plain = rc.pretrained.checkpoint_report(source, {"x": x}, **options)
    none = rc.pretrained.checkpoint_report(source, {"x": x, "mask": None})
    assert done == [(1, 4), (2, 4)]  # after each layer: the full model and SAN, two texts of each
    for text in range(2):
        by_length = rc.path_contributions(params, x[text], config).by_length
        norms = [rc.composite_norm(part) for part in by_length]
        for report in (plain, none):
            np.testing.assert_allclose(report.path_size[text], norms, rtol=1e-4)
    assert len(plain.spikes) == 2


@pytest.mark.full
def test_a_checkpoint_has_the_shares_and_spikes_of_each_text():
    settings = {"model_type": "gpt2", "n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 60}
    source = rc.pretrained.open_random(settings, jax.random.key(0))
    config, params = rc.pretrained.random_like(settings, jax.random.key(0))
    ids = np.array([[5, 8, 13, 7, 21, 0], [3, 1, 4, 9, 15, 16]])
    mask = np.arange(6) < np.array([[5], [6]])
    report = rc.pretrained.checkpoint_report(source, {"x": ids, "mask": mask})
    spikes = {f"spike_{name}" for name in ("entry", "norm", "share", "token", "feature")}
    names = spikes | {"residual_ratio", "token_cosine", "effective_rank", "residual_spike"}
    for profile in (*report.states.values(), report.read):
        assert profile.measures.keys() == names | {"bulk_ratio"}
    for text in range(2):
        trace = rc.apply(params, ids[text], config, mask=mask[text])
        share = rc.branch_shares(trace, params, config, mask=mask[text]).attention
        np.testing.assert_allclose(report.attention_share[text], share, rtol=1e-4)
        listed = [spike[:3] for spike in rc.spikes(trace, mask=mask[text])]
        assert [spike[:3] for spike in report.spikes[text]] == listed


@pytest.mark.full
def test_spikes_of_a_report_are_of_tokens_that_exist():
    config = rc.transformer(1, 1, 4, norm_placement="pre")
    params, x = draws.parameters(config), np.asarray(draws.normal(1, 5, 4)).astype(np.float32)
    x[0, 1, 3], x[0, 4, 2] = 1e5, -1e6
    inputs = {"x": x, "mask": np.arange(5)[None] < 4}
    report = rc.pretrained.checkpoint_report(rc.pretrained.InMemory(params, config), inputs)
    assert {spike[1:3] for spike in report.spikes[0]} == {(1, 3)}
    norm = jax.tree.map(np.asarray, params.layers.attention_norm)  # what attention reads
    centred = x[0, :4] - x[0, :4].mean(axis=1, keepdims=True)
    reads = centred / centred.std(axis=1, keepdims=True) * norm.gain[0] + norm.bias[0]
    ratio = report.read["residual_ratio"][0, 0]
    np.testing.assert_allclose(ratio, rc.residual_ratio(reads), rtol=1e-4)


def test_sums_of_paths_are_measured_without_padding(monkeypatch):
    """√(‖C‖_1 ‖C‖_∞) of the rows that exist, where padding comes first in one text."""
    rng = np.random.default_rng(0)
    sums, mask = rng.normal(size=(2, 3, 4, 2)), np.array([[False, False, True, True], [True] * 4])
    full = dict.fromkeys(("states", "read", "attention", "share")) | {"hidden": [None, None]}
    full["sums"] = SimpleNamespace(by_length=sums)

    def stream(source, inputs, groups, **options):
        ablations = {name: group.ablation for name, group in groups.items()}
        assert ablations == {n: rc.pretrained.AblationSpec(n) for n in ("Transformer", "SAN")}
        assert groups["SAN"].passes == groups["Transformer"].passes[:1]
        return {"Transformer": full, "SAN": full}

    monkeypatch.setattr(checkpoint_measures, "stream", stream)
    monkeypatch.setattr(checkpoint_measures, "spikes", lambda states, mask: mask.tolist())
    report = checkpoint_measures.checkpoint_report(None, {"x": None, "mask": mask})
    sizes = np.abs(sums * mask[:, None, :, None])
    expected = np.sqrt(sizes.sum(axis=2).max(axis=-1) * sizes.sum(axis=3).max(axis=-1))
    assert_close(report.path_size, expected, rtol=1e-6)
    assert report.spikes == mask.tolist()
