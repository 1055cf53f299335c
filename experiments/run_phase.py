"""Phase diagrams: where tokens collapse and where attention freezes, measured and predicted.

Two floats of a network are swept over a grid: the size of the scores or their law in ln n, the
parts of M = α I + β P + γ C, gains of skips and branches, sizes of weights, the cosine of the
input. Every cell is measured (what is left of the residual, the gradient of the queries over that
of the values, the entropy of attention; with --train its accuracy on a small task) and the boundary
of a closed theory is drawn where one holds: Giorlandino and Goldt 2025, critical scaling (arXiv
2510.05554), Cowsik et al. 2024. All cells are one compiled program. --figure asks for a published
figure, a diagram or curves beside their theory.

    python -m experiments.run_phase --x=score_scale --y=skip_gain
    python -m experiments.run_phase --figure=cowsik4
    python -m experiments.run_phase --variant=shaped --x=beta --x_range=0,2 --y=gamma --y_range=0,2
    python -m experiments.run_phase --figure=mindthegap

Two CPU cores: a minute at the quick preset's sizes, which are five figures. Expected: tokens
collapse below the boundary; above it scores that are large leave attention frozen, with gradients
of another size.
"""

from functools import partial
from typing import Any

import rank_collapse as rc
from experiments import small_task
from experiments.phase.curves import CURVES, Curves
from experiments.phase.diagrams import Diagram
from experiments.phase.networks import AXES, law_of, networks_of
from experiments.phase.sphere import sphere_of
from experiments.shell import cli, vocabulary
from experiments.shell.experiment import Drawing, Experiment, caption_of
from experiments.shell.options import Flags

# Flags of --figure, where they are not given.
FIGURES = {
    "giorlandino1": {
        "x": "score_scale",
        "x_range": [0.2, 4.0],
        "y": "skip_gain",
        "y_range": [0.0, 2.0],
        "mlp": "relu",
        "depth": 12,
        "num_tokens": 64,
        "d_model": 128,
        "num_heads": 1,
        "cosine": 0.1,
    },
    "giorlandino4": {"depth": 100, "num_tokens": 64, "d_model": 128},
    "critical1": {
        "variant": "critical",
        "x": "gamma",
        "x_range": [0.2, 4.0],
        "y": "cosine",
        "y_range": [0.0, 0.75],
        "depth": 1,
        "attention_skip": False,
        "mlp": "none",
        "norm_placement": "pre",
        "num_heads": 1,
        "num_tokens": 256,
        "d_model": 512,
    },
    "cowsik4": {
        "convex": True,
        "norm_placement": "pre",
        "mlp": "tanh",
        "x": "mlp_scale",
        "x_range": [0.5, 4.0],
        "y": "attention_gain",
        "y_range": [0.0, 0.9],
        "mlp_gain": 0.7,
        "depth": 24,
        "num_tokens": 32,
        "cosine": 0.9,
    },
    "mindthegap": {"num_seeds": 16},
    "noci1": {"num_heads": 4, "d_model": 32, "num_seeds": 4},
    "geshkovski": {
        "x": "time",
        "x_range": [0.0, 30.0],
        "y": "beta",
        "y_range": [0.5, 9.0],
        "num_x": 61,
        "num_y": 18,
        "num_tokens": 32,
        "d_model": 128,
        "num_seeds": 8,
    },
}

FLAGS = cli.make_flags("phase", num_seeds=2, shows="log10_residual", traced=AXES)
vocabulary.define(
    FLAGS,
    depth=12,
    num_heads=1,
    d_model=64,
    num_tokens=32,
    mlp="relu",
    norm_placement="post",
    norm_kind="rms",
    mask="none",
    seed_chunk=0,
)
define = cli.definer(FLAGS)
define("string", "x", "score_scale", f"Float on the x axis: {', '.join(AXES)}, or the variant's.")
define("string", "y", "skip_gain", "Float on the y axis.")
vocabulary.numbers(FLAGS, "x_range", [0.2, 4.0], "First and last value of x.", kind=float)
vocabulary.numbers(FLAGS, "y_range", [0.0, 2.0], "First and last value of y.", kind=float)
define("integer", "num_x", 9, "Values of x.", lower_bound=2)
define("integer", "num_y", 9, "Values of y.", lower_bound=2)
define("enum", "variant", "softmax", "Attention.", list(rc.VARIANTS))
define("enum", "figure", None, "A published figure's axes and network.", list(FIGURES))
define("boolean", "attention_skip", True, "Skips around attention.")
define("boolean", "convex", False, "Skips of √(1 − γ²) beside branches of gain γ (Cowsik et al.).")
define(
    "float",
    "level",
    0.1,
    "Residual kept at the boundary of post-norm networks' theory.",
    lower_bound=1e-6,
)
define("boolean", "train", False, "Train every cell on a small task too, all seeds.")
small_task.define_flags(FLAGS, least=0, seeds=None)
for axis, (default, text) in AXES.items():
    define("float", axis, default, f"Where it is not swept: {text.replace('$', '')}.")


