"""Two heads for which the published bound of a layer of several heads is below the residual.

‖.‖_{1,∞} has no triangle inequality. One head moves every token a little and writes one feature,
which makes columns large; the other moves two tokens and writes all features, which makes rows
large. With a_h = ΣD_h ‖W_h‖_1 and b_h = max D_h ‖W_h‖_∞ the lemma gives 2√(Σ_h a_h Σ_h b_h)‖R‖,
the published form 2H max_h √(a_h b_h) ‖R‖, which for n tokens of width d is smaller by
½(q + 1/q), q = (nd/2)^{1/4}. The lemma itself loses √32 here, for scores that hardly move: the
published form fails where q + 1/q > 2√32, from nd = 31752 on.

Axis letters: n tokens, d width.
"""

import jax
import jax.numpy as jnp
import numpy as np

import rank_collapse as rc
from rank_collapse.measures.norms import composite_norm, norm_1
from rank_collapse.runs.seeds import QUICK

SPREAD = 0.1  # max D_ii of both heads; the lemma's condition is 1.2564
SIZES = (32, 64, 128, 178, 180, 256, 512)
_SMALL, _SHARP = 1e-4, 40.0  # of what only asks; weights on tokens without attention: e^-40


def two_heads(
    num_tokens: int, width: int
) -> tuple[rc.TransformerParams, np.ndarray, rc.TransformerConfig]:
    """(parameters, tokens [n, d], config) of one layer of two heads.

    The features of a token are what it holds (+1 and −1 in tokens 0 and 1), what it asks of each
    head (±ε: all tokens of the first, tokens 2 and 3 of the second), whether it gets attention
    (tokens 0 and 1), and that it asks for such tokens (all alike: the mean token).

    Args:
        num_tokens: n, even and at least 4.
        width: d, at least 5.

    Raises:
        ValueError: Fewer, or an odd number of tokens.
    """
    if num_tokens < 4 or num_tokens % 2 or width < 5:
        raise ValueError(
            f"num_tokens={num_tokens}, width={width}: the construction takes an even number of "
            "tokens, 4 or more, and a width of 5 or more"
        )
    held, asked, looked_at, common = 0, (1, 2), 3, 4
    x = np.zeros((num_tokens, width))
    x[:2, held] = 1, -1
    x[:, asked[0]] = _SMALL * np.where(np.arange(num_tokens) % 2, -1, 1)
    x[2:4, asked[1]] = _SMALL, -_SMALL
    x[:2, looked_at] = _SMALL
    x[:, looked_at] -= x[:, looked_at].mean()
    x[:, common] = 1
    w_q, w_k = np.zeros((2, 2, width, 2))
    root = np.sqrt(2)  # of d_qk, which scores are divided by
    for head, feature in enumerate(asked):
        w_q[head, feature, 0], w_k[head, held, 0] = root * SPREAD / 2 / _SMALL, 1
        w_q[head, common, 1], w_k[head, looked_at, 1] = root * _SHARP / _SMALL, 1
    w_v, w_o = np.zeros((2, width, 1)), np.zeros((2, 1, width))
    w_v[:, held, 0] = 1
    w_o[0, 0, 0] = np.sqrt(2 * width / num_tokens)  # both heads' bounds are then equal
    w_o[1, 0, :] = 1
    weights = {"w_q": w_q, "w_k": w_k, "w_v": w_v, "w_o": w_o}
    attention = rc.AttentionParams(**weights)
    params = rc.TransformerParams(layers=rc.stack_layers([rc.BlockParams(attention=attention)]))
    return params, x, rc.san(1, 2, width, d_qk=2, d_v=1)


def measure(sizes: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Residuals over bounds at n = d of each size, [s], in float64.

    One compiled program: smaller ones are padded with tokens that do not exist and zero features,
    which change no norm.

    Returns:
        "mean_over_published": The residual around the mean token over the published bound;
        "least_over_published": a lower bound of the minimal residual over it, whose ‖.‖_1 is that
        around the columnwise median and whose ‖.‖_∞ is at least half the largest ℓ1 distance of two
        tokens; "mean_over_bound": the former over the bound that holds; "admissible".
    """
    largest = max(sizes)

    def padded(a, size):
        return np.pad(a, [(0, largest - size if n == size else 0) for n in a.shape])

    def single(example):
        params, x, mask = example
        report = rc.bound_report(params, x, config, mask=mask)
        out = rc.apply(params, x, config, mask=mask).output
        out = jnp.where(mask[:, None], out, out[:1])  # no new distance
        apart = jax.lax.map(lambda row: jnp.max(jnp.sum(jnp.abs(out - row[None, :]), axis=1)), out)
        columns = norm_1(rc.residual(out, center="median", mask=mask))
        least = jnp.sqrt(columns * jnp.max(apart) / 2)
        published = 10 ** -report.published_layer.tightness[0]
        return {
            "mean_over_published": published,
            "least_over_published": published * least / composite_norm(rc.residual(out, mask=mask)),
            "mean_over_bound": 10 ** -report.layer.tightness[0],
            "admissible": jnp.all(report.admissible),
        }

    with jax.enable_x64(True):
        drawn = []
        for size in sizes:
            params, x, config = two_heads(size, size)
            params = jax.tree.map(lambda a, s=size: padded(np.asarray(a), s), params)
            drawn.append((params, padded(x, size), np.arange(largest) < size))
        config = config.replace(d_model=largest)
        together = jax.tree.map(lambda *a: jnp.stack(a), *drawn)
        batch = jax.jit(lambda all: jax.lax.map(single, all), compiler_options=QUICK)
        return jax.device_get(batch(together))


def predicted(size: np.ndarray) -> np.ndarray:
    """½(q + 1/q)/√32 with q = (n d/2)^{1/4}, n = d = `size`: residual over published bound."""
    q = (np.asarray(size, float) ** 2 / 2) ** 0.25
    return (q + 1 / q) / (2 * np.sqrt(32))
