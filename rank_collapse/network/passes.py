"""Measurements that go through a network once, one layer after the other.

A pass sees one layer at a time: its input, what the layer computed, and what the pass itself
carries along. `run` scans it over a network in memory; `rank_collapse.pretrained.stream` calls the
same functions with one layer's weights after the other, so that a model may be larger than memory.

Axis letters: n tokens, d width, l layers.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.covers import EVERYTHING, FORWARD, Covers
from rank_collapse.network.inputs import PreparedInputs
from rank_collapse.network.parameters import BlockParams, TransformerParams
from rank_collapse.network.streams import start_streams
from rank_collapse.network.transformer import LayerValues, TokenAlgebra, Trace, compute_layer
from rank_collapse.network.walk import (
    Layer,
    SublayerValues,
    apply_final_norm,
    walk_layer,
    walk_layers,
)


class WalkResult(NamedTuple):
    """The data of a pass after the last layer."""

    params: TransformerParams  # of which only what stands outside of the layers may be read
    last_state: Any  # X^L [n, d], or its streams
    carry: Any
    layer_results: Any  # what all layers added [l, ...]
    prepared: PreparedInputs  # as at the start
    config: TransformerConfig

    @property
    def output(self) -> Float[Array, "n d"]:
        """X^L after the final norm where there is one."""
        return apply_final_norm(
            TokenAlgebra(), self.last_state, self.params, self.prepared, self.config
        )


class LayerPass:
    """A measurement of one example; hashable, since programs are compiled for it."""

    reads_layer_values: ClassVar[bool] = (
        True  # whether it reads the forward pass, or has a state of its own
    )
    covers: ClassVar[Covers] = EVERYTHING

    def streamed(self) -> "LayerPass":
        """The pass that measures the same where each layer's results come to the host at once."""
        return self

    def on_host(self, found: Any) -> Any:
        """What is kept of what a layer of `streamed` adds, and of its result: NumPy's [b, ...]."""
        return found

    def init_carry(self, prepared: PreparedInputs, config: TransformerConfig) -> Any:
        """The carry before the first layer: a pytree with shapes that no layer changes."""
        return ()

    def measure_layer(
        self, layer: Layer, x: Float[Array, "n d"], seen: LayerValues | None, carry: Any
    ) -> tuple[Any, Any]:
        """(the next carry, what this layer adds to the result); jit drops what is unused.

        Args:
            x: Its input; of passes with a state of their own X^0, in every layer.
            seen: What it computed from it; None for such passes.
            carry: From the layer before.
        """
        raise NotImplementedError

    def build_result(self, walked: WalkResult) -> Any:
        """The result."""
        return walked.layer_results


@dataclasses.dataclass(frozen=True)
class LayerMeasure(LayerPass):
    """A measure of one layer, of every layer: (layer, x, forward, **options) → arrays."""

    covers: ClassVar[Covers] = FORWARD

    measure: Callable[..., Any]  # a function of a module
    options: tuple[tuple[str, Any], ...] = ()  # hashable

    def measure_layer(self, layer: Layer, x: Any, seen: Any, carry: Any) -> tuple[Any, Any]:
        """The measure."""
        return carry, self.measure(layer, x, seen, **dict(self.options))


@dataclasses.dataclass(frozen=True)
class States(LayerPass):
    """The hidden states X^0 .. X^L, or a measure of each, [L + 1, ...]."""

    covers: ClassVar[Covers] = FORWARD

    def measure(self, x: Float[Array, "n d"], mask: Any = None) -> Any:
        """Of the states of one layer, of which the mask [n] says which tokens exist."""
        return x

    def init_carry(self, prepared: PreparedInputs, config: TransformerConfig) -> Any:
        """The measure of X^0."""
        return self.measure(prepared.x, prepared.token_mask)

    def measure_layer(self, layer: Layer, x: Any, seen: Any, carry: Any) -> tuple[Any, Any]:
        """The measure after the layer."""
        return carry, self.measure(seen.trace.hidden, layer.inputs.token_mask)

    def build_result(self, walked: WalkResult) -> Any:
        """All of them."""
        both = walked.carry, walked.layer_results
        return jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), *both)


@dataclasses.dataclass(frozen=True)
class Output(LayerPass):
    """The output of the network, [n, d]."""

    covers: ClassVar[Covers] = FORWARD

    def measure_layer(self, layer: Layer, x: Any, seen: Any, carry: Any) -> tuple[Any, tuple[()]]:
        """Nothing."""
        return carry, ()

    def build_result(self, walked: WalkResult) -> Any:
        """The output."""
        return walked.output


def step_passes(
    passes: Sequence[LayerPass], layer: Layer, x: Float[Array, "*s n d"], carries: tuple
) -> tuple[Float[Array, "*s n d"], tuple, tuple]:
    """One layer of all passes: (the state after it, carries, what each pass adds).

    Args:
        passes: They share the layer's own computation.
        carries: Of each pass.
    """
    seen, state = None, x
    if any(p.reads_layer_values for p in passes):
        seen = compute_layer(layer, x)
        state = seen.state
    done = [p.measure_layer(layer, x, seen, c) for p, c in zip(passes, carries, strict=True)]
    return state, tuple(carry for carry, _ in done), tuple(found for _, found in done)


@functools.partial(jax.jit, static_argnames="layer_pass")
def run_pass(
    layer_pass: LayerPass,
    params: TransformerParams,
    prepared: PreparedInputs,
    config: TransformerConfig,
) -> Any:
    """A pass over a network in memory, parameters and inputs from `prepare_inputs`: a scan.

    Compiled once for a pass, a shape and what of a config is static.
    """
    layer_pass.covers.check(config, prepared.edit)

    def step(layer, state):
        x, carries = state
        x, carries, (found,) = step_passes((layer_pass,), layer, x, carries)
        return (x, carries), found

    start = start_streams(prepared.x, config), (layer_pass.init_carry(prepared, config),)
    (last, (carry,)), found = walk_layers(step, start, params, prepared, config)
    return layer_pass.build_result(WalkResult(params, last, carry, found, prepared, config))


class Recorded(TokenAlgebra):
    """Tokens as a trace has them: `Layer.extra` is the layer's `LayerTrace`."""

    def apply_branch(self, layer, kind, branch_input):
        return getattr(layer.extra, f"{kind}_branch"), None

    def edit_state(self, layer, name, x):
        return getattr(layer.extra, "hidden" if name == "residual" else name)


def replay(
    measure: Callable[[Layer, dict[str, SublayerValues]], Any],
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
    return walk_layers(step, inputs.x, params, inputs, config, extra=trace.layers)[1]


def one_row(config: TransformerConfig) -> TransformerConfig:
    """The config of a network in which all layers have the one given row of parameters.

    `prepare_inputs`, `layer_gains` and the surgeries then take a stack of one row, at any depth.
    """
    return config.replace(layer_map=(0,) * config.depth)


def row_of(params: TransformerParams) -> BlockParams:
    """The one row of a stack."""
    return jax.tree.map(lambda a: a[0], params.layers)
