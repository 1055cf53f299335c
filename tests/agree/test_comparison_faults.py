"""Planted faults are found where they are, and named.

The networks are those of tests/oracles/rounded_transformer.py.

Seeds 0 to 1999 were used to choose the rule; those of the tests are others.
"""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from rank_collapse.agree import comparison, verdict
from tests.agree.test_verdict import make_row
from tests.oracles.rounded_transformer import FAULTS, Fault, draw_model, run, states_alone


def test_a_factor_of_one_token_is_found(compare):
    """If it is larger than what rounding explains."""
    model, _ = draw_model(31, post_norm=False)
    model = replace(model, tokens=model.tokens[:1], spike=False)
    fault = Fault("MLP scaled", 1, 0.1)
    answer = compare(run(model), run(model, "bfloat16", None, fault))
    assert answer.first == {"layer": 1, "part": "mlp"} and "multiplied by 0.9" in answer.kind


PRE_NORM = ("skip scaled", "input scaled", "norm with 1 + weight")


def find_fault(compare, kind, seed, dtype, stream, alone):
    size, part = FAULTS[kind]
    form = {"causal": True} if kind == "no causal mask" else {}
    form |= {"post_norm": False} if kind in PRE_NORM else {}
    model, rng = draw_model(seed, **form)
    layer = int(rng.integers(model.depth))
    pair = run(model), run(model, dtype, stream, Fault(kind, layer, size))
    answer = compare(*map(states_alone, pair)) if alone else compare(*pair)
    return answer.first == {"layer": layer, "part": "layer" if alone else part}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_planted_fault_is_found(compare, kind):
    """At weights of usual scale, where rounding stays below .02 of a branch."""
    hits = [find_fault(compare, kind, seed, "bfloat16", None, False) for seed in (30, 31, 33)]
    assert sum(hits) >= 2


LEAST_OF_STATES = {"attention scaled": 1, "MLP scaled": 5, "temperature": 8, "theta": 9}


@pytest.mark.full
@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("alone", [False, True], ids=["branches", "states"])
def test_nine_of_ten_planted_faults_are_found(compare, kind, alone):
    seeds = range(40_000, 40_020)
    stream = None if alone else "float32"  # which would hide the dtype of the products
    hits = [find_fault(compare, kind, seed, "bfloat16", stream, alone) for seed in seeds]
    # Sums of both branches hide small mistakes of one: docs/agree.md has the shares.
    least = LEAST_OF_STATES.get(kind, 15) if alone else 18
    assert sum(hits) >= least


def compare_kind(compare, kind, size, layer=3, **form):
    model, _ = draw_model(3, causal=True, gated=True, post_norm=False, **form)
    return compare(run(model), run(model, "bfloat16", None, Fault(kind, layer, size)))


@pytest.mark.parametrize(
    ("kind", "size", "words"),
    [
        ("attention scaled", 0.2, r"multiplied by 0\.(79|80|8)"),
        ("MLP scaled", 0.5, r"multiplied by 0\.(49|50|5)"),
        ("MLP scaled", 2.0, "a sign"),
        ("MLP absent", 1.0, "absent"),
        ("bias", 0.3, "one vector is added to all tokens"),
        ("dropout", 0.1, "dropout is on in the second run"),
        ("window", 4, "only tokens from position 4 on"),
        ("theta", 0.1, "theta"),
        ("rotary pairs", 0, "rotary form"),
        ("temperature", 0.3, "scale of scores"),
        ("heads repeated in another order", 0, "order of the key-value heads"),
        ("output transposed", 0, "transposed"),
        ("no causal mask", 0, "causal mask in one run alone"),
        ("skip scaled", 0.1, r"multiplied by 0\.(89|90|9)"),
    ],
)
def test_the_kind_is_named(compare, kind, size, words):
    answer = compare_kind(compare, kind, size)
    assert re.search(words, answer.kind) and re.search(words, answer.sentence)
    assert answer.exit_code == 1


def test_a_fault_of_all_layers_begins_in_the_first(compare):
    for kind, size in (("temperature", 0.3), ("rotary pairs", 0), ("MLP scaled", 0.2)):
        answer = compare_kind(compare, kind, size, layer=None)
        assert answer.first == {"layer": 0, "part": FAULTS[kind][1]}


