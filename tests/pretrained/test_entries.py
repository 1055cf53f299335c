"""Entries of a config.json: short forms, types and limits, rotary scalings by their formulas."""

import math

import pytest

from rank_collapse.pretrained.entries import (
    ANY_LENGTH,
    Entry,
    as_entry,
    check_allowed,
    check_entry,
    count_entry,
    local_theta,
    num_positions,
    rotary_entry,
    rotary_fields,
)
from tests.support.closeness import assert_close
from tests.support.refusals import is_refused

SETTINGS = {"rope_theta": None, "max_position_embeddings": 64, "model_type": "llama"}
NONE = {"rope_scaling": None, "rope_parameters": None}


def test_short_forms_are_a_default_or_a_type():
    assert as_entry(3) == Entry(3, (int,)) and as_entry(list) == Entry(None, (list,))
    entry = count_entry(4, most=9)
    assert as_entry(entry) is entry and (entry.least, entry.most) == (1, 9)


@pytest.mark.parametrize(
    ("value", "entry", "message"),
    [
        ("3", Entry(1, (int,)), "a='3' is not a whole number"),
        (True, Entry(1, (int,)), "a=True is not a whole number"),
        (1.5, Entry(1, (int, list)), "a=1.5 is not a whole number or a list"),
        (0, count_entry(), "a=0 is not between 1 and"),
        (10, count_entry(most=9), "a=10 is not between 1 and 9"),
        (float("inf"), Entry(1.0, (float,)), "a=inf is not between"),
        (2**31, Entry(1, (int,)), "a=2147483648 is not between"),
        (1e39, Entry(1.0, (float,)), r"a=1e\+39 is not between"),
    ],
)
def test_a_value_of_another_type_or_size_is_named(value, entry, message):
    is_refused(message, check_entry, "a", value, entry)


def test_a_whole_number_is_a_number():
    for value in (3, 2**31):  # beyond an index
        check_entry("a", value, Entry(1.0, (float,)))
    for value in (1, 9):
        check_entry("a", value, count_entry(most=9))
    check_allowed({"act": "gelu"}, "act", ("gelu", "relu"))
    is_refused(
        "act='tanh' of a bert model is not supported, only 'gelu' or 'relu'",
        check_allowed,
        {"act": "tanh", "model_type": "bert"},
        "act",
        ("gelu", "relu"),
    )


def test_the_older_entry_counts_and_layers_may_have_their_own():
    older, newer = {"type": "linear"}, {"full_attention": {"rope_type": "yarn"}}
    both = {"rope_scaling": older, "rope_parameters": newer}
    assert rotary_entry(both, "full_attention") == older
    assert rotary_entry(both | {"rope_scaling": None}, "full_attention") == {"rope_type": "yarn"}
    assert rotary_entry(NONE) == {}
    wrong = {"rope_scaling": None, "rope_parameters": {"full_attention": 3}}
    is_refused(
        "rope_parameters.full_attention=3 is not an object", rotary_entry, wrong, "full_attention"
    )


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({}, {}),
        ({"rope_theta": 50, "partial_rotary_factor": 0.5}, {"rotary_theta": 50, "rotary_width": 4}),
        ({"type": "linear", "factor": 4}, {"rotary_scaling": (4.0,)}),
        ({"rope_type": "linear", "type": "dynamic", "factor": 4}, {"rotary_scaling": (4.0,)}),
        ({"rope_type": "dynamic", "factor": 2.0}, {"rotary_scaling": (2.0, 64.0)}),
        (
            {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
            | {"original_max_position_embeddings": 16},
            {"rotary_scaling": (8.0, 1.0, 4.0, 16.0)},
        ),
        (
            {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4},
            {"rotary_scaling": (8.0, 1.0, 4.0, 64.0)},  # of all positions
        ),
    ],
)
def test_scalings_that_are_numbers(entry, expected):
    usual = {"position": "rotary", "rotary_theta": 1e4}
    assert rotary_fields(entry, SETTINGS, 8) == usual | expected


def test_a_dynamic_scaling_begins_at_all_positions_whatever_a_model_was_trained_on():
    settings = SETTINGS | {"original_max_position_embeddings": 16}
    fields = rotary_fields({"rope_type": "dynamic", "factor": 2.0}, settings, 8)
    assert fields["rotary_scaling"] == (2.0, 64.0)
    llama = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
    assert rotary_fields(llama, settings, 8)["rotary_scaling"][3] == 16.0
    entry = llama | {"original_max_position_embeddings": 32}  # the family's comes before it
    assert rotary_fields(entry, settings, 8)["rotary_scaling"][3] == 16.0


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"truncate": False},
        {"beta_fast": 2.0, "beta_slow": 0.5},
        {"beta_slow": 1e-3},  # a pair beyond the last
        {"factor": 1.0},
    ],
)
def test_yarn_divides_slow_waves_and_keeps_fast_ones(more):
    """Equations 20 to 23 of Peng et al. 2023, wave by wave; its bounds are rounded outwards."""
    theta, width, original = 100.0, 16, 256
    entry = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": original}
    entry |= more
    fields = rotary_fields(entry, SETTINGS | {"rope_theta": theta}, width)
    ((length, frequencies),) = fields["rotary_tables"]
    assert length == ANY_LENGTH and len(frequencies) == width // 2

    def find_pair(turns):
        """The pair d of 2 π turns = original · theta^(−2 d/width)."""
        return width / 2 * math.log(original / (2 * math.pi * turns), theta)

    low, high = find_pair(entry.get("beta_fast", 32.0)), find_pair(entry.get("beta_slow", 1.0))
    if entry.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    for pair, frequency in enumerate(frequencies):
        plain, slow = theta ** (-2 * pair / width), min(max((pair - low) / (high - low), 0), 1)
        assert_close(frequency, plain * (1 - slow) + plain / entry["factor"] * slow)
    assert 0 < high - low < width


