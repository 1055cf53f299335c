"""Checkpoints of one model by step: found by their labels, drawn over training."""

import numpy as np
import pytest

from experiments.architectures.models import Model
from experiments.architectures.results import Results
from experiments.architectures.training import training_figures, trainings_of

DEPTH = 2


def result(label, size, texts=3):
    rng = np.random.default_rng(len(label))
    arrays = {
        f"{label}/pretrained0/residuals/{variant}/published/residual_ratio": rng.random((texts, 3))
        for variant in ("SAN", "SAN+MLP", "SAN+skip", "Transformer")
    }
    arrays[f"{label}/pretrained0/lengths/size"] = np.tile(size, (texts, 1))
    return Results(arrays, Model(label, label, {"model_type": "gpt_neox"}, True))


def test_labels_that_end_in_a_step():
    labels = ("pythia@step1000", "step8", "step0", "bert", "pythia@step8", "lone-checkpoint-5")
    found = trainings_of([result(label, [1.0, 0, 0]) for label in labels])
    steps = {name: list(group) for name, group in found.items()}
    assert steps == {"pythia": [8, 1000], "gpt_neox": [0, 8]}


@pytest.mark.parametrize("texts", [3, 1])
def test_the_mean_length_is_drawn_by_step(texts):
    sizes = {"step0": [3.0, 1.0, 0.0], "step10": [0.0, 1.0, 3.0]}
    results = [result(label, size, texts) for label, size in sizes.items()]
    ((name, draw),) = training_figures(results).items()
    figure = draw()
    assert name == "training_gpt_neox"
    residuals, length = figure.axes  # no cosines and no effective depths were measured
    np.testing.assert_allclose(length.lines[0].get_data(), [[0, 10], [0.25, 1.75]])
    assert len(residuals.lines) == 4
