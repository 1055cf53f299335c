"""Flags of every binary: one name each, lists by commas, published names, names of runs."""

import hashlib
import importlib
import json
import re
import shlex
import sys
from types import SimpleNamespace

import pytest

from experiments import reproduce, run_collapse, run_convex_hull, run_memorization, run_sort
from experiments.lab import cli, list_points, shared_flags
from experiments.lab.experiment import describe_experiment
from experiments.lab.flags import (
    Mode,
    command_line,
    default_run_name,
    make_config,
    read_flags,
)
from experiments.run_trainability import FLAGS as TRAINABILITY
from rank_collapse.runs.files import RunError
from tests.support.golden import read_arrays
from tests.support.golden_runs import arrays_path

# Second names of flags: those of the published code, and older ones of ours.
SECOND = {"width", "hidden_dim", "seq_len", "batch_sz", "norm", "max_seq_length"}

TYPES = {
    "integer": "int",
    "float": "float",
    "boolean": "bool",
    "enum": "string enum",
    "string": "string",
}


def import_flags(name):
    return importlib.import_module(f"experiments.{name}").FLAGS


@pytest.mark.parametrize("name", reproduce.EXPERIMENTS)
def test_a_flag_has_one_name_and_others_are_second_names(name):
    values = import_flags(name)
    assert not SECOND & {values[n].name for n in values}
    for flag_name, (kind, *_) in shared_flags.VOCABULARY.items():
        if flag_name in values and values[flag_name].flag_type() != "numbers":
            assert values[flag_name].flag_type() in (TYPES[kind], "comma separated list of strings")
    assert not any(values[n].flag_type().startswith("multi ") for n in values)


@pytest.mark.parametrize("name", [*reproduce.EXPERIMENTS, "reproduce", "join"])
def test_no_attribute_of_the_flags_hides_a_flag(name):
    values = import_flags(name)
    assert not {*vars(values)} & {*values}


@pytest.mark.parametrize(
    ("arguments", "depths"),
    [("--depths=3,1", [3, 1]), ("--depths=3 --depths=1", [1]), ("", [6, 12, 18, 36])],
)
def test_lists_are_written_with_commas(arguments, depths):
    assert cli.parse_flags(TRAINABILITY, arguments.split()).depths == depths


def test_a_name_that_is_repeated_counts_once():
    """`check_bounds --cases=A,A` drew half of the networks."""
    options = cli.parse_flags(TRAINABILITY, ["--designs=post,pre,post", "--depths=2,2"])
    assert (options.designs, options.depths) == (["post", "pre"], [2, 2])


@pytest.mark.parametrize("module", [run_sort, run_convex_hull, run_memorization])
def test_a_published_command_asks_for_what_ours_does(module):
    """The command of the docstring, and the same by our names: one config, one run name."""
    command = re.search(r"python -m experiments\.\w+ ((?:.*\\\n)*.*)\n", module.__doc__)[1]
    arguments = shlex.split(command.replace("\\\n", " "))
    names = {n: module.FLAGS[n].name for n in module.FLAGS}
    ours = [f"--{names[a[2:]]}" if names.get(a[2:]) else a for a in arguments]
    configs, runs = [], []
    for typed in (arguments, ours):
        options = cli.parse_flags(module.FLAGS, typed)
        configs.append(make_config(options))
        runs.append(default_run_name(options))
    assert arguments != ours and configs[0] == configs[1] and runs[0] == runs[1]
    assert configs[0]["d_model"] == int(arguments[arguments.index("--hidden_dim") + 1])
    assert not SECOND & configs[0].keys()


@pytest.mark.parametrize("name", ["run_collapse", "run_depth_check", "run_architectures"])
def test_a_former_name_is_the_flag_with_a_line(name, capsys):
    values = import_flags(name)
    configs = []
    for flag in ("--text", "--text_file"):
        assert (
            cli.execute(
                lambda options: configs.append(make_config(options)), values, [f"{flag}=my.txt"]
            )
            == 0
        )
    assert configs[0] == configs[1] and configs[0]["text"] == "my.txt"
    assert capsys.readouterr().err == "--text_file is now called --text\n"


