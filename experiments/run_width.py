"""Width against depth at equal parameters: the sorting task on networks of one size."""

from experiments.lab import cli
from experiments.paper.width import EXPERIMENT

main, FLAGS = EXPERIMENT.main, EXPERIMENT.flags

if __name__ == "__main__":
    cli.run(main, FLAGS)
