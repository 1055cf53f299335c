"""Residual designs against depth: how updates change the output, and how tokens collapse."""

from experiments.lab import cli
from experiments.note.stability.experiment import EXPERIMENT

main, FLAGS = EXPERIMENT.main, EXPERIMENT.flags

if __name__ == "__main__":
    cli.run(main, FLAGS)
