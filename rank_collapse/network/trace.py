"""The result of a forward pass: the arrays of every layer, as `apply` saves them.

Axis letters: l layers, h heads, n tokens, m memory tokens, d width.
"""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jaxtyping import Array

from rank_collapse import struct
from rank_collapse.annotations import Leaf
from rank_collapse.network.attention_weights import AttentionContext


class LayerTrace(struct.Struct):
    """Arrays that one layer computed; in a Trace, with a leading layer axis.

    The sums before a post-norm are λ·input·[skip] + γ·branch and are not stored.

    Attributes:
        attention: [h, n, n], P_h, or M_h where the config mixes.
        attention_branch: [n, d], SA(x) before γ.
        after_attention: [n, d], output of the attention sublayer.
        hidden: [n, d], output of the layer.
        cross_attention: [h, n, m], weights of the attention to the memory; None without it.
        cross_branch, after_cross: [n, d] each, of the attention to the memory; None without it.
        mlp_branch: [n, d], output of the MLP before γ; None without MLP.
        kept: {edit point: value there}, with `keep` of `apply`; None without it.
    """

    attention: Leaf
    attention_branch: Leaf
    after_attention: Leaf
    hidden: Leaf
    cross_attention: Leaf | None = None
    cross_branch: Leaf | None = None
    after_cross: Leaf | None = None
    mlp_branch: Leaf | None = None
    kept: dict[str, Leaf] | None = None


if TYPE_CHECKING:
    Layers = LayerTrace
    Context = AttentionContext
else:  # as `annotations.Leaf`: in `out_axes` of a vmap these are integers
    Layers = Context = Any


class Trace(struct.Struct):
    """Everything that a forward pass computed.

    In a batch from `apply_batch` the examples come after the layers, [L + 1, b, n, d]; from
    `jax.vmap(apply)` they come first, [b, L + 1, n, d]. `layer_axis` tells which.

    Attributes:
        hidden: [L + 1, n, d], X^0 (the input) to X^L, all of them before the final norm.
        layers: LayerTrace with a leading layer axis.
        output: [n, d], X^L after the final norm where there is one.
        context: Masks, biases and positions that all layers share.
    """

    hidden: Leaf
    layers: Layers
    output: Leaf
    context: Context

    def __repr__(self) -> str:
        shapes = {"hidden": self.hidden, "attention": self.attention, "output": self.output}
        listing = ", ".join(f"{name} {list(jnp.shape(a))}" for name, a in shapes.items())
        return f"Trace({listing}; layers: attention_branch, after_attention, mlp_branch, ...)"

    @property
    def layer_axis(self) -> int:
        """Find the axis of layers: the only axis on which states and branches have different
        lengths.

        Raises:
            ValueError: The arrays are not from one pass.
        """
        shapes = jnp.shape(self.hidden), jnp.shape(self.layers.attention_branch)
        axes = [i for i, (a, b) in enumerate(zip(*shapes, strict=False)) if a != b]
        if len(axes) != 1 or len(shapes[0]) != len(shapes[1]):
            raise ValueError(
                f"hidden states and branches of shapes {shapes} do not belong to one pass"
            )
        return axes[0]

    @property
    def hidden_states(self) -> Array:
        """Replace the last state of `hidden` by `output`, which is after the final norm.

        Language models of `transformers` return this; its ViT, DeiT and DINOv2 return `hidden`.
        """
        states = jnp.moveaxis(self.hidden, self.layer_axis, 0).at[-1].set(self.output)
        return jnp.moveaxis(states, 0, self.layer_axis)

    @property
    def cross_attention(self) -> Leaf | None:
        """Weights of the attention to the memory [L, h, n, m], or None."""
        return self.layers.cross_attention

    @property
    def kept(self) -> dict[str, Leaf] | None:
        """{edit point: its values in every layer [L, ...]} of `apply`'s `keep`, or None."""
        return self.layers.kept

    @property
    def attention(self) -> Leaf:
        """Attention weights [L, h, n, n]."""
        return self.layers.attention

    @property
    def attention_branch(self) -> Leaf:
        """Attention outputs [L, n, d] before skip and norm."""
        return self.layers.attention_branch

    @property
    def mlp_branch(self) -> Leaf | None:
        """MLP outputs [L, n, d] before skip and norm, or None."""
        return self.layers.mlp_branch
