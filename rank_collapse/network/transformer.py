"""The forward pass of the one network, and the walk that every other pass shares with it.

`apply` checks and embeds one example, passes it through the layers and returns a `Trace`:

    prepare_inputs     X^0 from token ids or vectors; masks, biases and positions
    walk_layers        the loop over the layers, a `jax.lax.scan`
    walk_layer         one layer: attention, cross-attention and MLP, each
                       N(λ x + γ N'(branch(N(x)))) with skip λ, gain γ and norms N, N'
    TokenAlgebra       what norm, sum, attention and MLP are for tokens [n, d]
    apply_final_norm   the norm after the last layer

Other passes have other states than tokens: sums of paths by length, a mean with a logarithmic
residual, a kernel of tokens under random weights. An `Algebra` says how its state is normalised,
added, attended to and sent through an MLP, and which networks that covers.

Everything is written for one example; `jax.vmap` adds axes of batches and seeds. Axis letters:
l layers, h heads, s residual streams, n tokens, m memory tokens, d width.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rank_collapse import struct
from rank_collapse.network import attention as attn, edits, layers, streams
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.covers import EVERYTHING, Covers
from rank_collapse.network.dropout import dropout, dropout_branches
from rank_collapse.network.edits import EditPoints
from rank_collapse.network.inputs import (
    PreparedInputs,
    as_mask,
    batch_size,
    check_indices,
    prepare_inputs,
)
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.residual import (
    LayerGains,
    ResidualSpec,
    add_to_stream,
    final_spec,
    layer_gains,
    normalize_tokens,
    residual_specs,
)
from rank_collapse.network.trace import LayerTrace, Trace

# --- One layer, for any kind of state


class Layer(struct.Struct):
    """One layer of a network on one example."""

    params: Any  # BlockParams
    gains: Any  # LayerGains
    index: Any  # traced: one program serves all layers
    config: Any  # TransformerConfig
    inputs: Any  # PreparedInputs of the network
    extra: Any = None  # what else an algebra needs in this layer, such as frozen weights

    @property
    def context(self) -> attn.AttentionContext:
        """Masks, biases and positions of this layer's self-attention."""
        gains, config = self.gains, self.config
        context = self.inputs.context.for_layer(gains.window, gains.rotated)
        if config.normalise is config.mix is None:
            return context
        return context.replace(layer=self.index)

    def count_sublayers_before(self, kind: str) -> Any:
        """Count the sublayers of the network before this layer's `kind`; "final": its first."""
        kinds = self.config.kinds
        return self.index * len(kinds) + (kinds.index(kind) if kind in kinds else 0)

    def connection(self, spec: ResidualSpec, x: Any) -> streams.Connection | None:
        """Compute how a sublayer reads and writes streams [s, n, d]; None where there is one."""
        num_before = self.count_sublayers_before(spec.kind)
        return streams.compute_connection(spec.connection, x, self.config, num_before)

    @property
    def score_options(self) -> dict[str, Any]:
        """The arguments of `attention.multi_head_attention` that define the scores."""
        config = self.config
        return {
            "score": config.score,
            "scale": config.scale_scores,
            "norm_eps": config.norm_eps,
            "temperature": self.gains.temperature,
        }


class SublayerValues(NamedTuple):
    """Everything that one sublayer computed; under jit what nobody reads is not computed."""

    spec: ResidualSpec
    state: Any  # before the sublayer
    branch_input: Any  # what the branch read, after its norm
    branch_output: Any  # before N'
    aux: Any  # what else the branch returned
    norm_input: Any  # what N was applied to; None where there is no N
    output_state: Any  # after the sublayer, and of attention after its edit


