"""The course of a stream: the form in which each micro-batch runs, and the version of its weights that each layer reads.

A leg of the course begins at a micro-batch; from there on layers lie where its form's plan has them. A layer then reads
what the rule of its new stage says, but nothing older than what its old stage still had: that is gone.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from jvpipe.ir.layers import LayerGraph
from jvpipe.ir.task import Task, TaskLists
from jvpipe.schedules.lower import Form, sums_from
from jvpipe.schedules.schedule import Schedule
from jvpipe.schedules.splice import spliced
from jvpipe.schedules.stream import Versions, parts, versions


class Leg(NamedTuple):
    """From micro-batch `start` of a stream on, this is how they run."""

    start: int
    form: Form


class Course:
    """So many steps of M micro-batches; `drained`: and the stream ends there."""

    def __init__(
        self, graph: LayerGraph, legs: Sequence[Leg], schedule: Schedule, M: int, steps: int, *, drained: bool
    ) -> None:
        self.graph, self.legs, self.schedule, self.M = graph, tuple(legs), schedule, M
        self.every = schedule.period(M)
        self.count = steps * M
        lists = [schedule.with_updates(len(leg.form.plan.stages), M, steps + 1) for leg in legs]
        ended = [schedule.with_updates(len(leg.form.plan.stages), M, steps) for leg in legs] if drained else None
        self.parts = parts(self._whole(lists), M, steps, self._whole(ended) if ended else None)
        self.plans = [self.form(m).plan for m in range(self.count)]
        self._stages = [{i: s for s, found in enumerate(leg.form.plan.stages) for i in found.layers} for leg in legs]
        longer = steps if drained else steps + 1 + -(-max(len(leg.form.plan.stages) for leg in legs) // M)
        self._tables: list[Versions] = [
            versions(schedule, schedule.with_updates(len(leg.form.plan.stages), M, longer), M) for leg in legs
        ]

    def _whole(self, lists: Sequence[TaskLists]) -> TaskLists:
        found, *others = lists
        for leg, following in zip(self.legs[1:], others, strict=True):
            found = spliced(found, following, leg.start)
        return found

    def _at(self, m: int) -> int:
        """The number of a micro-batch's leg."""
        return max(n for n, leg in enumerate(self.legs) if leg.start <= m)

    def form(self, m: int) -> Form:
        """How a micro-batch runs."""
        return self.legs[self._at(m)].form

    def stage(self, layer: int, m: int) -> int:
        """Where a layer runs with a micro-batch."""
        return self._stages[self._at(m)][layer]

    def version(self, layer: int, m: int, *, back: bool) -> int:
        """The version of a layer's weights that its forward, or its backward, of a micro-batch reads."""
        return self._ruled(self._at(m), layer, m, back=back)

    def _ruled(self, leg: int, layer: int, m: int, *, back: bool) -> int:
        table = self._tables[leg].backward if back else self._tables[leg].forward
        return max(table[self._stages[leg][layer]][m], self._floors[leg][layer])

    @cached_property
    def _floors(self) -> list[dict[int, int]]:
        """By leg and layer, the oldest version that there still is when the leg's first step begins."""
        found = self._floors = [dict.fromkeys(self._stages[0], 0)]  # those of the legs before are asked for on the way
        for n, leg in enumerate(self.legs[1:], 1):
            step = leg.start // self.M
            done = {task for part in self.parts[:step] for tasks in part for task in tasks}
            first, floors = step * self.M, {}
            for layer in self._stages[0]:
                read = [self._ruled(n - 1, layer, first, back=False)] if step else [0]
                for j in range(first):
                    s = self.stage(layer, j)
                    if Task(s, "F", j) in done and Task(s, "B", j) not in done:
                        read.append(self.version(layer, j, back=True))
                floors[layer] = min(read)
            found.append(floors)
        return found

    def waits(self, task: Task) -> Iterator[Task]:
        """What a task of a layer that has changed stages waits for there: its weights, and its sums of gradients."""
        if len(self.legs) == 1:
            return
        s, kind, m = task
        if kind == "B" and m % self.every:
            yield from sums_from(self.plans, task)
        for layer in self.form(m).plan.stages[s].layers:
            read = {self.version(layer, m, back=kind == "B")} if kind != "U" else {m // self.every}
            for v in read:
                maker = v * self.every - 1
                if maker >= 0 and self.stage(layer, maker) != s:
                    yield Task(self.stage(layer, maker), "U", maker)
