"""The timeline of a stream: the layout and the versions of weights of each micro-batch.

A span is a part of a stream that runs under one plan. Here the second span begins with
micro-batch 6:

    micro-batch   0 1 2 3 4 5 | 6 7 8 ...
    plan          A           | B

From the start of a span on, layers are at the places of the span's plan. A layer then reads the
version that the schedule's rule names for the layer's new stage. If that version no longer exists,
the layer reads the oldest version that its old stage has at the start of the step in which the span
begins.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from jvpipe.ir.kinds import KINDS, Kind
from jvpipe.ir.layers import LayerGraph
from jvpipe.ir.plan import Plan
from jvpipe.ir.task import Task, TaskLists
from jvpipe.lowering.layout import MicrobatchLayout
from jvpipe.lowering.order import Waits, sums_from
from jvpipe.lowering.splice import spliced
from jvpipe.lowering.stream.parts import parts, versions
from jvpipe.schedules.round_robin import RoundRobin, taking_turns
from jvpipe.schedules.schedule import Schedule


class PlanSpan(NamedTuple):
    """The layout of a stream's micro-batches from `start` on."""

    start: int
    layout: MicrobatchLayout


def _layouts_by_turn(layout: MicrobatchLayout) -> list[MicrobatchLayout]:
    """Returns the layouts of a span's first micro-batches, up to where they repeat.

    In each layout a stage has one device: the one whose turn it is.
    """
    plan = layout.plan
    layouts = []
    for m in range(math.lcm(*plan.replicas)):
        turn = plan.turn(m)
        # If no devices take turns, the layout itself is returned, to keep its cached properties.
        layouts.append(layout if turn is plan else replace(layout, plan=turn))
    return layouts