def setup_of(options: Flags) -> Diagram | Curves:
    """The grid and the theory of the flags, or the curves of a figure.

    Raises:
        ValueError: An invalid range, or what a network or a figure does not have.
    """
    figure = options.figure
    for name, value in FIGURES.get(figure, {}).items():
        if not options[name].present:
            options[name].value = value
    for name in ("x_range", "y_range"):
        ends = options[name].value
        if len(ends) != 2 or not ends[0] < ends[1]:
            raise ValueError(f"--{name}={ends} is not two increasing values")
    if options.train and not options.train_steps:
        raise ValueError("--train with --train_steps=0 trains no cell")
    makers = CURVES | {"geshkovski": sphere_of}
    if options.train and figure in makers:
        raise ValueError(f"--train: --figure={figure} has no cells to train")
    setup = makers.get(figure, networks_of)(options)
    level = options["level"]
    if level.value != level.default and (figure in makers or law_of(options) != "kept"):
        raise ValueError(f"--level={options.level:g}: no theory of the residual kept is shown here")
    return setup


def is_shown(name: str, results: Any, setup: Diagram | Curves) -> bool:
    """Whether a setup is of this figure: a diagram, or one of `CURVES`."""
    return name == (setup.options.figure if isinstance(setup, Curves) else "phase")


EXPERIMENT = Experiment(
    about=__doc__,
    flags=FLAGS,
    order=120,
    brief="phase diagrams over any two floats: residual, gradients and entropy beside theory's "
    "boundary",
    title="Phase diagrams",
    claim="Attention at initialisation has phases: scores below a critical size let tokens "
    "collapse, far above it attention freezes on single tokens (Giorlandino and Goldt 2025), and "
    "gains decide at which rate (Cowsik et al. 2024).",
    extra=lambda setup: setup.extra,
    setup=setup_of,
    measure=lambda options, setup, run: setup.measure(run, setup_of),
    table=lambda results, setup: setup.rows(results),
    claims=lambda results, setup: setup.claims(results),
    compare=lambda results, setup: setup.compare(results),
    presets={
        "quick": {
            "cowsik4": (
                "--figure=cowsik4",
                "--num_x=7",
                "--num_y=7",
                "--depth=16",
                "--num_seeds=5",
            ),
            "giorlandino4": (
                "--figure=giorlandino4",
                "--depth=24",
                "--num_tokens=32",
                "--d_model=64",
                "--num_seeds=6",
            ),
            "mindthegap": ("--figure=mindthegap", "--num_seeds=8"),
            "geshkovski": (
                "--figure=geshkovski",
                "--num_x=31",
                "--num_y=5",
                "--y_range=0.5,4.5",
                "--num_seeds=4",
            ),
            "noci1": ("--figure=noci1", "--train_steps=0", "--num_seeds=8"),
        },
        "paper": {
            "cowsik4": (
                "--figure=cowsik4",
                "--num_x=25",
                "--num_y=25",
                "--num_tokens=256",
                "--num_seeds=5",
            ),
            "giorlandino4": ("--figure=giorlandino4", "--num_seeds=8"),
            "mindthegap": ("--figure=mindthegap", "--num_seeds=64"),
            "geshkovski": ("--figure=geshkovski",),
            "noci1": ("--figure=noci1", "--train_steps=200", "--num_seeds=8"),
        },
        "tiny": (
            "--num_seeds=1",
            "--depth=2",
            "--d_model=4",
            "--num_tokens=3",
            "--num_x=2",
            "--num_y=2",
        ),
    },
    figures={
        name: Drawing(
            lambda results, setup: setup.figure(results), caption_of(of), partial(is_shown, name)
        )
        for name, of in {"phase": Diagram.figure, **CURVES}.items()
    },
)
main = EXPERIMENT.main

if __name__ == "__main__":
    cli.run(main, FLAGS)
