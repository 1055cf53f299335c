"""The forward pass of the one network.

`apply` checks and embeds one example, passes it through the layers and returns a `Trace`:

    prepare_inputs      X^0 from token ids or vectors; masks, biases and positions
    walk.walk_layers    the loop over the layers
    TokenAlgebra        what norm, sum, attention and MLP are for tokens [n, d]
    apply_final_norm    the norm after the last layer

Everything is written for one example; `jax.vmap` adds axes of batches and seeds. Axis letters:
l layers, h heads, n tokens, m memory tokens, d width.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse import checks
from rank_collapse.annotations import ArrayLike, Key, Leaf, Number
from rank_collapse.network import attention as attn, edits, layers
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.dropout import dropout, dropout_branches
from rank_collapse.network.edits import EditPoints
from rank_collapse.network.input_checks import as_mask, check_indices
from rank_collapse.network.inputs import batch_size, prepare_inputs
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.residual import (
    add_to_stream,
    normalise_tokens,
)
from rank_collapse.network.trace import LayerTrace, Trace
from rank_collapse.network.walk import (
    Algebra,
    Layer,
    SublayerValues,
    apply_final_norm,
    walk_layer,
    walk_layers,
)


class BranchAux(NamedTuple):
    """Further results of a branch in the forward pass, besides its summand."""

    output: Leaf  # [n, d], before dropout
    weights: Leaf | None = None  # [h, n, m]; None of the MLP


class TokenAlgebra(Algebra):
    """Tokens [n, d], edited at the layer's edit points, with dropout where there is a key."""

    def __init__(
        self,
        edit_points: EditPoints | None = None,
        dropout_key: Key | None = None,
        dropout_rate: Number = 0,
    ):
        self.edit_points = EditPoints() if edit_points is None else edit_points
        self.dropout_rate = dropout_rate
        # Of each branch's output, and then of each branch's attention weights.
        self.keys = [None] * 6 if dropout_key is None else dropout_branches(dropout_key, 6)

    def apply_norm(self, layer, spec, x):
        """Normalise tokens [n, d]."""
        return normalise_tokens(spec, x)

    def add_branch(self, layer, spec, x, branch_output):
        """Add a branch to the tokens of the residual stream, with the gains of both."""
        return add_to_stream(spec, x, branch_output)

    def edit_branch_input(self, layer, kind, x):
        """Apply the caller's edit of what a branch reads, if there is one."""
        return self.edit_points(f"{kind}_input", x)

    def edit_state(self, layer, name, x):
        """Apply the caller's edit of a state of this name, such as "residual", if there is one."""
        return self.edit_points(name, x)

    def apply_attention(self, layer, x):
        """Apply self-attention: (its output [n, d], the output before dropout and the weights)."""
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
        """Apply the attention to the memory: (its output [n, d], the output before dropout and the
        weights)."""
        inputs = layer.inputs
        return self._attend(layer, "cross", x, inputs.memory, context=inputs.memory_context)

    def apply_mlp(self, layer, x):
        """Apply the MLP, with edits and dropout: (its output, the output before dropout)."""
        config = layer.config
        output = layers.apply_mlp(layer.params.mlp, x, config.mlp, config.routing, self.edit_points)
        output = self.edit_points("mlp_branch", output)
        return self._drop_entries("mlp", output), BranchAux(output)

    def _attend(self, layer, kind, queries, keys, **options):
        """Apply attention, with edits and dropout.

        Args:
            layer: The layer.
            kind: "attention" or "cross".
            queries, keys: Tokens [n, d] and [m, d] from which queries, and keys and values are
                made.
            **options: Further arguments of `multi_head_attention`.

        Returns:
            (its output, the output before dropout and the weights).
        """
        output, weights = attn.multi_head_attention(
            getattr(layer.params, kind),
            queries,
            keys,
            **layer.score_options,
            **options,
            dropout_key=self.keys[3 + _BRANCH_NUMBER[kind]],
            dropout_rate=self.dropout_rate,
            edit=dataclasses.replace(self.edit_points, prefix="cross_" if kind == "cross" else ""),
        )
        output = self.edit_points(f"{kind}_branch", output)
        return self._drop_entries(kind, output), BranchAux(output, weights)

    def _drop_entries(self, kind, output):
        """Apply dropout to a branch's output, if there is a key."""
        key = self.keys[_BRANCH_NUMBER[kind]]
        return output if key is None else dropout(key, output, self.dropout_rate)


