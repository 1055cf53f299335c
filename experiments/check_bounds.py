"""Counts violations of the paper's lemma and bounds over random draws, in float64."""

from experiments.lab import cli
from experiments.paper.bounds.experiment import EXPERIMENT

main, FLAGS = EXPERIMENT.main, EXPERIMENT.flags

if __name__ == "__main__":
    cli.run(main, FLAGS)