class StreamTimeline:
    """The plan and the weights of every micro-batch of a stream's first steps.

    `parts` has the task lists of each step and, as its last element, the lists of later tasks. If
    the stream ends there, those tasks drain it.

    Args:
        graph: the layers.
        spans: the layouts, and the micro-batches from which they apply; the first begins at 0.
        schedule: an asynchronous schedule.
        M: the number of micro-batches of a step.
        steps: the number of steps.
        drained: whether the stream ends after these steps.

    >>> from jvpipe.ir.plan import Plan
    >>> from jvpipe.ir.values import ValueKind
    >>> from jvpipe.schedules import find_schedule
    >>> from jvpipe.ir.layers import Array, Layer, Ref, Tensor
    >>> edge, loss = Ref(ValueKind.TENSOR, 0), Ref(ValueKind.LOSS, 0)
    >>> layers = Layer(0, "a", (), (edge,)), Layer(1, "b", (edge,), (loss,))
    >>> graph = LayerGraph(layers, (Tensor(Array("t", (), "float32", 4), 0, (1,), True),), ())
    >>> spans = [PlanSpan(0, MicrobatchLayout.of(graph, Plan.from_cuts([1, 1]), ()))]
    >>> timeline = StreamTimeline(graph, spans, find_schedule("pipedream"), 2, 3, drained=False)
    >>> [timeline.version(0, m, back=False) for m in range(4)]
    [0, 0, 1, 2]
    """

    def __init__(
        self,
        graph: LayerGraph,
        spans: Sequence[PlanSpan],
        schedule: Schedule,
        M: int,
        steps: int,
        *,
        drained: bool,
    ) -> None:
        self.graph, self.spans = graph, tuple(spans)
        self.schedule, self.M = schedule, M
        self.every = schedule.period(M)
        self._starts = [span.start for span in spans]
        self._layouts = [_layouts_by_turn(span.layout) for span in spans]
        self._stages = [span.layout.stage for span in spans]
        plans = [span.layout.plan for span in spans]
        schedules = [taking_turns(schedule, plan) for plan in plans]

        def lists(steps: int) -> list[TaskLists]:
            """Makes, for each span, the lists of a stream that only ever has the span's plan."""
            return [
                rule.with_updates(len(plan.stages), M, M * steps)
                for rule, plan in zip(schedules, plans, strict=True)
            ]

        # Micro-batches of the last step stay in flight for some more steps, which the tables cover.
        in_flight = max(RoundRobin(plan.replicas).in_flight[0] for plan in plans)
        longer = steps + 1 + -(-in_flight // M)
        self._tables = [versions(schedule, table, M) for table in lists(longer)]
        self._newest: dict[tuple[int, int], int] = {}  # by layer and micro-batch: see `settle`
        self.plans = [self.layout(m).plan for m in range((steps + 1) * M)]
        self.waits = Waits(graph, self.plans)
        open_ended = lists(steps + 1)
        ended = lists(steps)

        def lists_at(n: int) -> TaskLists:
            """Joins the lists of the spans that have begun by step n; later spans are left out."""
            begun = sum(span.start // M <= n for span in self.spans)
            return self._spliced(open_ended[:begun])

        last = self._spliced(ended if drained else open_ended)
        self.parts = parts(lists_at, M, steps, last, self._early)

    def _spliced(self, lists: Sequence[TaskLists]) -> TaskLists:
        """Joins the lists of the first spans."""
        whole = lists[0]
        for span, following in zip(self.spans[1:], lists[1:], strict=False):
            whole = spliced(whole, following, span.start)
        return whole

    def _early(self, part: TaskLists, rest: TaskLists) -> set[Task]:
        """Finds the tasks of later steps that must run within a step, because its tasks need them.

        They are updates at the old stages of layers that have moved, and the tasks that these
        updates wait for, directly or indirectly. The search ends, because it adds each task only
        once.
        """
        if len(self.spans) == 1:
            return set()
        later = {task for tasks in rest for task in tasks}
        early: set[Task] = set()
        waiting = [task for tasks in part for task in tasks]
        while waiting:
            task = waiting.pop()
            needed = {*self.waits(task), *self.versions(task)} & later - early
            early |= needed
            waiting += needed
        # A stage keeps the order of its backwards and updates. So those that precede an early task
        # are early, too.
        for tasks in rest:
            places = [i for i, task in enumerate(tasks) if task in early]
            end = max(places, default=-1) + 1
            early |= {task for task in tasks[:end] if task.kind != Kind.F}
        return early

    def _at(self, m: int) -> int:
        """Returns the number of the span that a micro-batch belongs to."""
        return bisect_right(self._starts, m) - 1

    def layout(self, m: int) -> MicrobatchLayout:
        """Returns the layout of a micro-batch, on the devices whose turn it is."""
        layouts = self._layouts[self._at(m)]
        return layouts[m % len(layouts)]

    def plan(self, m: int) -> Plan:
        """Returns the plan of a micro-batch, with all devices of its stages."""
        return self.spans[self._at(m)].layout.plan

    def replicas(self, layer: int, m: int) -> int:
        """Counts the devices that take turns with the micro-batches of a layer.

        Args:
            layer: the layer.
            m: the micro-batch whose plan is used.
        """
        stage = self.stage(layer, m)
        return len(self.plan(m).stages[stage].devices)

    def stage(self, layer: int, m: int) -> int:
        """Returns the stage of a layer in a micro-batch."""
        return self._stages[self._at(m)][layer]

    def version(self, layer: int, m: int, *, back: bool) -> int:
        """Returns the version of a layer's weights that is read for a micro-batch.

        Args:
            layer: the layer.
            m: the micro-batch.
            back: whether the backward reads it, rather than the forward.
        """
        version = self._by_rule(self._at(m), layer, m, back=back)
        if not back:
            version = max(version, self._newest.get((layer, m), 0))
        return version

    def _by_rule(
        self,
        n: int,
        layer: int,
        m: int,
        *,
        back: bool,
    ) -> int:
        """Returns the version by the rule of span n, but at least the oldest that still exists.

        Args:
            n: the number of the span.
            layer: the layer.
            m: the micro-batch.
            back: whether the backward reads the version, rather than the forward.
        """
        table = self._tables[n].backward if back else self._tables[n].forward
        version = table[self._stages[n][layer]][m]
        return max(version, self._oldest(n, layer))

    def _oldest(self, n: int, layer: int) -> int:
        """Returns the oldest version of a layer's weights that still exists when span n begins.

        It is the version that the previous span would have read for the first micro-batch of the
        step in which span n begins. Each call goes back to the previous span, so the recursion
        ends.
        """
        first = self.spans[n].start // self.M * self.M
        if n == 0 or first == 0:
            return 0
        return self._by_rule(n - 1, layer, first, back=False)

    def versions(self, task: Task) -> Iterator[Task]:
        """Yields the tasks that a task waits for because layers have changed stages.

        They are tasks of the layers' earlier stages. They make the weights that the task reads, or
        must add to the same sums of gradients first. In the first span there are no such tasks: no
        layer has moved yet, and each stage's list has its updates in order.
        """
        s, kind, m = task
        if len(self.spans) == 1 or m < self.spans[1].start:
            return
        back = KINDS[kind].back
        if m % self.every:
            yield from sums_from(self.plans, task)
        ends_update = (m + 1) % self.every == 0
        for layer in self.layout(m).plan.stages[s].layers:
            read: set[int] = set()
            if ends_update and back is not False:
                read.add(m // self.every)  # the version that the update takes
            if back is not None:
                read.add(self.version(layer, m, back=back))
            for version in read:
                maker = version * self.every - 1  # the micro-batch whose update made it
                if maker >= 0 and self.stage(layer, maker) != s:
                    yield Task(self.stage(layer, maker), Kind.U, maker)

    def settle(self, ordered: Sequence[Task]) -> None:
        """Fixes the versions that forwards read after a change of plan, if the schedule predicts.

        A schedule that predicts weights (XPipe) starts from the newest version. After a change of
        plan the rule's table no longer has that version, but the order of dispatch determines it.

        Args:
            ordered: all tasks of the stream in the order of their dispatch.
        """
        if not self.schedule.predicts or len(self.spans) == 1:
            return
        newest = dict.fromkeys(self._stages[0], 0)
        for s, kind, m in ordered:
            for layer in self.layout(m).plan.stages[s].layers:
                if kind == Kind.U:
                    newest[layer] = m // self.every + 1
                elif kind == Kind.F and m >= self.spans[1].start:
                    self._newest[layer, m] = newest[layer]
