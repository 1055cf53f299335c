"""Published curves beside measured ones: the tolerance by its formula, and what has none."""

import numpy as np
import pytest
from scipy import stats

from experiments.architectures import published_targets
from experiments.architectures.published_targets import READ_OFF, Target
from tests.support.refusals import is_refused

PUBLISHED = {"SAN": [0.6, 0.2, 0.01], "SAN+skip": [0.6, 0.5, 0.4]}


@pytest.fixture
def published(monkeypatch):
    monkeypatch.setattr(
        published_targets, "published_curves", lambda settings, depth: {"pretrained": PUBLISHED}
    )


def test_one_more_text_lies_within_the_tolerance_of_student(published):
    rng = np.random.default_rng(0)
    curves = {name: rng.normal(0.5, 0.1, (6, 3)) for name in PUBLISHED}
    targets = published_targets.published_targets({}, curves)
    assert [(t.variant, t.layer) for t in targets] == [(n, i) for n in PUBLISHED for i in range(3)]
    t = stats.t.ppf(1 - 0.05 / (2 * 6), 5)  # six values are compared
    for target in targets:
        values = curves[target.variant][:, target.layer]
        expected = t * values.std(ddof=1) * np.sqrt(1 + 1 / 6) + READ_OFF
        assert target.tolerance == pytest.approx(expected, rel=1e-9)
        assert target.measured == pytest.approx(values.mean())
        assert target.published == PUBLISHED[target.variant][target.layer]


def test_what_is_no_number_differs():
    assert not Target("SAN", 0, 0.5, 0.6, 0.1 + 1e-9).differs
    assert Target("SAN", 0, 0.5, 0.6, 0.09).differs
    assert Target("SAN", 0, 0.5, np.nan, 1.0).differs


def test_one_text_and_other_models_are_not_compared(published, monkeypatch):
    one = {"SAN": np.ones((1, 3))}
    is_refused("one text has no spread", published_targets.published_targets, {}, one)
    monkeypatch.setattr(published_targets, "published_curves", lambda *_: {})
    message = "no curve was published for gpt2 with 2 layers of this width"
    is_refused(message, published_targets.published_targets, {"model_type": "gpt2"}, one)
