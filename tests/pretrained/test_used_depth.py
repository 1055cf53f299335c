"""The depth report: its definitions, its words, and the tokens and head that it reads."""

import re
import types

import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.pretrained import used_depth
from rank_collapse.pretrained.report import compute_length_laws
from rank_collapse.pretrained.used_depth import (
    DepthReport,
    DepthUsed,
    PathLength,
    _open_source,
    depth_used,
    describe_missing_head,
)
from tests.oracles import draws
from tests.support.closeness import assert_close
from tests.support.folders import GOLDEN
from tests.support.refusals import is_refused


def test_a_checkpoint_without_a_head_for_the_next_token_is_refused():
    source = rc.pretrained.open_checkpoint(GOLDEN / "bert")
    message = r"^the model \(bert\) has no head that predicts the next token.*masked tokens$"
    with pytest.raises(ValueError, match=message):
        rc.depth_report(source, [[5, 8, 13]])


def test_a_head_for_masked_tokens_is_named_where_there_is_one():
    for head, end in ((None, "needs one$"), (("a", "b"), "one; its head predicts masked tokens$")):
        family = types.SimpleNamespace(masked_head=head)
        source = types.SimpleNamespace(family=family, settings={"model_type": "vit"})
        text = describe_missing_head(source, "it")
        assert re.search(rf"^it \(vit\) has no head that predicts the next token.* {end}", text)


def test_what_is_read_of_a_network_in_memory():
    """Its own table of tokens, unless another is given; a network without tokens has none."""
    config = rc.transformer(2, 2, 8, embedding=rc.EmbeddingConfig(vocab_size=7, d_embed=8))
    params = draws.parameters(config)
    source, head = _open_source(params, config, None)
    assert source.config is config and head.table is params.embedding.tokens
    assert (head.bias, head.softcap, head.scale) == (None, None, 1.0)
    other = rc.pretrained.Unembedding(np.ones((7, 8)))
    assert _open_source(params, config, other)[1] is other
    opened = rc.pretrained.open_checkpoint(GOLDEN / "llama-grouped")
    assert _open_source(opened, None, other) == (opened, other)
    assert _open_source(opened, None, None)[1].table.shape == (40, 24)  # its own
    plain = rc.transformer(2, 2, 8)
    message = "the network has no unembedding: it is not a language model"
    is_refused(message, _open_source, draws.parameters(plain), plain, None)
    ids = [[3, 1], [4]]
    is_refused("text 1 has fewer than 2 tokens", rc.depth_report, params, ids, config)
    for nothing in ([], None):
        is_refused("ids hold no text", rc.depth_report, params, nothing, config)


