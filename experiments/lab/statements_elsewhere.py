"""Statements of papers after Dong et al. 2021 and before it, and what no paper states."""

import math

from experiments.verdicts.claims import ABOVE_ZERO, MORE_THAN_HALF, Statement

TRAINED = ("run_sort", "run_convex_hull", "run_memorization")

ELSEWHERE = {
    "saturation": Statement(
        source="Vaswani et al. 2017, section 3.2.1",
        text=(
            "The variance d_k of dot products saturates the softmax: at the largest d_k more than "
            "half of the rows have a weight above .99."
        ),
        statistic="share of rows with a weight above .99 at the largest d_k, unscaled minus scaled",
        claimed=MORE_THAN_HALF,
        each=(0.5, math.inf),
        experiments=("run_attention_forms",),
        changed="2026-11-24, d8c4ac8",
        confirmed="2026-11-24, seed 1: holds",
    ),
    "small gradients": Statement(
        source="Vaswani et al. 2017, section 3.2.1",
        text=(
            "There the gradients of the softmax are less than a hundredth of those of scaled "
            "scores."
        ),
        statistic=(
            "log10 of the softmax gradient of the median row at the largest d_k, unscaled divided "
            "by scaled"
        ),
        claimed=(-math.inf, -2.0),
        experiments=("run_attention_forms",),
        changed="2026-11-23, 6bc83c7",
        confirmed="2026-11-24, seed 1: holds",
    ),
    "additive": Statement(
        source="Vaswani et al. 2017, section 3.2.1",
        text="For large d_k additive attention outperforms dot products without scaling.",
        statistic=(
            "accuracy at the largest d_k after training, additive minus unscaled dot products; v "
            "is scaled so that the scores of both vary as much within a row"
        ),
        claimed=MORE_THAN_HALF,
        each=ABOVE_ZERO,
        experiments=("run_attention_forms",),
        changed="2026-11-24, d8c4ac8",
        confirmed="2026-11-24, seed 1: cannot be said",
    ),
    "additive small": Statement(
        source="Vaswani et al. 2017, section 3.2.1",
        text="For small d_k the two do alike: within 5 points of accuracy.",
        statistic="the same difference at the smallest d_k",
        claimed=MORE_THAN_HALF,
        each=(-0.05, 0.05),
        experiments=("run_attention_forms",),
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
            "three laws in closed form over these depths: 0 is a constant, 1 is ln N, 2 is N/2"
        ),
        claimed=(1.5, 2.5),
        experiments=("run_stability",),
        changed="2026-11-24, 772c915",
        confirmed="2026-11-24, seed 1: holds",
    ),
    "O(log N)": Statement(
        source="Liu et al. 2020, theorem 2, and without profiling",
        text="Σ_i β_ii² of Pre-LN and Admin grows like log N.",
        statistic="the same place",
        claimed=(0.5, 1.5),
        experiments=("run_stability",),
        changed="2026-11-24, 772c915",
        confirmed="2026-11-24, seed 1: holds",
    ),
    "O(1)": Statement(
        source="Liu et al. 2020, without profiling",
        text="Σ_i β_ii² of Admin with ω² = N does not grow.",
        statistic="the same place",
        claimed=(-0.5, 0.5),
        experiments=("run_stability",),
        changed="2026-11-24, 772c915",
        confirmed="2026-11-24, seed 1: holds",
    ),
    "deepnorm": Statement(
        source="Wang et al. 2022",
        text=(
            "An SGD step of one learning rate for all depths changes DeepNorm's output by at most "
            "a constant."
        ),
        statistic=(
            "the place, as of O(N), of the exponent in N of |δx̂|² after a plain gradient step of "
            "one η"
        ),
        claimed=(-math.inf, 0.5),
        experiments=("run_stability",),
        changed="2026-11-24, 772c915",
        confirmed="2026-11-24, seed 1: holds",
    ),
    "post fails": Statement(
        source="Liu et al. 2020, table 1",
        text=(
            "With warm-up, Post-LN of 12 and 18 layers fails: it has less than 90 % of the "
            "accuracy of Pre-LN after the same steps."
        ),
        statistic=(
            "accuracy divided by that of Pre-LN after the same steps, with the longest warm-up of "
            "the run"
        ),
        claimed=MORE_THAN_HALF,
        each=(-math.inf, 0.9),
        experiments=("run_trainability",),
        changed="2026-11-24, 34f8027",
        confirmed="2026-11-24, seed 1: holds",
    ),
    "others train": Statement(
        source="Liu et al. 2020, table 1",
        text=(
            "With warm-up, Post-LN of 6 layers and Pre-LN and Admin of 6, 12 and 18 train: they "
            "have more than 90 % of the accuracy of Pre-LN."
        ),
        statistic="the same ratio; for Pre-LN itself, its accuracy",
        claimed=MORE_THAN_HALF,
        each=(0.9, math.inf),
        experiments=("run_trainability",),
        changed="2026-11-24, 34f8027",
        confirmed="2026-11-24, seed 1: holds",
    ),
    "depth start": Statement(
        source="Dey et al. 2025 (CompleteP), figure 7",
        text=(
            "Before the first step mean |x_L| is as published, by standard parametrisation, α = ½ "
            "and α = 1, at 2 to 64 layers of width 256."
        ),
        statistic="ln of mean |x_L| at step 1, measured over published, by rule and depth",
        claimed=(-math.log(1.1), math.log(1.1)),
        experiments=("run_depth_check",),
        changed="2026-11-26, aaeacb3",
        confirmed="2026-11-26, seed 1: holds in part",
    ),
    "depth growth": Statement(
        source="Dey et al. 2025 (CompleteP), figure 7",
        text=(
            "Over depth mean |x_L| goes with the power .53 at step 1 and 1.20 at step 10 by "
            "standard parametrisation, with −.42 and .05 by CompleteP."
        ),
        statistic="slope of ln mean |x_L| over ln L, 2 to 64 layers, minus that of the figure",
        claimed=(-0.4, 0.4),
        experiments=("run_depth_check",),
        changed="2026-11-26, aaeacb3",
        confirmed="2026-11-26, seed 1: holds in part",
    ),
    "depth linear": Statement(
        source="Dey et al. 2025 (CompleteP), figure 6",
        text=(
            "With α = ½ deeper networks are nearer to linear in the weights of each block, by "
            "1/√L; with α = 1 they are not."
        ),
        statistic=(
            "slope over ln L of the median block's ln distance from linearisation after ten "
            "steps, α = 1 minus α = ½ (theory: ½)"
        ),
        claimed=ABOVE_ZERO,
        experiments=("run_depth_check",),
        changed="2026-11-26, aaeacb3",
        confirmed="2026-11-26, seed 1: holds",
    ),
    "depth tokens": Statement(
        source="measured here; the range was fixed before the run",
        text=(
            "After ten steps of standard parametrisation tokens are the nearer to each other the "
            "deeper the network is: 16 times as many layers more than halve the residual ratio."
        ),
        statistic="slope over ln L of the last states' ln residual ratio at step 10",
        claimed=(-math.inf, -0.25),
        experiments=("run_depth_check",),
        changed="2026-11-26, aaeacb3",
        confirmed="2026-11-26, seed 1: holds",
    ),
    "depth cure": Statement(
        source="measured here; the range was fixed before the run",
        text="With CompleteP the residual ratio falls less with depth than it does without.",
        statistic="the same slope, CompleteP minus standard parametrisation, seed by seed",
        claimed=ABOVE_ZERO,
        experiments=("run_depth_check",),
        changed="2026-11-26, aaeacb3",
        confirmed="2026-11-26, seed 1: holds",
    ),
    "depth tokens completep": Statement(
        source="measured here; the range was fixed before the run",
        text=(
            "With CompleteP tokens of deep networks are no nearer to each other: 16 times as many "
            "layers do not halve the residual ratio."
        ),
        statistic="slope over ln L of the last states' ln residual ratio at step 10",
        claimed=(-0.25, math.inf),
        experiments=("run_depth_check",),
        changed="2026-11-26, aaeacb3",
        confirmed="2026-11-26, seed 1: holds in part",
    ),
    "loops grow": Statement(
        source="Wang et al. 2026 (arXiv 2606.18524)",
        text="With tied weights and a gain of 1/√N states more than double over N loops.",
        statistic="log10 of the last state's root mean square over the first's",
        claimed=(math.log10(2), math.inf),
        experiments=("run_loops",),
        changed="2026-11-26, aaeacb3",
        confirmed="2026-11-26, seed 1: holds in part",
    ),
    "loops stay": Statement(
        source="Wang et al. 2026 (arXiv 2606.18524)",
        text="With a gain of 1/N they do not: within a quarter.",
        statistic="the same with a gain of 1/N",
        claimed=(-0.1, 0.1),
        experiments=("run_loops",),
        changed="2026-11-26, aaeacb3",
        confirmed="2026-11-26, seed 1: holds",
    ),
    "loops align": Statement(
        source="measured here; the range was fixed before the run",
        text="With tied weights and 1/√N tokens align, with 1/N they do not.",
        statistic="token cosine of the last state with a gain of 1/√N minus with 1/N, same draws",
        claimed=MORE_THAN_HALF,
        each=(0.5, math.inf),
        experiments=("run_loops",),
        changed="2026-11-26, aaeacb3",
        confirmed="2026-11-26, seed 1: holds in part",
    ),
}

