"""What every binary shares: flags, help, one-line errors, names of run folders, progress."""

import importlib
import os
import runpy
import signal
import subprocess
import sys
import types
from pathlib import Path

import jax
import pytest
from absl import flags

import experiments
from experiments import run_collapse, run_memorization, run_sort
from experiments.lab import cli, list_points
from rank_collapse.extras import MissingPackage
from rank_collapse.runs.files import RunError
from tests.support.processes import python

FLAGS = cli.make_flags("example", num_seeds=4, shows="value", execution=("chunk",))
FLAGS.define("integer", "depth", 3, "Layers.", lower_bound=1)
FLAGS.define("list", "scales", ["1"], "Scales.")
FLAGS.define("float", "decay", 0.0, "Decay.")
FLAGS.define("integer", "chunk", 8, "Chunk.")


def run(body, *arguments):
    return cli.execute(body, FLAGS, arguments)


def test_flags_of_an_earlier_call_are_forgotten():
    values = []
    for arguments in (["--depth=5", "--scales=1,2"], []):
        assert run(lambda options: values.append((options.depth, options.scales)), *arguments) == 0
    assert values == [(5, ["1", "2"]), (3, ["1"])]


def test_help_shows_purpose_and_flags_without_running(capsys):
    assert run(lambda o: pytest.fail("ran"), "--help") == 0
    out = capsys.readouterr().out
    assert out.startswith("What every binary shares")
    assert out.index("--depth") < out.index("--output_dir")
    assert "(default: '3')" in out and "flagfile" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dept=2"], "Unknown command line flag 'dept'. Did you mean: depth ?"),
        (["--depth=0"], "flag --depth=0"),
        (["--depth=x"], "'x'"),
        (["--num_seeds=0"], "num_seeds"),
        (["5"], "unexpected argument '5'"),
        (["--output_dir="], "--output_dir is empty"),
        (["--output_dir= ", "--overwrite"], "--output_dir is empty"),
        (["--run_name="], "--run_name='' is not a folder name"),
        (["--run_name=../x"], "--run_name='../x' is not a folder name"),
        (["--run_name=.."], "--run_name='..' is not a folder name"),
        (["--run_name=."], "--run_name='.' is not a folder name"),
        (["--run_name=a/b"], "--run_name='a/b' is not a folder name"),
        (["--run_name=/tmp"], "--run_name='/tmp' is not a folder name"),
        (["--run_name=a\0b"], "is not a folder name"),
        (["--run_name=-1"], "--run_name='-1' is not a folder name"),
        (["--scales="], "--scales is empty: is a variable unset?"),
        (["--decay=nan"], "--decay=nan is not a finite number"),
        (["--decay=1e308"], "--decay=1e+308 is not a finite number of float32"),
        (["--decay=-inf"], "--decay=-inf is not a finite number"),
        # JAX takes seed 2³² + 1 for seed 1.
        (["--seed=2147483648"], "--seed=2147483648 is not between -2147483647 and 2147483647"),
        ([f"--seed={2**63}"], f"--seed={2**63} is not between"),
        (["--chunk=-2147483648"], "--chunk=-2147483648 is not between"),
        (["--num_seeds=1000000000"], "1000000000 is not an integer in the range [1, 1000000]"),
    ],
)
def test_a_bad_flag_is_one_line_and_exit_2(arguments, message, capsys):
    assert run(lambda o: None, *arguments) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1 and err.startswith("error: ")


@pytest.mark.parametrize(
    "values", ["decay=1,nan", "decay=1,inf", "depth=2,0", "depth=2,99999999999"]
)
def test_every_value_of_an_axis_is_checked(values):
    with pytest.raises((ValueError, flags.Error)):
        list_points(cli.parse_flags(FLAGS, [f"--{values}"]))


@pytest.mark.parametrize("last", [["--depth=4"], ["--depth", "4"]])
def test_the_last_of_a_flag_counts_after_an_axis_too(last):
    (point,) = list_points(cli.parse_flags(FLAGS, ["--depth=2,3", *last]))
    assert point.depth == 4 and not point.axes
    values = cli.make_flags("example", shows="value")
    values.define("boolean", "tied", True, "Layers.")
    assert not cli.parse_flags(values, ["--tied=true,false", "--notied"]).axes


def test_points_that_are_equal_are_one():
    points = list_points(cli.parse_flags(FLAGS, ["--decay=1,1.0,2", "--depth=2,3,2"]))
    settings = [tuple(point.axes.values()) for point in points]
    assert sorted(settings) == [(1.0, 2), (1.0, 3), (2.0, 2), (2.0, 3)]


@pytest.mark.parametrize(
    "error",
    [
        ValueError("two\nlines"),
        RunError("two  lines"),
        FileNotFoundError(2, "two lines"),
        MemoryError("two lines"),
        flags.Error("two lines"),
    ],
)
def test_a_users_mistake_is_one_line_and_debug_shows_where(error, capsys):
    def fail(_):
        raise error

    assert run(fail) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "two lines" in err and "Traceback" not in err
    assert run(fail, "--debug") == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_bug_is_not_taken_for_a_users_mistake():
    with pytest.raises(ZeroDivisionError):
        run(lambda o: 1 / 0)


