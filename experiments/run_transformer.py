"""Transformer: an encoder-decoder that copies, reverses, sorts or translates, and its attention.

The sequences are generated on the device. The two artificial languages of the translation task
differ in word order, agreement and lexicon. Networks train with warm-up and teacher forcing. The
experiment measures the share of correct tokens, and the share of sequences that greedy decoding
writes exactly.

    python -m experiments.run_transformer --task=reverse
    python -m experiments.run_transformer --task=translation --optimizer=radam --label_smoothing=0.1
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

import rank_collapse as rc
from experiments.lab import (
    Experiment,
    Flags,
    Options,
    Run,
    RunFolder,
    cli,
    describe_figures,
    open_run,
    plots,
    shared_flags,
)
from experiments.lab.executor import nest_arrays
from experiments.train import arguments
from experiments.train.train_networks import save_models, train_networks
from experiments.train.trained_tasks import (
    ALONE,
    TrainedTask,
    diverged_seeds,
    fine_seeds,
)
from experiments.transformer import grammar
from experiments.verdicts import Comparison, TableRow, seed_rows
from rank_collapse.network.encoder_decoder import EncoderDecoderParams
from rank_collapse.report import figures
from rank_collapse.report.intervals import Interval
from rank_collapse.training import models
from rank_collapse.training.recipe import OPTIMIZERS, Recipe
from rank_collapse.training.tasks import examples, sequences

TASKS = (*sequences.TASKS, "translation")
NUM_PROFILED = 32  # pairs whose residuals are averaged

FLAGS = arguments.make_flags(
    "transformer",
    shows="exact",
    can_grow=False,
    depth=2,
    num_heads=4,
    d_model=32,
    num_tokens=8,
    num_labels=10,
    n_train_data=4000,
    n_eval_data=200,
    n_epochs=40,
    batch_size=64,
    learning_rate=3e-3,
    weight_decay=0.0,
    dropout=0.0,
    do_mlp=True,
)
for name, default, text, values in (
    ("task", "reverse", "What is learned.", TASKS),
    ("norm_placement", "post", "Where the norms are.", ("post", "pre")),
    ("optimizer", "adam", "Adam or rectified Adam.", OPTIMIZERS),
    ("schedule", "inverse_sqrt", "After the warm-up.", ("inverse_sqrt", "constant")),
):
    FLAGS.define("enum", name, default, text, values)
shared_flags.define_alias(FLAGS, norm="norm_placement")
FLAGS.define(
    "integer", "min_len", None, "Letters of the shortest sequence (default: all of num_tokens)."
)
FLAGS.define("float", "warmup", 100.0, "Steps of linear warm-up; 0 for none.")
FLAGS.define("float", "label_smoothing", 0.0, "ε of the smoothed labels.")
FLAGS.define("boolean", "tie", True, "One embedding for source, target and output.")

# Under teacher forcing.
METRICS = {
    "accuracy": examples.token_accuracy,
    "exact_forced": examples.exact_match,
    "loss": examples.loss_metric,
}

KINDS = {
    "encoder": ("encoder: self-attention", "source", "source"),
    "decoder": ("decoder: causal self-attention", "inputs", "inputs"),
    "cross": ("decoder: encoder-decoder attention", "inputs", "source"),
}

LABELS = {"source": "source token", "inputs": "target token read"}
MAX_LAYERS = 4  # of the attention figure: evenly spaced ones, the last among them


def make_task(options: Options) -> TrainedTask:
    """Makes the training task of the flags: encoder and decoder of the same size (Vaswani et al.
    2017).

    Args:
        options: The flags.

    Raises:
        ValueError: Sizes of letter sequences are set for a translation.
    """
    vocab_size, longest = sequences.NUM_MARKS + options.num_labels, options.num_tokens + 2
    title = f"{options.task.capitalize()} {options.num_tokens} of {options.num_labels} letters"
    if options.task == "translation":
        vocab_size, longest = grammar.VOCAB_SIZE, grammar.TARGET_LENGTH
        title = "Translation between two made-up languages"
        for name in ("num_tokens", "num_labels", "min_len"):
            if options[name] != FLAGS[name].default:
                flag = f"--{name}={options[name]}"
                raise ValueError(f"{flag} has no effect: the grammar decides it")
    half = rc.TransformerConfig(
        options.depth,
        options.num_heads,
        options.d_model,
        d_ff=2 * options.d_model,
        mlp="relu" if options.do_mlp else "none",
        attention_skip=True,
        mlp_skip=True,
        norm_placement=options.norm_placement,
        norm_eps=1e-5,
        final_norm=options.norm_placement == "pre",
        embedding=rc.EmbeddingConfig(
            vocab_size=vocab_size,
            d_embed=options.d_model,
            positions="learned",
            num_positions=longest,
        ),
    )
    decoder, tied = half.replace(cross_attention=True, mask="causal"), options.tie
    recipe = Recipe(
        rc.network.EncoderDecoderConfig(half, decoder, shared_embedding=tied, tied_output=tied),
        vocab_size,
        options.batch_size,
        options.n_epochs,
        shuffle=True,
        schedule=options.schedule,
        optimizer=options.optimizer,
        unroll=1,
    )
    make = functools.partial(make_data, options)
    return TrainedTask(options, "transformer", title, recipe, make, METRICS, curves=True)


def make_data(options: Options, key: jax.Array) -> dict[str, sequences.SequencePairs]:
    """Makes training and held-out pairs of one seed; a translation's seed has its own lexicon.

    Args:
        options: The flags.
        key: Random key of the seed.
    """
    key_lexicon, *keys = jax.random.split(key, 3)
    if options.task == "translation":
        make = functools.partial(grammar.make_pairs, lexicon=grammar.make_lexicon(key_lexicon))
    else:
        make = functools.partial(
            sequences.make_pairs,
            seq_len=options.num_tokens,
            num_letters=options.num_labels,
            task=options.task,
            min_len=options.min_len,
        )
    counts = {"train": options.n_train_data, "eval": options.n_eval_data}
    return {name: make(k, n) for k, (name, n) in zip(keys, counts.items(), strict=True)}


def measure(
    options: Options, task: TrainedTask, folder: RunFolder
) -> dict[str, PyTree[np.ndarray]]:
    """Trains all seeds, and measures each by `measure_seed`."""
    return nest_arrays(train_networks(options, {ALONE: task}, folder, measure_seed)[ALONE])


def measure_seed(
    task: TrainedTask,
    model: EncoderDecoderParams,
    data: dict[str, sequences.SequencePairs],
    _: jax.Array,
) -> dict[str, PyTree[jax.Array]]:
    """Measures one seed.

    Args:
        task: The training task.
        model: The trained model.
        data: Examples of the seed.

    Returns:
        "exact": share of the held-out sequences that are written exactly, decoded greedily,
        "residual": {half: [L + 1]}, the mean over pairs of ‖res(X^l)‖ / ‖X^l‖ of the tokens that
        exist, and of the first pair "attention": {kind: [L, h, n, m]} and "shown":
        {what: [tokens]}.
    """
    held_out, config = data["eval"], task.recipe.config
    written = models.decode_pairs(model, held_out, config)

    def measure_pair(example):
        """Measures one pair of sentences.

        Returns:
            ({half: residual ratios by layer}, {half or "cross": attention weights}).
        """
        source, source_mask, inputs, input_mask = example
        trace = rc.network.encoder_decoder.apply(
            model, source, inputs, config, source_mask=source_mask, target_mask=input_mask
        )
        halves = {"encoder": (trace.encoder, source_mask), "decoder": (trace.decoder, input_mask)}
        residual = {
            name: jax.vmap(lambda x, m=mask: rc.residual_ratio(x, mask=m))(half.hidden)
            for name, (half, mask) in halves.items()
        }
        attention = {name: half.attention for name, (half, _) in halves.items()}
        return residual, attention | {"cross": trace.decoder.cross_attention}

    pairs = held_out.first(NUM_PROFILED)
    items = (pairs.source, pairs.source_mask, pairs.inputs, pairs.target_mask[:, :-1])
    residual, attention = jax.vmap(measure_pair)(items)
    return {
        "exact": models.exact_share(written, held_out),
        "residual": jax.tree.map(lambda a: jnp.mean(a, axis=0), residual),
        "attention": jax.tree.map(lambda a: a[0], attention),
        "shown": {
            "source": held_out.source[0],
            "inputs": held_out.inputs[0],
            "labels": held_out.labels[0],
            "written": written.tokens[0],
        },
    }


def make_rows(results: dict[str, PyTree[np.ndarray]]) -> list[TableRow]:
    """Makes a row for each seed."""
    residual = {f"residual_{half}": ratios[:, -1] for half, ratios in results["residual"].items()}
    columns = {"diverged": diverged_seeds(results), "exact": results["exact"]}
    return seed_rows(columns | results["whole"] | residual)


@figures.styled
def curves_figure(results: dict[str, PyTree[np.ndarray]], task: TrainedTask):
    """Left: loss per token (vertical axis) by epoch (horizontal axis), on training sequences and on
    held-out sequences. Right: share of correct tokens in held-out sequences (vertical axis) by
    epoch (horizontal axis). For this share, the network predicts each token from the true tokens
    before it. The point at the end is another share. It counts the held-out sequences that the
    network writes without a mistake, if it always takes the most probable next token (greedy
    decoding). Lines are means over seeds (geometric means on the left), and bands are one standard
    deviation."""
    seeds, curves, losses = fine_seeds(results), results["curves"], results["losses"]
    if not losses.size:  # no epoch
        return None
    fig, ((loss, share),) = figures.figure(1, 2)
    epochs, exact = np.arange(1, losses.shape[1] + 1), results["exact"][seeds]
    for draw, ax, values, label, index in (
        (figures.log_band, loss, losses, "training", 0),
        (figures.log_band, loss, curves["loss"], "held out", 1),
        (figures.band, share, curves["accuracy"], "tokens, teacher forced", 1),
    ):
        draw(ax, epochs, values[seeds], label, index, marker="")
    label = f"sequences written exactly, at the end ({exact.mean():.2f})"
    mean, spread = float(exact.mean()), float(exact.std())
    interval = Interval(mean - spread, mean + spread)
    plots.draw_interval(share, float(epochs[-1]), mean, interval, label, 2)
    loss.set(xlabel="epoch", ylabel="loss per token (nats)", yscale="log")
    share.set(xlabel="epoch", ylabel="share, held out", ylim=(0, 1.03))
    figures.finish_axes((loss, share), "epoch")
    share.legend(loc="lower center")
    fig.suptitle(f"{task.title}, {len(seeds)} seed{'s' * (len(seeds) != 1)}")
    return fig


@figures.styled
def attention_figure(results: dict[str, PyTree[np.ndarray]], task: TrainedTask):
    """Attention weights of the trained network on one held-out pair of sequences, means over heads.
    The columns of panels show three kinds of attention: within the source, within the target so
    far, and from the target to the source. Each row of panels is one layer. The sign ⊢ begins a
    sequence, ⊣ ends it, and · is padding. Within a panel, each row is a token that attends (query),
    and each column is a token that is attended to (key)."""
    seed = int(fine_seeds(results)[0])
    pair = {name: values[seed] for name, values in results["shown"].items()}
    maps = {kind: results["attention"][kind][seed].mean(axis=1) for kind in KINDS}
    depth = len(maps["encoder"])
    layers = np.unique(np.linspace(depth - 1, 0, min(depth, MAX_LAYERS)).round().astype(int))
    fig, axes = figures.figure(len(layers), len(KINDS), width=3.1, height=3.3)
    for row, layer in enumerate(layers):
        for ax, (kind, (title, queries, keys)) in zip(axes[row], KINDS.items(), strict=True):
            picture = ax.imshow(maps[kind][layer], vmin=0, vmax=1, cmap="Blues")
            ax.grid(visible=False)
            heading = "" if row else f"{title}\n"
            ax.set(xlabel=LABELS[keys], ylabel=LABELS[queries], title=f"{heading}layer {layer + 1}")
            ax.set_xticks(range(len(pair[keys])), token_words(pair[keys]), fontsize=8)
            ax.set_yticks(range(len(pair[queries])), token_words(pair[queries]), fontsize=8)
    fig.colorbar(picture, ax=axes, shrink=0.6, label="attention weight, mean over heads")
    fig.suptitle(
        f"{task.title}, seed {seed}: answer {' '.join(token_words(pair['labels']))}, "
        f"written {' '.join(token_words(pair['written']))}"
    )
    return fig


@figures.styled
def residual_figure(results: dict[str, PyTree[np.ndarray]], task: TrainedTask):
    """Residual ratio of the tokens (vertical axis) after each layer (horizontal axis). One line is
    the trained encoder, and the other line is the trained decoder. Lines are means over seeds, and
    bands are one standard deviation."""
    halves = sorted(results["residual"].items(), reverse=True)
    fig, ((ax,),) = figures.figure()
    for index, (half, values) in enumerate(halves):
        figures.band(ax, np.arange(values.shape[1]), values[fine_seeds(results)], half, index)
    label = "residual ratio ‖res(X)‖ / ‖X‖, trained"
    ax.set(xlabel="layer (0: input)", ylabel=label, title=task.title, ylim=(0, 1.03))
    figures.integer_ticks(ax)
    ax.legend()
    return fig


def token_words(ids: Sequence[int]) -> list[str]:
    """Writes tokens as short words: marks by symbols, letters by number."""
    marks = {sequences.PAD: "·", sequences.BEGIN: "⊢", sequences.END: "⊣"}
    return [marks.get(int(i), str(int(i) - sequences.NUM_MARKS)) for i in ids]


def compare_results(results: dict[str, PyTree[np.ndarray]], task: TrainedTask) -> list[Comparison]:
    """Lists tokens, whole sequences and trained residuals; no number is published.

    Args:
        results: Results of `measure`.
        task: The training task.
    """
    seeds, residual = fine_seeds(results), results["residual"]
    values = {
        "token accuracy, teacher forced": results["whole"]["accuracy"],
        "sequences written exactly, decoded greedily": results["exact"],
        "residual ratio after the encoder, trained": residual["encoder"][:, -1],
        "residual ratio after the decoder, trained": residual["decoder"][:, -1],
    }
    note = f"standard deviation {{:.3f}} over {len(seeds)} seed(s), task {task.options.task}"
    return [
        Comparison(text, float(shares[seeds].mean()), note=note.format(shares[seeds].std()))
        for text, shares in values.items()
    ]


EXPERIMENT = Experiment(
    order=100,
    title="An encoder-decoder at work",
    brief="an encoder-decoder that copies, reverses, sorts or translates: the share of correct "
    "tokens and sequences, and its three kinds of attention",
    claim="An encoder-decoder uses attention in three ways: within the source, within the part of "
    "the target that is already written, and from the target to the source (Vaswani et al. 2017, "
    "section 3.2.3). There is no published number for our artificial languages.",
    presets={
        "quick": "--task=reverse --num_seeds=2 --num_tokens=5 --n_train_data=1000 --n_epochs=10 "
        "--batch_size=32 --n_eval_data=100",
        "reported": "--seed=3000 --task=translation --num_seeds=4 --n_epochs=60",
        "tiny": f"{arguments.TINY} --num_labels=4 --warmup=1",
    },
    figures=describe_figures(curves_figure, attention_figure, residual_figure),
)


def main(options: Flags) -> Run:
    """Measures the points, the combinations of flag values, that the run folder lacks; saves the
    table, figures and claims."""
    with open_run(options, make_task) as run:
        for point in run.measure(measure):
            results, task = point.results, point.setup
            point.save_table(make_rows(results))
            point.save_figure("curves", curves_figure, results, task)
            point.save_figure("attention", attention_figure, results, task)
            point.save_figure("residual", residual_figure, results, task)
            point.save_comparisons(compare_results(results, task))
            save_models(point, {ALONE: task})
        return run.finish()


if __name__ == "__main__":
    cli.run(main, FLAGS)
