"""Merges the task lists of all stages into one order of dispatch, by simulated start times.

The controller dispatches all tasks from one thread, so the lists of all stages have to become one
list. Its order is the one in which the tasks would start if every stage were equally fast. In this
drawing each column is one unit of time. A forward takes one unit and a backward two:

    stage 0   F0 F1       B0 B0 F2 B1 B1
    stage 1      F0 B0 B0 F1 B1 B1 F2

    the one list    0F0 0F1 1F0 1B0 0B0 1F1 1B1 0F2 0B1 1F2 ...

The start times are simulated. Once a task has started, its end is known. The next task of a list
enters a queue when the ends of all tasks that it waits for are known. It can start at the latest of
these ends, or when its device is free if that is later. Each turn of the loop starts the task of
the queue that can start first. The loop ends, because each turn starts another task.

Several tasks may be able to start at the same time. Backwards are then dispatched before forwards.
Backwards send to earlier stages, so the order among them is from the last list to the first.
Forwards send to later devices, so the order among them is from the first device to the last (on one
device, from its last list to its first). In both orders, a device that sends comes before the
device that receives. This saves time: a copy needs a new buffer on the receiving GPU, and waits for
all work that this GPU got before the buffer was made. In this order, that work does not yet include
the receiver's task.
"""

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from jvpipe.ir.kinds import KINDS, Kind
from jvpipe.ir.layers import LayerGraph
from jvpipe.ir.plan import Plan
from jvpipe.ir.task import Task, TaskLists, cannot_progress
from jvpipe.ir.values import ValueKind
from jvpipe.lowering.layout import stages_of


class _Queue:
    """The tasks whose inputs arrive at a known time, at most one task from each list.

    Args:
        device: returns the device of a task.
    """

    def __init__(self, device: Callable[[Task], int]) -> None:
        self._device = device
        self._free: dict[int, float] = defaultdict(float)  # by device: when it is free
        # Entries are compared by start, then rank, then minus the number of the list. This is the
        # order that the top of the file describes. The start is the earliest possible one.
        self._heap: list[tuple[float, int, int, Task]] = []

    def put(self, number: int, task: Task, arrival_s: float) -> None:
        """Puts a task into the queue.

        Args:
            number: the number of its list.
            task: the task.
            arrival_s: when the last of its inputs arrives.
        """
        is_forward = KINDS[task.kind].in_flight > 0
        rank = 1 + self._device(task) if is_forward else 0
        heapq.heappush(self._heap, (arrival_s, rank, -number, task))

    def start(self, seconds: Callable[[Task], float]) -> tuple[int, Task, float]:
        """Takes the task that can start first, and starts it.

        A device may have become busy since a task was put into the queue. Such a task goes back
        into the queue, with the time at which its device is free. No device becomes busy in this
        loop, so each task goes back at most once, and the loop ends.

        Args:
            seconds: returns how long a task takes.

        Returns:
            The number of the task's list, the task, and the time at which it ends.
        """
        while True:
            start_s, rank, turn, task = heapq.heappop(self._heap)
            d = self._device(task)
            if self._free[d] <= start_s:
                self._free[d] = start_s + seconds(task)
                return -turn, task, self._free[d]
            heapq.heappush(self._heap, (self._free[d], rank, turn, task))

    def __bool__(self) -> bool:
        return bool(self._heap)


def dispatch_order(
    lists: TaskLists,
    waits_for: Callable[[Task], Iterable[Task]],
    seconds: Callable[[Task], float],
    device: Callable[[Task], int],
    done: Collection[Task] = (),
) -> list[Task]:
    """Merges task lists by simulated start time.

    Args:
        lists: for each stage, or each device of several stages, its tasks in the order in which it
            runs them.
        waits_for: returns the tasks of other stages whose results a task needs.
        seconds: returns how long a task takes; only ratios matter.
        device: returns the device of a task; a device runs one task at a time.
        done: tasks that ran before.

    Raises:
        ValueError: tasks wait for each other; the message says which wait for which.

    >>> lists = tuple(tuple(Task(s, kind, 0) for kind in (Kind.F, Kind.B)) for s in range(2))
    >>> needs = {Task(1, Kind.F, 0): [Task(0, Kind.F, 0)], Task(0, Kind.B, 0): [Task(1, Kind.B, 0)]}
    >>> order = dispatch_order(lists, lambda task: needs.get(task, []), lambda task: 1.0, lambda task: task.stage)
    >>> [str(task) for task in order]
    ['0F0', '1F0', '1B0', '0B0']
    """
    ended = dict.fromkeys(done, 0.0)
    left = [deque(tasks) for tasks in lists]
    waiting = set(range(len(lists)))  # the lists whose next task is not in the queue
    queue = _Queue(device)
    order: list[Task] = []
    while True:
        for number in tuple(waiting):
            if not left[number]:
                continue
            task = left[number][0]
            needed = list(waits_for(task))
            if all(other in ended for other in needed):
                arrival_s = max([ended[other] for other in needed], default=0.0)
                queue.put(number, task, arrival_s)
                waiting.remove(number)
        if not queue:
            break
        number, task, end_s = queue.start(seconds)
        ended[task] = end_s
        order.append(task)
        left[number].popleft()
        waiting.add(number)
    _check_none_left(left, waits_for, ended)
    return order


