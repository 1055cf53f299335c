"""Circle: a one-layer network that continues two walks along a circle, fed with its own output.

Reproduces the circle figure of Dong, Cordonnier and Loukas (2021, section 4.3): trained to predict
the next points of two walkers on the two halves of a circle, then applied to its own output 300
times. Pure attention lets the two points fall together, a skip keeps them apart.

Variants: "attention" has neither skip nor MLP, "skip" a skip around the attention, "mlp" an MLP
with its own skip and none around the attention, "skip+mlp" both, which is what the published
code's --do_mlp trains. The published learning rate 1e-5 learns the single step here (error 0.03);
at 1e-3 even pure attention learns to look at its own point alone and does not collapse.

    python -m experiments.run_circle --width 2 --depth 1 --num_labels 2 --seq_len 10 \\
        --n_epochs 70 --n_train_data 1000 --n_repeat 2 --n_eval_data 300 --hidden_dim 32

--circle_skip and --do_mlp choose the other variants, --compare all of them at widths 32, 64, 128.
Two cores: 6 seconds for two seeds of one variant, 88 for eight seeds with --compare. Measured so,
seeds whose points fell together at widths 32, 64, 128: attention 8, 4, 3 of 8; skip 0, 3, 2; mlp
8, 4, 4; skip+mlp 0, 4, 2. At learning rate 1e-4: attention 7, 2, 1; skip 0, 3, 7; mlp 7, 1, 1;
skip+mlp 0, 3, 6. So only width 32 is as published in which of them fall, but in how they fall all
are: without the skip from a distance of 1e-2 to 1e-6 in one step (two in one case), the cubic rate
of the theory; with it in 7 to 149 steps, exponentially.
"""

import time

import jax
import numpy as np
from absl import flags

from experiments.circle import results as circle_results
from experiments.shell import cli
from experiments.shell.entry import Entry
from experiments.trained import arguments, trained
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.embedding import EmbeddingConfig
from rank_collapse.training.tasks import circle
from rank_collapse.training.training import Recipe, forward

VARIANTS = ("attention", "skip", "mlp", "skip+mlp")
WIDTHS = (32, 64, 128)

FLAGS = arguments.make_flags(
    "circle",
    width=2,
    depth=1,
    hidden_dim=32,
    seq_len=2,
    num_labels=2,
    n_train_data=1000,
    n_eval_data=300,
    n_epochs=70,
    batch_sz=30,
    learning_rate=1e-5,
    weight_decay=0.0,
)
flags.DEFINE_boolean(
    "circle_skip", False, "A skip around the attention, which pure attention has not.",
    flag_values=FLAGS,
)  # fmt: skip
flags.DEFINE_boolean(
    "compare", False, f"All of {', '.join(VARIANTS)} at each of the --widths.", flag_values=FLAGS
)
flags.DEFINE_multi_integer(
    "widths", WIDTHS, "Model widths of --compare; may be given several times.", lower_bound=3,
    flag_values=FLAGS,
)  # fmt: skip
arguments.accept_unused(FLAGS, "n_repeat", "path_len", "n_paths", "no_sub_path")


def main(options: flags.FlagValues) -> None:
    cases = make_cases(options)
    with trained.open_run(options, "circle", None) as run:
        if run.summary is None or not run.has_figure("trajectories"):
            begun = time.monotonic()
            results = {name: run.cached(name, lambda c=case, n=name: run_case(options, n, c, run))
                       for name, case in cases.items()}  # fmt: skip
            run.write_rows(circle_results.rows(results))
            for name, figure in circle_results.draw(results).items():
                run.save_figure(figure, name)
            run.finish(circle_results.summarise(results, time.monotonic() - begun))
        circle_results.show(run)


def make_cases(options: flags.FlagValues) -> dict[str, Recipe]:
    """{"variant, width": recipe} of the flags.

    Raises:
        ValueError: Flags that do not fit each other.
    """
    if options.num_labels != 2:
        raise ValueError(f"num_labels={options.num_labels}: a point of the plane has 2 coordinates")
    if options.n_train_data < 4:
        raise ValueError(f"n_train_data={options.n_train_data} points make no two walks")
    if options.compare:
        pairs = [(variant, width) for width in options.widths for variant in VARIANTS]
    else:
        pairs = [(variant_of(options), options.hidden_dim)]
    return {f"{v}, d={d}": recipe(options, v, d) for v, d in pairs}


def variant_of(options: flags.FlagValues) -> str:
    """The variant that the two flags choose; both together are skip and MLP."""
    parts = [
        name
        for name in ("skip", "mlp")
        if options["circle_skip" if name == "skip" else "do_mlp"].value
    ]
    return "+".join(parts) or "attention"


def recipe(options: flags.FlagValues, variant: str, width: int) -> Recipe:
    """What is trained: post-norm layers on linearly embedded points, no positions."""
    config = TransformerConfig(
        depth=options.depth,
        num_heads=options.width,
        d_model=width,
        d_ff=width,
        mlp="gelu" if "mlp" in variant else "none",
        attention_skip="skip" in variant,
        mlp_skip=True,
        norm_placement="post",
        init="reference",
        embedding=EmbeddingConfig(d_input=2, d_embed=width),
    )
    return Recipe(config, 2, options.batch_sz, options.n_epochs, loss="squared_error")


def run_case(options: flags.FlagValues, name: str, case: Recipe, run) -> dict[str, np.ndarray]:
    """Trains one variant at one width and lets every seed run on: arrays with a seed axis."""
    setup = trained.Setup(
        name=f"circle: {name}",
        title=name,
        recipe=case,
        make_data=lambda key: {"train": circle.make_examples(options.n_train_data)},
        metrics={},
        published={},
    )
    ensemble = trained.make_ensemble(options, setup)
    done = trained.train(options, setup, ensemble, run, resumable=False)

    def roll(state, data, _):
        def step(points):
            return forward(state.model, points, case.config)

        walk = data["train"]
        predicted = jax.vmap(step)(walk.inputs)
        error = np.sqrt(0.5) * jax.numpy.sqrt(jax.numpy.mean((predicted - walk.labels) ** 2))
        path = circle.roll_out(step, walk.inputs[0], options.n_eval_data)
        return {"trajectory": path, "distance": circle.distance(path), "error": error}

    out = ensemble.map(roll, done.state, done.data, num_seeds=options.num_seeds)
    diverged = np.isin(np.arange(options.num_seeds), list(done.diverged))
    return out | {"losses": done.losses, "diverged": diverged}


ENTRY = Entry(
    title="Circle: recurrent attention",
    claim="Section 4.3: a one-layer network fed with its own output lets the two walkers fall "
    "together when it is pure attention; a skip or an MLP counteracts that.",
    presets={"quick": ("--compare", "--widths=32"), "paper": ("--compare", "--num_seeds=5")},
    compare=circle_results.compare,
    reading=circle_results.reading,
    captions={
        "trajectories": "The two sequences of one seed, fed with their own continuation.",
        "distance": "Distance between the two sequences by step, one line per seed.",
    },
)


if __name__ == "__main__":
    cli.run(main, FLAGS)
