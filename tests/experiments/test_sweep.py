"""--sweep: the grid, its cells as runs of their own, slices, failures, and what is shown."""

import json

import jax
import numpy as np
import pytest
from absl import flags
from trained_runs import check_second_run, rows, summary

from experiments.shell import cli, vocabulary
from experiments.shell.sweep import figures as sweep_figures, grid, merge, work
from rank_collapse.report import figures as report_figures
from rank_collapse.runs import files
from rank_collapse.runs.files import lease

FLAGS = cli.make_flags("stub", num_seeds=3, shows="value,layer=last", execution=("chunk",))
define = cli.definer(FLAGS)
define("float", "rate", 1.0, "A factor.", lower_bound=0.0)
define("integer", "depth", 2, "Layers.", lower_bound=1)
vocabulary.alias(FLAGS, layers="depth")
define("multi_integer", "sizes", [1, 2], "Sizes.")
define("boolean", "do_mlp", False, "Not used.")
define("integer", "chunk", 1, "Changes nothing.")

RAN = []


def main(options):
    """A run without a network."""
    RAN.append((options.rate, options.depth))
    with cli.open_run(options) as run:
        if options.rate == 0:
            raise ValueError("rate=0 is\nno rate")
        run.publish(
            rows=lambda: [
                {"seed": s, "layer": l, "value": options.rate * l + s, "name": "x"}
                for s in range(options.num_seeds)
                for l in range(options.depth + 1)
            ],
            summary=lambda: {"rate": options.rate},
        )
    print("not to be seen")


def sweep(folder, text, *arguments):
    RAN.clear()
    return cli.execute(main, FLAGS, [f"--sweep={text}", f"--output_dir={folder}", *arguments])


