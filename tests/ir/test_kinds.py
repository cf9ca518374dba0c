"""Kinds are told apart by their tables, or so that an unknown one is refused; docs/adding_a_kind.md
says where.
"""

import ast
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import jvpipe
from jvpipe.ir.buffers import Buffer, Lowered
from jvpipe.ir.kinds import KINDS, Kind, Runs
from jvpipe.ir.layers import Layer, Ref
from jvpipe.ir.rows import Row
from jvpipe.ir.span import Picture, Span
from jvpipe.ir.task import Task
from jvpipe.ir.use import Use
from jvpipe.ir.values import VALUES, Value, ValueKind
from jvpipe.lowering.carrier import Block
from jvpipe.lowering.expand import Expander
from jvpipe.lowering.liveness import live
from jvpipe.lowering.operation import Operation
from jvpipe.lowering.order import Waits, sums_from
from jvpipe.lowering.place import Placer
from jvpipe.lowering.step import lower_step
from jvpipe.lowering.swap import swap
from jvpipe.lowering.weight_rule import Weights
from jvpipe.report.chrome_trace import chrome_trace
from jvpipe.runtime.engine.versions import VersionLedger
from jvpipe.schedules.schedule import Schedule
from jvpipe.simulate.simulator import links_between_devices, simulate, simulate_lists
from jvpipe.simulate.stages import StageLoad
from tests.lowering.toy import GRAPH, layout, optimizer

ENUMS = {"Kind", "ValueKind", "SlotKind", "Runs", "Link", "Copy", "Owner", "Fate"}
PICKED = {
    "exports": {"F", "B", "I", "W"},  # what others have words for
    "lowering": {"F", "I", "U", "MOVE", "FREE"},
    "runtime": {
        "F",
        "B",
        "I",
        "U",
        "R",
        "E",
        "FEED",
        "MOVE",
        "OUT",
        "FREE",
        "IN",
        "DROP",
        "RECEIPT",
    },
    "planners": {"F", "I", "W"},
    "schedules": {"I", "W"},
    "simulate": {"U"},
}
"""By room, the kinds that code there compares with: what it says of one of these holds for no
other.
"""
MENTIONED = re.compile(rf"\b({'|'.join(sorted(ENUMS))})\.|[\"']({'|'.join(Kind)}|X)[\"']")
"""Files without any of these have nothing to look at, and are not parsed."""


@cache
def choices() -> list[tuple[Path, ast.Match | ast.Compare]]:
    """Every `match` and every comparison of the library, with its file."""
    house = Path(jvpipe.__file__).parent
    texts = {file: file.read_text() for file in house.rglob("*.py") if "models" not in file.parts}
    return [
        (file.relative_to(house), node)
        for file, text in texts.items()
        if MENTIONED.search(text)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.Match, ast.Compare))
    ]


def members(node: ast.AST, enum: str) -> set[str]:
    """The members of an enum that code names."""
    named = (
        n for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)
    )
    return {n.attr for n in named if isinstance(n.value, ast.Name) and n.value.id == enum}


def is_loud(case: ast.match_case) -> bool:
    """Tells whether a last case takes all that is left, and refuses it."""
    takes_all = (
        isinstance(case.pattern, ast.MatchAs)
        and case.pattern.pattern is None
        and case.guard is None
    )
    return takes_all and any(
        isinstance(n, (ast.Raise, ast.Assert))
        or (isinstance(n, ast.Name) and n.id == "assert_never")
        for statement in case.body
        for n in ast.walk(statement)
    )


def test_the_tables_know_every_kind() -> None:
    assert KINDS.keys() == set(Kind)
    assert VALUES.keys() == set(ValueKind)


def test_copies_have_a_link_and_nothing_else_has() -> None:
    assert {kind for kind, info in KINDS.items() if info.link} == {
        k for k, i in KINDS.items() if i.runs is Runs.COPY
    }


def test_every_value_that_lasts_has_an_owner_of_its_own() -> None:
    owners = [info.owner for info in VALUES.values() if info.lasts]
    assert len(owners) == len(set(owners)) == 4


