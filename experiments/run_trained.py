"""Trained networks: the paper's questions on weights that somebody trained."""

from experiments.lab import cli
from experiments.paper.trained.experiment import EXPERIMENT

main, FLAGS = EXPERIMENT.main, EXPERIMENT.flags

if __name__ == "__main__":
    cli.run(main, FLAGS)
