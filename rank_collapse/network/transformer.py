"""The one network: `apply`, which returns a Trace, and its algebra of ordinary tokens.

Every function takes one example [n, d]; vmap adds batch and seed axes. Axis letters as in
`rank_collapse`.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rank_collapse import struct
from rank_collapse.network import attention as attn, edits, layers, streams
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.dropout import dropout, dropout_branches
from rank_collapse.network.edits import EditPoints
from rank_collapse.network.inputs import (
    as_mask,
    batch_size,
    check_indices,
    prepare_inputs,
)
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.residual import add_to_stream, normalize_tokens
from rank_collapse.network.walk import (
    Algebra,
    Layer,
    SublayerValues,
    apply_final_norm,
    walk_layer,
    walk_layers,
)


class LayerTrace(struct.Struct):
    """The values that one layer computed; in a Trace, with a leading layer axis.

    The sums before a post-norm are λ·input·[skip] + γ·branch and are not stored. States of several
    streams are their means; `apply(..., keep=("residual",))` keeps them apart.
    """

    attention: struct.Leaf  # [h, n, n]  P_h, or M_h where the config mixes
    attention_branch: struct.Leaf  # [n, d]  SA(x), before γ
    after_attention: struct.Leaf  # [n, d]  output of the attention sublayer
    hidden: struct.Leaf  # [n, d]  output of the layer
    cross_attention: struct.Leaf | None = None  # [h, n, m]
    cross_branch: struct.Leaf | None = None  # [n, d]
    after_cross: struct.Leaf | None = None  # [n, d]
    mlp_branch: struct.Leaf | None = None  # [n, d]
    kept: dict[str, struct.Leaf] | None = None  # {place: what is there}, with keep


if TYPE_CHECKING:
    Layers = LayerTrace
    Context = attn.AttentionContext
else:  # as of `struct.Leaf`: the axes of a vmap stand here too
    Layers = Context = Any


class Trace(struct.Struct):
    """Everything a forward pass computed.

    A batch is after the layers where `apply_batch` made it, [L + 1, b, n, d], and before them
    where `jax.vmap(apply)` did, [b, L + 1, n, d]; `layer_axis` says which.

    Attributes:
        hidden: [L + 1, n, d], X^0 (the input) to X^L, all of them before the final norm.
        layers: LayerTrace with a leading layer axis.
        output: [n, d], X^L after the final norm where there is one.
        context: Masks, biases and positions of all layers; of one by `AttentionContext.of_layer`.
    """

    hidden: struct.Leaf
    layers: Layers
    output: struct.Leaf
    context: Context

    def __repr__(self) -> str:
        shapes = {"hidden": self.hidden, "attention": self.attention, "output": self.output}
        shown = ", ".join(f"{name} {list(jnp.shape(a))}" for name, a in shapes.items())
        return f"Trace({shown}; layers: attention_branch, after_attention, mlp_branch, ...)"

    @property
    def layer_axis(self) -> int:
        """The axis of layers: the only one along which states and branches differ in number.

        Raises:
            ValueError: Arrays that no pass has made.
        """
        shapes = jnp.shape(self.hidden), jnp.shape(self.layers.attention_branch)
        axes = [i for i, (a, b) in enumerate(zip(*shapes, strict=False)) if a != b]
        struct.refuse_if(
            len(axes) != 1 or len(shapes[0]) != len(shapes[1]),
            f"hidden states and branches of shapes {shapes} are not of one pass",
        )
        return axes[0]

    @property
    def hidden_states(self) -> Array:
        """`hidden` with the last state replaced by `output`, after the final norm.

        As language models of `transformers` return them; its ViT, DeiT and DINOv2 return `hidden`.
        """
        states = jnp.moveaxis(self.hidden, self.layer_axis, 0).at[-1].set(self.output)
        return jnp.moveaxis(states, 0, self.layer_axis)

    @property
    def cross_attention(self) -> struct.Leaf | None:
        """Weights of the attention to the memory [L, h, n, m], or None."""
        return self.layers.cross_attention

    @property
    def kept(self) -> dict[str, struct.Leaf] | None:
        """{place: its values in every layer [L, ...]} of `apply`'s `keep`, or None."""
        return self.layers.kept

    @property
    def attention(self) -> struct.Leaf:
        """Attention weights [L, h, n, n]."""
        return self.layers.attention

    @property
    def attention_branch(self) -> struct.Leaf:
        """Attention outputs [L, n, d] before skip and norm."""
        return self.layers.attention_branch

    @property
    def mlp_branch(self) -> struct.Leaf | None:
        """MLP outputs [L, n, d] before skip and norm, or None."""
        return self.layers.mlp_branch


