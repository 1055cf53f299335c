"""Attention forms: dot products, scaled or not, and additive attention against the width d_k."""

from experiments.lab import cli
from experiments.note.attention_forms.experiment import EXPERIMENT

main, FLAGS = EXPERIMENT.main, EXPERIMENT.flags

if __name__ == "__main__":
    cli.run(main, FLAGS)
