"""Path chains: how products of attention matrices lose rank, and how large paths are by length."""

from experiments.lab import cli
from experiments.paper.path_chains import EXPERIMENT

main, FLAGS = EXPERIMENT.main, EXPERIMENT.flags

if __name__ == "__main__":
    cli.run(main, FLAGS)