def test_embeddings_that_differ_have_no_layer(compare):
    model, _ = draw_model(3)
    fault = Fault("embedding", None)
    answer = compare(run(model), run(model, "bfloat16", None, fault))
    width = model.tokens.shape[1]
    assert answer.first is None and not answer.agree
    x, y = (run(model, *form)["residual"][0] for form in ((), ("bfloat16", None, fault)))
    errors = np.linalg.norm(y.astype(float) - x, axis=-1) / np.linalg.norm(x, axis=-1)
    written = answer.to_dict()
    assert written["embedding_error"] == pytest.approx(np.median(errors), rel=1e-5)
    assert (written["agree"], written["cannot_tell"]) == (False, False)
    assert f"{np.sqrt(width):.4g}, the root of the width {width}" in answer.kind


def test_embeddings_that_differ_in_few_tokens_are_counted(compare):
    model, _ = draw_model(3)
    first, second = run(model), run(model)
    num_tokens = len(first["residual"][0])
    second["residual"] = second["residual"].copy()
    second["residual"][:, :2] *= 1.5
    answer = compare(first, second)
    assert answer.embedding == 0
    text = f"differ before layer 0 by 0.5 of the size in 2 of {num_tokens} tokens: "
    assert answer.sentence.startswith(text)


def test_states_off_by_one_layer_may_be_fewer(compare):
    """The run that is late has no state for its last layer."""
    states = run(draw_model(4)[0])["residual"][:4]
    late = states[1:]
    for runs, off in (((states, late), "second.safetensors"), ((late, states), "first.npz")):
        answer = compare(*({"residual": run} for run in runs))
        assert answer.kind == f"the states of {off} are off by one layer" and answer.exit_code == 1


def test_a_fault_of_a_branch_beside_another_of_its_input_is_the_branchs(compare):
    """A hook that scales the input of a layer explains no other fault of its attention."""
    model, _ = draw_model(3, post_norm=False)
    first, second = run(model), run(model, "bfloat16", None, Fault("input scaled", 1, 0.1))
    assert compare(first, second).first == {"layer": 1, "part": "layer"}
    second = {name: array.copy() for name, array in second.items()}
    added = second["attention_branch"][1].copy()
    second["attention_branch"][1] += added
    second["residual"][2:] += added
    assert compare(first, second).first == {"layer": 1, "part": "attention"}


def test_a_fault_moves_to_the_sum_of_its_layer_where_its_branch_is_right(monkeypatch):
    """If the branch, with the remainder of its layer in its input, is no fault."""
    parts = ("attention", "mlp", "layer")
    rows = [make_row(layer=layer, part=part) for layer in range(3) for part in parts]
    pairs = [SimpleNamespace(first=SimpleNamespace(index=layer)) for layer in range(3)]
    mlp, factor = verdict.Fault(4, "some tokens"), verdict.Fault(8, "one factor")
    unlike = verdict.Fault(5, "unlike other layers")
    compared = []

    def move(faults, *, remainder=True, findings=()):
        def compare_branch(pair, part, mask, rounding):
            compared.append((pair, part))
            return remainder or None

        monkeypatch.setattr(comparison, "pair_layers", lambda *_: iter(pairs))
        monkeypatch.setattr(comparison, "compare_on_remainders", compare_branch)
        monkeypatch.setattr(comparison, "summarize", lambda difference: "row")
        monkeypatch.setattr(
            comparison, "find_faults", lambda rows, _: findings if rows == ["row"] else 1
        )
        alignment = SimpleNamespace(mask=None)
        return comparison._move_to_sum(None, None, alignment, None, None, rows, faults)

    assert move([mlp, factor]) == [verdict.Fault(5, "all tokens"), mlp, factor]
    assert move([mlp, unlike]) == [unlike, mlp, unlike]
    assert compared == [(pairs[1], "mlp")] * 2
    assert move([mlp], findings=[mlp]) == move([mlp], remainder=False) == [mlp]
    assert move([]) == [] and move([unlike, factor]) == [unlike, factor]
    assert len(compared) == 4


