"""Points of a grid, here, by workers, and joined from several folders: one result."""

import json
import shutil

import numpy as np
import pytest

from experiments import join, run_path_chains as path_chains
from experiments.lab import cli, list_points, make_config, pool, read_run
from rank_collapse.runs.files import RunError
from tests.support.golden_runs import check_arrays
from tests.support.runs import arrays, run, same_arrays

TINY = [*path_chains.EXPERIMENT.presets["tiny"], "--num_devices=1", "--jobs=1"]
GAINS = "--skip_gain=0.5,1"


@pytest.fixture(scope="module")
def complete_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    assert run(path_chains, [*TINY, GAINS], folder) == 0
    return folder


@pytest.fixture(scope="module")
def point(tmp_path_factory):
    """The folder of one point, of two seeds."""
    folder = tmp_path_factory.mktemp("point")
    assert run(path_chains, TINY, folder) == 0
    return folder


@pytest.mark.full
def test_a_point_has_the_arrays_that_are_kept(point):
    """As `test_golden_measurements` compares them, of a run that this file measures anyway."""
    check_arrays("run_path_chains", arrays(point))


@pytest.mark.full
def test_workers_measure_what_one_process_does(complete_run, tmp_path):
    assert run(path_chains, [*TINY, GAINS, "--jobs=2"], tmp_path) == 0
    same_arrays(complete_run, tmp_path)
    assert (tmp_path / "results.csv").read_bytes() == (complete_run / "results.csv").read_bytes()
    assert not (tmp_path / "points").exists()
    assert {name.split("/")[0] for name in arrays(tmp_path)} == {"skip_gain=0.5", "skip_gain=1.0"}


@pytest.mark.full
@pytest.mark.parametrize(
    "parts",
    [
        ([GAINS, "--num_seeds=1"], [GAINS, "--num_seeds=1", "--first_seed=1"]),
        (["--skip_gain=0.5"], ["--skip_gain=1"]),
    ],
)
def test_folders_of_seeds_or_of_points_join_to_the_whole(parts, complete_run, tmp_path):
    folders = [str(tmp_path / name) for name in "ab"]
    for folder, flags in zip(folders, parts, strict=True):
        assert run(path_chains, [*TINY, *flags], folder) == 0
    joined = tmp_path / "joined"
    assert join_folders(tmp_path, *folders) == 0
    same_arrays(complete_run, joined)
    assert (joined / "results.csv").read_bytes() == (complete_run / "results.csv").read_bytes()


def join_folders(tmp_path, *folders):
    """The exit code of `join`."""
    arguments = [*map(str, folders), f"--output_dir={tmp_path / 'joined'}"]
    return cli.execute(join.main, join.FLAGS, arguments, positional="folders")


def rewrite(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (({}, {"first_seed": 3}), "seed 2 "),
        (({"depth": 1}, {"skip_gain": 0.5}), "grid of depth, skip_gain"),
        (({"seed": 1}, {"seed": 2, "first_seed": 2}), "seed: 1 and 2"),
    ],
)
def test_what_is_no_whole_is_refused(changes, named, point, tmp_path, capsys):
    folders = [tmp_path / name for name in "ab"]
    for folder, change in zip(folders, changes, strict=True):
        shutil.copytree(point, folder)
        rewrite(folder / "config.json", lambda c, change=change: c["config"].update(change))
    assert join_folders(tmp_path, *folders) == 2
    assert named in capsys.readouterr().err


def test_the_whole_says_where_all_of_its_parts_were_measured(point, tmp_path, monkeypatch):
    """A folder that was begun at one commit and extended at another names both."""
    folders, modes = [tmp_path / name for name in "ab"], []
    for first, folder in zip((0, 2), folders, strict=True):
        shutil.copytree(point, folder)
        rewrite(
            folder / "config.json",
            lambda c, first=first: c.update(
                config=c["config"] | {"first_seed": first},
                environment={"git": f"begins {first}"},
                later=[{"git": f"extends {first}"}],
            ),
        )
    monkeypatch.setattr(path_chains, "main", lambda flags: modes.append(flags.mode))
    join_folders(tmp_path, *folders)
    commits = [environment["git"] for environment in modes[0].begun_in]
    assert commits == ["begins 0", "extends 0", "begins 2", "extends 2"]


def change_files(folder, changes):
    """Changes the settings of a folder, and leaves out the list of its arrays."""
    rewrite(folder / "config.json", lambda c: c["config"].update(changes))
    for file in ("config.json", "summary.json"):
        rewrite(folder / file, lambda c: c.pop("arrays", None))


