"""What is measured of a network before, while and after it trains: does it learn, and why not?"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import rank_collapse as rc
from rank_collapse.network import entry
from rank_collapse.training.recipe import Hyper, Recipe, config_of
from rank_collapse.training.tasks import examples
from rank_collapse.training.training import Model, batch_forward

MEASURES = ("token_cosine", "residual_ratio")
GRADIENTS = ("w_q", "w_k", "w_v", "w_o", "w_in", "w_out")
LOOKED_AT = 8  # examples whose hidden states are measured


def make_measure(recipe: Recipe) -> Callable[[Model, Any, Hyper], dict[str, Any]]:
    """measure(model, data, hyper) of one run.

    It returns, on examples that training does not see, "accuracy" and "loss" [], the mean over
    examples of `MEASURES` of the hidden states [L + 1], and "gradients" [len(GRADIENTS), L], the
    Frobenius norm of the loss's gradient to each matrix of each layer, all heads together.
    """

    def measure(model, data, hyper):
        config, held_out = config_of(recipe, hyper), data["eval"]

        def loss(model):
            logits = batch_forward(model, held_out, config)
            return examples.loss_metric(logits, held_out), logits

        (value, logits), gradient = jax.value_and_grad(loss, has_aux=True)(model)
        layers = gradient.network.layers
        matrices = {
            n: getattr(layers.attention, n) for n in GRADIENTS if hasattr(layers.attention, n)
        }
        matrices |= {n: getattr(layers.mlp, n) for n in GRADIENTS if n not in matrices}

        def profiles(inputs):
            states = entry.input_states(model.network, inputs, config)
            hidden = rc.apply(model.network, states, config).hidden
            return rc.profile(hidden, measures=MEASURES)

        found = jax.vmap(profiles)(held_out.first(LOOKED_AT).inputs)
        return {
            "accuracy": examples.token_accuracy(logits, held_out),
            "loss": value,
            "gradients": jnp.stack([_norms(matrices[name]) for name in GRADIENTS]),
        } | {name: jnp.mean(found[name], axis=0) for name in MEASURES}

    return measure


def _norms(by_layer):
    """Frobenius norm of each layer's matrix, [L]."""
    return jnp.sqrt(jnp.sum(by_layer**2, axis=tuple(range(1, by_layer.ndim))))
