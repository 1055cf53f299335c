"""One stack, or an encoder and a decoder: what run_stability does with both alike.

What belongs to the halves of an encoder-decoder is kept as {"encoder": ..., "decoder": ...}, what
belongs to a stack alone as {"": ...}; the last of them is the one that puts the output out.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import rank_collapse as rc
from rank_collapse.measures import updates
from rank_collapse.network import encoder_decoder, layers
from rank_collapse.network.encoder_decoder import EncoderDecoderConfig
from rank_collapse.network.gains import layer_gains
from rank_collapse.theory import encoder_decoder as theory_of_both, stability

HALVES = ("encoder", "decoder")
ALONE = ""


def halves(network: Any) -> dict[str, Any]:
    """The stacks of a config or of parameters, by half."""
    if hasattr(network, "decoder"):
        return {half: getattr(network, half) for half in HALVES}
    return {ALONE: network}


def last(by_half: dict[str, Any]) -> Any:
    """Of the stack that puts the output out."""
    return by_half["decoder"] if "decoder" in by_half else by_half[ALONE]


def mapped(fn: Callable, network: Any, *others: dict[str, Any]) -> Any:
    """The config or parameters with fn(stack, *others of that half) in the place of each stack."""
    new = {h: fn(part, *(other[h] for other in others)) for h, part in halves(network).items()}
    return new[ALONE] if ALONE in new else network.replace(**new)


def init(key: Any, config: Any) -> Any:
    """Parameters of either."""
    made = encoder_decoder.init if isinstance(config, EncoderDecoderConfig) else rc.init
    return made(key, config)


def traces(params: Any, inputs: dict[str, Any], config: Any) -> dict[str, rc.Trace]:
    """The pass on states [n, d] of each half; the decoder looks at the encoder's output."""
    if ALONE in inputs:
        return {ALONE: rc.apply(params, inputs[ALONE], config)}
    both = encoder_decoder.apply(params, inputs["encoder"], inputs["decoder"], config)
    return {half: getattr(both, half) for half in HALVES}


def expected(
    params: Any, inputs: dict[str, Any], config: Any, size: Any, *, gradients: bool
) -> tuple[dict[str, stability.ExpectedTrace], dict[str, Any] | None]:
    """(what the one law expects of each half, and of gradients where that is asked for).

    NaN of networks that it does not cover, as where branches see tokens that no norm has scaled.
    """
    if any(stability.COVERS.refusal(stack) for stack in halves(config).values()):
        other = mapped(lambda stack: stack.replace(norm_placement="none"), config)
        shapes = jax.eval_shape(lambda: expected(params, inputs, other, size, gradients=gradients))
        return jax.tree.map(lambda a: jnp.full(a.shape, jnp.nan, a.dtype), shapes)
    if ALONE in inputs:
        theory, given = stability, (params, inputs[ALONE], config)
    else:
        theory, given = theory_of_both, (params, inputs["encoder"], inputs["decoder"], config)
    sizes = theory.update_sizes(config, size)
    found = None
    if gradients:
        found, traces = theory.expected_gradient_norms(*given, sizes=sizes)
    else:
        traces = theory.expected_pass(*given, sizes=sizes)
    if ALONE in inputs:
        traces, found = {ALONE: traces}, found and {ALONE: found}
    return traces, found


def matrices_of(params: Any) -> dict[str, Any]:
    """`updates.matrices_of` each half."""
    return {half: updates.matrices_of(part) for half, part in halves(params).items()}


def gradients(loss: Callable[[Any], Any], params: Any) -> dict[str, Any]:
    """∂loss/∂W of every matrix of each half, as `updates.matrices_of`."""
    return jax.grad(lambda found: loss(mapped(updates.with_matrices, params, found)))(
        matrices_of(params)
    )


def normalised_output(params: Any, inputs: dict[str, Any], config: Any) -> jax.Array:
    """x̂ of the last layer, [n, d]."""
    own = last(halves(config))
    return layers.norm(
        None, last(traces(params, inputs, config)).hidden[-1], own.norm, own.norm_eps
    )  # fmt: skip


def changes(
    params: Any, inputs: dict[str, Any], config: Any, directions: dict[str, Any], size: Any
) -> dict[str, Any]:
    """{name: |x̂ − x̂*|²/d of the normalised output} after an update of all matrices.

    Args:
        directions: {name: {half: matrices}}; each matrix moves by the same relative size.
        size: ‖W* − W‖/‖W‖.
    """

    def change(direction):
        moved = mapped(lambda part, u: updates.moved(part, u, size), params, direction)
        return jnp.mean(jnp.square(normalised_output(moved, inputs, config) - before))

    before = normalised_output(params, inputs, config)
    together = jax.tree.map(lambda *a: jnp.stack(a), *directions.values())
    return dict(zip(directions, jax.lax.map(change, together), strict=True))


def sgd_change(
    params: Any, inputs: dict[str, Any], config: Any, gradients: dict[str, Any]
) -> jax.Array:
    """|δx̂|²/(d η²) of an SGD step W − η ∂loss/∂W of all matrices, to first order in η."""
    own = matrices_of(params)

    def output(found):
        return normalised_output(mapped(updates.with_matrices, params, found), inputs, config)

    return jnp.mean(jnp.square(jax.jvp(output, (own,), (gradients,))[1]))


def gradient_bound(params: Any, gradients: dict[str, Any], target: Any, size: Any) -> jax.Array:
    """e² (Σ‖W‖‖∂W‖)²/‖u‖², per entry of x̂: what a step of relative size e along every matrix's
    gradient changes the output by at least, since it changes the loss u·x̂ by e Σ‖W‖‖∂W‖,
    u the target [n, d].
    """
    norms = map(updates.norms_of, (matrices_of(params), gradients))
    products = jax.tree.map(lambda w, g: jnp.sum(w * g), *norms)
    total = sum(jax.tree.leaves(products))
    return jnp.square(size * total) / (jnp.sum(jnp.square(target)) * target.size)


def skip_gains(config: Any) -> dict[str, Any]:
    """λ of every sublayer: {half: Gains of [L]}."""
    return {half: layer_gains(part, jnp.float32).skip for half, part in halves(config).items()}


def admin_gains(params: Any, batch: dict[str, Any], config: Any) -> dict[str, Any]:
    """Admin's ω profiled on a batch of states of each half, as `skip_gains`."""
    if ALONE in batch:
        return skip_gains(rc.admin_profile(params, batch[ALONE], config))
    return skip_gains(
        encoder_decoder.admin_profile(params, batch["encoder"], batch["decoder"], config)
    )