DAMAGE = {
    "layout": lambda c: c.update(layout=1),
    "no experiment": lambda c: c["config"].update(experiment=7),
    "another experiment": lambda c: c["config"].update(experiment="sort"),
    "no name": lambda c: c["config"].pop("experiment"),
    "a list": lambda c: c.update(config=[]),
    "a wrong type": lambda c: c["config"].update(depth="x"),
    "a wrong size": lambda c: c["config"].update(depth=-1),
    "axes of a wrong type": lambda c: c["config"].update(axes=[1]),
    "an axis that is none": lambda c: c["config"].update(axes={"seed": ["1", "2"]}),
}


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_folder_of_another_kind_is_one_line(damage, place, complete_run, tmp_path, capsys):
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        shutil.copytree(complete_run, folder)
    rewrite(folders[place] / "config.json", DAMAGE[damage])
    assert join_folders(tmp_path, *folders) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert not (tmp_path / "joined").exists()


def test_a_finished_folder_without_arrays_is_not_measured_again_where_it_is_read(point, tmp_path):
    shutil.copytree(point, tmp_path / "a")
    (tmp_path / "a" / "arrays.npz").unlink()
    with pytest.raises(RunError, match="lacks seeds of 'seeds'"):
        read_run(path_chains, tmp_path / "a")


@pytest.mark.parametrize("name", ["arrays.npz", "config.json", "summary.json"])
def test_a_folder_without_a_file_is_one_line(name, complete_run, tmp_path, capsys):
    shutil.copytree(complete_run, tmp_path / "a")
    (tmp_path / "a" / name).unlink()
    assert join_folders(tmp_path, complete_run, tmp_path / "a") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and str(tmp_path / "a") in error


def test_an_array_that_one_folder_lacks_is_named(complete_run, tmp_path, capsys):
    later = tmp_path / "b"
    shutil.copytree(complete_run, later)
    rewrite(later / "config.json", lambda c: c["config"].update(first_seed=2))
    saved = arrays(later)
    missing_name = next(name for name in saved if name.endswith("skip_size"))
    saved.pop(missing_name)
    np.savez(later / "arrays.npz", **saved)
    assert join_folders(tmp_path, complete_run, later) == 2
    assert "skip_size" in capsys.readouterr().err


def test_the_whole_is_no_part(complete_run, tmp_path, capsys):
    part = tmp_path / "joined"
    shutil.copytree(complete_run, part)
    other_name = part / ".." / part.name
    assert join_folders(tmp_path, complete_run, other_name, "--overwrite") == 2
    assert "is one of the folders" in capsys.readouterr().err
    assert arrays(part).keys() == arrays(complete_run).keys()


def test_axes_of_the_whole_are_in_the_order_of_the_first_folder():
    """The command of the whole finds the arrays by it."""
    typed = [*TINY, "--skip_gain=0.5,1", "--depth=1,2"]
    options = cli.parse_flags(path_chains.FLAGS, typed)
    configs = [{**make_config(options), **point.axes} for point in list_points(options)]
    for config in configs:
        del config["axes"]
    assert [*join.find_axes(configs[::-1], options)] == ["skip_gain", "depth"]


def test_axes_of_points_in_folders_of_their_own_are_in_the_order_of_the_first_folder():
    options = cli.parse_flags(path_chains.FLAGS, [])
    configs = [
        {"skip_gain": 0.5, "depth": 1},
        {"depth": 2, "skip_gain": 0.5},
        {"depth": 1, "skip_gain": 1.0},
        {"depth": 2, "skip_gain": 1.0},
    ]
    axes = join.find_axes(configs, options)
    assert [*axes.items()] == [("skip_gain", ["0.5", "1.0"]), ("depth", ["1", "2"])]


def test_one_folder_twice_is_refused(complete_run, tmp_path, capsys):
    assert join_folders(tmp_path, complete_run, complete_run / ".." / complete_run.name) == 2
    assert str(complete_run) in capsys.readouterr().err


@pytest.mark.full
def test_what_is_left_is_measured_as_all_would_be(complete_run, tmp_path, monkeypatch):
    """A worker measures even a single point: with other devices XLA may round otherwise."""
    folder, submit, submitted = tmp_path / "a", pool.submit_work, []
    shutil.copytree(complete_run, folder)
    (folder / "summary.json").unlink()
    saved = {n: a for n, a in arrays(folder).items() if n.startswith("skip_gain=0.5/")}
    np.savez(folder / "arrays.npz", **saved)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"arrays": [*saved]}))

    def record_work(executor, work, *arguments):
        submitted.append(arguments[1])
        return submit(executor, work, *arguments)

    monkeypatch.setattr(pool, "submit_work", record_work)
    assert run(path_chains, [*TINY, GAINS, "--jobs=2"], folder) == 0
    assert len(submitted) == 1 and "--num_devices=1" in submitted[0]
    same_arrays(complete_run, folder)