class Algebra:
    """How one kind of state passes the operations of a layer, of the networks that it covers."""

    covers: ClassVar[Covers] = EVERYTHING

    def merge_streams(self, layer: Layer, spec: ResidualSpec, state: Any) -> Any:
        """Merge several streams into the one that a branch, or the final norm, reads."""
        return state

    def apply_norm(self, layer: Layer, spec: ResidualSpec, state: Any) -> Any:
        """Normalise a state by the spec's norm, or a branch's output where `spec.after_branch`."""
        raise NotImplementedError

    def add_branch(self, layer: Layer, spec: ResidualSpec, state: Any, branch_output: Any) -> Any:
        """Compute γ branch_output + λ state·[skip]."""
        raise NotImplementedError

    def edit_branch_input(self, layer: Layer, kind: str, branch_input: Any) -> Any:
        """Apply the edit at "attention_input", "cross_input" or "mlp_input"."""
        return branch_input

    def apply_branch(self, layer: Layer, kind: str, branch_input: Any) -> tuple[Any, Any]:
        """Compute (output, aux) of a sublayer's branch, by the method of its kind."""
        return getattr(self, f"apply_{kind}")(layer, branch_input)

    def apply_attention(self, layer: Layer, branch_input: Any) -> tuple[Any, Any]:
        """Compute (output, aux) of self-attention."""
        raise NotImplementedError

    def apply_cross(self, layer: Layer, branch_input: Any) -> tuple[Any, Any]:
        """Compute (output, aux) of the attention to the memory."""
        raise NotImplementedError

    def apply_mlp(self, layer: Layer, branch_input: Any) -> tuple[Any, Any]:
        """Compute (output, aux) of the MLP."""
        raise NotImplementedError

    def edit_state(self, layer: Layer, name: str, state: Any) -> Any:
        """Apply the edit at "after_attention", "after_cross" or "residual"."""
        return state


def walk_layer(algebra: Algebra, layer: Layer, state: Any) -> tuple[Any, dict[str, SublayerValues]]:
    """Pass a state through one layer: attention, cross-attention and MLP in turn.

    Each sublayer is x ← N(λ x + γ N'(branch(N(x)))); its spec says which of the norms there are.

    Args:
        algebra: How states of this kind are normalised, added and passed through branches.
        layer: The layer.
        state: Before it.

    Returns:
        The state after the layer, and what each sublayer computed, by kind.
    """
    specs = residual_specs(layer.params, layer.config, layer.gains)
    layer_input, sublayers = state, {}
    for kind in layer.config.kinds:
        spec = specs[kind]
        stream = algebra.merge_streams(layer, spec, layer_input if spec.parallel else state)
        branch_input = _normalize_branch_input(algebra, layer, spec, stream)
        branch_input = algebra.edit_branch_input(layer, kind, branch_input)
        branch_output, aux = algebra.apply_branch(layer, kind, branch_input)
        summand = branch_output
        if spec.norms_branch:
            summand = algebra.apply_norm(layer, spec.at_branch, branch_output)
        output_state = algebra.add_branch(layer, spec, state, summand)
        norm_input = stream if spec.norms_input else None
        if spec.norms_sum:
            norm_input = output_state
            output_state = algebra.apply_norm(layer, spec, output_state)
        if kind != "mlp":
            output_state = algebra.edit_state(layer, f"after_{kind}", output_state)
        sublayers[kind] = SublayerValues(
            spec, state, branch_input, branch_output, aux, norm_input, output_state
        )
        state = output_state
    return algebra.edit_state(layer, "residual", state), sublayers


def _normalize_branch_input(algebra, layer, spec, stream):
    """Normalise what the branch reads, where the spec says so and this layer is not exempt.

    Args:
        algebra, layer: As in `walk_layer`.
        spec: Of the sublayer.
        stream: What the branch reads, as one stream.
    """
    if not spec.norms_input:
        return stream
    normed = algebra.apply_norm(layer, spec, stream)
    if spec.unnormed is None:
        return normed
    if isinstance(spec.unnormed, np.bool_ | np.ndarray):  # on the host
        return stream if spec.unnormed else normed
    return jax.tree.map(lambda raw, a: jnp.where(spec.unnormed, raw, a), stream, normed)


# --- All layers