def make_growing(depth, judged):
    """Makes states whose branches dwarf their inputs, and others whose error grows by 1.3.

    It passes 0.3 of the size, from which on no layer is judged, after so many layers.
    """
    rng = np.random.default_rng(0)
    branches = rng.normal(size=(depth + 1, 12, 64)) * 10.0 ** np.arange(depth + 1)[:, None, None]
    sizes = np.linalg.norm(branches, axis=-1, keepdims=True)
    errors = rng.normal(size=branches.shape)
    errors *= sizes / np.linalg.norm(errors, axis=-1, keepdims=True)
    share = 0.3 * 1.3 ** (np.arange(depth + 1) - judged + 0.5)
    states = np.cumsum(branches, axis=0)
    return states, states + share[:, None, None] * errors


@pytest.mark.parametrize(("depth", "agree"), [(27, None), (26, True)])
def test_where_most_layers_cannot_be_judged_the_answer_is_open(compare, depth, agree):
    first, second = make_growing(depth, judged=13)
    second = second.astype(ml_dtypes.bfloat16)
    answer = compare({"residual": first.astype("float32")}, {"residual": second})
    assert [row.judged for row in answer.rows] == [layer < 13 for layer in range(depth)]
    assert answer.agree is agree and answer.first is answer.kind is None
    assert answer.exit_code == (0 if agree else 2)
    about = answer.to_dict()
    assert (about["agree"], about["cannot_tell"]) == (agree is True, agree is None)


@pytest.mark.parametrize("depth", [2, 4])
def test_states_off_by_one_layer(compare, depth):
    model, _ = draw_model(4)
    states = run(model)["residual"][: depth + 1]
    late = np.concatenate([states[1:], states[-1:]])
    names = "first.npz", "second.safetensors"
    for runs, (off, other) in (((states, late), names[::-1]), ((late, states), names)):
        answer = compare(*({"residual": run} for run in runs))
        kind = f"the states of {off} are off by one layer"
        assert answer.kind == kind and answer.exit_code == 1
        assert answer.sentence.startswith(
            f"{kind}: its first state is the one after layer 0 of {other}"
        )


def test_the_last_state_after_the_final_norm(compare):
    model, rng = draw_model(3, post_norm=False)
    first, second = run(model), run(model, "bfloat16")
    last = second["residual"][-1]
    last /= np.sqrt((last**2).mean(axis=-1, keepdims=True))
    second["residual"][-1] = last * (1 + 0.1 * rng.normal(size=last.shape[-1]))
    answer = compare(first, second)
    assert answer.first == {"layer": model.depth - 1, "part": "layer"}
    assert "after a norm" in answer.kind


@pytest.mark.parametrize("name", ["attention_branch", "mlp_branch"])
@pytest.mark.parametrize("post_norm", [False, True])
def test_one_branch_alone_hides_no_fault_of_the_other(compare, name, post_norm):
    model, _ = draw_model(3, causal=True, post_norm=post_norm)
    alone = [
        {key: run(model, *options)[key] for key in ("residual", name)}
        for options in ((), ("bfloat16", None))
    ]
    assert compare(*alone).agree
    for kind, part in (("attention scaled", "attention"), ("MLP scaled", "mlp")):
        second = run(model, "bfloat16", None, Fault(kind, 1, 0.3))
        answer = compare(alone[0], {key: second[key] for key in ("residual", name)})
        parts = {part if name.startswith(part) else "layer"}
        if post_norm and (name, part) == ("mlp_branch", "mlp"):
            parts |= {"layer"}  # the norm after the sum shows it in what the branch does not show
        assert answer.first["layer"] == 1 and answer.first["part"] in parts


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_branches_and_states_of_zeros(compare, dtype):
    """JSON has no infinity: an error of something that is zero has a size."""

    def say(first, second):
        answer = compare(first, second)
        json.dumps(answer.to_dict(), allow_nan=False)
        return answer

    model, _ = draw_model(3, post_norm=False)
    arrays, absent = run(model), run(model, dtype, None, Fault("MLP absent", 1, 1.0))
    for pair in ((arrays, absent), (absent, arrays)):
        answer = say(*pair)
        assert answer.first == {"layer": 1, "part": "mlp"} and "absent" in answer.kind
    zeros = {name: np.zeros_like(a) for name, a in arrays.items()}
    assert say(zeros, zeros).agree
    for pair in ((arrays, zeros), (zeros, arrays)):
        answer = say(*pair)
        assert answer.agree is False and answer.first is None
    still = run(model, dtype)["residual"]
    still = {"residual": np.concatenate([still[:2], still[1:]])}  # layer 1 adds nothing
    assert say(still, still).agree
    changed = {"residual": still["residual"].copy()}
    changed["residual"][2:] += 0.5
    assert say(still, changed).first == {"layer": 1, "part": "layer"}


