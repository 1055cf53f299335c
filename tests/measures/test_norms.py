"""Measures of a few tokens by hand: defaults, edges, masks, and what is converted to what."""

import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.measures import norms
from tests.support.closeness import assert_close

RNG = np.random.default_rng(11)
# −3 and 4 are the largest entries, of different tokens and features
SMALL = np.array([[1.0, -3.0, 0.0], [2.0, 0.0, 0.5], [0.5, 1.0, 4.0]])
BY_HAND = {
    "one": 4.5,
    "inf": 5.5,
    "composite": np.sqrt(4.5 * 5.5),
    "frobenius": np.sqrt(1 + 9 + 4 + 0.25 + 0.25 + 1 + 16),
    "max": 4,
}


def test_a_quotient_by_0_is_another_value():
    """Denominators are arrays, of whole numbers too, or one number."""
    numerator = np.float32([6.0, 3.0])
    for denominator, expected in (
        (np.float32([2.0, 0.0]), [3, 9]),
        (np.array([0, 3]), [9, 1]),
        (3.0, [2, 1]),
        (0, [9, 9]),
    ):
        ratio = norms.safe_divide(numerator, denominator, 9.0)
        assert ratio.tolist() == expected and ratio.dtype == np.float32


@pytest.mark.parametrize("norm", BY_HAND)
def test_norms_by_hand_with_masks_and_of_every_size(norm):
    assert float(norms.matrix_norm(SMALL, norm)) == pytest.approx(BY_HAND[norm])
    assert float(norms.matrix_norm(-SMALL, norm)) == pytest.approx(BY_HAND[norm])
    for size in (1e-200, 1e200, 1e-300):
        value = float(norms.matrix_norm(size * SMALL, norm))
        assert value / size == pytest.approx(BY_HAND[norm], rel=1e-12)
    both = np.stack([SMALL, SMALL[::-1]])
    mask = np.array([[1, 1, 0], [1, 0, 0]], bool)
    expected = [norms.matrix_norm(SMALL[:2], norm), norms.matrix_norm(SMALL[2:], norm)]
    assert_close(norms.matrix_norm(both, norm, mask=mask), expected)


@pytest.mark.parametrize(("norm", "x"), [("one", np.eye(3)[:1].T), ("inf", np.eye(3)[:1])])
def test_small_entries_add_up_beside_a_large_one(norm, x):
    """2²⁴ + 1 is 2²⁴ in float32."""
    x = (2.0**24 * x + 1).astype(np.float32)
    assert norms.matrix_norm(x, norm) == 2**24 + 2


def test_norms_have_their_defaults():
    assert norms.norm_1(SMALL) == 4.5 and norms.norm_inf(SMALL) == 5.5
    assert rc.composite_norm(SMALL) == norms.matrix_norm(SMALL) == pytest.approx(np.sqrt(24.75))
    for measure in (rc.residual_ratio, rc.rank_one_ratio):
        composite, other = measure(SMALL, norm="composite"), measure(SMALL, norm="frobenius")
        assert measure(SMALL) == composite != other


def test_the_smaller_of_the_two_products_is_made():
    for shape in ((2, 5), (5, 2), (3, 3)):
        x = RNG.normal(size=shape)
        gram = norms.smaller_gram_matrix(x)
        assert gram.shape == (min(shape),) * 2
        assert_close(gram, x @ x.T if shape[0] <= shape[1] else x.T @ x)


def test_scaling_by_powers_of_four_changes_no_digit():
    for dtype, least, most in ((np.float64, 1e-300, 1e300), (np.float32, 1e-37, 1e38)):
        for size in (least, 0.25, 1, 3.99, 4, 17, most):
            x = np.array([[size, -size / 3]], dtype)
            scaled, scale = norms.scale_to_unit(x)
            power = (np.frexp(size)[1] - 1) // 2  # 4^power ≤ size < 4^(power + 1)
            assert float(scale) == 4.0**power and scaled.dtype == dtype
            np.testing.assert_array_equal(scaled * scale, x)
    scaled, scale = norms.scale_to_unit(np.array([[8.0, 1], [0.5, 0]]), axis=-1)
    np.testing.assert_array_equal(scaled, [[2, 0.25], [2, 0]])
    np.testing.assert_array_equal(scale, [4, 0.25])
    np.testing.assert_array_equal(norms.scale_to_unit(np.zeros((2, 2)))[0], 0)
