"""From tokens, vectors or image patches to hidden states, for one example.

Axis letters: n tokens, e embedding width, i input width, d model width.
"""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rank_collapse import checks, struct
from rank_collapse.annotations import ArrayLike, Key, Leaf
from rank_collapse.network import layers
from rank_collapse.network.layers import NormParams

EmbeddedPositions = Literal["none", "learned", "sinusoidal"]
Projection = Literal["none", "before_norm", "after_norm"]
POSITION_KINDS, PROJECTIONS = get_args(EmbeddedPositions), get_args(Projection)


class EmbeddingConfig(struct.Struct):
    """Static description of an embedding.

    Order: lookup (or the map of vectors) · scale, the class token, + positions, + segments,
    projection if "before_norm", norm, projection if "after_norm".

    Attributes:
        vocab_size: Rows of the token table; 0 where inputs are vectors [n, d_input].
        d_input: Width of input vectors; 0 where inputs are tokens.
        d_embed: Width e before the projection (the model's width when there is none).
        hidden_layer: Vectors pass linear-gelu-linear instead of one linear map.
        convolutions: Vectors are frames in time. Two convolutions over three frames each, the
            second at every other frame, with zeros beyond the ends and a gelu after each (Whisper).
        positions, num_positions: "none", "learned" (rows of the table) or "sinusoidal".
        num_segments: Rows of the segment table, 0 for none.
        class_token: A learned vector put in front of the sequence (ViT).
        num_registers, place_registers: Number of learned vectors after the class token. They are
            put there before positions are added, which count them (DeiT's distillation token), or
            after (DINOv2).
        projection: Dense map to the model's width: "none", "before_norm", "after_norm" (ALBERT).
        norm, norm_eps: Whether a LayerNorm is applied, and its eps.
        scale: Multiplies the looked-up embeddings.
    """

    vocab_size: int = struct.static(0)
    d_input: int = struct.static(0)
    d_embed: int = struct.static(64)
    hidden_layer: bool = struct.static(False)
    convolutions: bool = struct.static(False)
    positions: EmbeddedPositions = struct.static("none")
    num_positions: int = struct.static(0)
    num_segments: int = struct.static(0)
    class_token: bool = struct.static(False)
    num_registers: int = struct.static(0)
    place_registers: bool = struct.static(False)
    projection: Projection = struct.static("none")
    norm: bool = struct.static(True)
    norm_eps: float = struct.static(1e-12)
    scale: float = struct.static(1.0)

    def __post_init__(self):
        struct.check_static_fields(self, d_embed=1)
        if (self.vocab_size > 0) == (self.d_input > 0):
            raise ValueError(
                f"one of vocab_size={self.vocab_size} and d_input={self.d_input} must be positive"
            )
        checks.check_choices(self, positions=POSITION_KINDS, projection=PROJECTIONS)


class EmbeddingParams(struct.Struct):
    """Tables and maps of an embedding; None for tables and maps that the config does not have.

    Attributes:
        tokens: [vocab, e].
        w_in, b_in: [i, e], or [3, i, e] of a convolution; and [e].
        w_hidden, b_hidden: [e, e], the second map of linear-gelu-linear, or [3, e, e] of a
            convolution; and [e].
        positions, segments: [positions, e] and [segments, e].
        class_token: [e].
        registers: [registers, e].
        norm: Each [e] or [d].
        w_project, b_project: [e, d] and [d].
    """

    tokens: Leaf | None = None
    w_in: Leaf | None = None
    b_in: Leaf | None = None
    w_hidden: Leaf | None = None
    b_hidden: Leaf | None = None
    positions: Leaf | None = None
    segments: Leaf | None = None
    class_token: Leaf | None = None
    registers: Leaf | None = None
    norm: NormParams | None = None
    w_project: Leaf | None = None
    b_project: Leaf | None = None


def sinusoidal_positions(positions: Float[Array, "n"], width: int) -> Float[Array, "n w"]:
    """Compute [sin(p ω_i), cos(p ω_i)], ω_i = 10000^(−2i/w) (Vaswani et al. 2017, section 3.5).

    Args:
        positions: p.
        width: w; sines come first.
    """
    angles = positions[:, None] * (10000.0 ** (-jnp.arange(0, width, 2) / width))[None, :]
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)[:, :width]


