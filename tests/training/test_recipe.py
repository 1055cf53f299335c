"""Schedules, optimisers, label smoothing and learned gains: closed forms, torch and optax."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.embedding import EmbeddingConfig
from rank_collapse.network.residual import init_gains
from rank_collapse.paths.sets import Classifier
from rank_collapse.training import Ensemble
from rank_collapse.training.recipe import Hyper, Recipe, check_hyper
from rank_collapse.training.tasks import sequences
from rank_collapse.training.tasks.examples import (
    Examples,
)
from rank_collapse.training.training import (
    Model,
    TrainState,
    make_optimizer,
    schedule_factor,
    train_step,
)
from tests.oracles import draws
from tests.oracles.trained_networks import config, recipe
from tests.support.refusals import each_is_refused, is_refused, parametrize_refusals

CONFIG = TransformerConfig(
    d_model=8, embedding=EmbeddingConfig(vocab_size=5, d_embed=8, norm=False)
)


def make_recipe(**fields):
    return Recipe(CONFIG, num_outputs=5, batch_size=4, num_epochs=2, **fields)


def compute_factors(recipe, warmup, steps=12):
    return np.array([schedule_factor(recipe, s // 4, s, 4, warmup) for s in range(steps)])


def test_inverse_sqrt_is_its_closed_form():
    s = np.arange(1, 13)
    factors = compute_factors(make_recipe(schedule="inverse_sqrt"), jnp.float32(4))
    np.testing.assert_allclose(factors, np.minimum(s / 4, np.sqrt(4 / s)), rtol=1e-6)
    # Vaswani et al. 2017, equation 3, up to the factor d^-½ warmup^-½
    np.testing.assert_allclose(factors / 2, np.minimum(s**-0.5, s * 4**-1.5), rtol=1e-6)
    without = compute_factors(make_recipe(schedule="inverse_sqrt"), 0.0)
    np.testing.assert_allclose(without, 1 / np.sqrt(s), rtol=1e-6)


def test_warm_up_multiplies_every_schedule_and_none_is_none():
    s = np.arange(1, 13)
    for fields in ({}, {"schedule": "milestones", "milestones": (1, 2)}, {"schedule": "linear"}):
        plain = compute_factors(make_recipe(**fields), 0.0)
        np.testing.assert_array_equal(plain, compute_factors(make_recipe(**fields), jnp.float32(1)))
        warmed = compute_factors(make_recipe(**fields), jnp.float32(5))
        np.testing.assert_allclose(warmed, plain * np.minimum(s / 5, 1), rtol=1e-6)
    assert (compute_factors(make_recipe(), jnp.float32(0)) == 1).all()


def torch_steps(name, gradients, **options):
    """Parameters after each step of torch's optimiser at learning rate 0.01, from 0."""
    torch = pytest.importorskip("torch")
    p = torch.zeros(gradients.shape[1], dtype=torch.float64, requires_grad=True)
    optimizer = getattr(torch.optim, name)([p], lr=0.01, **options)
    steps = []
    for g in gradients:
        p.grad = torch.tensor(g)
        optimizer.step()
        steps.append(p.detach().numpy().copy())
    return np.array(steps)


@pytest.mark.parametrize("name, b2", [("Adam", 0.999), ("RAdam", 0.999), ("RAdam", 0.9)])
def test_optimizers_step_as_those_of_torch(name, b2):
    gradients = np.random.default_rng(0).normal(size=(40, 6)) + 0.5
    optimizer = make_optimizer(Hyper(), make_recipe(optimizer=name.lower(), b2=b2))
    params = jnp.zeros(6)
    state, steps = optimizer.init(params), []
    update = jax.jit(optimizer.update)
    for g in gradients:
        change, state = update(jnp.asarray(g, jnp.float32), state, params)
        params = params - 0.01 * change
        steps.append(params)
    expected = torch_steps(name, gradients, betas=(0.9, b2))
    np.testing.assert_allclose(steps, expected, rtol=2e-3, atol=1e-5)


def test_a_run_may_have_no_dropout():
    """Its other values are checked as those of other runs are."""
    check_hyper(Hyper(dropout=None), make_recipe())
    values = Hyper(dropout=None, output_dropout=-1.0)
    is_refused("output_dropout=-1", check_hyper, values, make_recipe())


@pytest.mark.full
def test_an_ensemble_sweeps_warm_up_and_smoothing():
    batch = sequences.make_examples(jax.random.key(0), 4, 6, 5)
    ensemble = Ensemble(make_recipe(unroll=1), lambda _: {"train": batch}, epochs_per_chunk=2)
    warmup, smoothing = np.array([0.0, 1.0, 1e9, 0.0]), np.array([0.0, 0.0, 0.0, 0.3])
    swept = Hyper(learning_rate=0.1, dropout=0.0, warmup=warmup, label_smoothing=smoothing)
    losses = ensemble.train(jnp.stack([jax.random.key(1)] * 4), swept).losses
    np.testing.assert_array_equal(losses[0], losses[1])
    assert abs(losses[2, 1] - losses[2, 0]) < 1e-5 < abs(losses[0, 1] - losses[0, 0])
    assert abs(losses[3, 0] - losses[0, 0]) > 1e-5


