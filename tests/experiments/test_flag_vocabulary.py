"""One name for each flag in every binary, lists by commas, and the published names beside ours."""

import importlib
import re
import shlex

import pytest
from absl import flags

from experiments import reproduce, run_convex_hull, run_memorization, run_sort
from experiments.run_trainability import FLAGS as TRAINABILITY
from experiments.shell import cli, vocabulary
from experiments.shell.options import default_run_name

# Names of the published code, and older ones of ours: second names of the vocabulary's.
SECOND = {"width", "hidden_dim", "seq_len", "batch_sz", "norm", "max_seq_length"}

TYPES = {
    "integer": "int",
    "float": "float",
    "boolean": "bool",
    "enum": "string enum",
    "string": "string",
}


def flags_of(name):
    return importlib.import_module(f"experiments.{name}").FLAGS


@pytest.mark.parametrize("name", reproduce.EXPERIMENTS)
def test_a_flag_has_one_name_and_others_are_second_names(name):
    values = flags_of(name)
    assert not SECOND & {values[n].name for n in values}
    for known, (kind, *_) in vocabulary.VOCABULARY.items():
        if known in values and values[known].flag_type() != "numbers":
            assert values[known].flag_type() in (TYPES[kind], "comma separated list of strings")
    assert not any(values[n].flag_type().startswith("multi ") for n in values)


@pytest.mark.parametrize(
    ("given", "depths"),
    [("--depths=3,1", [3, 1]), ("--depths=3 --depths=1", [1]), ("", [6, 12, 18, 36])],
)
def test_lists_are_written_with_commas(given, depths):
    assert cli.parse(TRAINABILITY, given.split()).depths == depths


@pytest.mark.parametrize(
    "given", ["--depths=1,", "--depths=1,x", "--depths=0", "--border_gains=nan"]
)
def test_a_list_with_what_is_no_number_is_refused(given):
    with pytest.raises(flags.Error, match=given.split("=")[0]):
        cli.parse(TRAINABILITY, [given])


@pytest.mark.parametrize("module", [run_sort, run_convex_hull, run_memorization])
def test_a_published_command_asks_for_what_ours_does(module):
    """The command of the docstring, and the same by our names: one config, one run name."""
    command = re.search(r"python -m experiments\.\w+ ((?:.*\\\n)*.*)\n", module.__doc__)[1]
    arguments = shlex.split(command.replace("\\\n", " "))
    names = {n: module.FLAGS[n].name for n in module.FLAGS}
    ours = [f"--{names[a[2:]]}" if names.get(a[2:]) else a for a in arguments]
    configs, runs = [], []
    for given in (arguments, ours):
        options = cli.parse(module.FLAGS, given)
        configs.append(cli.config_of(options))
        runs.append(default_run_name(options, options.aside))
    assert arguments != ours and configs[0] == configs[1] and runs[0] == runs[1]
    assert configs[0]["d_model"] == int(arguments[arguments.index("--hidden_dim") + 1])
    assert not SECOND & configs[0].keys()
