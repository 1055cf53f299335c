"""Sweeps on Dask: workers, schedulers and parents that die, and tables equal to a serial run's."""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import swept_stub
from marks import slow_but
from trained_runs import rows
from two_processes import PATH, REPOSITORY, python

from experiments.shell import cli, process as processes
from experiments.shell.sweep import cluster, grid as grids, work
from experiments.shell.sweep.folder import SweepFolder

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="children are found in /proc")
STUB = "tests/swept_stub.py"
GRIDS = {4: "--sweep=rate=0.5,2;depth=1,3", 9: "--sweep=rate=0.5,1,2;depth=1,2,3"}
LIMIT = 300  # seconds: far above what a sweep takes on a busy machine


@contextlib.contextmanager
def started(*arguments, seconds=0.2, folder=REPOSITORY, **variables):
    """A process that is killed at the end, if it has not ended; elsewhere it cannot import us."""
    environment = (
        os.environ
        | variables
        | {
            "PYTHONPATH": PATH if folder == REPOSITORY else "",
            "JAX_PLATFORMS": "cpu",
            swept_stub.SECONDS: str(seconds),
        }
    )
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def sweep(folder, *arguments, cells=4, grid=None, **variables):
    return started(STUB, grid or GRIDS[cells], f"--output_dir={folder}", *arguments, **variables)


def output(process):
    return process.communicate(timeout=LIMIT)[0]


def processes_of(folder):
    """{number: command line} of all children of the sweep in a folder, wherever they are."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(folder) in line and ("--only_cells" in line or "shell.worker" in line):
                found[int(path.parent.name)] = line
    return found


def parent_of(number):
    return int(Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[1])


def wait_for(what, condition, limit=120):
    end = time.monotonic() + limit
    while not (found := condition()):
        assert time.monotonic() < end, what
        time.sleep(0.02)
    return found


def at_work(folder):
    """A child that has saved a state of a cell."""
    return processes_of(folder) if list(folder.glob("cells/*/checkpoints/**/*.npz")) else None


def none_is_left(folder):
    wait_for("children go on", lambda: not processes_of(folder))


def content(folder):
    """{name: bytes} of all results of a run or a sweep but times."""
    found = {}
    for path in sorted(folder.rglob("*.*")):
        name = path.relative_to(folder).as_posix()
        if path.suffix == ".npz":
            with np.load(path) as saved:
                found[name] = {n: saved[n].tobytes() for n in saved.files if "seconds" not in n}
        elif path.suffix in (".csv", ".safetensors") or (
            path.name == "summary.json" and "seconds" not in path.read_text()
        ):
            found[name] = path.read_bytes()
    assert found, folder
    return found


def check_whole(folder, expected):
    """A run's results are the expected, and no file is half-written."""
    assert content(folder) == expected, folder
    left = [p for p in folder.rglob("*") if p.name.endswith(".tmp") or p.name.startswith("tmp-")]
    assert not left and not list(folder.rglob("checkpoints/*")), left


@pytest.fixture(scope="module")
def serial(tmp_path_factory):
    """What sweeps leave that one process has computed, by how many cells there are."""
    found = {}
    for cells, grid in GRIDS.items():
        folder = tmp_path_factory.mktemp("serial") / "sweep"
        arguments = [grid, f"--output_dir={folder}"]
        assert cli.execute(swept_stub.main, swept_stub.FLAGS, arguments) == 0
        found[cells] = content(folder)
    return found


@contextlib.contextmanager
def scheduler(*workers, **variables):
    """(address, processes of the scheduler and of the workers) started by hand."""
    with contextlib.ExitStack() as stack:
        command = (
            "-m",
            "distributed.cli.dask_scheduler",
            "--port=0",
            "--no-dashboard",
            "--host=127.0.0.1",
        )
        of_scheduler = stack.enter_context(started(*command, folder="/", **variables))
        address = ""
        for line in of_scheduler.stdout:
            if "Scheduler at:" in line:
                address = line.split()[-1]
                break
        found = [of_scheduler]
        for own in workers:
            command = ("-m", "distributed.cli.dask_worker", address, "--no-dashboard", *own)
            found.append(stack.enter_context(started(*command, **variables)))
        yield address, found


def has_a_child(worker, folder):
    return worker.pid in map(parent_of, processes_of(folder))


@pytest.mark.parametrize("cells", [4, pytest.param(9, marks=pytest.mark.slow)])
def test_a_worker_by_hand_that_is_killed_and_another_that_goes_on(cells, serial, tmp_path):
    folder, one = tmp_path / "sweep", ("--nthreads=1", "--no-nanny")
    with (
        scheduler(one, one) as (address, (_, first, _)),
        sweep(folder, f"--scheduler={address}", cells=cells) as process,
    ):
        wait_for("no child began", lambda: at_work(folder))
        wait_for("the first worker has no child", lambda: has_a_child(first, folder))
        first.kill()
        printed = output(process)
        assert process.returncode == 0 and f"{cells} of {cells} cells" in printed, printed
    assert f"[{cells}/{cells}] rate=" in printed and "Traceback" not in printed
    check_whole(folder, serial[cells])
    none_is_left(folder)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["workers", "by hand"])
