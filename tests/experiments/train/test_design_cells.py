"""Designs that are trained: who fails, and what a guess reaches."""

import contextlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from experiments.lab import Chunk, RunFolder, cli, list_points
from experiments.train import design_cells
from rank_collapse.training import Hyper
from rank_collapse.training.models import Model
from rank_collapse.training.tasks.examples import Examples
from tests.support.closeness import assert_close


def test_a_guess_stays_below_the_limit():
    limit = design_cells.guess_limit(1024, 10)
    assert 0.002 < stats.binom.sf(limit * 1024, 1024, 0.1) < 0.008


def test_who_fails():
    results = {
        "losses": np.array([[2.0, np.nan], [2.0, 2.0], [2.0, 0.1], [2.0, 1.0]]),
        "accuracy": np.array([[0.1, 0.9], [0.9, 0.12], [0.1, 0.13], [0.1, np.nan]]),
    }
    np.testing.assert_array_equal(design_cells.has_failed(results, 0.12), [True, True, False, True])


def test_what_is_measured_of_a_run_is_of_held_out_examples(monkeypatch):
    """A model of one number, whose logits it multiplies: the loss and its gradient by hand."""
    count, n, classes = design_cells.NUM_MEASURED + 3, 4, 3
    rng = np.random.default_rng(2)
    features = jnp.asarray(rng.normal(size=(count, n, classes)), jnp.float32)
    labels = jnp.asarray(rng.integers(0, classes, (count, n)))
    inputs = jnp.asarray(rng.integers(0, 9, (count, n)))
    data = {"eval": Examples(inputs, labels), "train": None}
    model = Model(jnp.float32(1.5), jnp.float32(0.0))

    def forward(model, examples, config):
        assert examples is data["eval"] and config == "config"
        return model.network * features

    def norms_of(matrices):
        names = dict(enumerate(design_cells.GRADIENTS))
        norms = {name: jnp.stack([matrices, matrices * (i + 2)]) for i, name in names.items()}
        attention = {name: norms[name] for name in ("w_o", "w_v", "w_k", "w_q")}
        return {"attention": attention, "mlp": {"w_out": norms["w_out"], "w_in": norms["w_in"]}}

    def apply(network, states, config):
        return SimpleNamespace(hidden=states[None, :, None] * jnp.array([1.0, 2, 3])[:, None, None])

    def profile(hidden, *, measures):
        assert measures == design_cells.MEASURES
        total = hidden.sum(axis=(1, 2))
        return {"token_cosine": total, "residual_ratio": 10 * total}

    for name, fake in {
        "run_config": lambda recipe, hyper: "config" if (recipe, hyper) == ("r", "h") else None,
        "batch_forward": forward,
        "get_weight_matrices": lambda network: network,
        "compute_matrix_norms": norms_of,
        "input_states": lambda network, ids, config: ids.astype(jnp.float32),
    }.items():
        monkeypatch.setattr(design_cells, name, fake)
    monkeypatch.setattr(design_cells.rc, "apply", apply)
    monkeypatch.setattr(design_cells.rc, "profile", profile)
    measured = design_cells.make_measure("r")(model, data, "h", None)

    def compute_loss(scale):
        scores = scale * np.asarray(features, float)
        logs = scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True))
        return -np.take_along_axis(logs, np.asarray(labels)[..., None], axis=-1).mean()

    assert_close(measured["loss"], compute_loss(1.5), rtol=1e-5)
    assert_close(measured["accuracy"], (features.argmax(axis=-1) == labels).mean())
    slope = (compute_loss(1.5 + 1e-5) - compute_loss(1.5 - 1e-5)) / 2e-5
    expected = [[slope, slope * (i + 2)] for i in range(6)]  # in the order of GRADIENTS
    assert_close(measured["gradients"], expected, rtol=1e-4)
    sums = np.asarray(inputs)[: design_cells.NUM_MEASURED].sum(axis=1).mean()
    assert_close(measured["token_cosine"], sums * np.array([1, 2, 3]), rtol=1e-5)
    assert_close(measured["residual_ratio"], 10 * sums * np.array([1, 2, 3]), rtol=1e-5)
    results = {"gradients": np.arange(36.0).reshape(2, 3, 6, 1)}
    assert design_cells.gradient_norms(results, "w_v").ravel().tolist() == [2, 8, 14, 20, 26, 32]