@pytest.mark.parametrize(
    ("text", "points"),
    [
        ("rate=1,2", [{"rate": "1"}, {"rate": "2"}]),
        (
            "rate=1,2; --depth = 3, 4",
            [{"rate": r, "depth": d} for r in "12" for d in "34"],
        ),
        ("rate,depth=1:3,2:4", [{"rate": "1", "depth": "3"}, {"rate": "2", "depth": "4"}]),
        ("rate,depth=1:3;sizes=5", [{"rate": "1", "depth": "3", "sizes": "5"}]),
        ("do_mlp=true,false", [{"do_mlp": "true"}, {"do_mlp": "false"}]),
    ],
)
def test_a_grid_is_products_and_zips(text, points):
    options = cli.parse(FLAGS, ["--num_seeds=2", "--sweep", text, "--run_name=x"])
    cells = grid.cells_of(options, grid.axes_of(text))
    assert sorted(map(str, (cell.values for cell in cells))) == sorted(map(str, points))
    assert len({cell.name for cell in cells}) == len(points)
    for cell in cells:
        assert cell.options.num_seeds == 2
        assert cell.options.sweep is None and cell.options.run_name is None
        if "sizes" in cell.values:
            assert cell.options.sizes == [5]  # in place of the default, not after it


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sweep="], "--sweep is empty"),
        (["--sweep_shows=value"], "--sweep_shows is for a grid: give --sweep too"),
        (["--slice=0/2"], "--slice is for a grid"),
        (["--workers=2"], "--workers is for a grid"),
        (["--scheduler=a:1"], "--scheduler is for a grid"),
        (["--only_cells=0"], "--only_cells is for a grid"),
        (["--sweep=;"], "'' is not written name=value"),
        (["--sweep=depth=1,２"], "--depth=２ is not written in the digits 0 to 9"),
        (["--sweep=rate"], "'rate' is not written"),
        (["--sweep=rate=1,"], "'rate=1,' is not written"),
        (["--sweep=rate=1;"], "'' is not written"),
        (["--sweep=rate,depth=1:2,3"], "'3' in 'rate,depth=1:2,3' is not 2 values"),
        (["--sweep=rate=1;rate=2"], "'rate' is swept twice"),
        (["--sweep=width=1"], "flag 'width' does not exist"),
        (["--sweep=rate=1,x"], "'x'"),
        (["--sweep=depth=0,1"], "depth=0"),
        (["--sweep=rate=1,1.0"], "rate=1.0 is the same as rate=1"),
        (["--sweep=rate=1,nan"], "--rate=nan is not a finite number"),
        (["--sweep=chunk=1,2"], "chunk changes no result"),
        (["--sweep=num_devices=1,2"], "num_devices changes no result"),
        (["--sweep=rate=1,2", "--rate=3"], "rate is swept and given too"),
        (["--sweep=rate=1,2", "--rate", "3"], "rate is swept and given too"),
        (["--sweep=do_mlp=0,1", "--nodo_mlp"], "do_mlp is swept and given"),
        (["--sweep=layers=1,2", "--depth=2"], "layers is swept and given too"),
        (["--sweep=depth=1,2", "--layers=2"], "depth is swept and given too"),
        (["--sweep=depth=1,2;layers=1,2"], "'depth' and 'layers' are the same flag"),
        (["--sweep=depth=1,٢"], "--depth=٢ is not written in the digits 0 to 9"),
        (["--sweep=rate=1,2", "--run_name=-1"], "--run_name='-1' is not a folder name"),
        (["--sweep=rate=1,2", "--slice=2/2"], "--slice=2/2 is not i/n with i from 0"),
        (["--sweep=rate=1,2", "--slice=a"], "--slice=a is not i/n"),
        (["--sweep=rate=1,2", "--only_cells=0,2"], "--only_cells=2 is not one of 0 to 1"),
        (["--sweep=rate=1,2", "--slice=0/2", "--workers=2"], "--slice and --workers"),
        (["--sweep=rate=1,2", "--scheduler=a:1", "--workers=2"], "--workers and --scheduler"),
        (["--sweep=rate=1,2", "--slice=0/2", "--overwrite"], "--overwrite in a slice"),
        (["--sweep=rate=1,2", "--distributed"], "a sweep takes --workers"),
        (["--sweep=rate=1,2", "--workers=0"], "workers"),
        (["--sweep=rate=1,2", "--sweep_shows=height"], "'height' is not one of seed, layer"),
        (["--sweep=rate=1,2", "--sweep_shows=value,size=1"], "'size' is not one of seed, layer"),
        (["--sweep=rate=1,2", "--sweep_shows=value,layer=9"], "no cell has a row of that"),
        (["--sweep=rate=1,2", "--sweep_shows=name"], "no cell has a row of that"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(arguments, message, tmp_path, capsys):
    assert cli.execute(main, FLAGS, [*arguments, f"--output_dir={tmp_path / 'sweep'}"]) == 2
    *progress, error = capsys.readouterr().err.splitlines()
    assert message in error and error.startswith("error: ")
    assert not progress or "sweep_shows" in arguments[-1]


def test_cells_are_runs_and_the_whole_has_one_table_and_figure(tmp_path, capsys):
    folder = tmp_path / "sweep"
    text = "rate=0.5,2;depth=1,3"
    assert sweep(folder, text) == 0
    assert len(RAN) == 4
    out, err = capsys.readouterr()
    assert "not to be seen" not in out and "4 of 4 cells are done" in out and "[4/4]" in err
    table = rows(folder)
    assert len(table) == 2 * 3 * (2 + 4) and list(table[0])[:2] == ["rate", "depth"]
    for name, found in summary(folder)["mean"].items():
        rate, depth = (float(part.split("=")[1]) for part in name.split(","))
        assert found["mean"] == pytest.approx(rate * depth + 1) and found["seeds"] == 3
        low, high = found["interval"]
        # Seeds 0, 1, 2: Student's t of two degrees of freedom is 4.303 at 95 %.
        assert high - found["mean"] == pytest.approx(4.303 / np.sqrt(3), abs=1e-3)
        assert low + high == pytest.approx(2 * found["mean"])

    # A cell is what the binary leaves without a sweep.
    alone = [f"--output_dir={tmp_path / 'alone'}", "--rate=0.5", "--depth=3"]
    assert cli.execute(main, FLAGS, alone) == 0
    for name in ("results.csv", "summary.json"):
        cell = folder / "cells" / "rate=0.5,depth=3" / name
        assert cell.read_bytes() == (tmp_path / "alone" / name).read_bytes()
    configs = [
        json.loads((f / "config.json").read_text()) for f in (cell.parent, tmp_path / "alone")
    ]
    assert configs[0]["config"] == configs[1]["config"]

    RAN.clear()
    again = [f"--sweep={text}", f"--output_dir={folder}", "--chunk=5"]
    check_second_run(lambda: cli.execute(main, FLAGS, again), folder, capsys)
    assert not RAN
    # What is shown may be changed without computing anything.
    assert sweep(folder, text, "--sweep_shows=value,layer=0") == 0
    assert not RAN and "value,layer=0" in capsys.readouterr().out
    # Another grid, and a folder of a run that is no sweep.
    assert sweep(folder, "rate=0.5,2") == 2
    assert "was made with another config: sweep is" in capsys.readouterr().err
    assert sweep(tmp_path / "alone", text) == 2
    assert "was made with another config" in capsys.readouterr().err
    assert sweep(folder, "rate=0.5,2", "--overwrite") == 0
    assert len(RAN) == 2


def test_intervals_of_shares_stay_between_0_and_1():
    """Of accuracies of 0, ½ and 1 Student's would reach from −.7 to 1.7; so in table and figure."""
    found = merge.means_of({"a": {"0": 0.0, "1": 0.5, "2": 1.0}}, "accuracy,layer=last")
    assert found["a"]["interval"] == [0.0, 1.0]
    assert merge.means_of({"a": {"0": 0.0, "1": 0.5, "2": 1.0}}, "value")["a"]["interval"][1] > 1
    axes = [grid.Axis(("rate",), (("1",), ("2",)))] * 2
    _, panels = report_figures.figure()
    given = {((r,), (c,)): [0.0, 0.5, 1.0] for r in "12" for c in "12"}
    sweep_figures.heat_map(panels[0, 0], *axes, given, (0.0, 1.0), share=True)
    assert {t.get_text() for t in panels[0, 0].texts} == {"0.5\n0 to 1"}
    sweep_figures.curve(panels[0, 0], axes[0], [[0.0, 0.5, 1.0], []], "accuracy", share=True)
    band = panels[0, 0].collections[-1].get_paths()[0].vertices[:, 1]
    assert band.min() >= 0 and band.max() <= 1


def test_a_cell_without_a_number_is_an_empty_place(tmp_path, capsys):
    """rate=1e308 overflows: value is inf at the last layer, as of weights that are too large."""
    text = "rate=1,1e308;depth=2,3"
    assert sweep(tmp_path, text) == 0
    out, _ = capsys.readouterr()
    assert out.count("no number") == 2 and "4 of 4 cells are done" in out
    assert len(rows(tmp_path)) == 2 * 3 * (3 + 4) and (tmp_path / "figures/grid.png").exists()
    found = summary(tmp_path)["mean"]
    empty = {"mean": None, "interval": [None, None], "seeds": 0}
    assert found["rate=1e308,depth=3"] == empty and found["rate=1,depth=3"]["mean"] == 4
    assert sweep(tmp_path / "curve", "rate=1,1e308") == 0


def test_memory_that_runs_out_fails_its_cell_alone(tmp_path, capsys):
    def too_large(options):
        if options.rate == 2:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")
        if options.rate == 3:
            raise jax.errors.JaxRuntimeError("INTERNAL: a mistake")
        main(options)

    arguments = ["--sweep=rate=1,2,4", f"--output_dir={tmp_path / 'a'}"]
    assert cli.execute(too_large, FLAGS, arguments) == 1
    out, err = capsys.readouterr()
    assert "failed: rate=2: out of memory: RESOURCE_EXHAUSTED" in err and "Traceback" not in err
    assert "2 of 3 cells are done" in out
    with pytest.raises(jax.errors.JaxRuntimeError, match="a mistake"):
        cli.execute(too_large, FLAGS, ["--sweep=rate=1,3", f"--output_dir={tmp_path / 'b'}"])


def test_a_cell_that_fails_leaves_the_others_and_is_tried_again(tmp_path, capsys):
    assert sweep(tmp_path, "rate=1,0,2") == 1
    out, err = capsys.readouterr()
    assert "failed: rate=0: rate=0 is no rate" in err and "Traceback" not in err
    assert "2 of 3 cells are done" in out and len(rows(tmp_path)) == 2 * 9
    assert sweep(tmp_path, "rate=1,0,2") == 1
    assert RAN == [(0.0, 2)]  # again, and only this one
    again = ["--sweep=rate=1,0,2", f"--output_dir={tmp_path}"]
    assert cli.execute(mended, FLAGS, again) == 0
    assert len(rows(tmp_path)) == 3 * 9


def mended(options):
    """As `main`, of a binary that knows what to do with a rate of 0."""
    with cli.open_run(options) as run:
        table = [{"seed": s, "layer": l, "value": 0} for s in range(3) for l in range(3)]
        run.publish(rows=lambda: table, summary=dict)


@pytest.mark.parametrize("slurm", [False, True])
def test_slices_make_the_whole(slurm, tmp_path, capsys, monkeypatch):
    ran = []
    for i in (1, 0):
        if slurm:
            for name, value in (("ID", 4 + 2 * i), ("COUNT", 2), ("MIN", 4), ("STEP", 2)):
                monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", str(value))
        assert sweep(tmp_path, "rate=1,2,3", *([] if slurm else [f"--slice={i}/2"])) == 0
        ran.append(list(RAN))
    assert "2 of 3 cells are done" in capsys.readouterr().out
    assert [len(part) for part in ran] == [2, 1] and len(set(ran[0] + ran[1])) == 3
    assert len(rows(tmp_path)) == 3 * 9


def test_a_lease_that_a_dying_process_still_has_is_waited_for(tmp_path, monkeypatch):
    """Seen once in 13 kills: the process was gone, and its lock not yet."""
    (tmp_path / "cells" / "rate=1").mkdir(parents=True)
    held = lease(tmp_path / "cells" / "rate=1")
    monkeypatch.setattr(files.time, "sleep", lambda _: held.close())
    assert sweep(tmp_path, "rate=1,2") == 0 and held.closed


def flipped(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("name", "again"),
    [
        ("cells/rate=1/results.csv", 1),
        ("cells/rate=1/summary.json", 1),
        ("cells/rate=1/SHA256SUMS", "SHA256SUMS cannot be read"),
        ("cells/rate=1/config.json", "config.json cannot be read"),
        ("results.csv", 0),
        ("summary.json", 0),
        ("figures/grid.png", 0),
        ("config.json", "config.json cannot be read"),
    ],
)
def test_a_damaged_file_is_made_again_or_named_and_no_cell_is_lost(name, again, tmp_path, capsys):
    assert sweep(tmp_path, "rate=1,2") == 0
    before = {p: p.read_bytes() for p in tmp_path.rglob("*.*") if p.suffix in (".csv", ".png")}
    flipped(tmp_path / name)
    if isinstance(again, str):
        assert sweep(tmp_path, "rate=1,2") in (1, 2)
        err = capsys.readouterr().err
        assert again in err and "delete this file" in err and "--overwrite" not in err
        (tmp_path / name).unlink()
        again = 0
    assert sweep(tmp_path, "rate=1,2") == 0
    assert len(RAN) <= again or "SHA256SUMS" in name
    assert {p: p.read_bytes() for p in before} == before


@pytest.mark.parametrize("content", ["", "[]", "{", '{"error": 3}'])
def test_a_damaged_note_of_a_failure_does_no_harm(content, tmp_path, capsys):
    assert sweep(tmp_path, "rate=1,0") == 1
    (tmp_path / "cells/rate=0/failed.json").write_text(content)
    assert sweep(tmp_path, "rate=1,0", "--slice=0/2") == 1
    assert "failed: rate=0: " in capsys.readouterr().err


def test_an_array_of_slurm_that_makes_no_sense_is_named(monkeypatch):
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_COUNT", "2")
    with pytest.raises(ValueError, match=r"SLURM_ARRAY_TASK_ID, .*=7/2 is not i/n"):
        work.slice_of(None)
    assert work.slice_of("1/3") == (1, 3)  # what is asked for counts


def test_units_are_equal_parts_of_groups():
    values = cli.make_flags("joined", shows="x", traced=("rate",))
    flags.DEFINE_float("rate", 1.0, "", flag_values=values)
    flags.DEFINE_integer("depth", 1, "", flag_values=values)
    axes = grid.axes_of("rate=1,2,3,4,5,6;depth=1,2")
    cells = grid.cells_of(values, axes)
    assert [cell.options.depth for cell in cells] == [1] * 6 + [2] * 6  # neighbours share programs
    for processes, size in ((1, 6), (2, 6), (3, 3), (6, 2), (12, 1), (50, 1)):
        units = grid.units_of(cells, processes)
        assert {len(unit) for unit in units} == {size}
        assert [cell for unit in units for cell in unit] == cells
        for unit in units:
            assert len({cell.group for cell in unit}) == 1
    vars(values)["traced"] = frozenset()
    assert len(grid.units_of(grid.cells_of(values, axes), 1)) == 12


def test_overwrite_leaves_a_sweep_alone_that_is_worked_at(tmp_path, capsys):
    assert sweep(tmp_path, "rate=1,2") == 0
    with lease(tmp_path / "cells" / "rate=2"):
        assert sweep(tmp_path, "rate=1,2", "--overwrite") == 2
    assert len(list((tmp_path / "cells").iterdir())) == 2
    assert "in use by another process (pid " in capsys.readouterr().err


def test_overwrite_leaves_a_run_alone_that_is_no_sweep_and_is_worked_at(tmp_path, capsys):
    with cli.open_run(cli.parse(FLAGS, [f"--output_dir={tmp_path}"])) as run:
        run.save_arrays({"a": 1})
        assert sweep(tmp_path, "rate=1,2", "--overwrite") == 2
        assert "in use by another process (pid " in capsys.readouterr().err
        assert {"arrays.npz", "config.json"} <= {path.name for path in tmp_path.iterdir()}
