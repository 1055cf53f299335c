"""What the branches of a network add to its stream: after their gains and their own norms."""

import jax
import jax.numpy as jnp

from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.parameters import TransformerParams, layer_params
from rank_collapse.network.residual import layer_gains, residual_specs, scale_summands
from rank_collapse.network.trace import Trace


def compute_added_branches(
    trace: Trace, params: TransformerParams, config: TransformerConfig
) -> dict[str, jax.Array]:
    """Compute γ N'(branch) of each layer's attention and MLP, which a sublayer adds to the stream.

    A trace has the branches before the gain γ and the norm N' (of norm_placement "sandwich",
    "branch" and "both"). `rc.record` needs what is added:

        added = rc.network.compute_added_branches(trace, params, config)
        rc.record(trace, "a.safetensors", **added)

    Args:
        trace: From `apply` or `apply_batch`.
        params, config: The network.

    Returns:
        {"attention_branch": as in the trace, "mlp_branch": where the network has MLPs}.
    """
    branches = {
        kind: jnp.moveaxis(getattr(trace.layers, f"{kind}_branch"), trace.layer_axis, 0)
        for kind in config.kinds
        if kind != "cross"
    }
    gains = layer_gains(config, trace.hidden.dtype, params)

    def add_layer(fields):
        """Scale the branches of one layer by their gains and norms."""
        index, gain, layer_branches = fields
        block = layer_params(params, config, index)
        specs = residual_specs(block, config, gain)
        tokens = {kind: a.reshape(-1, a.shape[-1]) for kind, a in layer_branches.items()}
        summands = {kind: scale_summands(specs[kind], a, a)[1] for kind, a in tokens.items()}
        return {
            f"{kind}_branch": a.reshape(layer_branches[kind].shape) for kind, a in summands.items()
        }

    added = jax.lax.map(add_layer, (jnp.arange(config.depth), gains, branches))
    return {name: jnp.moveaxis(a, 0, trace.layer_axis) for name, a in added.items()}
