"""Flags, options, presets, defaults and constants are kept as texts: none changes unseen.

A default that changes, or a published number, changes results without an error.
"""

import argparse
import dataclasses
import functools
import importlib
import inspect
import pkgutil
import re
from types import ModuleType

import numpy as np
import pytest

from experiments import reproduce
from experiments.lab.experiment import describe_experiment, import_experiment
from rank_collapse import command
from rank_collapse.measures.table import COLLAPSE, MEASURES

BINARIES = (*reproduce.EXPERIMENTS, "benchmark", "join", "on_device", "reproduce")
PACKAGES = ("rank_collapse", "experiments")
PLAIN = (int, float, str, list, tuple, dict, type(None))


def describe_flags(values):
    """Lists {flag: what it takes} of absl's flags."""
    lines = []
    for name in sorted(values):
        flag = values[name]
        if flag.name != name:
            lines.append(f"--{name}: --{flag.name}")
            continue
        parser = {k: v for k, v in vars(flag.parser).items() if isinstance(v, PLAIN)}
        limits = {k: v for k, v in parser.items() if v not in (None, "", [])}
        default = "…" if isinstance(flag.default, str) and "/" in flag.default else flag.default
        lines.append(f"--{name}={default!r} {flag.flag_type()} {limits}: {flag.help}")
    return lines


def describe_group(group):
    names = ("experiment", "shows", "traced", "execution", "selecting", "counts")
    values = {name: getattr(group, name) for name in names if hasattr(group, name)}
    return [f"{n}: {sorted(v) if isinstance(v, set | frozenset) else v}" for n, v in values.items()]


@pytest.mark.parametrize("name", BINARIES)
def test_golden_flags(name, golden):
    module = importlib.import_module(f"experiments.{name}")
    lines = [*describe_group(module.FLAGS), *describe_flags(module.FLAGS)]
    if hasattr(module, "EXPERIMENT"):
        lines += [f"{k}: {v}" for k, v in vars(describe_experiment(name)).items()]
        assert import_experiment(name) is module
    golden(f"flags/{name}.txt", "\n".join(lines))


def list_options(name):
    """Lists the options of one of the commands of `rank-collapse`."""
    parser = argparse.ArgumentParser(add_help=False)
    importlib.import_module(f"rank_collapse.command.{name}").add_arguments(parser)
    for action in parser._actions:
        names = " ".join(action.option_strings) or action.dest
        kind = getattr(action.type, "__name__", action.type)
        limits = f"{kind} {action.nargs} {action.choices} {action.metavar} {action.const}"
        yield f"{name} {names} = {action.default!r} ({limits}): {action.help}"


def test_golden_options_of_the_command(golden):
    lines = [f"{name}: {text}" for name, text in command.COMMANDS.items()]
    for name in command.COMMANDS:
        lines += list_options(name)
    golden("flags/rank-collapse.txt", "\n".join(lines))


def list_subpackages():
    names = []
    for package in PACKAGES:
        path = importlib.import_module(package).__path__
        names += [package]
        names += [f"{package}.{m.name}" for m in pkgutil.iter_modules(path) if m.ispkg]
    return names


def import_or_skip(name):
    """Imports a module; the test is skipped if the module needs torch, which is optional."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        pytest.skip("torch is not installed")


def list_modules(package):
    """Imports the modules of a package; of the two outermost, those that lie in them alone."""
    path, prefix = import_or_skip(package).__path__, f"{package}."
    if package in PACKAGES:
        entries = [m for m in pkgutil.iter_modules(path, prefix) if not m.ispkg]
    else:
        entries = pkgutil.walk_packages(path, prefix)
    names = [module.name for module in entries]
    skipped = ("__main__", "experiments.experiments", "experiments.rank_collapse")
    for name in sorted(names):
        if not name.endswith(skipped):
            yield import_or_skip(name)


def is_setting(value):
    """Returns whether a constant is made of numbers and words alone."""
    if isinstance(value, dict):
        return all(is_setting(part) for pair in value.items() for part in pair)
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(is_setting, value))
    return value is None or isinstance(value, int | float | str | np.number)


def write_value(value):
    """Writes a value: functions and classes by their names, sets in order."""
    if isinstance(value, set | frozenset):
        return str(sorted(map(write_value, value)))
    if isinstance(value, dict):
        pairs = (f"{key!r}: {write_value(part)}" for key, part in value.items())
        return "{" + ", ".join(pairs) + "}"
    if type(value) in (list, tuple):
        return f"({', '.join(map(write_value, value))})"
    if isinstance(value, functools.partial):
        return f"{write_value(value.func)}{write_value(value.args)}{write_value(value.keywords)}"
    return getattr(value, "__name__", None) or re.sub(r" at 0x\w+", "", repr(value))


def list_settings(module: ModuleType):
    """Yields a line for each constant of a module, and for each default of its functions."""
    for name, value in sorted(vars(module).items()):
        if name.isupper() and is_setting(value) and len(repr(value)) < 1500:
            is_set = isinstance(value, set | frozenset)
            yield f"{name} = {sorted(map(str, value)) if is_set else value!r}"
        is_kept = name in ("EXPERIMENT", "PROTOCOL")  # in the texts of flags and of statements
        is_record = dataclasses.is_dataclass(value) and not inspect.isclass(value)
        if name.isupper() and is_record and not is_kept:
            for field in dataclasses.fields(value):
                part = getattr(value, field.name)
                if part != field.default:
                    yield f"{name}.{field.name} = {write_value(part)}"
        if getattr(value, "__module__", None) != module.__name__ or not callable(value):
            continue
        inner = vars(value).items() if inspect.isclass(value) else ()
        functions = [(name, value), *((f"{name}.{n}", f) for n, f in inner if callable(f))]
        for place, function in functions:
            try:
                parameters = inspect.signature(function).parameters.values()
            except (ValueError, TypeError):
                continue
            for p in parameters:
                if p.default is not p.empty:
                    yield f"{place}({p.name}={write_value(p.default)})"


@pytest.mark.parametrize("package", list_subpackages())
def test_golden_settings(package, golden):
    lines = []
    for module in list_modules(package):
        lines += [f"== {module.__name__}", *list_settings(module)]
    text = "\n".join(lines)
    golden(f"settings/{package}.txt", text)


def test_golden_measures(golden):
    lines = []
    for name, measure in MEASURES.items():
        fields = {key: value for key, value in vars(measure).items() if not callable(value)}
        lines.append(f"{name}: {fields}")
    golden("settings/measures.txt", "\n".join([*lines, *map(str, COLLAPSE)]))
