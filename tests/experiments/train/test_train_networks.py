"""Networks trained in a run folder: what is kept of them, and how progress names them."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from experiments import run_sort
from experiments.lab import Chunk, RunFolder
from experiments.train import arguments, train_networks as module
from experiments.train.trained_tasks import ALONE
from tests.support.runs import SMALL, parsed


def train_without_computing(options, path, monkeypatch, diverged=0):
    """Returns the arrays of `train_networks`, whose weights [4] are ones, two seeds at a time.

    The loss of a seed is its number; the first `diverged` seeds diverge.
    """
    trained = SimpleNamespace(state=SimpleNamespace(model={"w": np.ones((3, 4))}))  # one is padding

    def measure_chunk(measure_seeds, chunk, *_):
        numbers = np.array(chunk.seeds)
        return {"loss": {"last": numbers}, "diverged_at": np.where(numbers < diverged, 3, -1)}

    monkeypatch.setattr(module.Ensemble, "train", lambda *_, **__: trained)
    monkeypatch.setattr(module, "measure_chunk", measure_chunk)
    with RunFolder(path, {}) as run:
        task = run_sort.make_task(options)
        return module.train_networks(options, {ALONE: task}, run, lambda *_: {})[ALONE]


@pytest.mark.parametrize("flags", [(), ("--keep_models",)])
def test_weights_are_kept_only_where_they_are_asked_for(flags, tmp_path, monkeypatch):
    arrays = train_without_computing(parsed(run_sort, *SMALL, *flags), tmp_path, monkeypatch)
    assert arrays.keys() == {"loss/last", "diverged_at"} | ({"model/w"} if flags else set())
    assert all(len(array) == 2 for array in arrays.values())


def test_further_seeds_have_weights_where_the_first_ones_do(tmp_path, monkeypatch):
    for flags in ("--num_seeds=2 --keep_models", "--num_seeds=4"):
        options = parsed(run_sort, *SMALL, *flags.split())
        arrays = train_without_computing(options, tmp_path, monkeypatch)
        assert arrays["model/w"].shape == (options.num_seeds, 4)


def test_seeds_are_trained_chunk_by_chunk(tmp_path, monkeypatch):
    options = parsed(run_sort, *SMALL, "--num_seeds=4", "--seed_chunk=2")
    arrays = train_without_computing(options, tmp_path, monkeypatch, diverged=3)
    assert arrays["loss/last"].tolist() == [0, 1, 2, 3]
    assert arrays["diverged_at"].tolist() == [3, 3, 3, -1]


def test_a_network_of_which_every_seed_diverged_is_named_by_its_rate(tmp_path, monkeypatch):
    options = parsed(run_sort, *SMALL, "--learning_rate=7")
    with pytest.raises(ValueError, match=r"^every seed diverged at learning_rate=7\.0; see .*log"):
        train_without_computing(options, tmp_path, monkeypatch, diverged=2)


@pytest.mark.parametrize("prefix", ["", "depth=2/"])
def test_weights_that_were_kept_are_files_of_their_networks(prefix, monkeypatch):
    """Each network has its own; a file that there is stays."""
    saved = {}
    tasks = {
        part: SimpleNamespace(options=SimpleNamespace(prefix=prefix), part=part)
        for part in ("a", "b", "c", "d")
    }
    there = module.network_file(f"{prefix}d", "models.safetensors")
    parts = {f"{part}/model": {"w": part} for part in "abd"}  # those of c were not kept
    point = SimpleNamespace(
        folder=SimpleNamespace(part=parts.get),
        lacks_file=lambda name: name != there,
        save_file=saved.__setitem__,
    )
    monkeypatch.setattr(module, "dump_weights", lambda task, weights: (task.part, weights["w"]))
    module.save_models(point, tasks)
    start = "models/depth=2-" if prefix else "models/"
    assert saved == {f"{start}{part}.safetensors": (part, part) for part in "ab"}


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        (["a", "a"], "a"),
        (["b", "a", "a"], "b and 1 more"),
        (["b", "a", "c"], "b and 2 more"),
    ],
)
def test_progress_names_the_first_cell_and_counts_the_others(cells, words):
    assert module.describe_cells(Chunk(cells, range(len(cells)), None, None)) == words


def test_a_run_is_named_by_its_seed_and_its_cell_where_there_are_several():
    assert module.describe_run(ALONE, 3) == "seed 3"
    assert module.describe_run(f"{ALONE}/rate=0.1", 3) == "seed 3 of rate=0.1"
    assert module.describe_run("depth 4", 0) == "seed 0 of depth 4"


class Folder(SimpleNamespace):
    """A run folder that keeps one state, and lists what it is asked for."""

    def __init__(self, path, checkpoint=None):
        super().__init__(path=path, checkpoint=checkpoint, lines=[], calls=[])

    def log(self, line):
        self.lines.append(line)

    def drop_checkpoints(self, but_of):
        self.calls.append(("drop", but_of))

    def restore_checkpoint(self, like, states):
        self.calls.append(("restore", like, states))
        return self.checkpoint

    def save_checkpoint(self, epoch, state, states):
        self.calls.append(("save", epoch, state, states))


def make_reports(monkeypatch):
    """Returns the list of what progress shows: lines, and (step, loss)."""
    reports = []

    class Reports(module.Progress):
        def say(self, message):
            reports.append(message)

        def reach(self, steps, **values):
            super().reach(steps, **values)
            reports.append((self.n, self.initial, values["loss"]))

    monkeypatch.setattr(module, "Progress", Reports)
    return reports


CHUNK = Chunk(("a", "a", "b"), (3, 4, 3), None, None)
ENSEMBLE = SimpleNamespace(recipe=SimpleNamespace(num_epochs=8))


def test_progress_of_a_training_is_of_the_runs_that_do_not_diverge(tmp_path, monkeypatch):
    """A run that diverges is said once; states are saved when they are due, or to be stopped."""
    clock, folder, reports = [0.0], Folder(tmp_path), make_reports(monkeypatch)
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    stopped = []
    monkeypatch.setattr(module, "stop_requested", lambda: bool(stopped))
    nan, inf = np.nan, np.inf
    with module.keep_states(ENSEMBLE, CHUNK, folder, "networks") as calls:
        assert calls.keys() == {"resume", "on_chunk", "on_watched", "activity"}
        assert calls["on_watched"] is None and calls["resume"]("like") is None
        calls["on_chunk"](2, lambda: "early", np.array([[1.0, 4], [2, 6], [3, 5]]))
        clock[0] = module.CHECKPOINT_SECONDS + 1
        calls["on_chunk"](4, lambda: "due", np.array([[4.0, 3], [6, nan], [5, 4]]))
        clock[0] += module.CHECKPOINT_SECONDS - 1
        calls["on_chunk"](5, lambda: "not due", np.array([[3.0], [nan], [2.0]]))
        stopped.append(15)
        calls["on_chunk"](6, lambda: "stop", np.array([[inf], [nan], [nan]]))
    (_, states), *saved = [call for call in folder.calls if call[0] != "restore"]
    assert saved == [("save", 4, "due", states), ("save", 6, "stop", states)]
    assert folder.calls[1] == ("restore", "like", states)
    assert folder.lines[0] == "seed 3 of a to seed 3 of b"
    losses = [report for report in reports if isinstance(report, tuple)]
    assert [loss[:2] for loss in losses] == [(2, 0), (4, 0), (5, 0), (6, 0)]
    np.testing.assert_array_equal([loss[2] for loss in losses], [5.0, 3.5, 2.5, nan])
    assert [report for report in reports if isinstance(report, str)] == [
        "seed 4 of a diverged by epoch 4; it is kept apart",
        "seed 3 of a diverged by epoch 6; it is kept apart",
        "seed 3 of b diverged by epoch 6; it is kept apart",
    ]
    other = Folder(tmp_path)
    with module.keep_states(ENSEMBLE, CHUNK._replace(seeds=(3, 4, 4)), other):
        assert other.calls[0][1] != states  # of other runs
    other = Folder(tmp_path)
    with module.keep_states(ENSEMBLE, CHUNK._replace(cells=("a", "a", "c")), other):
        assert other.calls[0][1] != states  # of other cells


def test_a_training_goes_on_from_its_last_state_and_its_lines_too(tmp_path, monkeypatch):
    """Lines of later epochs are dropped, each cell's from its own file, of its own seeds."""
    folder, reports = Folder(tmp_path, (5, "state")), make_reports(monkeypatch)
    dropped, lines = [], []
    monkeypatch.setattr(module.metrics, "drop", lambda *arguments: dropped.append(arguments))
    monkeypatch.setattr(
        module.metrics, "append", lambda path, *row, seed: lines.append((path, *row, seed))
    )
    ratios = np.array([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])
    values = {"layers": {"residual_ratio": ratios, "norm": 10 * ratios[:, 0]}}
    with module.keep_states(ENSEMBLE, CHUNK, folder, "networks", is_monitored=True) as calls:
        assert calls["resume"]("like") == (5, "state")
        calls["on_chunk"](6, lambda: "", np.ones((3, 1)))
        calls["on_watched"](0, values, None)
        calls["on_watched"](6, values, np.array([[9.0, 1.0], [9.0, 2.0], [9.0, 3.0]]))
    a, b = (tmp_path / f"metrics/{cell}.jsonl" for cell in "ab")
    assert dropped == [(a, [3, 4], 5), (b, [3], 5)]
    assert reports == ["resumed after epoch 5", (6, 5, 1.0)]
    rows = [
        (path, epoch, row.get("loss"), row["residual_ratio"].tolist(), seed)
        for path, epoch, row, seed in lines
    ]
    assert rows == [
        (a, 0, None, [0.1, 0.2], 3),
        (a, 0, None, [0.3, 0.4], 4),
        (b, 0, None, [0.5, 0.6], 3),
        (a, 6, 1.0, [0.1, 0.2], 3),
        (a, 6, 2.0, [0.3, 0.4], 4),
        (b, 6, 3.0, [0.5, 0.6], 3),
    ]
    assert [row["norm"] for _, _, row, _ in lines] == 2 * [1.0, 3.0, 5.0]
    folder.checkpoint = None
    dropped.clear()
    with module.keep_states(ENSEMBLE, CHUNK, folder, is_monitored=True) as calls:
        calls["resume"]("like")
    assert [epoch for _, _, epoch in dropped] == [-1, -1]


