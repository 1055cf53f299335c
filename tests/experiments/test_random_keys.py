"""Random draws of one seed: no key is used for two of them.

The functions are only traced, where JAX sees each use of a key.
"""

from functools import partial

import jax
import pytest

from experiments import (
    run_collapse,
    run_convex_hull,
    run_path_chains,
    run_trainability,
    run_transformer,
)
from experiments.theorems import draws as theorem_draws, initial
from experiments.train import design_cells
from experiments.transformer import grammar
from tests.support.runs import parsed


def draw_transformer(task):
    options = parsed(run_transformer, f"--task={task}", "--n_train_data=8", "--n_eval_data=4")
    return partial(run_transformer.make_data, options)


def draw_collapse():
    options = parsed(run_collapse, *run_collapse.EXPERIMENT.presets["tiny"])
    setup = run_collapse.make_setup(options)
    return lambda key: run_collapse.draw(options, setup, key, (1.0, 1.0))


def draw_path_chains():
    options = parsed(run_path_chains, *run_path_chains.EXPERIMENT.presets["tiny"])
    return partial(run_path_chains.draw, options, run_path_chains.make_setup(options))


def draw_cells():
    options = parsed(run_trainability, *run_trainability.EXPERIMENT.presets["tiny"])
    return partial(design_cells.make_data, options, 2)


def draw_statistic(name):
    statistic = theorem_draws.STATISTICS[name]
    return partial(statistic.compute, **next(iter(statistic.settings.values())))


# Those that compare two networks on the same draws use a key twice, and long ones are left out.
SINGLE = {*theorem_draws.STATISTICS} - {"head number", "rollout bound", "noise apart"}
DRAWS = {
    "lexicon": lambda: grammar.make_lexicon,
    "translation": partial(draw_transformer, "translation"),
    "reversal": partial(draw_transformer, "reverse"),
    "hull": lambda: partial(run_convex_hull.make_examples, num_examples=3, num_points=4),
    "collapse": draw_collapse,
    "path chains": draw_path_chains,
    "trainability": draw_cells,
    "theorems, heads": lambda: partial(initial.pass_heads, heads=2, depth=2, n=3, d=4),
    "theorems, pairs": lambda: partial(initial.pass_pair, time=1.0, d=4, depth=2, random=True),
} | {f"theorems, {name}": partial(draw_statistic, name) for name in sorted(SINGLE)}


@pytest.mark.parametrize("name", DRAWS)
def test_no_key_is_used_for_two_draws(name):
    draw = DRAWS[name]()
    with jax.debug_key_reuse(True):
        jax.make_jaxpr(draw)(jax.random.key(0))


def test_a_key_of_two_draws_is_seen():
    def draw(key):
        return jax.random.normal(key, (2,)) + jax.random.uniform(key, (2,))

    with jax.debug_key_reuse(True), pytest.raises(jax.errors.KeyReuseError):
        jax.make_jaxpr(draw)(jax.random.key(0))
