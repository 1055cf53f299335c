"""The usual mistakes, each tested on the states of the sublayer where two runs part.

Each `_test_…` yields the text of a mistake if it finds it, and nothing otherwise. The tests take
some of these arguments:

    difference: The outputs [b, n, d] of the sublayer in both runs, and their errors (`Difference`).
    mask: Bool [b, n], the tokens that exist.
    differs: Bool [b, n], the tokens whose outputs differ by more than rounding explains.
    excess: Float [b, n], the errors over those that rounding explains.
"""

from collections.abc import Callable, Iterator

import numpy as np
from jaxtyping import Bool, Float

from rank_collapse.agree.differences import MEDIAN, Difference

_CLEAR = 0.9  # share of a difference that an explanation accounts for
_COHERENT = 0.5  # the same of one factor, if what is left is rounding
_JUMP = 5.0  # from the tokens that agree to those that do not, in times what rounding explains
_GROWTH = 2.0  # from the first token to the last that agrees, both within what rounding explains
_UNLIKE = 0.5  # of the branch's own spread over tokens: the most that is left of a shared change


def name_kind(difference: Difference, mask: Bool[np.ndarray, "b n"]) -> str | None:
    """Name the mistake that explains the difference of a sublayer, or None.

    Args:
        difference: The difference at the first faulty sublayer.
        mask: Tokens that exist.
    """
    tests: tuple[Callable[..., Iterator[str]], ...] = (
        _test_absent,
        _test_dropout,
        _test_norm,
        _test_scale,
        _test_features,
        _test_bias,
        _test_tokens,
    )
    for test in tests:
        for kind in test(difference, mask):
            return kind
    return None


def name_embedding(first: Float[np.ndarray, "b n d"], second: Float[np.ndarray, "b n d"]) -> str:
    """Name how two embeddings differ.

    Args:
        first, second: States before the first layer, with 0 where no token exists.
    """
    scale = float(np.sum(first * second) / max(np.sum(first * first), 1e-300))
    share = 1 - _relative(second - scale * first, second - first)
    if share > _CLEAR and scale > 0:
        return f"the embeddings are multiplied by {scale:.4g}{_as_root(scale, first.shape[-1])}"
    constant = (second - first).reshape(-1, first.shape[-1]).mean(axis=0)
    if 1 - _relative(second - first - constant, second - first) > _CLEAR:
        return "one vector is added to all embeddings"
    by_position = (second - first).std(axis=0).max() if len(first) > 1 else np.inf
    if by_position < 1e-3 * np.abs(second - first).max():
        return "a vector for each position is added: other positions"
    return "the embeddings differ"


def _as_root(scale, width):
    """Describe a scale that is the root of the width or its inverse, to 1 %; "" for other scales.

    Args:
        scale: The scale.
        width: Features of a state.
    """
    root = np.sqrt(width)
    if abs(scale / root - 1) < 0.01:
        return f", the root of the width {width}"
    return f", 1 over the root of the width {width}" if abs(scale * root - 1) < 0.01 else ""


def _relative(error, size):
    """Return ‖error‖/‖size‖ of two arrays."""
    return float(np.linalg.norm(error) / max(np.linalg.norm(size), 1e-300))


def _test_absent(difference, mask):
    """Test whether one run's output is 0, or below a thousandth of the other's: it has no such
    sublayer."""
    for run, other, name in (
        (difference.first, difference.second, "first"),
        (difference.second, difference.first, "second"),
    ):
        if np.linalg.norm(run) < 1e-3 * np.linalg.norm(other):
            yield f"the {name} run adds nothing here: the sublayer is absent"


def _test_dropout(difference, mask):
    """Test whether one run has zeros where the other has none, with all other entries larger by one
    factor."""
    for run, other, name in (
        (difference.first, difference.second, "first"),
        (difference.second, difference.first, "second"),
    ):
        usual = difference.measured
        zeros = (run[usual] == 0) & (other[usual] != 0)
        share = zeros.mean()
        if not 0.005 < share < 0.95:
            continue
        kept = ~zeros
        ratio = np.median(
            run[usual][kept] / np.where(other[usual][kept] == 0, np.inf, other[usual][kept])
        )
        kept_error = _relative((1 - share) * run[usual] - other[usual] * kept, other[usual])
        is_explained = kept_error < 0.5 * _relative(run[usual] - other[usual], other[usual])
        if abs(ratio * (1 - share) - 1) < 0.1 and is_explained:
            yield f"dropout is on in the {name} run: {share:.0%} of the numbers are 0"


