"""Rounding is no fault; inputs are aligned, or refused.

The networks are those of tests/oracles/rounded_transformer.py.

Seeds 0 to 1999 were used to choose the rule; those of the tests are others.
"""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from rank_collapse.agree import comparison
from rank_collapse.agree.alignment import _match_rows
from rank_collapse.agree.comparison import Agreement, compare_files
from rank_collapse.agree.differences import Rounding, count_distinct
from tests.agree.test_verdict import make_row
from tests.oracles.rounded_transformer import Fault, draw_model, run, states_alone
from tests.support.closeness import assert_close
from tests.support.refusals import is_refused


def coarse_dtypes(rng):
    return str(rng.choice(["bfloat16", "bfloat16", "float16"])), rng.choice([None, "float32"])


def is_clean(compare, seed):
    model, rng = draw_model(seed)
    dtype, stream = coarse_dtypes(rng)
    fine, coarse = run(model), run(model, dtype, stream)
    answers = compare(fine, coarse), compare(states_alone(fine), states_alone(coarse))
    return all(answer.agree is not False and answer.first is None for answer in answers)


@pytest.mark.full
def test_rounding_is_no_fault(compare):
    assert all(is_clean(compare, seed) for seed in range(10_000, 10_015))


def is_clean_of(compare, seed, num_tokens):
    """Whether a clean pair of so many tokens is not called different, by branches and by states."""
    model, rng = draw_model(seed)
    dtype, stream = coarse_dtypes(rng)
    if num_tokens:
        model = replace(model, tokens=model.tokens[:num_tokens], spike=False)
    fine, coarse = run(model), run(model, dtype, stream)
    answers = compare(fine, coarse), compare(states_alone(fine), states_alone(coarse))
    return all(answer.agree is not False for answer in answers)


@pytest.mark.parametrize(
    ("seed", "num_tokens"),
    [(600_103, 0), (900_001, 1), (900_014, 1), (900_086, 1), (910_272, 2), (910_120, 1)],
)
def test_few_distinct_tokens_err_alike(compare, seed, num_tokens):
    """One token, or tokens that rank collapse made alike (cosines of .998): chance looks like one
    factor, and the median is that of one vector."""
    assert is_clean_of(compare, seed, num_tokens)


def test_distinct_directions_are_counted():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 64))
    assert count_distinct(x) == count_distinct(np.zeros((3, 4))) == 1
    assert_close(count_distinct(x * rng.normal(size=(9, 1))), 1)
    assert_close(count_distinct(np.eye(5)[:, :5] * 3.0), 5)
    np.testing.assert_allclose(count_distinct(np.repeat(np.eye(4), 50, axis=0)), 4, rtol=0.05)


@pytest.mark.full
def test_rounding_is_no_fault_in_many_networks(compare):
    assert sum(not is_clean(compare, seed) for seed in range(20_000, 20_200)) == 0


def test_coarser_products_err_in_each_branch_of_the_first_layer(monkeypatch):
    """In all tokens alike, where nothing comes in; a whole layer counts where a branch is not
    known."""
    parts = ("attention", "mlp", "layer")
    names = {2.0**-11: "float16 or TF32", 2.0**-8: "bfloat16"}

    def find(parts=parts, **changed):
        rows = []
        for layer, part in itertools.product(range(2), parts):
            options = changed.get(f"{part}_{layer}", {})
            rows.append(make_row(layer=layer, part=part, **{"error_in": 1e-5} | options))
        monkeypatch.setattr(comparison, "_tabulate", lambda *_: rows)
        fine = Rounding(2.0**-24, 2.0**-23, "float32")
        answer = comparison._find_products(None, None, None, fine, None)
        if answer is None:
            return None
        assert answer[1] is rows and answer[0].stream == fine.stream and answer[0].both
        assert answer[0].name == names[answer[0].products]
        return answer[0].name

    float16, bfloat16 = names.values()
    small, few = {"excess": 0.1}, {"excess_few": 9.0}
    assert find() == float16
    assert find(mlp_0=small) is None and find(attention_0={"excess": 2.7}) is None
    assert find(mlp_1=small) == find(layer_0=small) == float16
    assert find(("attention", "layer"), layer_0=small) is None
    assert find(mlp_0=small | {"error_in": 1e-3}) == float16  # what came in is its error
    assert find(mlp_0={"error_in": 1e-3}, attention_0={"error_in": 1e-3}) == bfloat16
    assert find(mlp_0={"error_in": 1e-2}, attention_0={"error_in": 1e-2}) is None
    assert find(attention_0=few) is None and find(attention_0=few | {"excess": 1.5}) == float16
    assert find(mlp_1={"excess": 2.7}) is None  # a fault