def test_gains_of_admin_are_those_of_the_first_batch(monkeypatch):
    seen = []

    def profile(network, batch, config):
        seen.append((network, batch.tolist(), config))
        return SimpleNamespace(skip_gain="ω")

    config = SimpleNamespace(replace=lambda **fields: fields)
    monkeypatch.setattr(design_cells.rc.network, "admin_profile", profile)
    hyper = Hyper(1e-3, dropout=None, network={"skip_gain": 5.0, "branch_gain": 2.0})
    data = {"train": Examples(jnp.arange(10).reshape(5, 2), None), "eval": None}
    recipe = SimpleNamespace(config=config, batch_size=2)
    gains = design_cells.admin_gains(recipe, SimpleNamespace(network="net"), data, hyper)
    assert seen == [("net", [[0, 1], [2, 3]], {"skip_gain": 1.0, "branch_gain": 2.0})]
    assert gains.network == {"skip_gain": "ω", "branch_gain": 2.0}
    assert gains.learning_rate == 1e-3


def test_data_of_a_seed_are_an_epoch_and_what_is_held_out():
    options = SimpleNamespace(num_tokens=3, num_labels=5, task="sort", n_eval_data=7)
    data = design_cells.make_data(options, 2, jax.random.key(1))
    assert len(data["train"]) == 2 * design_cells.STEPS_PER_EPOCH and len(data["eval"]) == 7
    for part in data.values():
        np.testing.assert_array_equal(part.labels, np.sort(part.inputs, axis=1))
        assert part.inputs.shape[1] == 3 and part.inputs.max() == 4