def _test_scale(difference, mask):
    """Test whether the second run's output is the first one's times one number, 1 + c.

    c (`scale`) is the best fit of the difference δ ≈ c · output. It explains the difference if the
    remainder is no larger than rounding, or if, in a whole layer, it is nearly all of δ
    (`coherence`).
    """
    # What is left is rounding; a branch unlike the other has the factor 0, which explains .71 of δ.
    left = difference.second - (1 + difference.scale) * difference.first
    size = np.linalg.norm(difference.second - difference.first, axis=-1)
    share = np.linalg.norm(left, axis=-1) / np.where(size > 0, size, 1)
    is_rounding = np.median((share * difference.excess)[difference.measured]) < MEDIAN
    if is_rounding and difference.coherence > _COHERENT:
        factor = 1 + difference.scale
        if factor < 0:
            yield f"the output is multiplied by {factor:.4g}: a sign"
        else:
            width = difference.first.shape[-1]
            text = f"{factor:.4g}"
            if text == "1":  # four digits do not show the factor
                text = f"1 {'-' if difference.scale < 0 else '+'} {abs(difference.scale):.1e}"
            yield f"the output is multiplied by {text}{_as_root(factor, width)}"
    elif difference.part == "layer" and difference.coherence > _CLEAR:
        source = ": a factor of a skip" if difference.is_sum else ""
        yield f"the output is multiplied by about {1 + difference.scale:.2g}{source}"


def _test_norm(difference, mask):
    """Test whether one run's states are the other's after a norm with a gain.

    Only whole layers are tested, by the states after them.
    """
    if difference.part != "layer":
        return
    first, second = (run[difference.measured] for run in difference.states)
    for before, after, name in ((first, second, "second"), (second, first, "first")):
        for centered in (False, True):
            states = before - before.mean(axis=-1, keepdims=True) if centered else before
            unit = states / np.maximum(np.sqrt((states**2).mean(axis=-1, keepdims=True)), 1e-300)
            gain = (unit * after).sum(axis=0) / np.maximum((unit * unit).sum(axis=0), 1e-300)
            spread = np.std(np.linalg.norm(before, axis=-1)) / np.mean(
                np.linalg.norm(before, axis=-1)
            )
            if _relative(after - gain * unit, after) < 0.05 < spread:
                yield f"the state of the {name} run is taken after a norm, the other's before it"


def _test_features(difference, mask):
    """Test whether each feature was multiplied by a factor of its own, the same for all tokens.

    Fewer than four tokens do not show it.
    """
    first = difference.first[difference.measured]
    second = difference.second[difference.measured]
    if len(first) < 4:
        return
    gain = (first * second).sum(axis=0) / np.maximum((first * first).sum(axis=0), 1e-300)
    left = _relative(second - gain * first, second - first)
    if left < min(1 - _CLEAR, _UNLIKE * _measure_spread(first)):
        yield "each feature has its own factor: the weight of a norm or of a scale"


def _test_bias(difference, mask):
    """Test whether one vector is added to all tokens: the change varies far less over tokens than
    the output.

    Fewer than four tokens do not show it.
    """
    change = (difference.second - difference.first)[difference.measured]
    if len(change) < 4:
        return
    left = _measure_spread(change)
    if left < min(1.2 - _CLEAR, _UNLIKE * _measure_spread(difference.first[difference.measured])):
        # Of states alone the MLP may hide that the attention is alike in all tokens.
        has_branch = difference.part != "layer" or difference.is_sum
        other = "" if has_branch else ", or a change of an attention that is alike in all tokens"
        yield f"one vector is added to all tokens: a bias{other}"


def _measure_spread(vectors):
    """Return the share of vectors [m, d] that is not their mean.

    Where it is small, as rank collapse makes it, any mistake changes all tokens alike.
    """
    return _relative(vectors - vectors.mean(axis=0), vectors)


