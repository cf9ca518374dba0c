"""Counts the rooms that a problem passes through on its way to a decision, and the names that it
meets there.

    python -m tests.walk

A call is on the way if one of its arguments is the problem, or holds it: as an attribute, or as an
item of a tuple or list. A file with such a function is a room. The names are those of all
parameters of these functions. Beside them stands what is called at all until there is a decision,
whether or not it sees the problem.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import jvpipe
from jvpipe.cost.costs import Costs, Edge, LayerCost, Option
from jvpipe.papers.registry import find_planner
from jvpipe.planners.model.problem import Problem
from jvpipe.schedules import find_schedule

HOUSE = Path(jvpipe.__file__).parent
SEQUENCES = (tuple, list)


@dataclass(frozen=True)
class Walk:
    """The functions that were called, by their code, and those of them that were handed the
    problem.
    """

    called: frozenset[CodeType]
    passed: frozenset[CodeType]


def rooms(functions: frozenset[CodeType], house: Path = HOUSE) -> list[str]:
    """Lists the files of some functions.

    Args:
        functions: by their code.
        house: the folder that all of them are in.
    """
    return sorted({Path(code.co_filename).relative_to(house).as_posix() for code in functions})


def names(functions: frozenset[CodeType]) -> list[str]:
    """Lists the names of the parameters of some functions."""
    return sorted({name for code in functions for name in parameters(code)})


def parameters(code: CodeType) -> tuple[str, ...]:
    """Lists the names of a function's parameters, but for those that take any number."""
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def walked(of: type[Any], run: Callable[[], object], house: Path = HOUSE) -> Walk:
    """Follows the objects of a class through the calls of functions in a folder.

    Args:
        of: the class.
        run: what begins the walk.
        house: the folder.
    """
    called, passed = set[CodeType](), set[CodeType]()

    def entered(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        is_inner = code.co_name.startswith(
            "<"
        )  # a comprehension or lambda is a part of its function
        if event != "call" or is_inner or not code.co_filename.startswith(f"{house}/"):
            return
        called.add(code)
        if code not in passed:
            arguments = (frame.f_locals.get(name) for name in parameters(code))
            if any(holds(of, argument) for argument in arguments):
                passed.add(code)

    before = sys.getprofile()
    sys.setprofile(entered)
    try:
        run()
    finally:
        sys.setprofile(before)
    return Walk(frozenset(called), frozenset(passed))


def holds(of: type[Any], x: object) -> bool:
    """Tells whether something is an object of a class, or has one as an attribute or item."""
    if isinstance(x, of):
        return True
    if isinstance(x, SEQUENCES):
        return any(isinstance(item, of) for item in x)
    if isinstance(x, type):
        return False
    slots = (getattr(x, name, None) for name in getattr(type(x), "__slots__", ()))
    return any(isinstance(item, of) for item in (*slots, *getattr(x, "__dict__", {}).values()))


def problem(schedule: str) -> Problem:
    """Makes a chain of ten layers on three devices that cannot keep everything.

    Args:
        schedule: by name.
    """
    kept, some, again = Option(100), Option(50, extra_s=0.2, extra_bytes=50), Option(0, extra_s=1.0)
    layers = tuple(
        LayerCost(f"layer{i}", 1.0 + i % 3, 2.0 + i % 2, (kept, some, again), 10, 10, 20, 5, 5)
        for i in range(10)
    )
    edges = tuple(Edge(i, (i + 1,), 5, f"edge{i}") for i in range(9))
    rule = find_schedule(schedule)
    return Problem(Costs(layers, edges), rule.stages_on(3), rule, 6, memory_limit_bytes=1500)


def planned(schedule: str) -> Walk:
    """Follows a problem through jvpipe's own planner.

    Args:
        schedule: by name.
    """
    asked = problem(schedule)
    return walked(Problem, lambda: find_planner("jvpipe").decide(asked))


def main() -> None:
    """Prints a table, a line for each schedule, and the rooms of the first."""
    walks = {schedule: planned(schedule) for schedule in ("1f1b", "gpipe", "zb-h1", "interleaved")}
    print("schedule        rooms   names   rooms called   names called")
    for schedule, walk in walks.items():
        counts = [len(count(of)) for of in (walk.passed, walk.called) for count in (rooms, names)]
        print(f"{schedule:<12}" + "".join(f"{count:>9}" for count in counts))
    print("\n1f1b:", *rooms(walks["1f1b"].passed), sep="\n  ")
    print("\nnames:", ", ".join(names(walks["1f1b"].passed)))


if __name__ == "__main__":
    main()