FINDINGS = {
    "width": Statement(
        source="found here (published code, test_width; no text states it)",
        text=(
            "Whether depth helps at equal numbers of parameters, on sorting (`test_width` of the "
            "published code; no text states it)."
        ),
        statistic="accuracy of the deepest network minus that of the shallowest, same data",
        experiments=("run_width",),
    ),
    "gradient steps": Statement(
        source="found here",
        text=(
            "Steps of equal relative size e along the gradient change the output by one more power "
            "of N than independent updates do. The loss falls by e Σ‖W‖‖∂W‖, so that |δF|² ≥ e² "
            "(Σ‖W‖‖∂W‖)²/‖u‖² (drawn): the square of a sum over N matrices."
        ),
        statistic="exponent in N of |δx̂|² after such a step, minus that after random ones",
        experiments=("run_stability",),
    ),
    "independent updates": Statement(
        source="found here",
        text="What independent updates of all matrices do to the output.",
        statistic="the place, as of O(N), of the exponent in N of |δx̂|² after random updates",
        experiments=("run_stability",),
    ),
    "law of the fall": Statement(
        source="found here",
        text=(
            "How the residual ratio of attention with skips falls with depth: like a power of the "
            "layer, or by a factor a layer."
        ),
        statistic=(
            "ln of the squared error of the exponential fit divided by that of the power law, "
            "layers 1 to L; above 0 the power law is nearer"
        ),
        experiments=("run_collapse", "run_architectures"),
    ),
    "mlp gain": Statement(
        source="found here",
        text="The gain from which on MLPs slow the collapse.",
        statistic="gain at which Λ = log10‖res‖/3^L crosses that of pure attention",
        experiments=("run_collapse",),
    ),
    "biases": Statement(
        source="found here",
        text="What the biases carry without any path, in the attention of the whole model.",
        statistic=(
            "accuracy of the offset alone minus the best baseline's, divided by what the whole "
            "model has above it; of seeds that learned"
        ),
        experiments=TRAINED,
    ),
    "all of it": Statement(
        source="found here",
        text="How long paths must be for all of the accuracy, not for most of it.",
        statistic=(
            "least length up to which all paths give the whole model's accuracy to one standard "
            "error"
        ),
        experiments=TRAINED,
    ),
}