@pytest.mark.parametrize(
    "values, fields, message",
    [
        ({"warmup": -1.0}, {}, "warmup=-1"),
        ({"warmup": np.array([3.0, np.nan])}, {}, "warmup=nan"),
        ({"label_smoothing": np.array([0.1, 1.0])}, {}, "label_smoothing=1.0 is not in"),
        ({"label_smoothing": 0.1}, {"loss": "squared_error"}, "has none"),
        ({"label_smoothing": np.array([0.0, 0.1])}, {"loss": "squared_error"}, "has none"),
        ({"dropout": 1.5}, {}, r"dropout=1.5 is not in \[0, 1\)"),
        ({"dropout": np.array([0.1, -0.5])}, {}, "dropout=-0.5"),
        ({"learning_rate": None}, {}, "learning_rate=None"),
        ({"learning_rate": [1e-3]}, {}, r"learning_rate=\[0.001\]"),
        ({"learning_rate": float("nan")}, {}, "learning_rate=nan"),
        ({"weight_decay": "0.1"}, {}, "weight_decay='0.1'"),
        ({"output_dropout": float("nan")}, {}, "output_dropout=nan"),
        ({"init_scale": None}, {}, "init_scale=None"),
        ({"network": [1.0]}, {}, r"network=\[1.0\] is not a mapping"),
        ({"dropout": 0.5, "output_dropout": 3.0}, {}, r"output_dropout=1.5 is not in"),
    ],
)
def test_floats_that_mean_nothing_are_named(values, fields, message):
    each_is_refused(
        (lambda: check_hyper(Hyper(**values), make_recipe(**fields)), message),
        (
            lambda: Ensemble(make_recipe(**fields), dict).train(jnp.zeros(1), Hyper(**values)),
            message,
        ),
    )


@parametrize_refusals(
    [
        ({"optimizer": "sgd"}, "optimizer='sgd'"),
        ({"b2": 1.0}, r"b2=1.0 is not in \[0, 1\)"),
        ({"eps": 0.0}, r"eps=0.0 is not in \(0, inf\]"),
        ({"decay": float("nan")}, "decay=nan"),
        ({"output_dropout": "yes"}, "output_dropout=.yes. is not one of"),
        ({"milestones": 5}, "milestones=5 is not a tuple of epochs"),
        ({"milestones": (3.5,)}, r"milestones=\(3.5,\)"),
        ({"milestones": (15, 3.5)}, r"milestones=\(15, 3.5\)"),
        ({"start": 3}, "start=3 is not a function"),
        ({"clip_norm": -1.0}, "clip_norm=-1.0 is not in"),
    ]
)
def test_bad_optimizers_are_named(arguments, message):
    (fields,) = arguments
    is_refused(message, lambda: make_recipe(**fields))


EMBEDDING = rc.EmbeddingConfig(vocab_size=5, d_embed=6)


@pytest.mark.full
def test_a_step_moves_them():
    config = rc.design(rc.transformer(2, 2, 6, embedding=EMBEDDING, d_ff=5), "admin_log")
    recipe = Recipe(config.replace(learned_branch_gain=0.5), 3, 4, 1, unroll=1)
    hyper = jax.tree.map(jnp.float32, Hyper(dropout=0.0))
    network = draws.parameters(recipe.config)
    network = network.replace(layers=network.layers.replace(**init_gains(recipe.config)))
    classifier = Classifier(np.eye(6, 3, dtype=np.float32), np.zeros(3, np.float32))
    model = jax.device_get(Model(network=network, classifier=classifier))
    optimizer = jax.jit(make_optimizer(hyper, recipe).init)(model)
    state = TrainState(model, optimizer, jax.random.key(0))
    ids = np.arange(12).reshape(4, 3) % 5
    batch = Examples(inputs=jnp.asarray(ids), labels=jnp.asarray(ids % 3))

    @jax.jit
    def step(state):
        return train_step(state, batch, jnp.ones(4, bool), 0, jnp.ones(()), hyper, recipe)[0]

    before, after = state, step(state)
    for kind in ("attention", "mlp"):
        for gain, start in (("skip", 1.0), ("branch", 0.5)):
            old, new = (
                np.asarray(getattr(getattr(s.model.network.layers, f"{kind}_gains"), gain))
                for s in (before, after)
            )
            assert old.shape == (2, 6) and np.all(old == start)
            np.testing.assert_allclose(np.abs(new - old), 1e-3, rtol=0.02)  # Adam's first step


def test_what_is_not_given_is_as_in_the_paper():
    assert dataclasses.asdict(Hyper()) == {
        "learning_rate": 1e-3,
        "weight_decay": 0,
        "dropout": 0.1,
        "output_dropout": 1,
        "init_scale": 1,
        "warmup": 0,
        "label_smoothing": 0,
        "network": None,
        "start": None,
    }
    arguments = {"config": config(), "num_outputs": 5, "batch_size": 4, "num_epochs": 3}
    fields = vars(Recipe(**arguments))
    assert {name: fields[name] for name in fields.keys() - arguments} == {
        "loss": "cross_entropy",
        "shuffle": False,
        "schedule": "constant",
        "milestones": (15, 30, 40, 50, 60),
        "decay": 0.91,
        "clip_norm": None,
        "output_dropout": False,
        "unroll": 6,
        "optimizer": "adam",
        "b1": 0.9,
        "b2": 0.999,
        "eps": 1e-8,
        "start": None,
    }


@parametrize_refusals(
    [
        ({"b1": 1.0}, r"b1=1.0 is not in \[0, 1\)"),
        ({"clip_norm": 0.0}, r"clip_norm=0.0 is not in \(0, inf\]"),
        ({"num_outputs": 0}, "num_outputs=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"num_epochs": -1}, "num_epochs=-1"),
        ({"num_epochs": 2.5}, "num_epochs=2.5"),
        ({"unroll": 0}, "unroll=0"),
        ({"loss": "hinge"}, "loss='hinge'"),
        ({"schedule": "cosine"}, "schedule='cosine'"),
        ({"config": TransformerConfig()}, "^config.embedding=None: a trained network needs"),
        ({"config": None}, "config is a NoneType"),
    ]
)
def test_bad_recipes_are_named(arguments, message):
    (fields,) = arguments
    is_refused(message, lambda: recipe(**fields))