def init_embedding(
    key: Key, config: EmbeddingConfig, d_model: int, std: float = 0.02
) -> EmbeddingParams:
    """Draw normal(0, std) tables and maps, zero biases, unit gains.

    Args:
        key: Random key.
        config: Configuration, which decides which tables and maps exist.
        d_model: Width d of the network.
        std: Standard deviation.

    Raises:
        ValueError: A width e that is not d, without a projection.
    """
    e = config.d_embed
    if config.projection == "none" and e != d_model:
        raise ValueError(
            f"d_embed={e} is not d_model={d_model}, and the embedding has no projection"
        )
    keys = jax.random.split(key, 7)

    def draw_normal(key, *shape):
        return std * jax.random.normal(key, shape)

    fields = {}
    if config.vocab_size:
        fields["tokens"] = draw_normal(keys[0], config.vocab_size, e)
    else:
        taps = (3,) if config.convolutions else ()
        fields.update(w_in=draw_normal(keys[0], *taps, config.d_input, e), b_in=jnp.zeros(e))
        if config.hidden_layer or config.convolutions:
            fields.update(w_hidden=draw_normal(keys[1], *taps, e, e), b_hidden=jnp.zeros(e))
    if config.positions == "learned":
        fields["positions"] = draw_normal(keys[2], config.num_positions, e)
    if config.num_segments:
        fields["segments"] = draw_normal(keys[3], config.num_segments, e)
    if config.class_token:
        fields["class_token"] = draw_normal(keys[4], e)
    if config.num_registers:
        fields["registers"] = draw_normal(jax.random.fold_in(keys[4], 0), config.num_registers, e)
    if config.projection != "none":
        fields.update(w_project=draw_normal(keys[5], e, d_model), b_project=jnp.zeros(d_model))
    if config.norm:
        width = d_model if config.projection == "before_norm" else e
        fields["norm"] = layers.NormParams(gain=jnp.ones(width), bias=jnp.zeros(width))
    return EmbeddingParams(**fields)


def embed(
    params: EmbeddingParams,
    inputs: Int[Array, "n"] | Float[Array, "n i"],
    config: EmbeddingConfig,
    *,
    positions: Int[Array, "n"] | None = None,
    segments: Int[Array, "n"] | None = None,
) -> Float[Array, "nn d"]:
    """Compute the hidden states X^0 of one example.

    Args:
        params: Embedding parameters.
        inputs: Token ids [n], or vectors [n, d_input] (image patches, points).
        config: Configuration, which decides which steps exist.
        positions: Position of each token; 0..n-1 by default.
        segments: Segment of each token; 0 by default.

    Raises:
        ValueError: Inputs of the wrong kind, or more tokens than positions.
    """
    expected = (1, ()) if config.vocab_size else (2, (config.d_input,))
    if (inputs.ndim, inputs.shape[1:]) != expected:
        raise ValueError(
            f"inputs of shape {inputs.shape} do not fit the embedding (vocab_size="
            f"{config.vocab_size}, d_input={config.d_input}), which takes token ids [n] or vectors "
            "[n, d_input]; for an image pass its patches, see pretrained.image_patches"
        )
    params = jax.tree.map(jnp.asarray, params)  # a traced index reads no table of NumPy
    if config.vocab_size:
        x = params.tokens[inputs]
    elif config.convolutions:
        x = _convolve(inputs, params.w_in, params.b_in, 1)
        x = _convolve(x, params.w_hidden, params.b_hidden, 2)
    else:
        x = inputs @ params.w_in + params.b_in[None, :]
        if config.hidden_layer:
            x = jax.nn.gelu(x, approximate=False) @ params.w_hidden + params.b_hidden[None, :]
    if config.scale != 1.0:
        x = x * config.scale
    if config.class_token:
        x = jnp.concatenate([params.class_token[None, :].astype(x.dtype), x])
    if config.place_registers:
        x = _insert_registers(params, x, config)
    n = x.shape[0]
    check_per_token("positions", positions, n)
    if config.positions == "learned":
        if n > config.num_positions:
            raise ValueError(f"{n} tokens are more than num_positions={config.num_positions}")
        x = x + (params.positions[:n] if positions is None else params.positions[positions])
    elif config.positions == "sinusoidal":
        index = jnp.arange(n) if positions is None else positions
        x = x + sinusoidal_positions(index.astype(x.dtype), x.shape[-1])
    if not config.place_registers:
        x = _insert_registers(params, x, config)
    if config.num_segments:
        check_per_token("segments", segments, len(x))
        index = jnp.zeros(len(x), jnp.int32) if segments is None else segments
        x = x + params.segments[index]
    if config.projection == "before_norm":
        x = x @ params.w_project + params.b_project[None, :]
    if config.norm:
        x = layers.apply_norm(params.norm, x, "layer", config.norm_eps)
    if config.projection == "after_norm":
        x = x @ params.w_project + params.b_project[None, :]
    return x


def check_per_token(name: str, values: ArrayLike, num_tokens: int) -> None:
    """Check that an argument has a value for each token; None passes.

    Args:
        name: Name of the argument.
        values: An array.
        num_tokens: n.

    Raises:
        ValueError: The argument has another shape.
    """
    if values is not None and jnp.shape(values) != (num_tokens,):
        shape = jnp.shape(values)
        raise ValueError(
            f"{name} of shape {shape} does not have one entry for each of {num_tokens} tokens"
        )


def _insert_registers(params, x, config):
    """Insert the registers after the class token."""
    if not config.num_registers:
        return x
    first = int(config.class_token)
    return jnp.concatenate([x[:first], params.registers.astype(x.dtype), x[first:]])


def _convolve(x, w, b, stride):
    """Compute gelu(Σ_j x_{s t + j − 1} w_j + b) for outputs t: a convolution of width 3 with stride
    s.

    Beyond the ends, x is 0.

    Args:
        x: Frames [n, in].
        w, b: Kernel [3, in, out] and bias [out].
        stride: s, frames from one output to the next.
    """
    padded = jnp.pad(x, ((1, 1), (0, 0)))
    output = sum(padded[j : j + len(x) : stride] @ w[j] for j in range(3))
    return jax.nn.gelu(output + b[None, :], approximate=False)
