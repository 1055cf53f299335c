"""Several residual streams instead of one: hyper-connections, mHC, attention residuals.

The state is X [s, n, d]. Of each token a sublayer f reads Σ_i p_i X_i and joins the streams by

    X_i ← λ Σ_j R_ij X_j + γ q_i f(Σ_j p_j X_j),

p, q and R as `ResidualConfig.connection` says. N is a norm without gain and bias, g a gate; what is
in brackets is there with `connection_by_token`.

"hyper": p_i [+ g tanh(N(X_i)·a)], q_i [+ g' tanh(N(X_i)·b)], R_ij [+ g tanh(N(X_j)·C)_i], with
    LayerNorm; all streams start as X^0 (Zhu et al. 2024, arXiv 2409.19606).
"manifold": p = σ(p̃ [+ g N(X) A]), q = 2σ(q̃ [+ g' N(X) B]), R = Sinkhorn(exp(R̃ [+ g'' N(X) C])),
    with RMSNorm over all streams of a token (mHC, Xie et al. 2025, arXiv 2512.24880).
"attention": stream i is X^0 or what branch i has written, p = softmax_i(w·RMSNorm(X_i)) over those
    that exist, q is 1 for the next one, R = I (Kimi Team 2026, arXiv 2603.15031).

What is read after the last layer is the mean of the streams ("hyper" and "manifold": the authors'
sum, which the final norm cannot tell apart), or an attention over them.

Axis letters: s, i, j streams, n tokens, d width.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse import struct
from rank_collapse.network import layers
from rank_collapse.network.config import TransformerConfig

SINKHORN_STEPS = 20
INITIAL_GATE = 0.01


class ConnectionParams(struct.Struct):
    """How one sublayer is connected to the streams; with a leading axis for a stack.

    `w_read`, `w_write` and `w_carry` are what depends on the token.
    """

    read: Any  # p or p̃ [s]; of "attention" the query w [d], and nothing else
    write: Any = None  # q or q̃ [s]
    carry: Any = None  # R or R̃ [s, s]
    w_read: Any = None  # [d] of "hyper", [s, d, s] of "manifold"
    w_write: Any = None  # the same
    w_carry: Any = None  # [d, s] of "hyper", [s, d, s, s] of "manifold"
    gates: Any = None  # of q and of p and R [2] ("hyper"), or of q, p and R [3]


def init_connections(config: TransformerConfig) -> dict[str, ConnectionParams]:
    """Make the connections as their authors start them: fields of `BlockParams`, stacked.

    "hyper": p the unit vector of stream k mod s in sublayer k, q = 1, R = I: the network is that of
    one stream. "manifold": p̃ = q̃ = 0 and R̃ = I, so that p = ½, q = 1 and R has e/(e + s − 1) on
    its diagonal (the paper gives the gates alone). Weights by token start at 0, gates at 0.01, and
    the queries of "attention" at 0.
    """
    if config.connection == "skip":
        return {}
    s, d = config.num_streams, config.d_model
    first_layers = jnp.asarray(config.first_layer_of_rows)
    num_rows = len(first_layers)
    shapes = {"w_read": (d,), "w_write": (d,), "w_carry": (d, s)}
    if config.connection == "manifold":
        shapes = {"w_read": (s, d, s), "w_write": (s, d, s), "w_carry": (s, d, s, s)}
    connections = {}
    for number, kind in enumerate(config.kinds):
        one_hot = jax.nn.one_hot((first_layers * len(config.kinds) + number) % s, s)
        if config.connection == "attention":
            fields = {"read": jnp.zeros((num_rows, d))}
        else:
            identity = jnp.broadcast_to(jnp.eye(s), (num_rows, s, s))
            fields = {"read": one_hot, "write": jnp.ones_like(one_hot), "carry": identity}
            if config.connection == "manifold":
                fields |= {"read": jnp.zeros_like(one_hot), "write": jnp.zeros_like(one_hot)}
            if config.connection_by_token:
                fields |= {name: jnp.zeros((num_rows, *shape)) for name, shape in shapes.items()}
                num_gates = 3 if config.connection == "manifold" else 2
                fields["gates"] = jnp.full((num_rows, num_gates), INITIAL_GATE)
        connections[f"{kind}_connection"] = ConnectionParams(**fields)
    return connections


class Connection(NamedTuple):
    """p, q and R of all tokens at one sublayer."""

    read: Any  # [s, n]
    write: Any = None  # [s, n]; None after the last layer
    carry: Any = None  # [s, s, n]; None for the identity


def compute_connection(
    params: ConnectionParams | None,
    x: Float[Array, "*s n d"],
    config: TransformerConfig,
    num_before: Any,
) -> Connection | None:
    """Compute p, q and R of one sublayer at a state; None where there is one stream.

    Args:
        params: Parameters of the sublayer; None to read all streams that exist alike.
        x: The state.
        config: The network.
        num_before: The number of sublayers passed so far.
    """
    if config.connection == "skip":
        return None
    s, n, _ = x.shape
    if config.connection == "attention":
        index, scores = jnp.arange(s)[:, None], jnp.zeros((s, n), x.dtype)
        if params is not None:
            # Recomputed for its gradient: normalised streams of all sublayers are much memory.
            scores = jax.checkpoint(lambda w, x: _normalize(x, "rms", config) @ w)(params.read, x)
        read = jax.nn.softmax(jnp.where(index <= num_before, scores, -jnp.inf), axis=0)
        write = jnp.broadcast_to(index == num_before + 1, (s, n)).astype(x.dtype)
        return Connection(read, write)
    if params is None:
        return Connection(jnp.full((s, n), 1 / s, x.dtype))
    read = jnp.broadcast_to(params.read[..., None], (s, n))
    write = jnp.broadcast_to(params.write[..., None], (s, n))
    carry = jnp.broadcast_to(params.carry[..., None], (s, s, n))
    if params.gates is not None:
        compute_terms = _hyper_terms if config.connection == "hyper" else _manifold_terms
        read_term, write_term, carry_term = compute_terms(params, x, config)
        read = read + params.gates[1] * read_term
        write = write + params.gates[0] * write_term
        carry = carry + params.gates[-1] * carry_term
    if config.connection == "hyper":
        return Connection(read, write, carry)
    return Connection(jax.nn.sigmoid(read), 2 * jax.nn.sigmoid(write), sinkhorn(carry))


def _normalize(x, kind, config):
    return jax.vmap(lambda a: layers.apply_norm(None, a, kind, config.norm_eps))(x)


def _hyper_terms(params, x, config):
    """Compute what hyper-connections add by token: each stream decides over its own share."""
    y = _normalize(x, "layer", config)
    carry = jnp.einsum("jnd,di->ijn", y, params.w_carry)
    return jnp.tanh(y @ params.w_read), jnp.tanh(y @ params.w_write), jnp.tanh(carry)


def _manifold_terms(params, x, config):
    """Compute what mHC adds by token: all streams decide together."""
    square = jnp.mean(jnp.square(x), axis=(0, 2), keepdims=True)
    y = x * jax.lax.rsqrt(square + config.norm_eps)
    return (
        jnp.einsum("snd,sdi->in", y, params.w_read),
        jnp.einsum("snd,sdi->in", y, params.w_write),
        jnp.einsum("snd,sdij->ijn", y, params.w_carry),
    )


def sinkhorn(logits: Float[Array, "i j *n"]) -> Float[Array, "i j *n"]:
    """Divide exp(logits) by the sums of its columns and then of its rows, again and again.

    Of the identity of size s: e/(e + s − 1) on the diagonal and 1/(e + s − 1) elsewhere, whose
    powers fall to 11ᵀ/s as ((e − 1)/(e + s − 1))^k.

    Args:
        logits: Logits of every token.

    Source: Sinkhorn and Knopp 1967; Xie et al. 2025, equation 9.
    """
    # A factor of all entries cancels, and so does its gradient.
    largest = jax.lax.stop_gradient(jnp.max(logits, axis=(0, 1), keepdims=True))

    def divide_by_sums(_, m):
        m = m / m.sum(axis=0, keepdims=True)
        return m / m.sum(axis=1, keepdims=True)

    return jax.lax.fori_loop(0, SINKHORN_STEPS, divide_by_sums, jnp.exp(logits - largest))


def start_streams(x: Float[Array, "n d"], config: TransformerConfig) -> Float[Array, "*s n d"]:
    """Make the streams at X^0; X^0 itself where there is one.

    Args:
        x: X^0.
        config: The network.
    """
    if config.connection == "attention":
        return jnp.zeros((*config.streams, *x.shape), x.dtype).at[0].set(x)
    return jnp.broadcast_to(x, (*config.streams, *x.shape))


def merge_streams(
    connection: Connection | None, x: Float[Array, "*s n d"]
) -> Float[Array, "*t n d"]:
    """Sum Σ_i p_i X_i over streams, or their channels [s, g, n, d]; X itself without connection.

    Args:
        connection: Connection of the sublayer; None where there is one stream.
        x: The streams.
    """
    return x if connection is None else jnp.einsum("sn,s...nd->...nd", connection.read, x)


def average_streams(
    x: Float[Array, "*s n d"], config: TransformerConfig, num_before: Any
) -> Float[Array, "n d"]:
    """Average the streams that exist after a number of sublayers; one stream stays as it is.

    Args:
        x: The streams.
        config: The network.
        num_before: The number of sublayers passed.
    """
    return merge_streams(compute_connection(None, x, config, num_before), x)


def join_streams(
    connection: Connection | None, x: Float[Array, "*s n d"], branch_output: Float[Array, "*t n d"]
) -> tuple[Float[Array, "*s n d"], Float[Array, "*s n d"]]:
    """Compute the two summands of a sublayer's new streams, Σ_j R_ij X_j and q_i f.

    Args:
        connection: R is its `carry`, q its `write`; None for one stream: (X, f) themselves.
        x: X, the streams.
        branch_output: f, what the branch computed from the one merged stream.
    """
    if connection is None:
        return x, branch_output
    if connection.carry is not None:
        x = jnp.einsum("ijn,j...nd->i...nd", connection.carry, x)
    return x, jnp.einsum("sn,...nd->s...nd", connection.write, branch_output)