def _check_none_left(
    left: Iterable[Sequence[Task]],
    waits_for: Callable[[Task], Iterable[Task]],
    ended: Collection[Task],
) -> None:
    """Checks that no task is left when no task can start any more.

    Args:
        left: the tasks of each list that have not started.
        waits_for: returns the tasks that a task waits for.
        ended: the tasks that have started, whose ends are known.

    Raises:
        ValueError: tasks are left, so they wait for each other.
    """
    missing: dict[Task, list[Task]] = {}
    for tasks in filter(None, left):
        missing[tasks[0]] = [other for other in waits_for(tasks[0]) if other not in ended]
    if missing:
        raise cannot_progress(missing)


class _Neighbors:
    """The stages that each stage waits for under a plan.

    A stage's forward waits for the forwards of the stages in `before`. Its backward waits for the
    backwards of the stages in `after`. Edges (tensors between layers) connect stages, and so do
    tied parameters: the owner of such a parameter sends each version to the other readers, and the
    owner's update takes the gradients of all readers.
    """

    def __init__(self, graph: LayerGraph, plan: Plan) -> None:
        self.stage = stages_of(plan)
        self.devices = [members.devices[0] for members in plan.stages]
        self.before: list[set[int]] = [set() for _ in plan.stages]
        self.after: list[set[int]] = [set() for _ in plan.stages]
        for tensor in graph.tensors:
            self._connect(
                tensor.producer,
                tensor.readers,
                back=tensor.differentiable,
            )
        for parameter in graph.parameters:
            if not parameter.frozen:
                self._connect(parameter.owner, parameter.readers, back=True)

    def _connect(self, source: int, readers: Iterable[int], *, back: bool) -> None:
        """Notes that readers wait for a layer's value; with `back`, the layer waits for readers.

        Args:
            source: the layer that makes the value.
            readers: the layers that read it.
            back: whether the layer's backward waits for the readers' backwards.
        """
        s = self.stage[source]
        for reader in readers:
            r = self.stage[reader]
            if r != s:
                self.before[r].add(s)
                if back:
                    self.after[s].add(r)


class Waits:
    """A function that finds the tasks whose results a task reads: values and model state.

    Model state is what layers carry from one micro-batch to the next, such as running means.

    Args:
        graph: the layers.
        plans: the plan of each micro-batch.
        split: the pairs of a stage and a micro-batch whose backward is split in I and W. Other
            stages wait for I, which gives the cotangents.
    """

    def __init__(
        self,
        graph: LayerGraph,
        plans: Sequence[Plan],
        split: Collection[tuple[int, int]] = frozenset(),
    ) -> None:
        self._split = split
        # Most micro-batches share a plan.
        neighbors = {id(plan): _Neighbors(graph, plan) for plan in plans}
        self.at = [neighbors[id(plan)] for plan in plans]
        writer: dict[int, int] = {}  # by leaf of the model state: the layer that writes it
        for layer in graph.layers:
            writer |= dict.fromkeys(layer.writing(ValueKind.STATE), layer.id)
        self._carried: list[tuple[int, int]] = []  # a layer that reads model state, and its writer
        for layer in graph.layers:
            for k in layer.reading(ValueKind.STATE):
                if k in writer:
                    self._carried.append((layer.id, writer[k]))

    def __call__(self, task: Task) -> Iterator[Task]:
        """Yields the tasks whose results a task reads."""
        s, kind, m = task
        here = self.at[m]
        match kind:
            case Kind.F:
                for p in here.before[s]:
                    yield Task(p, Kind.F, m)
                if m:
                    yield from self._state_writers(s, m)
            case Kind.B | Kind.I:
                yield Task(s, Kind.F, m)
                for p in here.after[s]:
                    half = Kind.I if (p, m) in self._split else Kind.B
                    yield Task(p, half, m)
            case Kind.W:
                yield Task(s, Kind.I, m)
            case Kind.U:
                return  # an update follows its stage's backward in the list
            case _:
                raise AssertionError(f"the tasks that {task} waits for are not defined")

    def _state_writers(self, s: int, m: int) -> Iterator[Task]:
        """Yields the forwards of micro-batch m - 1 that write model state which stage s reads."""
        here = self.at[m].stage
        before = self.at[m - 1].stage
        writers = [writer for reader, writer in self._carried if here[reader] == s]
        stages = {before[writer] for writer in writers}
        for w in stages:
            if w != s:
                yield Task(w, Kind.F, m - 1)


def order(
    waits: Waits,
    lists: TaskLists,
    done: Collection[Task] = (),
    waits_too: Callable[[Task], Iterable[Task]] = lambda task: (),
) -> list[Task]:
    """Returns the tasks of all stages in one order of dispatch, as if all stages were equally fast.

    The order decides which buffers a device holds at each moment. A plan's peak of memory has to be
    known before anything runs, so the order follows from the plan and never from measured seconds.

    Args:
        waits: finds the tasks whose results a task reads.
        lists: the tasks of each stage or device.
        done: tasks that ran before.
        waits_too: finds more tasks that a task waits for: tasks that make a version of weights that
            it reads, or that must add to a sum of gradients before it does.
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
    """Yields the tasks of other stages that must add to a task's sums of gradients before the task.

    Gradients are added in the order of micro-batches. If the plan changes at the task's
    micro-batch, other stages may have run the task's layers for the previous micro-batch. These
    stages must add their gradients first.

    Args:
        plans: the plan of each micro-batch.
        task: any task; only backwards add to sums.
    """
    s, kind, m = task
    if not (KINDS[kind].accumulates and m):
        return
    before, now = plans[m - 1], plans[m]
    if before is now:
        return
    stages = {before.stage_of(layer) for layer in now.stages[s].layers}
    for p in stages:
        if p != s:
            yield Task(p, kind, m - 1)