class BranchAux(NamedTuple):
    """What a branch computed beside its part of the sum; None for absent parts."""

    output: Any  # [n, d], before dropout
    weights: Any = None  # [h, n, m]


class TokenAlgebra(Algebra):
    """Ordinary tokens [n, d], edited at the layer's places, with dropout where there is a key."""

    def __init__(
        self, places: EditPoints | None = None, dropout_key: Any = None, dropout_rate: Any = 0.0
    ):
        self.places = EditPoints() if places is None else places
        self.dropout_rate = dropout_rate
        self.keys = [None] * 6 if dropout_key is None else dropout_branches(dropout_key, 6)

    def merge_streams(self, layer, spec, x):
        return streams.merge_streams(layer.connection(spec, x), x)

    def apply_norm(self, layer, spec, x):
        return normalize_tokens(spec, x)

    def add_branch(self, layer, spec, x, part):
        return add_to_stream(spec, *streams.join_streams(layer.connection(spec, x), x, part))

    def edit_branch_input(self, layer, kind, x):
        return self.places(f"{kind}_input", x)

    def apply_attention(self, layer, branch_input):
        config = layer.config
        own = {"normalise": config.normalise, "mixing": layer.gains.mixing, "mix": config.mix}
        return self._attend(layer, "attention", branch_input, branch_input, layer.context, **own)

    def apply_cross(self, layer, branch_input):
        inputs = layer.inputs
        return self._attend(layer, "cross", branch_input, inputs.memory, inputs.memory_context)

    def apply_mlp(self, layer, branch_input):
        config = layer.config
        part = layers.mlp(layer.params.mlp, branch_input, config.mlp, config.routing, self.places)
        out = self.places("mlp_branch", part)
        return self._dropped("mlp", out), BranchAux(out)

    def edit_state(self, layer, name, x):
        return self.places(name, x)

    def _attend(self, layer, kind, branch_input, keys, context, **options):
        prefix = "cross_" if kind == "cross" else ""
        part, weights = attn.multi_head_attention(
            getattr(layer.params, kind),
            branch_input,
            keys,
            context=context,
            **layer.score_options,
            **options,
            dropout_key=self.keys[_PLACE[kind] + 3],
            dropout_rate=self.dropout_rate,
            edit=dataclasses.replace(self.places, prefix=prefix),
        )
        out = self.places(f"{kind}_branch", part)
        return self._dropped(kind, out), BranchAux(out, weights)

    def _dropped(self, kind, part):
        key = self.keys[_PLACE[kind]]
        return part if key is None else dropout(key, part, self.dropout_rate)


_PLACE = {"attention": 0, "cross": 1, "mlp": 2}


class LayerValues(NamedTuple):
    """One layer of a forward pass: its state, trace, passages of its sublayers, and places."""

    state: Any  # [n, d], what the next layer takes: `trace.hidden`, or several streams [s, n, d]
    trace: LayerTrace
    sublayers: dict[str, SublayerValues]
    places: EditPoints


