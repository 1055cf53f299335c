"""Layers of two heads above theorem 2.3's bound: plain attention, and `rc.bound_report` of it."""

import jax
import numpy as np
import pytest

import rank_collapse as rc
from tests.support.closeness import assert_close


def norm_1(a):
    return np.abs(a).sum(axis=0).max()


def composite_norm(a):
    """‖a‖_{1,∞}."""
    return np.sqrt(norm_1(a) * np.abs(a).sum(axis=1).max())


def build_layer(num_tokens, width, spread=1e-3):
    """Builds tokens [n, d] and two heads (W_Q, b_Q, W_K [d, 3], W [d, d]) of equal γ* and β.

    The values are in feature 0 of two tokens, where a bias of the queries (through feature 3) puts
    all attention. Head 1 moves every row, by feature 1, and writes one feature; head 2 moves two
    rows, by feature 2, and writes all. No token has feature 4, which enlarges ‖W_QK‖_1.
    """
    small = 1e-3 / num_tokens
    x = np.zeros((num_tokens, width))
    x[:2, 0] = 1, -1
    x[:, 1] = small * np.resize([1, -1], num_tokens)
    x[:2, 2] = small, -small
    x[:2, 3] = small
    x -= x.mean(axis=0)
    queries, keys = np.zeros((2, width, 3)), np.zeros((width, 3))
    queries[0, 1, 0] = queries[1, 2, 0] = np.sqrt(3) * spread / 2 / small
    keys[[0, 3, 4], [0, 1, 2]] = 1
    bias = np.array([0, np.sqrt(3) * 300 / small, 0])
    writes = np.zeros((2, width, width))
    writes[0, 0, 0] = 1
    writes[1, 0] = 1
    gammas, sizes = zip(*(compute_gamma(x, w_q, keys) for w_q in queries), strict=True)
    queries[np.argmax(gammas), 4, 2] = min(sizes) * max(gammas) / min(gammas)
    betas = [norm_1(q @ keys.T) * composite_norm(w) for q, w in zip(queries, writes, strict=True)]
    writes[1] *= betas[0] / betas[1]
    return x, queries, bias, keys, writes


def compute_gamma(x, w_q, w_k):
    """The least γ that the lemma admits, and ‖W_QK‖_1."""
    e = x @ w_q @ (x @ w_k).T / np.sqrt(3)
    spread = e.max(axis=1) - e.min(axis=1)
    assert spread.max() <= 1.256  # the lemma's condition
    size = norm_1(w_q @ w_k.T)
    return np.sqrt(3 * spread.sum() * spread.max()) / (2 * size * composite_norm(x) ** 2), size


@pytest.mark.full
@pytest.mark.parametrize(
    "num_tokens, width, over",
    [(170, 170, 0.977), (180, 180, 1.005), (40, 1024, 1.065), (512, 512, 1.686)],
)
def test_two_heads_of_many_tokens_are_above_the_published_bound(num_tokens, width, over, x64):
    x, queries, bias, keys, writes = build_layer(num_tokens, width)
    output, gammas, betas = 0, [], []
    for w_q, w in zip(queries, writes, strict=True):
        scores = (x @ w_q + bias) @ (x @ keys).T / np.sqrt(3)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        output = output + weights / weights.sum(axis=1, keepdims=True) @ x @ w
        gamma, size = compute_gamma(x, w_q, keys)
        gammas.append(gamma)
        betas.append(size * composite_norm(w))
    for values in (gammas, betas):
        assert_close(values[0], values[1], rtol=1e-12)
    # lower bounds of ‖.‖_1 and ‖.‖_∞ over all common tokens: the minimal residual is no smaller
    median = norm_1(output - np.median(output, axis=0))
    apart = max(np.abs(a - b).sum() for a in output[:4] for b in output[:4]) / 2
    bound = 4 * max(gammas) * max(betas) * 2 / np.sqrt(3) * composite_norm(x) ** 3
    ratio = composite_norm(output - output.mean(axis=0)) / bound
    assert round(ratio, 3) == over and np.sqrt(median * apart) / bound > ratio - 1e-4

    heads = rc.network.AttentionParams(
        w_q=queries,
        w_k=np.stack([keys, keys]),
        w_v=np.eye(width, 1) * np.ones((2, 1, 1)),
        w_o=writes[:, :1],
        b_q=np.stack([bias, bias]),
    )
    params = rc.network.TransformerParams(
        layers=rc.network.BlockParams(attention=jax.tree.map(lambda a: a[None], heads))
    )
    config = rc.san(1, 2, width, d_qk=3, d_v=1)
    report = jax.jit(rc.bound_report)(params, x, config)
    assert_close(10**-report.published_layer.tightness, ratio, rtol=1e-9)
    assert 10 ** -report.layer.tightness[0] < 1  # the bound of sums holds
