"""Language models: attention sinks and spikes, and how much of the depth is used, by training step.

Gu et al., "When attention sink emerges in language models" (2025): trained causal language models
attend to their first token, small ones too. Sun et al., "Massive activations in large language
models" (2024): a few entries of their hidden states are far larger than all others. Here a pre-norm
network, built as Llama is, learns to continue bytes of a text. It is measured while it trains, with
softmax attention and with four others that are said to stop sinks, for equal steps: loss, sinks,
spikes, residual ratio of the tokens, of unit tokens and of what attention reads, effective rank,
and the depth used by two definitions.

    python -m experiments.run_language_model
    python -m experiments.run_language_model --text=data/RTE/train.tsv --variants=softmax,gated

A text is UTF-8, or a .tsv with a header (RTE); without --text it is one of 2,250 bytes that is
shipped with the package, which a network learns by heart. --num_seeds are the seeds of softmax
attention, on which the statements rest, and --cure_seeds those of the others.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from experiments.shell import cli, vocabulary
from experiments.shell.executor import Executor
from experiments.shell.experiment import Drawing, Experiment
from experiments.shell.options import Flags, check_names
from experiments.shell.statements import row_of
from experiments.trained import language
from experiments.trained.language import CURES, PLAIN
from experiments.trained.training import nested, results_of_cells
from rank_collapse.report import Comparison, figures
from rank_collapse.report.statistics import by_seed
from rank_collapse.runs.folder import RunFolder
from rank_collapse.runs.seeds import seed_keys
from rank_collapse.training import Hyper

LARGE, TIMES = 100.0, 1000.0  # a massive activation, and how many times the median it is

FLAGS = cli.make_flags("language_model", num_seeds=8, shows="sink_rate,step=last")
vocabulary.define(
    FLAGS,
    least={"n_eval_data": 1},
    depth=4,
    num_heads=4,
    d_model=64,
    d_ff=176,
    num_tokens=64,
    batch_size=8,
    n_eval_data=32,
    learning_rate=3e-3,
    seed_chunk=0,
)
define = cli.definer(FLAGS)
define("string", "text", None, "Text to learn: UTF-8, or a .tsv with a header (default: shipped).")
names = ", ".join((PLAIN, *CURES))
define("list", "variants", [PLAIN, *CURES], f"Kinds of attention, out of {names}.")
define("integer", "n_steps", 5000, "Training steps.", lower_bound=1)
define("integer", "warmup", 100, "Steps over which the learning rate rises.", lower_bound=0)
define(
    "integer",
    "cure_seeds",
    4,
    "Seeds of each kind but softmax, the first of its own.",
    lower_bound=1,
    upper_bound=cli.MOST_SEEDS,
)

Results = Mapping[str, Mapping[str, np.ndarray]]  # {variant: see `language.make_measure`, [s, t]}


class Setup(NamedTuple):
    """What the flags ask for."""

    options: Flags
    text: np.ndarray
    data: Any


def setup_of(options: Flags) -> Setup:
    """The text and its windows; also checks the networks.

    Raises:
        FileNotFoundError, ValueError: A text, a variant or sizes that cannot be used.
    """
    check_names(options, "variants", (PLAIN, *CURES))
    for variant in options.variants:
        language.network_of(options, variant)
    text = language.bytes_of(options.text)
    return Setup(options, text, language.data_of(text, options.num_tokens, options.n_eval_data))


def measure_all(options: Flags, setup: Setup, run: RunFolder) -> dict[str, Any]:
    """{variant: what `language.make_measure` gives at each look [s, t, ...], and "losses" [s, e] of
    the training}."""
    hyper, found = Hyper(options.learning_rate, dropout=None, warmup=options.warmup), {}
    with Executor(options, run) as executor:
        for variant in options.variants:
            seeds = options.num_seeds if variant == PLAIN else options.cure_seeds
            found |= results_of_cells(
                executor,
                {variant: (variant, hyper)},
                lambda name: language.training_of(options, name, setup.data, executor),
                keys=seed_keys(options.seed, seeds),
            )
    return {variant: nested(own) for variant, own in found.items()}


def steps_of(found: Mapping[str, np.ndarray]) -> np.ndarray:
    """The training step of each look."""
    epochs, looks = found["losses"].shape[1], found["loss"].shape[1]
    each = -(-epochs // (looks - 1))
    return language.STEPS_PER_EPOCH * np.minimum(each * np.arange(looks), epochs)


def columns_of(found: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One number of each look [s, t]: of states the last layer's, of spikes the largest of all."""
    states = ("residual_ratio", "unit_residual_ratio", "read_residual_ratio", "effective_rank")
    used = language.depth_used(found)
    return (
        {"loss": found["loss"], "sink_rate": found["sink_rate"].mean(axis=-1)}
        | {"first_column": found["first_column"].mean(axis=-1)}
        | {name: found[name].max(axis=-1) for name in ("spike_entry", "largest")}
        | {name: found[name][..., -1] for name in states}
        | {f"depth_used_{name}": values for name, values in used.items()}
    )


def massive(found: Mapping[str, np.ndarray]) -> np.ndarray:
    """min(max|x|/100, max|x|/(1000 median|x|)) of the state that has most of it, [s, t]."""
    return np.minimum(found["largest"] / LARGE, found["spike_entry"] / TIMES).max(axis=-1)


def rows_of(results: Results, setup: Setup) -> Iterator[dict[str, Any]]:
    """One row per variant, look and seed."""
    for variant, found in results.items():
        columns = columns_of(found)
        for t, step in enumerate(steps_of(found)):
            for row in by_seed({name: values[:, t] for name, values in columns.items()}):
                yield {"variant": variant, "step": int(step)} | row


