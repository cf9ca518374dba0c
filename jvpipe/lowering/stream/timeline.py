"""The timeline of a stream: the layout in which each micro-batch runs, and the versions of weights that it reads.

    micro-batch   0 1 2 3 4 5 | 6 7 8 ...
    plan          A           | B             two spans; the second begins at micro-batch 6

From the start of a span on, layers lie where its plan has them. A layer then reads what the rule of its new stage says,
but nothing older than what its old stage would have read next: that is gone.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jvpipe.ir.kinds import KINDS, Kind
from jvpipe.ir.layers import LayerGraph
from jvpipe.ir.task import Task, TaskLists
from jvpipe.lowering.layout import MicrobatchLayout
from jvpipe.lowering.order import Waits, sums_from
from jvpipe.lowering.splice import spliced
from jvpipe.lowering.stream.parts import parts, versions
from jvpipe.schedules.schedule import Schedule


class PlanSpan(NamedTuple):
    """From micro-batch `start` of a stream on, this is how they run."""

    start: int
    layout: MicrobatchLayout


class StreamTimeline:
    """So many steps of M micro-batches; `drained`: and the stream ends there.

    `parts` are the lists of each step, and last those of the end, or of what would come.
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
        counts = [len(span.layout.plan.stages) for span in spans]
        self._stages = [
            {i: s for s, found in enumerate(span.layout.plan.stages) for i in found.layers} for span in spans
        ]
        longer = steps + 1 + -(-max(counts) // M)
        self._tables = [versions(schedule, schedule.with_updates(S, M, longer), M) for S in counts]
        self._newest: dict[tuple[int, int], int] = {}
        self.plans = [self.layout(m).plan for m in range((steps + 1) * M)]
        self.waits = Waits(graph, self.plans)
        more, ended = ([schedule.with_updates(S, M, n) for S in counts] for n in (steps + 1, steps))

        def known(n: int) -> TaskLists:
            return self._whole(more[: sum(span.start // M <= n for span in spans)])

        self.parts = parts(known, M, steps, self._whole(ended if drained else more), self._early)

    def _whole(self, lists: Sequence[TaskLists]) -> TaskLists:
        found, *others = lists
        for span, following in zip(self.spans[1:], others, strict=False):
            found = spliced(found, following, span.start)
        return found

    def _early(self, part: TaskLists, rest: TaskLists) -> set[Task]:
        """What a step needs of later ones: the update of a layer where it was, before it is read where it is."""
        later = {task for tasks in rest for task in tasks}
        wanted: set[Task] = set()
        waiting = [task for tasks in part for task in tasks] if len(self.spans) > 1 else []
        while waiting:
            task = waiting.pop()
            found = {other for other in (*self.waits(task), *self.versions(task)) if other in later} - wanted
            wanted |= found
            waiting += found
        for tasks in rest:  # backwards and updates keep their order
            last = max([i for i, task in enumerate(tasks) if task in wanted], default=-1)
            wanted |= {task for task in tasks[: last + 1] if task.kind != Kind.F}
        return wanted

    def _at(self, m: int) -> int:
        """The number of a micro-batch's span."""
        return bisect_right(self._starts, m) - 1

    def layout(self, m: int) -> MicrobatchLayout:
        """How a micro-batch runs."""
        return self.spans[self._at(m)].layout

    def stage(self, layer: int, m: int) -> int:
        """Where a layer runs with a micro-batch."""
        return self._stages[self._at(m)][layer]

    def version(self, layer: int, m: int, *, back: bool) -> int:
        """The version of a layer's weights that its forward, or its backward, of a micro-batch reads."""
        found = self._ruled(self._at(m), layer, m, back=back)
        return found if back else max(found, self._newest.get((layer, m), 0))

    def _ruled(self, n: int, layer: int, m: int, *, back: bool) -> int:
        table = self._tables[n].backward if back else self._tables[n].forward
        return max(table[self._stages[n][layer]][m], self._floor(n, layer))

    def _floor(self, n: int, layer: int) -> int:
        """The oldest version of all of a layer's weights that there is when a span's first step begins."""
        first = self.spans[n].start // self.M * self.M
        return self._ruled(n - 1, layer, first, back=False) if n and first else 0

    def versions(self, task: Task) -> Iterator[Task]:
        """What a task of a layer that has changed stages waits for there: its weights, and its sums of gradients."""
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
        """Where forwards predict by what the newest update did, those after a change read that: by this order."""
        if not self.schedule.predicts or len(self.spans) == 1:
            return
        made = dict.fromkeys(self._stages[0], 0)
        for s, kind, m in ordered:
            for layer in self.layout(m).plan.stages[s].layers:
                if kind == Kind.U:
                    made[layer] = m // self.every + 1
                elif kind == Kind.F and m >= self.spans[1].start:
                    self._newest[layer, m] = made[layer]
