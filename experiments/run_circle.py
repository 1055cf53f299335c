"""Circle: a one-layer network that continues two walks along a circle, fed with its own output.

Reproduces the circle figure of Dong, Cordonnier and Loukas (2021, section 4.3). A network learns to
predict the next points of two walkers on the two halves of a circle. It is then applied to its own
output 300 times. Do the two points fall together?

The published commands work here and train the published network, which has in every variant a skip
around the attention, and dropout 0.1 on points, attention weights, branches and the last state.

    --do_mlp       adds an MLP with its own skip
    --circle_skip  adds a skip around the recurrence: trains the network on the points plus those
                   of the batch before, and fed with the sum of its last input and output
    --compare      "published" runs the network as it is ("base"), with --circle_skip and with
                   --do_mlp, at widths 32, 64 and 128; "theory" runs networks with and without the
                   skip around the attention, with and without an MLP; "pure" runs attention alone,
                   which the paper means, next to "base" and to attention with a skip or an MLP

    python -m experiments.run_circle --width 2 --depth 1 --num_labels 2 --seq_len 10 \\
        --n_epochs 70 --n_train_data 1000 --n_repeat 2 --n_eval_data 300 --hidden_dim 32
    python -m experiments.run_circle --compare=published --num_seeds=64

On two cores, 64 seeds of the three variants at width 128 take 260 s of CPU time, and 32 seeds with
--compare=pure at width 32 take 55 s. Expect a share of seeds, not one picture;
`walks.PUBLISHED_FELL` has the share for eight seeds of the published code.

results.csv has a row for each seed. For the difference of the two points it has the multiplier at
the collapsed point, the number of steps that this multiplier predicts, and the order of the law. It
also says whether τ = P_11 − P_21 of the heads begin with opposite signs. arrays.npz has the walks.
"""

import functools
import itertools
from collections.abc import Iterator, Mapping

import numpy as np

from experiments.circle import walks
from experiments.circle.circle_figures import (
    ByCase,
    describe_network,
    distance_figure,
    shares_figure,
    steps_figure,
    trajectories_figure,
)
from experiments.lab import (
    Experiment,
    Finding,
    Flags,
    Options,
    Run,
    RunFolder,
    cli,
    describe_figures,
    open_run,
    shared_flags,
)
from experiments.train import arguments
from experiments.train.train_networks import save_models, train_networks
from experiments.train.trained_tasks import TrainedTask
from experiments.verdicts import (
    PROTOCOL,
    Comparison,
    Row,
    TableRow,
    fisher_exact,
    make_row,
    mean_row,
    seed_rows,
)
from rank_collapse.printed import format_count

# What the published code trains: a skip around the attention in each of them.
PUBLISHED = ("base", "circle_skip", "mlp")

# What the theory covers: the sublayers one by one, with and without a skip around the attention.
THEORY = ("attention", "attention+skip", "attention+mlp", "attention+skip+mlp")
COMPARED = {
    "published": PUBLISHED,
    "theory": THEORY,
    "all": (*PUBLISHED, *THEORY),
    "pure": ("base", *THEORY[:3]),
}
WIDTHS = (32, 64, 128)

# {variant: (statement that it keeps walkers apart, the variant without what does)}
APART = {
    "circle_skip": ("circle skip", "base"),
    "attention+skip": ("circle skip", "attention"),
    "mlp": ("circle mlp", "base"),
    "attention+mlp": ("circle mlp", "attention"),
}
ORDERS = {"attention": "rate", "attention+mlp": "mlp rate"}  # without skips

FLAGS = arguments.make_flags(
    "circle",
    shows="distance_at_end",
    monitor=False,
    depth=1,
    num_heads=2,
    d_model=32,
    num_tokens=2,
    num_labels=2,
    n_train_data=1000,
    n_eval_data=300,
    n_epochs=70,
    batch_size=30,
    learning_rate=1e-5,
    weight_decay=0.0,
    dropout=0.1,
)
FLAGS.define(
    "boolean",
    "circle_skip",
    False,
    "A skip around the recurrence: each step's input is the sum of the last step's input and "
    "output; trained on the points plus the points of the batch before.",
)
FLAGS.define(
    "enum",
    "compare",
    "",
    "Several variants at each of the --widths: the three published ones, the theory's (attention "
    "with and without a skip around it, with and without an MLP), all, or pure attention beside "
    "what keeps walkers apart.",
    ["", *COMPARED],
)
shared_flags.define_numbers(
    FLAGS, "widths", list(WIDTHS), "Model widths of --compare.", lower_bound=3
)
text = "Accepted as in the published commands; this experiment has no use for it."
for name in ("n_repeat", "path_len", "n_paths"):
    FLAGS.define("integer", name, None, text)
