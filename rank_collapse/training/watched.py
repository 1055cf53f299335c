"""What is watched of a network while it trains: `rc.monitor` of every layer, on a few examples."""

from typing import Any

import jax
from jaxtyping import Array, Float

from rank_collapse.measures.monitor import monitor
from rank_collapse.network import entry, transformer
from rank_collapse.network.config import TransformerConfig
from rank_collapse.training.models import Model

EXAMPLES = 8


def layer_scalars(
    model: Model, data: dict[str, Any], config: TransformerConfig
) -> dict[str, Float[Array, "l"]]:
    """`monitor` of each layer's output and attention, means over the first `EXAMPLES` held out.

    For the `watch` of an `Ensemble`.

    Args:
        model: A network with a read-out.
        data: With the entry "eval".
        config: The network.
    """
    examples = data["eval"].first(EXAMPLES)

    def layers(inputs, mask):
        states = entry.input_states(model.network, inputs, config)
        trace = transformer.apply(model.network, states, config, mask=mask)
        scalars = jax.vmap(lambda x, p: monitor(x, p, mask=mask))
        return scalars(trace.hidden[1:], trace.attention)

    found = jax.vmap(layers)(examples.inputs, examples.mask)
    return jax.tree.map(lambda a: a.mean(axis=0), found)
