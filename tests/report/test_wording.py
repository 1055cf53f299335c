"""Numbers in words."""

import pytest

from rank_collapse.report.wording import describe_value, power_of_ten


@pytest.mark.parametrize(
    ("exponent", "text"),
    [
        (1.995, "99"),
        (2.0, "10²"),
        (-1.99, "0.01"),
        (-2.0, "10⁻²"),
        (1.0917, "12"),
        (-231_234.6, "10⁻²³⁰⁰⁰⁰"),
        (-6.04, "10⁻⁶"),
        (12.3, "10¹²"),
        (-0.301, "0.5"),
        (0.0, "1"),
    ],
)
def test_powers_of_ten_are_written_as_powers(exponent, text):
    assert power_of_ten(exponent) == text


@pytest.mark.parametrize(
    ("value", "text"), [(1, "1 sampled path"), (2, "2 sampled paths"), (11, "11 sampled paths")]
)
def test_one_of_a_kind_has_a_noun_in_the_singular(value, text):
    assert describe_value("num_paths", value) == text
    assert describe_value("d_model", 1) == "width 1"
