"""A clock for lists per device: when each task runs if a device's F, I and W take so long, and what
is held meanwhile.

The chunks of a device share its seconds; backwards are whole on all of them, or in halves. It knows
nothing of how lists are made, and shares no code with the simulator.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from jvpipe.ir.kinds import Kind
from jvpipe.ir.task import Task, TaskLists

TICKS = 12
"""Of a unit of time, so that the share of each of 1 to 4 chunks is a whole number of them."""


@dataclass
class Clock:
    """Runs the lists of `devices` at once, a list each, whose stages are so many `chunks` of a
    device.
    """

    lists: TaskLists
    chunks: int
    seconds: Mapping[str, int]
    start: dict[Task, int] = field(default_factory=dict)
    end: dict[Task, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        todo = [list(tasks) for tasks in self.lists]
        took = {kind: TICKS * seconds // self.chunks for kind, seconds in self.seconds.items()}
        free = [0] * len(todo)
        while any(todo):
            before = len(self.end)
            for d, tasks in enumerate(todo):
                while tasks and all(map(self.end.__contains__, needs := self._needs(tasks[0]))):
                    task = tasks.pop(0)
                    self.start[task] = max([free[d], *map(self.end.__getitem__, needs)])
                    self.end[task] = free[d] = self.start[task] + took[task.kind]
            assert len(self.end) > before, f"nothing can run: {[tasks[:1] for tasks in todo]}"

    def _needs(self, task: Task) -> list[Task]:
        s, kind, m = task
        if kind == Kind.F:
            return [Task(s - 1, Kind.F, m)] if s else []
        if kind == Kind.W:
            return [Task(s, Kind.I, m)]
        last = s == self.chunks * len(self.lists) - 1
        return [Task(s, Kind.F, m), *([] if last else [Task(s + 1, kind, m)])]

    @property
    def step(self) -> Fraction:
        """From the first start to the last end."""
        return Fraction(max(self.end.values()), TICKS)

    @property
    def period(self) -> Fraction:
        """How far apart steps are on a stream: no device waits for another between them."""
        ran = [
            (min(self.start[t] for t in tasks), max(self.end[t] for t in tasks))
            for tasks in self.lists
        ]
        return Fraction(max(last - first for first, last in ran), TICKS)

    def peaks(self, between: Fraction | int = 1) -> list[Fraction]:
        """What each device holds at most, in micro-batches of a device; `between` is that which W
        needs after I.
        """
        return [_peak(tasks, Fraction(between), self.chunks) for tasks in self.lists]


def _peak(tasks: tuple[Task, ...], between: Fraction, chunks: int) -> Fraction:
    held = most = Fraction(0)
    for task in tasks:
        most = max(most, held)
        held += {"F": Fraction(1), "B": Fraction(-1), "I": between - 1, "W": -between}[task.kind]
    assert held == 0
    return max(most, held) / chunks


def letters(lists: TaskLists) -> list[str]:
    """Lists as the tables have them: no stages, but small letters for the second chunk."""
    return [" ".join(_letter(task, len(lists)) for task in tasks) for tasks in lists]


def _letter(task: Task, devices: int) -> str:
    letter = str(task.kind)
    return f"{letter if task.stage < devices else letter.lower()}{task.microbatch}"


def drawn(lists: TaskLists, clock: Clock) -> str:
    """A timeline: a line per device, three characters per unit of time."""
    lines = []
    for d, tasks in enumerate(lists):
        line = f"device {d}  "
        for task in tasks:
            line = line.ljust(10 + 3 * clock.start[task] * clock.chunks // TICKS) + _letter(
                task, len(lists)
            )
        lines.append(line)
    return "\n".join(lines)


def drawings(doc: str) -> list[str]:
    """The timelines in a docstring, each a run of lines that begin with `device`."""
    found = re.findall(r"(?:^ *device \d+  .*\n)+", doc, re.MULTILINE)
    return ["\n".join(line.strip() for line in one.splitlines()) for one in found]


def table(lists: str) -> list[str]:
    """The lists of a table whose lines begin with a device's number."""
    return [line.split(maxsplit=1)[1] for line in lists.strip().splitlines()]


def checked_order(lists: TaskLists, chunks: int, microbatches: int) -> None:
    """Asserts that each stage runs each kind in ascending order, on one device, and that a clock
    gets through.
    """
    seen: dict[tuple[int, str], list[int]] = {}
    places: dict[int, set[int]] = {}
    for d, tasks in enumerate(lists):
        for stage, kind, m in tasks:
            seen.setdefault((stage, kind), []).append(m)
            places.setdefault(stage, set()).add(d)
    kinds = {kind for _, kind in seen}
    assert kinds in ({"F", "B"}, {"F", "I", "W"})
    assert set(seen) == {(stage, kind) for stage in range(chunks * len(lists)) for kind in kinds}
    assert all(one == list(range(microbatches)) for one in seen.values())
    assert all(len(one) == 1 for one in places.values())
    Clock(lists, chunks, {"F": 1, "B": 2, "I": 1, "W": 1})
