"""What is measured of one trained encoder-decoder: what it writes, attends to and keeps apart."""

from typing import Any

import jax
import jax.numpy as jnp

from experiments.trained.training import Setup
from rank_collapse.measures.residuals import residual_ratio
from rank_collapse.network import encoder_decoder
from rank_collapse.training import decoded, path_accuracy

NUM_PROFILED = 32  # pairs whose residuals are averaged


def measure(setup: Setup, model: Any, data: Any, _: Any) -> dict[str, Any]:
    """One seed's measurements.

    Returns:
        "whole": {metric: []} under teacher forcing, "exact": share of the held-out sequences that
        are written exactly, decoded greedily, "residual": {half: [L + 1]}, the mean over pairs of
        ‖res(X^l)‖ / ‖X^l‖ of the tokens that exist, and of the first pair "attention":
        {kind: [L, h, n, m]} and "shown": {what: [tokens]}.
    """
    held_out, config = data["eval"], setup.recipe.config
    written = decoded.decode_pairs(model, held_out, config)

    def profile(item):
        source, source_mask, read, read_mask = item
        trace = encoder_decoder.apply(
            model, source, read, config, source_mask=source_mask, target_mask=read_mask
        )
        halves = {"encoder": (trace.encoder, source_mask), "decoder": (trace.decoder, read_mask)}
        residual = {
            name: jax.vmap(lambda x, m=mask: residual_ratio(x, mask=m))(half.hidden)
            for name, (half, mask) in halves.items()
        }
        attention = {name: half.attention for name, (half, _) in halves.items()}
        return residual, attention | {"cross": trace.decoder.cross_attention}

    pairs = held_out.first(NUM_PROFILED)
    items = (pairs.source, pairs.source_mask, pairs.inputs, pairs.target_mask[:, :-1])
    residual, attention = jax.vmap(profile)(items)
    return {
        "whole": path_accuracy.whole_model(model, held_out, config, setup.metrics),
        "exact": decoded.exact_share(written, held_out),
        "residual": jax.tree.map(lambda a: jnp.mean(a, axis=0), residual),
        "attention": jax.tree.map(lambda a: a[0], attention),
        "shown": {
            "source": held_out.source[0],
            "inputs": held_out.inputs[0],
            "labels": held_out.labels[0],
            "written": written.tokens[0],
        },
    }
