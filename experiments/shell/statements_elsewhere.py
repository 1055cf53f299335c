"""Statements of papers after Dong et al. 2021 and before it, and what no paper states."""

import math

from rank_collapse.report.claims import ABOVE_ZERO, BELOW_ZERO, MORE_THAN_HALF, Statement

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
    "phase order": Statement(
        source="Cowsik et al. 2024",
        text=(
            "The exponent λ_a of the angles of tokens orders networks by what they keep of the "
            "residual. The threshold of .9 is ours."
        ),
        statistic=(
            "rank correlation of the residual kept with λ_a, over the cells of a phase diagram"
        ),
        claimed=MORE_THAN_HALF,
        each=(0.9, math.inf),
        experiments=("run_phase",),
        changed="2026-11-24, 4167119",
        confirmed="2026-11-24, seed 2: holds",
    ),
    "gain control": Statement(
        source="Giorlandino and Goldt 2025, figure 4",
        text="Tokens align less without the part of attention's output that all tokens share.",
        statistic="cosine of two tokens after the last layer, gain-controlled minus not",
        claimed=MORE_THAN_HALF,
        each=BELOW_ZERO,
        experiments=("run_phase",),
        changed="2026-11-24, 4167119",
        confirmed="2026-11-24, seed 2: holds",
    ),
    "gap": Statement(
        source="Nait Saada et al. 2024, theorem on the spectral gap",
        text="σ₂/σ₁ of random softmax attention falls like 1/√n, and that of AX too at n/d fixed.",
        statistic=(
            "slope of ln(σ₂/σ₁) over ln n, at the published code's sizes (20 to 150) and beyond "
            "(150 to 600); the theorem is of n → ∞"
        ),
        claimed=(-0.6, -0.4),
        experiments=("run_phase",),
        changed="2026-11-24, 59162e1",
        confirmed="2026-11-24, seed 1: holds in part",
    ),
    "gap removed": Statement(
        source="Nait Saada et al. 2024, section on A⊥",
        text="Without its largest part attention has no such gap: σ₂/σ₁ does not fall with n.",
        statistic="the same slopes of √n (A − 11ᵀ/n)",
        claimed=(-0.1, math.inf),
        experiments=("run_phase",),
        changed="2026-11-24, 59162e1",
        confirmed="2026-11-24, seed 1: holds",
    ),
    "deeper aligns": Statement(
        source="Noci et al. 2022, figure 1",
        text="The tokens of deeper Post-LN networks are more aligned at initialisation.",
        statistic=(
            "cosine of two tokens after the last layer, of the deepest network minus the shallowest"
        ),
        claimed=MORE_THAN_HALF,
        each=ABOVE_ZERO,
        experiments=("run_phase",),
        changed="2026-11-24, 4167119",
        confirmed="2026-11-24, seed 2: holds",
    ),
    "scaling helps": Statement(
        source="Noci et al. 2022, figure 1",
        text="Branches scaled by 1/√L keep tokens from it.",
        statistic="the same cosine, of scaled branches minus plain ones",
        claimed=MORE_THAN_HALF,
        each=BELOW_ZERO,
        experiments=("run_phase",),
        changed="2026-11-24, 4167119",
        confirmed="2026-11-24, seed 2: holds",
    ),
    "clusters": Statement(
        source="Geshkovski et al. 2023, theorem 6.8",
        text="In high dimension all tokens meet when tokens at one angle do.",
        statistic=(
            "time at which half of the pairs have a cosine above .999, divided by that of the law"
        ),
        claimed=(0.9, 1.1),
        experiments=("run_phase",),
        changed="2026-11-23, 4bd5280",
        confirmed="2026-11-24, seed 1: holds in part",
    ),
    "sinks appear": Statement(
        source="Gu et al. 2025, sections 3 and 4",
        text=(
            "Causal language models attend to their first token after training, small ones too: "
            "more than one head in ten is a sink."
        ),
        statistic=(
            "share of heads of which the first token gets more than .3 of the attention, mean over "
            "queries, then over held-out windows, of softmax attention after training"
        ),
        claimed=MORE_THAN_HALF,
        each=(0.1, math.inf),
        experiments=("run_language_model",),
        changed="2026-11-24, 78a223c",
        confirmed="2026-11-24, seed 0: does not hold",
    ),
    "spikes appear": Statement(
        source="Sun et al. 2024, section 2",
        text=(
            "The largest entry of a hidden state of a trained language model is above 100 and "
            "above 1000 times the median."
        ),
        statistic=(
            "the smaller of max|x|/100 and max|x|/(1000 median|x|), means over held-out windows, "
            "of the state that has most of it, of softmax attention after training"
        ),
        claimed=MORE_THAN_HALF,
        each=(1.0, math.inf),
        experiments=("run_language_model",),
        changed="2026-11-24, 78a223c",
        confirmed="2026-11-24, seed 0: does not hold",
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
    ),
    "depth tokens": Statement(
        source="found here; the range was fixed before the run",
        text=(
            "After ten steps of standard parametrisation tokens are the nearer to each other the "
            "deeper the network is: 16 times as many layers more than halve the residual ratio."
        ),
        statistic="slope over ln L of the last states' ln residual ratio at step 10",
        claimed=(-math.inf, -0.25),
        experiments=("run_depth_check",),
        changed="2026-11-26, aaeacb3",
    ),
    "depth cure": Statement(
        source="found here; the range was fixed before the run",
        text="With CompleteP the residual ratio falls less with depth than it does without.",
        statistic="the same slope, CompleteP minus standard parametrisation, seed by seed",
        claimed=ABOVE_ZERO,
        experiments=("run_depth_check",),
        changed="2026-11-26, aaeacb3",
    ),
    "depth tokens completep": Statement(
        source="found here; the range was fixed before the run",
        text=(
            "With CompleteP tokens of deep networks are no nearer to each other: 16 times as many "
            "layers do not halve the residual ratio."
        ),
        statistic="slope over ln L of the last states' ln residual ratio at step 10",
        claimed=(-0.25, math.inf),
        experiments=("run_depth_check",),
        changed="2026-11-26, aaeacb3",
    ),
    "loops grow": Statement(
        source="Wang et al. 2026 (arXiv 2606.18524)",
        text="With tied weights and a gain of 1/√N states more than double over N loops.",
        statistic="log10 of the last state's root mean square over the first's",
        claimed=(math.log10(2), math.inf),
        experiments=("run_loops",),
        changed="2026-11-26, aaeacb3",
    ),
    "loops stay": Statement(
        source="Wang et al. 2026 (arXiv 2606.18524)",
        text="With a gain of 1/N they do not: within a quarter.",
        statistic="the same with a gain of 1/N",
        claimed=(-0.1, 0.1),
        experiments=("run_loops",),
        changed="2026-11-26, aaeacb3",
    ),
    "loops align": Statement(
        source="found here; the range was fixed before the run",
        text="With tied weights and 1/√N tokens align, with 1/N they do not.",
        statistic="token cosine of the last state with a gain of 1/√N minus with 1/N, same draws",
        claimed=MORE_THAN_HALF,
        each=(0.5, math.inf),
        experiments=("run_loops",),
        changed="2026-11-26, aaeacb3",
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
    "cures keep": Statement(
        source="found here",
        text=(
            "What residual designs and attention variants keep of the residual at initialisation. "
            "ReZero and SkipInit keep all of it by construction."
        ),
        statistic="log10 of the residual after the last layer divided by that of the input",
        experiments=("run_cures",),
    ),
    "cures train": Statement(
        source="found here",
        text=(
            "Which residual designs train without warm-up, and which attention variants in a "
            "post-norm network, where softmax fails."
        ),
        statistic=(
            "share of seeds that name more letters than 199 of 200 networks without attention: "
            "more than .352 of 8 tokens, where such a network has .30"
        ),
        experiments=("run_cures",),
    ),
    "sink cures": Statement(
        source="found here",
        text=(
            "How gated attention, softpick, a softmax with a further score of 0 and QK-norm change "
            "the sinks of a language model, at equal steps."
        ),
        statistic="share of heads that are sinks, minus that of softmax attention of the same seed",
        experiments=("run_language_model",),
    ),
    "spike cures": Statement(
        source="found here",
        text="How they change its spikes.",
        statistic="log10 of max|x|/median|x| of the state with most, minus that of softmax",
        experiments=("run_language_model",),
    ),
    "loss of cures": Statement(
        source="found here",
        text="How they change its loss.",
        statistic="nats a byte of held-out text, minus those of softmax attention of the same seed",
        experiments=("run_language_model",),
    ),
}
