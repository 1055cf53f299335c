"""Numbers in words."""

import pytest

from rank_collapse.report.wording import power_of_ten


@pytest.mark.parametrize(
    ("exponent", "text"),
    [(-231_234.6, "10⁻²³⁰⁰⁰⁰"), (-6.04, "10⁻⁶"), (12.3, "10¹²"), (-0.301, "0.5"), (0.0, "1")],
)
def test_powers_of_ten_are_written_as_powers(exponent, text):
    assert power_of_ten(exponent) == text
