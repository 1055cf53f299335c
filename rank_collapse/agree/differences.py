"""How far two recordings differ in each sublayer, compared with rounding.

A sublayer maps the stream x to a branch b(x). A token of the second run has the input x + e and the
branch b + δ. The incoming error is ‖e‖/‖x‖, and the sublayer adds the error ‖δ‖/‖b‖. Rounding of
relative size u predicts

    added ≈ √((1.5 · in)² + (2u)² + (.4 · u_stream (‖x‖ + ‖y‖)/‖b‖)²),

with the last term where b = y − x is a difference of recorded states y and x, and 3u for such a
full layer. In float32 and float64 the sums of products are rounded, too: there u is multiplied by 1
+ √d/4. A replay (`agree.replay`) has no incoming error. If noise of relative size 1 changes the
branch by g ‖b‖, rounding then adds about .85 u √(g² + 1) in an MLP and .95 u √(g² + 1) in
attention.

The quotient of both sides, `excess`, has a median over tokens of .6 to 1.8 in rounded random
networks with or without skips, norms before or after, spikes, masks, and weights of up to twice the
usual scale (tests/agree/test_comparison.py, docs/agree.md). An error of all tokens in the whole
stream is nearly blind for a sublayer: its branch is a small part of the stream, and one large token
hides all others.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import ml_dtypes
import numpy as np
from jaxtyping import Bool, Float

from rank_collapse.agree.recording import ROUNDING, Recording
from rank_collapse.agree.replay import Pair

Part = Literal["attention", "mlp", "layer"]
SPIKE = 5.0  # times the median norm: tokens that are reported apart
MEDIAN = 2.6  # times what rounding explains: more in the median token is no rounding
_MOST = 64  # tokens of which distinct directions are counted
_SUMMED = 4.0  # times a rounding: the most by which a state differs from the sum of its terms
_LEAST = 0.1  # of the median norm: the least by which an error is divided
# Of the root of gain² + 1: so much rounding explains where the gain was measured. The noise goes in
# before a sublayer; attention rounds its queries, keys and scores, too.
_PROBED = {"attention": 0.95, "mlp": 0.85}
_GAIN, _FLOOR, _STREAM = 1.5, {"attention": 2.0, "mlp": 2.0, "layer": 3.0}, 0.4


class Rounding(NamedTuple):
    """Relative errors of one rounding.

    Attributes:
        products: Relative rounding error of the sublayers' results.
        stream: Relative rounding error of the states.
        name: Name of the dtype in which the sublayers compute.
        both: Whether both runs round so.
    """

    products: float
    stream: float
    name: str
    both: bool = False

    def compute_unit(self, width: int) -> float:
        """Compute the rounding error of a product in a sublayer of a width, whose sums are in
        float32."""
        has_sums = self.products <= ROUNDING["float32"]  # in another order, term by term
        return self.products * (1 + np.sqrt(width) / 4 if has_sums else 1)


class Difference(NamedTuple):
    """The difference between two runs in one sublayer, by example and token [b, n]; NaN where
    masked.

    Attributes:
        layer: Index of the layer, from 0.
        part: "attention", "mlp", or "layer" where no branch was recorded.
        error_in: ‖e‖/‖x‖ of the input.
        added: ‖δ‖/‖b‖ of the branch.
        predicted: The part of `added` that rounding explains.
        spikes: Tokens whose input or branch is at least five times the median.
        scale: c of the best fit δ ≈ c b, over all tokens without spikes.
        coherence: Share of ‖δ‖ that the fit explains, 0 to 1.
        distinct_tokens: Effective number of tokens whose branches differ in direction, from 1.
        first, second: The branches [b, n, d] of both runs; of a sum, the states after it.
        states: The states after the layer of both runs.
    """

    layer: int
    part: Part
    error_in: Float[np.ndarray, "b n"]
    added: Float[np.ndarray, "b n"]
    predicted: Float[np.ndarray, "b n"]
    spikes: Bool[np.ndarray, "b n"]
    scale: float
    coherence: float
    distinct_tokens: float
    first: Float[np.ndarray, "b n d"]
    second: Float[np.ndarray, "b n d"]
    states: tuple[Float[np.ndarray, "b n d"], Float[np.ndarray, "b n d"]]

    @property
    def is_sum(self) -> bool:
        """Returns whether it compares the states after the layer, not what a branch adds."""
        return self.first is self.states[0]

    @property
    def measured(self) -> Bool[np.ndarray, "b n"]:
        """Returns which tokens exist and are not spikes; all tokens that exist, where all others
        are spikes."""
        exists = np.isfinite(self.added)
        return exists & ~self.spikes if (exists & ~self.spikes).any() else exists

    @property
    def excess(self) -> Float[np.ndarray, "b n"]:
        """Returns added/predicted."""
        return self.added / self.predicted

    def quantile(self, name: str, share: float) -> float:
        """Returns a quantile over the measured tokens.

        Args:
            name: "error_in", "added", "predicted" or "excess".
            share: The quantile, from 0 to 1.
        """
        return float(np.quantile(getattr(self, name)[self.measured], share))


def compare_layer(
    pair: Pair, mask: Bool[np.ndarray, "b n"], rounding: Rounding
) -> Iterator[Difference]:
    """Yields the differences of one layer's sublayers in their order.

    Args:
        pair: The layer in both runs, with the same tokens.
        mask: Tokens that exist.
        rounding: Rounding of the coarser run.
    """
    first, second = pair.first, pair.second
    # What each run adds to its stream; with a replay that is the other run's branch in both.
    terms = [(pair.inputs or layer).branches for layer in (first, second)]
    names = [name for name in first.branches if name in second.branches]
    x, y = first.before, second.before
    if "attention_branch" in names:
        yield _compare(pair, "attention", (x, y), _select("attention_branch", pair), mask, rounding)
        x, y = (z + term["attention_branch"] for z, term in zip((x, y), terms, strict=True))
    if len(names) < 2:
        # What the layer adds beside the branch that was recorded.
        ends = np.linalg.norm(x, axis=-1) + np.linalg.norm(first.after, axis=-1)
        start, mixes = (x, y), "attention_branch" not in names
        if "mlp_branch" in names:
            # Their sum is the state before the MLP, unless a norm comes after it.
            x, y = (
                layer.after - term["mlp_branch"]
                for layer, term in zip((first, second), terms, strict=True)
            )
            branches = x - first.before, y - second.before
        else:
            branches = first.after - x, second.after - y
        yield _compare(pair, "layer", start, branches, mask, rounding, mixes=mixes, ends=ends)
    if "mlp_branch" in names:
        yield _compare(pair, "mlp", (x, y), _select("mlp_branch", pair), mask, rounding)


def compare_sums(
    pair: Pair, mask: Bool[np.ndarray, "b n"], rounding: Rounding
) -> Difference | None:
    """Compare the states that both runs make of the stream and the branches: their sum, norms and
    skips.

    Args:
        pair: The layer in both runs, with both branches.
        mask: Tokens that exist.
        rounding: Rounding of the coarser run.

    Returns:
        The difference of the state after the layer, given the differences of its summands; None
        where a branch was not recorded.
    """
    first, second = pair.first, pair.second
    if not {"attention_branch", "mlp_branch"} <= first.branches.keys() & second.branches.keys():
        return None
    x, y = (
        layer.before + sum((pair.inputs or layer).branches.values()) for layer in (first, second)
    )
    ends = 2 * np.linalg.norm(first.after, axis=-1)
    return _compare(
        pair, "layer", (x, y), (first.after, second.after), mask, rounding, mixes=False, ends=ends
    )


def compare_on_remainders(
    pair: Pair, part: Part, mask: Bool[np.ndarray, "b n"], rounding: Rounding
) -> Difference | None:
    """Compare a branch as if the remainder of its layer had come in with its input.

    The remainder is the state after the layer less the state before it and the branches. It is not
    0 where a run scales a skip, or changes the stream between the recorded states.

    Args:
        pair: The layer in both runs.
        part: "attention" or "mlp".
        mask: Tokens that exist.
        rounding: Rounding of the coarser run.

    Returns:
        The difference; None where a branch was not recorded, or unless the remainder is rounding in
        exactly one run, as in a layer without norms after its sums.
    """
    layers = pair.first, pair.second
    if any(len(layer.branches) < 2 for layer in layers):
        return None
    terms = [(pair.inputs or layer).branches for layer in layers]
    limit = _SUMMED * max(rounding.products, rounding.stream)
    inputs, are_sums = [], []
    for layer, term in zip(layers, terms, strict=True):
        remainder = layer.after - layer.before - sum(term.values())
        sizes = [np.linalg.norm(z, axis=-1) for z in (layer.before, *term.values())]
        share = np.linalg.norm(remainder, axis=-1) / np.maximum(sum(sizes), 1e-300)
        are_sums.append(np.quantile(share[mask], 0.95) < limit)
        before = layer.before if part == "attention" else layer.before + term["attention_branch"]
        inputs.append(before + remainder)
    if sum(are_sums) != 1:
        return None
    return _compare(pair, part, inputs, _select(f"{part}_branch", pair), mask, rounding)


def _select(name, pair):
    """Return a branch of both runs."""
    return pair.first.branches[name], pair.second.branches[name]


def _compare(pair, part, inputs, branches, mask, rounding, *, mixes=None, ends=None):
    """Compare one sublayer of both runs: the error that it adds to each token, and the error that
    rounding explains.

    Args:
        pair: Layer of the sublayer, in both runs.
        part: Name of the sublayer.
        inputs, branches: The inputs and branches of both runs [b, n, d].
        mask: Tokens that exist.
        rounding: Rounding of the coarser run.
        mixes: Whether the sublayer mixes tokens; the error of other tokens then comes in, too.
            None: only attention does.
        ends: Norms of the states whose difference is the branch, which bring their own rounding;
            None where the branch itself was recorded.
    """
    (x, y), (a, b) = inputs, branches
    input_norm, branch_norm = (np.linalg.norm(z, axis=-1) for z in (x, a))
    spikes = np.zeros_like(mask)
    for norm in (input_norm, branch_norm):
        positive = mask & (norm > 0)
        if positive.any():
            spikes |= norm > SPIKE * np.median(norm[positive])
    spikes &= mask
    usual = mask & ~spikes  # not all tokens are above five times their median
    input_size = bound_sizes(input_norm, np.linalg.norm(y, axis=-1), usual)
    branch_size = bound_sizes(branch_norm, np.linalg.norm(b, axis=-1), usual, input_size)
    error_in = np.linalg.norm(y - x, axis=-1) / input_size
    added = np.linalg.norm(b - a, axis=-1) / branch_size
    comes_in = error_in
    has_mixing = part == "attention" if mixes is None else mixes
    if has_mixing:
        comes_in = np.maximum(error_in, np.sqrt(np.mean(error_in[usual] ** 2)))
    gain = pair.gains.get(f"{part}_branch")
    relative_gain = None if gain is None else gain / branch_size
    floor = _predict_rounding(part, relative_gain, rounding, x.shape[-1])
    squares = (_GAIN * comes_in) ** 2 + floor**2
    if ends is not None:
        squares = squares + (_STREAM * rounding.stream * ends / branch_size) ** 2
    scale, coherence = _fit_scale(a[usual], b[usual])
    absent = np.where(mask, 0, np.nan)
    return Difference(
        pair.first.index,
        part,
        error_in + absent,
        added + absent,
        np.sqrt(squares) + absent,
        spikes,
        scale,
        coherence,
        count_distinct(a[usual]),
        a,
        b,
        (pair.first.after, pair.second.after),
    )


def _predict_rounding(part, gain, rounding, width):
    """Predict the relative error ‖δ‖/‖b‖ that rounding adds to a sublayer's output b if its input
    is exact.

    Args:
        part: Name of the sublayer: "attention", "mlp" or "layer".
        gain: g [b, n]: noise of relative size 1 in the sublayer's input changes its output by g
            ‖b‖; None where it was not measured.
        rounding: Rounding of the coarser run.
        width: Features of a state.

    Returns:
        An array [b, n]; one number where the gain is None.
    """
    unit = rounding.compute_unit(width)
    if gain is None:
        return _FLOOR[part] * unit
    return _PROBED[part] * np.sqrt(1.0 + rounding.both) * unit * np.hypot(gain, 1)


def bound_sizes(
    norm: Float[np.ndarray, "b n"],
    other: Float[np.ndarray, "b n"],
    usual: Bool[np.ndarray, "b n"],
    size: Float[np.ndarray, "b n"] | float = 1.0,
) -> Float[np.ndarray, "b n"]:
    """Bound norms from below by a tenth of their median, so that errors can be divided by them.

    Args:
        norm: Norms of the first run.
        other: Norms of the second run, whose median is used where most norms of the first run are
            0.
        usual: Tokens that count.
        size: Replaces the median where most norms of both runs are 0.
    """
    bounds = _LEAST * np.median(norm[usual]), np.median(other[usual]), np.median(size)
    return np.maximum(norm, next((bound for bound in bounds if bound > 0), 1.0))


def _fit_scale(a, b):
    """Fit the difference δ = b − a by δ ≈ c a, where each token has the weight 1/‖a‖².

    Args:
        a, b: Outputs [..., d] of the two runs.

    Returns:
        (c, the share of ‖δ‖ that the fit explains); (0, 0) if all of a is 0, or if a equals b.
    """
    norm = np.linalg.norm(a, axis=-1, keepdims=True)
    if not norm.any() or np.array_equal(a, b):
        return 0.0, 0.0
    norm = np.maximum(norm, _LEAST * np.median(norm[norm > 0]))
    a, change = a / norm, (b - a) / norm
    size, total = np.sum(a * a), np.sum(change * change)
    scale = float(np.sum(a * change) / size)
    return scale, float(abs(scale) * np.sqrt(size / total))


def count_distinct(vectors: Float[np.ndarray, "m d"]) -> float:
    """Count the distinct directions of vectors: m²/Σ cos², which is 1 where all are parallel.

    Tokens that point in one direction, as after rank collapse, are not independent: the errors of
    their branches are alike, too.

    Args:
        vectors: At most `_MOST` of them count.
    """
    vectors = vectors[:: -(-len(vectors) // _MOST)]
    norm = np.linalg.norm(vectors, axis=-1)
    unit = vectors[norm > 0] / norm[norm > 0, None]
    return len(unit) ** 2 / float(np.sum((unit @ unit.T) ** 2)) if len(unit) else 1.0


def find_rounding(first: Recording, second: Recording) -> Rounding:
    """Find the dtype to which the coarser of two runs rounds, from its metadata or from the bits of
    its numbers.

    float32 numbers whose last 16 bits are 0 count as bfloat16.

    Args:
        first, second: The recordings; their first layer is read.
    """

    def find_coarsest(dtypes):
        """Returns the dtype of these names that has the largest rounding error."""
        return max(dtypes, key=ROUNDING.__getitem__)

    product_dtypes, state_dtypes = [], []  # one name of a dtype for each recording
    for recording in (first, second):
        layer = next(recording.read_layers())
        state_dtype = find_dtype(layer.after)
        dtypes = [find_dtype(branch) for branch in layer.branches.values()] or [state_dtype]
        declared = recording.metadata.get("dtype")
        if declared in ROUNDING:
            dtypes.append(declared)
        product_dtypes.append(find_coarsest(dtypes))
        state_dtypes.append(state_dtype)
    products, stream = find_coarsest(product_dtypes), find_coarsest(state_dtypes)
    is_same = product_dtypes[0] == product_dtypes[1]
    return Rounding(ROUNDING[products], ROUNDING[stream], products, is_same)


def find_dtype(array: Float[np.ndarray, "..."]) -> str:
    """Find the coarsest dtype that holds all numbers exactly.

    Args:
        array: Numbers in float64.
    """
    for name, dtype in (
        ("bfloat16", ml_dtypes.bfloat16),
        ("float16", np.float16),
        ("float32", np.float32),
    ):
        with np.errstate(over="ignore"):
            if np.array_equal(array.astype(dtype).astype(np.float64), array):
                return name
    return "float64"
