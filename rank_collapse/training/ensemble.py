"""Training many seeds at once: chunks of epochs in one jitted call, the host between them.

Seeds are shared over the devices of a mesh. An accelerator runs several of them vmapped; `at_once`
says how many. A CPU runs one after the other, since one small network already fits the cache and
fills a core. How seeds are shared changes results by rounding alone (docs/sweeps.md).
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rank_collapse.checks import check_numbers, check_whole, refuse_if
from rank_collapse.printed import format_count
from rank_collapse.runs import seeds
from rank_collapse.training.engine.functions import Functions
from rank_collapse.training.engine.program import Program
from rank_collapse.training.engine.runs import Runs, join_pieces
from rank_collapse.training.engine.tracing import Operations
from rank_collapse.training.recipe import Hyper, Recipe, check_hyper
from rank_collapse.training.training import TrainState, init_state, train_epoch


def _no_activity(name: str) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext()


@dataclasses.dataclass
class Trained:
    """The result of training: states and losses of all seeds.

    Attributes:
        state: `TrainState` with a leading seed axis, padded to the mesh.
        data: What `make_data` made, with a leading seed axis, padded to the mesh.
        losses: [s, epochs], the mean training loss; NaN from where a seed diverged.
        watched: What `watch` gives before training and after each chunk, [s, looks, ...]; None
            without `watch`.
    """

    state: Any
    data: Any
    losses: np.ndarray
    watched: Any = None

    @property
    def diverged_at(self) -> np.ndarray:
        """Returns the first epoch of each seed with a loss that is not finite, -1 for none: [s]."""
        bad = ~np.isfinite(self.losses)
        reached = np.pad(bad, ((0, 0), (0, 1)))  # there may be no epoch
        return np.where(bad.any(axis=1), reached.argmax(axis=1), -1)


class Ensemble:
    """One recipe, trained by the engine of `sweep` for any seeds and hyperparameters.

    Unlike in `sweep`, a seed that diverges continues with losses of NaN, and each seed may have its
    own values.

    Args:
        recipe, mesh: The recipe to train, and the devices to train on; by default all.
        make_data: key → dictionary whose "train" is the training data of one seed, so that all
            data are made where they are used. Its key is independent of the model's.
        epochs_per_chunk: Epochs in one jitted call; progress, checkpoints and the check for
            divergence come between calls. Does not change results.
        at_once: Seeds a device vmaps over; None for `seeds.group_size`.
        watch: (model, data, hyper, key) of one seed → pytree of arrays, computed before training
            and after each chunk; None for nothing.
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
        self.epochs_per_chunk = check_whole("epochs_per_chunk", epochs_per_chunk, 1)
        self.recipe, self.make_data, self.watch = recipe, make_data, watch
        self.mesh = seeds.seed_mesh() if mesh is None else mesh
        self.at_once = seeds.group_size(self.mesh) if at_once is None else at_once
        self._programs: dict[Any, Program] = {}

    def init(self, key: Any, hyper: Hyper) -> tuple[TrainState, Any]:
        """Initialises one seed: (state, data).

        Raises:
            ValueError: `make_data` makes no training data.
        """
        key_data, key_state = jax.random.split(key)
        data = self.make_data(key_data)
        has_examples = isinstance(data, Mapping) and len(data.get("train", ()))
        refuse_if(not has_examples, "make_data returned no examples named 'train'")
        return init_state(key_state, hyper, self.recipe), data

    def step(self, state: tuple[TrainState, Any], hyper: Hyper, epoch: Any) -> Any:
        """Trains one seed for an epoch: ((state, data), {"loss": mean loss})."""
        train_state, data = state
        train_state, loss = train_epoch(train_state, data["train"], epoch, hyper, self.recipe)
        return (train_state, data), {"loss": loss}

    def look(self, state: tuple[TrainState, Any], hyper: Hyper, key: Any) -> Any:
        """Computes the watched metrics of one seed."""
        return self.watch(state[0].model, state[1], hyper, key)

    def begin(self, keys: Any, hyper: Hyper) -> tuple[Program, Runs]:
        """Draws data and weights of all seeds.

        Traces `init` and `step` (with its gradient) once; `Program` then runs these operations.

        Args:
            keys, hyper: See `train`; all arrays are [s, ...].

        Returns:
            (the engine's program for so many seeds, their runs on the devices).
        """
        leaves, structure = jax.tree.flatten(hyper)
        shapes = tuple(jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for a in leaves)
        key = jax.ShapeDtypeStruct(keys.shape[1:], keys.dtype)
        name = len(keys), key, structure, shapes
        if name not in self._programs:
            one = jax.tree.unflatten(structure, shapes)
            index = jax.ShapeDtypeStruct((), jnp.int32)
            init = Operations(*jax.make_jaxpr(self.init, return_shape=True)(key, one))
            step = Operations(*jax.make_jaxpr(self.step, return_shape=True)(init.out, one, index))
            look = None if self.watch is None else jax.make_jaxpr(self.look, return_shape=True)
            self._programs[name] = Program(
                Functions(init, step, look and Operations(*look(init.out, one, key))),
                hyper=shapes,
                key=key,
                mesh=self.mesh,
                every=self.epochs_per_chunk,
                at_once=self.at_once,
                size=seeds.padded_size(len(keys), self.mesh),
                freezes=False,
            )
        program, numbers = self._programs[name], np.arange(len(keys))
        return program, program.begin(numbers, numbers, lambda *_: self.lay_out((keys, leaves)))

    def lay_out(self, per_seed: Any) -> Any:
        """Pad leaves [s, ...] to the mesh and lay them out over it."""
        return seeds.shard_seeds(per_seed, self.mesh)

    def map_models(self, fn: Callable[[Any, Any, Hyper, Any], Any]) -> Callable:
        """Map a function of one seed over all seeds.

        Args:
            fn: (model, data, hyper, key) of one seed → pytree of arrays.

        Returns:
            A function of (states, data, hyper, keys, num_seeds=s) of all seeds, which returns host
            arrays [s, ...]; compiled at the first call. Its further arguments are `activity`, as in
            `train`, and `on_seeds`, which is called with the number of finished seeds; on a CPU a
            few seeds are then computed at a time.
        """
        spread = seeds.run_seeds(
            lambda state, data, hyper, key, _: fn(state.model, data, hyper, key),
            self.mesh,
            at_once=self.at_once,
        )

        def call(*laid_out, num_seeds, activity=_no_activity, on_seeds=None):
            """Computes the function for all seeds, some at a time where progress is reported.

            Args:
                *laid_out: (states, data, hyper, keys), padded to the mesh.
                num_seeds: Seeds without the padding.
                activity: See `train`; the context of compilation.
                on_seeds: Called with the number of finished seeds after each part; None computes
                    all seeds in one call.
            """
            size = jax.tree.leaves(laid_out)[0].shape[0]
            part_size = size if on_seeds is None else self._seeds_of_a_part(size)
            is_split = part_size < size
            on_host = seeds.to_host(laid_out) if is_split else None
            parts = []
            for start in range(0, num_seeds, part_size):
                arguments = laid_out
                if is_split:
                    rows = jax.tree.map(lambda a, i=start: a[i : i + part_size], on_host)
                    arguments = seeds.shard_seeds(rows, self.mesh, part_size)
                if not parts:
                    with activity("compiling what is measured"):
                        spread.lower(*arguments, None).compile()
                count = min(part_size, num_seeds - start)
                parts.append(seeds.to_host(spread(*arguments, None), count))
                if on_seeds is not None:
                    on_seeds(start + count)
            return jax.tree.map(lambda *a: a[0] if len(a) == 1 else np.concatenate(a), *parts)

        return call

    def _seeds_of_a_part(self, size: int) -> int:
        """Returns how many seeds are computed in one call, which reports when it is done.

        A device that runs seeds one after the other takes at least two in each call, because XLA
        compiles a single seed without the loop, which rounds differently. Calls are filled up by
        repeated seeds, which take at most a sixth of the time.
        """
        if self.at_once != 1:
            return size
        per_device = size // self.mesh.size
        for count in range(2, per_device):
            if -(-per_device // count) * count - per_device <= per_device / 6:
                return count * self.mesh.size
        return size

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
            resume: Called with a pytree like a snapshot; returns (epochs done, saved snapshot) or
                None.
            on_chunk: Called between chunks with (epochs done, snapshot, losses [s, epochs done]).
                snapshot() gives "state", "losses" and, if metrics are watched, these of all seeds
                on the host; training resumes from it on any mesh. If there are several processes,
                all must call it or none.
            on_watched: Called with (epochs done, what `watch` gives [s, ...], losses [s, epochs
                done]) where training begins, and then before each `on_chunk`.
            activity: Name of an activity other than training, such as "compiling" → a context in
                which it runs.

        Returns:
            `Trained`.

        Raises:
            ValueError: Floats that are invalid (see `recipe.check_hyper`), values for another
                number of runs, or a snapshot of other runs or epochs.
        """
        check_hyper(hyper, self.recipe)
        refuse_if(np.ndim(keys) < 1 or not len(keys), f"keys of shape {np.shape(keys)} are not [s]")
        count, total = keys.shape[0], self.recipe.num_epochs
        with activity("drawing data and weights"):
            program, runs = self.begin(keys, _as_runs(hyper, count))
            jax.block_until_ready(runs.state)

        def snapshot():
            state = seeds.to_host(program.unflatten(runs)[0], count)
            return {"state": state} | _collect_results(program, runs, total)

        def losses():
            return join_pieces(runs.metrics[0])

        def report_look():
            if self.watch is not None and on_watched is not None:
                new = [pieces[-1][:, -1] for pieces in runs.looks]
                on_watched(runs.step, program.unflatten_look(new), losses())

        template = checkpoint = None
        if resume is not None:
            template = snapshot()
            checkpoint = resume(template)
        if checkpoint is not None:
            epoch, saved = checkpoint
            fits = _list_shapes(saved) == _list_shapes(template) and 0 <= epoch <= total
            refuse_if(
                not fits, f"resume returned a snapshot of epoch {epoch} that belongs to other runs"
            )
            runs = self._restore(runs, epoch, saved)
        if runs.step < max(total, 1):
            with activity("compiling"):
                program.compile(program.size)
        if runs.step == 0:
            runs = program.look_at(runs)
            report_look()
        begun = runs
        for runs, _ in program.train(begun, total):
            report_look()
            if on_chunk is not None:
                on_chunk(runs.step, snapshot, losses())
        return Trained(*program.unflatten(runs), **_collect_results(program, runs, total))

    def _restore(self, runs, epoch, saved):
        """Continues from a snapshot: puts its states and losses in the place of runs that have
        their data.

        Args:
            runs: Runs at the beginning.
            epoch: Epochs that the snapshot has done.
            saved: The snapshot.
        """
        state = jax.tree.leaves(self.lay_out(saved["state"]))
        num_looks = -(-epoch // self.epochs_per_chunk) + (epoch > 0)
        looks = jax.tree.leaves(saved.get("watched"))
        return dataclasses.replace(
            runs,
            step=epoch,
            state=[*state, *runs.state[len(state) :]],
            metrics=[[saved["losses"][:, :epoch]]],
            looks=[[leaf[:, :num_looks]] for leaf in looks],
        )


def _collect_results(program, runs, num_epochs):
    """Collects losses and watched metrics, with room for all epochs: see `Trained`.

    Args:
        program: The compiled program.
        runs: The runs so far.
        num_epochs: Epochs of the whole training.

    Returns:
        {"losses": [s, epochs], "watched": [s, looks, ...] if there is a `watch`}, NaN or 0 for what
        is still to come.
    """
    losses = np.full((len(runs), num_epochs), np.nan, np.float32)
    losses[:, : runs.step] = join_pieces(runs.metrics[0])
    if program.functions.look is None:
        return {"losses": losses}
    num_looks, looks = 1 + -(-num_epochs // program.every), []
    for leaf in map(join_pieces, runs.looks):
        looks.append(np.zeros((len(leaf), num_looks, *leaf.shape[2:]), leaf.dtype))
        looks[-1][:, : leaf.shape[1]] = leaf
    return {"losses": losses, "watched": program.unflatten_look(looks)}


def _list_shapes(tree):
    """List the structure of a tree, and the shapes of its leaves."""
    return jax.tree.structure(tree), [np.shape(leaf) for leaf in jax.tree.leaves(tree)]


def _as_runs(hyper: Hyper, count: int) -> Hyper:
    """Convert every value to float32 [s, ...]."""

    def as_run_array(path, value):
        """Converts one value to float32 [s, ...], and checks its shape."""
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        check_numbers("[-inf, inf]", arrays=True, **{name: value})
        has_axes = name.startswith(("network", "start"))  # beside that of the runs
        value = np.asarray(value, np.float32)
        fits = value.shape[:1] in ((), (count,)) and (has_axes or value.ndim < 2)
        refuse_if(
            not fits,
            f"hyper.{name} of shape {value.shape} does not fit {format_count(count, 'run')}",
        )
        return value if value.ndim else np.full(count, value)

    return jax.tree_util.tree_map_with_path(as_run_array, hyper)
