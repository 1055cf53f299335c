"""Transformer: an encoder-decoder that copies, reverses, sorts or translates, and its attention."""

from experiments.lab import cli
from experiments.note.transformer import EXPERIMENT

main, FLAGS = EXPERIMENT.main, EXPERIMENT.flags

if __name__ == "__main__":
    cli.run(main, FLAGS)
