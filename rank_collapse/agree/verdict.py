"""Whether two recordings agree to rounding, and the first sublayer that adds more.

A sublayer is at fault if one of these holds (`excess` is its error divided by the error that
rounding explains):

- its median excess is above `MEDIANS`, its 95 % quantile above `MOST`, or its 98 % quantile above
  `WORST`;
- its median excess is far above that of the same part in the other layers;
- what it adds is its own output times one number: rounding does not do that.

The median of one or two tokens varies more than that of many, and has a higher limit. Where few
tokens are distinct, as in a text of one token or where rank collapse made all tokens alike, the
errors that come in are alike, too, and chance makes them parallel to the output: a factor then has
to be larger.

The thresholds were chosen on simulated pairs of seeds below 400,000 and from 900,000 to 999,999 and
on SmolLM2, and their error rates measured on the seeds from 1,000,000 on (docs/agree.md).
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from rank_collapse.agree.differences import MEDIAN, Difference, Rounding

# Of the median over tokens: more is no rounding. A whole layer averages what its parts do.
MEDIANS = {"attention": MEDIAN, "mlp": MEDIAN, "layer": 2.0}
MOST, WORST = 6.0, 12.0
# Of one token: times the limit of the median, and the least factor in times the prediction.
_ALONE, _FACTOR_ALONE = 1.6, 2.5
FEW = 0.02  # of the tokens: those near to becoming a spike amplify rounding a hundredfold
JUDGED = 0.3  # the largest median error that comes in
_OUTLIER, _LEAST_SPREAD = 5.0, 0.11  # standard deviations; of the logarithm of the excess
_LEAST_UNLIKE = 1.25  # the excess of a first layer, whose input has no error, is 1 by rounding
_COHERENCE, _CLEAR_COHERENCE = 0.7, 0.5  # of all factors; of one unlike those of other layers
_PARALLEL = 1.0  # times 1/√(distinct tokens): chance does not make δ as parallel
_LEAST_SCALE = 0.5  # of what rounding explains


class Row(NamedTuple):
    """One sublayer of the table, over tokens that exist and are not spikes.

    Attributes:
        layer, part: Index of the layer; "attention", "mlp" or "layer".
        error_in, added, predicted, excess: Medians over tokens, see `Difference`.
        added_most, excess_most: 95 % quantiles.
        excess_few: Quantile above which only the share `FEW` of the tokens is.
        excess_worst, worst_token: The largest excess; example and position of its token.
        scale, coherence, distinct_tokens: See `Difference`.
        tokens, width: Number of tokens that count; features of a state.
        spikes, spikes_added: Number of spikes, and the largest error that one of them adds.
        judged: Whether the input is close enough to the other run's that the sublayer's own error
            shows.
    """

    layer: int
    part: str
    error_in: float
    added: float
    added_most: float
    predicted: float
    excess: float
    excess_most: float
    excess_few: float
    excess_worst: float
    worst_token: tuple[int, int]
    scale: float
    coherence: float
    tokens: int
    distinct_tokens: float
    width: int
    spikes: int
    spikes_added: float
    judged: bool


class Fault(NamedTuple):
    """A sublayer that adds more than rounding explains.

    Attributes:
        index: Index of the sublayer's row.
        reason: Description of its error.
    """

    index: int
    reason: Literal["all tokens", "some tokens", "unlike other layers", "one factor"]


def summarize(difference: Difference) -> Row:
    """Summarize the difference of a sublayer over tokens.

    Args:
        difference: The difference at one sublayer.
    """
    excess = np.where(difference.measured, difference.excess, -np.inf)
    worst = np.unravel_index(int(np.argmax(excess)), excess.shape)
    spikes = difference.added[difference.spikes]
    return Row(
        difference.layer,
        difference.part,
        difference.quantile("error_in", 0.5),
        difference.quantile("added", 0.5),
        difference.quantile("added", 0.95),
        difference.quantile("predicted", 0.5),
        difference.quantile("excess", 0.5),
        difference.quantile("excess", 0.95),
        float(np.quantile(excess[difference.measured], 1 - FEW, method="higher")),
        float(excess[worst]),
        (int(worst[0]), int(worst[1])),
        difference.scale,
        difference.coherence,
        int(difference.measured.sum()),
        difference.distinct_tokens,
        difference.first.shape[-1],
        int(difference.spikes.sum()),
        float(spikes.max()) if spikes.size else float("nan"),
        difference.quantile("error_in", 0.5) < JUDGED,
    )


def find_faults(rows: Sequence[Row], rounding: Rounding) -> list[Fault]:
    """Find the sublayers that add more error than rounding explains.

    The excess of a token is its error divided by the error that rounding explains. A sublayer is at
    fault if the median excess over tokens is too large (all tokens), if a high quantile is (some
    tokens), if the median is far above that of the same sublayer in the other layers, or if the
    output is that of the other run times one number. Limits are higher where few tokens count.
    Sublayers whose inputs already differ too much are not judged.

    Args:
        rows: Errors of all sublayers in order, summarized over tokens.
        rounding: Rounding of the coarser run.

    Returns:
        Faults in order: the index of the row, and the first of these reasons that holds.
    """
    faults = []
    by_part: dict[str, list[Row]] = {}
    for row in rows:
        if row.judged:
            by_part.setdefault(row.part, []).append(row)
    usual = {part: _usual_excess(judged) for part, judged in by_part.items()}
    scale_limit = {part: _limit_scale(judged) for part, judged in by_part.items()}
    for index, row in enumerate(rows):
        if not row.judged:
            continue
        center, spread = usual[row.part]
        few = _limit_few(row)
        deviation = (np.log(max(row.excess, 1e-12)) - center) / spread
        is_outlier = deviation > _OUTLIER * few
        reasons = {
            "all tokens": row.excess > MEDIANS[row.part] * few,
            "some tokens": row.excess_most > MOST or row.excess_few > WORST,
            "unlike other layers": is_outlier and row.excess > _LEAST_UNLIKE,
            "one factor": _is_factor(row, rounding, scale_limit[row.part]),
        }
        why = next((name for name, holds in reasons.items() if holds), None)
        if why is not None:
            faults.append(Fault(index, why))
    return faults


def _is_factor(row, rounding, scale_limit):
    """Return whether a sublayer's output b is the other run's times one number: δ ≈ c b.

    Args:
        row: Errors of the sublayer: its `scale` is c, and `coherence` the share of ‖δ‖ that the fit
            explains.
        rounding: The expected rounding.
        scale_limit: |c| from which on it is unlike that of other layers, so that a lower coherence
            is enough.
    """
    chance = _PARALLEL / np.sqrt(row.distinct_tokens)
    least = max(_CLEAR_COHERENCE, min(_COHERENCE, chance))
    if abs(row.scale) >= scale_limit:
        least = _CLEAR_COHERENCE
    size = max(_LEAST_SCALE, _FACTOR_ALONE / row.distinct_tokens**2) * row.predicted
    units = 2 * _limit_few(row) * rounding.compute_unit(row.width)
    return row.coherence > least and abs(row.scale) > max(units, size)


def _limit_few(row):
    """Return by what factor limits are higher for few tokens, whose median varies more; 1 for
    many."""
    return max(1.0, _ALONE / np.sqrt(row.tokens))


def _limit_scale(rows):
    """Return from which size on the fitted number c of δ ≈ c b is unlike that of the other layers.

    Args:
        rows: Errors of the same sublayer in all layers.

    Returns:
        About eight standard deviations, estimated by the median of |c|; infinity for fewer than
        four layers.
    """
    scales = np.abs([row.scale for row in rows])
    return np.inf if len(rows) < 4 else 8 * 1.4826 * np.median(scales) * (1 + 4 / len(rows))


def _usual_excess(rows):
    """Return the median and the spread over layers of log(excess), the error over what rounding
    explains.

    Args:
        rows: Errors of the same sublayer in all layers, each a median over tokens.

    Returns:
        (median, standard deviation, estimated by the median deviation). For fewer than four layers
        the spread is infinite; for few it is enlarged, because the estimate is rough.
    """
    logarithms = np.log([max(row.excess, 1e-12) for row in rows])
    center = np.median(logarithms)
    spread = 1.4826 * np.median(np.abs(logarithms - center))
    if len(rows) < 4:
        return center, np.inf
    return center, max(spread, _LEAST_SPREAD) * (1 + 4 / len(rows))  # few layers: a rough spread
