"""Measures of texts in one network, beside NumPy: tasks, losses, and what is a mean over copies."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.trained import text_measures
from rank_collapse import pretrained
from tests.support.closeness import assert_close
from tests.support.refusals import is_refused


def make_texts():
    """Makes three texts of eight, five and four tokens."""
    lengths = np.array([8, 5, 4])
    mask = np.arange(8) < lengths[:, None]
    return np.where(mask, np.arange(1, 25).reshape(3, 8), 0), mask


def test_masked_tokens_are_of_the_text_and_others_in_each_copy():
    ids, mask = make_texts()
    masked, chosen = text_measures.masked_copies(ids, mask, 99, 3, share=0.4, seed=5)
    assert masked.shape == chosen.shape == (9, 8)
    repeated, lengths = np.repeat(ids, 3, axis=0), np.repeat([8, 5, 4], 3)
    np.testing.assert_array_equal(masked, np.where(chosen, 99, repeated))
    # round(0.4 · (n − 2)) of the inner tokens, at least one
    assert chosen.sum(axis=1).tolist() == [2, 2, 2, 1, 1, 1, 1, 1, 1]
    for row, length in zip(chosen, lengths, strict=True):
        assert not row[0] and not row[length - 1 :].any()
    for text in chosen.reshape(3, 3, 8)[:2]:  # six and three places: no token twice
        assert text.sum(axis=0).max() == 1
    assert chosen[6:].sum() == 3  # two places of three copies: the first of them again
    assert (chosen[6] != chosen[7]).any() and (chosen[6] == chosen[8]).all()
    _, rounded = text_measures.masked_copies(ids, mask, 99, 1, share=0.3)
    assert rounded.sum(axis=1).tolist() == [2, 1, 1]  # 1.8, 0.9 and 0.6 of the inner tokens
    same, _ = text_measures.masked_copies(ids[:1], mask[:1], 99, 3, share=0.4, seed=5)
    np.testing.assert_array_equal(same, masked[:3])  # whatever texts follow
    other, _ = text_measures.masked_copies(ids, mask, 99, 3, share=0.4, seed=6)
    assert (other != masked).any()
    _, usual = text_measures.masked_copies(np.ones((1, 42), int), np.ones((1, 42), bool), 9, 1)
    assert usual.sum() == 6  # 15 % of 40


def test_a_text_without_inner_tokens_is_named():
    """Two tokens close a text in most models, and one is both."""
    for count, counted in enumerate(("0 tokens", "1 token", "2 tokens")):
        mask = np.arange(4) < np.array([[4], [count]])
        message = f"text 1 has {counted}: fewer than 3 have none to mask"
        is_refused(message, text_measures.masked_copies, np.ones((2, 4), int), mask, 9, 2)
    _, chosen = text_measures.masked_copies(np.ones((1, 4), int), np.arange(4)[None] < 3, 9, 2)
    assert chosen.tolist() == [[False, True, False, False]] * 2


def make_source(**fields):
    defaults = {"is_causal_lm": False, "masked_head": None, "unembedding": "E"}
    return SimpleNamespace(**defaults | fields)


def test_a_model_predicts_what_it_was_trained_for():
    ids, mask = make_texts()
    inputs = {"x": ids, "mask": mask}
    causal = text_measures.make_task(make_source(is_causal_lm=True), inputs, 99, 4)
    targets, chosen = pretrained.targets_of(ids, mask)
    assert causal.copies == 1 and causal.inputs == inputs
    np.testing.assert_array_equal(causal.targets, targets)
    np.testing.assert_array_equal(causal.chosen, chosen)
    masked = text_measures.make_task(make_source(masked_head="head"), inputs, 99, 2)
    expected, chosen = text_measures.masked_copies(ids, mask, 99, 2)
    assert masked.copies == 2
    np.testing.assert_array_equal(masked.inputs["x"], expected)
    np.testing.assert_array_equal(masked.inputs["mask"], np.repeat(mask, 2, axis=0))
    np.testing.assert_array_equal(masked.targets, np.repeat(ids, 2, axis=0))
    np.testing.assert_array_equal(masked.chosen, chosen)
    assert text_measures.make_task(make_source(), inputs, 99, 2) is None
    assert text_measures.make_task(make_source(masked_head="head"), inputs, None, 2) is None
    later = masked.leave_out(1)
    assert later.copies == 2 and len(later.targets) == len(later.chosen) == 4
    np.testing.assert_array_equal(later.inputs["x"], expected[2:])
    np.testing.assert_array_equal(later.inputs["mask"], np.repeat(mask, 2, axis=0)[2:])
    np.testing.assert_array_equal(later.chosen, chosen[2:])
    np.testing.assert_array_equal(masked.leave_out(2).targets, np.repeat(ids, 2, axis=0)[4:])


@pytest.mark.parametrize("has_head", [False, True])
def test_losses_are_means_over_copies_through_the_network_s_own_head(has_head, monkeypatch):
    def token_losses(unembedding, states, targets, chosen):
        assert unembedding == ("H" if has_head else "E") and targets == "t" and chosen == "c"
        return states[..., 0], 10 * states[..., 1]

    monkeypatch.setattr(text_measures.pretrained, "token_losses", token_losses)
    head = SimpleNamespace(unembedding="H", read=lambda states: states + 100) if has_head else None
    task = text_measures.Task({}, "t", "c", 2)
    states = np.arange(24.0).reshape(4, 3, 2)  # two copies of two texts, three states
    loss, right = task.token_losses(make_source(masked_head=head), states)
    read = states + 100 * has_head
    assert_close(loss, (read[[0, 2], :, 0] + read[[1, 3], :, 0]) / 2)
    assert_close(right, 10 * (read[[0, 2], :, 1] + read[[1, 3], :, 1]) / 2)


def test_ablations_are_those_of_the_text_and_of_an_albert_the_published_ones_too():
    curves = text_measures.list_curves("llama")
    assert {name: (spec.name, spec.reading) for name, spec in curves.items()} == {
        "alone": ("SAN", "text"),
        "mlps": ("SAN+MLP", "text"),
        "skips": ("SAN+skip", "text"),
        "whole": ("Transformer", "text"),
    }
    albert = text_measures.list_curves("albert")
    further = {name: (albert[name].name, albert[name].reading) for name in {*albert} - {*curves}}
    assert further == {
        "alone, as published": ("SAN", "published"),
        "mlps, as published": ("SAN+MLP", "published"),
        "skips, as published": ("SAN+skip", "published"),
    }


def test_sizes_of_states_are_of_the_tokens_that_exist():
    x = np.random.default_rng(0).normal(size=(4, 3))
    keep = np.array([True, False, True, True])
    norm = np.sqrt(np.abs(x[keep]).sum(axis=0).max() * np.abs(x[keep]).sum(axis=1).max())
    x[1] = 50
    largest, size = text_measures.LargestEntry(), text_measures.LogNorm()
    assert_close(largest.measure(jnp.asarray(x), jnp.asarray(keep)), np.abs(x[keep]).max())
    assert_close(largest.measure(jnp.asarray(x)), 50.0)
    assert_close(size.measure(jnp.asarray(x), jnp.asarray(keep)), np.log10(norm), rtol=1e-5)


def test_attention_to_the_first_token_is_of_the_queries_that_exist():
    weights = np.random.default_rng(1).dirichlet(np.ones(4), (2, 4))  # [h, n, m]
    mask = np.array([False, True, True, True])
    weights = weights * mask / (weights * mask).sum(axis=-1, keepdims=True)
    inputs = SimpleNamespace(token_mask=jnp.asarray(mask), existing_tokens=jnp.asarray(mask))
    values = SimpleNamespace(trace=SimpleNamespace(attention=jnp.asarray(weights)))
    measured = text_measures.measure_sinks(SimpleNamespace(inputs=inputs), None, values)
    columns = weights[:, mask].mean(axis=1)
    assert_close(measured["largest_column"], columns.max(axis=-1), rtol=1e-5)
    assert_close(measured["first_column"], columns[:, 1], rtol=1e-5)  # the first that exists


def stream_of(answers):
    """Makes `pretrained.stream` that answers each group by name."""

    def stream(source, inputs, groups, *, chunk):
        assert chunk == 5
        return {name: answers(name, group) for name, group in groups.items()}

    return stream


def test_residuals_without_skips_are_logarithms_throughout(monkeypatch):
    def answer(name, group):
        passes = {label for label, _ in group.passes}
        if name.startswith(("alone", "mlps")):
            assert passes == {"log", "norm"}
            profile = np.array([[-1.0, -300]]) - len(name)
            return {"log": SimpleNamespace(profile=profile), "norm": np.array([[2.0, 1.0]])}
        assert passes == {"ratio"}
        return {"ratio": {"residual_ratio": np.array([[1.0, 10.0 ** -len(name)]])}}

    monkeypatch.setattr(text_measures.pretrained, "stream", stream_of(answer))
    source = SimpleNamespace(settings={"model_type": "albert"})
    results = text_measures.measure_residuals(source, {}, 5)
    assert len(results) == 7 + 4
    for name in ("alone", "mlps", "alone, as published", "mlps, as published"):
        assert_close(results[f"log10_residual/{name}"], [[-1.0 - len(name), -300 - len(name)]])
        assert_close(results[f"log10_ratio/{name}"], [[-3.0 - len(name), -301 - len(name)]])
    for name in ("skips", "whole", "skips, as published"):
        assert_close(results[f"log10_ratio/{name}"], [[0.0, -len(name)]])
        assert f"log10_residual/{name}" not in results


def test_states_are_named_by_what_they_measure(monkeypatch):
    def answer(name, group):
        assert name == "whole" and dict(group.passes)["chains"].num_paths == 7
        assert dict(group.passes)["spikes"].measures == text_measures.SPIKES
        return {
            "spikes": {spike: i for i, spike in enumerate(text_measures.SPIKES)},
            "largest": 11,
            "sinks": {"first_column": 12, "largest_column": 13},
            "chains": 14,
        }

    monkeypatch.setattr(text_measures.pretrained, "stream", stream_of(answer))
    results = text_measures.measure_states(None, {}, 5, 7)
    assert results == {f"spikes/{n}": i for i, n in enumerate(text_measures.SPIKES)} | {
        "spikes/largest": 11,
        "sinks/first_column": 12,
        "sinks/largest_column": 13,
        "chains/residual": 14,
    }


def test_losses_by_path_length_are_of_the_frozen_and_of_the_recomputed_network(monkeypatch):
    """Two copies of two texts, three layers, lengths 0, 3 and one above the depth."""
    rng = np.random.default_rng(3)
    whole = rng.normal(size=(4, 3, 2))
    up_to, by_length = rng.normal(size=(4, 4, 3, 2)), rng.normal(size=(4, 4, 3, 2))
    recomputed = {f"up to {k}": rng.normal(size=(4, 3, 2)) for k in (0, 3)}
    share, sizes = rng.random((4, 3)), (rng.normal(size=(4, 4)), rng.normal(size=(4, 4)))
    mask = rng.random((4, 3)) < 0.7

    def answer(name, group):
        assert [label for label, _ in group.passes] == ["sums", "share", *recomputed]
        sums = SimpleNamespace(output=whole, by_length=by_length, up_to=lambda: up_to)
        return {"sums": sums, "share": share} | recomputed

    def measured_sizes(states, *, mask):
        index = jnp.argmax(jnp.all(by_length == states[None], axis=(1, 2, 3)))
        return jnp.asarray(sizes[0])[index], jnp.asarray(sizes[1])[index] + jnp.sum(mask)

    monkeypatch.setattr(text_measures.pretrained, "stream", stream_of(answer))
    monkeypatch.setattr(text_measures, "measured_sizes", measured_sizes)
    monkeypatch.setattr(
        text_measures.pretrained, "token_losses", lambda *a: (a[1][:, :, 0, 0], a[1][:, :, 1, 1])
    )
    by_length = jnp.asarray(by_length)
    source = make_source(config=SimpleNamespace(depth=3))
    task = text_measures.Task({"mask": mask}, None, None, 2)
    results = text_measures.measure_paths(source, task, [0, 3, 5], 5)

    def mean(values):
        return (values[0::2] + values[1::2]) / 2

    for name, (i, j) in {"loss": (0, 0), "right": (1, 1)}.items():
        assert_close(results[f"paths/{name}"], mean(whole[:, i, j]), rtol=1e-5)
        assert_close(results[f"paths/{name}_frozen"], mean(up_to[:, [0, 3], i, j]), rtol=1e-5)
        states = np.stack([recomputed[f"up to {k}"][:, i, j] for k in (0, 3)], axis=1)
        assert_close(results[f"paths/{name}_recomputed"], mean(states), rtol=1e-5)
    assert_close(results["paths/lengths"], [[0, 3], [0, 3]])
    assert_close(results["paths/attention_share"], mean(share))
    assert_close(results["paths/path_size"], mean(10 ** sizes[0]), rtol=1e-5)
    expected = mean(sizes[1] + mask.sum(axis=1, keepdims=True))
    assert_close(results["paths/log10_residual"], expected, rtol=1e-5)


def test_the_lemma_has_a_margin_for_rounding_and_reads_the_input_of_attention(monkeypatch):
    """What exceeds it by less than rounding is no case against it."""
    asked = []
    monkeypatch.setattr(
        text_measures.bounds, "lemma_excess", lambda *read: asked.append(read) or np.array([0.5, 0])
    )
    layer = SimpleNamespace(params=SimpleNamespace(attention="attention"))
    values = SimpleNamespace(sublayers={"attention": SimpleNamespace(branch_input="read")})
    measured = text_measures.measure_lemma(layer, "state", values)
    assert asked == [("attention", "read")]
    assert_close(measured, [0.5 - 1e-5, -1e-5], rtol=1e-12)


def test_bounds_are_measured_where_there_is_one_w_qk(monkeypatch):
    def answer(name, group):
        assert group.ablation.name == {"whole": "Transformer", "alone": "SAN"}[name]
        place = len(name)
        report = SimpleNamespace(
            admissible=place,
            head=SimpleNamespace(tightness=place + 10),
            stack=SimpleNamespace(log10_rhs=place + 20, log10_lhs=place + 30),
        )
        return {"bounds": report, "lemma": place + 40}

    monkeypatch.setattr(text_measures.pretrained, "stream", stream_of(answer))
    config = SimpleNamespace(mask="none")
    monkeypatch.setattr(
        text_measures.BoundPass,
        "covers",
        SimpleNamespace(refusal=lambda c: None if c is config else "rotary"),
    )
    results = text_measures.measure_bounds(SimpleNamespace(config=config), None, 5)
    measures = ("admissible", "head", "stack_rhs", "stack_lhs", "lemma")
    assert {name: values.item() for name, values in results.items()} == {
        f"bounds/{name}/{measure}": 5 + 10 * place
        for name in ("whole", "alone")
        for place, measure in enumerate(measures)
    }
    other = SimpleNamespace(config=SimpleNamespace(mask="none"))
    assert text_measures.measure_bounds(other, None, 5) == {}
    config.mask = "causal"
    assert text_measures.measure_bounds(SimpleNamespace(config=config), None, 5) == {}
