"""Statements on trained weights: one row a network, whose draws are texts.

Networks, texts and lengths are those of run_trained. A network is one draw of training: what holds
of it is said of it alone, and the interval is over texts of its kind.
"""

import math

from experiments.verdicts.claims import (
    ABOVE_ZERO,
    BELOW_ZERO,
    MORE_THAN_HALF,
    NO_CASE,
    Statement,
)

RUN = ("run_trained",)
DECLARED = "2026-11-26, 3ed7177"  # before the run on new texts, those that are shown
SINKS_DECLARED = "2026-11-26"  # before the run on new texts
LOSS, RIGHT = 0.05, 0.02  # nats, share of tokens: within which short paths suffice

ON_TRAINED = {
    "trained rate": Statement(
        source="Dong et al. 2021, theorems 2.2 and 2.3",
        text=(
            "The attention of trained networks, without skips and MLPs, loses rank doubly "
            "exponentially: the logarithm of the residual grows by a factor of 3 with each layer."
        ),
        statistic=(
            "change of log‖res‖ in the last layer divided by that in the layer before, of networks "
            "without a causal mask"
        ),
        claimed=(2.5, 3.5),
        experiments=RUN,
        changed=DECLARED,
        confirmed="2026-11-26, new texts: holds",
    ),
    "trained mlp rate": Statement(
        source="Dong et al. 2021, corollary 3.2",
        text="With the MLPs of trained networks, without skips, the rate stays 3.",
        statistic="the same of attention and MLPs without any skip",
        claimed=(2.5, 3.5),
        experiments=RUN,
        changed=DECLARED,
        confirmed="2026-11-26, new texts: holds in part",
    ),
    "trained skips": Statement(
        source="Dong et al. 2021, section 3.1",
        text="With skips more of the residual is left than in attention alone, after training too.",
        statistic="log10 of the residual ratio after the last layer, with skips minus without",
        claimed=ABOVE_ZERO,
        experiments=RUN,
        changed=DECLARED,
        confirmed="2026-11-26, new texts: holds",
    ),
    "trained skips stop": Statement(
        source="Dong et al. 2021, abstract",
        text=(
            "Skips stop the output of trained attention from degenerating: more than a tenth of "
            "the input's residual ratio is left. The threshold of a tenth is ours."
        ),
        statistic=(
            "residual ratio after the last layer divided by the input's, of attention with skips"
        ),
        claimed=MORE_THAN_HALF,
        each=(0.1, math.inf),
        experiments=RUN,
        changed=DECLARED,
        confirmed="2026-11-26, new texts: holds in part",
    ),
    "trained collapse": Statement(
        source="Dong et al. 2021, section 4.1",
        text="Without skips and MLPs trained networks lose over 99 % of the residual ratio.",
        statistic="part of the input's residual ratio that is lost after the last layer",
        claimed=MORE_THAN_HALF,
        each=(0.99, math.inf),
        experiments=RUN,
        changed=DECLARED,
        confirmed="2026-11-26, new texts: holds",
    ),
    "trained chains": Statement(
        source="Dong et al. 2021, section 4.2",
        text="Products of trained attention matrices along a path lose rank with its length.",
        statistic="slope over lengths of log10 of the median residual ratio of P_path",
        claimed=BELOW_ZERO,
        experiments=RUN,
        changed=DECLARED,
        confirmed="2026-11-26, new texts: holds",
    ),
    "trained short at first": Statement(
        source="Dong et al. 2021, section 4.2",
        text=(
            "In trained networks, too, the sums of all paths of a length have their largest "
            "residual below the length that most paths have."
        ),
        statistic="length of the largest residual minus the length of most paths",
        claimed=MORE_THAN_HALF,
        each=BELOW_ZERO,
        experiments=RUN,
        changed=DECLARED,
        confirmed="2026-11-26, new texts: holds",
    ),
    "trained short suffice": Statement(
        source="Dong et al. 2021, section 4.2",
        text=(
            "Paths through at most L/4 heads, attention recomputed, do what the trained network "
            "does: their loss is less than .05 nats above its loss (next tokens), their accuracy "
            "less than .02 below its accuracy (masked tokens). The thresholds are ours."
        ),
        statistic="that difference divided by .05 nats or by .02",
        claimed=(-math.inf, 1.0),
        experiments=RUN,
        changed=DECLARED,
        confirmed="2026-11-26, new texts: holds in part",
    ),
    "trained sinks": Statement(
        source="Gu et al. 2025, sections 3 and 4",
        text="In causal language models more than one head in ten attends to the first token.",
        statistic=(
            "share of heads of which the first token gets more than .3 of the attention, mean over "
            "queries"
        ),
        claimed=MORE_THAN_HALF,
        each=(0.1, math.inf),
        experiments=RUN,
        changed=DECLARED,
        confirmed="2026-11-26, new texts: holds",
    ),
    "trained spikes": Statement(
        source="Sun et al. 2024, section 2",
        text=(
            "The largest entry of a hidden state of a trained causal language model is above 100 "
            "and above 1000 times the median."
        ),
        statistic=(
            "the smaller of max|x|/100 and max|x|/(1000 median|x|), of the state that has most "
            "of it"
        ),
        claimed=MORE_THAN_HALF,
        each=(1.0, math.inf),
        experiments=RUN,
        changed=DECLARED,
        confirmed="2026-11-26, new texts: holds",
    ),
    "trained lemma": Statement(
        source="Dong et al. 2021, appendix",
        text="The lemma holds of trained heads wherever max D_ii ≤ 1.256.",
        statistic=(
            "number of heads that violate it, of the whole network and of its attention alone, by "
            "more than the rounding of float32 weights, 1e-5"
        ),
        claimed=NO_CASE,
        always=True,
        experiments=RUN,
        changed=DECLARED,
        confirmed="2026-11-26, new texts: holds",
    ),
    "trained bounds": Statement(
        source="Dong et al. 2021, theorem 2.2",
        text="With max D_ii ≤ 1.256 the residual of a trained head is at most (4γβ/√k)‖res‖³.",
        statistic=(
            "number of heads whose residual is larger, γ is γ*; of the whole network and of its "
            "attention alone"
        ),
        claimed=NO_CASE,
        always=True,
        experiments=RUN,
        changed=DECLARED,
        confirmed="2026-11-26, new texts: holds",
    ),
}