@pytest.mark.parametrize("has_curves", [False, True])
@pytest.mark.parametrize("is_monitored", [False, True])
def test_what_is_watched_is_what_the_task_and_the_flag_ask_for(
    has_curves, is_monitored, monkeypatch
):
    task = SimpleNamespace(recipe="recipe", curves=has_curves, metrics="metrics")
    data = {"eval": "held out", "train": "training"}
    monkeypatch.setattr(module, "run_config", lambda *arguments: ("config", *arguments))
    monkeypatch.setattr(module, "whole_metrics", lambda *arguments: ("curves", *arguments))
    monkeypatch.setattr(module, "layer_scalars", lambda *arguments: ("layers", *arguments))
    watch = module.make_watch(task, is_monitored)
    if not has_curves and not is_monitored:
        assert watch is None
        return
    config = ("config", "recipe", "hyper")
    expected = {}
    if has_curves:
        expected["curves"] = ("curves", "model", "held out", config, "metrics")
    if is_monitored:
        expected["layers"] = ("layers", "model", data, config)
    assert watch("model", data, "hyper", None) == expected


def test_curves_begin_after_the_first_epoch_and_end_with_the_whole(monkeypatch):
    """Of 2 runs, and a watched value before training and after each of 3 epochs."""
    asked, labels = {}, []

    def measure(state, data, hyper, keys, *, num_seeds, activity, on_seeds):
        asked.update(state=state, data=data, hyper=hyper, keys=keys, count=num_seeds)
        on_seeds(num_seeds)
        labels.append(activity.__self__.label)
        return {"accuracy": np.ones(2)}

    monkeypatch.setattr(
        module.seeds, "shard_seeds", lambda unpadded, mesh: (*unpadded, asked.update(mesh=mesh))[:2]
    )
    chunk = SimpleNamespace(cells=("a", "a"), seeds=(0, 1), unpadded=("keys", "hyper"))
    executor = SimpleNamespace(mesh="mesh", run=SimpleNamespace(log=lambda line: None))
    curve = np.arange(8.0).reshape(2, 4)
    trained = SimpleNamespace(
        state="state",
        data="data",
        watched={"curves": {"error": curve, "loss": 10 * curve}, "layers": 0},
        losses=np.zeros((2, 3)),
        diverged_at=np.array([-1, 2]),
    )
    results = module.measure_chunk(measure, chunk, trained, executor)
    assert asked == {
        **{"state": "state", "data": "data", "hyper": "hyper", "keys": "keys"},
        **{"count": 2, "mesh": "mesh"},
    }
    curves = {f"{kind}/{name}" for kind in ("curves", "whole") for name in ("error", "loss")}
    assert results.keys() == {"accuracy", "losses", "diverged_at"} | curves
    assert results["whole/loss"].tolist() == [30, 70]
    assert results["curves/error"].tolist() == [[1, 2, 3], [5, 6, 7]]
    assert results["whole/error"].tolist() == [3, 7]
    assert results["losses"] is trained.losses and results["diverged_at"] is trained.diverged_at
    trained.watched = None
    results = module.measure_chunk(measure, chunk, trained, executor, "sort")
    assert labels == ["measuring a", "measuring sort"]
    assert results.keys() == {"accuracy", "losses", "diverged_at"}


