"""A made-up experiment: its folder, its points, what it shows and when it computes."""

import json
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure

from experiments.lab import cli, experiment, progress
from experiments.lab.flags import Mode
from experiments.lab.run import open_folder, open_run
from experiments.verdicts.rows import mean_row
from experiments.verdicts.statement_page import Comparison
from rank_collapse.runs.files import RunError
from tests.support.runs import rows

FLAGS = cli.make_flags("example", num_seeds=4, shows="value", execution=("chunk",))


FLAGS.define("integer", "depth", 3, "Layers.", lower_bound=1)


FLAGS.define("list", "scales", ["1"], "Scales.")


FLAGS.define("float", "decay", 0.0, "Decay.")


FLAGS.define("integer", "chunk", 8, "Chunk.")


def execute(body, *arguments):
    return cli.execute(body, FLAGS, arguments)


def test_the_folder_follows_from_the_flags(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = []

    def main(options):
        with open_folder(options, {"hash": "h"}) as opened:
            paths.append(opened.path)

    for arguments in (
        [],
        ["--num_devices=1", "--chunk=2"],
        ["--depth=4", "--scales=1,2"],
        ["--depth=4", "--run_name=a"],
        ["--output_dir=o", "--run_name=a"],
        ["--output_dir=p"],
    ):
        assert execute(main, *arguments) == 0
    assert paths[0] == paths[1]
    assert str(paths[0]) == "results/example/default"
    assert str(paths[2]).startswith("results/example/depth=4,scales=1+2,")
    assert [str(p) for p in paths[3:]] == ["results/example/a", "o/a", "p"]
    saved = json.loads((tmp_path / "p" / "config.json").read_text())
    assert saved["config"] == {
        "experiment": "example",
        "hash": "h",
        "decay": 0.0,
        "depth": 3,
        "scales": ["1"],
        "seed": 0,
        "first_seed": 0,
        "num_seeds": 4,
    }
    assert saved["execution"]["chunk"] == 8
    assert execute(main, "--output_dir=p", "--depth=4") == 2
    assert execute(main, "--output_dir=p", "--depth=4", "--overwrite") == 0


def test_overwrite_leaves_the_current_folder_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results.csv").write_text("mine")
    for arguments in (["--output_dir="], ["--output_dir=a", "--run_name=.."]):
        assert execute(lambda o: open_folder(o).close(), "--overwrite", *arguments) == 2
    assert (tmp_path / "results.csv").read_text() == "mine"


def test_a_folder_that_cannot_be_written_to_is_one_line(tmp_path, monkeypatch, capsys):
    """Root may write everywhere, so the answer of the system is simulated."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert execute(lambda o: open_folder(o).close(), f"--output_dir={tmp_path}") == 2
    assert capsys.readouterr().err == f"error: cannot write to {tmp_path}: permission denied\n"


class Doubled:
    """An experiment that multiplies its seeds by a factor; `computed` lists the factors used."""

    __doc__ = "What it is about.\n\n    python -m experiments.run_doubled"

    def __init__(self, extra=lambda factor: {"input": factor}, selecting=()):
        self.FLAGS = cli.make_flags("doubled", num_seeds=3, selecting=selecting, shows="value")
        self.FLAGS.define("integer", "factor", 2, "Of the seeds.")
        self.computed, self.dtypes, self.extra = [], {}, extra

    def note(self, part):
        self.dtypes[part] = jnp.ones(()).dtype

    def make_setup(self, options):
        self.note("setup")
        if options.factor == 13:
            raise ValueError("no factor of 13")
        return options.factor

    def measure(self, options, factor, folder):
        def compute():
            self.note("measure")
            self.computed.append(factor)
            if factor % 7 == 0:
                raise ValueError(f"{factor} cannot be measured")
            return {"values": factor * np.arange(1.0, 1 + options.num_seeds)}

        return folder.cached("all", compute)

    def table(self, results, factor):
        self.note("table")
        return [{"value": float(v)} for v in results["values"]]

    def claims(self, results, factor):
        self.note("claims")
        return [mean_row("chains", "seeds", results["values"])]

    @staticmethod
    def compare(results, factor):
        return [Comparison("first", results["values"][0], 1, "a note")]

    @staticmethod
    def shown_figure():
        """A
        caption."""
        return Figure()

    def main(self, options):
        with open_run(options, self.make_setup, self.extra) as run:
            for point in run.measure(self.measure):
                results, factor = point.results, point.setup
                point.save_table(self.table(results, factor))
                point.save_figure("shown", self.shown_figure)
                point.save_figure("none", lambda: None)
                point.save_claims(self.claims(results, factor))
                point.save_comparisons(self.compare(results, factor))
                point.save_file("report.html", b"<p>")
            return run.finish()

    def run(self, folder, *arguments):
        return cli.execute(self.main, self.FLAGS, [*arguments, f"--output_dir={folder}"])


def test_a_run_shows_what_there_is_and_computes_it_once(tmp_path, capsys):
    doubled = Doubled()
    for deleted in ((), ("figures/shown.pdf", "results.csv")):
        for name in deleted:
            (tmp_path / name).unlink()
        assert doubled.run(tmp_path) == 0
        printed = capsys.readouterr().out
        assert "first: 2 (published 1)" in printed and "3 draws" in printed
        assert {path.stem for path in (tmp_path / "figures").iterdir()} == {"shown"}
        assert (tmp_path / "results.csv").exists() and (tmp_path / "report.html").exists()
    assert doubled.computed == [2]
    assert experiment.describe_figures(doubled.shown_figure) == {"shown": "A caption."}


def test_a_figure_is_drawn_only_where_one_of_its_files_is_missing(tmp_path):
    doubled, drawn = Doubled(), []

    def draw():
        drawn.append(len(drawn))
        return Figure()

    doubled.shown_figure = draw
    assert doubled.run(tmp_path) == 0 and doubled.run(tmp_path) == 0
    assert drawn == [0]
    (tmp_path / "figures" / "shown.png").unlink()
    experiment.read_run(doubled, tmp_path)
    assert drawn == [0] and not (tmp_path / "figures" / "shown.png").exists()
    assert doubled.run(tmp_path) == 0
    assert drawn == [0, 1] and (tmp_path / "figures" / "shown.png").exists()


def test_figures_are_saved_as_pdf_unless_the_flags_say_otherwise(tmp_path):
    """A later command adds the PDF; another one without PDF keeps it."""
    doubled, suffixes = Doubled(), []
    for arguments in (["--nopdf"], [], ["--nopdf"]):
        assert doubled.run(tmp_path, *arguments) == 0
        suffixes.append({path.suffix for path in (tmp_path / "figures").iterdir()})
    assert suffixes == [{".png"}, {".png", ".pdf"}, {".png", ".pdf"}]
    assert doubled.computed == [2]


def test_all_points_are_set_up_before_the_first_is_computed(tmp_path, capsys):
    doubled = Doubled()
    for values in ("2,13", "2,x", "2,99999999999"):
        assert doubled.run(tmp_path / "a", f"--factor={values}") == 2
    assert doubled.computed == [] and not (tmp_path / "a").exists()
    assert capsys.readouterr().err.count("\n") == 3


@pytest.mark.parametrize("name", ["seed", "first_seed", "num_seeds"])
def test_seeds_are_an_axis_already(name, tmp_path):
    assert Doubled().run(tmp_path / "a", f"--{name}=0,1") == 2


def test_a_point_that_cannot_be_measured_is_named_and_the_others_are_shown(tmp_path, capsys):
    doubled = Doubled()
    assert doubled.run(tmp_path, "--factor=7,2", "--jobs=1") == 1
    assert capsys.readouterr().err == "factor 7: 7 cannot be measured\n"
    assert {row["factor"] for row in rows(tmp_path)} == {"2"}
    assert doubled.run(tmp_path / "b", "--factor=7,7", "--jobs=1") == 2
    capsys.readouterr()
    assert doubled.run(tmp_path / "c", "--factor=7,14", "--jobs=1") == 2
    reasons = "factor 7: 7 cannot be measured; factor 14: 14 cannot be measured"
    assert capsys.readouterr().err == f"error: {reasons}\n"


def test_a_worker_measures_its_group_alone_and_shows_nothing(tmp_path, capsys):
    doubled, shown = Doubled(), []

    def main(options):
        options.mode = Mode(worker_group=1)
        run = doubled.main(options)
        shown.append((run.points, run.rows, run.claims))
        return run

    arguments = ["--factor=2,3,5", f"--output_dir={tmp_path}"]
    assert cli.execute(main, doubled.FLAGS, arguments) == 0
    assert doubled.computed == [3] and shown == [([], [], [])]
    assert capsys.readouterr().out == ""
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "arrays.npz", ".lock"}
    with np.load(tmp_path / "arrays.npz") as saved:
        assert {name: saved[name].tolist() for name in saved.files} == {
            "factor=3/all/values": [3.0, 6.0, 9.0]
        }


def test_what_the_flags_do_not_say_determines_the_folder_too(tmp_path, capsys):
    assert Doubled().run(tmp_path) == 0
    assert Doubled(extra=lambda factor: {"input": 3}).run(tmp_path) == 2
    assert "input" in capsys.readouterr().err


def test_a_folder_is_read_as_it_was_last_asked(tmp_path):
    doubled = Doubled(extra=lambda factor: None, selecting=("factor",))
    for factor in (3, 5):
        assert doubled.run(tmp_path, f"--factor={factor}") == 0
    assert experiment.read_run(doubled, tmp_path).points[0].setup == 5
    (tmp_path / "summary.json").write_text('{"shown": ["first"]}')
    with pytest.raises(RunError, match=r"summary\.json.*names no flags"):
        experiment.read_run(doubled, tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_setup_measures_and_tables_compute_in_the_arithmetic_of_the_flag(tmp_path, dtype):
    doubled = Doubled()
    doubled.FLAGS.define("enum", "dtype", "float32", "Arithmetic.", ("float32", "float64"))
    assert doubled.run(tmp_path, f"--dtype={dtype}") == 0
    parts = ("setup", "measure", "table", "claims")
    assert doubled.dtypes == dict.fromkeys(parts, jnp.dtype(dtype))
    with jax.enable_x64(True):  # of whoever calls it
        assert doubled.run(tmp_path / "double", f"--dtype={dtype}") == 0
    assert doubled.dtypes == dict.fromkeys(parts, jnp.dtype("float64"))


@pytest.mark.parametrize("factors", ["2,3", "2"])
def test_a_signal_ends_a_run_between_two_points_and_before_its_files(factors, tmp_path):
    """What was measured is kept."""

    class Signalled(Doubled):
        def measure(self, options, factor, folder):
            results = super().measure(options, factor, folder)
            progress.note_signal(signal.SIGTERM)
            return results

    doubled = Signalled()
    assert doubled.run(tmp_path, f"--factor={factors}", "--jobs=1") == 128 + signal.SIGTERM
    assert doubled.computed == [2]
    assert (tmp_path / "arrays.npz").exists() and not (tmp_path / "summary.json").exists()


def test_a_folder_that_begins_with_arrays_names_where_they_were_made(tmp_path):
    doubled, machine = Doubled(), {"git": "b2", "device": "another"}

    def main(options):
        options.mode = Mode(begin_with={"all/values": np.arange(3)}, begun_in=[machine])
        with open_folder(options) as folder:
            assert folder.part("all")["values"].tolist() == [0, 1, 2]
            assert folder.environments[1:] == [machine]

    arguments = [f"--output_dir={tmp_path}"]
    assert cli.execute(main, doubled.FLAGS, arguments) == 0
    assert json.loads((tmp_path / "config.json").read_text())["later"] == [machine]
