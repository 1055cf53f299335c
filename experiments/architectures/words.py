"""What run_architectures asks of a language model about next tokens: by path length, by layer."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rank_collapse.paths import next_token
from rank_collapse.paths.contributions import PathContributions
from rank_collapse.paths.gradients import gradient_effects
from rank_collapse.pretrained import OpenCheckpoint
from rank_collapse.pretrained.gradients import stream_gradients
from rank_collapse.pretrained.next_token import loss_gradient, next_tokens, targets_of


def by_length(
    source: OpenCheckpoint, sums: PathContributions, inputs: dict[str, Any]
) -> dict[str, Any]:
    """Loss and next token of lengths up to k, and of all lengths but k."""
    targets, keep = targets_of(np.asarray(inputs["x"]), inputs["mask"])
    sums = jax.tree.map(jnp.asarray, sums)
    parts = jax.vmap(lambda found: next_token.sums_by_length(found)[0])(sums)
    _, chosen = next_token.sums_by_length(jax.tree.map(lambda a: a[0], sums))
    known = next_tokens(source.unembedding, parts, chosen, targets)
    return jax.vmap(next_token.by_length)(known, jnp.asarray(keep))


def without_layers(
    source: OpenCheckpoint, outputs: Any, whole: Any, inputs: dict[str, Any]
) -> dict[str, Any]:
    """Loss without each layer, and the share of positions that keep their next token.

    Args:
        source: The model.
        outputs: Without each layer [b, l, n, d].
        whole: The output [b, n, d].
        inputs: Of the model.
    """
    targets, keep = targets_of(np.asarray(inputs["x"]), inputs["mask"])
    states = np.concatenate([np.asarray(whole)[:, None], outputs], axis=1)
    known = next_tokens(source.unembedding, states, jnp.eye(states.shape[1]), targets)
    loss, same = jax.vmap(next_token.agreement)(known, jnp.asarray(keep))
    return {"loss": loss[:, 0], "loss_without": loss[:, 1:], "same_without": same[:, 1:]}


def gradients(
    source: OpenCheckpoint, found: dict[str, Any], inputs: dict[str, Any]
) -> dict[str, Any]:
    """Share of the loss's gradient at the input that comes along paths of each length."""
    targets, keep = targets_of(np.asarray(inputs["x"]), inputs["mask"])
    output = jnp.asarray(found["sums"].output)
    known = next_tokens(source.unembedding, output[:, None], jnp.eye(1), targets)
    pull = loss_gradient(source.unembedding, output, known, targets, keep)
    split = stream_gradients(source, inputs, found["states"], pull)
    return jax.vmap(gradient_effects)(split)
