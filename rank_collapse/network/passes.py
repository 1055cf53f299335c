"""Measurements that go through a network once, one layer after the other.

A pass sees one layer at a time: the layer's input, the values that the layer computed, and the
carry of the pass itself. `run_pass` scans it over a network in memory;
`rank_collapse.pretrained.stream` calls the same functions with one layer's weights after the other,
so that a model may be larger than memory.

Axis letters: n tokens, d width, l layers.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse.annotations import ArrayLike, Leaf, Tree
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.covers import EVERYTHING, Covers
from rank_collapse.network.inputs import PreparedInputs
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.trace import Trace
from rank_collapse.network.transformer import LayerValues, TokenAlgebra, compute_layer
from rank_collapse.network.walk import (
    Layer,
    SublayerValues,
    apply_final_norm,
    walk_layer,
    walk_layers,
)


class WalkResult(NamedTuple):
    """The result of a pass after the last layer."""

    params: TransformerParams  # only those outside of the layers may be read
    last_state: Leaf  # X^L [n, d]
    carry: Tree  # of the pass
    layer_results: Tree  # of `LayerPass.measure_layer`, [l, ...]
    prepared: PreparedInputs  # as at the start
    config: TransformerConfig

    @property
    def output(self) -> Float[Array, "n d"]:
        """X^L after the final norm, if there is one."""
        return apply_final_norm(
            TokenAlgebra(), self.last_state, self.params, self.prepared, self.config
        )


class LayerPass:
    """A measurement of one example; hashable, because programs are compiled for it."""

    reads_layer_values: ClassVar[bool] = True  # False: it carries another state than tokens
    covers: ClassVar[Covers] = EVERYTHING

    def on_host(self, results: Tree) -> Tree:
        """Convert streamed results [b, ...], of one layer or at the end, from NumPy arrays."""
        return results

    def init_carry(self, prepared: PreparedInputs, config: TransformerConfig) -> Tree:
        """Return the carry before the first layer: a pytree whose shapes no layer changes."""
        return ()

    def measure_layer(
        self, layer: Layer, x: Float[Array, "n d"], layer_values: LayerValues | None, carry: Tree
    ) -> tuple[Tree, Tree]:
        """Measure one layer; under jit nothing is computed that nobody uses.

        Args:
            layer: The layer.
            x: Input of the layer; X^0 in every layer where `reads_layer_values` is False.
            layer_values: Values that the layer computed from x; None where `reads_layer_values` is
                False.
            carry: The carry from the layer before.

        Returns:
            The next carry, and the result of this layer.
        """
        raise NotImplementedError

    def build_result(self, walk_result: WalkResult) -> Tree:
        """Make the pass's result from the results of all layers."""
        return walk_result.layer_results


@dataclasses.dataclass(frozen=True)
class LayerMeasure(LayerPass):
    """A measure of every layer by itself: (layer, x, layer_values) → arrays."""

    measure: Callable[..., Tree]  # a function of a module

    def measure_layer(
        self, layer: Layer, x: Array, layer_values: LayerValues, carry: Tree
    ) -> tuple[Tree, Tree]:
        """Measure one layer; nothing is carried to the next."""
        return carry, self.measure(layer, x, layer_values)


@dataclasses.dataclass(frozen=True)
class States(LayerPass):
    """The hidden states X^0 .. X^L, or a measure of each, [L + 1, ...]."""

    def measure(self, x: Float[Array, "n d"], mask: ArrayLike | None = None) -> Tree:
        """Measure one state; the mask Bool [n] marks the tokens that exist. The default returns the
        state itself."""
        return x

    def init_carry(self, prepared: PreparedInputs, config: TransformerConfig) -> Tree:
        """Measure the state before the first layer, which is carried to the end."""
        return self.measure(prepared.x, prepared.token_mask)

    def measure_layer(
        self, layer: Layer, x: Array, layer_values: LayerValues, carry: Tree
    ) -> tuple[Tree, Tree]:
        """Measure the state after the layer; the carry stays the measure of the first state."""
        return carry, self.measure(layer_values.trace.hidden, layer.inputs.token_mask)

    def build_result(self, walk_result: WalkResult) -> Tree:
        def prepend_first(first, by_layer):
            return jnp.concatenate([first[None], by_layer])

        return jax.tree.map(prepend_first, walk_result.carry, walk_result.layer_results)


