"""The statements of papers that are tested here, and findings, which no paper states.

Each has one statistic and the range in which it holds; an experiment's `claims` gives its rows, one
a setting. A statement whose statistic or range is changed gets the date and the commit of that
change. It is not confirmed until it has been run on seeds that were never used. docs/statements.md
is written from this table: `PYTHONPATH=. python tests/site_pages.py --write`.
"""

import math
from collections.abc import Iterable
from typing import Any

from experiments.lab.statements_elsewhere import ELSEWHERE, FINDINGS, TRAINED
from experiments.lab.statements_trained import ON_TRAINED
from experiments.verdicts.claims import (
    ABOVE_ZERO,
    BELOW_ZERO,
    MORE_THAN_HALF,
    NO_CASE,
    Row,
    Statement,
    of_mean,
    of_share_within,
)

STATEMENTS = {
    "lemma": Statement(
        source="Dong et al. 2021, appendix",
        text="(I − D)P̃ ≤ P ≤ (I + 2D)P̃ entry by entry wherever max D_ii ≤ 1.256.",
        statistic="number of heads of random networks with max D_ii ≤ 1.256 that violate it",
        claimed=NO_CASE,
        always=True,
        experiments=("check_bounds",),
        changed="2026-11-23, 2e73d7b",
        confirmed="2026-11-24, seed 1: holds",
    ),
    "bound": Statement(
        source="Dong et al. 2021, theorem 2.2",
        text="With max D_ii ≤ 1.256 the residual of one head is at most (4γβ/√k)‖res‖³.",
        statistic=(
            "number of heads whose residual is larger; γ is γ*, the least that the lemma admits"
        ),
        claimed=NO_CASE,
        always=True,
        experiments=("check_bounds",),
        changed="2026-11-23, 2e73d7b",
        confirmed="2026-11-24, seed 1: holds",
    ),
    "heads bound": Statement(
        source="Dong et al. 2021, theorem 2.3",
        text=(
            "With max D_ii ≤ 1.256 the residual of H heads is at most (4γβH/√k)‖res‖³. γ and β are "
            "the largest over heads. For L layers the bound is iterated."
        ),
        statistic=(
            "number of random layers and networks whose residual is larger; γ is max γ* and β max "
            "β over heads, of networks over layers too"
        ),
        claimed=NO_CASE,
        always=True,
        experiments=("check_bounds", "run_collapse"),
        changed="2026-11-24, ab4f29b",
        confirmed="2026-11-24, seed 1: holds",
    ),
    "mlp bound": Statement(
        source="Dong et al. 2021, corollary 3.2",
        text=(
            "With max D_ii ≤ 1.256 and MLPs of Lipschitz constant λ the residual of a layer of H "
            "heads is at most (4γβHλ/√k)‖res‖³."
        ),
        statistic="number of random layers whose residual is larger, γ and β as above",
        claimed=NO_CASE,
        always=True,
        experiments=("run_collapse",),
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
            "local rate log‖res_L‖/log‖res_{L−1}‖ at the last layer; if fed with its own output, "
            "the order p of d' ~ d^p, of the seeds that fell"
        ),
        claimed=(2.5, 3.5),
        experiments=("run_collapse", "run_circle"),
        changed="2026-11-23, 6bc83c7",
        confirmed="2026-11-24, seed 1: holds",
    ),
    "mlp rate": Statement(
        source="Dong et al. 2021, corollary 3.2",
        text="With MLPs the collapse stays doubly exponential, of rate 3.",
        statistic="the same with MLPs",
        claimed=(2.5, 3.5),
        experiments=("run_collapse", "run_circle"),
        changed="2026-11-23, 6bc83c7",
        confirmed="2026-11-24, seed 1: holds",
    ),
    "norm": Statement(
        source="Dong et al. 2021, section 3.3",
        text="LayerNorm does not change the rate of 3.",
        statistic="local rate of pure attention with norms at the last layer",
        claimed=(2.5, 3.5),
        experiments=("run_collapse",),
        changed="2026-11-23, 6bc83c7",
        confirmed="2026-11-24, seed 1: holds",
    ),
    "skips": Statement(
        source="Dong et al. 2021, section 3.1",
        text=(
            "With skips more of the tokens' residual is left than in pure attention of the same "
            "weights."
        ),
        statistic="log10 of the residual ratio after the last layer, with skips minus without",
        claimed=ABOVE_ZERO,
        experiments=("run_collapse", "run_architectures"),
        changed="2026-11-23, 6bc83c7",
        confirmed="2026-11-24, seed 1: holds",
    ),
    "skips stop": Statement(
        source="Dong et al. 2021, abstract",
        text=(
            "Skips stop the output from degenerating: after the last layer (12 as published) more "
            "than a tenth of the input's residual ratio is left. The threshold of a tenth is ours."
        ),
        statistic=(
            "residual ratio after the last layer divided by the input's, of attention with skips"
        ),
        claimed=MORE_THAN_HALF,
        each=(0.1, math.inf),
        experiments=("run_collapse", "run_architectures"),
        changed="2026-11-24, 34f8027",
        confirmed="2026-11-24, seed 1: holds in part",
    ),
    "mlps stop": Statement(
        source="Dong et al. 2021, abstract",
        text=(
            "Skips and MLPs stop the output from degenerating. Of MLPs alone the introduction says "
            "that they slow it."
        ),
        statistic=(
            "the same ratio: of skips and MLPs together, of MLPs with their own skip as published, "
            "of MLPs alone"
        ),
        claimed=MORE_THAN_HALF,
        each=(0.1, math.inf),
        experiments=("run_collapse",),
        changed="2026-11-24, 34f8027",
        confirmed="2026-11-24, seed 1: holds in part",
    ),
    "mlps slow": Statement(
        source="Dong et al. 2021, section 3.2",
        text="MLPs slow the collapse: with them more of the residual is left than without.",
        statistic="log10 of the residual ratio after the last layer, with MLPs minus without",
        claimed=ABOVE_ZERO,
        experiments=("run_collapse",),
        changed="2026-11-23, 6bc83c7",
        confirmed="2026-11-24, seed 1: cannot be said",
    ),
    "curves": Statement(
        source="Dong et al. 2021, section 4.1",
        text=(
            "The published residuals by layer of BERT, ALBERT and XLNet could be one more of our "
            "initialisations, from layer 1 on, as far as the figure can be read."
        ),
        statistic=(
            "p of the published curve among ours, minus the largest p that is refused; at all "
            "layers together, with the values nearest to ours that the figure may show, by its "
            "place and by the tail of our distances"
        ),
        claimed=ABOVE_ZERO,
        experiments=("run_architectures",),
        changed="2026-11-24, 5358d2e",
        confirmed="2026-11-24, seed 1: holds",
    ),
    "collapse": Statement(
        source="Dong et al. 2021, section 4.1",
        text=(
            "Without skips and MLPs BERT, ALBERT and XLNet lose more than 99 % of the input's "
            "residual ratio."
        ),
        statistic="part of the input's residual ratio that is lost after the last layer",
        claimed=MORE_THAN_HALF,
        each=(0.99, math.inf),
        experiments=("run_architectures",),
        changed="2026-11-24, 34f8027",
        confirmed="2026-11-24, seed 1: holds",
    ),
    "chains": Statement(
        source="Dong et al. 2021, section 4.2",
        text="Products of attention matrices along a path lose rank with its length.",
        statistic=(
            "slope over lengths of log10 of the median residual ratio of P_path, at initialisation"
        ),
        claimed=BELOW_ZERO,
        experiments=("run_path_chains",),
        changed="2026-11-23, 6bc83c7",
        confirmed="2026-11-24, seed 1: holds",
    ),
    "short at first": Statement(
        source="Dong et al. 2021, section 4.2",
        text=(
            "Short paths carry the differences between tokens: sums of all paths of a length have "
            "their largest residual below the length that most paths have."
        ),
        statistic="length of the largest residual minus the length of most paths",
        claimed=MORE_THAN_HALF,
        each=BELOW_ZERO,
        experiments=("run_path_chains",),
        changed="2026-11-24, 34f8027",
        confirmed="2026-11-24, seed 1: holds",
    ),
    "short suffice": Statement(
        source="Dong et al. 2021, section 4.2",
        text=(
            "Short paths carry a trained network: as longer paths are let in, the accuracy comes "
            "at a mean length below L/2. Even growth would give L/2."
        ),
        statistic=(
            "mean length at which the accuracy comes, attention recomputed, minus L/2; none for a "
            "network that fell below the best baseline on the way"
        ),
        claimed=MORE_THAN_HALF,
        each=BELOW_ZERO,
        experiments=TRAINED,
        changed="2026-11-24, 34f8027",
        confirmed="2026-11-24, seed 1: holds in part",
    ),
    "one short": Statement(
        source="Dong et al. 2021, section 4.2",
        text="A few short paths alone do more than half of what the network was trained for.",
        statistic=(
            "accuracy of 20 sampled paths of length 1, minus the mean of the whole model's and the "
            "best baseline's"
        ),
        claimed=MORE_THAN_HALF,
        each=ABOVE_ZERO,
        experiments=TRAINED,
        changed="2026-11-24, 34f8027",
        confirmed="2026-11-24, seed 1: holds in part",
    ),
    "falls": Statement(
        source="Dong et al. 2021, section 4.2",
        text="The accuracy of paths falls with their length.",
        statistic=(
            "slope of the accuracy of 20 sampled paths over lengths 1 to L; none where no length "
            "is above the best baseline"
        ),
        claimed=MORE_THAN_HALF,
        each=BELOW_ZERO,
        experiments=TRAINED,
        changed="2026-11-24, 34f8027",
        confirmed="2026-11-24, seed 1: holds in part",
    ),
    "circle": Statement(
        source="Dong et al. 2021, section 4.3",
        text="Fed with its own output, trained attention lets two walkers fall together.",
        statistic=(
            "log10 of the walkers' distance after the last step (300 as published), of pure "
            "attention, and as published with a skip around it"
        ),
        claimed=MORE_THAN_HALF,
        each=(-math.inf, -2.0),
        experiments=("run_circle",),
        changed="2026-11-24, 5358d2e",
        confirmed="2026-11-24, seed 1: holds in part",
    ),
    "circle skip": Statement(
        source="Dong et al. 2021, section 4.3",
        text="A skip keeps walkers apart that fall together without it.",
        statistic=(
            "log10 of the walkers' distance after the last step with the skip, around the "
            "attention or as published around the recurrence; of the seeds whose walkers fall "
            "together without it"
        ),
        claimed=MORE_THAN_HALF,
        each=(-2.0, math.inf),
        experiments=("run_circle",),
        changed="2026-11-24, 5358d2e",
        confirmed="2026-11-24, seed 1: holds",
    ),
    "circle mlp": Statement(
        source="Dong et al. 2021, section 4.3",
        text="An MLP keeps walkers apart that fall together without it.",
        statistic="the same with the MLP, without the skip around the attention and as published",
        claimed=MORE_THAN_HALF,
        each=(-2.0, math.inf),
        experiments=("run_circle",),
        changed="2026-11-24, 5358d2e",
        confirmed="2026-11-24, seed 1: does not hold",
    ),
}
STATEMENTS |= ON_TRAINED | ELSEWHERE | FINDINGS


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
