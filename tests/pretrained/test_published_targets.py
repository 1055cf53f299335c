"""Published curves as targets of a folder: what other texts explain, and what they do not."""

import numpy as np
import pytest
from scipy import stats

from rank_collapse.pretrained import PUBLISHED, published_curves, published_targets

BERT = PUBLISHED["bert-base-cased"]


def curves(shift=0.0, texts=6):
    """Of texts that differ from the published curves by .02, at layer 3 of SAN+skip by more."""
    noise = 0.02 * np.random.default_rng(0).normal(size=(4, texts, 13))
    published = published_curves(BERT, 12)["pretrained"]
    found = {v: np.array(own) + noise[i] for i, (v, own) in enumerate(published.items())}
    found["SAN+skip"][:, 3] += shift
    return found


def test_what_differs_by_more_than_other_texts_explain_is_a_failure():
    near, far = (published_targets(BERT, curves(shift)) for shift in (0.0, 0.5))
    assert len(near) == 52 and not any(t.differs for t in near)
    assert [(t.variant, t.layer) for t in far if t.differs] == [("SAN+skip", 3)]
    (target,) = (t for t in far if t.differs)
    values = curves(0.5)["SAN+skip"][:, 3]
    low, high = stats.t.interval(1 - 0.05 / 52, 5, scale=stats.sem(values) * np.sqrt(7))
    assert target.tolerance == pytest.approx((high - low) / 2 + 1e-3)
    assert target.measured == pytest.approx(values.mean())
    broken = curves()
    broken["SAN"][0, 1] = np.nan
    assert [(t.variant, t.layer) for t in published_targets(BERT, broken) if t.differs] == [
        ("SAN", 1)
    ]


def test_it_is_a_failure_by_chance_in_one_model_of_twenty_at_most():
    """Of curves of which the published one is one more text."""
    rng, fails = np.random.default_rng(1), 0
    published = published_curves(BERT, 12)["pretrained"]
    for _ in range(400):
        noise = 0.02 * rng.normal(size=(4, 6, 13)) + 0.02 * rng.normal(size=(4, 1, 13))
        own = {v: np.array(curve) + noise[i] for i, (v, curve) in enumerate(published.items())}
        fails += any(t.differs for t in published_targets(BERT, own))
    assert 4 <= fails <= 30  # 20 at most are expected; 30 are 2.3 standard deviations more


def test_a_folder_of_another_shape_gets_one_line():
    for settings, given, words in (
        (BERT | {"hidden_size": 32}, curves(), "a bert of 12 layers of this width"),
        ({"model_type": "gpt2"}, curves(), "a gpt2 of 12 layers"),
        (BERT, {v: a[:, :5] for v, a in curves().items()}, "a bert of 4 layers"),
        (BERT, curves(texts=1), "one text has no spread"),
    ):
        with pytest.raises(ValueError, match=words) as refused:
            published_targets(settings, given)
        assert "\n" not in str(refused.value)
