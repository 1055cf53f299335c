"""Self-attention on `balls.Tokens`: the output of one token, and the differences of others from it.

Rows i of the weights P less the row of a token c, P_i − P_c, come from the second differences
s_ij − s_cj − s_ij* + s_cj* of the scores, j* the heaviest key of row c. Such rows sum to 0, so that
the value of j*, whose weight near 1 would cancel, may be taken from all values,
out_i − out_c = Σ_j (P_ij − P_cj) (v_j − v_j*) W_O. Queries are seen from c, keys and values from
j*, each difference to its own digits.
"""

import functools
from typing import Any

import jax
import numpy as np
from flint import arb

from rank_collapse.network import AttentionContext, AttentionParams, TransformerConfig
from rank_collapse.theory import balls
from rank_collapse.theory.ball_functions import tanh_change, tanh_second_difference
from rank_collapse.theory.balls import Row, Split, Tokens, affine, dot, minus, plus, total


class BallAttention:
    """SA(X) of one layer, as it sees the context; parameters and context are arrays of NumPy."""

    def __init__(
        self,
        params: AttentionParams,
        tokens: Tokens,
        config: TransformerConfig,
        context: AttentionContext,
        temperature: Any,
    ):
        self.params, self.config, self.context = params, config, context
        self.first, n = tokens.groups[0][0], len(tokens.steps) + 1
        self.seen_from = functools.cache(tokens.seen_from)
        self.projected = functools.cache(self._projected)
        self.relative = functools.cache(self._relative)
        self.factor = 1 / arb(float(temperature))
        if config.score == "dot" and config.scale_scores:
            self.factor /= arb(params.w_q.shape[-1]).sqrt()
        mask = True if context.mask is None else context.mask
        self.mask = np.broadcast_to(mask, (config.num_heads, n, n))

    def outputs(self, center: int, members: list[int]) -> Split:
        """SA(x_c), and what those of the members differ from it by."""
        heads = [self._mixed(h, center, members) for h in range(self.config.num_heads)]
        w = self.params.w_o
        return affine(balls.joined(heads), w.reshape(-1, w.shape[-1]), self.params.b_o)

    def _projected(self, name, head, k):
        """Queries "q", keys "k" or values "v" of a head, all tokens seen from the token k."""
        w, b, gain = (getattr(self.params, a) for a in (f"w_{name}", f"b_{name}", "q_norm"))
        x, width, eps = self.seen_from(k), w.shape[-1], self.config.norm_eps
        gain = None if name == "v" else getattr(self.params, f"{name}_norm")
        if gain is not None and gain.ndim == 2:  # over all heads together
            flat = w.transpose(1, 0, 2).reshape(w.shape[1], -1)
            out = balls.scaled(gain.ravel(), balls.normalised(affine(x, flat, b.ravel()), eps))
            out = out.columns(head * width, head * width + width)
        else:
            out = affine(x, w[head], b[head])
            if gain is not None:
                out = balls.scaled(gain, balls.normalised(out, eps))
        if name == "v" or self.context.rotary is None:
            return out
        return balls.rotated(out, *self.context.rotary, k)

    def _mixed(self, head, center, members):
        """P X W_V of a head."""
        allowed = self.mask[head]
        row, heaviest, second = self._scores(head, center, members)
        p, more = balls.softmax_differences(row, second, allowed[center], allowed[members])
        values = self.projected("v", head, self.first)
        (mean,) = balls.product([p], values.rest)
        others = self.projected("v", head, heaviest).rest
        return Split(plus(values.first, mean), balls.product(more, others) if members else [])

    def _scores(self, head, center, members) -> tuple[Row, int, list[Row]]:
        """(scores s_cj [m], the heaviest key j*, second differences [members][m])."""
        query = self.projected("q", head, center)
        queries = [query.rest[i] for i in members]
        keys, extra = self.projected("k", head, self.first).tokens(), self.relative(head)
        row = [self._score(head, query.first, key) for key in keys]
        if extra is not None:
            row = plus(row, extra[center])
        row = [self.factor * s for s in row]
        bias = None if self.context.bias is None else balls.exact(self.context.bias[head])
        cap = None if self.context.cap is None else arb(float(self.context.cap))
        whole = row if cap is None else [cap * (s / cap).tanh() for s in row]
        whole = whole if bias is None else plus(whole, bias[center])
        seen = np.flatnonzero(self.mask[head, center]).tolist()
        top = max(seen, key=lambda j: whole[j].mid()) if seen else center

        shifts = self.projected("k", head, top).rest
        across, down, second = self._differences(head, query.first, queries, keys[top], shifts)
        if extra is not None:
            more = [minus(extra[i], extra[center]) for i in members]
            across = plus(across, _less(extra[center], top))
            down = [s + e[top] for s, e in zip(down, more, strict=True)]
            second = [plus(s, _less(e, top)) for s, e in zip(second, more, strict=True)]
        second = [[self.factor * s for s in each] for each in second]
        if cap is not None:
            across, down = ([self.factor * s / cap for s in a] for a in (across, down))
            second = [
                _capped_second(cap, row[top] / cap, a, across, each)
                for a, each in zip(down, second, strict=True)
            ]
        if bias is not None:
            more = [_less(minus(bias[i], bias[center]), top) for i in members]
            second = list(map(plus, second, more))
        return whole, top, second

    def _score(self, head, query, key):
        if self.config.score == "dot":
            return dot(query, key)
        v = balls.exact(self.params.v_score[head])
        return total(w * (a + b).tanh() for w, a, b in zip(v, query, key, strict=True))

    def _differences(self, head, query, queries, key, shifts):
        """Of the scores: along row c from key j* on [m], down the column of j* from row c on
        [members], and of both [members][m]; `queries` and `shifts` are less `query` and `key`."""
        if self.config.score == "dot":
            across, down = [dot(query, c) for c in shifts], [dot(a, key) for a in queries]
            return across, down, balls.times_columns(queries, shifts) if queries else []
        v, z = balls.exact(self.params.v_score[head]), plus(query, key)

        def change(u):
            return total(w * tanh_change(a, b) for w, a, b in zip(v, z, u, strict=True))

        def both(a, c):
            terms = zip(v, z, a, c, strict=True)
            return total(w * tanh_second_difference(*own) for w, *own in terms)

        second = [[both(a, c) for c in shifts] for a in queries]
        return list(map(change, shifts)), list(map(change, queries)), second

    def _relative(self, head):
        """Position and segment terms of the scores [n][n], see `projections.relative_scores`."""
        p, context = self.params.relative, self.context
        if p is None or context.relative is None:
            return None
        p = jax.tree.map(lambda a: a[head], p.replace(segment=p.segment.swapaxes(0, 1)))
        content = affine(self.seen_from(self.first), self.params.w_q[head]).tokens()
        b_r, b_s, kinds, n = *map(balls.exact, (p.b_r, p.b_s, p.segment)), len(content)
        keys = balls.product(balls.exact(context.relative), balls.matrix(p.w_r))
        places = balls.times_columns([plus(q, b_r) for q in content], keys)
        out = [[places[i][n - 1 - (i - j)] for j in range(n)] for i in range(n)]
        if context.segments is None:
            return out
        differ = context.segments[:, None] != context.segments[None, :]
        by_kind = balls.times_columns([plus(q, b_s) for q in content], kinds)
        return [plus(out[i], [by_kind[i][int(k)] for k in differ[i]]) for i in range(n)]


def _less(row, top):
    """A row less its entry j*."""
    return [v - row[top] for v in row]


def _capped_second(cap, z, a, across, second):
    """Second differences of c tanh(s/c), from those of s/c at z: a down, `across`, and of both."""
    return [
        cap * (tanh_second_difference(z, a, b) + tanh_change(z + a + b, t / cap))
        for b, t in zip(across, second, strict=True)
    ]
