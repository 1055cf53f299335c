"""Width against depth at equal parameters: the sorting task on networks of one size.

The published code's `test_width` compares a shallow, wide network with a deep, narrow one of about
as many parameters (Dong, Cordonnier and Loukas 2021, its appendix). Here every depth asked for gets
the width whose number of parameters is nearest to the reference network's.

    python -m experiments.run_width --depths=1 --depths=2 --depths=4 --depths=8

Two cores: 142 seconds with --num_seeds=5 and the default depths. Measured so: depth 1 (width 106)
gets 0.985 of the letters right, 2 (80) 0.988, 4 (58) 0.993, 6 (48) 0.994, 12 (34) 0.995.
"""

import time

import jax
import numpy as np
from absl import flags
from matplotlib.figure import Figure

from experiments import run_sort
from experiments.shell import cli
from experiments.trained import arguments, trained
from rank_collapse.report import figures
from rank_collapse.training import path_accuracy
from rank_collapse.training.training import Recipe, init_model

FLAGS = arguments.make_flags("width", **run_sort.DEFAULTS)
flags.DEFINE_boolean("no_repeat", False, "No letter twice in a sequence.", flag_values=FLAGS)
flags.DEFINE_multi_integer(
    "depths", (1, 2, 4, 6, 12), "Depths compared; the parameters are those of --depth and "
    "--hidden_dim.", lower_bound=1, flag_values=FLAGS,
)  # fmt: skip


def main(options: flags.FlagValues) -> None:
    setup = run_sort.make_setup(options)
    target = num_parameters(setup.recipe)
    cases = {depth: sized(setup.recipe, depth, target) for depth in options.depths}
    with trained.open_run(options, "width", None) as run:
        if run.summary is None or not run.has_figure("width"):
            begun = time.monotonic()
            results = {
                depth: run.cached(
                    f"depth {depth}", lambda c=case, d=depth: run_case(options, setup, c, d, run)
                )
                for depth, case in cases.items()
            }
            rows = [
                {"depth": d, "hidden_dim": cases[d].config.d_model, "seed": s,
                 "parameters": num_parameters(cases[d]), "accuracy": float(a)}
                for d, r in results.items() for s, a in enumerate(r["accuracy"])
            ]  # fmt: skip
            run.write_rows(rows)
            run.save_figure(draw(cases, results), "width")
            found = {
                str(d): {
                    "hidden_dim": cases[d].config.d_model,
                    "parameters": num_parameters(cases[d]),
                    "accuracy": float(np.nanmean(r["accuracy"])),
                    "loss": float(np.nanmean(r["losses"][:, -1])) if r["losses"].size else None,
                }
                for d, r in results.items()
            }
            run.finish({"cases": found, "seconds": time.monotonic() - begun})
        for depth, case in sorted(run.summary["cases"].items(), key=lambda item: int(item[0])):
            print(f"depth {depth:>3s}, width {case['hidden_dim']:4d}: {case['parameters']} "
                  f"parameters, accuracy {case['accuracy']:.3f}")  # fmt: skip
        print(f"{run.summary['seconds']:.1f} s, written to {run.path}")


def num_parameters(recipe: Recipe) -> int:
    """Numbers in a recipe's model, embedding and classifier included."""
    shapes = jax.eval_shape(lambda: init_model(jax.random.key(0), recipe))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def sized(recipe: Recipe, depth: int, target: int) -> Recipe:
    """The recipe at a depth, with the multiple of its heads as width that comes nearest."""

    def at(width):
        embedding = recipe.config.embedding.replace(d_embed=width)
        fields = {"depth": depth, "d_model": width, "d_ff": width, "embedding": embedding}
        config = recipe.config.replace(**fields)
        return Recipe(config, recipe.num_outputs, recipe.batch_size, recipe.num_epochs)

    width = step = recipe.config.num_heads
    while num_parameters(at(width + step)) <= target:
        width += step
    return min((at(width), at(width + step)), key=lambda r: abs(num_parameters(r) - target))


def run_case(options, setup, recipe: Recipe, depth: int, run) -> dict[str, np.ndarray]:
    """Losses [s, epochs] and the whole model's accuracy [s], NaN where a seed diverged."""
    case = trained.Setup(
        name=f"depth {depth}", title="", recipe=recipe, make_data=setup.make_data,
        metrics=setup.metrics, published={},
    )  # fmt: skip
    ensemble = trained.make_ensemble(options, case)
    done = trained.train(options, case, ensemble, run, resumable=False)

    def measure(state, data, _):
        return path_accuracy.whole_model(state.model, data["eval"], recipe.config, setup.metrics)

    out = ensemble.map(measure, done.state, done.data, num_seeds=options.num_seeds)
    accuracy = np.where(np.isfinite(done.losses).all(axis=1), out["accuracy"], np.nan)
    return {"losses": done.losses, "accuracy": accuracy}


@figures.styled
def draw(cases: dict[int, Recipe], results: dict[int, dict[str, np.ndarray]]) -> Figure:
    """Training loss by epoch of each depth, and the accuracy against depth."""
    fig, axes = figures.figure(1, 2)
    for index, (depth, found) in enumerate(results.items()):
        epochs = 1 + np.arange(found["losses"].shape[1])
        label = f"L={depth}, d={cases[depth].config.d_model}"
        figures.band(axes[0, 0], epochs, found["losses"], label=label, index=index, marker="")
    axes[0, 0].set(xlabel="epoch", ylabel="training loss", yscale="log")
    axes[0, 0].legend()
    depths = sorted(results)
    values = np.stack([results[d]["accuracy"] for d in depths], axis=1)
    figures.band(axes[0, 1], depths, values)
    axes[0, 1].set(xlabel="depth at equal parameters", ylabel="token accuracy", ylim=(0, 1.02))
    return fig


if __name__ == "__main__":
    cli.run(main, FLAGS)
