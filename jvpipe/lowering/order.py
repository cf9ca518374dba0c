"""One order of dispatch for the lists of all devices: each task as early as what it waits for allows."""

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from jvpipe.ir.kinds import KINDS, Kind
from jvpipe.ir.layers import LayerGraph
from jvpipe.ir.plan import Plan
from jvpipe.ir.task import Task, TaskLists, cannot_progress
from jvpipe.ir.values import ValueKind


def dispatch_order(
    lists: TaskLists,
    waits_for: Callable[[Task], Iterable[Task]],
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

    >>> lists = tuple(tuple(Task(s, kind, 0) for kind in (Kind.F, Kind.B)) for s in range(2))
    >>> needs = {Task(1, Kind.F, 0): [Task(0, Kind.F, 0)], Task(0, Kind.B, 0): [Task(1, Kind.B, 0)]}
    >>> order = dispatch_order(lists, lambda task: needs.get(task, []), lambda task: 1.0, lambda task: task.stage)
    >>> [str(task) for task in order]
    ['0F0', '1F0', '1B0', '0B0']
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
        raise cannot_progress(
            {task: [t for t in waits_for(task) if t not in ended] for task in stuck}
        )
    return order


class _Neighbours:
    """Under a plan, the stages that a stage waits for: `before` its forward, `after` its forward in its backward."""

    def __init__(self, graph: LayerGraph, plan: Plan) -> None:
        self.stage = {layer: s for s, members in enumerate(plan.stages) for layer in members.layers}
        self.devices = [members.devices[0] for members in plan.stages]
        self.before: list[set[int]] = [set() for _ in plan.stages]
        self.after: list[set[int]] = [set() for _ in plan.stages]
        stage = self.stage
        for tensor in graph.tensors:
            for reader in tensor.readers:
                if stage[reader] != stage[tensor.producer]:
                    self.before[stage[reader]].add(stage[tensor.producer])
                    if tensor.differentiable:
                        self.after[stage[tensor.producer]].add(stage[reader])
        for parameter in (
            graph.parameters
        ):  # the owner sends each version on, and waits for its readers' gradients
            for reader in () if parameter.frozen else parameter.readers:
                if stage[reader] != stage[parameter.owner]:
                    self.before[stage[reader]].add(stage[parameter.owner])
                    self.after[stage[parameter.owner]].add(stage[reader])


class Waits:
    """The tasks that tasks wait for, for values and model state.

    Args:
        graph: the layers.
        plans: those of each micro-batch.
        split: the stages and micro-batches whose backward is split: I gives what others wait for.
    """

    def __init__(
        self,
        graph: LayerGraph,
        plans: Sequence[Plan],
        split: Collection[tuple[int, int]] = frozenset(),
    ) -> None:
        self._split = split
        known = {id(plan): _Neighbours(graph, plan) for plan in plans}
        self.at = [known[id(plan)] for plan in plans]
        writer = {k: layer.id for layer in graph.layers for k in layer.writing(ValueKind.STATE)}
        self._carried = [
            (layer.id, writer[k])
            for layer in graph.layers
            for k in layer.reading(ValueKind.STATE)
            if k in writer
        ]

    def __call__(self, task: Task) -> Iterator[Task]:
        """The tasks whose results a task reads."""
        s, kind, m = task
        here = self.at[m]
        match kind:
            case Kind.F:
                yield from (Task(p, Kind.F, m) for p in here.before[s])
                if m:
                    there = {
                        self.at[m - 1].stage[w]
                        for layer, w in self._carried
                        if here.stage[layer] == s
                    }
                    yield from (Task(w, Kind.F, m - 1) for w in there if w != s)
            case Kind.B | Kind.I:
                yield Task(s, Kind.F, m)
                yield from (
                    Task(p, Kind.I if (p, m) in self._split else Kind.B, m) for p in here.after[s]
                )
            case Kind.W:
                yield Task(s, Kind.I, m)
            case Kind.U:
                return  # it follows its stage's backward in the list
            case _:
                raise AssertionError(f"nobody says what {task} waits for")


def order(
    waits: Waits,
    lists: TaskLists,
    done: Collection[Task] = (),
    waits_too: Callable[[Task], Iterable[Task]] = lambda task: (),
) -> list[Task]:
    """The tasks of all stages in one order in which they can be dispatched: as if all stages were equally fast.

    The order follows from the plan alone, never from measured seconds: what a device holds when depends on it.

    Args:
        waits: for values.
        lists: the tasks of each stage.
        done: the tasks before.
        waits_too: what a task waits for beside: versions of the weights, sums of gradients.
    """

    def waits_for(task: Task) -> Iterator[Task]:
        yield from waits(task)
        yield from waits_too(task)

    def task_s(task: Task) -> float:
        return KINDS[task.kind].weight

    def device(task: Task) -> int:
        return waits.at[task.microbatch].devices[task.stage]

    return dispatch_order(lists, waits_for, task_s, device, done)


def sums_from(plans: Sequence[Plan], task: Task) -> Iterator[Task]:
    """Yields the tasks of other stages that have to add to the same sums of gradients before a task does."""
    s, kind, m = task
    if KINDS[kind].accumulates and m and plans[m] is not plans[m - 1]:
        there = {plans[m - 1].stage_of(layer) for layer in plans[m].stages[s].layers}
        yield from (Task(p, kind, m - 1) for p in there if p != s)
