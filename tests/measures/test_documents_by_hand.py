"""Documents of one packed row, by hand."""

import jax
import numpy as np

import rank_collapse as rc
from rank_collapse.measures import documents
from tests.support.closeness import assert_close
from tests.support.refusals import is_refused, parametrize_refusals

RNG = np.random.default_rng(11)


X = RNG.normal(size=(2, 5, 3)) + 0.5


def test_documents_are_the_tokens_of_a_number_that_exist_in_order_of_their_first():
    parts = documents.split_documents(
        [1, 0, 1, 0, 7, 9], np.array([1, 1, 1, 0, 1, 0], bool), (2, 6)
    )
    assert parts.row.tolist() == [[0]] * 3 + [[1]] * 3
    assert parts.place.tolist() == [[0, 2], [1, 0], [4, 0]] * 2
    assert parts.exists.tolist() == [[True, True], [True, False], [True, False]] * 2
    single = documents.split_documents(np.array([[True, False]]), None, (1, 2))
    assert single.place.tolist() == [[0, 0], [1, 0]] and single.exists[:, 0].all()
    assert not single.exists[:, 1].any()  # one token has no pair: two places at least
    x = np.arange(12.0).reshape(2, 6, 1)
    tokens = parts.split_tokens(x)[..., 0]
    assert tokens[parts.exists].tolist() == [0, 2, 1, 4, 6, 8, 7, 10]
    heads = parts.split_heads(np.stack([x, -x], axis=1))
    assert heads.shape == (6, 2, 2, 1)
    np.testing.assert_array_equal(heads[:, 1, :, 0], -tokens)
    p = RNG.random((2, 3, 6, 6))
    weights = parts.split_weights(p)
    np.testing.assert_array_equal(weights[0], p[0][:, [0, 2]][:, :, [0, 2]])
    np.testing.assert_array_equal(weights[4, :, 0, 0], p[1, :, 1, 1])
    assert (weights[4, :, :, 1] == 0).all()
    layers = parts.split_weights(np.stack([p, 2 * p]))
    np.testing.assert_array_equal(layers, np.stack([weights, 2 * weights]))


def test_documents_of_one_token_have_no_ratio():
    profile = rc.profile(X, segments=np.arange(5), measures=("residual_ratio", "spike_norm"))
    assert profile["residual_ratio"].shape == (2, 5) and np.isnan(profile["residual_ratio"]).all()
    assert_close(profile["spike_norm"], 1)


def split_traced(mask):
    return jax.eval_shape(lambda m: rc.profile(X, segments=[0, 0, 1, 1, 1], mask=m), mask)


def test_attention_of_one_packed_example_is_that_of_its_documents():
    p = np.zeros((2, 3, 5, 5))  # [l, h, n, n] of tokens 0 and 1, and 2 to 4
    p[:, :, :2, :2] = RNG.dirichlet(np.ones(2), (2, 3, 2))
    p[:, :, 2:, 2:] = RNG.dirichlet(np.ones(3), (2, 3, 3))
    names, last = ("attention_entropy", "first_column"), np.arange(5) == 4
    shorter = np.where(last, 0, p)
    shorter /= shorter.sum(axis=-1, keepdims=True)
    for weights, mask, end in ((p, None, 5), (shorter, ~last, 4)):
        profile = rc.profile(weights, segments=[4, 4, 0, 0, 0], measures=names, mask=mask)
        for column, places in enumerate((slice(0, 2), slice(2, end))):
            block = weights[:, :, places, places]
            entropy = -(block * np.log(block)).sum(axis=-1).mean(axis=(1, 2))
            assert_close(profile["attention_entropy"][:, column], entropy)
            first = block[..., 0].mean(axis=(1, 2))
            assert_close(profile["first_column"][:, column], first)


@parametrize_refusals(
    [
        (lambda: split_traced(np.ones(5, bool)), "pass num_segments="),
        (lambda: rc.profile(X, segments=["a"] * 5), "not an array of numbers"),
        (lambda: documents.split_documents([0.0, 1], None, (1, 2)), "dtype float64 and shape"),
        (
            lambda: documents.split_documents([0, 1, 1], None, (1, 2)),
            r"integers of shape \(2,\) or \(1, ",
        ),
    ]
)
def test_what_is_no_segment_is_refused(arguments, message):
    is_refused(message, *arguments)
