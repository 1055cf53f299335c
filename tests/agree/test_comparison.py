"""Rounding is no fault, and planted faults are found where they are.

The networks are those of tests/oracles/rounded_transformer.py.

Seeds 0 to 1999 were used to choose the rule; those of the tests are others.
"""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from rank_collapse.agree.comparison import compare_files
from rank_collapse.agree.differences import count_distinct
from rank_collapse.agree.recording import record
from tests.oracles.rounded_transformer import FAULTS, Fault, draw_model, run
from tests.support.closeness import assert_close
from tests.support.refusals import is_refused


@pytest.fixture
def compare(tmp_path):
    """Return a function that compares two recordings through files."""

    def compare_arrays(first, second, **arrays):
        record(first, tmp_path / "first.npz", **{k: v[0] for k, v in arrays.items()})
        record(second, tmp_path / "second.safetensors", **{k: v[1] for k, v in arrays.items()})
        return compare_files(tmp_path / "first.npz", tmp_path / "second.safetensors")

    return compare_arrays


def states_alone(arrays):
    return {"residual": arrays["residual"]}


def coarse_dtypes(rng):
    return str(rng.choice(["bfloat16", "bfloat16", "float16"])), rng.choice([None, "float32"])


def is_clean(compare, seed):
    model, rng = draw_model(seed)
    dtype, stream = coarse_dtypes(rng)
    fine, coarse = run(model), run(model, dtype, stream)
    answers = compare(fine, coarse), compare(states_alone(fine), states_alone(coarse))
    return all(answer.agree is not False and answer.first is None for answer in answers)


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


def test_a_factor_of_one_token_is_found(compare):
    """If it is larger than what rounding explains."""
    model, _ = draw_model(31, post_norm=False)
    model = replace(model, tokens=model.tokens[:1], spike=False)
    fault = Fault("MLP scaled", 1, 0.1)
    answer = compare(run(model), run(model, "bfloat16", None, fault))
    assert answer.first == {"layer": 1, "part": "mlp"} and "multiplied by 0.9" in answer.kind


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


def find_fault(compare, kind, seed, dtype, stream, alone):
    size, part = FAULTS[kind]
    form = {"causal": True} if kind == "no causal mask" else {}
    form |= {"post_norm": False} if kind in ("skip scaled", "norm with 1 + weight") else {}
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


def test_states_off_by_one_layer(compare):
    model, _ = draw_model(4)
    states = run(model)["residual"]
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


def test_padding_on_either_side_is_aligned(compare):
    model, _ = draw_model(3)
    first, second = run(model), run(model, "bfloat16")
    n = model.tokens.shape[0]

    def pad(arrays, before, after):
        return {k: np.pad(a, ((0, 0), (before, after), (0, 0))) for k, a in arrays.items()}

    masks = np.r_[np.ones(n), np.zeros(3)], np.r_[np.zeros(3), np.ones(n)]
    answer = compare(pad(first, 0, 3), pad(second, 3, 0), mask=masks)
    assert answer.agree and any("padding" in text for text in answer.remarks)


def test_tokens_in_another_order_are_named(compare):
    model, rng = draw_model(3)
    order = rng.permutation(len(model.tokens))
    second = {name: a[:, order] for name, a in run(model, "bfloat16").items()}
    answer = compare(run(model), second)
    assert answer.kind == "the tokens stand in another order" and answer.first is None


def test_the_same_numbers(compare):
    arrays = run(draw_model(5)[0])
    answer = compare(arrays, arrays)
    assert answer.exit_code == 0 and answer.sentence == "the same numbers in all layers."
    assert json.loads(json.dumps(answer.to_dict()))["first"] is None


@pytest.mark.parametrize("name", ["attention_branch", "mlp_branch"])
@pytest.mark.parametrize("post_norm", [False, True])
def test_one_branch_alone_hides_no_fault_of_the_other(compare, name, post_norm):
    model, _ = draw_model(3, causal=True, post_norm=post_norm)
    alone = [
        {key: run(model, *given)[key] for key in ("residual", name)}
        for given in ((), ("bfloat16", None))
    ]
    assert compare(*alone).agree
    for kind, part in (("attention scaled", "attention"), ("MLP scaled", "mlp")):
        second = run(model, "bfloat16", None, Fault(kind, 1, 0.3))
        answer = compare(alone[0], {key: second[key] for key in ("residual", name)})
        parts = {part if name.startswith(part) else "layer"}
        if post_norm and (name, part) == ("mlp_branch", "mlp"):
            parts |= {"layer"}  # the norm after the sum shows it in what the branch does not show
        assert answer.first["layer"] == 1 and answer.first["part"] in parts


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
    less_deep = {"residual": arrays["residual"][:-1]}
    is_refused("layers", compare, arrays, less_deep)
    narrow = {name: a[..., :-1] for name, a in arrays.items()}
    is_refused("the width is", compare, arrays, narrow)


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


def make_alike(seed, spread):
    """Return branches of tokens that differ by a share of their size, of two layers."""
    rng = np.random.default_rng(seed)
    common, own = rng.normal(size=(2, 1, 24)), rng.normal(size=(2, 12, 24))
    return rng, (common + spread * own).astype("float32")


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
