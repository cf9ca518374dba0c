"""Swapping: adds the rows for values that lie on the host between a forward and its backward.

F<m> and B<m> are a stage's forward and backward of micro-batch m. F<m> leaves values to swap:

    o<m>   starts to copy them to the host (OUT)
    f<m>   waits for that copy, and then frees them on the device (FREE)
    i<m>   starts to fetch them back (IN)

Rows run from left to right:

    1F1B     ... F5 o5 B2  f5 i3 F6 o6 B3  f6 i4 F7 o7 B4 ...
    GPipe    F0 o0 F1 o1 f0 F2 o2 f1 F3 ... F7 o7 f7 i1 B0 i2 B1 ...

The values to swap that a forward leaves are called a set. A device holds at most two sets at once:
one in use, and one on its way out or in. Two rules ensure this bound. Before a forward that will
leave a set, older sets are freed until at most one is on the device. A set is fetched at most one
task before it is read, and only after all sets on their way out have been freed.

If backwards are split, the values of a set that the second half reads stay on the device until it
has run. They do not count as a set: planners count them among the values that a micro-batch holds
between the halves. A micro-batch whose backward directly follows its forward is not swapped. Copies
do not change values, so swapping affects only time and memory.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from jvpipe.ir.buffers import Buffer, Copy
from jvpipe.ir.kinds import KINDS, Kind
from jvpipe.ir.rows import Row
from jvpipe.ir.task import Task, TaskLists
from jvpipe.lowering.carrier import Block

Swapped = Callable[[Task], tuple[int, Sequence[int]]]
"""A function from a forward to the first layer of its stage and the buffers to swap after it."""


def swap(
    blocks: Iterable[Block],
    buffers: list[Buffer],
    lists: TaskLists,
    swapped: Swapped,
) -> Iterator[list[Row]]:
    """Yields the rows of each block, with the rows of swaps before and after them.

    Args:
        blocks: the rows of each task, in the order of their dispatch.
        buffers: the table of buffers, to which the copies of swapped buffers are appended.
        lists: the tasks of each device. The pass looks ahead by one task within each list.
        swapped: finds the buffers to swap after a forward.

    >>> from jvpipe.ir.values import Value, ValueKind
    >>> from jvpipe.schedules.gpipe import gpipe
    >>> lists, left = gpipe(1, 2), [Buffer(Value(ValueKind.RESIDUAL, 0, 0, m), 0, 4) for m in range(2)]
    >>> blocks = [Block(task, [Row(task.kind, 0, 0, 0, task.microbatch, (), ())]) for task in lists[0]]
    >>> rows = [row for block in swap(blocks, left, lists, lambda task: (0, [task.microbatch])) for row in block]
    >>> " ".join(f"{row.kind}{row.microbatch}" for row in rows)
    'F0 OUT0 FREE0 IN0 F1 OUT1 FREE1 IN1 B0 B1'
    """
    swaps = _Swaps(buffers, lists, swapped)
    for block in blocks:
        if block.task is None:
            yield block.rows
        else:
            before = list(swaps.before(block.task))
            rows = [swaps.redirected(row) for row in block.rows]
            yield [*before, *rows, *swaps.after(block.task)]


def _forward(task: Task) -> Task:
    """Returns the forward of a task's stage and micro-batch: the key of the set that it leaves."""
    return task._replace(kind=Kind.F)