@pytest.mark.parametrize("prefix", ["", "depth=2/"])
@pytest.mark.parametrize("part", [ALONE, "rate=0.1"])
@pytest.mark.parametrize("flag", ["keep_models", "monitor"])
def test_files_that_an_earlier_training_did_not_write_are_refused(flag, part, prefix, tmp_path):
    """Those of the same point and network; a network that is not trained yet will write them."""
    asked = {"keep_models": False, "monitor": False, flag: True}
    options = parsed(run_sort).replace(**asked)
    vars(options).update(axes={"depth": 2} if prefix else {})
    assert options.prefix == prefix
    parts = {}
    folder = SimpleNamespace(path=tmp_path, part=parts.get)
    module.check_files(options, part, folder)
    parts[part] = {"loss": np.zeros(2)}
    with pytest.raises(ValueError, match=f"was trained without --{flag}: --overwrite"):
        module.check_files(options, part, folder)
    parts[f"{part}/model"] = {"w": np.zeros(2)}
    lines = tmp_path / module.network_file(prefix + part, module.metrics.NAME)
    lines.parent.mkdir(exist_ok=True)
    lines.write_text("{}")
    module.check_files(options, part, folder)
    module.check_files(options.replace(**{flag: False}), part, folder)


@pytest.mark.parametrize(("name", "label"), [("", "a and 1 more"), ("networks", "networks")])
def test_progress_of_a_training_has_the_name_of_what_is_trained(name, label, tmp_path):
    with module.keep_states(ENSEMBLE, CHUNK, Folder(tmp_path), name) as calls:
        assert calls["activity"].__self__.label == f"training {label}"


