"""The law of collapse and instability for an encoder-decoder: `stability` of both halves, chained.

The decoder attends to what is expected of the encoder's output, and an update of the encoder moves
the decoder through it.

Axis letters: m source tokens, n target tokens, d width, l layers.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse.network import (
    EncoderDecoderConfig,
    EncoderDecoderParams,
    decoder_params,
    full_precision,
)
from rank_collapse.theory import stability

HALVES = ("encoder", "decoder")


def update_sizes(config: EncoderDecoderConfig, size: Any = 1.0) -> dict[str, Any]:
    """`stability.update_sizes` of both halves: {half: {part: {matrix: [L]}}}."""
    return {half: stability.update_sizes(getattr(config, half), size) for half in HALVES}


@full_precision
def expected_pass(
    params: EncoderDecoderParams,
    source: Any,
    target: Any,
    config: EncoderDecoderConfig,
    *,
    sizes: Any = None,
    source_mask: Any = None,
    target_mask: Any = None,
) -> dict[str, stability.ExpectedTrace]:
    """`stability.expected_pass` of both halves, {"encoder": ..., "decoder": ...}.

    Cross-attention with uniform weights gives every target token the mean of the memory, of squared
    length m = ρ_e + (1 − ρ_e)/n_e: as a branch it makes target tokens equal as self-attention does,
    and where the encoder has collapsed m is 1, its largest.

    Args:
        params, source, target, config, source_mask, target_mask: As `encoder_decoder.apply` takes
            them; states [m, d] and [n, d] too.
        sizes: Squared relative sizes of updates, as of `update_sizes`; None for none.

    Raises:
        ValueError: As `stability.expected_pass`.
    """
    sizes = update_sizes(config, 0.0) if sizes is None else sizes
    encoder = stability.expected_pass(
        params.encoder, source, config.encoder, sizes=sizes["encoder"], mask=source_mask
    )
    # The pass asks the memory for its shape alone where it is given the kernel.
    memory = jnp.zeros((encoder.output.variance.shape[0], config.encoder.d_model))
    decoder = stability.expected_pass(
        decoder_params(params, config),
        target,
        config.decoder,
        sizes=sizes["decoder"],
        mask=target_mask,
        memory=memory,
        memory_mask=source_mask,
        memory_kernel=encoder.output,
    )
    return {"encoder": encoder, "decoder": decoder}


@full_precision
def expected_gradient_norms(
    params: EncoderDecoderParams,
    source: Any,
    target: Any,
    config: EncoderDecoderConfig,
    *,
    cotangent: Any = None,
    sizes: Any = None,
    **masks: Any,
) -> tuple[dict[str, dict[str, dict[str, Float[Array, "l"]]]], dict[str, stability.ExpectedTrace]]:
    """√E‖∂loss/∂W‖_F² of every matrix of both halves, for a loss of the decoder's output.

    Args:
        params, source, target, config, sizes, **masks: As in `expected_pass`.
        cotangent: As in `stability.expected_gradient_norms`, of the target tokens.

    Returns:
        ({half: {part: {matrix: [L]}}}, the traces of `expected_pass`).
    """

    def moved(sizes):
        traces = expected_pass(params, source, target, config, sizes=sizes, **masks)
        change = traces["decoder"].output.change
        seen = jnp.trace(change) if cotangent is None else jnp.sum(cotangent * change)
        return config.decoder.d_model * seen, traces

    sizes = update_sizes(config, 0.0) if sizes is None else sizes
    found, traces = jax.grad(moved, has_aux=True)(sizes)
    parts = {"encoder": params.encoder, "decoder": decoder_params(params, config)}
    norms = {
        half: stability.norms_of_derivatives(found[half], parts[half], getattr(config, half))
        for half in HALVES
    }
    return norms, traces