FLAGS.define("boolean", "no_sub_path", False, text)

Cases = Mapping[str, TrainedTask]  # {"variant, d=width": what is trained}


def make_cases(options: Options) -> Cases:
    """Makes the training tasks of the flags, {"variant, d=width": task}.

    Args:
        options: The flags.

    Raises:
        ValueError: Flags that do not fit each other.
    """
    if options.num_labels != 2:
        raise ValueError(
            f"num_labels={options.num_labels} is not 2, the number of coordinates of a point"
        )
    if options.n_train_data < 4:
        raise ValueError(f"n_train_data={options.n_train_data} points are too few for two walks")
    chosen = {"circle_skip": options.circle_skip, "mlp": options.do_mlp}
    parts = [part for part, is_chosen in chosen.items() if is_chosen]
    names = [f"{'+'.join(parts) or 'base'}, d={options.d_model}"]
    if options.compare:
        pairs = itertools.product(options.widths, COMPARED[options.compare])
        names = [f"{variant}, d={width}" for width, variant in pairs]
    return {name: walks.make_case(options, name) for name in names}


def measure(options: Options, cases: Cases, folder: RunFolder) -> ByCase:
    """Trains the network of every case, and lets every seed walk on its own output."""
    return train_networks(
        options, cases, folder, functools.partial(walks.measure_walk, options.n_eval_data)
    )


def make_rows(results: ByCase) -> Iterator[TableRow]:
    """Makes a row for each case and seed; the walks by step are in arrays.npz.

    Args:
        results: {case: arrays of all seeds [s, ...]}.
    """
    for name, case in results.items():
        variant, width = walks.split_name(name)
        for row in seed_rows(walks.measure_seeds(case)):
            columns: TableRow = {"case": name, "variant": variant, "width": width}
            for column, value in row.items():
                is_nan = value != value
                number = int(value) if isinstance(value, bool) else value
                columns[column] = None if is_nan else number
            yield columns


def judge_claims(results: ByCase) -> Iterator[Row]:
    """Tests in which variants the walkers meet, in the published networks and in pure attention;
    whether a skip or an MLP keeps apart walkers that meet without it; and how fast they meet.

    Args:
        results: {case: arrays of all seeds [s, ...]}.
    """
    measured, limit = walks.fine_cases(results), np.log10(walks.TOGETHER)
    ends = {name: walks.log10_at_end(case) for name, case in results.items()}
    for (variant, width), case in measured.items():
        key, baseline = APART.get(variant, ("", ""))
        end, other = ends[case["name"]], measured.get((baseline, width))
        network = describe_network(variant, width)
        if variant in ("base", "attention"):
            yield make_row("circle", network, end)
        if other is not None:
            both = np.intersect1d(case["seed"], other["seed"])
            fell, stayed = end[both] < limit, ends[other["name"]][both] >= limit
            note = f"those of {format_count(len(both), 'seed')} that fall without; "
            note += f"{np.sum(fell & stayed)} fall only with"
            yield make_row(key, network, end[both][~stayed], note=note)
        if variant in ORDERS:
            yield mean_row(ORDERS[variant], f"recurrent, {network}", case["orders"])


def compare_results(results: ByCase) -> Iterator[Comparison]:
    """Compares counts and orders of the law with the published code's and the theory's.

    Args:
        results: {case: arrays of all seeds [s, ...]}.
    """
    for cell, case in walks.fine_cases(results).items():
        fell, name, published, note = case["fell"], describe_network(*cell), None, ""
        count, total = int(fell.sum()), len(fell)
        if cell in walks.PUBLISHED_FELL:
            counts = walks.PUBLISHED_FELL[cell], walks.PUBLISHED_SEEDS
            published = "{} of {}".format(*counts)
            note = "published is a run of the published code with seeds 1 to 8; Fisher's exact p = "
            note += f"{fisher_exact(count, total, *counts):.2g}"
        text = f"{name}: seeds that fell together"
        yield Comparison(text, f"{count} of {total}", published, note)
        if case["orders"].size:
            theory = 3 if cell[0] in ORDERS else 1
            order = float(np.median(case["orders"]))
            text = f"{name}: order p of d' ~ d^p, median"
            yield Comparison(text, order, theory, source="theory")
        # δ' = Σ_h τ_h δ W_h: do heads of opposite sign keep two walkers apart?
        opposite = case["opposite_at_start"]
        opposite_fell, num_opposite = int(fell[opposite].sum()), int(opposite.sum())
        same_fell, num_same = count - opposite_fell, total - num_opposite
        if count and num_opposite and num_same:
            p = fisher_exact(opposite_fell, num_opposite, same_fell, num_same)
            yield Comparison(
                f"{name}: fell, of those whose heads' τ begin with opposite signs",
                f"{opposite_fell} of {num_opposite}",
                "fewer",
                note=f"of the same sign {same_fell} of {num_same}; Fisher's exact p = {p:.2g}",
                source="theory",
            )


