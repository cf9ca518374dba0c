"""What is listed by hand agrees with the registries and tables: pages, docstrings, and fields that
somebody reads.
"""

import ast
import inspect
import re
import typing
from dataclasses import fields
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from jvpipe.ir.fates import Fates
from jvpipe.ir.kinds import Kind
from jvpipe.ir.plan import FATES, Fate, FateInfo
from jvpipe.papers.registry import PAPERS, PLANNERS
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.schedules import SCHEDULES
from jvpipe.schedules.schedule import Schedule

ROOT = Path(__file__).parents[1]


def modules(room: str) -> list[ModuleType]:
    """The modules of a room."""
    files = sorted((ROOT / "jvpipe" / room).glob("*.py"))
    return [import_module(f"jvpipe.{room}.{file.stem}") for file in files if file.stem[0] != "_"]


def page(*names: str) -> str:
    return "\n".join((ROOT / "docs" / f"{name}.md").read_text() for name in names)


@cache
def texts() -> dict[str, str]:
    """What each file of the library says."""
    house = ROOT / "jvpipe"
    files = [file.relative_to(house) for file in house.rglob("*.py")]
    return {f.as_posix(): (house / f).read_text() for f in files if "models" not in f.parts}


def test_every_schedule_that_a_file_makes_is_registered() -> None:
    values = [value for module in modules("schedules") for value in vars(module).values()]
    made = {value.name for value in values if isinstance(value, Schedule)}
    assert len(made) > 2
    assert made <= SCHEDULES.keys()


def test_the_pages_for_users_have_every_schedule() -> None:
    text = page("schedules", "asynchronous")
    assert [name for name in SCHEDULES if f'"{name}"' not in text] == []


def test_every_planner_of_a_paper_is_registered() -> None:
    wanted = {"problem": Problem, "return": Decision}
    made = {
        function.__name__
        for module in modules("papers")
        for function in vars(module).values()
        if inspect.isfunction(function)
        and function.__module__ == module.__name__
        and function.__name__[0] != "_"
        and typing.get_type_hints(function) == wanted
    }
    assert len(made) > 5
    assert made <= {planner.decide.__name__ for planner in PAPERS}


def test_the_page_about_planners_has_every_planner() -> None:
    assert [p.name for p in PLANNERS if f"`{p.name}`" not in page("compare")] == []


def test_the_table_has_every_fate() -> None:
    assert FATES.keys() == set(Fate)


@pytest.mark.parametrize(("table", "home"), [(FateInfo, "ir/plan.py"), (Fates, "ir/fates.py")])
def test_every_column_about_fates_is_read_by_somebody(table: type[Any], home: str) -> None:
    others = "\n".join(text for file, text in texts().items() if file != home)
    unread = [f.name for f in fields(table) if not re.search(rf"\.{f.name}\b(?! =)", others)]
    assert unread == []


def test_every_match_that_says_never_names_every_kind() -> None:
    count = 0
    for file, text in texts().items():
        for node in ast.walk(ast.parse(text)) if "assert_never(row.kind" in text else ():
            if not isinstance(node, ast.Match) or "assert_never" not in ast.dump(node.cases[-1]):
                continue
            named = {
                part.attr
                for case in node.cases
                for part in ast.walk(case.pattern)
                if isinstance(part, ast.Attribute)
                and isinstance(part.value, ast.Name)
                and part.value.id == "Kind"
            }
            if named:
                count += 1
                assert named == {kind.name for kind in Kind}, f"{file}:{node.lineno}"
    assert count >= 2


def test_nobody_asks_for_the_name_of_a_schedule_or_a_planner() -> None:
    names = "|".join(map(re.escape, [*SCHEDULES, *(planner.name for planner in PLANNERS)]))
    asks = re.compile(rf"(\S+) [!=]= [\"'](?:{names})[\"']")
    found = [(file, match[1]) for file, text in texts().items() for match in asks.finditer(text)]
    assert [(file, what) for file, what in found if "replicas" not in what] == []
