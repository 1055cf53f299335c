"""Counts violations of the paper's lemma and bounds over random draws, in float64.

Draws networks of several shapes with random weight, bias and token sizes, and checks, wherever
the lemma's condition max D_ii ≤ 1.2564312 holds: the technical lemma (I − D)P̃ ≤ P ≤ (I + 2D)P̃
entry by entry, the bound of every head, and the published bounds of every layer and of the whole
stack, with γ*; and on every draw whose rows share keys and biases, without any condition, those
with sums over heads, around the mean token and of the diameter. Some networks have MLPs, skips,
padding, and a causal mask, under which the latter bounds are refused. Then two heads built so
that the published bound of a layer is below the residual (`--sizes`: n = d; from 180 on), and
gradient ascent on weights and tokens against the bounds that hold. Prints the counts and the
ranges of γ* and tightness. There is no such table in the paper; of random draws the expected number
of violations is 0. Most of the time goes into compiling one program for each kind of network:

    python -m experiments.check_bounds --num_draws=5000
"""

from functools import partial

from absl import flags

from experiments.bounds.ascent import climb
from experiments.bounds.construction import SIZES, measure
from experiments.bounds.entry import ENTRY
from experiments.bounds.figures import figures_of
from experiments.bounds.measure import CASES, draw_case
from experiments.bounds.results import rows_of, summary_of
from experiments.shell import cli

FLAGS = cli.make_flags("check_bounds", shows="tightness_max")
define = cli.definer(FLAGS)
define("integer", "num_draws", 5000, "Networks drawn.", lower_bound=1)
define("integer", "seed", 0, "Base seed.", lower_bound=0)
define("list", "cases", [case.name for case in CASES], "Kinds of networks, tokens x width x heads.")
define("list", "sizes", [str(n) for n in SIZES], "Tokens and width of the construction, even.")
define("integer", "ascent_steps", 400, "Steps of gradient ascent.", lower_bound=0)


def main(options: flags.FlagValues) -> None:
    names = [case.name for case in CASES]
    for name in options.cases:
        if name not in names:
            raise ValueError(f"--cases={name} is not one of {', '.join(names)}")
    if not options.cases:
        raise ValueError("--cases is empty")
    sizes = tuple(_size(text) for text in options.sizes)
    if not sizes:
        raise ValueError("--sizes is empty")
    each = -(-options.num_draws // len(options.cases))
    with cli.open_run(options, "check_bounds") as run:
        draws = {
            case: run.cached(case.name, partial(draw_case, options.seed, i, each, CASES))
            for i, case in enumerate(CASES)
            if case.name in options.cases
        }
        built = run.cached("construction", partial(measure, sizes))
        climbed = run.cached("ascent", partial(climb, options.seed, options.ascent_steps))
        counts = run.publish(
            rows=partial(rows_of, draws),
            figures=figures_of(draws, sizes, built),
            summary=partial(summary_of, draws, sizes, built, climbed),
        )
        for name, value in counts.items():
            print(f"{name:28s} {'none' if value is None else format(value, '.6g')}")
        print(f"written to {run.path}")


def _size(text):
    if not text.isdigit() or int(text) % 2 or int(text) < 6:
        raise ValueError(f"--sizes={text} is not an even number of 6 or more")
    return int(text)


__all__ = ["ENTRY", "FLAGS", "main"]

if __name__ == "__main__":
    cli.run(main, FLAGS)
