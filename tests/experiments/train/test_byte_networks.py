"""Language models over bytes: distance from linear, scores of a head, texts that are too short."""

import jax
import numpy as np
import pytest

import rank_collapse as rc
from experiments.train.byte_networks import byte_model, linearisation_distance, text_bytes
from tests.oracles import draws
from tests.support.refusals import is_refused


@pytest.mark.full
def test_the_distance_from_linear_is_of_first_order_in_the_step():
    """It halves with the step, is 0 for a block linear in the moved weights, and equals finite
    differences."""
    with jax.enable_x64(True):
        config = rc.transformer(3, 2, 8, norm_placement="pre", mlp="gelu")
        params, x = draws.parameters(config), draws.tokens(5, 8)
        direction = draws.parameters(config, seed=1)

        def compute_distance(size, part=None):
            moved = jax.tree.map(lambda a, b: a + size * b, params, direction)
            if part is not None:
                attention = params.layers.attention.replace(w_o=moved.layers.attention.w_o)
                moved = params.replace(layers=params.layers.replace(attention=attention))
            return linearisation_distance(params, moved, x, part or config)

        full, half = compute_distance(1e-3), compute_distance(5e-4)
        np.testing.assert_allclose(full / half, 2, rtol=0.02)
        attention_only = config.replace(mlp="none", mlp_skip=False)
        assert np.all(compute_distance(1.0, attention_only) < 1e-12)
        trace = rc.apply(params, x, config)
        for layer in range(3):
            one = config.replace(depth=1)

            def run_block(size, layer=layer, one=one):
                layers = jax.tree.map(
                    lambda a, b: (a + size * b)[layer : layer + 1], params.layers, direction.layers
                )
                return rc.apply(params.replace(layers=layers), trace.hidden[layer], one).hidden[1]

            first = (run_block(1e-5) - run_block(-1e-5)) / 2e-5 * 1e-3
            remainder = run_block(1e-3) - run_block(0.0) - first
            ratio = np.linalg.norm(remainder) / np.linalg.norm(first)
            np.testing.assert_allclose(full[layer], ratio, rtol=1e-4)


def test_a_text_is_its_bytes_and_longer_than_a_sequence():
    assert text_bytes("aé", 2).tolist() == [97, 195, 169]
    is_refused("a text of 2 bytes is too short for 2 tokens", text_bytes, "ab", 2)


@pytest.mark.parametrize("width", [8, 64, 128])
def test_a_head_has_a_width_of_64_and_scores_over_64(width):
    config = byte_model(2, width)
    assert config.num_heads == max(1, width // 64) and config.embedding.vocab_size == 256
    assert np.sqrt(64) * config.temperature == 64
