"""The statements of papers that are tested here, and what was found that no paper states.

Each has one statistic and the range in which it holds; an experiment's `claims` gives its rows, one
a setting. docs/statements.md is written from this table, with the answers, by `python -m
experiments.reproduce --markdown`. A statement whose statistic or range is changed gets the date and
the commit of that change; until it has been run on seeds that were never used, it is not confirmed.
"""

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rank_collapse.report.claims import (
    ABOVE_ZERO,
    BELOW_ZERO,
    ERROR,
    FINDING,
    MORE_THAN_HALF,
    NO_CASE,
    Answer,
    Row,
    Statement,
    of_mean,
    of_share_within,
)
from rank_collapse.report.wording import holds_text

PAGE = Path(__file__).parents[2] / "docs" / "statements.md"
NOT_RUN = "not run."

STATEMENTS = {
    "lemma": Statement(
        source="Dong et al. 2021, appendix",
        text="(I − D)P̃ ≤ P ≤ (I + 2D)P̃ entry by entry wherever max D_ii ≤ 1.256.",
        statistic="heads against it, of those of random networks where max D_ii ≤ 1.256",
        claimed=NO_CASE,
        fails="one case against it",
        always=True,
        experiments=("check_bounds",),
        before="supported 1.",
        changed="2026-11-23, 2e73d7b",
        confirmed="2026-11-24, seed 1: holds",
    ),
    "bound": Statement(
        source="Dong et al. 2021, theorem 2.2",
        text="With max D_ii ≤ 1.256 the residual of one head is at most (4γβ/√k)‖res‖³.",
        statistic="heads above it, γ the least that the lemma admits",
        claimed=NO_CASE,
        fails="one case against it",
        always=True,
        experiments=("check_bounds",),
        before="supported 1.",
        changed="2026-11-23, 2e73d7b",
        confirmed="2026-11-24, seed 1: holds",
    ),
    "heads bound": Statement(
        source="Dong et al. 2021, theorem 2.3",
        text=(
            "With max D_ii ≤ 1.256 the residual of H heads is at most (4γβH/√k)‖res‖³, γ and β the "
            "largest over heads, and of L layers at most its iterate."
        ),
        statistic=(
            "layers and networks of random weights above it, with max γ* max β over heads, of a "
            "network over layers too; γ* of a head is the least γ that the lemma admits"
        ),
        claimed=NO_CASE,
        fails="one case against it",
        always=True,
        experiments=("check_bounds", "run_collapse"),
        before=(
            "supported 3. Until 2026-11-24 layers were compared with max γ*β over heads, which is "
            "not the theorem's bound, and a construction of two heads above that decided it: does "
            "not hold. Constructions are no draws; that of check_bounds stands among its numbers."
        ),
        changed="2026-11-24, ab4f29b",
        confirmed="2026-11-24, seed 1: holds",
    ),
    "mlp bound": Statement(
        source="Dong et al. 2021, corollary 3.2",
        text=(
            "With max D_ii ≤ 1.256 and MLPs of Lipschitz constant λ the residual of a layer of H "
            "heads is at most (4γβHλ/√k)‖res‖³."
        ),
        statistic=(
            "layers of random weights above it, with max γ* max β over heads; γ* of a head is the "
            "least γ that the lemma admits"
        ),
        claimed=NO_CASE,
        fails="one case against it",
        always=True,
        experiments=("run_collapse",),
        before=(
            "supported 1. Until 2026-11-24 with max γ*β over heads, which is not the corollary's "
            "bound."
        ),
        changed="2026-11-24, ab4f29b",
        confirmed="2026-11-24, seed 1: holds",
    ),
    "rate": Statement(
        source="Dong et al. 2021, theorems 2.2 and 2.3",
        text=(
            "Pure attention loses rank doubly exponentially: the logarithm of the residual grows "
            "by a factor of 3 with each layer."
        ),
        statistic=(
            "local rate log‖res_L‖/log‖res_{L−1}‖ at the last layer (fed with its own output: the "
            "order p of d' ~ d^p, of the seeds that fell)"
        ),
        claimed=(2.5, 3.5),
        fails="a rate of 1, exponential, or of 2, quadratic",
        experiments=("run_collapse", "run_circle"),
        before=(
            "supported 7. Three of the seven, of networks with MLPs, are rows of corollary 3.2."
        ),
        changed="2026-11-23, 6bc83c7",
        confirmed="2026-11-24, seed 1: holds",
    ),
    "mlp rate": Statement(
        source="Dong et al. 2021, corollary 3.2",
        text="MLPs leave the collapse doubly exponential, of rate 3.",
        statistic="as above, with MLPs",
        claimed=(2.5, 3.5),
        fails="a rate of 1 or 2",
        experiments=("run_collapse", "run_circle"),
        before="(with the rate of pure attention).",
        changed="2026-11-23, 6bc83c7",
        confirmed="2026-11-24, seed 1: holds",
    ),
    "norm": Statement(
        source="Dong et al. 2021, section 3.3",
        text="LayerNorm does not change the rate of 3.",
        statistic="local rate of pure attention with norms at the last layer",
        claimed=(2.5, 3.5),
        fails="a rate of 1 or 2",
        experiments=("run_collapse",),
        before="supported 2.",
        changed="2026-11-23, 6bc83c7",
        confirmed="2026-11-24, seed 1: holds",
    ),
    "skips": Statement(
        source="Dong et al. 2021, section 3.1",
        text=(
            "With skips more of the tokens' residual is left than in pure attention of the same "
            "weights."
        ),
        statistic="log10 of the residual ratio after the last layer, with skips less without",
        claimed=ABOVE_ZERO,
        fails="no more with skips than without",
        experiments=("run_collapse", "run_architectures"),
        before=(
            "supported 6. The residual is relative to the states everywhere, which grow with skips."
        ),
        changed="2026-11-23, 6bc83c7",
    ),
    "skips stop": Statement(
        source="Dong et al. 2021, abstract",
        text=(
            "Skips stop the output from degenerating: in more than half of the initialisations "
            "more than a tenth of the input's residual ratio is left after the last layer (12 as "
            "published). A tenth is our threshold; the scale of the weights alone can take the "
            "residual across it."
        ),
        statistic=("residual ratio after the last layer over the input's, attention with skips"),
        claimed=MORE_THAN_HALF,
        each=(0.1, math.inf),
        fails="a tenth or less in half or more",
        experiments=("run_collapse", "run_architectures"),
        before=(
            "contradicted 6. Any fall at all had contradicted it, and the paper's own BERT curve "
            "falls by the same slope. What is left decides; the law of the fall is a finding. Then "
            "the mean ratio over initialisations, which is bounded."
        ),
        changed="2026-11-24, 34f8027",
    ),
    "mlps stop": Statement(
        source="Dong et al. 2021, abstract",
        text=(
            "Skips and MLPs stop the output from degenerating, as one sentence of the abstract has "
            "it: in more than half of the initialisations more than a tenth of the input's "
            "residual ratio is left after the last layer. Of MLPs alone the introduction says that "
            "they slow it. A tenth is our threshold; the scale of the weights alone can take the "
            "residual across it."
        ),
        statistic=(
            "residual ratio after the last layer over the input's: "
            "of skips and MLPs together, of MLPs with their own skip as published, of MLPs alone"
        ),
        claimed=MORE_THAN_HALF,
        each=(0.1, math.inf),
        fails="a tenth or less in half or more",
        experiments=("run_collapse",),
        before=(
            "contradicted 3. As for skips. Then of MLPs alone, half of what the sentence says."
        ),
        changed="2026-11-24, 34f8027",
        confirmed="2026-11-24, seed 1: holds in part",
    ),
    "mlps slow": Statement(
        source="Dong et al. 2021, section 3.2",
        text="MLPs slow the collapse down: with them more of the residual is left than without.",
        statistic="log10 of the residual ratio after the last layer, with MLPs less without",
        claimed=ABOVE_ZERO,
        fails="no more with MLPs than without",
        experiments=("run_collapse",),
        before=(
            "contradicted 1, undecided 3. Residuals without norms were absolute, of states that "
            "MLPs shrink; they are relative."
        ),
        changed="2026-11-23, 6bc83c7",
        confirmed="2026-11-24, seed 1: cannot be said",
    ),
    "curves": Statement(
        source="Dong et al. 2021, section 4.1",
        text=(
            "The published residual by layer of BERT, ALBERT and XLNet at initialisation is "
            "compatible with ours: at no layer from 1 on, as far as the figure can be read, does "
            "it differ more than one more initialisation would."
        ),
        statistic=(
            "p of the published curve among ours, at all layers together and with the values "
            "nearest to ours that the figure may show, by its place and by the tail of our "
            "distances, less the largest p that is refused"
        ),
        claimed=ABOVE_ZERO,
        fails="p of 5 %/(number of curves) or less, which takes 240 initialisations of 12",
        experiments=("run_architectures",),
        before=(
            "supported 5, undecided 5, contradicted 2. p = .048 was the smallest that 20 draws can "
            "give, among 12 tests; layer 0 is the embedding of other texts. Then what the figure "
            "can be read to widened the spread of all, which refused XLNet's SAN: .0015, known to "
            ".001, against .0017 to .0025."
        ),
        changed="2026-11-24, 5358d2e",
    ),
    "collapse": Statement(
        source="Dong et al. 2021, section 4.1",
        text=(
            "Without skips and MLPs BERT, ALBERT and XLNet lose more than 99 % of the input's "
            "residual ratio in more than half of the initialisations."
        ),
        statistic=("part of the input's residual ratio that is lost after the last layer"),
        claimed=MORE_THAN_HALF,
        each=(0.99, math.inf),
        fails="99 % or less in half or more",
        experiments=("run_architectures",),
        before=(
            "supported 3. “Nearly all” was half; the number is in the statement. Then the mean "
            "loss, which is bounded."
        ),
        changed="2026-11-24, 34f8027",
    ),
    "chains": Statement(
        source="Dong et al. 2021, section 4.2",
        text="Products of attention matrices along a path lose rank with its length.",
        statistic=(
            "slope over lengths of log10 of the median residual ratio of P_path, at initialisation"
        ),
        claimed=BELOW_ZERO,
        fails="no fall with length",
        experiments=("run_path_chains",),
        before="supported 1.",
        changed="2026-11-23, 6bc83c7",
        confirmed="2026-11-24, seed 1: holds",
    ),
    "short at first": Statement(
        source="Dong et al. 2021, section 4.2",
        text=(
            "Short paths carry the differences between tokens: in more than half of the "
            "initialisations all paths of a length together have the largest residual at a length "
            "below the one that most paths have."
        ),
        statistic=("length of the largest residual less the length of most paths"),
        claimed=MORE_THAN_HALF,
        each=BELOW_ZERO,
        fails="at that length or above in half or more",
        experiments=("run_path_chains",),
        before="supported 1. Then the mean of these whole numbers.",
        changed="2026-11-24, 34f8027",
        confirmed="2026-11-24, seed 1: holds",
    ),
    "short suffice": Statement(
        source="Dong et al. 2021, section 4.2",
        text=(
            "Short paths carry a trained network: as longer paths are let in, in more than half of "
            "the networks the accuracy comes at a mean length below L/2, where an even growth "
            "would have it."
        ),
        statistic=(
            "mean length at which the accuracy comes, attention "
            "recomputed, less L/2; no number of a network that fell below the best baseline on the "
            "way"
        ),
        claimed=MORE_THAN_HALF,
        each=BELOW_ZERO,
        fails="growth that is even over the lengths, or late, in half or more",
        experiments=("run_sort", "run_convex_hull", "run_memorization"),
        before=(
            "supported 3. The border was the mean length of a path, LH/(1 + H), below which even "
            "growth lies too. Frozen sums have no verdict: no path at all, the offset alone, reads "
            ".952 on the hull. Then the mean over networks, also of those whose accuracy had been "
            "below the majority class, of which this length is no mean."
        ),
        changed="2026-11-24, 34f8027",
    ),
    "one short": Statement(
        source="Dong et al. 2021, section 4.2",
        text=(
            "A few short paths alone do more than half of what the network was trained for, in "
            "more than half of the networks."
        ),
        statistic=(
            "accuracy of 20 sampled paths of length 1, less the mean of "
            "the whole model's and the best baseline's"
        ),
        claimed=MORE_THAN_HALF,
        each=ABOVE_ZERO,
        fails="half or less of what the whole model has above the baseline, in half or more",
        experiments=("run_sort", "run_convex_hull", "run_memorization"),
        before=(
            "supported 2, contradicted 1. No seed is left out: nothing is divided by what was "
            "learned. Then the mean over networks."
        ),
        changed="2026-11-24, 34f8027",
    ),
    "falls": Statement(
        source="Dong et al. 2021, section 4.2",
        text=("The accuracy of paths falls with their length, in more than half of the networks."),
        statistic=(
            "slope of the accuracy of 20 sampled paths over lengths 1 .. "
            "L; no number where no length is above the best baseline"
        ),
        claimed=MORE_THAN_HALF,
        each=BELOW_ZERO,
        fails="no fall, or a rise, in half or more",
        experiments=("run_sort", "run_convex_hull", "run_memorization"),
        before=(
            "supported 2, undecided 1. No clipping at the baseline. Then the mean slope, also of "
            "sets below the majority class, where it is of noise."
        ),
        changed="2026-11-24, 34f8027",
    ),
    "circle": Statement(
        source="Dong et al. 2021, section 4.3",
        text=(
            "Fed with its own output, trained attention lets two walkers fall together in more "
            "than half of the networks."
        ),
        statistic=(
            "log10 of the walkers' distance after the last step (300 as published), of pure "
            "attention, and as published with a skip around it"
        ),
        claimed=MORE_THAN_HALF,
        each=(-math.inf, -2.0),
        fails="half or fewer nearer than .01",
        experiments=("run_circle",),
        before=(
            "contradicted 3. “Most” is a number, and pure attention, which the paper means, has "
            "rows too."
        ),
        changed="2026-11-24, 5358d2e",
        confirmed="2026-11-24, seed 1: holds in part",
    ),
    "circle skip": Statement(
        source="Dong et al. 2021, section 4.3",
        text=(
            "A skip keeps walkers apart: more than half of the networks whose walkers fall "
            "together without it."
        ),
        statistic=(
            "log10 of the walkers' distance after the last step with the skip, around the "
            "attention or as published around the recurrence, of the seeds whose walkers fall "
            "together without it"
        ),
        claimed=MORE_THAN_HALF,
        each=(-2.0, math.inf),
        fails="half or fewer farther apart than .01",
        experiments=("run_circle",),
        before=(
            "supported 3. Then the share of networks that fall with it, less that without it, not "
            "seed by seed, and around the recurrence alone."
        ),
        changed="2026-11-24, 5358d2e",
        confirmed="2026-11-24, seed 1: holds",
    ),
    "circle mlp": Statement(
        source="Dong et al. 2021, section 4.3",
        text=(
            "An MLP keeps walkers apart: more than half of the networks whose walkers fall "
            "together without it."
        ),
        statistic="as above with the MLP, without the skip around the attention and as published",
        claimed=MORE_THAN_HALF,
        each=(-2.0, math.inf),
        fails="half or fewer farther apart than .01",
        experiments=("run_circle",),
        before=(
            "undecided 3. Rows with and without the skip around the attention. Then the share of "
            "networks that fall with it, less that without it, which no number of draws decides "
            "where it makes no difference."
        ),
        changed="2026-11-24, 5358d2e",
        confirmed="2026-11-24, seed 1: does not hold",
    ),
    "saturation": Statement(
        source="Vaswani et al. 2017, section 3.2.1",
        text=(
            "The variance d_k of dot products saturates the softmax: at the largest d_k more than "
            "half of the rows have a weight above .99."
        ),
        statistic="share of rows with a weight above .99 at the largest d_k, unscaled less scaled",
        claimed=MORE_THAN_HALF,
        each=(0.5, math.inf),
        fails="half of the rows or fewer, in half of the draws or more",
        experiments=("run_attention_forms",),
        before="supported 1. Then the mean of this share, which is bounded.",
        changed="2026-11-24, d8c4ac8",
        confirmed="2026-11-24, seed 1: holds",
    ),
    "small gradients": Statement(
        source="Vaswani et al. 2017, section 3.2.1",
        text=(
            "Its gradients are extremely small there: less than a hundredth of those of scaled "
            "scores."
        ),
        statistic=(
            "log10 of the softmax gradient of the median row at the largest d_k, unscaled over "
            "scaled"
        ),
        claimed=(-math.inf, -2.0),
        fails="a hundredth or more",
        experiments=("run_attention_forms",),
        before="supported 1.",
        changed="2026-11-23, 6bc83c7",
        confirmed="2026-11-24, seed 1: holds",
    ),
    "additive": Statement(
        source="Vaswani et al. 2017, section 3.2.1",
        text=(
            "For large d_k additive attention outperforms dot products without scaling, in more "
            "than half of the initialisations."
        ),
        statistic=(
            "accuracy at the largest d_k after training, additive less unscaled dot products, v "
            "scaled so that scores of both vary as much within a row"
        ),
        claimed=MORE_THAN_HALF,
        each=ABOVE_ZERO,
        fails="no better in half of the initialisations or more",
        experiments=("run_attention_forms",),
        before=(
            "supported 1. With v of variance 1/d_k additive scores stay as small as those of "
            "scaled dot products: the scale was compared, not the form. Then the mean of the "
            "difference of accuracies, which are bounded."
        ),
        changed="2026-11-24, d8c4ac8",
        confirmed="2026-11-24, seed 1: cannot be said",
    ),
    "additive small": Statement(
        source="Vaswani et al. 2017, section 3.2.1",
        text="For small d_k the two do alike: within 5 points of accuracy.",
        statistic="the same difference at the smallest d_k",
        claimed=MORE_THAN_HALF,
        each=(-0.05, 0.05),
        fails="5 points apart or more, in half of the initialisations or more",
        experiments=("run_attention_forms",),
        before="(no verdict). Then the mean of the difference.",
        changed="2026-11-24, d8c4ac8",
        confirmed="2026-11-24, seed 1: holds",
    ),
    "O(N)": Statement(
        source="Liu et al. 2020, theorem 2",
        text=(
            "Independent updates of Post-LN's matrices change its output by C Σ_i β_ii², which "
            "grows like N, the number of branches."
        ),
        statistic=(
            "place of the exponent in N of Σ_i β_ii², same weights at all depths, between those of "
            "N/2, ln N and 1 in closed form over the same depths: 0 of a constant, 1 of ln N, 2 of "
            "N"
        ),
        claimed=(1.5, 2.5),
        fails="nearer to log N, or as far above N",
        experiments=("run_stability",),
        before=(
            "undecided 2, contradicted 2 (gradient steps). Steps along the gradient are no "
            "independent updates, and the law's own expectation of the measured change lies "
            "outside of the range: both are findings. The theorem's own quantity decides."
        ),
        changed="2026-11-24, 772c915",
        confirmed="2026-11-24, seed 1: holds",
    ),
    "O(log N)": Statement(
        source="Liu et al. 2020, theorem 2, and without profiling",
        text="Σ_i β_ii² of Pre-LN and Admin grows like log N.",
        statistic="as of O(N)",
        claimed=(0.5, 1.5),
        fails="nearer to N or to a constant",
        experiments=("run_stability",),
        before="supported 6, contradicted 6 (gradient steps). As O(N).",
        changed="2026-11-24, 772c915",
        confirmed="2026-11-24, seed 1: holds",
    ),
    "O(1)": Statement(
        source="Liu et al. 2020, without profiling",
        text="Σ_i β_ii² of Admin with ω² = N does not grow.",
        statistic="as of O(N)",
        claimed=(-0.5, 0.5),
        fails="growth or fall nearer to log N or its inverse",
        experiments=("run_stability",),
        before="supported 2, contradicted 2 (gradient steps). As O(N).",
        changed="2026-11-24, 772c915",
        confirmed="2026-11-24, seed 1: holds",
    ),
    "deepnorm": Statement(
        source="Wang et al. 2022",
        text=(
            "An SGD step of one rate for all depths changes DeepNorm's output by at most a "
            "constant."
        ),
        statistic=(
            "place of the exponent in N of |δx̂|² after a plain gradient step of one η between "
            "those of the three laws, as of O(N)"
        ),
        claimed=(-math.inf, 0.5),
        fails="growth nearer to log N",
        experiments=("run_stability",),
        before=(
            "supported 2, contradicted 1, undecided 1. Steps of equal relative size for every "
            "matrix, along the gradient or at random, are not the SGD step that its authors bound. "
            "Only the wording changed last."
        ),
        changed="2026-11-24, 772c915",
        confirmed="2026-11-24, seed 1: holds",
    ),
    "post fails": Statement(
        source="Liu et al. 2020, table 1",
        text=(
            "With warm-up, as published, Post-LN of 12 and 18 layers fails: it has less than 90 % "
            "of what Pre-LN has after the same steps, in more than half of the initialisations."
        ),
        statistic=(
            "accuracy over that of Pre-LN after the same steps, the longest warm-up of the run"
        ),
        claimed=MORE_THAN_HALF,
        each=(-math.inf, 0.9),
        fails="90 % or more in half or more",
        experiments=("run_trainability",),
        before=(
            "contradicted 3, supported 1. A network failed only if it still guessed: one that had "
            "learned a fourth had trained. Then the mean of this ratio, which piles up at 1, also "
            "without warm-up, of which the table says nothing."
        ),
        changed="2026-11-24, 34f8027",
    ),
    "others train": Statement(
        source="Liu et al. 2020, table 1",
        text=(
            "With warm-up, as published, Post-LN of 6 layers and Pre-LN and Admin of 6, 12 and 18 "
            "train: they have more than 90 % of what Pre-LN has after the same steps, in more than "
            "half of the initialisations."
        ),
        statistic=(
            "accuracy over that of Pre-LN after the same steps, of "
            "Pre-LN itself over 1, the longest warm-up of the run"
        ),
        claimed=MORE_THAN_HALF,
        each=(0.9, math.inf),
        fails="90 % or less in half or more",
        experiments=("run_trainability",),
        before="supported 14. As for those that fail.",
        changed="2026-11-24, 34f8027",
    ),
    "width": Statement(
        source="found here (published code, test_width; no text states it)",
        text="Whether depth buys anything at equal parameters, on sorting.",
        statistic="accuracy of the deepest network less that of the shallowest, same data",
        experiments=("run_width",),
        before="contradicted 1. Nobody claims it.",
    ),
    "gradient steps": Statement(
        source="found here",
        text=(
            "Steps of equal relative size along the gradient move the output by a power of N above "
            "what independent updates do: with equal steps e the loss falls by e Σ‖W‖‖∂W‖, so that "
            "|δF|² ≥ e² (Σ‖W‖‖∂W‖)²/‖u‖² (drawn), and the square of a sum over N matrices is N "
            "times the sum of squares."
        ),
        statistic="exponent in N of |δx̂|² after such a step, less that after random ones",
        experiments=("run_stability",),
        before="contradicted 13, undecided 1. Liu et al.'s theorem is about independent updates.",
    ),
    "independent updates": Statement(
        source="found here",
        text="What independent updates of all matrices do to the output, measured.",
        statistic=(
            "place of the exponent in N of |δx̂|² after random updates between those of the three "
            "laws, as of O(N)"
        ),
        experiments=("run_stability",),
        before=(
            "supported 4 (random updates). An exponent over few depths does not tell whether a law "
            "of Liu et al. holds: the one law expects a place of 2.6 for Post-LN."
        ),
    ),
    "law of the fall": Statement(
        source="found here",
        text=(
            "How the residual ratio of attention with skips falls with depth: like a power of the "
            "layer or by a factor a layer."
        ),
        statistic=(
            "ln of the squared error of the exponential fit over that of the power law, layers 1 "
            ".. L: above 0 the power law is nearer"
        ),
        experiments=("run_collapse", "run_architectures"),
    ),
    "mlp gain": Statement(
        source="found here",
        text="From which gain on MLPs slow the collapse.",
        statistic="gain at which Λ = log10‖res‖/3^L crosses that of pure attention",
        experiments=("run_collapse",),
    ),
    "biases": Statement(
        source="found here",
        text="What the biases carry without any path, in the attention of the whole model.",
        statistic=(
            "accuracy of the offset alone less the best baseline's, over what the whole model has "
            "above it, of seeds that learned"
        ),
        experiments=("run_sort", "run_convex_hull", "run_memorization"),
        before=(
            "supported 2, contradicted 1 (frozen sums). Sums of paths on top of the offset do not "
            "say what paths carry."
        ),
    ),
    "all of it": Statement(
        source="found here",
        text="How long paths must be for all of the accuracy, not for most of it.",
        statistic=(
            "least length up to which all paths give the whole model's accuracy to one standard "
            "error"
        ),
        experiments=("run_sort", "run_convex_hull", "run_memorization"),
        before=(
            "supported 1, undecided 1, contradicted 1. The paper says most of the accuracy; one "
            "statement, one statistic."
        ),
    ),
    "phase order": Statement(
        source="Cowsik et al. 2024",
        text=(
            "The exponent λ_a of the angles of tokens orders networks by what they keep of the "
            "residual, in more than half of the initialisations of all cells."
        ),
        statistic=(
            "rank correlation over the cells of a phase diagram of the residual kept with λ_a"
        ),
        claimed=MORE_THAN_HALF,
        each=(0.9, math.inf),
        fails=".9 or less in half of the draws or more; the paper names no number, .9 is ours",
        experiments=("run_phase",),
        before=(
            "the same rows, with two further theories among the sources that none tests. Then the "
            "mean of this correlation, which is bounded."
        ),
        changed="2026-11-24, 4167119",
        confirmed="2026-11-24, seed 2: holds",
    ),
    "gain control": Statement(
        source="Giorlandino and Goldt 2025, figure 4",
        text=(
            "Without what all tokens share in the output of attention they align less, in more "
            "than half of the initialisations."
        ),
        statistic="cosine of two tokens after the last layer, gain-controlled less not",
        claimed=MORE_THAN_HALF,
        each=BELOW_ZERO,
        fails="as large or larger in half or more",
        experiments=("run_phase",),
        before="the mean of this difference of cosines, which is bounded.",
        changed="2026-11-24, 4167119",
        confirmed="2026-11-24, seed 2: holds",
    ),
    "gap": Statement(
        source="Nait Saada et al. 2024, theorem on the spectral gap",
        text="σ₂/σ₁ of random softmax attention falls like 1/√n, of AX at n/d fixed too.",
        statistic=(
            "slope of ln(σ₂/σ₁) over ln n, at the sizes of the published code (20 to 150) and "
            "beyond (150 to 600); the theorem is of n → ∞"
        ),
        claimed=(-0.6, -0.4),
        fails="another power of n",
        experiments=("run_phase",),
        before=(
            "(not run; the page of run_phase called slopes of -.39 to -.37 at the published sizes "
            "undecided). There the limit is not reached: sizes beyond have rows too."
        ),
        changed="2026-11-24, 59162e1",
        confirmed="2026-11-24, seed 1: holds in part",
    ),
    "gap removed": Statement(
        source="Nait Saada et al. 2024, section on A⊥",
        text="Without its largest part attention has no such gap: σ₂/σ₁ does not fall with n.",
        statistic="the same slopes of √n (A − 11ᵀ/n)",
        claimed=(-0.1, math.inf),
        fails="a fall by a power of .1 or more",
        experiments=("run_phase",),
        changed="2026-11-24, 59162e1",
        confirmed="2026-11-24, seed 1: holds",
    ),
    "deeper aligns": Statement(
        source="Noci et al. 2022, figure 1",
        text=(
            "The tokens of deeper Post-LN networks are more aligned at initialisation, in more "
            "than half of the initialisations."
        ),
        statistic=(
            "cosine of two tokens after the last layer, of the deepest network less the shallowest"
        ),
        claimed=MORE_THAN_HALF,
        each=ABOVE_ZERO,
        fails="no more aligned in half or more",
        experiments=("run_phase",),
        before="the mean of this difference of cosines, which is bounded.",
        changed="2026-11-24, 4167119",
        confirmed="2026-11-24, seed 2: holds",
    ),
    "scaling helps": Statement(
        source="Noci et al. 2022, figure 1",
        text=(
            "Branches scaled by 1/√L keep them from it, in more than half of the initialisations."
        ),
        statistic="the same cosine of scaled branches less that of plain ones",
        claimed=MORE_THAN_HALF,
        each=BELOW_ZERO,
        fails="as aligned or more in half or more",
        experiments=("run_phase",),
        before="the mean of this difference of cosines, which is bounded.",
        changed="2026-11-24, 4167119",
        confirmed="2026-11-24, seed 2: holds",
    ),
    "clusters": Statement(
        source="Geshkovski et al. 2023, theorem 6.8",
        text="In high dimension all tokens meet when tokens at one angle do.",
        statistic="time at which half of the pairs have a cosine above .999 over that of the law",
        claimed=(0.9, 1.1),
        fails="10 % away or more",
        experiments=("run_phase",),
        changed="2026-11-23, 4bd5280",
        confirmed="2026-11-24, seed 1: holds in part",
    ),
    "cures keep": Statement(
        source="found here",
        text=(
            "What residual designs and attention variants keep of the residual at initialisation; "
            "ReZero and SkipInit keep all of it by construction."
        ),
        statistic="log10 of the residual after the last layer over that of the input",
        experiments=("run_cures",),
    ),
    "cures train": Statement(
        source="found here",
        text=(
            "Which residual designs train without warm-up, and which attention variants in a "
            "network of one placement of norms (post-norm, where softmax fails)."
        ),
        statistic=(
            "share of seeds that name more letters than 199 of 200 networks without attention: of "
            "8 tokens more than .352, where such a network has .30"
        ),
        experiments=("run_cures",),
    ),
    "sinks appear": Statement(
        source="Gu et al. 2025, sections 3 and 4",
        text=(
            "Causal language models attend to their first token after training, small ones too: "
            "more than one head in ten is a sink, in more than half of the seeds."
        ),
        statistic=(
            "share of heads of which the first token gets more than .3 of the attention, mean over "
            "queries, then over held-out windows, of softmax attention after training"
        ),
        claimed=MORE_THAN_HALF,
        each=(0.1, math.inf),
        fails="one head in ten or fewer in half or more",
        experiments=("run_language_model",),
        changed="2026-11-24, 78a223c",
    ),
    "spikes appear": Statement(
        source="Sun et al. 2024, section 2",
        text=(
            "The largest entry of a hidden state of a trained language model is above 100 and "
            "above 1000 times the median, in more than half of the seeds."
        ),
        statistic=(
            "the smaller of max|x|/100 and max|x|/(1000 median|x|), means over held-out windows, "
            "of the state that has most of it, of softmax attention after training"
        ),
        claimed=MORE_THAN_HALF,
        each=(1.0, math.inf),
        fails="smaller entries in half or more",
        experiments=("run_language_model",),
        changed="2026-11-24, 78a223c",
    ),
    "sink cures": Statement(
        source="found here",
        text=(
            "What gated attention, softpick, a softmax with a further score of 0 and QK-norm "
            "change of the sinks of a language model at equal steps."
        ),
        statistic="share of heads that are sinks less that of softmax attention of the same seed",
        experiments=("run_language_model",),
    ),
    "spike cures": Statement(
        source="found here",
        text="What they change of its spikes.",
        statistic="log10 of max|x|/median|x| of the state with most, less that of softmax",
        experiments=("run_language_model",),
    ),
    "loss of cures": Statement(
        source="found here",
        text="What they change of its loss.",
        statistic="nats a byte of held-out text less those of softmax attention of the same seed",
        experiments=("run_language_model",),
    ),
}


