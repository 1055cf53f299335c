"""The forward pass with the scalars of `rc.monitor` of every layer."""

import dataclasses

import jax
from jaxtyping import Array, Float

from rank_collapse.annotations import ArrayLike, Tree
from rank_collapse.measures.monitor import monitor
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.inputs import prepare_inputs
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.passes import LayerPass, WalkResult, run_pass
from rank_collapse.network.transformer import LayerValues
from rank_collapse.network.walk import Layer


def monitored(
    params: TransformerParams,
    x: ArrayLike,
    config: TransformerConfig,
    *,
    attention: bool = True,
    **inputs: ArrayLike | None,
) -> tuple[Float[Array, "n d"], dict[str, Float[Array, "l"]]]:
    """Run the forward pass, and `monitor` each layer's states and attention.

    The scalars are computed inside the scan over the layers, so no layer's attention weights are
    stored for them. They carry no gradient. Their dictionary fits `jax.value_and_grad(...,
    has_aux=True)`.

    Args:
        params, x, config: See `rank_collapse.apply`.
        attention: Whether to measure the attention weights too.
        **inputs: Other inputs of `apply`; a mask [n] marks the tokens to measure.

    Returns:
        The output [n, d], and scalars [L] by name.

    Raises:
        ValueError: In the same cases as `apply`, or fewer than two tokens.
    """
    params, prepared = prepare_inputs(params, x, config, **inputs)
    return run_pass(MonitorPass(attention), params, prepared, config)


@dataclasses.dataclass(frozen=True)
class MonitorPass(LayerPass):
    """`monitored` layer by layer."""

    attention: bool = True

    def measure_layer(
        self, layer: Layer, x: Array, layer_values: LayerValues, carry: Tree
    ) -> tuple[Tree, Tree]:
        """Keep the carry, and compute the scalars of `monitor` from states without gradients."""
        trace = layer_values.trace
        hidden, weights = jax.lax.stop_gradient((trace.hidden, trace.attention))
        weights = weights if self.attention else None
        return carry, monitor(hidden, weights, mask=layer.inputs.token_mask)

    def build_result(
        self, walk_result: WalkResult
    ) -> tuple[Float[Array, "n d"], dict[str, Float[Array, "l"]]]:
        return walk_result.output, walk_result.layer_results