def test_points_of_workers_are_gone_when_the_run_is_complete(point, tmp_path):
    """Also those that an interrupted run left."""
    folder = tmp_path / "a"
    shutil.copytree(point, folder)
    (folder / "summary.json").unlink()
    (folder / "points" / "0").mkdir(parents=True)
    assert run(path_chains, TINY, folder) == 0
    assert not (folder / "points").exists()


def test_the_whole_is_published_with_the_flags_of_the_first_folder(point, tmp_path, monkeypatch):
    """Its arrays are those of both folders, and so are the machines that measured them. One has a
    seed less than the other."""
    folders, published, read = [tmp_path / name for name in "ba"], [], []
    for place, folder in enumerate(folders):
        shutil.copytree(point, folder)
        rewrite(folder / "config.json", lambda c, i=place: c["config"].update(first_seed=2 - 2 * i))
        rewrite(folder / "config.json", lambda c, i=place: c["environment"].update(device=f"d{i}"))
        rewrite(folder / "summary.json", lambda c, i=place: c.update(shown={"depth": i}))
        order = -1 if place else 1  # of the settings in the file
        rewrite(
            folder / "config.json",
            lambda c, o=order: c.update(config=dict([*c["config"].items()][::o])),
        )
    change_files(folders[1], {"first_seed": 1, "num_seeds": 1})
    saved = arrays(point)
    np.savez(folders[1] / "arrays.npz", **{name: a[:1] for name, a in saved.items()})
    read_flags = join.read_flags

    def record_flags(flag_values, folder, selection):
        read.append((folder, selection))
        return read_flags(flag_values, folder, {})

    monkeypatch.setattr(join, "read_flags", record_flags)
    monkeypatch.setattr(path_chains, "main", lambda flags: published.append(flags) or 0)
    assert join_folders(tmp_path, *folders, "--overwrite") == 0
    assert read == [(folders[0], {}), (folders[1], {}), (folders[0], {"depth": 0})]
    (flags,) = published
    assert (flags.output_dir, flags.overwrite) == (str(tmp_path / "joined"), True)
    assert (flags.first_seed, flags.num_seeds, flags.num_paths, flags.axes) == (1, 3, 2, {})
    assert [origin["device"] for origin in flags.mode.begun_in] == ["d0", "d1"]
    assert flags.mode.begin_with.keys() == saved.keys()
    for name, values in saved.items():
        expected = np.concatenate([values[:1], values])
        np.testing.assert_array_equal(flags.mode.begin_with[name], expected)


def test_points_of_folders_become_an_axis_of_the_whole(point, tmp_path, monkeypatch):
    folders, published = [tmp_path / name for name in "ab"], []
    for folder, gain in zip(folders, (1.0, 0.5), strict=True):
        shutil.copytree(point, folder)
        change_files(folder, {"skip_gain": gain})
        np.savez(folder / "arrays.npz", **{name: gain * a for name, a in arrays(point).items()})
    monkeypatch.setattr(path_chains, "main", lambda flags: published.append(flags) or 0)
    assert join_folders(tmp_path, *folders) == 0
    (flags,) = published
    assert flags.axes == {"skip_gain": ["1.0", "0.5"]} and not flags.overwrite
    expected = {f"skip_gain={g}/{n}": g * a for g in (1.0, 0.5) for n, a in arrays(point).items()}
    assert flags.mode.begin_with.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(flags.mode.begin_with[name], values)


def test_grids_of_other_values_become_one_grid(complete_run, tmp_path, monkeypatch):
    folder, published, saved = tmp_path / "a", [], arrays(complete_run)
    shutil.copytree(complete_run, folder)
    change_files(folder, {"axes": {"skip_gain": ["2.0", "4.0"]}})
    names = {n: n.replace("=0.5", "=2.0").replace("=1.0", "=4.0") for n in saved}
    np.savez(folder / "arrays.npz", **{names[name]: values for name, values in saved.items()})
    monkeypatch.setattr(path_chains, "main", lambda flags: published.append(flags) or 0)
    assert join_folders(tmp_path, folder, complete_run) == 0
    (flags,) = published
    assert flags.axes == {"skip_gain": ["2.0", "4.0", "0.5", "1.0"]}
    assert flags.mode.begin_with.keys() == {*saved, *names.values()}


