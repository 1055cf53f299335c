"""Measurements that go through a network once, cut at the borders of its layers.

A pass sees one layer at a time: what came in, what the layer computed, and what the pass itself
carries along. `run` scans it over a network in memory; `rank_collapse.pretrained.stream` calls the
same functions with one layer's weights after the other, so that a model may be larger than memory.

Axis letters: n tokens, d width, l layers.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse.network import layers
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.entry import Entry
from rank_collapse.network.gains import LayerGains, layer_gains
from rank_collapse.network.parameters import BlockParams, TransformerParams
from rank_collapse.network.transformer import LayerTrace, block, scan_layers


class Layer(NamedTuple):
    """One layer as a pass sees it.

    Attributes:
        params: Its parameters.
        gains: Its gains.
        index: Its index, traced: one program serves all layers.
        x: [n, d], what comes in; of passes with a state of their own X^0, in every layer.
        trace: What the layer computed from it; None for such passes.
    """

    params: BlockParams
    gains: LayerGains
    index: Any
    x: Float[Array, "n d"]
    trace: LayerTrace | None


@runtime_checkable
class LayerPass(Protocol):
    """Three pure functions of one example; hashable, since programs are compiled for it.

    Attributes:
        forward: Whether it looks at the forward pass. False for passes with a state of their own.
    """

    forward: bool

    def begin(self, entry: Entry, config: TransformerConfig) -> Any:
        """What is carried into the first layer: a pytree whose shapes no layer changes."""

    def step(
        self, layer: Layer, carry: Any, entry: Entry, config: TransformerConfig
    ) -> tuple[Any, Any]:
        """(what is carried on, what this layer has to tell); what nobody reads is not computed."""

    def finish(
        self,
        params: TransformerParams,
        last: Float[Array, "n d"],
        carry: Any,
        told: Any,
        entry: Entry,
        config: TransformerConfig,
    ) -> Any:
        """The result, from the last hidden states, the carry, and all layers' words stacked [l].

        Of `params` only what stands outside of the layers may be read.
        """


def through(
    passes: Sequence[LayerPass],
    layer: tuple[BlockParams, LayerGains, Any],
    x: Float[Array, "n d"],
    carries: tuple,
    entry: Entry,
    config: TransformerConfig,
) -> tuple[Float[Array, "n d"], tuple, tuple]:
    """One layer of all passes: (its hidden states, carries, what each pass was told).

    Args:
        passes: They share the layer's own computation.
        layer: (parameters, gains, index).
        x: The layer's input.
        carries: Of each pass.
        entry: From `enter`.
        config: The network.
    """
    params, gains, index = layer
    trace, hidden = None, x
    if any(p.forward for p in passes):
        trace = block(params, x, config, gains, entry, layer=index)
        hidden = trace.hidden
    seen = Layer(params, gains, index, x, trace)
    done = [p.step(seen, c, entry, config) for p, c in zip(passes, carries, strict=True)]
    return hidden, tuple(carry for carry, _ in done), tuple(told for _, told in done)


def run(
    layer_pass: LayerPass, params: TransformerParams, entry: Entry, config: TransformerConfig
) -> Any:
    """A pass over a network in memory: a scan over its layers.

    Args:
        layer_pass: The measurement.
        params, entry: From `enter`.
        config: The network.
    """

    def body(state, step):
        x, carries = state
        layer, (gains, index) = step
        x, carries, (told,) = through(
            (layer_pass,), (layer, gains, index), x, carries, entry, config
        )
        return (x, carries), told

    swept = layer_gains(config, entry.x.dtype, params), jnp.arange(config.depth)
    start = entry.x, (layer_pass.begin(entry, config),)
    (last, (carry,)), told = scan_layers(body, start, params, config, swept)
    return layer_pass.finish(params, last, carry, told, entry, config)


def output_of(
    params: TransformerParams, last: Float[Array, "n d"], config: TransformerConfig
) -> Float[Array, "n d"]:
    """X^L behind the final norm where there is one."""
    if not config.final_norm:
        return last
    return layers.norm(params.final_norm, last, config.norm, config.norm_eps)


@dataclasses.dataclass(frozen=True)
class OutputPass:
    """The output of the network: a `LayerPass`."""

    forward: ClassVar[bool] = True

    def begin(self, entry: Entry, config: TransformerConfig) -> tuple[()]:
        """Nothing."""
        return ()

    def step(
        self, layer: Layer, carry: Any, entry: Entry, config: TransformerConfig
    ) -> tuple[Any, tuple[()]]:
        """Nothing."""
        return carry, ()

    def finish(
        self, params: Any, last: Any, carry: Any, told: Any, entry: Entry, config: TransformerConfig
    ) -> Float[Array, "n d"]:
        """The output."""
        return output_of(params, last, config)


def one_row(config: TransformerConfig) -> TransformerConfig:
    """The config of a network whose layers all have the one row of parameters that is at hand.

    `enter`, `layer_gains` and the surgeries then take a stack of one row, at any depth.
    """
    return config.replace(layer_map=(0,) * config.depth)


def row_of(params: TransformerParams) -> BlockParams:
    """The one row of a stack."""
    return jax.tree.map(lambda a: a[0], params.layers)
