"""A small classifier, its recipe, data and optimiser state."""

import dataclasses

import jax
import jax.numpy as jnp

from experiments.train import sorting
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.embedding import EmbeddingConfig
from rank_collapse.training.training import (
    Hyper,
    Recipe,
    init_state,
)


def config(**fields):
    embedding = EmbeddingConfig(
        vocab_size=5, d_embed=8, positions="learned", num_positions=4, projection="before_norm"
    )
    defaults = {
        "depth": 1,
        "num_heads": 2,
        "d_model": 8,
        "attention_skip": True,
        "norm_placement": "post",
        "init": "reference",
        "embedding": embedding,
    }
    return TransformerConfig(**(defaults | fields))


def recipe(**fields):
    return Recipe(
        **({"config": config(), "num_outputs": 5, "batch_size": 4, "num_epochs": 3} | fields)
    )


def data(count=10):
    return jax.jit(lambda key: sorting.make_examples(key, count, 4, 5))(jax.random.key(1))


def begin(values, chosen):
    return jax.jit(lambda key: init_state(key, values, chosen))(jax.random.key(0))


def hyper(**values):
    fields = dataclasses.asdict(Hyper()) | values
    return Hyper(**jax.tree.map(jnp.float32, fields))