class _Swaps:
    """The swapped values of all stages, while the rows are written.

    Devices are numbered like their task lists. The key of a set (see the top of the file) is the
    forward that leaves it. Rows move a set through these states:

    on the device --OUT--> leaving --FREE--> on the host --IN--> back --(B or I)--> gone
    """

    def __init__(self, buffers: list[Buffer], lists: TaskLists, swapped: Swapped) -> None:
        self._buffers, self._swapped = buffers, swapped
        self._next: dict[Task, Task] = {}
        self._device: dict[int, int] = {}  # by stage
        for d, tasks in enumerate(lists):
            self._next.update(pairwise(tasks))
            self._device.update((task.stage, d) for task in tasks)
        self._layer: dict[Task, int] = {}  # the first layer of the stage, which rows name
        # The sets that are leaving or on the host; by buffer: its copy on the host.
        self._hosted: dict[Task, dict[int, int]] = {}
        self._leaving: list[list[Task]] = [[] for _ in lists]  # by device: the oldest first
        self._back: list[set[Task]] = [set() for _ in lists]  # by device
        self._fetched: dict[int, int] = {}  # by buffer: its copy that has come back

    def before(self, task: Task) -> Iterator[Row]:
        """Yields the rows before a task.

        They bring back the values that the task reads, begin to bring back those that the next task
        reads, and make room for those that the task will leave.
        """
        d = self._device[task.stage]
        if KINDS[task.kind].back:
            yield from self._fetch(_forward(task))
        coming = self._read_next(task)
        if coming and coming in self._hosted:
            # The fetch for the next task runs beside this task.
            yield from self._fetch(coming)
        elif task.kind == Kind.F and self._rests(task):
            # The task will leave one more set, so sets on their way out are freed until at most one
            # other set is on the device.
            leaving = self._leaving[d]
            while leaving and len(leaving) + len(self._back[d]) > 1:
                yield from self._free(d)

    def after(self, task: Task) -> Iterator[Row]:
        """Yields the rows after a task, which copy to the host the set that a forward has left."""
        match task.kind:
            case Kind.F:
                if self._rests(task):
                    yield from self._leave(_forward(task), *self._swapped(task))
            case Kind.B | Kind.I:
                self._back[self._device[task.stage]].discard(_forward(task))
            case Kind.W:
                pass
            case _:
                raise AssertionError(f"the values to swap after {task} are not defined")

    def redirected(self, row: Row) -> Row:
        """Returns a row that reads the copies that came back, instead of the swapped buffers."""
        if not KINDS[row.kind].back or self._fetched.keys().isdisjoint(row.reads):
            return row
        reads = (self._fetched.get(b, b) for b in row.reads)
        return replace(row, reads=tuple(reads))

    def _rests(self, task: Task) -> bool:
        """Tells whether other tasks come between a forward and its backward."""
        return self._read_next(task) != _forward(task)

    def _read_next(self, task: Task) -> Task | None:
        """Returns the set that the next task reads; None if the next task reads none."""
        following = self._next.get(task)
        return _forward(following) if following and KINDS[following.kind].back else None

    def _leave(self, forward: Task, layer: int, ids: Sequence[int]) -> Iterator[Row]:
        """Yields the rows that begin to copy a set to the host.

        Args:
            forward: the forward that has left the set.
            layer: the first layer of its stage, which the rows name.
            ids: the buffers of the set; if there are none, nothing is swapped.
        """
        if not ids:
            return
        self._layer[forward] = layer
        self._hosted[forward] = {b: self._copy(b, Copy.HOST) for b in ids}
        self._leaving[self._device[forward.stage]].append(forward)
        for b, host in self._hosted[forward].items():
            yield self._row(Kind.OUT, forward, b, [b], [host])

    def _free(self, d: int) -> Iterator[Row]:
        """Yields the rows that wait for a device's oldest leaving set, and then free it."""
        forward = self._leaving[d].pop(0)
        for b, host in self._hosted[forward].items():
            yield self._row(Kind.FREE, forward, b, [b, host], [])

    def _fetch(self, forward: Task) -> Iterator[Row]:
        """Yields the rows that begin to fetch a set, if it is on the host or on its way there."""
        if forward not in self._hosted:
            return
        d = self._device[forward.stage]
        while self._leaving[d]:
            yield from self._free(d)
        self._back[d].add(forward)
        for b, host in self._hosted.pop(forward).items():
            self._fetched[b] = self._copy(b, Copy.FETCHED)
            yield self._row(
                Kind.IN,
                forward,
                b,
                [host],
                [self._fetched[b]],
            )

    def _copy(self, b: int, copy: Copy) -> int:
        """Adds a copy of a buffer to the table, and returns its number."""
        self._buffers.append(replace(self._buffers[b], copy=copy))
        return len(self._buffers) - 1

    def _row(
        self,
        kind: Kind,
        forward: Task,
        b: int,
        reads: Sequence[int],
        writes: Sequence[int],
    ) -> Row:
        """Makes a row of a swap, at the place of the buffer.

        Args:
            kind: the kind of the row.
            forward: the forward that has left the set.
            b: the buffer that is swapped.
            reads: the buffers that the row reads.
            writes: the buffers that it writes.
        """
        place = self._buffers[b].place
        layer = self._layer[forward]
        return Row(
            kind,
            place,
            forward.stage,
            layer,
            forward.microbatch,
            tuple(reads),
            tuple(writes),
        )