@pytest.mark.parametrize(
    ("dtype", "name"), [("bfloat16", "bfloat16"), ("float16", "float16 or TF32")]
)
def test_products_of_a_coarser_dtype_are_named_and_hide_no_fault(compare, dtype, name):
    """Results in float32 of products whose factors are rounded: errors begin in the first layer."""
    model, rng = draw_model(31, post_norm=False)
    first = run(model)

    def in_float32(arrays):
        return {n: a * (1 + 1e-7 * rng.normal(size=a.shape)) for n, a in arrays.items()}

    def compare_with(fault):
        second = in_float32(run(model, dtype, "float32", fault))
        return compare(first, {n: a.astype("float32") for n, a in second.items()})

    answer = compare_with(None)
    assert answer.agree and answer.rounding.name == name
    remark = f"the recordings hold float32, and their differences are those of {name} products"
    assert [*answer.remarks] == [remark]
    faulty = compare_with(Fault("attention scaled", 2, 0.5))
    assert faulty.agree is False and faulty.first is not None and not faulty.remarks


def test_padding_on_either_side_is_aligned(compare):
    model, _ = draw_model(3)
    first, second = run(model), run(model, "bfloat16")
    n = model.tokens.shape[0]

    def pad(arrays, before, after):
        return {k: np.pad(a, ((0, 0), (before, after), (0, 0))) for k, a in arrays.items()}

    masks = np.r_[np.ones(n), np.zeros(3)], np.r_[np.zeros(3), np.ones(n)]
    answer = compare(pad(first, 0, 3), pad(second, 3, 0), mask=masks)
    assert answer.agree and any("padding" in text for text in answer.remarks)


def test_every_example_has_an_order_of_its_own(compare):
    """Also where one of them keeps its order, or has fewer tokens."""
    rng = np.random.default_rng(0)
    states = rng.normal(size=(3, 3, 6, 8)).astype("float32")
    mask = np.arange(6) < np.array([[6], [4], [6]])
    orders = [rng.permutation(6), np.r_[2, 0, 3, 1, 4, 5], np.arange(6)]
    other = np.stack([states[:, k, order] for k, order in enumerate(orders)], axis=1)
    first, second = {"residual": states}, {"residual": other}
    answer = compare(first, second, mask=(mask, mask))
    assert answer.kind == "the tokens stand in another order" and answer.first is None
    assert all(row.added == 0 for row in answer.rows) and answer.embedding == 0
    ids = rng.permutation(100)[:18].reshape(3, 6)
    moved = np.stack([row[order] for row, order in zip(ids, orders, strict=True)])
    assert compare(first, second, mask=(mask, mask), token_ids=(ids, moved)).kind == answer.kind
    message = "the inputs differ: token . of example 0 is"
    is_refused(message, compare, first, second, mask=(mask, mask), token_ids=(ids, ids))


def test_tokens_in_another_order_are_named(compare):
    model, rng = draw_model(3)
    order = rng.permutation(len(model.tokens))
    second = {name: a[:, order] for name, a in run(model, "bfloat16").items()}
    answer = compare(run(model), second)
    assert answer.kind == "the tokens stand in another order" and answer.first is None
    # No size: that of what differs once the tokens are put into one order would mislead.
    assert answer.sentence == "differ before layer 0: the tokens stand in another order."


def test_rows_that_two_tokens_share_are_in_no_other_order():
    """Two tokens are those of one row, and a row of the other run is no token's."""
    rng = np.random.default_rng(0)
    a, b, c = rng.normal(size=(3, 2, 8))
    assert _match_rows(np.stack([a, b, b]), np.stack([b, a, c]), 3) is None
    assert _match_rows(np.stack([a, b, c]), np.stack([b, a, c]), 3).tolist() == [1, 0, 2]
    padded = np.stack([a, b, c]), np.stack([b, a, 2 * c])  # of two tokens that exist
    assert _match_rows(*padded, 2).tolist() == [1, 0]


def test_rows_are_in_another_order_only_where_they_are_much_nearer_there():
    """Rows of nearly equal embeddings keep their places, or have those of the states after a
    layer."""
    rng = np.random.default_rng(1)
    a, b, c = rng.normal(size=(3, 2, 8))
    x = np.stack([a, b])
    assert _match_rows(x, 0.7 * x[::-1] + 0.3 * x, 2) is None  # nearer, but not much
    assert _match_rows(x, 0.98 * x[::-1] + 0.02 * x, 2).tolist() == [1, 0]
    first, second = (a, a - 0.01 * c, b), (a + 0.006 * c, a - 0.005 * c, b)  # .6 and .5 from a
    assert _match_rows(np.stack(first), np.stack(second), 3).tolist() == [0, 1, 2]
    later = np.stack([a, b, c])[:, 1]
    first = np.stack([np.stack([e, s]) for e, s in zip((a[0], a[0], b[0]), later, strict=True)])
    second = first[[2, 1, 0]]
    second[2, 0] *= 1 + 1e-8
    assert _match_rows(first, second, 3).tolist() == [2, 1, 0]


def test_the_same_numbers(compare):
    arrays = run(draw_model(5)[0])
    answer = compare(arrays, arrays)
    assert answer.exit_code == 0 and answer.sentence == "the same numbers in all layers."
    assert json.loads(json.dumps(answer.to_dict()))["first"] is None


