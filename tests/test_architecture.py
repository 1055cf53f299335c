"""Imports point down, docs/architecture.md has the levels, and tests have the names of modules."""

import ast
import re
from pathlib import Path

import pytest

from tests.support.architecture_map import LEVELS, PACKAGES, files, imports, packages, tree
from tests.support.folders import REPOSITORY
from tests.support.tested_elsewhere import MOST_LISTED, TABLES, TESTED_IN, list_modules

LEVEL = {package: height for height, packages in enumerate(LEVELS) for package in packages}
SOURCES = [p for package in PACKAGES for p in files(package) if p.suffix == ".py"]
LIBRARY = [p for p in SOURCES if p.parts[0] == "rank_collapse" and len(p.parts) > 2]
LIBRARY += [Path(f"rank_collapse/{name}.py") for name in (*LEVELS[0], "flax_adapters", "jax_watch")]
MODULES = {".".join(p.with_suffix("").parts).removesuffix(".__init__") for p in SOURCES}


def may_use(package, other):
    """Whether one package of rank_collapse may import another."""
    if package == other or LEVEL[other] < LEVEL[package]:
        return True
    packages = LEVELS[LEVEL[package]]
    has_order = LEVEL[package] == 0 or LEVEL[package] > LEVEL["network"]
    return (
        has_order
        and LEVEL[other] == LEVEL[package]
        and packages.index(other) < packages.index(package)
    )


def test_every_package_has_a_level():
    assert {p.parts[1].removesuffix(".py") for p in LIBRARY} == LEVEL.keys()
    assert may_use("paths", "theory") and may_use("theory", "measures")
    assert not may_use("theory", "paths") and not may_use("text", "network")
    assert not may_use("measures", "training")


def test_imports_point_down():
    wrong = []
    for path in LIBRARY:
        importer = path.parts[1].removesuffix(".py")
        for name in imports(path):
            package, _, inner = name.partition(".")
            imported = inner.split(".")[0]
            if importer == "command" and imported == "__version__":
                continue
            if package == "rank_collapse" and (
                imported not in LEVEL or not may_use(importer, imported)
            ):
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


def list_experiment_imports(path):
    """Lists what a file of experiments/ imports from experiments/, as parts of dotted names."""
    return [name.split(".")[1:] for name in imports(path) if name.startswith("experiments.")]


def test_the_lab_knows_no_experiment_and_no_experiment_another():
    """An experiment is a file or a folder of paper/ or note/.

    It may use lab/, train/, files with its own name, and inputs.py, which draws tokens.
    """
    wrong = []
    for path in (p for p in SOURCES if p.parts[0] == "experiments"):
        for package, *imported in list_experiment_imports(path):
            place, *names = path.with_suffix("").parts[1:]
            allowed = {
                "verdicts": False,
                "lab": package == "verdicts",
                "train": package in ("verdicts", "lab"),
                "paper": package in ("verdicts", "lab", "train") or imported[:1] == ["inputs"],
                "note": package in ("verdicts", "lab", "train"),
            }.get(place, True)
            is_neighbour = (
                package == place
                and imported
                and imported[0].split("_")[0] == names[0].split("_")[0]
            )
            inside = package == place in ("verdicts", "lab", "train")
            if not (allowed or is_neighbour or inside):
                wrong.append(f"{path} imports {'.'.join([package, *imported])}")
    assert not wrong, "\n".join(wrong)


def test_no_module_of_the_library_is_named_in_a_string():
    """A file imports what it uses at its top. It neither looks up nor patches modules by name."""
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
    """That the page has them is tested in tests_docs/test_site.py."""
    folders = {p.parent for package in PACKAGES for p in files(package) if p.suffix == ".py"}
    assert {name for name, _ in packages()} == {f"`{folder}`" for folder in folders}
    assert all(about for _, about in packages())


def test_commands_print_through_one_function():
    """What escapes control characters, so that no name of a file reaches the terminal raw."""
    wrong = [
        f"{path}:{node.lineno}"
        for path in (p for p in LIBRARY if p.parts[1] in ("command", "text", "pretrained", "runs"))
        for node in tree(path)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("print", "sys.stdout.write", "sys.stderr.write")
        and "escape_text" not in ast.unparse(node)
    ]
    assert not wrong, "\n".join(wrong)


def test_files_are_written_and_opened_in_one_place():
    """Names in a folder of the user may be links or pipes: see runs/files.py and regular.py."""
    names = ("open", "write_text", "write_bytes", "read_bytes", "os.open", "np.save", "savefig")
    places = {"rank_collapse/runs/files.py", "rank_collapse/regular.py"}
    wrong = [
        f"{path}:{node.lineno}: {ast.unparse(node.func)}"
        for path in LIBRARY
        if str(path) not in places and path.parts[1] in ("command", "text", "pretrained", "runs")
        for node in tree(path)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(names)
        if ast.unparse(node.func).split(".")[-1] in {n.split(".")[-1] for n in names}
        and "devnull" not in ast.unparse(node)
        and "stream" not in ast.unparse(node)
    ]
    assert not wrong, "\n".join(wrong)


