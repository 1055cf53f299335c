"""Sorting: a network trained to sort letters, and the accuracy of its paths of each length alone.

Reproduces the sorting panel of the path-length figure in Dong, Cordonnier and Loukas (2021, section
4.2). Measures the full model and the baseline, with error bars over seeds and repeats, and compares
sampled sets of paths with the exact sum over all paths of each length.

    python -m experiments.run_sort --width 2 --depth 6 --hidden_dim 48 --seed 2 --num_labels 10 \\
        --seq_len 8 --n_epochs 65 --path_len 0 --n_paths 5 --n_train_data 1000 --n_repeat 5 \\
        --n_eval_data 200 --no_sub_path

Takes 59 seconds for 16 seeds on two cores. docs/experiments/run_sort.md has the results, and
`experiments.path_accuracy.evaluation` says what is measured.
"""

from experiments.lab import (
    Experiment,
    Flags,
    Options,
    Run,
    cli,
    describe_figures,
    open_run,
)
from experiments.path_accuracy.accuracy_figures import (
    loss_figure,
    paths_figure,
    shares_figure,
    short_paths_figure,
)
from experiments.path_accuracy.accuracy_results import (
    CLAIM,
    compare_results,
    judge_claims,
    make_finding,
    make_rows,
)
from experiments.path_accuracy.evaluation import measure_paths, sampled_lengths
from experiments.train import arguments
from experiments.train.sorting import make_sorting_task
from experiments.train.train_networks import save_models
from experiments.train.trained_tasks import ALONE, TrainedTask

FLAGS = arguments.make_flags(
    "sort",
    depth=6,
    num_heads=2,
    d_model=48,
    num_tokens=8,
    num_labels=10,
    n_train_data=1000,
    n_eval_data=200,
    n_epochs=65,
    batch_size=30,
    learning_rate=1e-3,
    weight_decay=0.0,
    dropout=0.1,
    no_repeat=False,
    path_len=0,
    n_paths=5,
    n_repeat=5,
    no_sub_path=False,
)


def make_task(options: Options) -> TrainedTask:
    """Makes the training task of the flags: a network that sorts letters.

    Raises:
        ValueError: Flags that do not fit each other.
    """
    sampled_lengths(options)  # refuses --path_len above --depth
    return make_sorting_task(options)


EXPERIMENT = Experiment(
    order=50,
    title="Paths: sorting",
    brief="accuracy by path length of networks that sort: 5 paths, 20 paths and all paths",
    claim=CLAIM,
    presets={
        "quick": "--num_seeds=6 --n_repeat=2 --no_sub_path --depth=4 --n_epochs=5 "
        "--learning_rate=2e-3 --n_eval_data=60",
        "reported": "--seed=3000 --num_seeds=6 --no_sub_path",
        "tiny": f"{arguments.TINY} --n_paths=2 --n_repeat=1 --num_labels=4",
    },
    figures=describe_figures(short_paths_figure, paths_figure, shares_figure, loss_figure),
)


def main(options: Flags) -> Run:
    """Measures the points, the combinations of flag values, that the run folder lacks; saves the
    table, figures and claims."""
    with open_run(options, make_task) as run:
        for point in run.measure(measure_paths):
            results, task = point.results, point.setup
            point.save_table(make_rows(results, task))
            point.save_figure("short_paths", short_paths_figure, results, task)
            point.save_figure("paths", paths_figure, results, task)
            point.save_figure("shares", shares_figure, results, task)
            point.save_figure("loss", loss_figure, results, task)
            point.save_claims(judge_claims(results, task, "sorting"))
            point.save_comparisons(compare_results(results, task))
            point.save_finding(make_finding(results, task, "of the letters are sorted"))
            save_models(point, {ALONE: task})
        return run.finish()


if __name__ == "__main__":
    cli.run(main, FLAGS)