@pytest.mark.parametrize(("agree", "code"), [(True, 0), (False, 1), (None, 2)])
def test_every_number_of_an_answer_is_written(agree, code):
    rounding, place = Rounding(0.25, 0.5, "bfloat16"), {"layer": 1, "part": "mlp"}
    rows = make_row(), make_row(layer=1, spikes=2, spikes_added=0.75, error_in=float("nan"))
    outputs = {"share": 0.125}
    answer = Agreement(agree, place, "a kind", "words", rows, rounding, 0.625, outputs, ("so",))
    assert answer.exit_code == code
    written = answer.to_dict()
    sublayers = written.pop("sublayers")
    assert written == {
        "agree": agree is True,
        "first": place,
        "kind": "a kind",
        "sentence": "words",
        "cannot_tell": agree is None,
        "rounding": "bfloat16",
        "embedding_error": 0.625,
        "outputs": outputs,
        "remarks": ["so"],
    }
    nothing = {"spikes_added": None}, {"error_in": None}
    assert sublayers == [row._asdict() | none for row, none in zip(rows, nothing, strict=True)]


def test_what_only_some_arrays_have_is_said(compare, tmp_path):
    arrays = run(draw_model(3)[0])
    np.savez(tmp_path / "a.npz", residual=arrays["residual"], attention_out=arrays["mlp_branch"])
    answer = compare_files(tmp_path / "a.npz", tmp_path / "a.npz")
    assert "attention_out" in answer.remarks[0]
    several = {f"other{i}": np.ones(2) for i in range(10)}
    np.savez(tmp_path / "b.npz", residual=arrays["residual"], **several)
    np.savez(tmp_path / "c.npz", residual=arrays["residual"], mine=np.ones(2))
    names = ", ".join(sorted(several)[:8])
    for pair in ("bc", "cb"):
        remarks = compare_files(*(tmp_path / f"{name}.npz" for name in pair)).remarks
        expected = {"b": names, "c": "mine"}
        texts = [f"other arrays of {n}.npz are not read: {expected[n]}" for n in pair]
        assert [*remarks] == texts


def test_logits_are_compared_over_tokens_that_exist(compare):
    model, rng = draw_model(3)
    n = model.tokens.shape[0]
    logits = rng.normal(size=(n, 9)).astype("float32")
    changed = logits.copy()
    changed[1] = -changed[1]
    changed[-1] = -changed[-1]
    mask = np.arange(n) < n - 1
    arrays = {"logits": (logits, changed), "mask": (mask.astype("uint8"),) * 2}
    outputs = compare(run(model), run(model, "bfloat16"), **arrays).outputs
    assert outputs["share of next tokens that differ"] == pytest.approx(1 / (n - 1))
    log_p = [v - np.log(np.exp(v).sum(axis=-1, keepdims=True)) for v in (logits, changed)]
    token = logits[1].argmax()
    expected = abs(log_p[0][1, token] - log_p[1][1, token])
    assert outputs["largest change of their log-probability"] == pytest.approx(expected, rel=1e-5)


def test_other_inputs_are_refused(compare):
    model, _ = draw_model(3)
    arrays, n = run(model), model.tokens.shape[0]
    ids = np.arange(n)
    is_refused(
        "the inputs differ: token 2", compare, arrays, arrays, token_ids=(ids, ids + (ids == 2))
    )
    fewer = {name: a[:, :-1] for name, a in arrays.items()}
    is_refused(f"example 0 has {n} tokens", compare, arrays, fewer)
    three = {"residual": np.stack([arrays["residual"]] * 3, axis=1)}
    masks = np.ones((3, n)), np.arange(n) < np.array([[n], [n - 1], [n - 2]])
    message = f"example 1 has {n} tokens in first.npz and {n - 1} in second.safetensors; `mask` say"
    is_refused(message, compare, three, three, mask=masks)
    less_deep = {"residual": arrays["residual"][:-1]}
    is_refused("layers", compare, arrays, less_deep)
    narrow = {name: a[..., :-1] for name, a in arrays.items()}
    is_refused("the width is", compare, arrays, narrow)
    alone = {"residual": arrays["residual"]}
    is_refused("first.npz has 3 examples, second.safetensors 1$", compare, three, alone)
    is_refused("first.npz has 1 example, second.safetensors 3$", compare, alone, three)


def test_repeated_tokens_in_another_order_are_named(compare):
    """Equal embeddings: the states after the first layer say which token is which."""
    model, rng = draw_model(3, causal=True, post_norm=False)
    tokens = model.tokens.copy()
    tokens[4], tokens[6] = tokens[1], tokens[2]
    model = replace(model, tokens=tokens)
    order = rng.permutation(len(tokens))
    second = {name: a[:, order] for name, a in run(model, "bfloat16").items()}
    answer = compare(run(model), second)
    assert answer.kind == "the tokens stand in another order" and answer.first is None
    assert compare(run(model), run(model, "bfloat16")).agree
