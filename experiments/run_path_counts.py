"""Path counts: how many of a network's paths have each length."""

from experiments.lab import cli
from experiments.paper.path_counts import EXPERIMENT

main, FLAGS = EXPERIMENT.main, EXPERIMENT.flags

if __name__ == "__main__":
    cli.run(main, FLAGS)