def test_a_branch_of_few_tokens_is_judged(compare):
    """Most tokens pass a layer that skips them: those that do not are no spikes."""
    arrays = run(draw_model(3, post_norm=False)[0])
    chosen = np.arange(arrays["residual"].shape[1])[:, None] % 3 == 0
    mlp, shift = arrays["mlp_branch"] * chosen, arrays["mlp_branch"] * ~chosen
    arrays["residual"][1:] -= np.cumsum(shift, axis=0)
    arrays["mlp_branch"] = mlp
    faulty = {name: a.copy() for name, a in arrays.items()}
    faulty["mlp_branch"][2] *= 1.2
    faulty["residual"][3:] += 0.2 * mlp[2]
    assert compare(arrays, arrays).agree
    assert compare(arrays, faulty).first == {"layer": 2, "part": "mlp"}


def test_a_zero_by_rounding_is_no_dropout(compare):
    """Rounding makes small numbers zero, which explain little of the difference."""
    first = np.random.default_rng(0).normal(size=(2, 6, 24)).astype("float32")
    second = first.copy()
    added = 1.08 * (first[1] - first[0])
    small = np.abs(added) < np.quantile(np.abs(added), 0.02)
    second[1] = np.where(small, first[0], first[0] + added)
    assert "dropout" not in compare({"residual": first}, {"residual": second}).kind


def test_an_error_that_rounding_made_large_cannot_be_judged(compare):
    """Between unrelated states nothing can be said."""
    first = {"residual": np.random.default_rng(0).normal(size=(5, 16, 8)).astype("float32")}
    second = {"residual": first["residual"].copy()}
    second["residual"][1:] = np.random.default_rng(1).normal(size=(4, 16, 8))
    assert compare(first, second).first == {"layer": 0, "part": "layer"}


def make_alike(seed, spread):
    """Return branches of tokens that differ by a share of their size, of two layers."""
    rng = np.random.default_rng(seed)
    common, differences = rng.normal(size=(2, 1, 24)), rng.normal(size=(2, 12, 24))
    return rng, (common + spread * differences).astype("float32")


def compare_branches(compare, first, second):
    x = np.random.default_rng(1).normal(size=(12, 24)).astype("float32")

    def make(branches):
        states = np.concatenate([x[None], x + np.cumsum(branches, axis=0)])
        return {"residual": states.astype("float32"), "attention_branch": branches}

    return compare(make(first), make(second))


@pytest.mark.parametrize("spread", [0.05, 1.0])
def test_a_bias_needs_tokens_that_are_unlike(compare, spread):
    """Where all tokens are alike, another matrix changes them alike, too."""
    rng, first = make_alike(2, spread)
    wrong, biased = first.copy(), first.copy()
    wrong[1] = first[1] @ (rng.normal(size=(24, 24)) / 5)
    biased[1] = first[1] + 0.5 * rng.normal(size=24)
    for second in (wrong, biased):
        answer = compare_branches(compare, first, second)
        assert answer.first == {"layer": 1, "part": "attention"}
        says_bias = (answer.kind or "").endswith("to all tokens: a bias")
        if second is wrong or spread == 1.0:
            assert says_bias == (second is biased)


def test_a_window_and_positions_are_told_apart_or_both_are_named(compare):
    """Seed 33: theta was once called a window, seed 33's window was called positions."""
    for seed in (3, 31, 33, 41):
        model, _ = draw_model(seed, post_norm=False, causal=True)
        for kind, size, wanted in (("theta", 0.1, "positions"), ("window", 4, "window")):
            answer = compare(run(model), run(model, "bfloat16", None, Fault(kind, 1, size)))
            assert wanted in (answer.kind or wanted)
