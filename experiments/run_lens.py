"""How influence passes between tokens: the exact Jacobian by path length, and frozen sums.

The experiment changes a state after an early layer at one position, along a random direction, along
the state itself, or along the next token's row of the head. It splits the change of the last state
by the number of attentions on the path: exactly (the Jacobian of the Jacobian lens), and with
attention weights, norms and gates frozen (the path sums of Dong, Cordonnier and Loukas 2021).
Shares by length are the parts projected on their sum; the norms of the parts divided by the norm of
the sum show how much cancels. Cosine and size compare the two sums. The effective rank of the exact
Jacobian is measured by distance.

    python -m experiments.trained_weights --site=trained/packages
    python -m experiments.run_lens --start=0.13,0.47,0.8 --text=data/RTE/test.tsv --last_texts

Measures every network in --folder, and the networks in --init at their initialisation. --untrained
measures small random networks instead. --lens_folder also writes the mean Jacobians of causal
language models as files of the Jacobian lens. All networks take 20 minutes of CPU and 4 GB.
"""

from functools import partial
from pathlib import Path

import jax
import numpy as np
import xarray as xr

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
from experiments.lens import influence, lens_file, lens_results
from experiments.lens.lens_figures import cosine_figure, ranks_figure, shares_figure, sizes_figure
from experiments.trained.opened_networks import (
    UNTRAINED,
    Network,
    identify_texts,
    load_networks,
    make_initialised,
    make_untrained,
    skip_texts,
)
from experiments.verdicts import PROTOCOL
from rank_collapse import pretrained, runs
from rank_collapse.network.parameters import TransformerParams

AXES = ("start",)

FLAGS = cli.make_flags(
    "lens",
    shows="cosine,position=later",
    execution=("lens_folder",),
    counts="num_texts",
    can_grow=True,
)
FLAGS.define(
    "string", "folder", "trained", "Folder of checkpoint folders, as trained_weights makes it."
)
FLAGS.define("list", "networks", [], "Some of its networks, by name; default: all.")
text = (
    f"Architectures measured at their initialisation too, out of {', '.join(pretrained.PUBLISHED)}."
)
FLAGS.define("list", "init", [], text)
FLAGS.define("boolean", "untrained", False, "Small networks at random in their place: for tests.")
FLAGS.define("string", "text", None, "Text: a .tsv with a header (RTE), or paragraphs.")
FLAGS.define("boolean", "last_texts", False, "The last texts of each file, backwards.")
text = "Share of the layers after whose state paths start; at least one layer follows."
FLAGS.define("float", "start", lens_results.EARLY, text, lower_bound=0.0, upper_bound=1.0)
for name, default, least, text in (
    ("num_texts", 8, 2, "Texts of each network."),
    ("skip_texts", 0, 0, "Texts of each file that are left out before the first."),
    ("max_tokens", 48, 4, "Tokens kept of each text, and of spectrograms."),
    ("num_few", 4, 2, "Texts of each network at its initialisation."),
    ("num_ranked", 0, 0, f"Texts whose ranks are measured, from {lens_results.EARLY} on alone."),
    ("seed", 0, 0, "Seed of random weights, positions and directions."),
):
    FLAGS.define("integer", name, default, text, lower_bound=least)
text = "Folder for the mean Jacobians of causal language models, files of the Jacobian lens."
FLAGS.define("string", "lens_folder", None, text)


def open_networks(options: Options) -> list[Network]:
    """Opens the networks of the folder, then the networks at their initialisation.

    Raises:
        FileNotFoundError, ValueError: Networks or texts that do not exist or cannot be read.
    """
    check_names(options, "init", pretrained.PUBLISHED)
    if options.lens_folder:
        lens_file.check_possible(options.max_tokens)
    if options.untrained:
        check_names(options, "networks", UNTRAINED)
        networks = [make_untrained(name, options) for name in options.networks or UNTRAINED]
    else:
        opened = load_networks(options, options.num_texts + options.skip_texts)
        networks = [skip_texts(network, options.skip_texts) for network in opened]
    return networks + [make_initialised(name, options) for name in options.init]


def measure(options: Options, networks: list[Network], folder: RunFolder) -> xr.Dataset:
    """Measures every network from one starting state.

    Args:
        options: The flags.
        networks: The networks and their texts.
        folder: The run folder; results that it already holds are not computed again.
    """
    parts: dict[str, dict[str, np.ndarray]] = {}
    with Progress(len(networks), "influence", log=folder.log) as progress:
        for network in networks:
            label, count = network.label, len(network.inputs["x"])
            with report_activity(f"measuring {label}", folder.log):
                measure_texts = partial(measure_network, options, network)
                parts[label] = extend_part(folder, f"{label}, texts", count, measure_texts)
                if options.num_ranked and options.start == lens_results.EARLY:
                    ranks = folder.cached(
                        f"{label}, ranks", partial(measure_ranks, options, network)
                    )
                    parts[label] |= ranks
            progress.advance()
    return lens_results.join_networks(parts, networks, options.start)


