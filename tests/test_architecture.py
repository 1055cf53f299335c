"""The five floors: imports point down, and BUILD.md's map is the tree."""

import ast
from pathlib import Path

import pytest
from architecture_map import PACKAGES, REPOSITORY, files, mapped_files

# From the ground up. Rooms on the ground do not know of each other; above, a room may use those
# named before it on its floor.
FLOORS = (
    ("struct",),  # what everything is made of
    ("network", "text", "report", "runs"),
    ("measures",),
    ("theory", "paths", "flax_adapters"),
    ("training", "pretrained"),
)
FLOOR = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}
SOURCES = [p for package in PACKAGES for p in files(package) if p.suffix == ".py"]
LIBRARY = [p for p in SOURCES if p.parts[0] == "rank_collapse" and len(p.parts) > 2]
LIBRARY += [Path(f"rank_collapse/{name}.py") for name in ("flax_adapters", "struct")]
MODULES = {".".join(p.with_suffix("").parts).removesuffix(".__init__") for p in SOURCES}


def tree(path):
    return ast.walk(ast.parse((REPOSITORY / path).read_text("utf-8")))


def imports(path):
    """The dotted names a file imports, wherever in the file, those it imports from included."""
    for node in tree(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relative to itself"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def may_use(room, other):
    """Whether one room of rank_collapse may import another."""
    if room == other or FLOOR[other] < FLOOR[room]:
        return True
    rooms = FLOORS[FLOOR[room]]
    above_ground = FLOOR[room] > FLOOR["network"]
    return above_ground and FLOOR[other] == FLOOR[room] and rooms.index(other) < rooms.index(room)


def test_every_room_has_a_floor():
    assert {p.parts[1].removesuffix(".py") for p in LIBRARY} == FLOOR.keys()
    assert may_use("paths", "theory") and may_use("theory", "measures")
    assert not may_use("theory", "paths") and not may_use("text", "network")
    assert not may_use("measures", "training")


def test_imports_point_down():
    wrong = []
    for path in LIBRARY:
        room = path.parts[1].removesuffix(".py")
        for name in imports(path):
            package, _, rest = name.partition(".")
            other = rest.split(".")[0]
            if package == "rank_collapse" and (other not in FLOOR or not may_use(room, other)):
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


def test_the_shell_of_the_binaries_knows_none_of_them():
    wrong = [
        f"{path} imports {name}"
        for path in SOURCES
        if path.parts[:2] == ("experiments", "shell")
        for name in imports(path)
        if name.startswith("experiments.") and not name.startswith("experiments.shell.")
    ]
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


def test_the_map_of_build_is_the_tree():
    text = (REPOSITORY / "BUILD.md").read_text("utf-8")
    tree = {str(p) for package in PACKAGES for p in files(package) if p.name != "__init__.py"}
    assert mapped_files(text) == tree, "python tests/architecture_map.py --write renews it"
