"""A measure of the sublayers of every layer, from a trace instead of another forward pass."""

from collections.abc import Callable
from typing import Any

from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.covers import EVERYTHING
from rank_collapse.network.inputs import PreparedInputs
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.transformer import Tokens, Trace
from rank_collapse.network.walk import Layer, Passage, walk, walk_layer


class Recorded(Tokens):
    """Tokens as a trace has them: `Layer.extra` is the layer's `LayerTrace`."""

    def branch(self, layer, kind, branch_input):
        return getattr(layer.extra, f"{kind}_branch"), None

    def after(self, layer, name, x):
        return getattr(layer.extra, "hidden" if name == "residual" else name)


def replay(
    measure: Callable[[Layer, dict[str, Passage]], Any],
    params: TransformerParams,
    trace: Trace,
    config: TransformerConfig,
) -> Any:
    """A measure of every layer's sublayers, [L, ...], from a trace: no branch is computed.

    Args:
        measure: (layer, {kind: `Passage`}) → arrays.
        params: Of the network; norms and learned gains are read.
        trace: From `apply`, of one example.

    Raises:
        ValueError: A network of several residual streams.
    """
    EVERYTHING.check(config)

    def step(layer, x):
        x, passages = walk_layer(Recorded(), layer, x)
        return x, measure(layer, passages)

    inputs = PreparedInputs(x=trace.hidden[0], context=trace.context)
    return walk(step, inputs.x, params, inputs, config, extra=trace.layers)[1]