def load_params(options: Options, network: Network) -> TransformerParams:
    """Loads the weights of a network, or draws them."""
    if network.folder is not None:
        return pretrained.load(network.folder)[1]
    return pretrained.random_like(network.source.settings, jax.random.key(options.seed))[1]


def measure_network(options: Options, network: Network, first_text: int) -> dict[str, np.ndarray]:
    """Measures the texts of one network, arrays [texts, ...] by name.

    Args:
        options: The flags.
        network: A network and its texts.
        first_text: Index of the first measured text.
    """
    params, config, inputs = load_params(options, network), network.source.config, network.inputs
    counts = influence.count_tokens(params, config, inputs)
    reads_tokens = inputs["mask"] is not None  # texts have a mask, arrays of vectors have none
    ids = inputs["x"] if reads_tokens else None
    # The draws of a text depend on its index among all texts, so all are drawn and then cut.
    probe = influence.draw_probe(network.source, ids, counts, options.seed)
    inputs = {name: a if a is None else a[first_text:] for name, a in inputs.items()}
    probe = influence.Probe(*(a[first_text:] for a in probe))
    layer = influence.choose_layer(config.depth, options.start)
    return influence.measure_texts(params, config, inputs, probe, layer)


def measure_ranks(options: Options, network: Network) -> dict[str, np.ndarray]:
    """Measures the ranks of the first texts of a network.

    Args:
        options: The flags.
        network: A network and its texts.
    """
    params, config = load_params(options, network), network.source.config
    few = {n: a if a is None else a[: options.num_ranked] for n, a in network.inputs.items()}
    counts = influence.count_tokens(params, config, few)
    sources = influence.draw_probe(network.source, None, counts, options.seed).source
    layer = influence.choose_layer(config.depth, options.start)
    return {"rank": influence.measure_ranks(params, config, few, sources, counts, layer)}


def write_lenses(options: Options, networks: list[Network]) -> None:
    """Writes the mean Jacobians of causal language models; existing files stay.

    Args:
        options: The flags.
        networks: The networks and their texts.
    """
    folder = Path(options.lens_folder)
    runs.make_folder(folder)
    for network in networks:
        path = folder / f"{network.label}.pt"
        if not network.source.is_causal_lm:
            print(f"no lens of {network.label}: it is not a causal language model")
        elif path.exists():
            print(f"the lens of {network.label} is there: {path}")
        else:
            params, config = load_params(options, network), network.source.config
            lens_file.write_lens(path, *lens_file.mean_jacobians(params, config, network.inputs))
            print(f"written to {path}")


EXPERIMENT = Experiment(
    order=1,
    title="The exact Jacobian by path length",
    brief="how one token influences another in trained networks and at initialisation, by path "
    "length: exact influence (Jacobian) and frozen sums over paths",
    claim="The paper writes the output of a network as a sum over paths (Dong, Cordonnier and "
    "Loukas 2021, section 2.1). In this sum the attention weights are constants: they "
    "keep their values in the full model. We call such a sum frozen. If one token "
    "changes, the attention weights change, too, and a frozen sum leaves out this effect. "
    "No paper says whether a frozen sum points in the direction of the exact influence of "
    "a token on later tokens. No paper says, either, whether the exact influence takes "
    "short paths.",
    needs="trained",
    presets={
        "quick": "--networks=albert-reactions --num_texts=4 --max_tokens=24",
        "reported": "--seed=3000 --start=0.13,0.47,0.8 --num_texts=8 --num_ranked=1 "
        "--init=bert-base-cased,albert-base-v2,xlnet-base-cased --text=data/RTE/test.tsv "
        "--last_texts --skip_texts=32",
        "tiny": "--untrained --networks=llama --start=0.13,0.8 --num_texts=3 --max_tokens=8 "
        "--num_ranked=1",
    },
    figures=describe_figures(shares_figure, sizes_figure, cosine_figure, ranks_figure),
)


def main(options: Flags) -> Run:
    """Measures the points, the combinations of flag values, that the run folder lacks; saves the
    table, figures and claims."""
    count = PROTOCOL.rounds[0] if options.grows else None
    with open_run(options, open_networks, partial(identify_texts, count=count)) as run:
        for point in run.measure(measure, over=AXES):
            results, networks = point.results, point.setup
            if options.lens_folder and run.is_writing:
                write_lenses(options, networks)
            point.save_table(lens_results.make_rows(results))
            point.save_figure("shares", shares_figure, results, networks)
            point.save_figure("sizes", sizes_figure, results, networks)
            point.save_figure("cosine", cosine_figure, results, networks)
            point.save_figure("ranks", ranks_figure, results, networks)
            point.save_claims(lens_results.judge_claims(results, networks))
            point.save_comparisons(lens_results.compare_results(results, networks))
            point.save_finding(lens_results.make_finding(results, networks))
        return run.finish()


if __name__ == "__main__":
    cli.run(main, FLAGS)