def test_every_match_over_kinds_refuses_what_it_does_not_know() -> None:
    matches = [
        (f"{file}:{node.lineno}", node)
        for file, node in choices()
        if isinstance(node, ast.Match)
        and any(members(case.pattern, enum) for case in node.cases for enum in ENUMS)
    ]
    assert len(matches) > 15
    assert [place for place, match in matches if not is_loud(match.cases[-1])] == []


def test_elsewhere_kinds_are_only_picked_out_one_by_one() -> None:
    picked: dict[str, set[str]] = {}
    for file, node in choices():
        if isinstance(node, ast.Compare) and (compared := members(node, "Kind")):
            picked.setdefault(file.parts[0], set()).update(compared)
    assert picked == PICKED


def test_no_letters_of_kinds_are_compared() -> None:
    letters = set(map(str, Kind))
    for file, node in choices():
        if isinstance(node, ast.Compare) and not file.match(
            "util/sizes.py"
        ):  # B is for bytes there
            words = {
                n.value
                for n in ast.walk(node)
                if isinstance(n, ast.Constant) and isinstance(n.value, str)
            }
            assert not words & letters, f"{file}:{node.lineno}"


def unknown(enum: type[Any]) -> Any:
    """A member of an enum as if one had been added to it, and nothing said of it anywhere."""
    member = str.__new__(enum, "X")
    member._name_ = member._value_ = "X"
    return member


NEW, VALUE = unknown(Kind), unknown(ValueKind)
TASK = Task(0, NEW, 0)
HOW = layout([3])
A_ROW = Row(NEW, 0, 0, 0, 0, (), (0,))
STEP = Lowered((A_ROW,), (Buffer(Value(ValueKind.TENSOR, 0), 0, 4),), 0, (), ())


def placed(value: Value) -> None:
    placer = Placer(GRAPH, HOW.plan, optimizer())
    placer.begin()
    placer.perform(Operation(Kind.F, 0, 0, (value,), ()))


def expander() -> Expander:
    return Expander(GRAPH, Weights(GRAPH), set())


PLACES: dict[str, Callable[[], Any]] = {
    "what a task waits for": lambda: list(Waits(GRAPH, [HOW.plan])(TASK)),
    "whose sums a task adds to": lambda: list(
        sums_from([HOW.plan, layout([3]).plan], TASK._replace(microbatch=1))
    ),
    "a step": lambda: lower_step(GRAPH, [HOW], ((TASK,),), optimizer()),
    "a swap": lambda: list(swap([Block(TASK)], [], ((TASK,),), lambda task: (0, []))),
    "in flight": lambda: Schedule(name="new", lists=lambda S, M: ((TASK,),)).in_flight(1, 1),
    "updates": lambda: Schedule(
        name="new", lists=lambda S, M: ((TASK,),), synchronous=False
    ).with_updates(1, 1),
    "what a row takes": lambda: simulate(STEP, lambda row: 1.0),
    "a row's links": lambda: links_between_devices(STEP)(A_ROW),
    "stages' seconds": lambda: simulate_lists(((TASK,),), [StageLoad(1.0, 1.0)]),
    "versions": lambda: recorded(Use(NEW, 0, 0, 0)).table(),
    "a value that is read": lambda: placed(Value(VALUE)),
    "a layer's input": lambda: expander().read_by(Ref(VALUE, 0), 0),
    "a layer's output": lambda: list(
        expander().forward(Layer(0, "", (), (Ref(VALUE, 0),)), 0, HOW)
    ),
    "a value's owner": lambda: Buffer(Value(VALUE), 0, 4).owner,
}


def recorded(*uses: Use) -> VersionLedger:
    ledger = VersionLedger()
    ledger.record(uses, 0, 0)
    return ledger


@pytest.mark.parametrize("place", PLACES)
def test_a_kind_that_was_added_and_nothing_else_is_refused(place: str) -> None:
    with pytest.raises((AssertionError, KeyError, ValueError), match="X"):
        PLACES[place]()


def test_who_shows_kinds_or_counts_buffers_needs_to_know_nothing_of_them() -> None:
    assert str(A_ROW) == "0X0[layer 0]"
    assert (
        chrome_trace(Picture((Span("a", "0X0", 0.0, 1.0, NEW),)))["traceEvents"][-1]["cat"] == "X"
    )
    assert live([A_ROW], STEP.buffers, 0, (), ()).rows[0].frees == (0,)
