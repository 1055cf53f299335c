"""The six levels: imports point down, and the map of docs/architecture.md has them."""

import ast
from pathlib import Path

import pytest
from architecture_map import LEVELS, PACKAGES, files, imports, packages, tree

LEVEL = {own: height for height, packages in enumerate(LEVELS) for own in packages}
SOURCES = [p for package in PACKAGES for p in files(package) if p.suffix == ".py"]
LIBRARY = [p for p in SOURCES if p.parts[0] == "rank_collapse" and len(p.parts) > 2]
LIBRARY += [Path(f"rank_collapse/{name}.py") for name in (*LEVELS[0], "flax_adapters", "jax_watch")]
MODULES = {".".join(p.with_suffix("").parts).removesuffix(".__init__") for p in SOURCES}


def may_use(own, other):
    """Whether one package of rank_collapse may import another."""
    if own == other or LEVEL[other] < LEVEL[own]:
        return True
    packages = LEVELS[LEVEL[own]]
    above = LEVEL[own] > LEVEL["network"]
    return above and LEVEL[other] == LEVEL[own] and packages.index(other) < packages.index(own)


def test_every_package_has_a_level():
    assert {p.parts[1].removesuffix(".py") for p in LIBRARY} == LEVEL.keys()
    assert may_use("paths", "theory") and may_use("theory", "measures")
    assert not may_use("theory", "paths") and not may_use("text", "network")
    assert not may_use("measures", "training")


def test_imports_point_down():
    wrong = []
    for path in LIBRARY:
        own = path.parts[1].removesuffix(".py")
        for name in imports(path):
            package, _, rest = name.partition(".")
            other = rest.split(".")[0]
            if own == "command" and other == "__version__":
                continue
            if package == "rank_collapse" and (other not in LEVEL or not may_use(own, other)):
                wrong.append(f"{path} imports {name}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("package", "allowed"), [("absl", ()), ("experiments", ()), ("matplotlib", ("report", "runs"))]
)
def test_the_library_does_without(package, allowed):
    sources = [*LIBRARY, Path("rank_collapse/__init__.py")]
    wrong = [
        f"{path} imports {name}"
        for path in sources
        for name in imports(path)
        if name.split(".")[0] == package and path.parts[1] not in allowed
    ]
    assert not wrong, "\n".join(wrong)


def own_imports(path):
    """What a file of experiments/ imports from there."""
    return [name.split(".")[1:] for name in imports(path) if name.startswith("experiments.")]


def test_the_lab_knows_no_experiment_and_no_experiment_another():
    """An experiment is a file or a folder of paper/ or note/: it may use lab/, train/ and what is
    beside it, and inputs.py, which draws tokens."""
    wrong = []
    for path in (p for p in SOURCES if p.parts[0] == "experiments"):
        for package, *rest in own_imports(path):
            place, *own = path.with_suffix("").parts[1:]
            allowed = {
                "verdicts": False,
                "lab": package == "verdicts",
                "train": package in ("verdicts", "lab"),
                "paper": package in ("verdicts", "lab", "train") or rest[:1] == ["inputs"],
                "note": package in ("verdicts", "lab", "train"),
            }.get(place, True)
            beside = package == place and rest and rest[0].split("_")[0] == own[0].split("_")[0]
            inside = package == place in ("verdicts", "lab", "train")
            if not (allowed or beside or inside):
                wrong.append(f"{path} imports {'.'.join([package, *rest])}")
    assert not wrong, "\n".join(wrong)


def test_no_module_of_the_library_is_named_in_a_string():
    """Neither looked up nor patched by name: what a file uses stands at its top."""
    wrong = [
        f"{path}:{node.lineno}: {node.value!r}"
        for path in SOURCES
        for node in tree(path)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.startswith("rank_collapse.")
        and node.value in MODULES
    ]
    assert not wrong, "\n".join(wrong)


def test_the_map_has_the_packages():
    """The page has them: tests_docs/test_site.py."""
    folders = {p.parent for package in PACKAGES for p in files(package) if p.suffix == ".py"}
    assert {name for name, _ in packages()} == {f"`{folder}`" for folder in folders}
    assert all(about for _, about in packages())
