"""The house as docs/architecture.md shows it: floors, rooms, sizes, and what every file is for."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "jvpipe"
FLOORS = (
    "__main__",  # shells
    "command",
    "cli",
    "__init__",
    "nnx",
    "float16",
    "replay",
    "pipeline",
    "trainer",
    "session",
    "report",
    "exports",
    "papers",
    "profiles",
    "planners",
    "planners.joint",
    "planners.model",
    "runtime.state",
    "runtime.engine",
    "runtime",
    "simulate",
    "lowering",
    "schedules",
    "cost",
    "programs",
    "trace",
    "_jax",
    "ir",
    "util",
)
SHELLS = ("jvpipe.train", "jvpipe.plan", "jvpipe.__main__")
FILES = sorted(
    path for path in LIBRARY.rglob("*.py") if "models" not in path.relative_to(LIBRARY).parts
)


@cache
def trees() -> dict[Path, ast.Module]:
    """What each file says."""
    return {path: ast.parse(path.read_text()) for path in FILES}


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


MODULES = {module_of(path) for path in FILES} | {"jvpipe"}


def imported(path: Path) -> Iterator[str]:
    """The modules of the library that a file imports, wherever in the file."""
    for node in ast.walk(trees()[path]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "jvpipe")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "jvpipe":
            assert node.module
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module


@cache
def imports() -> dict[Path, set[str]]:
    """The modules of the library that each file imports."""
    return {path: set(imported(path)) - {module_of(path)} for path in FILES}


def floor_of(module: str) -> int:
    """The floor of a module, the highest is 0."""
    if module in SHELLS:
        return 0
    room = module.removeprefix("jvpipe").removeprefix(".") or "__init__"
    names = [floor for floor in FLOORS if room == floor or room.startswith(floor + ".")]
    assert names, f"{module} has no floor"
    return FLOORS.index(max(names, key=len))


def test_no_import_runs_up_the_floors() -> None:
    arrows = [(module_of(path), name) for path, names in imports().items() for name in names]
    assert [
        (a, b) for a, b in arrows if not b.startswith("jvpipe.models") and floor_of(b) < floor_of(a)
    ] == []


def test_only_the_command_lines_know_the_models() -> None:
    knowing = {
        path.parent.name
        for path, names in imports().items()
        if any(n.startswith("jvpipe.models") for n in names)
    }
    assert knowing <= {"cli"}


def test_the_report_knows_plain_data_alone() -> None:
    rooms = {
        name.split(".")[1]
        for path, names in imports().items()
        if path.parent.name == "report"
        for name in names
        if "." in name
    }
    assert rooms <= {"ir", "report", "util", "_jax"}


def test_no_imports_go_in_a_circle() -> None:
    arrows = {module_of(path): names for path, names in imports().items()}
    assert len(list(TopologicalSorter(arrows).static_order())) >= len(FILES)


def test_files_and_functions_are_small() -> None:
    lines = {path: len(path.read_text().splitlines()) for path in FILES}
    assert [path.name for path, count in lines.items() if count > 450] == []
    assert median(lines.values()) <= 155
    functions = [
        f"{path.name}:{node.name}"
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= 60
    ]
    assert functions == ["forecasts.py:plan_for"], "its docstring is the reference of its arguments"


def test_what_jax_does_not_promise_is_touched_in_one_file() -> None:
    unsure = re.compile(r"^(jax\._src|jax\.extend|jax\.experimental|jaxlib|pickle)(\.|$)")
    touching = set()
    for path, tree in trees().items():
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(unsure.match(name) for name in names):
                touching.add(path.name)
    assert touching <= {"_jax.py"}


def test_the_page_about_the_house_shows_every_room_and_is_read_in_a_sitting() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rooms = {path.relative_to(LIBRARY).parts[0] for path in FILES if path.parent != LIBRARY}
    assert sorted(room for room in rooms if f"{room}/" not in page) == []
    assert len(page.split()) <= 3500
    named = re.findall(r"\b[a-z_]+/[\w/]+\.py", page)
    present = {path.relative_to(LIBRARY).as_posix() for path in FILES}
    assert [name for name in named if name not in present and not (ROOT / name).exists()] == []


def test_the_first_line_of_every_file_says_what_it_is_for() -> None:
    first = {path: (ast.get_docstring(tree) or "").split("\n")[0] for path, tree in trees().items()}
    assert [path.name for path, line in first.items() if len(line.split()) < 3] == []
    assert [
        path.name for path, line in first.items() if not line.endswith((".", ":", ";", ","))
    ] == []


def test_there_are_few_rooms() -> None:
    assert (
        len({path.relative_to(LIBRARY).parts[0] for path in FILES if path.parent != LIBRARY}) <= 16
    )


@pytest.mark.parametrize(("room", "most"), [("session", 18), ("cli", 14)])
def test_rooms_above_the_planners_have_few_files_on_few_floors(room: str, most: int) -> None:
    inside = {
        module_of(path): {name for name in names if name.startswith(f"jvpipe.{room}.")}
        for path, names in imports().items()
        if path.parent.name == room and path.name != "__init__.py"
    }
    height: dict[str, int] = {}
    for module in TopologicalSorter(inside).static_order():
        height[module] = 1 + max((height[below] for below in inside[module]), default=0)
    assert len(inside) <= most
    assert max(height.values()) <= 6


def test_every_experiment_says_what_it_found_and_is_listed() -> None:
    folder = ROOT / "experiments"
    folders = {path.parent.name for path in folder.glob("*/__init__.py")}
    listed = re.findall(
        r"^\| \[(\w+)\]\((\w+)/README\.md\) \|", (folder / "README.md").read_text(), re.MULTILINE
    )
    assert all(name == target for name, target in listed)
    assert [name for name, _ in listed] == sorted(folders)
    for name in folders:
        page = (folder / name / "README.md").read_text()
        assert re.search(rf"python -m experiments\.{name}\b", page), name
        assert re.search(r"20\d\d-\d\d-\d\d", page), f"{name} does not say when"