_SINKS = {
    "sinks mix": Statement(
        source="Barbero et al. 2025 (arXiv 2504.02732), section 3",
        text="Without a sink tokens mix more: where the first key is hidden from later layers, and "
        "the other weights are renormalised, the last tokens are more alike.",
        statistic="change of the mean cosine of two tokens after the last layer, paired by text",
        claimed=ABOVE_ZERO,
        experiments=("run_sinks",),
        changed=SINKS_DECLARED,
    ),
    "sinks drop": Statement(
        source="Barbero et al. 2025 (arXiv 2504.02732), section 3",
        text="It is the added mixing, not the missing sink: where the weight of the first key is "
        "lost instead, the last tokens are no more alike.",
        statistic="change of the mean cosine of two tokens after the last layer, paired by text",
        claimed=BELOW_ZERO,
        experiments=("run_sinks",),
        changed=SINKS_DECLARED,
    ),
    "sinks move": Statement(
        source="Barbero et al. 2025 (arXiv 2504.02732), section 3",
        text="Hidden in all layers the first key changes little, since the second token becomes "
        "the sink. The range of .03 is ours.",
        statistic="change of the mean cosine of two tokens after the last layer, paired by text",
        claimed=(-0.03, 0.03),
        experiments=("run_sinks",),
        changed=SINKS_DECLARED,
    ),
    "sinks control": Statement(
        source="control of run_sinks",
        text="Another key, drawn at random, hidden from the same layers changes little. The range "
        "of .03 is ours.",
        statistic="change of the mean cosine of two tokens after the last layer, paired by text",
        claimed=(-0.03, 0.03),
        experiments=("run_sinks",),
        changed=SINKS_DECLARED,
    ),
}
ON_TRAINED |= _SINKS
