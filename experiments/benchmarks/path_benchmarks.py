"""Benchmarks of path sums and path sets."""

import jax
import jax.numpy as jnp
from absl.flags import FlagValues
from jax.ad_checkpoint import checkpoint_name

import rank_collapse as rc
from experiments.benchmarks.timing import Report, compare_cases, largest_difference, median_ratio
from rank_collapse.network.embedding import EmbeddingConfig
from rank_collapse.paths.sets import classify_states

BERT_BASE = rc.transformer(depth=12, num_heads=12, d_model=768)
LARGE, LARGE_TOKENS = rc.transformer(depth=24, num_heads=16, d_model=1024), 512
TINY = rc.transformer(depth=2, num_heads=2, d_model=8)


def draw_network(
    config: rc.TransformerConfig, num_tokens: int
) -> tuple[rc.network.TransformerParams, jax.Array]:
    """Draws weights and tokens [n, d] of a network."""

    def draw(key):
        x = jax.random.normal(jax.random.fold_in(key, 1), (num_tokens, config.d_model))
        return rc.init(key, config, bias_scale=0.02), x

    return jax.block_until_ready(jax.jit(draw)(jax.random.key(0)))


def time_exact_paths(
    options: FlagValues, config: rc.TransformerConfig = BERT_BASE, num_tokens: int = 128
) -> Report:
    """Measures the time of exact path sums by length, and the forward pass.

    By default 12 layers of 12 heads, width 768, MLP 3072, post-norm: 13^12 = 2.3e13 paths. The
    benchmark also takes the same sums by `function_contributions`, which does not use the network's
    structure.

    Args:
        options: The flags of `experiments.benchmark`.
        config: The network.
        num_tokens: Number of tokens in the input.
    """
    params, x = draw_network(config, num_tokens)

    # Without the trace: a forward pass that stores what no measurement reads would look slower.
    forward = jax.jit(lambda p, x, c: rc.apply(p, x, c).output)
    exact = jax.jit(lambda p, x, c: rc.path_contributions(p, x, c))

    @jax.jit
    def function(params, x, config):
        """Sums the paths of `rc.apply` by `function_contributions`; its branches have names."""
        edit = {"attention_branch": lambda branch, layer: checkpoint_name(branch, "attention")}

        def compute_output(x):
            return rc.apply(params, x, config, edit=edit).output

        return rc.function_contributions(compute_output, x, branches="attention")

    cases = {
        "forward pass": (forward, (params, x, config)),
        "path contributions": (exact, (params, x, config)),
        "path contributions of any function": (function, (params, x, config)),
    }

    def make_figures(forward, sums, function):
        """Computes the figures of the benchmark, {name: (value, limit or None)}.

        Args:
            forward, sums, function: Times and outputs of the forward pass, of the sums over paths
                of our network, and of those of any function.
        """
        output, total = forward.output, sums.output.total
        error = jnp.linalg.norm(total - output) / jnp.linalg.norm(output)
        return {
            "forward passes per decomposition": (median_ratio(sums, forward), 9.0),
            "forward passes per decomposition of any function": (
                median_ratio(function, forward),
                None,
            ),
            "largest relative difference of the two": (
                largest_difference(function.output.by_length, sums.output.by_length),
                1e-5,
            ),
            "relative error of the sum (Frobenius)": (float(error), 1e-5),
            "relative error of the sum (largest entry)": (largest_difference(total, output), 1e-5),
            "GB beyond the weights, of the compiled program": (sums.gigabytes, 1.0),
        }

    return compare_cases(cases, options.rounds, make_figures)


def time_head_contributions(
    options: FlagValues, config: rc.TransformerConfig = BERT_BASE, num_tokens: int = 128
) -> Report:
    """Measures the time of every head's contribution to the output.

    At the size of BERT-base these are 144 heads, 57 MB.

    Args:
        options: The flags of `experiments.benchmark`.
        config: The network.
        num_tokens: Number of tokens in the input.
    """
    params, x = draw_network(config, num_tokens)
    contributions = jax.jit(lambda p, x, c: rc.head_contributions(p, x, c))
    return compare_cases(
        {"head contributions": (contributions, (params, x, config))},
        options.rounds,
        lambda timing: {
            "seconds": (timing.best, 20.0),
            "GB beyond the weights, of the compiled program": (timing.gigabytes, 1.0),
        },
    )


def time_recomputed_paths(options: FlagValues, depth: int = 6, num_sequences: int = 200) -> Report:
    """Measures the time of recomputed path sets, and of every path evaluated separately.

    The sizes are those of the sort experiment: 5 repeats of 5 paths of each length, sequences of 8
    tokens, 2 heads, width 48.

    Args:
        options: The flags of `experiments.benchmark`.
        depth: Layers.
        num_sequences: Sequences that the paths read.
    """
    embedding = EmbeddingConfig(
        vocab_size=10, d_embed=48, positions="learned", num_positions=8, projection="before_norm"
    )
    config = rc.transformer(depth, 2, 48, mlp="none", init="reference", embedding=embedding)
    keys = jax.random.split(jax.random.key(0), 4)
    params = jax.jit(lambda k: rc.init(k, config))(keys[0])
    classifier = rc.paths.Classifier(jax.random.normal(keys[1], (48, 10)), jnp.zeros(10))
    inputs = jax.random.randint(keys[2], (num_sequences, 8), 0, 10)
    paths = rc.paths.sample_path_sets(keys[3], range(depth + 1), 5, 5, depth, 2)

    def evaluate_sets(params, classifier, inputs, paths):
        """Computes the logits of sets of paths, for each of the inputs."""

        def logits(x):
            return rc.paths.path_set_logits(params, x, config, paths, classifier, no_sub_path=True)

        return jax.vmap(logits)(inputs)

    def evaluate_paths(params, classifier, inputs, paths):
        """Evaluates every path separately, and classifies the sums of the sets."""

        def state(path):
            return jax.vmap(
                lambda x: rc.paths.path_state(params, x, config, path, no_sub_path=True)
            )(inputs)

        states = jax.lax.map(state, paths.reshape(-1, depth))
        sums = states.reshape(*paths.shape[:3], *states.shape[1:]).sum(axis=2)
        return classify_states(classifier, jnp.moveaxis(sums, 2, 0))

    arguments = (params, classifier, inputs, paths)
    cases = {
        "each path by itself": (jax.jit(evaluate_paths), arguments),
        "sets, shared beginnings once": (jax.jit(evaluate_sets), arguments),
    }

    def make_figures(base, shared):
        difference = largest_difference(shared.output, base.output)
        return {
            "seconds for all sets": (shared.best, 1.0),
            "largest relative difference of the two": (difference, 1e-5),
        }

    return compare_cases(cases, options.rounds, make_figures)