@pytest.mark.full
def test_a_folder_of_a_former_name_resumes(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("one two three four one two")
    arguments = [*describe_experiment("run_collapse").presets["tiny"], f"--text={text}"]
    arguments += [f"--output_dir={tmp_path / 'run'}", "--num_devices=1"]
    main = run_collapse.main

    def start(options):  # with arrays that are measured already
        options.mode = Mode(begin_with=read_arrays(arrays_path("run_collapse").read_text("utf-8")))
        main(options)

    assert cli.execute(start, run_collapse.FLAGS, arguments) == 0
    path = tmp_path / "run" / "config.json"
    content = path.read_text()
    path.write_text(content.replace('"text":', '"text_file":'))
    assert cli.execute(main, run_collapse.FLAGS, arguments) == 0
    arguments[-3] += "x"
    assert cli.execute(main, run_collapse.FLAGS, arguments) == 2


LONG = ",".join(map(str, range(1, 59)))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (f"--trained_d_k={LONG},59", f"--trained_d_k={LONG},59"),
        (f"--trained_d_k={LONG},59", f"--trained_d_k={LONG},7"),
        ("--saturation=0.25,0.5", "--saturation=0.5,0.25"),
        ("--d_k=4 --num_queries=8", "--num_queries=8 --d_k=4"),
    ],
)  # fmt: skip
def test_runs_have_one_name_where_they_have_the_same_flags(one, other):
    """Also where the flags are longer than the name, and differ at their end alone."""
    values = import_flags("run_attention_forms")
    names = [default_run_name(cli.parse_flags(values, text.split())) for text in (one, other)]
    is_same = sorted(one.split()) == sorted(other.split())
    assert (names[0] == names[1]) is is_same and max(map(len, names)) <= 87
    assert default_run_name(cli.parse_flags(values, [])) == "default"


# The least value of each flag that counts something, as its help or its use has it; of others 1.
LEAST = {
    "d_model": dict.fromkeys(  # LayerNorm of 1 or 2 features leaves signs alone
        (
            *("run_sort", "run_convex_hull", "run_memorization", "run_circle", "run_width"),
            *("run_transformer", "run_attention_forms", "run_stability"),
        ),
        3,
    ),
    "max_tokens": {"run_trained": 4, "run_lens": 4, "run_sinks": 6, "run_architectures": 2},
    "n_eval_data": {"run_trainability": 8},
    "num_few": {"run_lens": 2},
    "num_texts": dict.fromkeys(("run_trained", "run_sinks", "run_lens", "run_lipschitz"), 2),
    "tokens": 2,
    "seed_chunk": dict.fromkeys(reproduce.EXPERIMENTS, 0) | {"run_collapse": 1},
    **dict.fromkeys(("first_seed", "jobs", "n_epochs", "num_devices", "num_ranked", "seed"), 0),
    **dict.fromkeys(("max_texts", "num_labels", "num_queries", "num_tokens", "steps"), 2),
    **dict.fromkeys(("path_len", "skip_texts"), 0),
    "warmup": {"run_trainability": 0},
    "widths": 3,
}
# Their bound depends on other flags, or they are taken from published commands and not read.
WITHOUT_BOUND = {
    "run_collapse": {"num_tokens", "window", "mlp_gain"},
    "run_path_chains": {"num_tokens", "window"},
    "run_transformer": {"min_len", "warmup"},
    "run_circle": {"n_paths", "n_repeat", "path_len"},
    "run_trainability": {"num_tokens"},
}


@pytest.mark.parametrize("name", [*reproduce.EXPERIMENTS, "reproduce", "benchmark", "join"])
def test_a_flag_that_counts_has_a_least_value(name):
    values, least, expected = import_flags(name), {}, {}
    for flag_name in {values[n].name for n in values} - WITHOUT_BOUND.get(name, set()):
        flag = values[flag_name]
        if flag.flag_type() not in ("int", "numbers"):
            continue
        limit = LEAST.get(flag_name, 1)
        expected[flag_name] = limit.get(name, 1) if isinstance(limit, dict) else limit
        accepted = []
        for number in range(-2, 9):
            try:
                flag.parser.parse(str(number))
                accepted.append(number)
            except ValueError:
                assert not accepted, f"--{flag_name}={number} is refused above the least value"
        least[flag_name] = accepted[0]
    assert least == expected