def test_ctrl_c_is_one_line_and_exit_130(capsys, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    assert run(interrupt) == 130
    assert capsys.readouterr().err == "\ninterrupted: the same command again resumes\n"
    # A command that keeps nothing promises nothing.
    assert cli.execute(interrupt, cli.bare_flags(), []) == 130
    assert capsys.readouterr().err == "\ninterrupted\n"
    monkeypatch.setattr(cli.multiprocessing, "parent_process", object)
    assert run(interrupt) == 130
    assert capsys.readouterr().err == ""  # the parent of a worker says it


def test_a_reader_that_goes_away_is_not_success():
    """`2>&1 | head -1` ended a run half-way with exit code 0."""
    code = (
        "import sys; from experiments.lab import cli; F = cli.make_flags('x')\n"
        "def main(o):\n"
        "    print('first', flush=True); sys.stdin.readline()\n"
        "    print('second', flush=True); raise SystemExit(77)\n"
        "cli.run(main, F)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout.readline() == "first\n"
        process.stdout.close()
        process.stdin.write("\n")
        process.stdin.close()
        assert process.wait(timeout=60) == 141


@pytest.mark.full
def test_a_platform_that_is_not_there_is_one_line():
    code = "from experiments.lab import cli; F = cli.make_flags('x'); cli.run(lambda o: 0, F)"
    completed = python("-c", code, JAX_PLATFORMS="cuda")
    assert (
        completed.returncode == 2
        and "error: JAX finds no device of JAX_PLATFORMS='cuda': " in completed.stderr
    )
    assert "Traceback" not in completed.stderr


def test_a_package_that_is_missing_is_one_line(monkeypatch, capsys):
    """find_spec takes a module that is None for one that there is not."""
    monkeypatch.setitem(sys.modules, "absl", None)
    monkeypatch.setattr(sys, "argv", ["-m"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit, match="2"):
        importlib.reload(experiments)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "absl" in line


MODULES = sorted(
    path.stem
    for path in Path(experiments.__path__[0]).glob("*.py")
    if not path.stem.startswith("__") and path.stem not in ("experiments", "rank_collapse")
)


@pytest.mark.parametrize("name", MODULES)
def test_every_command_runs_as_a_module(name, monkeypatch, capsys):
    """`python -m experiments.NAME --help`, which otherwise would end at once without a word."""
    purpose = importlib.import_module(f"experiments.{name}").__doc__.strip()
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    monkeypatch.delitem(sys.modules, f"experiments.{name}")
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"experiments.{name}", run_name="__main__", alter_sys=True)
    out = capsys.readouterr().out
    assert ended.value.code in (0, None) and purpose.split("\n")[0].split(":")[0] in out


@pytest.mark.parametrize("code", [0, 2, 130])
def test_a_binary_hands_on_its_command_line_and_prints_all_before_it_ends(code, monkeypatch):
    """A signal ends the process at once, with what was printed, while threads compile."""
    events = []

    def execute(main, flag_values, arguments, **options):
        events.append((main, flag_values, arguments, options))
        return code

    def end(code):
        events.append("end")
        raise SystemExit(code)

    monkeypatch.setattr(sys, "argv", ["binary", "folder", "--seed=1"])
    monkeypatch.setattr(cli, "execute", execute)
    monkeypatch.setattr(cli, "prepare_streams", lambda: None)
    monkeypatch.setattr(cli.os, "_exit", end)
    monkeypatch.setattr(sys.stdout, "flush", lambda: events.append("flush"))
    with pytest.raises(SystemExit) as ended:
        cli.run(print, run_sort.FLAGS, positional="folders")
    assert ended.value.code == code
    arguments = (print, run_sort.FLAGS, ["folder", "--seed=1"], {"positional": "folders"})
    assert events == [arguments, "flush", *["end"] * (code > 128)]


@pytest.mark.full
def test_nothing_slow_is_imported_before_the_flags_are_read():
    """--help and a mistaken flag took half a second longer for each of them."""
    code = "import os, sys; os.environ.pop('MPLBACKEND', 0); sys.argv[0] = '-m'; "
    code += "from experiments import benchmark, reproduce; "
    code += "slow = {'matplotlib', 'scipy', 'optax', 'flax', 'distributed', 'PIL', 'torch'}; "
    code += "print(sorted(slow & {*sys.modules}))"
    completed = python("-c", code)
    assert completed.stdout == "[]\n", completed.stderr


def test_a_mistake_names_the_flags_that_were_typed(capsys, tmp_path):
    arguments = ["--width", "2", "--hidden_dim", "47", "--output_dir", str(tmp_path)]
    assert cli.execute(run_sort.main, run_sort.FLAGS, arguments) == 2
    err = capsys.readouterr().err
    assert "width=2" in err and "hidden_dim=47" in err and "d_model=" not in err
    named = cli.in_typed_names("d_model=4, trained_d_model=5", arguments, run_sort.FLAGS)
    assert named == "hidden_dim=4, trained_d_model=5"  # the end of another name is left


@pytest.mark.parametrize("has_preset", [False, True])
def test_devices_start_in_the_process_that_computes(has_preset, monkeypatch):
    """A binary with presets starts others, which have the devices."""
    values, started = cli.make_flags("computing"), []
    assert "preset" not in values
    if has_preset:
        values.define("string", "preset", "quick", "Preset.")
    monkeypatch.setattr(cli.devices, "start_devices", started.append)
    precisions = []

    def main(options):
        precisions.append(jax.config.jax_default_matmul_precision)

    assert cli.execute(main, values, ["--num_devices=2"]) == 0
    assert started == ([] if has_preset else [2]) and precisions == ["highest"]


@pytest.mark.parametrize("parent", [None, object()])
def test_a_former_name_is_reported_once_and_not_by_workers(parent, monkeypatch, capsys):
    monkeypatch.setattr(cli.multiprocessing, "parent_process", lambda: parent)
    arguments = ["--text_file=my.txt", "--text_file=other.txt"]
    assert cli.execute(lambda options: None, run_collapse.FLAGS, arguments) == 0
    line = "--text_file is now called --text\n"
    assert capsys.readouterr().err == ("" if parent else line)
    assert cli.execute(lambda options: None, run_collapse.FLAGS, ["--run_name", "text_file"]) == 0
    assert capsys.readouterr().err == ""  # the name of the run


def test_an_interrupt_says_what_to_type(capsys):
    def interrupt(options):
        raise KeyboardInterrupt

    for flag in ([], ["--overwrite_output_dir"], ["--overwrite"]):
        assert cli.execute(interrupt, run_memorization.FLAGS, flag) == 130
        advice = f"without {flag[0]}" if flag else "again"
        assert f"the same command {advice} resumes\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("RESOURCE_EXHAUSTED: out of 3 GB", "out of memory: fewer seeds at a time need less"),
        ("INTERNAL: a bug", None),
    ],
)
def test_too_little_memory_is_one_line_and_another_error_of_xla_is_a_bug(text, message, capsys):
    def fail(options):
        raise jax.errors.JaxRuntimeError(text)

    if message is None:
        with pytest.raises(jax.errors.JaxRuntimeError, match=text):
            run(fail)
    else:
        assert run(fail) == 2
        assert capsys.readouterr().err == f"error: {message}\n"


