"""The figures of run_trained, of arrays that are made up, are kept as texts."""

from experiments.trained import trained_figures
from experiments.trained.trained_results import needed_lengths
from tests.oracles.trained_arrays import make_arrays, make_network
from tests.support.figures_as_data import describe


def test_golden_figures_of_trained_networks(golden):
    """An ALBERT, a causal network, and one that predicts nothing; some texts need all lengths."""
    networks = [
        make_network("x", "none"),
        make_network("a", "none"),
        make_network("b", "causal", 4),
    ]
    results = {
        "b": make_arrays(1),
        "a": make_arrays(2, is_albert=True),
        "x": {n: a for n, a in make_arrays(0).items() if not n.startswith("paths/")},
    }
    for label, needed in (("a", [1, 4, 4]), ("b", [0, 0, 2])):
        arrays, lengths = results[label], results[label]["paths/lengths"][0]
        is_far = lengths < [[k] for k in needed]
        arrays["paths/loss_frozen"] = arrays["paths/loss"][:, None] + 0.2 * is_far
        assert needed_lengths(arrays).tolist() == needed
    for arrays in results.values():
        curves = [name for name in arrays if name.startswith("log10_ratio/")]
        arrays |= {f"random/{name}": 0.7 * arrays[name] for name in curves}
    figures = {
        "trained": trained_figures.trained_figure(results, networks),
        "residuals": trained_figures.residuals_figure(results, networks),
        "path_lengths": trained_figures.path_lengths_figure(results, networks),
        "path_lengths of none": trained_figures.path_lengths_figure(results, networks[:1]),
    }
    text = "".join(f"== {name}\n{describe(figure)}" for name, figure in figures.items())
    golden("trained_figures.txt", text)
    for name, place in (("trained", 1), ("trained", 0), ("residuals", 0), ("residuals", 3)):
        ax = figures[name].axes[place]
        ax.set_xlim(0, 1.5)  # where ticks would be parts of a layer
        assert (ax.get_xticks() % 1 == 0).all(), (name, place)