def test_yarn_jumps_where_both_bounds_are_one_pair():
    """Waves up to that pair stay, and those behind it are divided."""
    entry = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    between = {"truncate": False, "beta_fast": 2.0, "beta_slow": 2.0}  # 5.24, of no pair
    first = {"beta_fast": 50.0, "beta_slow": 50.0}  # −0.36, from 0 to 0
    settings = SETTINGS | {"rope_theta": 100.0}
    for bounds, last in ((between, 5), (first, 0)):
        ((_, frequencies),) = rotary_fields(entry | bounds, settings, 16)["rotary_tables"]
        for pair, frequency in enumerate(frequencies):
            assert_close(frequency, 100 ** (-pair / 8) / (1 if pair <= last else 4))


def test_longrope_divides_each_wave_by_its_own_number():
    entry = {"rope_type": "longrope", "short_factor": [1, 2], "long_factor": [4, 8]}
    settings = SETTINGS | {"original_max_position_embeddings": 16, "rope_theta": 100.0}
    fields = rotary_fields(entry, settings, 4)
    named = rotary_fields(entry | {"attention_factor": 0.7, "factor": 2.0}, settings, 4)
    assert named == fields | {"rotary_factor": 0.7}
    assert rotary_fields(entry | {"rope_type": "su"}, settings, 4) == fields  # its older name
    (short, near), (long, far) = fields["rotary_tables"]
    assert (short, long) == (16, ANY_LENGTH)
    assert_close(near, [1, 1 / 20])
    assert_close(far, [1 / 4, 1 / 80])
    assert fields["rotary_factor"] == pytest.approx(math.sqrt(1 + math.log(4) / math.log(16)))
    for factor, expected in ((0.5, 1.0), (1.0, 1.0), (2.0, math.sqrt(1 + 1 / 4))):
        fields = rotary_fields(entry | {"factor": factor}, settings, 4)
        assert fields["rotary_factor"] == pytest.approx(expected)


def test_yarn_takes_its_size_from_the_first_entry_that_says_it():
    """attention_factor, then both of mscale, then 0.1 ln(factor) + 1; 1 where nothing is scaled."""
    entry = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    scales = {"mscale": 2.0, "mscale_all_dim": 0.5}
    grown = 0.1 * math.log(4)
    for more, expected in (
        ({}, grown + 1),
        ({"attention_factor": 0.7} | scales, 0.7),
        (scales, (2 * grown + 1) / (0.5 * grown + 1)),
        ({"mscale": 2.0}, grown + 1),
        ({"mscale_all_dim": 0.5}, grown + 1),
        ({"factor": None}, grown + 1),  # 64 positions, of which it first saw 16
        ({"factor": 1.0}, 1.0),
        ({"factor": 0.5}, 1.0),
    ):
        assert_close(rotary_fields(entry | more, SETTINGS, 8)["rotary_factor"], expected)


def test_positions_reach_as_far_as_the_scaling():
    for entry, expected in (
        ({}, 64),
        ({"rope_type": "linear", "factor": 4.0}, 64),
        ({"rope_type": "dynamic", "factor": 1.5}, 96),
        ({"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}, 128),
        ({"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}, 64),
        ({"type": "yarn", "original_max_position_embeddings": 16}, 64),
        ({"type": "yarn", "factor": 8.0}, 64),
        ({"rope_type": "linear", "type": "dynamic", "factor": 1.5}, 64),
        ({"rope_type": "dynamic"}, 64),
    ):
        assert num_positions(entry, SETTINGS) == expected


def test_layers_with_a_window_have_a_base_without_scaling():
    assert local_theta(SETTINGS | NONE, 500.0) == 500
    local = {"rope_parameters": {"sliding_attention": {"rope_theta": 700.0}}}
    assert local_theta(SETTINGS | NONE | local, 500.0) == 700
    scaled = {"rope_scaling": {"type": "linear", "factor": 4.0}}  # of the layers without a window
    assert local_theta(SETTINGS | local | scaled, 500.0) == 700
    local["rope_parameters"]["sliding_attention"]["rope_type"] = "yarn"
    message = "sliding_attention.rope_type='yarn' of a llama model is not supported"
    is_refused(message, local_theta, SETTINGS | NONE | local, 500.0)
    local["rope_parameters"]["sliding_attention"] = {"partial_rotary_factor": 0.5}
    message = "sliding_attention.partial_rotary_factor=0.5 of a llama model is not supported"
    is_refused(message, local_theta, SETTINGS | NONE | local, 500.0)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"rope_type": "spiral"}, "rope_type='spiral' is not one of"),
        ({"rope_type": "linear", "factor": -1}, "factor=-1 .*is not (positive|between)"),
        ({"rope_theta": 0}, "rope_theta=0 of the rotary positions is not positive"),
        (
            {"rope_type": "longrope", "short_factor": [1], "long_factor": [1]},
            "short_factor is not a",
        ),
        (
            {"rope_type": "longrope", "short_factor": [1, 2, 3, "4"], "long_factor": [1] * 4},
            "short_factor is not a list of 4 numbers",
        ),
    ],
)
def test_scalings_that_mean_nothing_are_named(entry, message):
    is_refused(message, rotary_fields, entry, SETTINGS, 8)
