"""The networks that are trained: sorting with each attention function at several widths."""

import dataclasses
from typing import Any

from absl import flags

from experiments import run_sort
from experiments.attention_forms.forms import FORMS
from experiments.shell import cli
from experiments.shell.room import Room
from experiments.trained.cells import Program, results_of_cells
from rank_collapse.runs.folder import RunFolder
from rank_collapse.training import path_accuracy
from rank_collapse.training.recipe import Hyper, config_of


def train_widths(options: flags.FlagValues, run: RunFolder) -> dict[int, dict[str, dict[str, Any]]]:
    """{d_k: {form: {"accuracy" [s], "loss" [s], "losses" [s, epochs]}}}.

    The same data and seeds everywhere. Weights are drawn with variance 1/fan-in, so that queries
    and keys begin with unit variance, as the note has them; values stay as wide as without d_k.
    """
    setup = run_sort.make_setup(options)
    base = setup.recipe.config.replace(init="lecun", d_v=options.hidden_dim // options.width)
    found, mesh = {}, cli.mesh(options)
    with Room(options, mesh, run.log) as room:
        for d_k in options.trained_d_k:
            found[d_k] = {}
            for score in dict.fromkeys(form.score for form in FORMS.values()):
                config = base.replace(d_qk=d_k, score=score, scale_scores=False)
                recipe = dataclasses.replace(setup.recipe, config=config)
                cells = {
                    f"trained {name}, d_k={d_k}": hyper_of(
                        options, form.options(d_k)["temperature"]
                    )
                    for name, form in FORMS.items()
                    if form.score == score
                }

                def measure(model, data, hyper, recipe=recipe):
                    config = config_of(recipe, hyper)
                    return path_accuracy.whole_model(model, data["eval"], config, setup.metrics)

                program = Program(recipe, setup.make_data, measure, mesh=mesh)
                results = results_of_cells(
                    options, run, program, cells, room=room, together=len(cells)
                )
                found[d_k] |= {name.split(",")[0].split()[1]: r for name, r in results.items()}
    return {d_k: {form: by_form[form] for form in FORMS} for d_k, by_form in found.items()}


def hyper_of(options: flags.FlagValues, temperature: float) -> Hyper:
    """The floats of a run."""
    return Hyper(
        learning_rate=options.learning_rate,
        weight_decay=options.weight_decay,
        dropout=options.dropout,
        init_scale=options.init_scale,
        network={"temperature": temperature},
    )