def compute_layer(
    layer: Layer,
    x: Float[Array, "*s n d"],
    *,
    dropout_key: Any = None,
    dropout_rate: Any = 0.0,
    keep: tuple[str, ...] = (),
) -> LayerValues:
    """One layer on tokens; see `TransformerConfig`.

    Args:
        x: The state before it, from `streams.begin` at first.
        dropout_key, dropout_rate: For dropout on attention weights and branches; None for none.
        keep: Names of places whose values the trace keeps.
    """
    after = tuple(f"after_{kind}" for kind in layer.config.kinds if kind != "mlp")
    of_mix = ("q", "k", "v") if layer.config.mix is not None else ()
    places = EditPoints(layer.inputs.edit, layer.index, (*keep, *after, *of_mix))
    state, passages = walk_layer(TokenAlgebra(places, dropout_key, dropout_rate), layer, x)
    attention = passages["attention"].aux
    fields = {f"{kind}_branch": passage.aux.output for kind, passage in passages.items()}
    states = {name: places.kept[name] for name in after} | {"hidden": state}
    for ahead, (name, a) in enumerate(states.items(), 1):
        passed = layer.passed("final") + ahead
        fields[name] = streams.merge_streams(
            streams.compute_connection(None, a, layer.config, passed), a
        )
    if "cross" in passages:
        fields["cross_attention"] = passages["cross"].aux.weights
    if keep:
        fields["kept"] = {name: places.kept[name] for name in keep}
    return LayerValues(state, LayerTrace(attention=attention.weights, **fields), passages, places)


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
    """The network on one example.

    Args:
        params: From `init` or `rank_collapse.pretrained.load`.
        x: Hidden states Float [n, d]; or token ids Int [n] where the config has an embedding.
        mask: Bool [n] (which tokens exist), [n, n] or [h, n, n]; True may be attended to.
        bias: Float [h, n, n] added to the attention scores.
        memory: Float [m, d], the encoder's output, with `config.cross_attention`.
        memory_mask: Bool [m], [n, m] or [h, n, m].
        segments: Int [n], segments of tokens (embedding or relative attention).
        positions: Int [n], positions of tokens; 0..n-1 by default.
        dropout_key: Key for dropout on attention weights and branches; None for none.
        dropout_rate: Its rate; may be traced.
        keep: Names of places, as of an edit, whose values `trace.kept` holds by name; static.
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
            dropout rate without a key, an unknown place, or an edit that changes a shape.
    """
    edits.check_names(tuple(keep), config)
    if not isinstance(dropout_rate, jax.core.Tracer):
        struct.refuse(
            (
                not 0 <= np.asarray(dropout_rate) <= 1,
                f"dropout_rate={dropout_rate} is not in [0, 1]",
            ),
            (
                dropout_key is None and dropout_rate,
                f"dropout_rate={dropout_rate} needs a dropout_key",
            ),
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
    return _apply(params, prepared, config, dropout_key, dropout_rate, tuple(keep))


def apply_batch(
    params: TransformerParams,
    x: Any,
    config: TransformerConfig,
    *,
    dropout_key: Any = None,
    **options: Any,
) -> Trace:
    """`apply` on a batch, layers first: hidden [L + 1, b, n, d], attention [L, b, h, n, n].

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
    given = {k: jnp.asarray(a) for k, a in {"x": x, **options}.items() if a is not None}
    size = batch_size(given)
    check_indices(given, config)  # inside vmap values are traced
    for name in given.keys() & {"mask", "memory_mask"}:
        given[name] = as_mask(given[name], name)
    keys = None if dropout_key is None else jax.random.split(dropout_key, size)

    def one(example, key):
        return apply(params, config=config, dropout_key=key, **example, **common)

    return jax.vmap(one, out_axes=Trace(hidden=1, layers=1, output=0, context=0))(given, keys)


@functools.partial(jax.jit, static_argnames="keep")
def _apply(params, prepared, config, dropout_key, dropout_rate, keep) -> Trace:
    # Compiled here, so that a call outside jit compiles once for a shape and not every time.
    keys = None if dropout_key is None else dropout_branches(dropout_key, config.depth)

    def step(layer, x):
        seen = compute_layer(
            layer, x, dropout_key=layer.extra, dropout_rate=dropout_rate, keep=keep
        )
        return seen.state, seen.trace

    start = streams.start_streams(prepared.x, config)
    last, trace = walk_layers(step, start, params, prepared, config, extra=keys)
    output = apply_final_norm(TokenAlgebra(), last, params, prepared, config)
    hidden = jnp.concatenate([prepared.x[None], trace.hidden])
    return Trace(hidden=hidden, layers=trace, output=output, context=prepared.context)