def row_of(key: str, setting: str, values: Iterable[Any], *, why: str = "") -> Row:
    """The row of a statement's or a finding's draws: their mean, or the share of them in `each`.

    Args:
        key: Of `STATEMENTS`.
        setting, values, why: As of `of_mean`.
    """
    each = STATEMENTS[key].each
    if each is None:
        return of_mean(key, setting, values, why=why)
    return of_share_within(key, setting, values, each, why=why)


def now_text(answer: Answer, preset: str, day: str) -> str:
    """What an answer is, where, from which sizes and of which day."""
    made = f"(sizes “{preset}”, {day})"
    if answer.answer == FINDING:
        rows = f"{len(answer.rows)} row{'s' * (len(answer.rows) != 1)}"
        return f"{rows} in [the results](results.md) {made}."
    return f"**{answer.answer}** {made}: {answer.where}."


def answered(text: str) -> dict[str, str]:
    """{key: its answer} of a page."""
    return dict(re.findall(r"^## (.+)$(?:\n(?!## ).*)*?\n- Now: (.+)$", text, re.MULTILINE))


def at_full_size(text: str) -> dict[str, str]:
    """{key: "at full size, 2026-11-23: holds"} of the statements of a page that were run so."""
    found = {}
    for key, now in answered(text).items():
        if known := re.match(r"\*\*(.+)\*\* \(sizes “paper”, (\S+)\)", now):
            answer, day = known.groups()
            before = ", before its test changed" if STATEMENTS[key].changed[:10] > day else ""
            found[key] = f"at full size, {day}{before}: {answer}"
    return found


