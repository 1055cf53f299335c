"""What every experiment keeps to, at its tiny size: the contract of `Experiment`.

It is computed and shown again without computing. Some are also computed in a process of their own,
and here stopped where they first save something and resumed: both find the same to the bit. Then
the object itself, on one of two numbers.
"""

import importlib
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data_dictionary import check_columns
from figures_as_data import as_data
from marks import full_but, full_if
from matplotlib.figure import Figure
from trained_runs import check_second_run, contents, rows, run, same_arrays, single_columns

from experiments import reproduce
from experiments.lab import cli, folder, pool, progress
from experiments.lab.experiment import Drawing, Experiment, experiment_of, experiments_of
from experiments.lab.folder import RunFolder
from experiments.lab.statements import STATEMENTS
from experiments.verdicts import claims
from experiments.verdicts.page import Comparison
from rank_collapse.runs.drawn import drawn
from rank_collapse.runs.files import RunError


def as_here(devices):
    """A process that computes on as many devices, and writes figures as `conftest` has it.

    The loop of a device over one seed is compiled away, and its body is then rounded otherwise.
    """
    jax.config.update("jax_num_cpu_devices", devices)
    jax.devices()
    folder.drawn = as_data


@pytest.fixture(scope="module")
def elsewhere():
    """A process of its own."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, as_here, (jax.device_count(),)) as pool:
        yield pool


def stop_at_the_first_save(patch):
    save = RunFolder.save_arrays

    def stopping(run, arrays):
        save(run, arrays)
        raise progress.Stopped(143)

    patch.setattr(RunFolder, "save_arrays", stopping)


TWICE = ("run_sort", "run_collapse", "run_architectures", "run_attention_forms")
FEWER = {"run_stability": ["--designs=post"]}  # programs to compile than at the tiny size


def arguments_of(name):
    return [*experiment_of(name).presets["tiny"], *FEWER.get(name, [])]


def check_resumed(name, here, there, elsewhere, monkeypatch):
    """A run that was stopped, and goes on, has found what one in another process has."""
    module, tiny = importlib.import_module(f"experiments.{name}"), arguments_of(name)
    command = f"experiments.{name}", *tiny, f"--output_dir={there}"
    ended = elsewhere.submit(pool.run, *command).result()
    assert ended.code == 0, ended.printed
    with monkeypatch.context() as patch:
        stop_at_the_first_save(patch)
        code = run(module, tiny, here)
    saved = (there / "arrays.npz").exists()
    assert code == (143 if saved else 0)
    assert (here / "summary.json").exists() is not saved
    assert run(module, tiny, here) == 0
    if saved:
        same_arrays(there, here)
    assert contents(there) == contents(here)


@pytest.mark.parametrize("name", full_but(reproduce.EXPERIMENTS, *TWICE))
def test_what_was_stopped_goes_on(name, elsewhere, tmp_path, monkeypatch):
    check_resumed(name, tmp_path / "here", tmp_path / "there", elsewhere, monkeypatch)


# Which train as run_sort does, or take ten seconds to compile.
LONG = ("run_convex_hull", "run_memorization", "run_width", "run_transformer", "run_trained")
LONG += ("run_trainability", "run_depth_check", "run_loops")


@pytest.mark.parametrize("name", full_if(reproduce.EXPERIMENTS, *LONG))
def test_an_experiment_keeps_to_the_contract(name, tmp_path, monkeypatch, capsys):
    module, own = importlib.import_module(f"experiments.{name}"), experiment_of(name)
    here, tiny = tmp_path / "here", arguments_of(name)
    assert run(module, tiny, here) == 0
    check_columns(rows(here))

    monkeypatch.setattr(RunFolder, "save_arrays", lambda *_: pytest.fail("computed again"))
    check_second_run(lambda: run(module, tiny, here), here, capsys)
    assert list((here / "figures").iterdir()) and all(own.captions.values())

    shown = own.read(here)
    for row in shown.claims:
        assert name in STATEMENTS[row.key].experiments, row
        ends = row.interval(0.95)
        if ends.known and row.estimate is not None:
            assert ends[0] <= row.estimate <= ends[1], row
    assert shown.claims or shown.comparisons


@pytest.mark.full
@pytest.mark.parametrize("name", reproduce.EXPERIMENTS)
def test_figures_are_drawn_as_users_see_them(name, tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "drawn", drawn)
    module = importlib.import_module(f"experiments.{name}")
    assert run(module, experiment_of(name).presets["tiny"], tmp_path) == 0
    assert {path.suffix for path in (tmp_path / "figures").iterdir()} == {".png", ".pdf"}


def made(**fields):
    """An experiment that multiplies its seeds by a factor, and how often it was computed."""
    values, computed = cli.make_flags("doubled", num_seeds=3), []
    cli.definer(values)("integer", "factor", 2, "Of the seeds.")

    def compute(options):
        computed.append(options.factor)
        return {"values": options.factor * np.arange(1.0, 1 + options.num_seeds)}

    about = {
        "about": "What it is about.\n\n    python -m experiments.run_doubled",
        "order": 1,
        "brief": "numbers",
        "title": "Numbers",
        "claim": "They grow.",
        "flags": values,
        "presets": {},
        "setup": lambda options: options.factor,
        "extra": lambda factor: {"input": factor},
        "measure": lambda options, factor, run: run.cached("all", lambda: compute(options)),
        "table": lambda found, factor: [{"value": float(v)} for v in found["values"]],
        "figures": {
            "shown": Drawing(lambda found, factor: Figure(), "A caption."),
            "aside": Drawing(lambda found, factor: Figure()),
            "none": Drawing(lambda *_: pytest.fail("drawn"), "x", lambda found, factor: factor < 0),
            "part": Drawing.of_part(lambda found: {}, lambda *_: pytest.fail("drawn"), "x"),
        },
        "further": lambda found, factor: {f"times_{factor}": Figure},
        "files": lambda found, factor, run: {"report.html": lambda: b"<p>"},
        "claims": lambda found, factor: [claims.of_mean("chains", "seeds", found["values"])],
        "compare": lambda found, factor: [Comparison("first", found["values"][0], 1, "a note")],
    }
    return Experiment(**about | fields), computed


def test_a_run_shows_what_there_is_and_computes_it_once(tmp_path, capsys):
    own, computed = made()
    for deleted in ((), ("figures/shown.pdf", "results.csv")):
        for name in deleted:
            (tmp_path / name).unlink()
        assert cli.execute(own.main, own.flags, [f"--output_dir={tmp_path}"]) == 0
        printed = capsys.readouterr().out
        assert "first: 2, beside 1" in printed and "3 draws" in printed
        names = {path.stem for path in (tmp_path / "figures").iterdir()}
        assert names == {"shown", "aside", "times_2"}
        assert (tmp_path / "results.csv").exists() and (tmp_path / "report.html").exists()
    assert computed == [2]
    assert own.captions == {"shown": "A caption.", "none": "x", "part": "x"}


def test_what_the_flags_do_not_say_determines_the_folder_too(tmp_path, capsys):
    own, _ = made()
    other, _ = made(extra=lambda factor: {"input": 3})
    assert cli.execute(own.main, own.flags, [f"--output_dir={tmp_path}"]) == 0
    assert cli.execute(other.main, other.flags, [f"--output_dir={tmp_path}"]) == 2
    assert "input" in capsys.readouterr().err


def test_a_folder_is_read_as_it_was_last_asked(tmp_path):
    own, _ = made(execution=("factor",), extra=lambda factor: None)
    for factor in (3, 5):
        arguments = [f"--factor={factor}", f"--output_dir={tmp_path}"]
        assert cli.execute(own.main, own.flags, arguments) == 0
    assert own.results(tmp_path)[0][2] == 5
    (tmp_path / "summary.json").write_text('{"shown": ["first"]}')  # as before 0.2.0
    with pytest.raises(RunError, match="delete this file, and the same command makes it again"):
        own.results(tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_setup_measures_and_tables_compute_in_the_arithmetic_of_the_flag(tmp_path, dtype):
    parts = ("setup", "measure", "table", "claims")
    plain, seen = made()[0], {}

    def noted(part):
        def called(*given):
            seen[part] = jnp.ones(()).dtype
            return getattr(plain, part)(*given)

        return called

    own, _ = made(**{part: noted(part) for part in parts}, flags=plain.flags)
    cli.definer(own.flags)("enum", "dtype", "float32", "Arithmetic.", ("float32", "float64"))
    assert cli.execute(own.main, own.flags, [f"--dtype={dtype}", f"--output_dir={tmp_path}"]) == 0
    assert seen == dict.fromkeys(parts, jnp.dtype(dtype))


@pytest.mark.full
@pytest.mark.parametrize("name", [n for n in experiments_of() if "dtype" in experiment_of(n).flags])
def test_every_column_of_a_run_in_float64_has_its_digits(name, tmp_path, monkeypatch):
    own = experiment_of(name)
    monkeypatch.setattr(Experiment, "drawn", lambda *_: {})
    arguments = [*own.presets["tiny"], "--dtype=float64", f"--output_dir={tmp_path}"]
    assert cli.execute(own.main, own.flags, arguments) == 0
    assert not single_columns(tmp_path)
