"""Width against depth at equal parameters: the sorting task on networks of one size.

The published code's `test_width` compares a shallow, wide network with a deep, narrow one of about
as many parameters (Dong, Cordonnier and Loukas 2021, its appendix). Here every depth asked for gets
the width whose number of parameters is nearest to the reference network's.

    python -m experiments.run_width --depths=1 --depths=2 --depths=4 --depths=8

Two cores: 142 seconds with --num_seeds=5 and the default depths. Expected: 0.985 of the letters
right at depth 1, 0.995 at depth 12.
"""

from absl import flags

from experiments import run_sort
from experiments.shell import cli
from experiments.shell.entry import Entry
from experiments.trained import arguments, training
from experiments.width import cases, figures, results

FLAGS = arguments.make_flags("width", **run_sort.DEFAULTS)
flags.DEFINE_boolean("no_repeat", False, "No letter twice in a sequence.", flag_values=FLAGS)
flags.DEFINE_multi_integer(
    "depths", (1, 2, 4, 6, 12), "Depths compared; the parameters are those of --depth and "
    "--hidden_dim.", lower_bound=1, flag_values=FLAGS,
)  # fmt: skip


def main(options: flags.FlagValues) -> None:
    setups = cases.make_cases(options)
    with training.open_run(options, "width") as run:
        found = training.results_by_case(options, setups, run, cases.whole_model)
        summary = run.publish(
            rows=lambda: results.rows_of(setups, found),
            figures=figures.figures_of(setups, found),
            summary=lambda: results.summary_of(setups, found),
        )
    results.show(summary)
    print(f"written to {run.path}")


ENTRY = Entry(
    title="Width against depth",
    claim="The published code (`test_width`) sets a shallow, wide network beside a deep, narrow "
    "one of about as many parameters, on sorting; it gives no number. If short paths carry a "
    "trained network, as section 4.2 says, depth should buy little at equal parameters.",
    presets={
        "quick": ("--depths=1", "--depths=6", "--n_epochs=15", "--n_eval_data=100"),
        "paper": ("--num_seeds=5",),
    },
    compare=results.compare,
    reading=results.reading,
    captions={
        "width": "Left: training loss, mean and standard deviation over seeds. Right: accuracy "
        "against depth, the width chosen so that the number of parameters stays."
    },
)


if __name__ == "__main__":
    cli.run(main, FLAGS)