def page(now: Mapping[str, str]) -> str:
    """docs/statements.md with these answers, {key: `now_text`}; other statements were not run."""
    tested = sum(s.claimed is not None for s in STATEMENTS.values())
    entries = (_entry(key, own, now.get(key, NOT_RUN)) for key, own in STATEMENTS.items())
    return (
        "# Statements\n\nWhat of the papers is tested: by which one statistic, where it holds, and "
        "what would make it fail. Many statistics and ranges were revised after earlier runs: "
        "“Changed” is the date and commit of the last revision, “On new seeds” a later run at full "
        "size on seeds that were never used, whose answer then stands. Rows are settings; their "
        "intervals hold jointly (Holm), so that chance alone gives a wrong verdict on any row of a "
        f"statement in {100 * ERROR:g} % of runs at most: on average on {ERROR * tested:.1f} "
        "statements of all. Means presume draws that are near normal; a statistic that is bounded "
        "or takes few values is judged by the share of draws in a range. “Before” are the verdicts "
        "that rows had one by one. Theorem 2.1 and the binomial law of path lengths are "
        "identities, which the experiments check and which have no answer. Written by `python -m "
        "experiments.reproduce --markdown`.\n\n" + "\n".join(entries)
    )


def _entry(key, own, now):
    lines = [f"Statistic: {own.statistic}."]
    if own.claimed is not None:
        lines.append(f"Holds: {holds_text(own)}. Fails: {own.fails}.")
    lines.append(f"Rows: {', '.join(own.experiments)}.")
    if own.before:
        lines.append(f"Before: {own.before}")
    if own.claimed is not None:
        lines.append(f"Changed: {own.changed}. On new seeds: {own.confirmed or 'not run'}.")
    lines.append(f"Now: {now}")
    return f"## {key}\n{own.source}: {own.text}\n\n" + "".join(f"- {line}\n" for line in lines)
