"""Circle: a one-layer network that continues two walks along a circle, fed with its own output.

Reproduces the circle figure of Dong, Cordonnier and Loukas (2021, section 4.3): trained to predict
the next points of two walkers on the two halves of a circle, then applied to its own output 300
times. Do the two points fall together?

The commands are the published ones and train the published network: a skip around the attention in
every variant, dropout 0.1 on points, attention weights, branches and last state. --do_mlp adds an
MLP with its skip; --circle_skip is a skip around the recurrence: trained on the points plus those
of the batch before, fed with the sum of its last input and output. --compare runs "base",
"circle_skip" and "mlp" at widths 32, 64 and 128; --compare=theory takes the skip around the
attention away and adds it again, with and without an MLP.

    python -m experiments.run_circle --width 2 --depth 1 --num_labels 2 --seq_len 10 \\
        --n_epochs 70 --n_train_data 1000 --n_repeat 2 --n_eval_data 300 --hidden_dim 32
    python -m experiments.run_circle --compare --num_seeds=64

Two CPU cores: 260 s of CPU time for 64 seeds of the three variants at width 128, 50 s for 8 seeds
of --compare=theory at width 32. What to expect is a share of seeds, not a picture: the published
code itself, run with eight seeds, falls together in 1, 3, 1 of 8 at the three widths, with
--circle_skip in none, with --do_mlp in 2, 1, 2. The published picture rests on the seed of its
command, 2: of the eight at width 32 the one that falls. results.csv has a row per seed: the
multiplier of the difference of two points at the collapsed point and the steps it predicts, the
law's order, and the heads' τ = P_11 − P_21; arrays.npz the walks.
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
    shows="distance_at_end",
    monitor=False,
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
