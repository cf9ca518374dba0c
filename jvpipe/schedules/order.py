"""One order of dispatch for the lists of all stages: each as early as what it waits for allows."""

import heapq
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from jvpipe.ir.task import Task, TaskLists

Waits = Callable[[Task], Iterable[Task]]


def dispatch_order(
    lists: TaskLists,
    waits_for: Waits,
    seconds: Callable[[Task], float],
    device: Callable[[Task], int],
    done: Collection[Task] = (),
) -> list[Task]:
    """Merges task lists by simulated start time.

    Args:
        lists: per stage, its tasks in the order it runs them.
        waits_for: the tasks of other stages that a task needs the results of.
        seconds: how long a task takes; only ratios matter.
        device: where a task runs; stages on one device take turns.
        done: tasks that ran before.

    Raises:
        ValueError: the lists cannot progress; it says which task waits for what.
    """
    ended = dict.fromkeys(done, 0.0)
    free: dict[int, float] = {}
    at = [0] * len(lists)
    order = []
    ready: list[tuple[float, int, int]] = []

    def offer(stage: int) -> None:
        if at[stage] < len(lists[stage]):
            needed = list(waits_for(lists[stage][at[stage]]))
            if all(task in ended for task in needed):
                heapq.heappush(ready, (max([ended[t] for t in needed], default=0.0), -stage, stage))

    for stage in range(len(lists)):
        offer(stage)
    waiting = set(range(len(lists))) - {stage for *_, stage in ready}
    while ready:
        start, _, stage = heapq.heappop(ready)
        task = lists[stage][at[stage]]
        d = device(task)
        if start < free.get(d, 0.0):  # its device is busy until later: look again then
            heapq.heappush(ready, (free[d], -stage, stage))
            continue
        ended[task] = free[d] = start + seconds(task)
        order.append(task)
        at[stage] += 1
        for s in {*waiting, stage}:
            before = len(ready)
            offer(s)
            (waiting.discard if len(ready) > before else waiting.add)(s)
    stuck = [row[i] for row, i in zip(lists, at, strict=True) if i < len(row)]
    if stuck:
        raise cannot_progress({task: [t for t in waits_for(task) if t not in ended] for task in stuck})
    return order


def cannot_progress(missing: Mapping[Any, Iterable[Any]]) -> ValueError:
    """The error for tasks that wait for what never comes.

    >>> print(cannot_progress({"0B0": ["1B0"], "1B0": ["1F0"]}))
    the schedule cannot progress: 0B0 waits for 1B0; 1B0 waits for 1F0
    """
    why = "; ".join(f"{task} waits for {' '.join(map(str, others))}" for task, others in missing.items())
    return ValueError(f"the schedule cannot progress: {why}")
