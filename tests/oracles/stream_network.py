"""Networks of several residual streams, token by token in NumPy: the oracle of their tests."""

import jax
import numpy as np

from tests.oracles import mp_network


def sinkhorn(logits):
    m = np.exp(logits)
    for _ in range(20):
        for j in range(len(m)):
            m[:, j] = m[:, j] / m[:, j].sum()
        for i in range(len(m)):
            m[i] = m[i] / m[i].sum()
    return m


def layer_norm(a, eps):
    return (a - a.mean()) / np.sqrt(a.var() + eps)


def connection(p, streams, config, count):
    """Computes p, q [s] and R [s, s] of one token; of its streams [s, d] `count` exist."""
    s, eps = len(streams), config.norm_eps
    if config.connection == "attention":
        keys = [a / np.sqrt(np.mean(a**2) + eps) for a in streams[:count]]
        weights = np.exp([p.read @ key for key in keys])
        read = np.append(weights / weights.sum(), np.zeros(s - count))
        return read, np.eye(s + 1)[count, :s], np.eye(s)
    read, write, carry = p.read.copy(), p.write.copy(), p.carry.copy()
    if config.connection == "hyper":
        if p.gates is not None:
            for j in range(s):
                y = layer_norm(streams[j], eps)
                read[j] += p.gates[1] * np.tanh(y @ p.w_read)
                write[j] += p.gates[0] * np.tanh(y @ p.w_write)
                for i in range(s):
                    carry[i, j] += p.gates[1] * np.tanh(y @ p.w_carry[:, i])
        return read, write, carry
    if p.gates is not None:
        y = streams.reshape(-1) / np.sqrt(np.mean(streams**2) + eps)
        read += p.gates[1] * y @ p.w_read.reshape(len(y), s)
        write += p.gates[0] * y @ p.w_write.reshape(len(y), s)
        carry += p.gates[2] * (y @ p.w_carry.reshape(len(y), s * s)).reshape(s, s)
    return mp_network.sigmoid(read), 2 * mp_network.sigmoid(write), sinkhorn(carry)


def attention(p, x, frozen, causal):
    """Computes the attention to values of x, with the weights that the tokens `frozen` have."""
    out = np.tile(p.b_o, (len(x), 1))
    for h in range(len(p.w_q)):
        q, k = (frozen @ getattr(p, f"w_{n}")[h] + getattr(p, f"b_{n}")[h] for n in "qk")
        v = x @ p.w_v[h] + p.b_v[h]
        for i in range(len(x)):
            keys = k[: i + 1] if causal else k
            weights = np.exp(keys @ q[i] / np.sqrt(q.shape[1]))
            out[i] += weights / weights.sum() @ v[: len(keys)] @ p.w_o[h]
    return out


def mlp(p, x, frozen, kind):
    z = frozen @ p.w_in + p.b_in
    return mp_network.activation(kind)(z) / z * (x @ p.w_in + p.b_in) @ p.w_out + p.b_out


def output(params, x, config, gain=1.0):
    """Computes the output of a pre-norm network with LayerNorms, with a causal mask or none.

    A gain multiplies the branches of attention of a copy whose weights, gates, norms and
    connections are those of the network itself.
    """
    params = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    x = np.asarray(x, np.float64)
    (n, d), s = x.shape, config.num_streams
    if config.connection == "attention":
        s = 1 + config.depth * len(config.kinds)
    streams = np.zeros((2, n, s, d))  # the network itself and its copy
    for i in range(1 if config.connection == "attention" else s):
        streams[:, :, i] = x
    count = 0

    def normalise(p, x):
        """Normalises the network's and the copy's tokens by the network's statistics."""
        sizes = np.sqrt(x[0].var(axis=-1, keepdims=True) + config.norm_eps)
        return (x - x.mean(axis=-1, keepdims=True)) / sizes * p.gain + p.bias

    for l in range(config.depth):
        layer = jax.tree.map(lambda a, l=l: a[l], params.layers)
        gains = mp_network.compute_gains(config, layer, l)
        for kind in config.kinds:
            count += 1
            connection_params = getattr(layer, f"{kind}_connection")
            connections = [
                connection(connection_params, streams[0, t], config, count) for t in range(n)
            ]
            read = np.stack([p @ streams[:, t] for t, (p, _, _) in enumerate(connections)], axis=1)
            normalised, p = normalise(getattr(layer, f"{kind}_norm"), read), getattr(layer, kind)
            normalised = normalised * getattr(gains.norm, kind)
            for copy, factor in enumerate((1, gain)):
                if kind == "attention":
                    part = (
                        attention(p, normalised[copy], normalised[0], config.mask == "causal")
                        * factor
                    )
                else:
                    part = mlp(p, normalised[copy], normalised[0], config.mlp)
                part = part * getattr(gains.branch, kind)
                for t, (_, q, carry) in enumerate(connections):
                    streams[copy, t] = carry @ streams[copy, t] + np.outer(q, part[t])
    last = streams.mean(axis=2)
    if config.connection == "attention":
        final = params.final_connection
        reads = [connection(final, a, config, count + 1)[0] for a in streams[0]]
        last = np.stack([p @ streams[:, t] for t, p in enumerate(reads)], axis=1)
    return normalise(params.final_norm, last)[1]
