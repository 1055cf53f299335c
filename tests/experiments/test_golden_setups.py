"""What the flags of an experiment make, before anything is computed, is kept as a text.

Networks, recipes, cells and tokens, by field: a field that a flag no longer reaches, or a default
that changes on the way, changes results without an error.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping

import jax
import numpy as np
import pytest

from experiments.lab.experiment import import_experiment
from experiments.lab.grid import Options
from experiments.train import design_cells
from tests.behaviour.test_golden_settings import is_setting, list_modules, list_subpackages
from tests.support.golden import format_numbers
from tests.support.runs import parsed

SETUPS = {
    "check_bounds": ("--cases=8x16x2-causal,3x4x2,8x16x2-skip,8x16x2-gelu,8x16x2-padding",),
    "run_attention_forms": ("--trained_d_k=8,2 --no_repeat --dropout=0.2",),
    "run_circle": (
        "",
        "--compare=published --widths=6,4",
        "--compare=theory --widths=8",
        "--compare=pure --widths=10 --circle_skip",
    ),
    "run_collapse": (
        "--inputs=gaussian",
        "--norm_placement=post --mlp=relu --san_mlp_skip --mask=local --window=3 --norm_kind=rms "
        "--init=bert --num_tokens=5 --mlp_gain=3,1 --d_ff=9 --dtype=bfloat16",
    ),
    "run_convex_hull": ("", "--noffn2 --do_mlp --dropout=0.3 --weight_decay=0.5"),
    "run_depth_check": (
        *(f"--rule={rule} --depth=3 --num_tokens=5" for rule in ("sp", "mup", "half")),
        *(f"--rule={rule} --depth=3 --num_tokens=5" for rule in ("completep", "looped")),
    ),
    "run_loops": ("--depth=3", "--depth=3 --notied --mask=causal"),
    "run_memorization": (
        "--task_name=shipped --num_tokens=24",
        "--task_name=shipped --num_tokens=9 --num_labels=3 --do_mlp --n_train_data=4 "
        "--per_device_eval_batch_size=3",
    ),
    "run_path_chains": (
        "--inputs=gaussian",
        "--norm_placement=pre --mlp=none --mask=causal --norm_kind=rms --init=xavier "
        "--num_tokens=5 --skip_gain=0.5",
    ),
    "run_path_counts": ("", "--heads=3,1 --layers=2,5"),
    "run_sort": ("", "--do_mlp --no_repeat --init_scale=0.5 --learning_rate=0.5"),
    "run_stability": (
        "--depths=3,1",
        "--depths=2,4 --mlp=none --mask=causal --d_ff=9 --designs=pre,deepnorm",
    ),
    "run_theorems": ("",),
    "run_trainability": (
        "--depths=3,2 --designs=pre,admin,post --warmup=2,0",
        "--depths=2 --designs=deepnorm --warmup=5 --batch_size=3 --task=sort --learning_rate=0.1",
    ),
    "run_transformer": (
        "",
        "--task=translation --norm_placement=pre --notie --optimizer=radam --schedule=constant "
        "--nodo_mlp --label_smoothing=0.1",
        "--task=copy --min_len=2 --warmup=0",
    ),
    "run_width": ("--depths=4,1,2 --d_model=8", "--depths=2,3 --depth=3 --do_mlp --d_model=6"),
}


def is_default(field, value):
    """Returns whether a field has its default, which is not written."""
    if field.default is dataclasses.MISSING:
        return False
    return value is field.default or (
        isinstance(value, int | float | str | tuple) and value == field.default
    )


def list_lines(place, value):
    """Yields "place = value" of all numbers, words and functions of a value."""
    if isinstance(value, Options):
        return
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield f"{place}: {type(value).__name__}"
        for field in dataclasses.fields(value):
            part = getattr(value, field.name)
            if not is_default(field, part):
                yield from list_lines(f"{place}.{field.name}", part)
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield from list_lines(f"{place}[{name}]", part)
    elif hasattr(value, "_asdict"):
        yield from list_lines(f"{place}: {type(value).__name__}", value._asdict())
    elif isinstance(value, list | tuple) and not all(isinstance(v, int | float) for v in value):
        for index, part in enumerate(value):
            yield from list_lines(f"{place}[{index}]", part)
    elif isinstance(value, np.ndarray | jax.Array):
        numbers = format_numbers(np.asarray(value, float))
        yield f"{place} = {value.dtype} {value.shape}: {numbers}"
    elif isinstance(value, functools.partial):
        yield f"{place} = partial {value.func.__qualname__}"
        yield from list_lines(f"{place} arguments", [*value.args])
        yield from list_lines(f"{place} arguments", value.keywords)
    elif callable(value):
        yield f"{place} = {getattr(value, '__qualname__', type(value).__name__)}"
    else:
        yield f"{place} = {value!r}"


MAKERS = ("make_task", "make_setups", "make_setup", "make_config", "make_configs")
MAKERS += ("make_cases", "make_cells", "make_sizes", "select_theorems")


def make_setup(module, options):
    """Makes the set-up of an experiment; of cells that are trained, their networks too."""
    make = next(getattr(module, name) for name in MAKERS if hasattr(module, name))
    setup = make(options)
    if make.__name__ == "make_cells":
        networks = [design_cells.make_network(options, cell) for cell in setup]
        ensemble = design_cells.make_ensemble(options, networks[0], 3, None)
        return {
            "cells": setup,
            "networks": networks,
            "split": design_cells.split_floats(networks[0]),
            "recipe": ensemble.recipe,
            "epochs_per_chunk": ensemble.epochs_per_chunk,
        }
    return setup


@pytest.mark.parametrize("name", SETUPS)
def test_golden_setups(name, golden, capsys):
    module, lines = import_experiment(name), []
    for arguments in SETUPS[name]:
        options = parsed(module, *arguments.split())
        lines += [f"== {arguments}", *list_lines("setup", make_setup(module, options))]
    golden(f"setups/{name}.txt", "\n".join(lines))


SHOWN_ELSEWHERE = ("EXPERIMENT", "FLAGS", "STATEMENTS", "THEOREMS", "SETTINGS")


def list_tables():
    """Yields the constants of the experiments that hold functions beside words and numbers.

    A constant that several modules have is written once.
    """
    written = set()
    packages = [name for name in list_subpackages() if name.startswith("experiments")]
    for module in itertools.chain.from_iterable(map(list_modules, packages)):
        for name, value in sorted(vars(module).items()):
            is_table = isinstance(value, Mapping | list | tuple) or dataclasses.is_dataclass(value)
            is_seen = is_setting(value) or name in SHOWN_ELSEWHERE or isinstance(value, type)
            if name.isupper() and is_table and not is_seen and id(value) not in written:
                written.add(id(value))
                yield from list_lines(f"{module.__name__}.{name}", value)


def test_golden_tables(golden):
    golden("setups/tables.txt", "\n".join(list_tables()))
