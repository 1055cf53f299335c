"""Memorising random labels: each token of each text gets a random class, whatever the token."""

from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Int

from rank_collapse.training.tasks.examples import Examples


def make_examples(
    key: Any, tokens: Int[Array, "b n"], mask: Bool[Array, "b n"], num_labels: int = 2
) -> Examples:
    """The given texts with uniformly random labels per token.

    Source: Dong et al. 2021, section 4.2.
    """
    labels = jax.random.randint(key, tokens.shape, 0, num_labels)
    return Examples(inputs=tokens, labels=labels, mask=mask)


def compact_vocabulary(
    tokens: Int[np.ndarray, "b n"],
) -> tuple[Int[np.ndarray, "b n"], Int[np.ndarray, "v"]]:
    """Token ids renumbered 0..v−1 by the tokens that occur, and the original id of each.

    Rows of an embedding table that never occur get no gradient, and without weight decay Adam
    leaves them alone: training on the compact table is the same, without their memory traffic.
    """
    used, compact = np.unique(tokens, return_inverse=True)
    return compact.reshape(tokens.shape).astype(np.int32), used
