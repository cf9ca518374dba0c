"""The timeline of a stream: the layout in which each micro-batch runs, and the versions of weights that it reads.

    micro-batch   0 1 2 3 4 5 | 6 7 8 ...
    plan          A           | B             two spans; the second begins at micro-batch 6

From the start of a span on, layers lie where its plan has them. A layer then reads what the rule of its new stage says,
but nothing older than what its old stage would have read next: that is gone.
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


def _turns(plan: Plan) -> list[Plan]:
    """The plans of micro-batches until they come round."""
    return [plan.turn(m) for m in range(math.lcm(*plan.replicas))]


class StreamTimeline:
    """The plan and the weights of every micro-batch of a stream's first steps.

    `parts` are the lists of each step, and last those of the end, or of what would come.

    Args:
        graph: the layers.
        spans: the layouts, and the micro-batches from which they hold; the first from 0.
        schedule: an asynchronous one.
        M: micro-batches of a step.
        steps: how many there are.
        drained: whether the stream ends with them.

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
        self.graph, self.spans, self.schedule, self.M = graph, tuple(spans), schedule, M
        self._starts = [span.start for span in spans]
        self.every = schedule.period(M)
        plans = [span.layout.plan for span in spans]
        counts = [RoundRobin(plan.replicas).in_flight[0] for plan in plans]
        turns = [(len(plan.stages), taking_turns(schedule, plan)) for plan in plans]
        self._turns = [
            [span.layout if one is plan else replace(span.layout, plan=one) for one in _turns(plan)]
            for span, plan in zip(spans, plans, strict=True)
        ]
        self._stages = [
            {i: s for s, part in enumerate(span.layout.plan.stages) for i in part.layers}
            for span in spans
        ]
        longer = steps + 1 + -(-max(counts) // M)
        self._tables = [versions(schedule, each.with_updates(S, M, longer), M) for S, each in turns]
        self._newest: dict[tuple[int, int], int] = {}
        self.plans = [self.layout(m).plan for m in range((steps + 1) * M)]
        self.waits = Waits(graph, self.plans)
        more, ended = (
            [each.with_updates(S, M, n) for S, each in turns] for n in (steps + 1, steps)
        )

        def known(n: int) -> TaskLists:
            return self._whole(more[: sum(span.start // M <= n for span in spans)])

        self.parts = parts(known, M, steps, self._whole(ended if drained else more), self._early)

    def _whole(self, lists: Sequence[TaskLists]) -> TaskLists:
        whole, *others = lists
        for span, following in zip(self.spans[1:], others, strict=False):
            whole = spliced(whole, following, span.start)
        return whole

    def _early(self, part: TaskLists, rest: TaskLists) -> set[Task]:
        """Finds the tasks of later steps that a step needs: updates of layers where they were, before they are read."""
        later = {task for tasks in rest for task in tasks}
        wanted: set[Task] = set()
        waiting = [task for tasks in part for task in tasks] if len(self.spans) > 1 else []
        while waiting:
            task = waiting.pop()
            needed = {
                other for other in (*self.waits(task), *self.versions(task)) if other in later
            } - wanted
            wanted |= needed
            waiting += needed
        for tasks in rest:  # backwards and updates keep their order
            last = max([i for i, task in enumerate(tasks) if task in wanted], default=-1)
            wanted |= {task for task in tasks[: last + 1] if task.kind != Kind.F}
        return wanted

    def _at(self, m: int) -> int:
        """The number of a micro-batch's span."""
        return bisect_right(self._starts, m) - 1

    def layout(self, m: int) -> MicrobatchLayout:
        """The layout of a micro-batch; where the devices of a stage take turns, on those whose turn it is."""
        turns = self._turns[self._at(m)]
        return turns[m % len(turns)]

    def plan(self, m: int) -> Plan:
        """The plan of a micro-batch, with all devices of its stages."""
        return self.spans[self._at(m)].layout.plan

    def replicas(self, layer: int, m: int) -> int:
        """The devices that take turns with the micro-batches of a layer."""
        return len(self.plan(m).stages[self.stage(layer, m)].devices)

    def stage(self, layer: int, m: int) -> int:
        """The stage of a layer with a micro-batch."""
        return self._stages[self._at(m)][layer]

    def version(self, layer: int, m: int, *, back: bool) -> int:
        """The version of a layer's weights that its forward, or its backward, of a micro-batch reads.

        Args:
            layer: whose weights.
            m: the micro-batch.
            back: of the backward rather than the forward.
        """
        ruled = self._ruled(self._at(m), layer, m, back=back)
        return ruled if back else max(ruled, self._newest.get((layer, m), 0))

    def _ruled(self, n: int, layer: int, m: int, *, back: bool) -> int:
        table = self._tables[n].backward if back else self._tables[n].forward
        return max(table[self._stages[n][layer]][m], self._floor(n, layer))

    def _floor(self, n: int, layer: int) -> int:
        """The oldest version of all of a layer's weights that there is when a span's first step begins."""
        first = self.spans[n].start // self.M * self.M
        return self._ruled(n - 1, layer, first, back=False) if n and first else 0

    def versions(self, task: Task) -> Iterator[Task]:
        """Yields what a task waits for where layers have changed stages: their weights, and their sums of gradients."""
        s, kind, m = task
        if m < self.spans[min(1, len(self.spans) - 1)].start:
            return
        back = KINDS[kind].back
        if m % self.every:
            yield from sums_from(self.plans, task)
        for layer in self.layout(m).plan.stages[s].layers:
            read = {m // self.every} if back is not False and (m + 1) % self.every == 0 else set()
            if back is not None:
                read.add(self.version(layer, m, back=back))
            for v in read:
                maker = v * self.every - 1
                if maker >= 0 and self.stage(layer, maker) != s:
                    yield Task(self.stage(layer, maker), Kind.U, maker)

    def settle(self, ordered: Sequence[Task]) -> None:
        """Fixes, by this order, the newest versions that forwards after a change read, if these predict."""
        if not self.schedule.predicts or len(self.spans) == 1:
            return
        made = dict.fromkeys(self._stages[0], 0)
        for s, kind, m in ordered:
            for layer in self.layout(m).plan.stages[s].layers:
                if kind == Kind.U:
                    made[layer] = m // self.every + 1
                elif kind == Kind.F and m >= self.spans[1].start:
                    self._newest[layer, m] = made[layer]