def walk_layers(
    step: Callable[[Layer, Any], tuple[Any, Any]],
    state: Any,
    params: TransformerParams,
    inputs: PreparedInputs,
    config: TransformerConfig,
    *,
    extra: Any = None,
    gains: LayerGains | None = None,
) -> tuple[Any, Any]:
    """Scan a step over the layers.

    Args:
        step: (layer, state) → (state, layer result), such as a call of `walk_layer`.
        state: Before the first layer.
        params, inputs: From `prepare_inputs`.
        extra: `Layer.extra` of all layers, leaves [L, ...].
        gains: Of all layers; `layer_gains` by default.

    Returns:
        The state after the last layer, and the layer results [L, ...].
    """
    gains = layer_gains(config, inputs.x.dtype, params) if gains is None else gains
    indices = jnp.arange(config.depth)
    # Shared parameters are gathered layer by layer, never copied as a stack.
    rows = jnp.asarray(config.layer_map) if config.layer_map else params.layers

    def body(state, scanned):
        row, (index, own_gains, own_extra) = scanned
        if config.layer_map:
            row = jax.tree.map(lambda a: a[row], params.layers)
        return step(Layer(row, own_gains, index, config, inputs, own_extra), state)

    return jax.lax.scan(body, state, (rows, (indices, gains, extra)), unroll=config.unroll)


def walk_network(
    algebra: Algebra,
    state: Any,
    params: TransformerParams,
    inputs: PreparedInputs,
    config: TransformerConfig,
) -> Any:
    """Pass a state through all layers and the final norm, keeping nothing of the layers.

    Args:
        algebra: How states of this kind pass a layer.
        state: Before the first layer.
        params, inputs, config: As in `walk_layers`.
    """

    def step(layer, state):
        return walk_layer(algebra, layer, state)[0], None

    state, _ = walk_layers(step, state, params, inputs, config)
    return apply_final_norm(algebra, state, params, inputs, config)


def apply_final_norm(
    algebra: Algebra,
    state: Any,
    params: TransformerParams,
    inputs: PreparedInputs,
    config: TransformerConfig,
    extra: Any = None,
) -> Any:
    """Merge the streams after the last layer and normalise them, where the network does.

    Args:
        state: After the last layer.
        extra: `Layer.extra` that the algebra's norm reads.
    """
    layer, spec = Layer(None, None, config.depth, config, inputs, extra), final_spec(params, config)
    state = algebra.merge_streams(layer, spec, state)
    return algebra.apply_norm(layer, spec, state) if config.final_norm else state


# --- The forward pass: states are tokens


class BranchAux(NamedTuple):
    """What a branch of the forward pass returns besides its summand."""

    output: Any  # [n, d], before dropout
    weights: Any = None  # [h, n, m]; None of the MLP


class TokenAlgebra(Algebra):
    """Tokens [n, d], edited at the layer's edit points, with dropout where there is a key."""

    def __init__(
        self, edit_points: EditPoints | None = None, dropout_key: Any = None, dropout_rate: Any = 0
    ):
        self.edit_points = EditPoints() if edit_points is None else edit_points
        self.dropout_rate = dropout_rate
        self.keys = [None] * 6 if dropout_key is None else dropout_branches(dropout_key, 6)

    def merge_streams(self, layer, spec, x):
        return streams.merge_streams(layer.connection(spec, x), x)

    def apply_norm(self, layer, spec, x):
        return normalize_tokens(spec, x)

    def add_branch(self, layer, spec, x, branch_output):
        return add_to_stream(
            spec, *streams.join_streams(layer.connection(spec, x), x, branch_output)
        )

    def edit_branch_input(self, layer, kind, x):
        return self.edit_points(f"{kind}_input", x)

    def edit_state(self, layer, name, x):
        return self.edit_points(name, x)

    def apply_attention(self, layer, x):
        return self._attend(
            layer,
            "attention",
            x,
            x,
            context=layer.context,
            normalise=layer.config.normalise,
            mixing=layer.gains.mixing,
            mix=layer.config.mix,
        )

    def apply_cross(self, layer, x):
        inputs = layer.inputs
        return self._attend(layer, "cross", x, inputs.memory, context=inputs.memory_context)

    def apply_mlp(self, layer, x):
        config = layer.config
        output = layers.apply_mlp(layer.params.mlp, x, config.mlp, config.routing, self.edit_points)
        output = self.edit_points("mlp_branch", output)
        return self._drop_entries("mlp", output), BranchAux(output)

    def _attend(self, layer, kind, queries, keys, **options):
        output, weights = attn.multi_head_attention(
            getattr(layer.params, kind),
            queries,
            keys,
            **layer.score_options,
            **options,
            dropout_key=self.keys[3 + _BRANCH_NUMBER[kind]],
            dropout_rate=self.dropout_rate,
            edit=dataclasses.replace(self.edit_points, prefix="cross_" * (kind == "cross")),
        )
        output = self.edit_points(f"{kind}_branch", output)
        return self._drop_entries(kind, output), BranchAux(output, weights)

    def _drop_entries(self, kind, output):
        key = self.keys[_BRANCH_NUMBER[kind]]
        return output if key is None else dropout(key, output, self.dropout_rate)


