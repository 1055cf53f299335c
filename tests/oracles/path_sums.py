"""Slow and obvious sums over paths, one at a time, in numpy: the oracle of the path tests."""

from itertools import product

import jax
import numpy as np

from tests.oracles import mp_network


def _gate(kind, z):
    """φ(z)/z"""
    return np.asarray(kind(z) if callable(kind) else mp_network.activation(kind)(z)) / z


GATED = {"reglu": "relu", "geglu": "gelu", "swiglu": "silu"}


def enumerate_paths(depth, num_heads, *, skips=True, length=None):
    """Lists all paths [p, L], or those of one length, in lexicographic order; H is a skip."""
    paths = np.array(list(product(range(num_heads + skips), repeat=depth)), np.int32)
    return paths if length is None else paths[(paths != num_heads).sum(axis=1) == length]


def path_attention(attention, path):
    """P_path = P^L_{h_L} ⋯ P^1_{h_1} of Theorem 2.1; a skip is the identity."""
    out = np.eye(attention.shape[-1])
    for layer, head in zip(np.asarray(attention), path, strict=True):
        out = out if head == len(layer) else layer[head] @ out
    return out


class Oracle:
    """Frozen maps of a forward pass; `terms()` walks every path by itself.

    Terms are (attention length, MLP count, from memory?, state) for every path of the network,
    and the offset is the frozen network applied to a zero input, biases included.
    """

    def __init__(self, params, trace, config, memory=None):
        def as_numpy(a):
            return None if a is None else np.asarray(a, np.float64)

        self.params = jax.tree.map(as_numpy, params)
        self.trace = jax.tree.map(as_numpy, trace)
        self.config, self.memory = config, as_numpy(memory)
        gains = [mp_network.compute_gains(config, self.layer(l), l) for l in range(config.depth)]
        self.gains = gains

    def layer(self, l):
        row = self.config.layer_map[l] if self.config.layer_map else l
        return jax.tree.map(lambda a: a[row], self.params.layers)

    def norm(self, norm, state, c, with_bias, gain=1.0):
        mean = state.mean(axis=-1, keepdims=True)
        if callable(self.config.norm):
            sigma = 1 / np.asarray(self.config.norm(state))
        elif self.config.norm == "rms":
            sigma = np.sqrt((state**2).mean(axis=-1, keepdims=True) + self.config.norm_eps)
        else:
            sigma = np.sqrt(((state - mean) ** 2).mean(-1, keepdims=True) + self.config.norm_eps)
            c = c - c.mean(axis=-1, keepdims=True)
        out = c / sigma * norm.gain * gain
        return out + norm.bias * gain if with_bias and norm.bias is not None else out

    def sublayer(
        self, l, kind, state, branch_value, skip, branch, c, bias, take, start=None, bare=False
    ):
        """Carries the part c of the state through one sublayer, with frozen norms.

        take: "branch", "skip" or "both". state: the input of the sublayer in the forward pass.
        start: the branch input, where it is not c. bare: the branch input is not normed.
        """
        placement, gains, p = self.config.norm_placement, self.gains[l], self.layer(l)
        lam, gamma = getattr(gains.skip, kind), getattr(gains.branch, kind)
        norm_gain = getattr(gains.norm, kind)
        norm, branch_norm = getattr(p, f"{kind}_norm"), getattr(p, f"{kind}_branch_norm")
        out = np.zeros_like(c)
        if take in ("branch", "both"):
            y = c if start is None else start
            if placement in ("pre", "sandwich") and not bare:
                y = self.norm(norm, state, y, bias, norm_gain)
            y = branch(y, bias)
            if placement in ("sandwich", "branch", "both"):
                y = self.norm(branch_norm, branch_value, y, bias)
            out = out + gamma * y
        if skip and take in ("skip", "both"):
            out = out + lam * c
        if placement in ("post", "both"):
            value = branch_value
            if placement == "both":
                value = self.norm(branch_norm, value, value, True)
            total = gamma * value + (lam * state if skip else 0)
            out = self.norm(norm, total, out, bias, norm_gain)
        return out

    def attention(self, l, c, head, bias=False):
        """head: an index, "skip" or "all"."""
        p, t = self.layer(l), self.trace.layers
        heads = range(self.config.num_heads) if head == "all" else [head]

        def branch(y, bias):
            out = np.zeros((y.shape[0], self.config.d_model))
            for h in heads:
                a = p.attention
                g = h * len(a.w_v) // self.config.num_heads  # of grouped values
                value = y @ a.w_v[g] + (a.b_v[g] if bias else 0)
                out += t.attention[l, h] @ value @ a.w_o[h]
            return out + (p.attention.b_o if bias else 0)

        take = {"skip": "skip", "all": "both"}.get(head, "branch")
        return self.sublayer(
            l,
            "attention",
            self.trace.hidden[l],
            t.attention_branch[l],
            self.config.attention_skip,
            branch,
            c,
            bias,
            take,
            bare=l == 0 and not self.config.first_norm,
        )

    def cross(self, l, c, bias=False, take="skip", head=None):
        """take "skip": a state passes by; "branch": the memory enters through one head."""
        p, t = self.layer(l), self.trace.layers
        heads = range(self.config.num_heads) if head is None else [head]

        def branch(_, bias):
            out, a = 0.0, p.cross
            for h in heads:
                g = h * len(a.w_v) // self.config.num_heads
                value = (0 if bias else self.memory @ a.w_v[g]) + (a.b_v[g] if bias else 0)
                value = np.broadcast_to(value, (*self.memory.shape[:1], a.w_v.shape[-1]))
                out = out + t.cross_attention[l, h] @ value @ a.w_o[h]
            return out + (a.b_o if bias else 0)

        return self.sublayer(
            l,
            "cross",
            t.after_attention[l],
            t.cross_branch[l],
            self.config.cross_skip,
            branch,
            np.zeros(self.trace.hidden.shape[1:]) if c is None else c,
            bias,
            "both" if bias else take,
        )

    def mlp(self, l, c, take, bias=False, start=None):
        p, t = self.layer(l), self.trace.layers
        state = t.after_cross[l] if self.config.cross_attention else t.after_attention[l]
        if self.config.parallel:
            state = self.trace.hidden[l]
        mlp_input = state
        if self.config.norm_placement in ("pre", "sandwich"):
            mlp_input = self.norm(p.mlp_norm, state, state, True, self.gains[l].norm.mlp)
        kind, m = self.config.mlp, p.mlp
        if kind in GATED:
            z = mlp_input @ m.w_gate + m.b_gate
            gate = z * _gate(GATED[kind], z)
        else:
            gate = _gate(kind, mlp_input @ m.w_in + m.b_in)
        if self.config.num_experts:
            gate = gate * mp_network.shares(m, mlp_input, self.config)

        def branch(y, bias):
            z = y @ m.w_in + (m.b_in if bias else 0)
            return (gate * z) @ m.w_out + (m.b_out if bias else 0)

        return self.sublayer(
            l,
            "mlp",
            state,
            t.mlp_branch[l],
            self.config.mlp_skip or self.config.parallel,
            branch,
            c,
            bias,
            take,
            start,
        )

    def final(self, c, bias=False):
        if not self.config.final_norm:
            return c
        return self.norm(self.params.final_norm, self.trace.hidden[-1], c, bias)

    def walk(self, c, first, heads, mlps, entered=False):
        """Carries a state from layer `first` to the output.

        entered: the state begins after the cross-attention of layer `first`.
        """
        for l in range(first, self.config.depth):
            # A parallel MLP does not see what a head writes: its branch is on the skip's path.
            mlp_start = c if heads[l] == "skip" else np.zeros_like(c)
            if not (entered and l == first):
                c = self.attention(l, c, heads[l])
                if self.config.cross_attention:
                    c = self.cross(l, c)
            if self.config.mlp != "none":
                c = self.mlp(l, c, mlps[l], start=mlp_start if self.config.parallel else None)
        return self.final(c)

    def terms(self):
        depth, has_mlp = self.config.depth, self.config.mlp != "none"
        parallel = self.config.parallel
        skips = (self.config.attention_skip or parallel, self.config.mlp_skip or parallel)
        heads = [*range(self.config.num_heads), *(["skip"] * skips[0])]
        mlp_choices = ["branch", *(["skip"] * skips[1])] if has_mlp else [None]
        choices = list(product(product(heads, repeat=depth), product(mlp_choices, repeat=depth)))
        for path, mlps in choices:
            length = sum(h != "skip" for h in path)
            count = sum(m == "branch" for m in mlps)
            yield length, count, False, self.walk(self.trace.hidden[0], 0, path, mlps)
        if not self.config.cross_attention:
            return
        for origin, head in product(range(depth), range(self.config.num_heads)):
            start = self.cross(origin, None, take="branch", head=head)
            num_layers = depth - origin
            for path in product(heads, repeat=num_layers - 1):
                for mlps in product(mlp_choices, repeat=num_layers):
                    length = 1 + sum(h != "skip" for h in path)
                    count = sum(m == "branch" for m in mlps)
                    padded = ([None] * (origin + 1) + list(path), [None] * origin + list(mlps))
                    yield length, count, True, self.walk(start, origin, *padded, entered=True)

    def paths_through(self, layer, head):
        """Yields (path, state) of every path through one head of one layer.

        Each MLP takes both its branch and its skip.
        """
        choices = [*range(self.config.num_heads), *(["skip"] * self.config.attention_skip)]
        for path in product(choices, repeat=self.config.depth):
            if path[layer] == head:
                mlp_choices = ["both"] * self.config.depth
                yield path, self.walk(self.trace.hidden[0], 0, path, mlp_choices)

    def sums(self):
        """Sums states to (by length and MLP count, the part from the memory, the offset)."""
        depth, (n, d) = self.config.depth, self.trace.hidden.shape[1:]
        grid = np.zeros((2, depth + 1, depth + 1, n, d))
        for length, count, from_memory, state in self.terms():
            grid[int(from_memory), length, count] += state
        c = np.zeros((n, d))
        for l in range(depth):
            start = c if self.config.parallel else None
            c = self.attention(l, c, "all", bias=True)
            if self.config.cross_attention:
                c = self.cross(l, c, bias=True)
            if self.config.mlp != "none":
                c = self.mlp(l, c, "both", bias=True, start=start)
        return grid.sum(axis=0), grid[1], self.final(c, bias=True)
