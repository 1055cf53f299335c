"""The experiment on the paths of a trained network, the same for each task."""

import functools
from collections.abc import Callable

from experiments.lab import Flags, Shown, open_run
from experiments.paper.paths import results
from experiments.paper.paths.figures import FIGURES
from experiments.paper.paths.measure import measure, sampled_lengths
from experiments.train.training import TrainedTask, model_files

CLAIM = (
    "In a network with 6 layers and skips, short paths alone nearly reach the accuracy of the full "
    "model. The accuracy of a path falls with its length (section 4.2)."
)


def define_path_flags(flag_values: Flags) -> None:
    """Defines the flags of the evaluation by path length.

    Args:
        flag_values: Of the experiment.
    """
    for name, default, least, text in (
        ("path_len", 0, 0, "Shortest path length evaluated; every length from it to the depth."),
        ("n_paths", 5, 1, "Paths in a sampled set; sets of 5 and of 20 are evaluated too."),
        ("n_repeat", 5, 1, "Sampled sets per length and size."),
    ):
        flag_values.define("integer", name, default, text, lower_bound=least)
    flag_values.define(
        "boolean",
        "no_sub_path",
        False,
        "Recomputed paths without their layers' skips and learned norms.",
    )


def run_paths(
    options: Flags,
    make_setup: Callable[[Flags], TrainedTask],
    task: str,
    success: str = "",
) -> Shown:
    """Trains networks on a task, evaluates their paths by length, and shows what these carry.

    Args:
        options: The flags, those of `define_path_flags` among them.
        make_setup: options → what is trained.
        task: The setting of the statements' rows.
        success: What the accuracy is the share of, for the report's first screen; "" where the task
            is not on it.

    Raises:
        ValueError: Flags that do not fit each other.
    """

    def make_checked(point):
        sampled_lengths(point)
        return make_setup(point)

    make_finding = functools.partial(results.make_finding, success)
    with open_run(options, make_checked, lambda setup: setup.extra) as run:
        points = run.measure(measure)
        return run.publish(
            points,
            table=results.make_rows,
            figures=FIGURES,
            claims=functools.partial(results.judge_claims, task),
            compare=results.compare_results,
            finding=make_finding if success else lambda *_: None,
            files=model_files,
        )
