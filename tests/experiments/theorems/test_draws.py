"""Settings of the theorems that are registered."""

import pytest

from experiments.run_theorems import THEOREMS
from experiments.theorems import draws
from experiments.verdicts import STATEMENTS

pytestmark = pytest.mark.usefixtures("x64")


def test_registered_settings_are_those_that_are_measured():
    for key, statistic in draws.STATISTICS.items():
        statement = STATEMENTS[key]
        assert [*statistic.settings] == [*statement.settings], key
        assert statement.experiments == ("run_theorems",) and statistic.theorem in THEOREMS
    listed = {key for key, *_ in draws.list_draws({"width": 0, "noise": 0})}
    assert listed == {"width law", "noise apart"}