def test_a_closed_pipe_ends_with_the_code_of_its_signal(monkeypatch):
    """Nothing can be said any more: both streams go to nowhere."""
    opened, closed = [], []

    def open_null(path, mode):
        opened.append((path, mode))
        return 77

    streams = [types.SimpleNamespace(fileno=lambda i=i: i) for i in (101, 102)]
    with monkeypatch.context() as context:
        context.setattr(cli.os, "open", open_null)
        context.setattr(cli.os, "dup2", lambda *files: closed.append(files))
        context.setattr(cli.sys, "stdout", streams[0])
        context.setattr(cli.sys, "stderr", streams[1])

        def fail(options):
            raise BrokenPipeError

        assert run(fail) == 128 + signal.SIGPIPE
    assert opened == [(os.devnull, os.O_WRONLY)] * 2
    assert closed == [(77, 101), (77, 102)]


@pytest.mark.parametrize(
    ("arguments", "names", "extra"),
    [
        (["a"], ["a"], None),
        (["a", "--depth=2", "b"], ["a", "b"], None),
        (["--names=a,b"], ["a", "b"], None),
        (["--names=a", "b", "c"], None, "b"),  # the flag has its value already
        ([], ["all"], None),
    ],
)
def test_values_may_stand_alone_where_a_flag_takes_them(arguments, names, extra):
    values = cli.make_flags("standing")
    values.define("integer", "depth", 3, "Layers.")
    values.define("list", "names", ["all"], "Names.")
    if extra is None:
        assert cli.parse_flags(values, arguments, "names").names == names
    else:
        with pytest.raises(ValueError, match=f"unexpected argument '{extra}'"):
            cli.parse_flags(values, arguments, "names")


def test_the_longest_name_of_a_run_has_200_bytes():
    name = "é" * 100
    assert cli.parse_flags(FLAGS, [f"--run_name={name}"]).run_name == name
    with pytest.raises(ValueError, match="is not a folder name"):
        cli.parse_flags(FLAGS, [f"--run_name={name}e"])


def test_the_exit_code_is_that_of_the_result():
    codes = (
        (3, 3),
        (None, 0),
        (types.SimpleNamespace(code=1), 1),
        (types.SimpleNamespace(code=0), 0),
    )
    for result, code in codes:
        assert run(lambda options, result=result: result) == code


def test_an_interrupt_has_its_code_where_the_terminal_is_gone(monkeypatch):
    class Gone:
        def write(self, text):
            raise OSError(5, "Input/output error")

    def interrupt(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stderr", Gone())
    assert run(interrupt) == 130


def test_a_package_of_an_extra_that_is_missing_is_a_users_mistake(capsys):
    def fail(options):
        raise MissingPackage("it", ImportError(name="tokenizers.models"), "pretrained")

    assert run(fail) == 2
    assert capsys.readouterr().err.startswith("error: it needs tokenizers, which is not installed")
