"""Architectures."""

from experiments.lab import cli
from experiments.paper.architectures.experiment import EXPERIMENT

main, FLAGS = EXPERIMENT.main, EXPERIMENT.flags

if __name__ == "__main__":
    cli.run(main, FLAGS)