_BRANCH_NUMBER = {"attention": 0, "cross": 1, "mlp": 2}


class LayerValues(NamedTuple):
    """Everything that one layer of a forward pass computed; under jit only the values that are
    read."""

    trace: LayerTrace
    sublayers: dict[str, SublayerValues]
    edit_points: EditPoints  # with the values that were saved at them


def compute_layer(
    layer: Layer,
    x: Float[Array, "n d"],
    *,
    dropout_key: Key | None = None,
    dropout_rate: Number = 0.0,
    keep: tuple[str, ...] = (),
) -> LayerValues:
    """Compute one layer of the forward pass.

    Args:
        layer: The layer.
        x: The tokens before it.
        dropout_key, dropout_rate: Random key and rate of dropout on attention weights and branches;
            None for no dropout.
        keep: Names of edit points whose values the trace keeps.
    """
    config = layer.config
    mix_inputs = ("q", "k", "v") if config.mix is not None else ()
    edit_points = EditPoints(layer.inputs.edit, layer.index, (*keep, *mix_inputs))
    state, sublayers = walk_layer(TokenAlgebra(edit_points, dropout_key, dropout_rate), layer, x)
    fields = {f"{kind}_branch": values.aux.output for kind, values in sublayers.items()}
    fields |= {f"after_{k}": sublayers[k].output_state for k in sublayers if k != "mlp"}
    if "cross" in sublayers:
        fields["cross_attention"] = sublayers["cross"].aux.weights
    if keep:
        fields["kept"] = {name: edit_points.saved[name] for name in keep}
    trace = LayerTrace(
        attention=sublayers["attention"].aux.weights,
        hidden=state,
        **fields,
    )
    return LayerValues(trace, sublayers, edit_points)


def apply(
    params: TransformerParams,
    x: ArrayLike,
    config: TransformerConfig,
    *,
    mask: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    memory: ArrayLike | None = None,
    memory_mask: ArrayLike | None = None,
    segments: ArrayLike | None = None,
    positions: ArrayLike | None = None,
    dropout_key: Key | None = None,
    dropout_rate: Number = 0.0,
    keep: Sequence[str] = (),
    edit: Mapping[str, Callable] | None = None,
) -> Trace:
    """Run the network on one example.

    The most common mistake: a mask is True where a token exists, like 1 in `transformers` and
    unlike torch's key_padding_mask. Tokens that do not exist still have states; measures leave them
    out only with `mask=`. States in `hidden` are raw, before the norm that reads them.

    Args:
        params: Parameters from `init` or `rank_collapse.pretrained.load`.
        x: Hidden states Float [n, d]; or token ids Int [n] where the config has an embedding.
        config: The network.
        mask: Bool [n] (the tokens that exist), [n, n] or [h, n, n]; True for keys that may be
            attended to.
        bias: Float [h, n, n] added to the attention scores.
        memory: Float [m, d], the encoder's output, with `config.cross_attention`.
        memory_mask: Bool [m], [n, m] or [h, n, m].
        segments: Int [n], segments of tokens (embedding or relative attention).
        positions: Int [n], positions of tokens; 0..n-1 by default.
        dropout_key: Key for dropout on attention weights and branches; None for none.
        dropout_rate: Rate of dropout; may be traced.
        keep: Names of edit points whose values `trace.kept` holds by name; static.
        edit: {name: function(value, layer) -> value}, pure functions that change values in every
            layer: "q", "k" [h, n, k] as they enter the scores, "v" [h, n, v], "scores" [h, n, n]
            before the mask, "weights" (weights that the mask excludes stay 0), "head_output" [h, n,
            d], "attention_branch", "after_attention", "mlp_hidden" [n, f], "mlp_branch" and
            "residual", the stream after the layer; "attention_input" and "mlp_input", the inputs of
            branches after their norms; "cross_q", ..., "cross_branch" and "after_cross". `layer` is
            traced: choose with jnp.where(layer == 3, changed, value). Arrays that a function refers
            to are traced, see `rank_collapse.network.edits`.

    Returns:
        A `Trace`.

    Raises:
        ValueError: Inputs of the wrong shape or kind; a memory that is missing or unused; a dropout
            rate without a key; an unknown edit point; an edit that changes a shape.
    """
    checks.check_numbers("[0, 1]", dropout_rate=dropout_rate)
    checks.refuse_if(
        dropout_key is None and not isinstance(dropout_rate, jax.core.Tracer) and dropout_rate,
        f"dropout_rate={dropout_rate} needs a dropout_key",
    )
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
    edits.check_names(keep, config)
    return _apply(params, prepared, config, dropout_key, dropout_rate, tuple(keep))


