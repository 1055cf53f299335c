"""Circle: a one-layer network that continues two walks along a circle, fed with its own output.

Reproduces the circle figure of Dong, Cordonnier and Loukas (2021, section 4.3): trained to predict
the next points of two walkers on the two halves of a circle, then applied to its own output 300
times. Pure attention lets the two points fall together, a skip keeps them apart.

Variants: "attention" has neither skip nor MLP, "skip" a skip around the attention, "mlp" an MLP
with its own skip and none around the attention, "skip+mlp" both, which is what the published
code's --do_mlp trains. The published learning rate 1e-5 learns the single step here (error 0.03);
at 1e-3 even pure attention learns to look at its own point alone and does not collapse.

    python -m experiments.run_circle --width 2 --depth 1 --num_labels 2 --seq_len 10 \\
        --n_epochs 70 --n_train_data 1000 --n_repeat 2 --n_eval_data 300 --hidden_dim 32

--circle_skip and --do_mlp choose the other variants, --compare all of them at widths 32, 64, 128.
Two CPU cores: 6 seconds for two seeds of one variant, 88 for eight seeds with --compare. Expected
at width 32: the points fall together in every seed without a skip, in none with one.
"""

import functools

from absl import flags

from experiments.circle.cases import COMPARED, WIDTHS, make_cases, roll_out
from experiments.circle.entry import ENTRY
from experiments.circle.figures import figures_of
from experiments.circle.results import rows_of, show, summary_of
from experiments.shell import cli
from experiments.trained import arguments, training

FLAGS = arguments.make_flags(
    "circle",
    width=2,
    depth=1,
    hidden_dim=32,
    seq_len=2,
    num_labels=2,
    n_train_data=1000,
    n_eval_data=300,
    n_epochs=70,
    batch_sz=30,
    learning_rate=1e-5,
    weight_decay=0.0,
)
flags.DEFINE_boolean(
    "circle_skip", False, "A skip around the recurrence: each step's input is the sum of the last "
    "step's input and output; trained on the points plus those of the batch before.",
    flag_values=FLAGS,
)  # fmt: skip
arguments.define_optional_choice(
    FLAGS, "compare", "published", COMPARED,
    "Several variants at each of the --widths: the three published ones, the theory's (attention "
    "with and without a skip around it, with and without an MLP), or all.",
)  # fmt: skip
flags.DEFINE_multi_integer(
    "widths", WIDTHS, "Model widths of --compare; may be given several times.", lower_bound=3,
    flag_values=FLAGS,
)  # fmt: skip
arguments.accept_unused(FLAGS, "n_repeat", "path_len", "n_paths", "no_sub_path")


def main(options: flags.FlagValues) -> None:
    cases = make_cases(options)
    with training.open_run(options, "circle") as run:
        measure = functools.partial(roll_out, options.n_eval_data)
        results = training.results_by_case(options, cases, run, measure)
        summary = run.publish(
            rows=lambda: rows_of(results),
            figures=figures_of(results),
            summary=lambda: summary_of(results),
        )
    show(summary)
    print(f"written to {run.path}")


__all__ = ["ENTRY", "FLAGS", "main"]


if __name__ == "__main__":
    cli.run(main, FLAGS)
