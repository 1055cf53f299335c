"""The sentence of a comparison: each form, with its numbers."""

import pytest

from rank_collapse.agree.differences import Rounding
from rank_collapse.agree.sentence import write_sentence
from rank_collapse.agree.verdict import Fault
from tests.agree.test_verdict import make_row

ROUNDING = Rounding(2.0**-8, 2.0**-8, "bfloat16")


def write(rows, agree=True, place=None, kind=None, faults=(), embedding=1e-4):
    where = f"by {embedding:.2g} of the size"
    return write_sentence(agree, place, kind, rows, list(faults), ROUNDING, embedding, where)


def test_runs_that_agree():
    rows = [make_row(excess=0.5), make_row(layer=1, part="attention", excess=1.25)]
    expected = "agree to bfloat16 rounding (largest 1.2 times the prediction, layer 1, attention)."
    assert write(rows) == expected
    late = make_row(layer=2, excess=9.0, error_in=0.456, judged=False)
    assert write([*rows, late]) == (
        f"{expected} From layer 2 on the inputs differ by 0.46 of their size, so these layers are "
        "not judged."
    )
    same = [make_row(added_most=0.0), make_row(added_most=0.0)]
    assert write(same, embedding=0.0) == "the same numbers in all layers."
    assert write(same).startswith("agree to bfloat16 rounding")  # the embeddings differ
    assert write([same[0], rows[0]], embedding=0.0).startswith("agree to bfloat16 rounding")


def test_runs_of_which_nothing_is_known():
    rows = [make_row(), make_row(layer=3, error_in=0.71, judged=False), make_row(layer=4)]
    assert write(rows, agree=None) == (
        "cannot tell: from layer 3 on the inputs of the sublayers differ by 0.71 of their size; "
        "all before is bfloat16 rounding."
    )


def test_embeddings_that_differ():
    text = write([make_row()], agree=False, kind="the embeddings differ", embedding=0.123)
    assert text == "differ before layer 0 by 0.12 of the size: the embeddings differ."


@pytest.mark.parametrize(
    ("part", "name"), [("attention", "attention"), ("mlp", "MLP"), ("layer", "sum")]
)
def test_the_first_sublayer_at_fault(part, name):
    bad = make_row(
        layer=5, part=part, added=0.25, excess=31.0, added_most=0.5, excess_few=77.0, scale=-0.25
    )
    rows, place = [make_row(), bad], {"layer": 5, "part": part}

    def say(reason, index=1, **options):
        ordered = rows if index else rows[::-1]
        return write(ordered, False, place, faults=[Fault(index, reason)], **options)

    adds = f"layer 5's {name} adds 0.25 of its size, 31 times its rounding"
    assert say("all tokens") == f"{adds}; all before is rounding."
    assert say("unlike other layers", kind="a kind") == f"{adds}: a kind; all before is rounding."
    assert say("all tokens", index=0, kind="a kind") == f"{adds}: a kind."
    few = f"layer 5's {name} adds 0.5 of its size, 77 times its rounding; all before is rounding."
    assert say("some tokens") == few
    factor = f"layer 5's {name} is 0.75 times its size in the first run; all before is rounding."
    assert say("one factor") == factor


def test_of_states_alone_the_layer_is_named():
    rows = [make_row(part="layer", layer=2, added=0.25, excess=31.0)]
    text = write(rows, False, {"layer": 2, "part": "layer"}, faults=[Fault(0, "all tokens")])
    assert text == "layer 2 adds 0.25 of its size, 31 times its rounding."