TESTS = REPOSITORY / "tests"


def name_test(path):
    """Names the test file of a module: rank_collapse/paths/frozen.py has paths/test_frozen.py."""
    folder = path.parent.relative_to("rank_collapse") if path in LIBRARY else path.parent
    return folder / f"test_{path.stem}.py"


def name_module(path):
    """Names a module as tests/support/tested_elsewhere.py does: paths/frozen, experiments/join."""
    return path.relative_to("rank_collapse" if path in LIBRARY else ".").with_suffix("").as_posix()


MODULE_FILES = {
    name: path
    for name, path in ((name_module(path), path) for path in SOURCES)
    if not path.stem.startswith("__") and not name.startswith(tuple(TABLES))
}


def has_test_file(path):
    return (TESTS / name_test(path)).exists()


def test_every_module_has_a_test_file_of_its_name():
    """Or is listed in tests/support/tested_elsewhere.py, with the file that tests it."""
    listed = list_modules()
    wrong = [
        f"{name} has no tests/{name_test(path)}"
        for name, path in MODULE_FILES.items()
        if name not in listed and not has_test_file(path)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_list_of_modules_without_a_test_file_only_becomes_shorter():
    """A module that gets its test file leaves the list, and the number is lowered."""
    listed = list_modules()
    wrong = [
        f"tests/{file} is absent"
        for file in (*TESTED_IN, *TABLES.values())
        if not (TESTS / file).exists()
    ]
    wrong += [f"{name} is listed, and absent" for name in listed.keys() - MODULE_FILES.keys()]
    wrong += [
        f"{name} is listed, and has a test file"
        for name in listed.keys() & MODULE_FILES.keys()
        if has_test_file(MODULE_FILES[name])
    ]
    assert not wrong, "\n".join(wrong)
    assert len(listed) == MOST_LISTED, "write a test file instead, or lower the number"


def test_every_test_file_has_the_name_of_what_it_tests():
    """test_profiles.py and test_profiles_options.py are of profiles.py, in the same folder.

    Tests of a behaviour of many modules are in tests/behaviour, those of tests in tests/support.
    Files of kept results, test_golden_*.py, are of a whole folder.
    """
    tested = {TESTS / name_test(path) for path in SOURCES}
    tested.add(TESTS / "test_architecture.py")
    tested |= {p.with_name(f"test_{p.name}") for p in (TESTS / "support").glob("*.py")}
    wrong = [
        str(path.relative_to(REPOSITORY))
        for path in TESTS.rglob("test_*.py")
        if path.parent != TESTS / "behaviour"
        and not path.stem.startswith("test_golden_")
        and not any(
            path.parent == other.parent and (path.stem + "_").startswith(other.stem + "_")
            for other in tested
        )
    ]
    assert not wrong, "\n".join(wrong)


def test_tests_are_functions():
    """A test that is assigned has no body to read."""
    wrong = [
        f"{path.relative_to(REPOSITORY)}:{node.lineno}"
        for path in TESTS.rglob("test_*.py")
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("test_")
    ]
    assert not wrong, "\n".join(wrong)


UNCLEAR_NAME = re.compile(r"_*(found|own|given|known|rest|of_\w+)", re.IGNORECASE)


def find_unclear_names(source):
    """Lists (line, name) of the variables, arguments, attributes and functions of a file whose
    names are unclear. What it imports from others keeps its name."""
    names = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                names.append((node.lineno, name))
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.append((node.lineno, name))
            case ast.ClassDef(name=name) | ast.arg(arg=name) | ast.alias(asname=str(name)):
                names.append((node.lineno, name))
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
                names.append((node.lineno, name))
    return [(line, name) for line, name in names if UNCLEAR_NAME.fullmatch(name)]


UNCLEAR = """
import a as OF_STATES
found, a.own = 1, 2
def of_heads(given, *, known=0, **rest): ...
class C:
    of_bulk: bool
    _OWN = [_KNOWN for _KNOWN in b]
"""
CLEAR = """
from hypothesis import given
is_known, unknown, own_keys, softmax = given, a.found, b(rest=2), "of_heads"
"""


def test_names_say_what_a_value_is():
    """`found` does not say what was found, and `of_heads` does not say what the heads have."""
    names = ["OF_STATES", "_KNOWN", "_OWN", "found", "given", "known", "of_bulk", "of_heads", "own"]
    assert sorted(name for _, name in find_unclear_names(UNCLEAR)) == [*names, "rest"]
    assert find_unclear_names(CLEAR) == []
    wrong = [
        f"{path}:{line}: {name}"
        for package in ("rank_collapse", "experiments", "tests", "tests_docs")
        for path in files(package)
        if path.suffix == ".py"
        for line, name in find_unclear_names((REPOSITORY / path).read_text("utf-8"))
    ]
    assert not wrong, "\n".join(wrong)