def test_cells_of_one_program_are_trained_together_with_their_own_gains(monkeypatch):
    """The ensemble has one look at each part of training; gains come from the runs' own start."""
    options = SimpleNamespace(n_steps=10 * design_cells.STEPS_PER_EPOCH, num_labels=4, num_tokens=3)
    made = []
    monkeypatch.setattr(design_cells, "make_measure", lambda recipe: ("measure", recipe))
    monkeypatch.setattr(design_cells, "Ensemble", lambda *a, **options: made.append((a, options)))
    config = design_cells.rc.transformer(
        1, 1, 4, embedding=design_cells.rc.EmbeddingConfig(vocab_size=4, d_embed=4)
    )
    for n_steps, num_epochs in ((options.n_steps, 10), (25, 1)):
        options.n_steps = n_steps
        design_cells.make_ensemble(options, config, 6, "mesh")
        (recipe, make_data), settings = made.pop()
        assert (recipe.num_outputs, recipe.batch_size, recipe.num_epochs) == (4, 6, num_epochs)
        assert recipe.config is config and recipe.shuffle and recipe.unroll == 1
        assert make_data.func is design_cells.make_data and make_data.args == (options, 6)
        assert settings == {
            "mesh": "mesh",
            "epochs_per_chunk": -(-num_epochs // design_cells.LOOKS),
            "watch": ("measure", recipe),
        }

    program = SimpleNamespace(unflatten=lambda runs: (f"model of {runs}", f"data of {runs}"))
    ensemble = SimpleNamespace(
        begin=lambda keys, hyper: (program, f"runs {keys} {hyper}"),
        lay_out=lambda values: tuple(f"laid out {value}" for value in values),
    )
    chunk = Chunk(("a", "b"), (0, 1), "keys", "hyper")
    monkeypatch.setattr(type(chunk), "unpadded", property(lambda self: (self.keys, self.floats)))
    profiled = design_cells.profile_gains(
        ensemble,
        lambda *arguments, num_seeds: (*arguments, num_seeds),
        chunk,
        SimpleNamespace(log=lambda line: None),
    )
    runs = "runs keys hyper"
    assert profiled[:3] == chunk[:3] and profiled.floats == (
        *(f"model of {runs}", f"data of {runs}", "laid out hyper", "laid out keys"),
        2,
    )


def test_cells_that_share_a_program_are_trained_together_and_each_has_its_results(
    tmp_path, monkeypatch
):
    """The rate and the warm-up are numbers of a run; the depth, Admin and the batch are not."""
    flags = ["--num_seeds=3", "--num_devices=1", "--d_model=8", "--num_tokens=4", "--num_labels=2"]
    (options,) = list_points(cli.parse_flags(design_cells.make_flags(()), flags))
    make = design_cells.Cell
    cells = [
        make(2, "post", 1e-3, 0, 4),
        make(2, "admin", 1e-3, 0, 4),
        make(2, "post", 1e-2, 5, 4),
        make(2, "post", 1e-3, 0, 8),
        make(3, "post", 1e-3, 0, 4),
        make(2, "admin", 1e-2, 0, 4),
    ]
    trained, profiled = [], []

    def make_ensemble(options, config, batch_size, mesh):
        def train(keys, hyper, **calls):
            assert calls == {"on_chunk": "chunk"}
            rates = np.asarray(hyper.learning_rate)
            trained.append((config.depth, batch_size, rates.tolist(), hyper.warmup.tolist()))
            return SimpleNamespace(
                losses=np.where(np.arange(len(rates)) == 1, np.nan, 1.0)[:, None],
                diverged_at=np.full(len(rates), -1),
                watched={"accuracy": np.stack([0 * rates, 300 * rates + config.depth / 10], 1)},
            )

        return SimpleNamespace(recipe="recipe", train=train, map_models=lambda fn: fn)

    def profile_gains(ensemble, profile, chunk, folder):
        assert profile.func is design_cells.admin_gains and profile.args == ("recipe",)
        profiled.append([*chunk.cells])
        gains = chunk.floats.network["skip_gain"]  # one for each layer, as those of the profile
        assert gains.attention.shape == gains.mlp.shape == (len(chunk.keys), 2)
        return chunk

    monkeypatch.setattr(design_cells, "make_ensemble", make_ensemble)
    monkeypatch.setattr(design_cells, "profile_gains", profile_gains)
    calls = contextlib.nullcontext({"on_chunk": "chunk"})
    monkeypatch.setattr(design_cells, "keep_states", lambda *_: calls)
    for _ in range(2):  # the second time it is read
        with RunFolder(tmp_path, {}) as folder:
            results = design_cells.train_cells(options, lambda point: cells, folder)
    low, high = [np.float32(1e-3).item()] * 3, [np.float32(1e-2).item()] * 3
    warmups = [0, 0, 0, 5, 5, 5], [0] * 6, [0] * 3, [0] * 3
    assert trained == [
        (*program, warmup)
        for program, warmup in zip(
            [(2, 4, low + high), (2, 4, low + high), (2, 8, low), (3, 4, low)], warmups, strict=True
        )
    ]
    assert profiled == [[name for cell in cells[1::4] for name in [cell.name] * 3]]
    assert [*results] == cells
    limit = 0.5 + 2.58 * np.sqrt(0.25 / (options.n_eval_data * 4))
    for cell, arrays in results.items():
        accuracy = 300 * cell.learning_rate + cell.depth / 10
        assert_close(arrays["accuracy"][:, -1], [accuracy] * 3, rtol=1e-5)
        has_diverged = [
            cell in (cells[0], cells[1], cells[3], cells[4]) and s == 1 for s in range(3)
        ]
        assert np.isnan(arrays["losses"][:, 0]).tolist() == has_diverged
        assert arrays["failed"].tolist() == [accuracy <= limit or d for d in has_diverged]
