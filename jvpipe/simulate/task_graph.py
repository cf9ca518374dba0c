"""The simulator's engine: tasks that wait for each other and take turns on resources.

A resource is anything that does one thing at a time: a device, a link, or several links that share
their bandwidth. There are two kinds:

    in order        serves tasks in the order of their numbers, as a device runs a list
    by readiness    serves the task that became ready first, as a link does; of tasks that became
                    ready at the same time, the one with the lower number

A task that occupies two links holds both from its start to its end, and the tasks that became ready
after it wait behind it on both.

On a resource of the first kind, each task waits for the task before it. Such waits are known before
the simulation, so only resources of the second kind have queues. If no task queues, a task starts
when the last task that it waits for has ended. Otherwise a heap holds the ready tasks, by the time
when they became ready, and the first task of the heap is started next. Its start is final: tasks
that become ready later queue behind it, so they cannot delay it.

Every task enters the heap at most once, so with T tasks and W waits a simulation takes time in
proportion to W + T log T. A million tasks take a few seconds: `python -m
experiments.planners.simulator` measures it.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import chain, pairwise, zip_longest

import numpy as np
from jaxtyping import Float

from jvpipe.ir.task import cannot_progress


class TaskGraph:
    """A graph of the tasks 0, 1, ...: which tasks each waits for, and which resources it occupies.

    How long tasks take is not part of the graph, so that one graph serves for many simulations.
    `fixed` is true if no task queues.

    Args:
        waits: for each task, the tasks that must have ended before it starts.
        occupies: for each task, its resources, numbered from 0; empty if it occupies none.
        in_order: the resources that serve in the order of the tasks' numbers.
        name: returns the name of a task in messages.

    Raises:
        ValueError: tasks wait for each other in a circle; the message names the circle.

    >>> graph = TaskGraph(waits=[[], [0], [0]], occupies=[(0,), (1,), (1,)], in_order=[0])
    >>> graph.starts_s([2.0, 3.0, 1.0])
    [0.0, 2.0, 5.0]
    """

    def __init__(
        self,
        waits: Sequence[Sequence[int]],
        occupies: Sequence[tuple[int, ...]],
        in_order: Collection[int],
        name: Callable[[int], str] = str,
    ) -> None:
        ordered = frozenset(in_order)
        groups = set(occupies)
        turns = {group: [r for r in group if r in ordered] for group in groups}
        queues = {group: [r for r in group if r not in ordered] for group in groups}
        self.occupies = occupies
        self.resources = 1 + max(chain(*groups), default=-1)
        self._queues = [queues[resources] for resources in occupies]
        self.fixed = not any(self._queues)
        last: dict[int, int] = {}  # for each resource that serves in order: its last task so far
        self._before: list[Sequence[int]] = []
        pairs = zip(occupies, waits, strict=True)
        for i, (resources, before) in enumerate(pairs):
            in_turn = turns[resources]
            if in_turn:
                previous = [last[r] for r in in_turn if r in last]
                before = (*before, *previous)
            self._before.append(before)
            for r in in_turn:
                last[r] = i
        # `_before` has the tasks that a task waits for, `_after` those that wait for it.
        waiting: list[list[int]] = [[] for _ in occupies]
        for i, needs in enumerate(self._before):
            for j in needs:
                waiting[j].append(i)
        # Python's garbage collector stops tracking tuples of numbers.
        self._after = list(map(tuple, waiting))
        # How many tasks each waits for, and those that wait for none.
        self._missing = [len(needs) for needs in self._before]
        self._first = [i for i, count in enumerate(self._missing) if not count]
        self._order = self._sorted()
        if len(self._order) == len(occupies):
            return
        try:
            TopologicalSorter(dict(enumerate(self._before))).prepare()
        except CycleError as error:
            # The error has the circle in the order in which the tasks would run.
            pairs = pairwise(reversed(error.args[1]))
            raise cannot_progress({name(i): [name(j)] for i, j in pairs}) from None

    def starts_s(self, seconds: Sequence[float]) -> list[float]:
        """Computes when each task starts; a task that takes no time does not queue.

        Args:
            seconds: how long each task takes.
        """
        return self._fixed(seconds) if self.fixed else self._queued(seconds)

    def _fixed(self, seconds: Sequence[float]) -> list[float]:
        """Computes starts without queues: a task starts when all that it waits for have ended."""
        starts = [0.0] * len(seconds)
        ends = [0.0] * len(seconds)
        before = self._before
        for i in self._order:
            start = 0.0
            for j in before[i]:
                if ends[j] > start:
                    start = ends[j]
            starts[i] = start
            ends[i] = start + seconds[i]
        return starts

    def _queued(self, seconds: Sequence[float]) -> list[float]:
        """Computes starts with queues: the task that became ready first is served first.

        `now` has the tasks whose starts are final. When such a task ends, other tasks may
        become ready. These enter the queue or, if they need no queue, `now`. The head of
        the queue is taken only when `now` is empty. Then each task that is not ready waits,
        directly or through others, for the end of a task in the queue. So it becomes ready later
        than the head did, and the head is served first.
        """
        starts = [0.0] * len(seconds)
        missing = self._missing.copy()  # falls to 0 as tasks end
        free = [0.0] * self.resources
        after, queues = self._after, self._queues
        queue: list[tuple[float, int]] = []  # the time when a task became ready, and its number
        now: list[int] = []
        for i in self._first:
            if queues[i] and seconds[i]:
                queue.append((0.0, i))
            else:
                now.append(i)
        while True:
            while now:
                i = now.pop()
                end = starts[i] + seconds[i]
                for j in after[i]:
                    if end > starts[j]:
                        starts[j] = end
                    missing[j] -= 1
                    if missing[j]:
                        continue
                    if queues[j] and seconds[j]:
                        heapq.heappush(queue, (starts[j], j))
                    else:
                        now.append(j)
            if not queue:
                return starts
            start, i = heapq.heappop(queue)
            for r in queues[i]:
                if free[r] > start:
                    start = free[r]
            starts[i] = start
            for r in queues[i]:
                free[r] = start + seconds[i]
            now.append(i)

    def many_starts_s(
        self,
        seconds: Float[np.ndarray, "tasks runs"],
    ) -> Float[np.ndarray, "tasks runs"]:
        """Computes `starts_s` for many runs at once; only for graphs in which no task queues.

        A run is a column of `seconds`.
        """
        assert self.fixed
        tasks, runs = seconds.shape
        starts = np.zeros((tasks, runs))
        ends = np.zeros((tasks + 1, runs))  # the last row stands for no task, and ends at 0
        for level, before in self._levels:
            starts[level] = ends[before].max(axis=0)
            ends[level] = starts[level] + seconds[level]
        return starts

    @cached_property
    def _levels(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each level of tasks, their numbers, and the numbers of those that each waits for.

        The level of a task is the number of tasks on the longest path to it. So a task waits only
        for tasks on lower levels, and all starts of a level are computed at once. The second array
        has a column for each task. Short columns are filled up with the number that stands for no
        task.
        """
        none = len(self._before)
        depth = [0] * none
        levels = defaultdict[int, list[int]](list)
        for i in self._order:
            below = [depth[j] for j in self._before[i]]
            depth[i] = 1 + max(below, default=-1)
            levels[depth[i]].append(i)
        arrays = []
        for level in levels.values():
            needs = [self._before[i] or (none,) for i in level]
            rows = list(zip_longest(*needs, fillvalue=none))
            arrays.append((np.array(level), np.array(rows)))
        return arrays

    def _sorted(self) -> list[int]:
        """Returns the tasks in an order in which each comes after all tasks that it waits for.

        Tasks in a circle, and tasks that wait for them, are left out.
        """
        missing = self._missing.copy()
        order = self._first.copy()
        for i in order:  # the list grows in the loop
            for j in self._after[i]:
                missing[j] -= 1
                if not missing[j]:
                    order.append(j)
        return order
