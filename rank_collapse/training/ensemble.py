"""Training many seeds at once: chunks of epochs in one jitted call, the host between them.

Seeds are shared over the devices of a mesh. On a device they run one after the other on a CPU,
where one small network already fits the cache and fills a core, and vmapped on an accelerator;
`at_once` says how many. What a seed computes depends on neither, nor on which other seeds run.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rank_collapse.runs import seeds
from rank_collapse.training.path_accuracy import Metrics, whole_model
from rank_collapse.training.recipe import Hyper, Recipe, check_hyper, config_of
from rank_collapse.training.training import init_state, train_epoch


@dataclasses.dataclass
class Trained:
    """The result of training: states and losses of all seeds."""

    state: Any  # TrainState with a leading seed axis, padded to the mesh
    data: Any  # What `make_data` made, with a leading seed axis, padded to the mesh
    losses: np.ndarray  # [s, epochs] mean training loss; NaN from where a seed diverged
    # {name: [s, epochs]} metrics of the held-out data after each epoch
    curves: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @property
    def diverged(self) -> dict[int, int]:
        """{position of a seed that diverged: the first epoch with a loss that is not finite}."""
        bad = ~np.isfinite(self.losses)
        return {int(s): int(np.argmax(bad[s])) for s in np.flatnonzero(bad.any(axis=1))}

    @property
    def kept(self) -> np.ndarray:
        """Positions of the seeds that did not diverge."""
        return np.flatnonzero(np.isfinite(self.losses).all(axis=1))


class Ensemble:
    """The compiled functions of one recipe, made once and used for any seeds and hyperparameters.

    Args:
        recipe, mesh: What is trained, on which devices; all by default.
        make_data: key → pytree whose "train" entry is the training data of one seed, so that all
            data are made where they are used. Its key is independent of the model's.
        epochs_per_chunk: Epochs in one jitted call; progress, checkpoints and the check for
            divergence come between calls. Does not change results.
        at_once: Seeds a device vmaps over; None for `seeds.seeds_at_once`.
        held_out: Metrics by name, functions of (logits, examples), that are computed of the data's
            "eval" entry after each epoch; None for none.
        watch: (model, data, config) → scalars or arrays by name, computed before training and
            after each epoch and given to `train`'s on_watched; None for nothing.

    Attributes:
        begin: (keys, hyper, None) → (states, data) of all seeds, laid out over the mesh.
        chunk: (states, data, hyper, first epoch) → (states, {"loss", ...} [s, epochs]); reuses the
            states' memory.
    """

    def __init__(
        self,
        recipe: Recipe,
        make_data: Callable[[Any], dict[str, Any]],
        *,
        mesh: Mesh | None = None,
        epochs_per_chunk: int = 5,
        at_once: int | None = None,
        held_out: Metrics | None = None,
        watch: Callable[[Any, Any, Any], dict[str, Any]] | None = None,
    ):
        if epochs_per_chunk < 1:
            raise ValueError(f"epochs_per_chunk={epochs_per_chunk} is not a positive integer")
        self.recipe = recipe
        self.mesh = seeds.seed_mesh() if mesh is None else mesh
        self.epochs_per_chunk = epochs_per_chunk
        self.held_out = held_out or {}
        self.at_once = seeds.seeds_at_once(self.mesh) if at_once is None else at_once

        def begin(key, hyper, _):
            key_data, key_state = jax.random.split(key)
            return init_state(key_state, hyper, recipe), make_data(key_data)

        def chunk(state, data, hyper, first_epoch):
            def trained(state, epoch):
                state, loss = train_epoch(state, data["train"], epoch, hyper, recipe)
                config, aux = config_of(recipe, hyper), {"loss": loss}
                if self.held_out:
                    found = whole_model(state.model, data["eval"], config, self.held_out)
                    aux |= {f"held_out/{n}": v for n, v in found.items()}
                if watch is not None:
                    found = watch(state.model, data, config)
                    aux |= {f"watched/{n}": v for n, v in found.items()}
                return state, aux

            def one(state, epoch):
                _, aux = jax.eval_shape(trained, state, epoch)
                nothing = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), aux)
                return jax.lax.cond(
                    epoch < recipe.num_epochs,
                    lambda s: trained(s, epoch),
                    lambda s: (s, nothing),
                    state,
                )

            return jax.lax.scan(one, state, first_epoch + jnp.arange(epochs_per_chunk))

        # `begin` runs once: quick compilation counts, not speed. (Many copies of threefry are slow
        # to optimise.)
        self.begin = self._spread(begin, level=0)
        self.chunk = self._spread(chunk, donate=(0,))
        self._watch_first = watch and self.mapped(
            lambda state, data, hyper, _: watch(state.model, data, config_of(recipe, hyper)),
            level=0,
        )

    def _spread(self, fn, level=1, donate=()):
        return seeds.spread(fn, self.mesh, at_once=self.at_once, donate=donate, level=level)

    def lay_out(self, per_seed: Any) -> Any:
        """Leaves [s, ...] padded to the mesh and laid out over it."""
        return seeds.lay_out(per_seed, self.mesh)

    def mapped(self, fn: Callable, level: int = 1) -> Callable:
        """fn(*one seed's, shared) for all seeds, on the devices; host arrays [num_seeds, ...].

        It is compiled at the first call; level: see `spread`.
        """
        spread = self._spread(fn, level)

        def call(*per_seed, shared=None, num_seeds):
            return seeds.to_host(spread(*per_seed, shared), num_seeds)

        return call

    def train(
        self,
        keys: Any,
        hyper: Hyper,
        *,
        resume: Callable[[Any], tuple[int, Any] | None] | None = None,
        on_chunk: Callable[[int, Callable[[], Any], np.ndarray], None] | None = None,
        on_watched: Callable[[int, dict[str, np.ndarray]], None] | None = None,
    ) -> Trained:
        """Trains one run per key.

        Args:
            keys: Keys [s], from `seeds.seed_keys`.
            hyper: Floats, or arrays [s, ...], one per run.
            resume: Called with a pytree like what a snapshot is; returns (epochs done, saved
                snapshot) or None.
            on_chunk: Called between chunks with (epochs done, snapshot, losses [s, epochs done]).
                snapshot() gives {"state", "losses"} of all seeds on the host, from which training
                resumes on any mesh; where there are several processes, all must call it or none.
            on_watched: Called between chunks with (epoch, {name: [s, ...]}) of each of its epochs,
                counted from 1: the training loss, and what `watch` gives; at first with epoch 0,
                before training, without a loss.

        Returns:
            `Trained`.

        Raises:
            ValueError: Floats that mean nothing (see `recipe.check_hyper`), or values for another
                number of runs.
        """
        check_hyper(hyper, self.recipe)
        count = keys.shape[0]
        hyper = _per_run(hyper, count)
        laid_keys, hyper = self.lay_out((keys, hyper))
        state, data = self.begin(laid_keys, hyper, None)
        losses, *curves = (
            np.full((count, self.recipe.num_epochs), np.nan, np.float32)
            for _ in range(1 + len(self.held_out))
        )
        curves = dict(zip(self.held_out, curves, strict=True))

        def snapshot():
            saved = {"state": seeds.to_host(state, count), "losses": losses.copy()}
            return saved | ({"curves": jax.tree.map(np.copy, curves)} if curves else {})

        epoch = 0
        found = None if resume is None else resume(snapshot())
        if found is not None:
            epoch, saved = found
            state, losses = self.lay_out(saved["state"]), np.array(saved["losses"])
            curves = {name: np.array(saved["curves"][name]) for name in curves}
        if epoch == 0 and on_watched is not None and self._watch_first:
            on_watched(0, self._watch_first(state, data, hyper, num_seeds=count))
        while epoch < self.recipe.num_epochs:
            state, new = self.chunk(state, data, hyper, jnp.int32(epoch))
            done = min(epoch + self.epochs_per_chunk, self.recipe.num_epochs)
            new = seeds.to_host(new, count)
            losses[:, epoch:done] = new["loss"][:, : done - epoch]
            for name, curve in curves.items():
                curve[:, epoch:done] = new[f"held_out/{name}"][:, : done - epoch]
            if on_watched is not None:
                watched = {n[8:]: v for n, v in new.items() if n.startswith("watched/")}
                for i in range(done - epoch):
                    values = {"loss": new["loss"]} | watched
                    on_watched(epoch + i + 1, {name: v[:, i] for name, v in values.items()})
            epoch = done
            if on_chunk is not None:
                on_chunk(epoch, snapshot, losses[:, :epoch])
        return Trained(state=state, data=data, losses=losses, curves=curves)


def _per_run(hyper: Hyper, count: int) -> Hyper:
    """Every value as float32 [s, ...]."""

    def one(path, value):
        value = jnp.asarray(value, jnp.float32)
        if value.ndim and value.shape[0] != count:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise ValueError(f"hyper.{name} of shape {value.shape} is not of {count} runs")
        return value if value.ndim else jnp.full(count, value)

    return jax.tree_util.tree_map_with_path(one, hyper)
