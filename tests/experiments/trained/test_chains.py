"""Chained attention of random paths, text by text, against products of matrices in NumPy."""

import jax
import numpy as np

import rank_collapse as rc
from experiments.trained.chains import ChainPass
from rank_collapse import pretrained
from rank_collapse.paths.sets import sample_path_sets
from tests.support.closeness import assert_close

DEPTH, HEADS, PATHS, SEED = 3, 2, 4, 7


def composite(matrix):
    """√(‖A‖₁ ‖A‖_∞)."""
    sizes = np.abs(matrix)
    return np.sqrt(sizes.sum(axis=0).max() * sizes.sum(axis=1).max())


def test_paths_of_each_length_have_the_ratios_of_their_products():
    """Of one text all tokens exist, of the other four: rows of the others do not count."""
    config = rc.transformer(DEPTH, HEADS, 8, norm_placement="post")
    params = rc.init(jax.random.key(0), config, 2.0)
    x = np.asarray(jax.random.normal(jax.random.key(1), (2, 6, 8)))
    mask = np.arange(6) < np.array([[6], [4]])
    group = pretrained.Group((("chains", ChainPass(PATHS, seed=SEED)),))
    source = pretrained.InMemory(params, config)
    measured = pretrained.stream(source, {"x": x, "mask": mask}, {"": group})[""]["chains"]
    lengths = np.arange(1, DEPTH + 1)
    paths = sample_path_sets(jax.random.key(SEED), lengths, 1, PATHS, DEPTH, HEADS)
    paths = np.asarray(paths).reshape(DEPTH, PATHS, DEPTH)
    assert ((paths < HEADS).sum(axis=-1) == lengths[:, None]).all()
    expected = np.zeros((2, DEPTH, PATHS))
    for text, exists in enumerate(mask):
        attention = np.asarray(rc.apply(params, x[text], config, mask=exists).attention, np.float64)
        for place in np.ndindex(DEPTH, PATHS):
            product = np.eye(6)
            for weights, head in zip(attention, paths[place], strict=True):
                product = product if head == HEADS else weights[head] @ product
            rows = product[exists]
            expected[text][place] = composite(rows - rows.mean(axis=0)) / composite(rows)
    assert_close(measured, expected, rtol=1e-3)
    assert len(np.unique(measured.round(7))) > DEPTH * PATHS  # another path has another ratio
