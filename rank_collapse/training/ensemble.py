"""Training many seeds at once: chunks of epochs in one jitted call, the host between them.

Seeds are shared over the devices of a mesh. An accelerator runs several of them vmapped; `at_once`
says how many. A CPU runs one after the other, since one small network already fits the cache and
fills a core. How seeds are shared changes results by rounding alone (docs/sweeps.md).
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rank_collapse.runs import seeds
from rank_collapse.struct import check_numbers, check_whole, refuse_if
from rank_collapse.training.recipe import Hyper, Recipe, check_hyper
from rank_collapse.training.training import init_state, train_epoch


def _no_activity(name: str) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext()


@dataclasses.dataclass
class Trained:
    """The result of training: states and losses of all seeds."""

    state: Any  # TrainState with a leading seed axis, padded to the mesh
    data: Any  # What `make_data` made, with a leading seed axis, padded to the mesh
    losses: np.ndarray  # [s, epochs] mean training loss; NaN from where a seed diverged
    watched: Any = None  # What `watch` gives before training and after each chunk: [s, looks, ...]
    chunk_seconds: Sequence[float] = ()  # Of each chunk, without compiling

    @property
    def diverged_at(self) -> np.ndarray:
        """Returns the first epoch of each seed with a loss that is not finite, -1 for none: [s]."""
        bad = ~np.isfinite(self.losses)
        reached = np.pad(bad, ((0, 0), (0, 1)))  # there may be no epoch
        return np.where(bad.any(axis=1), reached.argmax(axis=1), -1)


class Ensemble:
    """The compiled functions of one recipe, made once and used for any seeds and hyperparameters.

    Args:
        recipe, mesh: What is trained, on which devices; all by default.
        make_data: key → dictionary whose "train" is the training data of one seed, so that all
            data are made where they are used. Its key is independent of the model's.
        epochs_per_chunk: Epochs in one jitted call; progress, checkpoints and the check for
            divergence come between calls. Does not change results.
        at_once: Seeds a device vmaps over; None for `seeds.group_size`.
        watch: (model, data, hyper, key) of one seed → pytree of arrays, computed before training
            and after each chunk; None for nothing.

    Attributes:
        begin: (keys, hyper, None) → (states, data) of all seeds, laid out over the mesh.
        chunk: (states, data, hyper, first epoch) → (states, losses [s, epochs]); reuses the
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
        watch: Callable[[Any, Any, Hyper, Any], Any] | None = None,
    ):
        epochs_per_chunk = check_whole("epochs_per_chunk", epochs_per_chunk, 1)
        self.recipe, self.epochs_per_chunk = recipe, epochs_per_chunk
        self.mesh = seeds.seed_mesh() if mesh is None else mesh
        self.at_once = seeds.group_size(self.mesh) if at_once is None else at_once

        def begin(key, hyper, _):
            key_data, key_state = jax.random.split(key)
            data = make_data(key_data)
            has_examples = isinstance(data, Mapping) and len(data.get("train", ()))
            refuse_if(not has_examples, "make_data gives no examples as 'train'")
            return init_state(key_state, hyper, recipe), data

        def chunk(state, data, hyper, first_epoch):
            def run_epoch(state, epoch):
                return train_epoch(state, data["train"], epoch, hyper, recipe)

            def maybe_run_epoch(state, epoch):
                nothing = jnp.zeros((), jax.eval_shape(run_epoch, state, epoch)[1].dtype)
                return jax.lax.cond(
                    epoch < recipe.num_epochs,
                    lambda s: run_epoch(s, epoch),
                    lambda s: (s, nothing),
                    state,
                )

            return jax.lax.scan(maybe_run_epoch, state, first_epoch + jnp.arange(epochs_per_chunk))

        # `begin` runs once: quick compilation counts, not speed. (Many copies of threefry are slow
        # to optimise.)
        self.begin = self._spread(begin, level=0)
        self.chunk = self._spread(chunk, donate=(0,))
        self._watched = None if watch is None else self._of_states(watch)

    def _spread(self, fn, level=1, donate=()):
        return seeds.run_seeds(fn, self.mesh, at_once=self.at_once, donate=donate, level=level)

    def lay_out(self, per_seed: Any) -> Any:
        """Pad leaves [s, ...] to the mesh and lay them out over it."""
        return seeds.shard_seeds(per_seed, self.mesh)

    def of_models(self, fn: Callable[[Any, Any, Hyper, Any], Any]) -> Callable:
        """Map a function of one seed over all seeds.

        Args:
            fn: (model, data, hyper, key) of one seed → pytree of arrays.

        Returns:
            A function of (states, data, hyper, keys, num_seeds=s) of all seeds, which gives host
            arrays [s, ...]; compiled at the first call. Its further arguments are `activity`, as
            of `train`, and `on_seeds`, called with the number of seeds that are done; on a CPU
            they are then computed some at a time.
        """
        spread = self._of_states(fn)

        def call(*laid_out, num_seeds, activity=_no_activity, on_seeds=None):
            size = jax.tree.leaves(laid_out)[0].shape[0]
            part = size if on_seeds is None else self._seeds_of_a_part(size)
            on_host, parts = seeds.to_host(laid_out) if part < size else None, []
            for start in range(0, num_seeds, part):
                arguments = laid_out
                if part < size:
                    rows = jax.tree.map(lambda a, i=start: a[i : i + part], on_host)
                    arguments = seeds.shard_seeds(rows, self.mesh, part)
                if not parts:
                    with activity("compiling what is measured"):
                        spread.lower(*arguments, None).compile()
                parts.append(seeds.to_host(spread(*arguments, None), min(part, num_seeds - start)))
                if on_seeds is not None:
                    on_seeds(min(start + part, num_seeds))
            return jax.tree.map(lambda *a: a[0] if len(a) == 1 else np.concatenate(a), *parts)

        return call

    def _seeds_of_a_part(self, size: int) -> int:
        """Returns how many of so many seeds are computed in a call that reports when it is done.

        A device that runs seeds one after the other takes two or more in each call, since XLA
        compiles a single one without the loop, and then rounds otherwise. Calls are filled up by
        repeated seeds, which take at most a sixth of the time.
        """
        if self.at_once != 1:
            return size
        per_device = size // self.mesh.size
        for count in range(2, per_device):
            if -(-per_device // count) * count - per_device <= per_device / 6:
                return count * self.mesh.size
        return size

    def _of_states(self, fn):
        return self._spread(lambda state, data, hyper, key, _: fn(state.model, data, hyper, key))

    def train(
        self,
        keys: Any,
        hyper: Hyper,
        *,
        resume: Callable[[Any], tuple[int, Any] | None] | None = None,
        on_chunk: Callable[[int, Callable[[], Any], np.ndarray], None] | None = None,
        on_watched: Callable[[int, Any, np.ndarray], None] | None = None,
        activity: Callable[[str], contextlib.AbstractContextManager] = _no_activity,
    ) -> Trained:
        """Trains one run per key.

        Args:
            keys: Keys [s], from `seeds.seed_keys`.
            hyper: Floats, or arrays [s, ...], one per run.
            resume: Called with a pytree like what a snapshot is; returns (epochs done, saved
                snapshot) or None.
            on_chunk: Called between chunks with (epochs done, snapshot, losses [s, epochs done]).
                snapshot() gives "state", "losses" and, where anything is, what is watched of all
                seeds on the host, from which training resumes on any mesh; where there are several
                processes, all must call it or none.
            on_watched: Called with (epochs done, what `watch` gives [s, ...], losses [s, epochs
                done]) where training begins, and then before each `on_chunk`.
            activity: Name of what is no training, such as "compiling" → a context in which it is
                done.

        Returns:
            `Trained`.

        Raises:
            ValueError: Floats that mean nothing (see `recipe.check_hyper`), values for another
                number of runs, or a snapshot of other runs or epochs.
        """
        check_hyper(hyper, self.recipe)
        refuse_if(np.ndim(keys) < 1 or not len(keys), f"keys of shape {np.shape(keys)} are not [s]")
        count, total = keys.shape[0], self.recipe.num_epochs
        epochs_per_chunk = self.epochs_per_chunk
        keys, hyper = self.lay_out((keys, _as_runs(hyper, count)))
        with activity("drawing data and weights"):
            state, data = jax.block_until_ready(self.begin(keys, hyper, None))
        losses = np.full((count, total), np.nan, np.float32)
        seconds, epoch, watched = [], 0, None
        if self._watched is not None:
            num_looks = 1 + -(-total // epochs_per_chunk)  # before training, and after each chunk
            look_shapes = jax.eval_shape(self._watched, state, data, hyper, keys, None)
            watched = jax.tree.map(
                lambda a: np.zeros((count, num_looks, *a.shape[1:]), a.dtype), look_shapes
            )

        def look():
            new = seeds.to_host(self._watched(state, data, hyper, keys, None), count)
            for looks, new_look in zip(jax.tree.leaves(watched), jax.tree.leaves(new), strict=True):
                looks[:, -(-epoch // epochs_per_chunk)] = new_look
            if on_watched is not None:
                on_watched(epoch, new, losses[:, :epoch])

        def snapshot():
            saved = {"state": seeds.to_host(state, count), "losses": losses.copy()}
            if self._watched is not None:
                saved["watched"] = jax.tree.map(np.copy, watched)
            return saved

        template = checkpoint = None
        if resume is not None:
            template = snapshot()
            checkpoint = resume(template)
        if checkpoint is not None:
            epoch, saved = checkpoint
            fits = _list_shapes(saved) == _list_shapes(template) and 0 <= epoch <= total
            refuse_if(not fits, f"resume gave a snapshot of epoch {epoch} that is of other runs")
            state, losses = self.lay_out(saved["state"]), np.array(saved["losses"])
            watched = jax.tree.map(np.array, saved.get("watched"))
        with activity("compiling"):
            if epoch < total:
                self.chunk.lower(state, data, hyper, jnp.int32(epoch)).compile()
            if self._watched:
                self._watched.lower(state, data, hyper, keys, None).compile()
        if epoch == 0 and self._watched:
            look()
        while epoch < total:
            begun = time.monotonic()
            state, new = self.chunk(state, data, hyper, jnp.int32(epoch))
            done = min(epoch + epochs_per_chunk, total)
            losses[:, epoch:done] = seeds.to_host(new, count)[:, : done - epoch]
            seconds.append(time.monotonic() - begun)
            epoch = done
            if self._watched:
                look()
            if on_chunk is not None:
                on_chunk(epoch, snapshot, losses[:, :epoch])
        return Trained(state, data, losses, watched, seconds)


def _list_shapes(tree):
    """List the structure of a tree, and the shapes of its leaves."""
    return jax.tree.structure(tree), [np.shape(leaf) for leaf in jax.tree.leaves(tree)]


def _as_runs(hyper: Hyper, count: int) -> Hyper:
    """Convert every value to float32 [s, ...]."""

    def as_run_array(path, value):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        check_numbers("[-inf, inf]", arrays=True, **{name: value})
        has_axes = name.startswith(("network", "start"))  # beside that of the runs
        value = np.asarray(value, np.float32)
        fits = value.shape[:1] in ((), (count,)) and (has_axes or value.ndim < 2)
        refuse_if(not fits, f"hyper.{name} of shape {value.shape} is not of {count} runs")
        return value if value.ndim else np.full(count, value)

    return jax.tree_util.tree_map_with_path(as_run_array, hyper)