@pytest.mark.parametrize(
    ("flags", "program", "epochs", "name"),
    [
        (["--n_epochs=41"], "", 3, "sort"),
        (["--n_epochs=20"], "shared", 1, ""),
        (["--n_epochs=0"], "", 1, "sort"),
        (["--n_epochs=41", "--monitor"], "", 1, "sort"),
    ],
)
def test_a_training_reports_about_twenty_times_and_watches_every_epoch(
    flags, program, epochs, name, tmp_path, monkeypatch
):
    """Networks that share a program are named by their cells."""
    made, kept = [], []

    def keep_states(ensemble, chunk, folder, name, is_monitored):
        kept.append((name, is_monitored))
        return contextlib.nullcontext({})

    class Ensemble(module.Ensemble):
        def __init__(self, *arguments, **options):
            made.append((options["epochs_per_chunk"], options["watch"] is not None))
            super().__init__(*arguments, **options)

    make_task = run_sort.make_task
    monkeypatch.setattr(
        run_sort, "make_task", lambda options: replace(make_task(options), program=program)
    )
    monkeypatch.setattr(module, "keep_states", keep_states)
    monkeypatch.setattr(module, "Ensemble", Ensemble)
    train_without_computing(parsed(run_sort, *SMALL, *flags), tmp_path, monkeypatch)
    is_monitored = "--monitor" in flags
    assert made == [(epochs, is_monitored)] and kept == [(name, is_monitored)]


def test_a_run_is_measured_and_kept_with_its_own_numbers(monkeypatch):
    """Those of the flags, those of the task, and the network that they make."""
    task = replace(
        run_sort.make_task(parsed(run_sort, *SMALL, "--learning_rate=0.5")),
        floats={"network": {"skip_gain": 0.25}},
    )
    hyper = arguments.make_hyper(task.options, task.floats)
    measured = module.measure_run(
        task, lambda task, *others: (task.recipe.config, *others), "model", "data", hyper, "key"
    )
    expected = task.recipe.config.replace(skip_gain=0.25)
    assert measured == (expected, "model", "data", "key") and hyper.learning_rate == 0.5
    monkeypatch.setattr(module, "unflatten_state", lambda weights, like, owner: weights)
    monkeypatch.setattr(module, "dump_models", lambda *written: written)
    weights = {"w": np.ones((2, 3))}
    assert module.dump_weights(task, weights) == (expected, weights)
