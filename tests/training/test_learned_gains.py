"""Gains that are trained: the optimiser moves them."""

import draws
import jax
import jax.numpy as jnp
import numpy as np

import rank_collapse as rc
from rank_collapse.network.gains import init_gains
from rank_collapse.paths.sets import Classifier
from rank_collapse.training.recipe import Hyper, Recipe
from rank_collapse.training.tasks.examples import Examples
from rank_collapse.training.training import Model, TrainState, make_optimizer, train_step

EMBEDDING = rc.EmbeddingConfig(vocab_size=5, d_embed=6)


def test_a_step_moves_them():
    config = rc.design(rc.transformer(2, 2, 6, embedding=EMBEDDING, d_ff=5), "admin_log")
    chosen = Recipe(config.replace(learned_branch_gain=0.5), 3, 4, 1, unroll=1)
    hyper = jax.tree.map(jnp.float32, Hyper(dropout=0.0))
    network = draws.parameters(chosen.config)
    network = network.replace(layers=network.layers.replace(**init_gains(chosen.config)))
    model = Model(network=network, classifier=Classifier(jnp.eye(6)[:, :3], jnp.zeros(3)))
    state = TrainState(model, make_optimizer(hyper, chosen).init(model), jax.random.key(0))
    ids = jnp.arange(12).reshape(4, 3) % 5
    batch = Examples(inputs=ids, labels=ids % 3)

    @jax.jit
    def step(state):
        return train_step(state, batch, jnp.ones(4, bool), 0, jnp.ones(()), hyper, chosen)[0]

    before, after = (jax.tree.map(lambda a: a[None], s) for s in (state, step(state)))
    for kind in ("attention", "mlp"):
        for which, start in (("skip", 1.0), ("branch", 0.5)):
            old, new = (
                np.asarray(getattr(getattr(s.model.network.layers, f"{kind}_gains"), which))
                for s in (before, after)
            )
            assert old.shape == (1, 2, 6) and np.all(old == start)
            np.testing.assert_allclose(np.abs(new - old), 1e-3, rtol=0.02)  # Adam's first step
