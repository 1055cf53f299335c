"""run_sort interrupted on so many devices and resumed on others, bit for bit as if left alone."""

import json
import os
import subprocess
import sys

import pytest
from chunked_runs import same_arrays
from interrupted_sort import SMALL
from two_processes import LIMIT, REPOSITORY


def run_on(devices, *command):
    """A process of its own that sees so many CPU devices."""
    flags = os.environ.get("XLA_FLAGS", "")
    environment = os.environ | {
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": os.pathsep.join((str(REPOSITORY), str(REPOSITORY / "tests"))),
    }
    return subprocess.run(
        [sys.executable, *command],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of three seeds that nothing interrupted, on one device."""
    folder = tmp_path_factory.mktemp("whole")
    done = run_on(1, "-m", "experiments.run_sort", *SMALL, f"--output_dir={folder}")
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("before, after", [(2, 1), (1, 2)])
def test_resumed_on_another_number_of_devices(before, after, whole, tmp_path):
    arguments = [*SMALL, f"--output_dir={tmp_path}"]
    stopped = run_on(before, "tests/interrupted_sort.py", *arguments)
    assert stopped.returncode == 130, stopped.stderr[-2000:]
    assert [path.name for path in tmp_path.glob("checkpoints/*/*")] == ["2.npz"]
    environment = json.loads((tmp_path / "config.json").read_text())["environment"]
    assert environment["num_devices"] == before
    done = run_on(after, "-m", "experiments.run_sort", *arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "resumed after epoch 2" in (tmp_path / "log.txt").read_text()
    same_arrays(whole, tmp_path)
    for name in ("models.safetensors", "results.csv"):
        assert (tmp_path / name).read_bytes() == (whole / name).read_bytes(), name
