"""Width against depth at equal parameters: the sorting task on networks of one size.

The published code's `test_width` compares a shallow, wide network with a deep, narrow one of about
as many parameters (Dong, Cordonnier and Loukas 2021, its appendix). Here every depth asked for gets
the width whose number of parameters is nearest to the reference network's.

    python -m experiments.run_width --depths=1 --depths=2 --depths=4 --depths=8

Two CPU cores: 142 seconds with --num_seeds=5 and the default depths. Expected: 0.985 of the letters
right at depth 1, 0.995 at depth 12.
"""

from absl import flags

from experiments import run_sort
from experiments.shell import cli
from experiments.trained import arguments, training
from experiments.width.cases import make_cases, whole_model
from experiments.width.entry import ENTRY
from experiments.width.figures import figures_of
from experiments.width.results import rows_of, show, summary_of

FLAGS = arguments.make_flags("width", shows="accuracy", **run_sort.DEFAULTS)
flags.DEFINE_boolean("no_repeat", False, "No letter twice in a sequence.", flag_values=FLAGS)
flags.DEFINE_multi_integer(
    "depths", (1, 2, 4, 6, 12), "Depths compared; the parameters are those of --depth and "
    "--hidden_dim.", lower_bound=1, flag_values=FLAGS,
)  # fmt: skip


def main(options: flags.FlagValues) -> None:
    cases = make_cases(options)
    with training.open_run(options, "width") as run:
        results = training.results_by_case(options, cases, run, whole_model)
        summary = run.publish(
            rows=lambda: rows_of(results, cases),
            figures=figures_of(results, cases),
            summary=lambda: summary_of(results, cases),
        )
    show(summary)
    print(f"written to {run.path}")


__all__ = ["ENTRY", "FLAGS", "main"]


if __name__ == "__main__":
    cli.run(main, FLAGS)