def make_finding(results: ByCase) -> Finding | None:
    """Reports how many seeds collapse in pure attention, and with the parts that should prevent it.

    Args:
        results: {case: arrays of all seeds [s, ...]}.

    Returns:
        The finding; None if attention alone was not measured.
    """
    measured = walks.fine_cases(results)
    _, width = next(iter(measured))
    fell = {variant: case["fell"] for (variant, d), case in measured.items() if d == width}
    if "attention" not in fell:
        return None
    remedies = {"attention+skip": "a skip around the attention", "attention+mlp": "an MLP"}
    counts = [f"with {text} in {fell[v].sum()}" for v, text in remedies.items() if v in fell]
    pure = fell["attention"]
    return Finding(
        "shares",
        "Fed with its own output, a layer of attention alone lets two walkers on a circle fall "
        f"together in {pure.sum()} of {format_count(len(pure), 'seed')}, {', '.join(counts)} "
        f"(width {width}).",
    )


def describe_limit(options: Flags) -> str:
    """Describes what few seeds of the published command cannot show, and the command that shows it.

    Args:
        options: The flags.

    Returns:
        Two lines; "" if variants are compared, or if there are enough seeds for a share.
    """
    if options.compare or options.num_seeds >= PROTOCOL.rounds[0]:
        return ""
    fell = [count for (variant, _), count in walks.PUBLISHED_FELL.items() if variant == "base"]
    return (
        f"{format_count(options.num_seeds, 'seed')} cannot show whether walkers fall together: "
        f"of the published network {min(fell)} to {max(fell)} of {walks.PUBLISHED_SEEDS} do, with "
        "--circle_skip none. Pure attention falls in most seeds:\n    "
        "python -m experiments.run_circle --compare=pure --widths=32 --num_seeds=32 --n_epochs=7 "
        "--learning_rate=1e-4"
    )


EXPERIMENT = Experiment(
    order=80,
    title="Circle: recurrent attention",
    brief="a layer that is fed with its own output, in the form of the published code and in the "
    "form of the theory: how many seeds collapse, and how fast",
    claim="A network of one layer learns to continue the walks of two points (walkers) along a "
    "circle. After training, it reads its own output as its next input, again and again (section "
    "4.3). With attention alone, the two walkers fall together: they come to the same point. A "
    "skip or an MLP counteracts this collapse.",
    presets={
        # A tenth of the steps at ten times the rate: of seed 0 all answers are the same.
        "quick": "--compare=pure --widths=32 --num_seeds=32 --n_epochs=7 --learning_rate=1e-4",
        "reported": "--seed=3000 --compare=all --num_seeds=7",
        "tiny": "--num_seeds=2 --d_model=4 --n_train_data=6 --n_eval_data=4 --n_epochs=1 "
        "--batch_size=3 --widths=4",
    },
    figures=describe_figures(shares_figure, steps_figure, trajectories_figure, distance_figure),
)


def main(options: Flags) -> Run:
    """Measures the points, the combinations of flag values, that the run folder lacks; saves the
    table, figures and claims."""
    with open_run(options, make_cases) as run:
        for point in run.measure(measure):
            results = point.results
            point.save_table(make_rows(results))
            point.save_figure("shares", shares_figure, results)
            point.save_figure("steps", steps_figure, results)
            point.save_figure("trajectories", trajectories_figure, results)
            point.save_figure("distance", distance_figure, results)
            point.save_claims(judge_claims(results))
            point.save_comparisons(compare_results(results))
            point.save_finding(make_finding(results))
            save_models(point, point.setup)
        run.finish()
    if (text := describe_limit(options)) and not options.mode.is_read:
        print(text)
    return run


if __name__ == "__main__":
    cli.run(main, FLAGS)
