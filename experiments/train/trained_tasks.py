"""Tasks that networks are trained on: recipe, data, metrics, and what the metrics of a seed are."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import jax
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, PyTree

from experiments.lab import Options
from experiments.lab.provenance import JsonObject
from experiments.train import arguments
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.encoder_decoder import EncoderDecoderConfig, EncoderDecoderParams
from rank_collapse.training import Hyper, Recipe
from rank_collapse.training.models import Model
from rank_collapse.training.recipe import check_hyper
from rank_collapse.training.tasks.examples import Examples
from rank_collapse.training.tasks.sequences import SequencePairs
from rank_collapse.training.training import batch_forward

ALONE = "results"  # the part of the arrays of a run that trains one network
TrainedModel = Model | EncoderDecoderParams
Data = dict[str, Examples | SequencePairs]  # of one seed: "train", "eval", and others
Metrics = Mapping[
    str, Callable[[Float[Array, "b n c"], Examples | SequencePairs], Float[Array, ""]]
]


@dataclass(frozen=True)
class TrainedTask:
    """One trained experiment.

    Attributes:
        options: The flags it is of.
        name: Name of the folder under results/.
        title: Title of the figure.
        recipe: The training recipe.
        make_data: key → {"train", "eval"} Examples of one seed; also "texts", the training data for
            the evaluation, if "train" is packed.
        metrics: Functions of (logits, examples) by name, "accuracy" among them.
        published: {"whole": accuracy, "baseline": accuracy} as the published code plots them.
        batch_size: Examples evaluated at a time; None for all.
        extra: Further settings that determine the results, for config.json.
        curves: Whether the metrics are measured on the evaluation data after each epoch.
        floats: Fields of `Hyper` that are not taken from the flags.
        program: Name of the compiled program: setups with the same name differ in their floats
            alone; "" for a separate program.
    """

    options: Options
    name: str
    title: str
    recipe: Recipe
    make_data: Callable[[jax.Array], Data]
    metrics: Metrics = field(default_factory=dict)
    published: Mapping[str, float] = field(default_factory=dict)
    batch_size: int | None = None
    extra: JsonObject | None = None
    curves: bool = False
    floats: Mapping[str, PyTree[ArrayLike]] = field(default_factory=dict)
    program: str = ""

    def make_hyper(self, point: Options) -> Hyper:
        """Makes the traced values of a point of the flags, float32.

        Raises:
            ValueError: Values that are invalid for the recipe.
        """
        hyper = arguments.make_hyper(point, self.floats)
        check_hyper(hyper, self.recipe)
        return jax.tree.map(np.float32, hyper)


||||||| /tmp/lead/m0
@dataclass
class Training:
    """Trains and measures chunks of runs that differ only in seeds and floats: a program of the
    executor.

    Attributes:
        ensemble: Ensemble that trains the runs.
        run: The folder, which keeps the states of an unfinished chunk.
        measure: `Ensemble.of_models` of a function that measures one run and returns a nested
            dictionary of arrays; by default the metrics that the ensemble watches, [s, looks, ...].
        name: Name of the training, for progress; the cells by default.
        prepare: `Ensemble.of_models` of a run's hyper before training, such as gains that depend
            on the initial weights.
        keep: Whether the weights are kept, too.
        is_monitored: Whether lines of the watched metrics are written while it trains.
    """

    ensemble: Ensemble
    run: RunFolder
    measure: Callable | None = None
    name: str = ""
    prepare: Callable | None = None
    keep: bool = False
    is_monitored: bool = False

    def __call__(self, chunk: Chunk) -> dict[str, Any]:
        """Trains the runs of a chunk and measures them.

        Args:
            chunk: Runs that are trained together.

        Returns:
            What is measured, "losses" [s, epochs] and "diverged_at" [s]; where metrics are watched
            "curves" {metric: [s, epochs]} and "whole", their last; where weights are kept "model".
        """
        count, ensemble = len(chunk.seeds), self.ensemble
        keys, hyper = jax.tree.map(lambda a: a[:count], (chunk.keys, chunk.floats))
        self.run.log(f"{describe_run(chunk, 0)} to {describe_run(chunk, count - 1)}")
        sharded = ensemble.lay_out((hyper, keys))
        if self.prepare is not None:
            with report_activity(f"preparing {self._label(chunk)}", self.run.log):
                program, runs = ensemble.begin(keys, hyper)
                hyper = self.prepare(*program.unflatten(runs), *sharded, num_seeds=count)
            sharded = ensemble.lay_out((hyper, keys))
        trained = self.train(chunk, keys, hyper)
        results = trained.watched
        if self.measure is not None:
            with Progress(count, f"measuring {self._label(chunk)}", log=self.run.log) as progress:
                results = self.measure(
                    trained.state,
                    trained.data,
                    *sharded,
                    num_seeds=count,
                    activity=progress.time_activity,
                    on_seeds=progress.reach,
                )
            for name, curve in (trained.watched or {}).get("curves", {}).items():
                results |= {f"curves/{name}": curve[:, 1:], f"whole/{name}": curve[:, -1]}
        if self.keep:
            results |= {"model": flatten_state(seeds.to_host(trained.state.model, count))}
        return results | {"losses": trained.losses, "diverged_at": trained.diverged_at}

    def train(self, chunk: Chunk, keys: Any, hyper: Hyper) -> Trained:
        """Trains the runs of a chunk, from the last checkpoint, if there is one.

        Args:
            chunk: Names and seeds of the runs.
            keys: Random keys of the runs [s].
            hyper: Traced values of the runs, leaves [s].
        """
        run, num_epochs = self.run, self.ensemble.recipe.num_epochs
        runs = json.dumps([chunk.cells, [int(seed) for seed in chunk.seeds]])
        states = content_hash(runs.encode())[:12]
        run.drop_checkpoints(but_of=states)  # of chunks that are done
        diverged: set[int] = set()

        def resume(like):
            checkpoint = run.restore_checkpoint(like, states)
            epoch = -1 if checkpoint is None else checkpoint[0]
            for cell, file in files.items():
                cell_seeds = [s for c, s in zip(chunk.cells, chunk.seeds, strict=True) if c == cell]
                metrics.drop(run.path / file, cell_seeds, epoch)
            if checkpoint is not None:
                progress.say(f"resumed after epoch {epoch}")
                progress.skip(epoch)
            return checkpoint

        def on_chunk(epoch, snapshot, losses):
            nonlocal saved
            is_finite = np.isfinite(losses).all(axis=1)
            for position in set(np.flatnonzero(~is_finite).tolist()) - diverged:
                diverged.add(position)
                name = describe_run(chunk, position)
                progress.say(f"{name} diverged by epoch {epoch}; it is kept apart")
            if time.monotonic() - saved > CHECKPOINT_SECONDS or stop_requested():
                run.save_checkpoint(epoch, snapshot(), states)
                saved = time.monotonic()
            loss = float(losses[is_finite, -1].mean()) if is_finite.any() else float("nan")
            progress.reach(epoch, loss=loss)

        def on_watched(epoch, values, losses):
            for position, (cell, seed) in enumerate(zip(chunk.cells, chunk.seeds, strict=True)):
                row = {"loss": losses[position, -1]} if epoch else {}
                row |= {name: value[position] for name, value in values["layers"].items()}
                metrics.append(run.path / files[cell], epoch, row, seed=seed)

        files = {c: network_file(c, metrics.NAME) for c in chunk.cells if self.is_monitored}
        saved = time.monotonic()
        with Progress(num_epochs, f"training {self._label(chunk)}", log=run.log) as progress:
            return self.ensemble.train(
                keys,
                hyper,
                resume=resume,
                on_chunk=on_chunk,
                on_watched=on_watched if files else None,
                activity=progress.time_activity,
            )

    def _label(self, chunk):
        """Names the training of a chunk: the network, or the first of its cells."""
        first, *further = dict.fromkeys(chunk.cells)
        return self.name or first + (f" and {len(further)} more" if further else "")


def train_networks(
    options: Options,
    tasks: Mapping[str, TrainedTask],
    folder: RunFolder,
    measure: Callable[[TrainedTask, Any, Any, Any], Any],
) -> dict[str, dict[str, np.ndarray]]:
    """Trains and measures networks, or reads finished ones from the run.

    Every network is trained with the same seeds, so it has the same data and the same weights,
    scaled as its task says.

    Args:
        options: The flags.
        tasks: {part of the run's arrays: its training task}; `ALONE` is the part of a single task.
        folder: The run folder.
        measure: (task, model, data, key) of one seed → nested dictionary of arrays; the run's
            arrays have the names of the levels, joined by "/".

    Returns:
        {part: {name: [s, ...]}} with the results of `measure` and `Training`.

    Raises:
        ValueError: Every seed of a network diverged, or hyperparameters are invalid.
    """
    programs: dict[str, dict[str, TrainedTask]] = {}
    # Further seeds have weights where the first ones do.
    keep = options.keep_models or any(folder.part(f"{part}/model") for part in tasks)
    for part, task in tasks.items():
        check_files(options, part, folder)
        programs.setdefault(task.program or part, {})[part] = task
    arrays = {}
    with Executor(options, folder) as executor:
        for group in programs.values():

            def make_cells(point, group=group):
                return {part: task.make_hyper(point) for part, task in group.items()}

            task = next(iter(group.values()))
            program = partial(make_training, options, task, measure, executor, keep)
            arrays |= executor.map(program, make_cells)
    for part in tasks:
        if not len(fine_seeds(arrays[part])):
            at = f"learning_rate={options.learning_rate}"
            raise ValueError(f"every seed diverged at {at}; see {folder.path}/log.txt")
    return {part: arrays[part] for part in tasks}


def train_tasks(*arguments: Any) -> dict[str, dict[str, Any]]:
    """Trains networks as `train_networks` does, and returns each part unflattened."""
    return {part: unflatten_results(arrays) for part, arrays in train_networks(*arguments).items()}


def unflatten_results(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Unflattens saved arrays at "/"."""
    from flax import traverse_util  # here: it takes half a second, which `--help` need not

    return traverse_util.unflatten_dict(arrays, sep="/")


def check_files(options: Options, part: str, folder: RunFolder) -> None:
    """Refuses to keep weights or lines that networks trained earlier did not write.

    Args:
        options: The flags.
        part: Part of the arrays of the run.
        folder: The run folder; results that it already holds are not computed again.

    Raises:
        ValueError: Weights or lines are requested that an earlier run did not write.
    """
    is_monitored = "monitor" in options and options.monitor
    lines = folder.path / network_file(options.prefix + part, metrics.NAME)
    for flag, is_wanted, is_present in (
        ("keep_models", options.keep_models, folder.part(f"{part}/model")),
        ("monitor", is_monitored, lines.exists()),
    ):
        if is_wanted and folder.part(part) and not is_present:
            raise ValueError(
                f"{folder.path} was trained without --{flag}: --overwrite trains again"
            )


def make_training(
    options: Options, task: TrainedTask, measure: Callable, executor: Executor, keep: bool
) -> Training:
    """Makes the program that trains the networks of one recipe, with any floats.

    Args:
        options: The flags.
        task: One of the networks.
        measure: See `train_networks`.
        executor: Its folder keeps the states.
        keep: Whether weights are kept.
    """
    recipe, is_monitored = task.recipe, "monitor" in options and options.monitor

    def measure_run(model, data, hyper, key):
        run_recipe = dataclasses.replace(recipe, config=run_config(recipe, hyper))
        return measure(dataclasses.replace(task, recipe=run_recipe), model, data, key)

    def watch(model, data, hyper, _):
        config, scalars = run_config(recipe, hyper), {}
        if task.curves:
            scalars["curves"] = whole_metrics(model, data["eval"], config, task.metrics)
        if is_monitored:
            scalars["layers"] = layer_scalars(model, data, config)
        return scalars

    is_watched = task.curves or is_monitored  # after every epoch
    ensemble = Ensemble(
        recipe,
        task.make_data,
        mesh=executor.mesh,
        epochs_per_chunk=1 if is_watched else max(1, -(-options.n_epochs // 20)),
        watch=watch if is_watched else None,
    )
    return Training(
        ensemble,
        executor.run,
        ensemble.of_models(measure_run),
        "" if task.program else task.name,
        keep=keep,
        is_monitored=is_monitored,
    )


def whole_metrics(
    model: TrainedModel,
    examples: Examples | SequencePairs,
    config: TransformerConfig | EncoderDecoderConfig,
    metrics: Metrics,
    batch_size: int | None = None,
) -> dict[str, Float[Array, ""]]:
    """Computes the metrics of a full model, without dropout.

    Args:
        model: Network and classifier, or an encoder-decoder.
        examples: Examples to evaluate, [b, n].
        config: Configuration of the network.
        metrics: Functions of (logits, examples) by name.
        batch_size: Examples at a time; None for all.
    """
    logits = batch_forward(model, examples, config, batch_size=batch_size)
    return compute_metrics(metrics, examples, logits)


def compute_metrics(
    metrics: Metrics, examples: Examples | SequencePairs, logits: Float[Array, "b n c"]
) -> dict[str, Float[Array, ""]]:
    """Computes all metrics of logits [b, n, c]."""
    return {name: fn(logits, examples) for name, fn in metrics.items()}


def measure_whole(
    task: TrainedTask, model: TrainedModel, data: Data, key: jax.Array
) -> dict[str, dict[str, Float[Array, ""]]]:
    """Measures one seed's metrics alone, for `train_networks`: {"whole": {metric: []}}."""
    return {"whole": whole_metrics(model, data["eval"], task.recipe.config, task.metrics)}


def train_and_eval(
    make: Callable[[jax.Array, int], Examples], num_train: int, num_eval: int, key: jax.Array
) -> dict[str, Examples]:
    """Makes training and evaluation data of one seed.

    Args:
        make: (key, number) → examples.
        num_train, num_eval: Examples of each.
        key: Random key of the seed.
    """
    key_train, key_eval = jax.random.split(key)
    return {"train": make(key_train, num_train), "eval": make(key_eval, num_eval)}


def fine_seeds(results: Mapping[str, PyTree[np.ndarray]]) -> np.ndarray:
||||||| /tmp/lead/m0
def describe_run(chunk: Chunk, position: int) -> str:
    """Names one run of a chunk: its seed, and its cell if there are several."""
    cell = chunk.cells[position].removeprefix(f"{ALONE}/")
    return f"seed {chunk.seeds[position]}" + ("" if cell == ALONE else f" of {cell}")


def network_file(cell: str, name: str) -> str:
    """Names a file of one network: "models.safetensors" of the only one, else
    "models/<its part and point>.safetensors"."""
    stem, ending = name.split(".")
    network = re.sub(r"[^A-Za-z0-9=.+]+", "-", cell.removesuffix(ALONE)).strip("-")
    return f"{stem}/{network}.{ending}" if network else name


def save_models(point: Point, tasks: Mapping[str, TrainedTask]) -> None:
    """Saves trained weights as files of a run, if the run kept them.

    Args:
        point: Measured point of the run.
        tasks: The trained tasks, as in `train_networks`.
    """
    for part, task in tasks.items():
        name = network_file(task.options.prefix + part, "models.safetensors")
        weights = point.folder.part(f"{part}/model")
        if weights and point.lacks_file(name):
            point.save_file(name, dump_weights(task, weights))


def dump_weights(task: TrainedTask, weights: Mapping[str, np.ndarray]) -> bytes:
    """Writes weights {name: [s, ...]} as `rank_collapse.training.load_models` reads them."""
    keys = jax.random.split(jax.random.key(0), len(next(iter(weights.values()))))
    like = jax.eval_shape(jax.vmap(lambda key: init_model(key, task.recipe)), keys)
    config = run_config(task.recipe, arguments.make_hyper(task.options, task.floats))
    return dump_models(config, unflatten_state(weights, like, "the run"))


def fine_seeds(results: Mapping[str, Any]) -> np.ndarray:
    """Lists the positions of the seeds that did not diverge."""
    return np.flatnonzero(results["diverged_at"] < 0)


def diverged_seeds(results: Mapping[str, PyTree[np.ndarray]]) -> np.ndarray:
    """Flags the seeds that diverged [s], 0 or 1."""
    return (results["diverged_at"] >= 0).astype(int)