def _test_tokens(difference, mask):
    """Test which tokens differ by more than rounding, and name the mistake that makes these tokens
    differ.

    Several mistakes may fit; the first one is reported.
    """
    excess = np.where(mask, difference.excess, np.nan)
    differs = excess > MEDIAN
    if difference.part == "mlp":
        yield from _test_experts(excess[differs], differs[mask])
    elif differs.any() and (differs | ~mask).all():
        yield from _test_all_tokens(difference)
    elif differs.any():
        yield from _test_padding(mask, differs)
        yield from _test_later_tokens(mask, differs, excess)
        yield from _test_all_but_last(mask, differs)
        yield from _test_all_but_first(difference, mask, differs, excess)


def _test_experts(differing, differs):
    """Test whether few tokens of an MLP differ, and by much.

    Args:
        differing: Excess of the tokens that differ.
        differs: Which of the tokens that exist differ.
    """
    if 0 < differs.mean() < 0.2 and np.median(differing) > _JUMP * MEDIAN:
        yield (
            "few tokens differ, by much: if the layer has experts, others were chosen, as "
            "rounding does where two are nearly equal"
        )


def _test_all_tokens(difference):
    """Name what makes all tokens of an attention differ, even the first, which attends to itself
    alone under a causal mask."""
    if difference.part == "attention":
        yield (
            "all tokens differ, the first too: where it attends to itself alone, more differs "
            "than positions or masks: what the attention reads (a norm before it), values or "
            "the output projection (the order of the key-value heads, a transposed matrix, an "
            "absent bias, a head); in bidirectional attention also positions or masks"
        )


def _test_padding(mask, differs):
    """Test whether only examples differ that are shorter than the longest."""
    lengths = mask.sum(axis=1)
    longest = lengths == lengths.max()
    if not longest.all() and not differs[longest].any():
        yield "only examples with padding differ: attention to padding"


def _test_later_tokens(mask, differs, excess):
    """Test whether most tokens differ from one position on, which is not the first or second."""
    positions = np.broadcast_to(np.arange(mask.shape[1]), mask.shape)
    start = int(positions[differs].min())
    if start < 2 or np.mean(differs[mask & (positions >= start)]) <= 0.7:
        return
    by_position = np.nanmedian(excess, axis=0)
    before = by_position[:start]
    jump = _JUMP if start > 2 else 4 * _JUMP  # two tokens that agree show no trend
    if by_position[start] > jump * max(before.max(), 1.0):
        yield f"only tokens from position {start} on differ: a window, or another mask"
    elif before[-1] > _GROWTH * max(before[0], 0.7):
        yield (
            "the difference grows with the position: positions differ (the theta of rotary "
            "positions, their scale, or slopes)"
        )
    else:
        yield (
            f"tokens from position {start} on differ most: positions differ (the theta of "
            "rotary positions, their scale, or slopes), a window or another mask"
        )


def _test_all_but_last(mask, differs):
    """Test whether all tokens differ but the last, which sees all tokens even under a causal
    mask."""
    last = np.arange(mask.shape[1]) == mask.sum(axis=1)[:, None] - 1
    if not differs[last].any() and differs[mask & ~last].mean() > 0.7:
        yield "all tokens but the last differ: a causal mask in one run alone"


def _test_all_but_first(difference, mask, differs, excess):
    """Test whether the first token agrees, which attends to itself alone under a causal mask."""
    positions = np.broadcast_to(np.arange(mask.shape[1]), mask.shape)
    first, later = mask & (positions == 0), mask & (positions > 0)
    # In a whole layer the MLP may differ, and a spike hides what is added to it.
    is_layer = difference.part == "layer"
    compared = first & difference.measured if is_layer else first
    if not compared.any() or differs[first].any():
        return
    jump = _JUMP if is_layer else 2.0
    is_clear = np.median(excess[differs]) > jump * max(excess[compared].max(), 0.5)
    if differs[later].mean() > 0.3 and is_clear:
        yield (
            "the first token, which attends to itself alone, agrees: queries and keys differ "
            "(positions, the rotary form or its theta, the scale of scores, a norm of queries, "
            "another mask), not the values"
        )
