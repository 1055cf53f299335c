"""Trainability: which residual designs train at which depth, and why deep Post-LN does not."""

from experiments.lab import cli
from experiments.note.trainability import EXPERIMENT

main, FLAGS = EXPERIMENT.main, EXPERIMENT.flags

if __name__ == "__main__":
    cli.run(main, FLAGS)
