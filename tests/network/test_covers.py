"""What a pass covers: values, defaults, functions of the caller, edits, and fields left out."""

import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.network.covers import (
    ANY,
    EVERYTHING,
    SIZES,
    Covers,
    all_fields_but,
    at_any_value,
)
from tests.support.refusals import is_refused

CONFIG = rc.san(2, 2, 8)
NARROW = Covers("this pass", SIZES | at_any_value("mask") | {"norm": ("layer",)}, edits=("v",))


def test_a_field_is_covered_at_listed_values_and_at_its_default():
    for fields, reason in (
        ({}, None),
        ({"depth": 7, "mask": "causal"}, None),
        ({"norm": "rms"}, "norm='rms'"),
        ({"attention_skip": True}, "attention_skip=True"),
        ({"temperature": 2.0}, "temperature=2.0"),
        ({"mixing": rc.network.Mixing(1.0)}, "mixing="),
    ):
        refusal = NARROW.refusal(CONFIG.replace(**fields))
        assert refusal is None if reason is None else refusal.startswith(reason)


def test_a_swept_value_is_covered_by_name_alone():
    """It may be traced, so it is not compared with a list."""
    swept = CONFIG.replace(temperature=np.ones(2))
    assert NARROW.refusal(swept).startswith("temperature=")
    wide = Covers("a", NARROW.fields | {"temperature": ANY})
    assert wide.refusal(swept) is None


def test_an_error_names_the_pass_and_what_it_does_not_cover():
    is_refused("this pass does not cover norm='rms'", NARROW.check, CONFIG.replace(norm="rms"))
    NARROW.check(CONFIG, {"v": abs})
    is_refused("this pass does not cover an edit of 'k'", NARROW.check, CONFIG, {"k": abs})
    EVERYTHING.check(CONFIG, {"k": abs})


@pytest.mark.parametrize("name", ["mask", "mixing"])
def test_all_fields_but_one_refuse_it(name):
    fields = all_fields_but(name)
    assert EVERYTHING.fields.keys() - fields.keys() == {name}