def test_a_folder_that_lacks_a_point_is_named(complete_run, point, tmp_path):
    for place, name in ((complete_run, "skip_gain=1.0/"), (point, "the run")):
        folder = tmp_path / name.strip("/")
        shutil.copytree(place, folder)
        saved = {n: a for n, a in arrays(place).items() if n.startswith("skip_gain=0.5/")}
        np.savez(folder / "arrays.npz", **saved)
        change_files(folder, {})
        with pytest.raises(RunError, match=rf"arrays\.npz .*\(it has no arrays of {name}\)"):
            join.read_parts(path_chains.FLAGS, folder)


def make_part(first_seed, num_seeds, **arrays):
    named = {name: np.asarray(values) for name, values in arrays.items()}
    return join.Part({"first_seed": first_seed, "num_seeds": num_seeds, "depth": 2}, named)


def test_seeds_are_joined_in_their_order_whatever_that_of_the_folders():
    parts = [make_part(5, 1, a=[5.0]), make_part(2, 2, a=[2.0, 3.0]), make_part(4, 1, a=[4.0])]
    config, arrays = join.join_seeds(parts)
    assert config == {"first_seed": 2, "num_seeds": 4, "depth": 2}
    assert arrays["a"].tolist() == [2, 3, 4, 5]
    assert join.join_seeds(parts[:1]) is parts[0]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (make_part(3, 1, a=[1.0]), "seed 2 is in none of the folders, or in two of them"),
        (make_part(1, 1, a=[1.0]), "seed 2 is in none of the folders, or in two of them"),
        (make_part(2, 1, a=[1.0], b=[1.0]), "b is not among the arrays of all folders"),
        (make_part(2, 1), "a is not among the arrays of all folders"),
        (make_part(2, 1, a=[1.0, 2.0]), r"a of shape \(2,\) does not have the seeds as its first"),
        (make_part(2, 1, a=1.0), r"a of shape \(\) does not have the seeds as its first axis"),
    ],
)
def test_parts_that_make_no_whole_are_named(second, message):
    with pytest.raises(ValueError, match=message):
        join.join_seeds([second, make_part(0, 2, a=[1.0, 2.0])])


def test_two_folders_and_a_place_are_needed(tmp_path, capsys):
    for arguments in ([str(tmp_path)], [str(tmp_path), str(tmp_path / "b")]):
        place = [] if len(arguments) > 1 else [f"--output_dir={tmp_path / 'joined'}"]
        folders = f"--folders={','.join(arguments)}"
        assert cli.execute(join.main, join.FLAGS, [folders, *place]) == 2
        message = "error: join needs two folders or more, and --output_dir for the joined run\n"
        assert capsys.readouterr().err == message


def test_a_run_until_decided_is_not_joined(tmp_path, monkeypatch):
    monkeypatch.setattr(join, "read_summary", lambda folder: {})
    monkeypatch.setattr(join, "read_config", lambda folder: {"until": "decided"})
    with pytest.raises(ValueError, match="was measured with --until=decided and cannot be joined"):
        join.read_parts(path_chains.FLAGS, tmp_path)


def test_any_two_of_three_folders_are_different_and_of_one_experiment(tmp_path, monkeypatch):
    folders = [tmp_path / name for name in "abc"]
    names = dict(zip(folders, ("path_chains", "path_chains", "sort"), strict=True))
    monkeypatch.setattr(join, "read_config", lambda folder: {"experiment": names[folder]})
    assert join.common_module(folders[:2]) is path_chains
    with pytest.raises(ValueError, match=f"{folders[2]} holds a run of 'sort', but {folders[0]}"):
        join.common_module(folders)
    for places in ((0, 1, 0), (0, 1, 1)):
        with pytest.raises(ValueError, match=f"{folders[places[2]]} is given twice"):
            join.common_module([folders[i] for i in places])


def test_a_flag_that_takes_one_value_is_no_axis():
    options = cli.parse_flags(path_chains.FLAGS, [])
    assert not options.takes_several("text")
    configs = [{"depth": depth, "text": text} for depth in (1, 2) for text in ("a", "b")]
    with pytest.raises(ValueError, match=r'the folders differ in .*text: "a" and "b"'):
        join.find_axes(configs, options)
    configs = [{"depth": 1, "skip_gain": 0.5}, {"depth": 2, "skip_gain": 1.0}]
    with pytest.raises(ValueError, match="2 points, which do not fill a grid of depth, skip_gain"):
        join.find_axes(configs, options)