_BRANCH_NUMBER = {"attention": 0, "cross": 1, "mlp": 2}


class LayerValues(NamedTuple):
    """Everything that one layer of a forward pass computed; under jit only what is read."""

    state: Any  # [n, d], what the next layer takes: `trace.hidden`, or several streams [s, n, d]
    trace: LayerTrace
    sublayers: dict[str, SublayerValues]
    edit_points: EditPoints  # with the values that were saved at them


def compute_layer(
    layer: Layer,
    x: Float[Array, "*s n d"],
    *,
    dropout_key: Any = None,
    dropout_rate: Any = 0.0,
    keep: tuple[str, ...] = (),
) -> LayerValues:
    """Compute one layer of the forward pass.

    Args:
        layer: The layer.
        x: The state before it, at first from `streams.start_streams`.
        dropout_key, dropout_rate: For dropout on attention weights and branches; None for none.
        keep: Names of edit points whose values the trace keeps.
    """
    config = layer.config
    mix_inputs = ("q", "k", "v") if config.mix is not None else ()
    edit_points = EditPoints(layer.inputs.edit, layer.index, (*keep, *mix_inputs))
    algebra = TokenAlgebra(edit_points, dropout_key, dropout_rate)
    state, sublayers = walk_layer(algebra, layer, x)
    fields = {f"{kind}_branch": values.aux.output for kind, values in sublayers.items()}
    num_before = layer.count_sublayers_before("final")
    for number, (kind, values) in enumerate(sublayers.items(), 1):
        if kind != "mlp":
            state_after = values.output_state
            fields[f"after_{kind}"] = streams.average_streams(
                state_after, config, num_before + number
            )
    if "cross" in sublayers:
        fields["cross_attention"] = sublayers["cross"].aux.weights
    if keep:
        fields["kept"] = {name: edit_points.saved[name] for name in keep}
    trace = LayerTrace(
        attention=sublayers["attention"].aux.weights,
        hidden=streams.average_streams(state, config, num_before + len(sublayers)),
        **fields,
    )
    return LayerValues(state, trace, sublayers, edit_points)