# {column: (label, whether the axis is logarithmic)}
BY_STEP = {
    "loss": ("loss on held-out text, nats a byte", False),
    "sink_rate": ("sink rate, share of heads", False),
    "first_column": ("attention on the first byte", False),
    "spike_entry": (r"max$|x_{ij}|$/median$|x_{ij}|$, largest", True),
    "largest": (r"max$|x_{ij}|$, largest", True),
    "residual_ratio": ("residual ratio, last layer", False),
    "unit_residual_ratio": ("of unit tokens", False),
    "read_residual_ratio": ("of the output after the norm", False),
    "effective_rank": ("effective rank, last layer", False),
    "depth_used_lens": ("depth used, lens", False),
    "depth_used_paths": ("depth used, paths", False),
}
BY_LAYER = {
    "sink_rate": ("sink rate, share of heads", False),
    "spike_entry": (r"max$|x_{ij}|$/median$|x_{ij}|$", True),
    "residual_ratio": ("residual ratio", False),
    "read_residual_ratio": ("residual ratio of what is read", False),
}


def training_figure(results, setup):
    """What is measured of held-out text while the networks train, mean and standard deviation over
    seeds; of states the last layer's, of spikes the largest of all layers."""
    fig, axes = figures.panels(len(BY_STEP), 4, width=3.4, height=2.5, sharex=True)
    for index, (variant, found) in enumerate(results.items()):
        columns, steps = columns_of(found), steps_of(found)
        for ax, name in zip(axes.flat, BY_STEP, strict=False):
            figures.band(ax, steps, columns[name], variant, index)
    for ax, (label, logarithmic) in zip(axes.flat, BY_STEP.values(), strict=False):
        ax.set(ylabel=label, xlabel="step", yscale="log" if logarithmic else "linear")
    axes[0, 0].legend()
    return fig


def layers_figure(results, setup):
    """The same by layer after training, layer 0 the embedding."""
    fig, axes = figures.panels(len(BY_LAYER), 4, width=3.4, height=2.7)
    for ax, (name, (label, logarithmic)) in zip(axes.flat, BY_LAYER.items(), strict=True):
        for index, (variant, found) in enumerate(results.items()):
            values = found[name][:, -1]
            first = setup.options.depth + 1 - values.shape[1]
            figures.band(ax, first + np.arange(values.shape[1]), values, variant, index)
        ax.set(ylabel=label, xlabel="layer", yscale="log" if logarithmic else "linear")
        figures.integer_ticks(ax)
    axes[0, 0].legend()
    return fig


def claims(results, setup):
    """Whether sinks and spikes appear, and what each of the cures changes of them, seed by seed."""
    plain = results.get(PLAIN)
    if plain is None:
        return
    where = f"{len(setup.text):,} bytes of text, {steps_of(plain)[-1]} steps"
    own = columns_of(plain)
    yield row_of("sinks appear", where, own["sink_rate"][:, -1])
    yield row_of("spikes appear", where, massive(plain)[:, -1])
    for variant, found in results.items():
        if variant == PLAIN:
            continue
        columns = columns_of(found)
        count = min(len(own["loss"]), len(columns["loss"]))
        sinks, spikes, loss = (
            (columns[n][:count, -1], own[n][:count, -1])
            for n in ("sink_rate", "spike_entry", "loss")
        )
        yield row_of("sink cures", variant, sinks[0] - sinks[1])
        yield row_of("spike cures", variant, np.log10(spikes[0] / spikes[1]))
        yield row_of("loss of cures", variant, loss[0] - loss[1])


def compare(results, setup):
    """What each kind of attention has after training, means over seeds."""
    for variant, found in results.items():
        columns = {name: values[:, -1] for name, values in columns_of(found).items()}
        for name, (label, _) in BY_STEP.items():
            mean, spread = columns[name].mean(), columns[name].std()
            note = f"standard deviation {spread:.2g} over {len(columns[name])} seeds"
            yield Comparison(f"{variant}: {label}", float(mean), note=note)


EXPERIMENT = Experiment(
    about=__doc__,
    flags=FLAGS,
    order=135,
    brief="language models of bytes while they train, with softmax and with attention that is said "
    "to stop sinks: loss, sinks, spikes, residuals, depth used",
    title="Sinks and spikes of language models",
    claim="Gu et al. 2025: causal language models attend to their first token after training, "
    "small ones too. Sun et al. 2024: some entries of their hidden states are above 100 and above "
    "1000 times the median.",
    presets={
        "quick": "--variants=softmax --depth=2 --d_model=32 --d_ff=64 --num_tokens=32 "
        "--n_steps=100 --num_seeds=5 --n_eval_data=4",
        "paper": "--text=data/RTE/train.tsv",
        "tiny": "--variants=softmax,qk_norm --depth=1 --num_heads=2 --d_model=8 --d_ff=8 "
        "--num_tokens=8 --batch_size=2 --n_eval_data=2 --n_steps=26 --num_seeds=2 --cure_seeds=1",
    },
    extra=lambda setup: {"content": cli.content_hash(setup.text.tobytes())},
    setup=setup_of,
    measure=measure_all,
    table=rows_of,
    figures=Drawing.all(training_figure, layers_figure),
    claims=claims,
    compare=compare,
)
main = EXPERIMENT.main

if __name__ == "__main__":
    cli.run(main, FLAGS)
