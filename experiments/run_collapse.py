"""Rank collapse with depth: residual of the tokens, layer by layer, at initialisation."""

from experiments.lab import cli
from experiments.paper.collapse.experiment import EXPERIMENT

main, FLAGS = EXPERIMENT.main, EXPERIMENT.flags

if __name__ == "__main__":
    cli.run(main, FLAGS)