def test_padded_texts_are_measured_over_the_tokens_that_exist(monkeypatch):
    """Every measure gets the mask; the lenses come in the order in which `LensPass` stacks them."""
    rng, (b, depth, n, d, heads) = np.random.default_rng(0), (2, 2, 4, 6, 2)
    config = rc.transformer(depth, heads, d, embedding=rc.EmbeddingConfig(vocab_size=7, d_embed=d))
    head = rc.pretrained.Unembedding(np.ones((7, d)))
    sums = types.SimpleNamespace(by_length=rng.normal(size=(b, depth + 1, n, d)))
    names = ("residual_ratio", "token_cosine", "effective_rank")
    by_layer = {name: rng.uniform(0.1, 1, (b, depth)) for name in ("error", "attention_share")}
    angles = {n: np.ones((b, depth + 1, depth + 1)) - np.eye(3) for n in ("angle", "last_angle")}
    outputs = {"output": rng.normal(size=(b, n, d)), "outputs": rng.normal(size=(b, depth, n, d))}
    measured = {
        "states": types.SimpleNamespace(measures={"spike_norm": rng.normal(size=(b, depth + 1))}),
        "read": {name: rng.normal(size=(b, depth + 1)) for name in names},
        "attention": {k: rng.normal(size=(b, depth, heads)) for k in ("first_column", "entropy")},
        "influence": by_layer | angles | {"attention_cosine": np.ones((b, depth))},
        "lens": rng.normal(size=(b, 2, depth + 1, n, d)),
        "sums": sums,
    }
    calls = []

    def note(name, result):
        def measure(*arguments):
            calls.append((name, *arguments))
            return result(*arguments)

        monkeypatch.setattr(used_depth, name, measure)

    def stream(source, inputs, groups, *, chunk, done):
        mask = inputs["mask"]
        calls.append(
            ("stream", inputs["x"].tolist(), mask if mask is None else mask.tolist(), chunk)
        )
        return {"": measured | {"removal": dict(outputs)}}

    length_measures = {n: rng.uniform(1, 2, (b, depth + 1)) for n in ("loss_up_to", "same_up_to")}
    monkeypatch.setattr(used_depth, "stream", stream)
    note("losses_by_length", lambda *_: length_measures | {"loss": np.ones(b)})
    note("mean_losses", lambda *_: (np.full((b, depth), 2.0), np.full((b, depth), 3.0)))
    kl = np.arange(3.0) * np.ones((b, 1))
    note("lens_measures", lambda _, states, *__: {"kl": kl + states[0, 0, 0, 0], "overlap": kl})
    ids, padded = [[3, 1, 4, 1], [5, 2]], [[3, 1, 4, 1], [5, 2, 0, 0]]
    mask = [[True] * 4, [True, True, False, False]]
    params = draws.parameters(config)
    report = rc.depth_report(params, ids, config, unembedding=head, chunk=3)

    assert calls[0] == ("stream", padded, mask, 3)
    by_name = {name: [call[1:] for call in calls if call[0] == name] for name, *_ in calls[1:]}
    ((table, got_sums, x, exists),) = by_name["losses_by_length"]
    assert (table, got_sums, x.tolist(), exists.tolist()) == (head, sums, padded, mask)
    ((table, states, x, exists),) = by_name["mean_losses"]
    assert table is head and states is outputs["outputs"]
    assert (x.tolist(), exists.tolist()) == (padded, mask)
    for index, (table, states, output, exists) in enumerate(by_name["lens_measures"]):
        np.testing.assert_array_equal(states, measured["lens"][:, index])
        assert table is head and output is outputs["output"] and exists.tolist() == mask

    measures = report.measures
    for index, name in enumerate(("lens_kl", "frozen_kl")):
        assert_close(measures[name], kl + measured["lens"][0, index, 0, 0, 0])
    for text, length in enumerate((4, 2)):
        for k in range(depth + 1):
            size = np.sqrt((sums.by_length[text, k, :length] ** 2).sum())
            assert measures["path_size"][text, k] == pytest.approx(size)
    for name, values in measured["attention"].items():
        assert_close(measures[name], values.sum(axis=2) / heads)
    for name in names:
        np.testing.assert_array_equal(measures[f"read_{name}"], measured["read"][name])
    assert_close(measures["loss_without"], np.full((b, depth), 2.0))
    assert not {"output", "outputs"} & measures.keys()
    laws = compute_length_laws(heads, by_layer["attention_share"], measures["path_size"])
    assert report.length_laws.keys() == laws.keys()
    for name, law in laws.items():
        assert_close(report.length_laws[name], law)
    calls.clear()
    same = rc.depth_report(
        params, np.array(padded), config, mask=np.array(mask), unembedding=head, chunk=3
    )
    assert calls[0] == ("stream", padded, mask, 3) and str(same) == str(report)
    calls.clear()
    rc.depth_report(params, ids[0], config, unembedding=head)
    assert calls[0] == ("stream", [ids[0]], None, 8)  # one text, all of whose tokens exist
    assert calls[-1][-1].tolist() == [[True] * 4]


def test_a_report_in_words_says_where_its_definitions_disagree(monkeypatch):
    def make_report(layers):
        used = {
            name: DepthUsed(number, f"what {name} is", "someone")
            for name, number in zip(("one", "second"), layers, strict=True)
        }
        lengths = {"paths, loss": PathLength(2, "least k", "someone else")}
        lengths["token"] = PathLength(11, "least of another", "a third")
        measures = {"error": np.array([[0.5, 1.0], [0.25, 0.0]]), "angle": np.zeros((2, 3, 3))}
        laws = {"counted": np.array([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])}
        laws["measured"] = np.array([[1.0, 0.0, 0.0], [0.0, 0.5, 0.5]])
        return DepthReport(measures, used, lengths, laws)

    assert str(make_report((2, 1))).split("\n") == [
        "depth used, of 2 layers:",
        "  one             2  what one is (someone)",
        "  second          1  what second is (someone)",
        "heads on a path, of 2 at most:",
        "  paths, loss     2  least k (someone else)",
        "  token          11  least of another (a third)",
        "  mean length: counted 1.5, measured 0.8",
        "The definitions disagree: 1 by “second”, 2 by “one”.",
    ]
    drawn = []
    monkeypatch.setattr("rank_collapse.report.depth.depth_figure", lambda *a: drawn.append(a))
    report = make_report((2, 1))
    report.figure()
    assert drawn == [(report.measures, report.length_laws, 2)]  # that of the loss
    single = str(make_report((None, 1)))
    assert "  one          none  what one is" in single and "disagree" not in single
    columns = make_report((1, 1)).by_layer()
    assert list(columns) == ["error"]
    np.testing.assert_array_equal(columns["error"], [np.nan, 0.375, 0.5])


