"""The public interface: changed on purpose alone, listed whole; errors that name what is meant."""

from typing import get_args

import numpy as np
import pytest
from interface import FILE, changes, exported, interface

import rank_collapse as rc
from rank_collapse.measures.table import MeasureName
from rank_collapse.network.designs import DesignName
from rank_collapse.network.variants import VariantName
from rank_collapse.training.recipe import Loss
from rank_collapse.training.tasks.examples import LOSSES

HIDDEN = np.random.default_rng(0).normal(size=(3, 5, 4))
CONFIG = rc.transformer(depth=1, num_heads=2, d_model=8)


def test_the_interface_is_that_of_the_file():
    kept, now = FILE.read_text("utf-8").splitlines(), interface()
    assert kept == now, changes(kept, now)


def test_all_has_the_lazy_names():
    assert set(rc.__all__) == set(exported("rank_collapse")) and len(set(rc.__all__)) > 100
    assert {"depth_report", "exact_profile", "plot", "pretrained", "training"} <= set(rc.__all__)
    assert all(getattr(rc, name) is not None for name in rc.__all__)


@pytest.mark.parametrize(
    ("choices", "table"),
    [
        (MeasureName, rc.MEASURES),
        (DesignName, rc.network.DESIGNS),
        (VariantName, rc.network.VARIANTS),
        (Loss, LOSSES),
    ],
)
def test_choices_are_the_keys_of_their_table(choices, table):
    assert get_args(choices) == tuple(table)


@pytest.mark.parametrize(
    ("guess", "answer"),
    [
        (
            lambda: rc.network.NormParams(np.ones(4)).scale,
            "has no 'scale'; its fields are gain, ",
        ),
        (lambda: CONFIG.skip_gian, "TransformerConfig has no 'skip_gian'.* skip_gain, "),
        (lambda: rc.profile(HIDDEN).residual_ratio, r"write profile\['residual_ratio'\]"),
        (lambda: rc.profile(HIDDEN).colour, "Profile has no attribute 'colour'$"),
    ],
)
def test_a_wrong_attribute_is_answered_with_the_right_one(guess, answer):
    with pytest.raises(AttributeError, match=answer):
        guess()


@pytest.mark.parametrize(
    ("guess", "answer"),
    [
        (lambda: rc.profile(HIDDEN, measures="residual"), "nearest: 'residual_ratio'"),
        (lambda: rc.variant(CONFIG, "san"), "rc.san makes it"),
        (lambda: rc.variant(CONFIG, "SAN+skip"), "rc.san_skip makes it"),
        (lambda: rc.variant(CONFIG, "shapd"), "nearest: 'shaped'"),
        (lambda: rc.design(CONFIG, "postt"), "nearest: 'post'"),
        (lambda: CONFIG.replace(mask="casual"), r"mask='casual' .*; nearest: 'causal'"),
        (lambda: CONFIG.replace(mask="x"), r"mask='x' is not one of \([^;]*\)$"),
        (lambda: CONFIG.replace(mlpp=1), "TransformerConfig.mlpp .*; nearest: 'mlp', "),
    ],
)
def test_a_wrong_choice_is_answered_with_the_nearest(guess, answer):
    with pytest.raises(ValueError, match=answer):
        guess()