@dataclasses.dataclass(frozen=True)
class OutputPass(LayerPass):
    """The output of the network, [n, d], and nothing of its layers."""

    def measure_layer(
        self, layer: Layer, x: Array, layer_values: LayerValues, carry: Tree
    ) -> tuple[Tree, Tree]:
        """Measure nothing: only the output of the network counts."""
        return carry, ()

    def build_result(self, walk_result: WalkResult) -> Tree:
        return walk_result.output


def step_passes(
    passes: Sequence[LayerPass], layer: Layer, x: Float[Array, "*s n d"], carries: tuple
) -> tuple[Float[Array, "*s n d"], tuple, tuple]:
    """Pass one layer with several passes, which share the values that the layer computed.

    Args:
        passes: The passes.
        layer: The layer.
        x: The state before it.
        carries: State that each pass hands from layer to layer.

    Returns:
        The state after the layer, the next carries, and each pass's result of this layer.
    """
    layer_values, state = None, x
    if any(p.reads_layer_values for p in passes):
        layer_values = compute_layer(layer, x)
        state = layer_values.trace.hidden
    pairs = [
        p.measure_layer(layer, x, layer_values, carry)
        for p, carry in zip(passes, carries, strict=True)
    ]
    return state, tuple(carry for carry, _ in pairs), tuple(result for _, result in pairs)


@functools.partial(jax.jit, static_argnames="layer_pass")
def run_pass(
    layer_pass: LayerPass,
    params: TransformerParams,
    prepared: PreparedInputs,
    config: TransformerConfig,
) -> Tree:
    """Run a measurement over a network in memory: layer by layer, in one `jax.lax.scan`.

    A pass keeps a carry from layer to layer, and a result of each layer. It is compiled once for
    each pass, shape and static part of a config.

    Args:
        layer_pass: The pass.
        params, prepared: Parameters and inputs from `prepare_inputs`.
        config: The network.

    Raises:
        ValueError: The network has a part, or the inputs an edit, for which the pass is not
            defined.
    """
    layer_pass.covers.check(config, prepared.edit)

    def step(layer, state):
        x, carries = state
        x, carries, (result,) = step_passes((layer_pass,), layer, x, carries)
        return (x, carries), result

    start = prepared.x, (layer_pass.init_carry(prepared, config),)
    (last_state, (carry,)), results = walk_layers(step, start, params, prepared, config)
    return layer_pass.build_result(WalkResult(params, last_state, carry, results, prepared, config))


class RecordedTokens(TokenAlgebra):
    """Tokens from a trace: `Layer.extra` is the layer's `LayerTrace`."""

    def apply_branch(self, layer, kind, branch_input):
        """Return the recorded output of the branch in place of computing it."""
        return getattr(layer.extra, f"{kind}_branch"), None

    def edit_state(self, layer, name, x):
        """Return the recorded state of this name."""
        return getattr(layer.extra, "hidden" if name == "residual" else name)


def replay(
    measure: Callable[[Layer, dict[str, SublayerValues]], Tree],
    params: TransformerParams,
    trace: Trace,
    config: TransformerConfig,
) -> Tree:
    """Measure the sublayers of every layer from a trace, without computing a branch again.

    Args:
        measure: (layer, {kind: `SublayerValues`}) → arrays.
        params: Parameters of the network; norms and learned gains are read.
        trace: The trace of one example, from `apply`.
        config: The network.

    Returns:
        The measures [L, ...].
    """

    def step(layer, x):
        x, sublayers = walk_layer(RecordedTokens(), layer, x)
        return x, measure(layer, sublayers)

    prepared = PreparedInputs(x=trace.hidden[0], context=trace.context)
    return walk_layers(step, prepared.x, params, prepared, config, extra=trace.layers)[1]
