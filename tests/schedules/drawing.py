"""Timelines as pictures: one line per stage, a cell of three characters per unit of time."""

import re

from jvpipe.ir.kinds import Kind
from jvpipe.ir.task import Task, TaskLists


def parse(drawing: str) -> dict[Task, int]:
    """The time slot of each task in a drawing whose lines begin with `stage <number>  `."""
    slots = {}
    for line in drawing.splitlines():
        if match := re.match(r"\s*stage (\d+)  (.*)", line):
            stage, cells = int(match[1]), match[2]
            for i in range(0, len(cells), 3):
                if cell := cells[i : i + 3].strip():
                    slots[Task(stage, Kind(cell[0]), int(cell[1:]))] = i // 3
    return slots


def started(lists: TaskLists) -> dict[Task, int]:
    """The slot in which each task starts when all take one slot, on a straight pipeline."""
    slots: dict[Task, int] = {}
    todo = [list(tasks) for tasks in lists]
    last = len(lists) - 1
    while any(todo):
        for stage, tasks in enumerate(todo):
            if not tasks:
                continue
            _, kind, m = tasks[0]
            needs = [lists[stage][i - 1] for i in [len(lists[stage]) - len(tasks)] if i]
            if kind == "F":
                needs += [Task(stage - 1, Kind.F, m)] * (stage > 0)
            else:
                needs += [Task(stage + 1, Kind.B, m) if stage < last else Task(stage, Kind.F, m)]
            if all(task in slots for task in needs):
                slots[tasks.pop(0)] = 1 + max([slots[task] for task in needs], default=-1)
    return slots
