"""A stand-in for the Executor of an experiment."""

import contextlib
from types import SimpleNamespace


def replace_executor(monkeypatch, module, *expected, **members):
    """Replaces the Executor of a module by one that computes nothing.

    Args:
        monkeypatch: The fixture of the test.
        module: Module that begins an Executor.
        expected: Arguments that the module must pass to it.
        **members: Methods of the stand-in, as functions without `self`, and its attributes.
    """

    @contextlib.contextmanager
    def begin(*arguments):
        assert arguments == expected
        yield SimpleNamespace(**members)

    monkeypatch.setattr(module, "Executor", begin)
