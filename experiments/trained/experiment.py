"""The experiment on paths by length: train an ensemble, measure it, and show what was measured.

A binary gives a `Setup`; everything shown is made from the saved arrays of its run folder.
"""

from typing import Any

from absl import flags

from experiments.trained.figures import figures_of
from experiments.trained.measure import measure_of, path_lengths
from experiments.trained.results import rows_of, show, summary_of
from experiments.trained.training import Setup, open_run, results_of


def run_experiment(options: flags.FlagValues, setup: Setup) -> dict[str, Any]:
    """The whole experiment; returns its summary, which is also written and printed.

    Raises:
        ValueError: Flags that do not fit each other.
        RunError: A folder that cannot be used.
    """
    if options.path_len > options.depth:
        raise ValueError(f"path_len={options.path_len} is larger than depth={options.depth}")
    with open_run(options, setup.name, setup.extra) as run:
        constants = {"lengths": path_lengths(options)}
        measure = measure_of(options, setup)
        results = results_of(options, setup, run, measure, constants=constants)
        summary = run.publish(
            rows=lambda: rows_of(results, options),
            figures=figures_of(results, setup, options.semantics),
            summary=lambda: summary_of(results, setup),
        )
    show(setup.title, summary)
    print(f"written to {run.path}")
    return summary


__all__ = ["Setup", "run_experiment"]