def test_ctrl_c_leaves_what_is_done_and_no_process(where, serial, tmp_path):
    folder = tmp_path / "sweep"
    with contextlib.ExitStack() as stack:
        asked = "--workers=2"
        if where == "by hand":
            address, _ = stack.enter_context(scheduler(("--nthreads=2",)))
            asked = f"--scheduler={address}"
        process = stack.enter_context(sweep(folder, asked))
        wait_for("no child began", lambda: at_work(folder))
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        printed = output(process)
        assert (
            process.returncode == 130 and "interrupted: the same command again resumes" in printed
        )
        assert "Traceback" not in printed, printed
        assert not processes_of(folder)
    with sweep(folder, "--workers=2", seconds=0) as process:
        output(process)
    check_whole(folder, serial[4])
    logs = "".join(path.read_text() for path in folder.glob("cells/*/log.txt"))
    assert re.search("begins after step [1-9]", logs)


@pytest.mark.slow
def test_a_cell_that_dies_of_memory_is_named_and_the_others_go_on(tmp_path):
    folder, grid = tmp_path / "sweep", "--sweep=rate=1,13,2"
    with sweep(folder, "--workers=2", grid=grid, seconds=0) as process:
        printed = output(process)
    assert process.returncode == 1 and "2 of 3 cells are done" in printed, printed
    assert "failed: rate=13: its process was ended by SIGKILL (out of memory?)" in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    "address",
    slow_but(["tcp://127.0.0.1:9", "tcp://nowhere.invalid:1", "nothing"], "tcp://127.0.0.1:9"),
)
def test_a_scheduler_that_does_not_answer_is_one_line(address, tmp_path, capsys, monkeypatch):
    """After 12 seconds, here 1."""
    monkeypatch.setattr(cluster, "ANSWER", 1)
    monkeypatch.setitem(cluster.SETTINGS, "distributed.comm.timeouts.connect", "1s")
    arguments = [GRIDS[4], f"--scheduler={address}", f"--output_dir={tmp_path / 'x'}"]
    assert cli.execute(swept_stub.main, swept_stub.FLAGS, arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"--scheduler={address} does not answer" in error


@pytest.mark.slow
def test_a_scheduler_that_is_lost_is_one_line(tmp_path):
    folder = tmp_path / "sweep"
    with (
        scheduler(("--nthreads=1",)) as (address, (first, _)),
        sweep(folder, f"--scheduler={address}") as process,
    ):
        wait_for("no child began", lambda: at_work(folder))
        first.kill()
        printed = output(process)
    assert process.returncode == 2 and "is lost" in printed.splitlines()[-1], printed
    assert "Traceback" not in printed
    none_is_left(folder)


@pytest.mark.slow
def test_children_of_workers_with_gpus_have_one_each(tmp_path):
    folder = tmp_path / "sweep"
    worker = ("--nthreads=2", "--resources", "GPU=2")
    with (
        scheduler(worker, CUDA_VISIBLE_DEVICES="4,7") as (address, _),
        sweep(folder, f"--scheduler={address}", seconds=0.3) as process,
    ):
        printed = output(process)
    assert process.returncode == 0, printed
    logs = [path.read_text() for path in folder.glob("cells/*/log.txt")]
    assert {log.split()[-1] for log in logs} == {"4", "7"}


@pytest.mark.slow
def test_a_worker_that_stops_and_goes_on_later_harms_nothing(serial, tmp_path):
    """Its cell is another's by then, who waits for its lease."""
    folder, soon = tmp_path / "sweep", {"DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": "3 seconds"}
    one = ("--nthreads=1", "--no-nanny")
    with (
        scheduler(one, one, **soon) as (address, (_, first, _)),
        sweep(folder, f"--scheduler={address}") as process,
    ):
        wait_for("the first worker has no child", lambda: has_a_child(first, folder))
        first.send_signal(signal.SIGSTOP)
        time.sleep(8)
        first.send_signal(signal.SIGCONT)
        printed = output(process)
    assert process.returncode == 0, printed
    check_whole(folder, serial[4])


@pytest.mark.slow
def test_fifteen_kills_of_workers_and_parents(serial, tmp_path):
    draw, hit = random.Random(3), 0
    for run in range(15):
        folder = tmp_path / str(run)
        with sweep(folder, "--workers=2", seconds=0.1) as process:
            wait_for("no child began", lambda folder=folder: processes_of(folder))
            time.sleep(draw.uniform(0, 8))
            children = list(processes_of(folder))
            hit += bool(children)
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                workers = [parent_of(number) for number in children]
                victims = [process.pid, *workers, *children]
                os.kill(draw.choice(victims), signal.SIGKILL)
            process.wait(timeout=LIMIT)
        none_is_left(folder)
        with sweep(folder, "--workers=2", seconds=0) as process:
            printed = output(process)
        assert process.returncode == 0, printed
        check_whole(folder, serial[4])
    assert hit >= 8


@pytest.mark.parametrize(("found", "count"), [(["4", "7", "8"], 1), ([], 2)])
def test_workers_have_a_gpu_each_or_their_share(found, count, tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(work, "gpus", lambda: found)
    monkeypatch.setattr(work, "run_in_workers", lambda _, own, **how: given.extend(own))
    arguments = [GRIDS[4], "--workers=2", f"--output_dir={tmp_path}"]
    assert cli.execute(swept_stub.main, swept_stub.FLAGS, arguments) == 0
    assert [own.get("CUDA_VISIBLE_DEVICES") for own in given] == (found[:2] or [None, None])
    assert {own[processes.SHARE] for own in given} == {str(count)}


def test_more_workers_than_gpus_are_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(work, "gpus", lambda: ["0", "1"])
    arguments = [GRIDS[4], "--workers=3", f"--output_dir={tmp_path / 'x'}"]
    assert cli.execute(swept_stub.main, swept_stub.FLAGS, arguments) == 2
    assert "--workers=3, but only 2 GPUs exist" in capsys.readouterr().err


def test_processes_of_a_sweep_share_cores_and_memory(monkeypatch):
    from experiments.shell import devices, memory

    cores, bytes_ = devices.cores(), memory.budget(None, [])
    monkeypatch.setenv(processes.SHARE, "2")
    assert devices.cores() == max(1, cores // 2) and memory.budget(3, []) == 1.5e9
    assert memory.budget(None, []) == pytest.approx(bytes_ / 2, rel=0.5)


def test_what_came_of_a_cell_asks_for_no_other_cell(tmp_path, capsys):
    """Every cell's files were checked after every cell: of 10,000 cells 50,000,000 times."""

    class Counted(SweepFolder):
        asked = 0

        def done(self, name):
            self.asked += 1
            return super().done(name)

    arguments = [f"--output_dir={tmp_path}", "--sweep=rate=" + ",".join(map(str, range(1, 101)))]
    options = cli.parse(swept_stub.FLAGS, arguments)
    sweep = Counted(options, grids.axes_of(options.sweep))
    name = list(sweep.cells)[7]
    sweep.account([name], 1, ["Killed"])
    assert sweep.asked < 5 and sweep.failures() == {name: "exit code 1: Killed"}
    assert f"{name}: exit code 1: Killed" in capsys.readouterr().err


# Examples of docs/sweeps.md that start sweeps on clusters, but for their work.
PAGE = (REPOSITORY / "docs" / "sweeps.md").read_text("utf-8")


def example(language, word, folder):
    """The block of the page that holds a word, with path counts in the place of training."""
    blocks = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    (found,) = [block for block in blocks if word in block]
    for pattern, other in (
        (r"learning_rate=[\w.,-]+;depth=[\d,]+(;width=[\d,]+)?", "heads,layers=2:2,2:3,3:2,3:3"),
        (r"run_sort", "run_path_counts"),
        (r"--num_seeds=8", "--num_devices=1"),
        (r"results/(sort/grid|jobs)", rf"{folder}/\1"),
        (r'"slurm"', '"local"'),
    ):
        found, count = re.subn(pattern, other, found)
        assert count or pattern == r'"slurm"', pattern
    return found


@pytest.mark.slow
def test_a_slurm_array(tmp_path):
    script = example("bash", "#SBATCH", tmp_path)
    (size,) = re.findall(r"--array=0-(\d+)", script)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for task in ("1", "0"):  # as of an array of two; the script's has more than there are cells
        environment = {"SLURM_ARRAY_TASK_ID": task, "SLURM_ARRAY_TASK_COUNT": "2", "PATH": path}
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=REPOSITORY,
            env=os.environ | environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-2000:]
    assert int(size) > 1 and "2 of 4" not in done.stdout and "4 of 4 cells are done" in done.stdout
    assert len(rows(tmp_path / "sort/grid")) == 2 * (3 + 4)


@pytest.mark.slow
def test_submitit(tmp_path):
    pytest.importorskip("submitit")
    done = python("-c", example("python", "submitit", tmp_path), folder=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(rows(tmp_path / "sort/grid")) == 2 * (3 + 4)