def test_each_definition_has_a_measure_of_its_own():
    """Twelve layers; every measure settles at another layer, so that no definition reads a
    measure of another. The threshold is passed by the mean of two texts, and not by each."""

    def settles(at, before, after, length=13):
        """[2, length], whose means change at an index."""
        mean = np.where(np.arange(length) < at, before, after)
        return np.stack([0.5 * mean, 1.5 * mean])

    def turns(at):
        """[2, 13, 13] of states that keep their direction from a layer on."""
        place = np.minimum(np.arange(13), at)
        angle = 0.11 * np.abs(np.subtract.outer(place, place))  # one layer turns too far
        return np.stack([angle, angle])

    measures = {
        "error": np.ones((2, 12)),
        "lens_kl": settles(1, 3.0, 0.29),  # below 0.1 of the largest
        "lens_overlap": settles(2, 0.2, 0.21),  # above 0.2
        "attention_cosine": settles(3, -0.5, 0.9, 12),
        "mlp_cosine": settles(5, -0.5, 0.1, 12),  # with −0.5 it is above 0 from the fourth on
        "layer_cosine": settles(3, -0.5, 0.0, 12),
        "loss_without": settles(4, 2.03, 2.01, 12),  # within 0.01 of 2
        "last_angle": turns(5),
        "angle": turns(6),
        "loss_up_to": settles(7, 1.97, 1.99),
        "same_up_to": settles(8, 0.98, 0.99),
    }
    used, lengths = depth_used(measures, np.array([1.0, 3.0]))
    for name, words in {  # the thresholds of each definition, and whose it is
        "lens, KL": ("KL below 0.1 of", "Hu et al. 2025"),
        "lens, top 5": ("overlap above 0.2$", "Hu et al. 2025"),
        "cosine": ("opposing the stream to amplifying it", "Hu et al. 2025"),
        "single layers": ("without which the loss changes by over 1%$", "^Men et al. 2024"),
        "blocks, last token": ("last token by at most 0.1 π$", "^Gromov et al. 2024"),
        "blocks": ("mean over tokens", "Gromov et al. 2024"),
        "paths, loss": ("least k .* loss within 1%$", "Dong et al. 2021"),
        "paths, token": ("least k .* 99% of the next tokens$", "Dong et al. 2021"),
    }.items():
        for text, pattern in zip((used | lengths)[name][1:], words, strict=True):
            assert re.search(pattern, text), name
    assert {name: one[0] for name, one in (used | lengths).items()} == {
        "lens, KL": 1,
        "lens, top 5": 2,
        "cosine": 3,
        "single layers": 4,
        "blocks, last token": 5,
        "blocks": 6,
        "paths, loss": 7,
        "paths, token": 8,
    }
    # The last layer is none that the lens reaches; a stream that branches never oppose has no turn;
    # of several turns the last counts, and a layer without an MLP has two cosines.
    late = {"lens_kl": settles(11, 3.0, 0.1), "lens_overlap": settles(11, 0.1, 0.9)}
    used, _ = depth_used(measures | late, np.array([2.0]))
    assert (used["lens, KL"].layers, used["lens, top 5"].layers) == (None, None)
    always = {f"{kind}_cosine": np.ones((2, 12)) for kind in ("attention", "mlp", "layer")}
    assert depth_used(measures | always, np.array([2.0]))[0]["cosine"].layers is None
    twice = {"attention_cosine": np.where(np.isin(np.arange(12), [0, 8]), -1.0, 0.2)[None]}
    attention_alone = {n: v for n, v in measures.items() if not n.endswith("_cosine")} | twice
    assert depth_used(attention_alone, np.array([2.0]))[0]["cosine"].layers == 9