@functools.partial(jax.jit, static_argnames="keep")
def _apply(params, prepared, config, dropout_key, dropout_rate, keep) -> Trace:
    """Compile the forward pass once for a shape, also where `apply` is called outside jit.

    Args:
        params, prepared, config: See `prepare_inputs`.
        dropout_key: Random key of dropout; None for no dropout.
        dropout_rate: Share of the entries that dropout sets to 0.
        keep: See `compute_layer`.
    """
    layer_keys = None if dropout_key is None else dropout_branches(dropout_key, config.depth)

    def step(layer, x):
        values = compute_layer(
            layer, x, dropout_key=layer.extra, dropout_rate=dropout_rate, keep=keep
        )
        return values.trace.hidden, values.trace

    state, layer_traces = walk_layers(step, prepared.x, params, prepared, config, extra=layer_keys)
    output = apply_final_norm(TokenAlgebra(), state, params, prepared, config)
    hidden = jnp.concatenate([prepared.x[None], layer_traces.hidden])
    return Trace(hidden=hidden, layers=layer_traces, output=output, context=prepared.context)


def apply_batch(
    params: TransformerParams,
    x: ArrayLike,
    config: TransformerConfig,
    *,
    dropout_key: Key | None = None,
    **options: object,
) -> Trace:
    """Run the network on a batch, layers first: hidden [L + 1, b, n, d], attention [L, b, h, n, n].

    Args:
        params, config: See `apply`.
        x: [b, n, d], or token ids Int [b, n].
        dropout_key: Random key, which is split into a key for each example.
        **options: See `apply`: dropout_rate, keep and edit for all examples, and arrays with the
            batch first, mask Bool [b, n], ...

    Returns:
        A `Trace`; output and context have the batch first.

    Raises:
        ValueError: In the same cases as `apply`, or inputs of different lengths.
    """
    common = {k: a for k, a in options.items() if k in ("dropout_rate", "keep", "edit")}
    arrays = {
        k: jnp.asarray(a)
        for k, a in {"x": x, **options}.items()
        if k not in common and a is not None
    }
    num_examples = batch_size(arrays)
    check_indices(arrays, config)  # inside vmap values are traced
    for name in arrays.keys() & {"mask", "memory_mask"}:
        arrays[name] = as_mask(arrays[name], name)
    keys = None if dropout_key is None else jax.random.split(dropout_key, num_examples)

    def apply_one(example, key):
        return apply(params, config=config, dropout_key=key, **example, **common)

    out_axes = Trace(hidden=1, layers=1, output=0, context=0)
    return jax.vmap(apply_one, out_axes=out_axes)(arrays, keys)
