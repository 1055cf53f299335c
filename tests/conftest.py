"""A strict suite: rank promotion refused, several CPU devices. With `-m full` annotations are
checked too, which takes an eighth longer.

Nearly all of its time is compilation: see `compiling`. Tests that must see what users run take the
fixture `optimized`.
"""

import gc
import os
import signal
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

from tests.support import (
    compiling,
    kept_messages,
    type_checks,  # noqa: F401, the import hook looks it up
)
from tests.support.folders import REPOSITORY, SHARED_DATA
from tests.support.golden import TEXTS, list_differences, shorten
from tests.support.untouched import root_stays_as_it_is  # noqa: F401

# Until all tests are collected: next to nothing of what is imported becomes garbage, and searching
# it takes a third of the collection.
gc.disable()
os.environ.setdefault("MPLBACKEND", "Agg")

# Under nohup, or behind "&" in a script, these are ignored, and children would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

import jax  # noqa: E402

jax.config.update("jax_num_cpu_devices", int(os.environ.get("JAX_NUM_CPU_DEVICES", 2)))
jax.devices()  # starts JAX, so that no binary run inside a test changes the number of devices


def pytest_addoption(parser):
    """Adds the option of `support/golden.py`."""
    parser.addoption("--rewrite-golden", action="store_true", help="write tests/golden/texts anew")


def pytest_configure(config):
    """Keeps compiled programs; checks annotations in a run of the full tests."""
    compiling.pytest_configure(config)
    if config.option.rewrite_golden:
        if getattr(config.option, "numprocesses", None):
            raise pytest.UsageError("--rewrite-golden needs -n 0: processes overwrite each other")
        os.environ["REWRITE_GOLDEN"] = "1"
    if config.option.markexpr == "full":
        from tests.support import type_checks  # noqa: F401, which the hook looks up in its package

        install_import_hook("rank_collapse", "tests.support.type_checks.checked")


def pytest_collection_finish():
    """Freezes what is imported: the garbage collector, a tenth of the time, then skips it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def rank_promotion_is_refused():
    """Refuses arithmetic of arrays whose numbers of axes differ, here and not in tests_docs."""
    usual = jax.config.jax_numpy_rank_promotion
    jax.config.update("jax_numpy_rank_promotion", "raise")
    yield
    jax.config.update("jax_numpy_rank_promotion", usual)


@pytest.fixture(scope="module", autouse=True)
def figures_as_data():
    """Writes figures of runs as texts of what they show: see support/figures_as_data.py."""
    from experiments.lab import folder
    from tests.support.figures_as_data import as_data

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder, "draw_files", as_data)
        yield


@pytest.fixture(scope="session", autouse=True)
def whole_messages_are_kept():
    """Compares the whole text of each refusal: see support/kept_messages.py."""
    from experiments.lab import cli
    from rank_collapse import command

    with pytest.MonkeyPatch.context() as patch:
        for module in (cli, command):
            patch.setattr(module, "print_lines", kept_messages.prints_and_keeps(module.print_lines))
        yield
    kept_messages.write_messages()


@pytest.fixture(scope="module", autouse=True)
def drop_programs():
    """Drops compiled programs after each module; those needed again come from the cache on disk.

    Otherwise one process would grow to gigabytes, and to more memory maps than Linux allows.
    """
    yield
    jax.clear_caches()


@pytest.fixture(scope="module")
def optimized():
    """Compiles programs as users do, for the tests of one module."""
    usual = jax.config.read("jax_disable_most_optimizations")

    def disable(value):
        jax.config.update("jax_disable_most_optimizations", value)
        jax.clear_caches()

    disable(False)
    yield
    disable(usual)


@pytest.fixture
def golden(request):
    """Compares a text with the one that tests/golden/texts has: golden("runs/sort.txt", text)."""

    def check(name: str, text: str) -> None:
        path, text = TEXTS / name, shorten(text.replace(str(REPOSITORY), "REPOSITORY"))
        if request.config.option.rewrite_golden:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
        remedy = "add -n 0 --rewrite-golden if the change is intended"
        assert path.exists(), f"{path} does not exist; {remedy}"
        differences = list_differences(text, path.read_text("utf-8"))
        shown = "\n".join(differences[:20])
        assert not differences, f"{len(differences)} differences from {path}; {remedy}\n{shown}"

    return check


@pytest.fixture
def x64():
    """Double precision for one test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of reference data beside the repository; skips where it is absent."""
    folder = Path(os.environ.get("RANK_COLLAPSE_DATA", SHARED_DATA))
    if not folder.is_dir():
        pytest.skip(f"no reference data at {folder}")
    return folder
