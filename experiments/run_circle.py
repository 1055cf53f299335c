"""Circle: a one-layer network that continues two walks along a circle, fed with its own output."""

from experiments.lab import cli
from experiments.paper.circle.experiment import EXPERIMENT

main, FLAGS = EXPERIMENT.main, EXPERIMENT.flags

if __name__ == "__main__":
    cli.run(main, FLAGS)