def apply(
    params: TransformerParams,
    x: Any,
    config: TransformerConfig,
    *,
    mask: Any = None,
    bias: Any = None,
    memory: Any = None,
    memory_mask: Any = None,
    segments: Any = None,
    positions: Any = None,
    dropout_key: Any = None,
    dropout_rate: Any = 0.0,
    keep: Sequence[str] = (),
    edit: Any = None,
) -> Trace:
    """Run the network on one example.

    What goes wrong most: a mask is True where a token exists (`transformers` has 1 there, torch's
    key_padding_mask the opposite), and tokens that do not exist still have states, which measures
    leave out only with `mask=`. States in `hidden` are raw, before the norm that reads them.

    Args:
        params: From `init` or `rank_collapse.pretrained.load`.
        x: Hidden states Float [n, d]; or token ids Int [n] where the config has an embedding.
        config: The network.
        mask: Bool [n] (which tokens exist), [n, n] or [h, n, n]; True may be attended to.
        bias: Float [h, n, n] added to the attention scores.
        memory: Float [m, d], the encoder's output, with `config.cross_attention`.
        memory_mask: Bool [m], [n, m] or [h, n, m].
        segments: Int [n], segments of tokens (embedding or relative attention).
        positions: Int [n], positions of tokens; 0..n-1 by default.
        dropout_key: Key for dropout on attention weights and branches; None for none.
        dropout_rate: Its rate; may be traced.
        keep: Names of edit points whose values `trace.kept` holds by name; static.
        edit: {name: function(value, layer) -> value}, pure functions that change what is computed
            in every layer: "q", "k" [h, n, k] as they enter the scores, "v" [h, n, v], "scores"
            [h, n, n] before the mask, "weights" (what the mask excludes stays 0), "head_output"
            [h, n, d], "attention_branch", "after_attention", "mlp_hidden" [n, f], "mlp_branch" and
            "residual", the stream after the layer, or the streams [s, n, d]; "attention_input" and
            "mlp_input", what branches read after their norms; "cross_q", ..., "cross_branch" and
            "after_cross". `layer` is traced: choose with jnp.where(layer == 3, changed, value).
            Arrays that a function refers to are traced, see `rank_collapse.network.edits`.

    Returns:
        A `Trace`.

    Raises:
        ValueError: Inputs of the wrong shape or kind, a memory that is missing or of no use, a
            dropout rate without a key, an unknown edit point, or an edit that changes a shape.
    """
    edits.check_names(keep, config)
    if not isinstance(dropout_rate, jax.core.Tracer):
        if not 0 <= np.asarray(dropout_rate) <= 1:
            raise ValueError(f"dropout_rate={dropout_rate} is not in [0, 1]")
        if dropout_key is None and dropout_rate:
            raise ValueError(f"dropout_rate={dropout_rate} needs a dropout_key")
    params, prepared = prepare_inputs(
        params,
        x,
        config,
        mask=mask,
        bias=bias,
        memory=memory,
        memory_mask=memory_mask,
        segments=segments,
        positions=positions,
        edit=edit,
    )
    return _apply(params, prepared, config, dropout_key, dropout_rate, tuple(keep))


@functools.partial(jax.jit, static_argnames="keep")
def _apply(params, prepared, config, dropout_key, dropout_rate, keep) -> Trace:
    """Compile the forward pass once for a shape, also where `apply` is called outside jit."""
    layer_keys = None if dropout_key is None else dropout_branches(dropout_key, config.depth)

    def step(layer, x):
        values = compute_layer(
            layer, x, dropout_key=layer.extra, dropout_rate=dropout_rate, keep=keep
        )
        return values.state, values.trace

    state = streams.start_streams(prepared.x, config)
    state, layer_traces = walk_layers(step, state, params, prepared, config, extra=layer_keys)
    output = apply_final_norm(TokenAlgebra(), state, params, prepared, config)
    hidden = jnp.concatenate([prepared.x[None], layer_traces.hidden])
    return Trace(hidden=hidden, layers=layer_traces, output=output, context=prepared.context)


def apply_batch(
    params: TransformerParams,
    x: Any,
    config: TransformerConfig,
    *,
    dropout_key: Any = None,
    **options: Any,
) -> Trace:
    """Run the network on a batch, layers first: hidden [L + 1, b, n, d], attention [L, b, h, n, n].

    Args:
        params, config: As in `apply`.
        x: [b, n, d], or token ids Int [b, n].
        dropout_key: Split into a key for each example.
        **options: As in `apply`: dropout_rate, keep and edit for all examples, and arrays with the
            batch first, mask Bool [b, n], ...

    Returns:
        A `Trace`; output and context have the batch first.

    Raises:
        ValueError: As `apply`, or inputs of different lengths.
    """
    common = {k: options.pop(k) for k in ("dropout_rate", "keep", "edit") if k in options}
    arrays = {k: jnp.asarray(a) for k, a in {"x": x, **options}.items() if a is not None}
    num_examples = batch_size(arrays)
    check_indices(arrays, config)  # inside vmap values are traced
    for name in arrays.keys() & {"mask", "memory_mask"}:
        arrays[name] = as_mask(arrays[name], name)
    keys = None if dropout_key is None else jax.random.split(dropout_key, num_examples)

    def apply_one(example, key):
        return apply(params, config=config, dropout_key=key, **example, **common)

    out_axes = Trace(hidden=1, layers=1, output=0, context=0)
    return jax.vmap(apply_one, out_axes=out_axes)(arrays, keys)
