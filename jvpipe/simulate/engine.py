"""The simulator's engine: tasks that wait for each other and take turns on resources.

A resource is anything that does one thing at a time: a device, a link, several links that are one. Some serve their
tasks strictly in the order of their numbers (a device runs its list), the others in the order in which tasks become
ready (a link), of equals the lower number first. A task that occupies two links holds both from its start.

A million tasks take a few seconds: `python -m experiments.planners.simulator`.
"""

import heapq
from collections.abc import Callable, Collection, Sequence
from copy import copy
from functools import cached_property
from itertools import pairwise

import numpy as np
from jaxtyping import Float

from jvpipe.ir.task import cannot_progress

_Turns = tuple[tuple[int, ...], tuple[int, ...]]


class Work:
    """Tasks 0, 1, ...: what each waits for and what it occupies; how long they take is asked only when they run.

    Args:
        waits: per task, the tasks that must have ended before it starts.
        occupies: per task, its resources, numbered from 0; none for a task that disturbs nobody.
        in_order: the resources that serve in the order of the tasks' numbers.
        name: what a task is called in messages.

    Raises:
        ValueError: tasks wait for each other in a circle; it says which task waits for what.

    >>> work = Work(waits=[[], [0], [0]], occupies=[(0,), (1,), (1,)], in_order=[0])
    >>> work.starts_s([2.0, 3.0, 1.0])
    [0.0, 2.0, 5.0]
    """

    def __init__(
        self,
        waits: Sequence[Sequence[int]],
        occupies: Sequence[tuple[int, ...]],
        in_order: Collection[int],
        name: Callable[[int], str] = str,
    ) -> None:
        self._in_order = frozenset(in_order)
        turns = self._occupy(occupies)
        last: dict[int, int] = {}
        self._before: list[Sequence[int]] = []
        for i, (resources, needs) in enumerate(zip(occupies, waits, strict=True)):
            lists = turns[resources][0]
            before = (*needs, *[last[r] for r in lists if r in last]) if lists else needs
            self._before.append(before)
            for r in lists:
                last[r] = i
        self._after = _turned(self._before)
        self._order = self._sorted()
        if len(self._order) < len(occupies):
            raise self._stuck(name)

    def queueing(self, occupies: Sequence[tuple[int, ...]]) -> "Work":
        """The same tasks with other resources that serve by readiness; those that serve in order stay as they are."""
        work = copy(self)
        work._occupy(occupies)
        return work

    def _occupy(self, occupies: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], _Turns]:
        """Says what tasks occupy; gives the resources that serve in order, and the others, of all that are met."""
        turns = {resources: _turns(resources, self._in_order) for resources in set(occupies)}
        self.occupies = occupies
        self.resources = 1 + max((r for resources in turns for r in resources), default=-1)
        self._served = [
            turns[resources][1] for resources in occupies
        ]  # the resources for which a task queues
        self.fixed = not any(self._served)
        return turns

    def starts_s(self, seconds: Sequence[float]) -> list[float]:
        """When each task starts; a task of no seconds does not queue."""
        return self._fixed(seconds) if self.fixed else self._queued(seconds)

    def _fixed(self, seconds: Sequence[float]) -> list[float]:
        """Nobody queues: what is waited for decides."""
        starts, ends, before = [0.0] * len(seconds), [0.0] * len(seconds), self._before
        for i in self._order:
            start = 0.0
            for j in before[i]:
                if ends[j] > start:
                    start = ends[j]
            starts[i] = start
            ends[i] = start + seconds[i]
        return starts

    def _queued(self, seconds: Sequence[float]) -> list[float]:
        """Tasks that queue are served by readiness: nobody can become ready before the first who is."""
        starts, left = [0.0] * len(seconds), [len(needs) for needs in self._before]
        free, after, served = [0.0] * self.resources, self._after, self._served
        queue: list[tuple[float, int]] = []
        now: list[int] = []
        for i, count in enumerate(left):
            if not count:
                queue.append((0.0, i)) if served[i] and seconds[i] else now.append(i)
        while True:
            while now:
                i = now.pop()
                end = starts[i] + seconds[i]
                for j in after[i]:
                    if end > starts[j]:
                        starts[j] = end
                    left[j] -= 1
                    if not left[j]:
                        if served[j] and seconds[j]:
                            heapq.heappush(queue, (starts[j], j))
                        else:
                            now.append(j)
            if not queue:
                return starts
            start, i = heapq.heappop(queue)
            for r in served[i]:
                if free[r] > start:
                    start = free[r]
            starts[i] = start
            for r in served[i]:
                free[r] = start + seconds[i]
            now.append(i)

    def many_starts_s(
        self, seconds: Float[np.ndarray, "tasks runs"]
    ) -> Float[np.ndarray, "tasks runs"]:
        """`starts_s` for many runs at once; nobody may queue."""
        assert self.fixed
        tasks, runs = seconds.shape
        starts, ends = (
            np.zeros((tasks, runs)),
            np.zeros((tasks + 1, runs)),
        )  # the last row: waits for nothing
        for level, before in self._levels:
            starts[level] = ends[before].max(axis=1)
            ends[level] = starts[level] + seconds[level]
        return starts

    @cached_property
    def _levels(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Tasks that can be computed together, and per task what it waits for, filled up with a task that is none."""
        depth = [0] * len(self._before)
        levels: list[list[int]] = []
        for i in self._order:
            depth[i] = 1 + max([depth[j] for j in self._before[i]], default=-1)
            if depth[i] == len(levels):
                levels.append([])
            levels[depth[i]].append(i)
        arrays = []
        for level in levels:
            width = max(1, *(len(self._before[i]) for i in level))
            rows = [
                [*self._before[i], *[len(depth)] * (width - len(self._before[i]))] for i in level
            ]
            arrays.append((np.array(level), np.array(rows)))
        return arrays

    def _sorted(self) -> list[int]:
        """The tasks, each after all that it waits for; those in a circle are left out."""
        left = [len(needs) for needs in self._before]
        order = [i for i, count in enumerate(left) if not count]
        for i in order:
            for j in self._after[i]:
                left[j] -= 1
                if not left[j]:
                    order.append(j)
        return order

    def _stuck(self, name: Callable[[int], str]) -> ValueError:
        done = set(self._order)
        circle = self._circle(done)
        return cannot_progress(
            {name(i): [name(j)] for i, j in zip(circle, [*circle[1:], circle[0]], strict=True)}
        )

    def _circle(self, done: Collection[int]) -> list[int]:
        """Tasks of which each waits for the next, and the last for the first."""
        i = next(i for i in range(len(self._before)) if i not in done)
        path: dict[int, None] = {}
        while i not in path:
            path[i] = None
            i = next(j for j in self._before[i] if j not in done)
        passed = list(path)
        return passed[passed.index(i) :]


def _turned(before: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """For each task those that wait for it; in tuples of numbers, into which Python's collector does not look."""
    needs = np.array([j for needs in before for j in needs], dtype=np.int64)
    waiting = np.repeat(np.arange(len(before)), [len(needs) for needs in before])
    every = waiting[np.argsort(needs, kind="stable")].tolist()
    ends = np.cumsum(np.bincount(needs, minlength=len(before))).tolist()
    return [tuple(every[a:b]) for a, b in pairwise([0, *ends])]


def _turns(resources: Sequence[int], in_order: Collection[int]) -> _Turns:
    """Those that serve in order, and those that serve by readiness."""
    return tuple(r for r in resources if r in in_order), tuple(
        r for r in resources if r not in in_order
    )
