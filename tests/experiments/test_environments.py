"""Experiments run in the environment that their page names: their imports are read, none is run."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = sorted(path.parent for path in (ROOT / "experiments").glob("*/__init__.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OWN = {"experiments", "jvpipe", "tests", *sys.stdlib_module_names}
ALL = ("cli", "models")
"""The extras that the list of experiments names for all of them."""
MODULES = {"scikit-learn": "sklearn", "pillow": "PIL", "pyyaml": "yaml", "dm-haiku": "haiku"}


def provided(requirements: list[str]) -> set[str]:
    """Returns the modules of some requirements; those of an extra of ours are those of its own."""
    modules: set[str] = set()
    for requirement in requirements:
        name, _, extras = re.split(r"[><=;\s]", requirement)[0].partition("[")
        if name == "jvpipe":
            modules |= {module for extra in extras.strip("]").split(",") for module in of(extra)}
        else:
            modules.add(MODULES.get(name, name.replace("-", "_")))
    return modules


def of(extra: str) -> set[str]:
    """Returns the modules of an extra."""
    return provided(PROJECT["optional-dependencies"][extra])


def imported(folder: Path) -> Iterator[str]:
    """Yields the packages that the files of a folder import, at their top or in a function."""
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from (alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield node.module.split(".")[0]


def named(page: str) -> set[str]:
    """Returns the modules that a page names: packages between ticks, and extras in brackets."""
    extras = {extra for found in re.findall(r"\[([a-z,-]+)\]", page) for extra in found.split(",")}
    known = extras & PROJECT["optional-dependencies"].keys()
    return {module for extra in known for module in of(extra)} | set(re.findall(r"`(\w+)`", page))


def test_the_list_names_what_all_need() -> None:
    page = (ROOT / "experiments/README.md").read_text()
    assert f"pip install -e '.[{','.join(ALL)}]'" in page


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_a_page_names_what_its_experiment_needs_besides(folder: Path) -> None:
    common = {module for extra in ALL for module in of(extra)} | provided(PROJECT["dependencies"])
    needed = set(imported(folder)) - OWN - common
    assert needed - named((folder / "README.md").read_text()) == set()


def test_extras_are_read_with_what_they_take_in() -> None:
    assert {"matplotlib", "flax", "sphinx"} <= of("docs")
    assert named("    pip install -e '.[figures]'  # and `tyro`") == {"matplotlib", "tyro"}
