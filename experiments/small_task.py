"""Whether networks of any configuration train: one small task, several seeds of each, no warm-up.

The task is to name the previous letter at each position of a random sequence, which takes attention
and works under a causal mask too. Networks that differ only in numbers are trained by one program.

    found = train_networks(options, {"post, L=18": Network(config)}, run, count=8)
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import rank_collapse as rc
from experiments.shell import cli
from experiments.shell.executor import Executor
from experiments.shell.options import Flags
from experiments.trained import designs
from experiments.trained.training import Training, nested, results_of_cells
from rank_collapse.network.config import SWEPT
from rank_collapse.network.inputs import input_states
from rank_collapse.runs.folder import RunFolder
from rank_collapse.runs.seeds import seed_keys
from rank_collapse.training import Ensemble, Hyper, Recipe
from rank_collapse.training.recipe import config_of
from rank_collapse.training.tasks.examples import Examples, token_accuracy

LETTERS, BATCH, EVAL = 5, 16, 64
LOOKS = 4  # evaluations, besides the one before training
STEPS = 25  # of an epoch
TOGETHER = 16  # runs of one program, at most


class Network(NamedTuple):
    """What is trained.

    Attributes:
        config: Without an embedding.
        start: (parameters, floats) → parameters as training starts from them; as drawn for None.
        floats: A pytree of numbers.
    """

    config: rc.TransformerConfig
    start: Callable[[Any, Any], Any] | None = None
    floats: Any = None

    @property
    def swept(self) -> dict[str, Any]:
        """The fields of the configuration that compiled programs take as arguments."""
        values = {name: getattr(self.config, name) for name in SWEPT}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def program(self) -> Any:
        """What networks share that differ in numbers alone."""
        leaves, structure = jax.tree.flatten((self.config, self.floats))
        return structure, tuple(np.shape(a) for a in leaves), self.start


def define_flags(flags: Flags, *, steps: int = 300, least: int = 1, seeds: int | None = 8) -> None:
    """The flags of the training, of at least 0 or 1 steps; with seeds of None --num_seeds says how
    many are trained."""
    define = cli.definer(flags)
    none = "" if least else ", or 0 for none"
    text = f"Training steps, in hundreds: {LOOKS * STEPS} and more{none}."
    define("integer", "train_steps", steps, text, lower_bound=least, upper_bound=10**6)
    define("float", "train_rate", 1e-3, "Adam's learning rate, from the first step on.")
    if seeds is not None:
        define(
            "integer",
            "train_seeds",
            seeds,
            "Seeds that are trained.",
            lower_bound=1,
            upper_bound=cli.MOST_SEEDS,
        )
    define("integer", "train_tokens", 8, "Tokens of a sequence of the task.", lower_bound=2)


def train_networks(
    options: Flags, networks: Mapping[str, Network], run: RunFolder
) -> dict[str, dict[str, Any]]:
    """{name: "accuracy" [s, t] and "cosine" [s, t, L + 1] before training and at `LOOKS` steps of
    it, on examples of their own; "losses" [s, e]; "step_seconds" [s]}.

    Args:
        options: The flags of `define_flags`.
        networks: By name, which is that of the run's arrays.
        run: Keeps what is done.
    """
    own = "train_seeds" if "train_seeds" in options else "num_seeds"
    keys = seed_keys(options.seed, options[own].value)
    one_of = {network.program: network for network in networks.values()}
    cells = {
        name: (n.program, Hyper(options.train_rate, dropout=None, network=n.swept, start=n.floats))
        for name, n in networks.items()
    }
    with Executor(options, run, alone=True) as executor:
        found = results_of_cells(
            executor,
            cells,
            lambda program: _training(options, one_of[program], executor),
            keys=keys,
            most=max(len(keys), TOGETHER),
        )
    return {name: nested(own) for name, own in found.items()}


def _training(options, network, executor):
    """What trains networks of one program."""
    tokens, epochs = options.train_tokens, epochs_of(options)
    config = network.config.replace(embedding=embedding_of(network.config, tokens))
    recipe = Recipe(
        config, LETTERS, BATCH, LOOKS * epochs, shuffle=True, unroll=1, start=network.start
    )

    def make_data(key):
        key_train, key_eval = jax.random.split(key)
        return {
            "train": examples_of(key_train, STEPS * BATCH, tokens),
            "eval": examples_of(key_eval, EVAL, tokens),
        }

    def measure(model, data, hyper, _):
        config, held_out = config_of(recipe, hyper), data["eval"]

        def of_one(inputs):
            states = input_states(model.network, inputs, config)
            trace = rc.apply(model.network, states, config.replace(embedding=None))
            w, b = model.classifier
            return trace.output @ w + b[None, :], rc.token_cosine(trace.hidden)

        logits, cosine = jax.vmap(of_one)(held_out.inputs)
        return {"accuracy": token_accuracy(logits, held_out), "cosine": cosine.mean(axis=0)}

    ensemble = Ensemble(
        recipe, make_data, mesh=executor.mesh, epochs_per_chunk=epochs, watch=measure
    )
    return Training(ensemble, executor.run, steps=STEPS)


def epochs_of(options: Flags) -> int:
    """Epochs between two looks."""
    return max(1, options.train_steps // (LOOKS * STEPS))


def steps_of(options: Flags) -> np.ndarray:
    """The training steps of the looks."""
    return STEPS * epochs_of(options) * np.arange(LOOKS + 1)


def embedding_of(config: rc.TransformerConfig, num_tokens: int) -> rc.EmbeddingConfig:
    """Of letters and learned positions."""
    return rc.EmbeddingConfig(
        vocab_size=LETTERS,
        d_embed=config.d_model,
        positions="learned",
        num_positions=num_tokens,
        projection="before_norm",
    )


def examples_of(key: Any, count: int, num_tokens: int) -> Examples:
    """Random letters, each labelled with the one before it; the first with itself."""
    letters = jax.random.randint(key, (count, num_tokens), 0, LETTERS)
    return Examples(letters, jnp.concatenate([letters[:, :1], letters[:, :-1]], axis=1))


def trained(found: Mapping[str, Any], num_tokens: int) -> np.ndarray:
    """Which seeds name more letters than tokens by themselves tell, [s]: see `limits`."""
    return ~designs.failed(found, limits(num_tokens)[1])


def limits(num_tokens: int) -> tuple[float, float]:
    """(accuracy without attention, accuracy above which a network counts as trained).

    Without attention the first letter and a guess of the others is right, a share of
    1/n + (1 − 1/n)/5; one such network of 200 lies 2.58 standard deviations above it.
    """
    share = 1 / num_tokens + (1 - 1 / num_tokens) / LETTERS
    return share, share + 2.58 * math.sqrt(share * (1 - share) / (EVAL * num_tokens))
