"""Kept messages belong to tests that exist: those of others would be compared with nothing."""

import re

from tests.support.folders import REPOSITORY
from tests.support.golden import TEXTS


def test_every_kept_message_is_of_a_test_of_its_module():
    """A test that moves to another file takes its messages along."""
    wrong = []
    for path in (TEXTS / "messages").glob("*.txt"):
        module = REPOSITORY / "tests" / f"{path.stem.replace('.', '/')}.py"
        source = module.read_text("utf-8") if module.exists() else ""
        tests = set(re.findall(r"^ *def (test_\w+)", source, re.MULTILINE))
        kept = {line.partition(": ")[0] for line in path.read_text("utf-8").splitlines()}
        wrong += [f"{path.name}: {name}" for name in sorted(kept - tests)]
    assert not wrong, "\n".join(wrong)