# Numbers that a program is compiled with, or that few runs vary; those of all others are traced.
COMPILED_IN = {
    "run_attention_forms": {"saturation"},
    "run_collapse": {"bias_scale"},
    "run_depth_check": {"weight_decay"},
    "run_lens": {"start"},
    "run_path_chains": {"bias_scale", "skip_gain", "weight_scale"},
    "run_sinks": {"start"},
}


@pytest.mark.parametrize("name", reproduce.EXPERIMENTS)
def test_points_that_differ_in_a_number_share_a_program(name):
    """They are one group, whose points one program computes: see `Executor`."""
    values = import_flags(name)
    names = [n for n in {values[n].name for n in values} if values[n].flag_type() == "float"]
    groups = {}
    for flag_name in filter(values.takes_several, names):
        points = list_points(cli.parse_flags(values, [f"--{flag_name}=0.25,0.5"]))
        assert [point.axes for point in points] == [{flag_name: v} for v in (0.25, 0.5)]
        groups[flag_name] = [point.number for point in points]
        assert len(points[0].group) == (2 if groups[flag_name] == [0, 0] else 1)
    apart = {flag_name for flag_name, numbers in groups.items() if numbers != [0, 0]}
    assert apart == COMPILED_IN.get(name, set())


def write_config(folder, **config):
    (folder / "config.json").write_text(json.dumps({"config": config, "execution": {}}))


def test_flags_of_a_folder_are_read_as_they_were(tmp_path):
    """A value that is empty is the default; several values are one list, or an axis."""
    values = cli.make_flags("kept", num_seeds=2, shows="value")
    values.define("integer", "depth", 3, "Layers.")
    values.define("list", "names", [], "Names.")
    values.define("list", "scales", ["1"], "Scales.")
    values.define("string", "text", None, "Text.")
    axes = {"depth": ["4", "6"]}
    write_config(tmp_path, names=[], scales=["2", "3"], text=None, depth=4, gone=5, axes=axes)
    options = read_flags(values, tmp_path, {"num_seeds": 7})
    assert (options.names, options.scales, options.text) == ([], ["2", "3"], None)
    assert (options.depth, options.axes, options.num_seeds) == (4, axes, 7)
    for damage in ({"depth": "x"}, {"depth": 2**40}, {"axes": 5}):
        write_config(tmp_path, **damage)
        with pytest.raises(RunError, match=r"config\.json"):
            read_flags(values, tmp_path, {})


@pytest.mark.parametrize(
    ("spec", "program"),
    [(SimpleNamespace(name="experiments.run_sort"), "-m experiments.run_sort"), (None, "sort.py")],
)
def test_the_command_is_kept_without_paths_of_the_machine(spec, program, monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=spec))
    monkeypatch.setattr(sys, "argv", ["/a/path/sort.py", "--depth=2", "--run_name=a b"])
    assert command_line() == f"python {program} --depth=2 '--run_name=a b'"


def test_a_second_name_is_an_axis_where_the_flag_is():
    values = cli.make_flags("named", num_seeds=2, shows="value")
    shared_flags.define(values, depth=2)
    shared_flags.define_alias(values, again="seed", layers="depth")
    assert values.takes_several("layers") and not values.takes_several("again")


def test_a_command_without_draws_does_not_grow():
    values = cli.make_flags("growing", num_seeds=2, counts="")
    shared_flags.define(values, until=None)
    assert not cli.parse_flags(values, ["--until=decided"]).grows


def test_a_long_name_of_a_run_is_cut_where_a_word_ends():
    """Its end is the digest of the changed flags."""
    values = cli.make_flags("long")
    values.define("string", "text", None, "Text.")
    text = "x" * 74 + "-end"
    digest = hashlib.sha256(json.dumps({"text": text}).encode()).hexdigest()
    name = default_run_name(cli.parse_flags(values, [f"--text={text}"]))
    assert name == f"text={text[:74]},{digest[:6]}"
