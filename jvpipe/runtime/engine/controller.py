"""The controller: one thread that dispatches the rows of a lowered step in their order.

A row is one program, one copy or one wait. Dispatch is asynchronous: a program starts when its
device is free and its inputs have come, and the controller does not wait for it. The rows say which
arrays each program reads, so results do not depend on when programs run. For small models, the
controller's own time per row limits the speed.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax

from jvpipe import _jax
from jvpipe.ir.buffers import Lowered
from jvpipe.ir.kinds import Kind
from jvpipe.ir.rows import Row
from jvpipe.ir.values import NEVER
from jvpipe.runtime.engine.binding import Bound, Instruction
from jvpipe.runtime.engine.channel import CLOSING_S
from jvpipe.runtime.engine.dispatch import dispatch_ready
from jvpipe.runtime.engine.failures import HostLost, StageError
from jvpipe.runtime.engine.hosts import Hosts
from jvpipe.runtime.engine.monitor import Monitor
from jvpipe.runtime.engine.record import WATCHED
from jvpipe.runtime.engine.tensors import Ledger

Feeds = Mapping[tuple[str, int], Sequence[Any]]
"""Leaves of the batch, and seeds, on the host: micro-batch m reads `feeds[kind, index][m]`."""
Arriving = dict[int, tuple[int, Row, Callable[[], Any]]]
"""Moved arrays that may not have arrived yet, by buffer. Each entry has the number of the row that
moves the array, the row, and a function that compiles a program. The program reads the array, and
yields the marker for which `_look` lets the monitor wait."""


def _look(
    monitor: Monitor | None,
    arriving: Arriving,
    table: Sequence[Any],
    taken: Sequence[int],
) -> None:
    """Tells the monitor which moved arrays have come.

    If the next row overwrites or frees an array that has not come, the array cannot be checked
    later. The monitor then waits for a marker: a small array that comes when the moved array has
    come. Only the dispatching thread may check arrays, because the process crashes if an array is
    checked while a program overwrites it.

    Args:
        monitor: the monitor of the run; None only if `arriving` is empty.
        arriving: the moved arrays. An entry is removed once its array has come or has a marker.
        table: the array of each buffer.
        taken: the buffers that the next row overwrites or frees.
    """
    for b, (index, row, mark) in tuple(arriving.items()):
        assert monitor is not None, "only a monitor asks for arrivals"
        if _jax.is_ready(table[b]):
            monitor.arrived(index)
        elif b in taken:
            monitor.watch(index, row, mark()(table[b])[0])
        else:
            continue
        del arriving[b]


class Moment(NamedTuple):
    """The step in which rows run.

    If `flows` is true, the step belongs to a stream: a run whose pipeline is not emptied between
    steps. Some rows of the step may then work on micro-batches of earlier steps.
    """

    step: int
    flows: bool = False


class Mark(NamedTuple):
    """A result of a row that may fail; waiting for the result shows whether the row has failed."""

    array: jax.Array
    row: Row
    at: Moment


@dataclass
class Controller:
    """The runner of bound steps, which turns any error into one that names the row.

    Args:
        ledger: counts the bytes that rows make and free.
        microbatches: how many micro-batches a step has.
        host_limited: whether the host has a memory limit. If so, a row that writes to the host is
            dispatched only after all earlier rows that free bytes of the host. So the host never
            holds more bytes than the lowered step counts.
        monitor: measures the rows; None if nothing is measured.
        marks: the marks of rows that can fail while they run. A mark stays until its row is known
            to have succeeded. If a row fails, the rows that depend on it fail, too. They were
            dispatched later, so the first mark whose row has failed shows the cause.
        first_step: the number by which messages call the first step of a run.
        hosts: the processes that run the steps together, if there are several.
        profiled: whether a profiler sees each dispatch by the name of its row.
    """

    ledger: Ledger
    microbatches: int
    host_limited: bool = False
    monitor: Monitor | None = None
    marks: deque[Mark] = field(default_factory=deque)
    first_step: int = 0
    hosts: Hosts | None = None
    profiled: bool = False
    _step: int = 0

    def run(
        self,
        bound: Bound,
        arrays: Sequence[jax.Array],
        feeds: Feeds,
        at: Moment,
    ) -> tuple[tuple[jax.Array, ...], list[jax.Array]]:
        """Dispatches every row; returns the arrays that outlive the step, and the metrics.

        Args:
            bound: the rows.
            arrays: the arrays of the state, which the step consumes.
            feeds: the leaves of the batch, and the seeds, that rows read from the host.
            at: the step, for error messages.

        Raises:
            StageError: a row failed at its dispatch. The error's `table` has the arrays at that
                time; after a failed migration, the caller makes the old state from them.
        """
        lowered = bound.lowered
        unmade = len(lowered.buffers) - lowered.persistent
        table: list[Any] = [*arrays, *[None] * unmade]
        self._dispatch(bound, table, feeds, at)
        for b in lowered.metrics:  # held by the caller from now on, so the ledger drops their bytes
            buffer = lowered.buffers[b]
            self.ledger.live[buffer.memory] -= buffer.bytes
        return tuple(table[b] for b in lowered.final), [table[b] for b in lowered.metrics]

    def _dispatch(self, bound: Bound, table: list[Any], feeds: Feeds, at: Moment) -> None:
        """Dispatches every row, and keeps the table of arrays.

        The table has the array of each buffer, and None for a buffer that is not made yet. Each row
        adds the arrays that it makes, and removes those that it frees. With small layers, this loop
        limits the speed of training, so it has no calls or look-ups that a row does not need.
        """
        monitor, live, peak = self.monitor, self.ledger.live, self.ledger.peak
        persistent = bound.lowered.persistent
        instructions = bound.named if self.profiled else bound.instructions
        self._begin(bound.lowered, instructions, at)
        arriving: Arriving = {}
        before, marked = list(live), len(self.marks)
        instruction: Instruction | None = None
        try:
            ready = self._order(bound, table)
            for index in ready if monitor is None else monitor.noting(ready):
                instruction = instructions[index]
                writes, frees, target = instruction.writes, instruction.frees, instruction.target
                # The ledger counts in the order of dispatch. While a row runs, memory holds the
                # buffers that it makes and those that it frees. So its new bytes are added first,
                # and the freed bytes are subtracted below.
                live[target] += instruction.born_bytes
                if live[target] + instruction.temporary_bytes > peak[target]:
                    peak[target] = live[target] + instruction.temporary_bytes
                if instruction.feed is not None:
                    of_microbatches = feeds[instruction.feed]
                    table[writes[0]] = instruction.run(of_microbatches[instruction.row.microbatch])
                else:
                    if arriving:
                        _look(monitor, arriving, table, (*writes, *frees))
                    out = instruction.run(*instruction.gather(table))
                    for b, x in zip(writes, out):  # noqa: B905 - a marker may follow
                        table[b] = x
                    if instruction.watched:
                        self.marks.append(Mark(out[-1], instruction.row, at))
                    if monitor is not None:
                        _watch(monitor, index, instruction, out, arriving)
                    # A variable that refers to an array would keep it in memory after it is freed.
                    x = out = None
                for b in frees:
                    if b < persistent:  # the consumed state still refers to it
                        table[b].delete()
                    table[b] = None
                live[instruction.source] -= instruction.freed_bytes
        except BaseException as error:
            live[:] = before
            row = instruction.row if instruction else None
            failure = self._abandoned(error, row, at, marked)
            if failure is None:
                raise
            failure.table = table
            raise failure from error
        _look(monitor, arriving, table, tuple(arriving))

    def _order(self, bound: Bound, table: Sequence[Any]) -> Iterable[int]:
        """Returns the rows' numbers in the order of dispatch.

        If no row may have to wait for a late copy, this is the order of the lowered rows.
        """
        if not bound.waits:
            return range(len(bound.instructions))
        leaves_host = bound.leaves_host if self.host_limited else ()
        rows, targets = bound.lowered.rows, bound.targets
        if self.hosts is None:
            return dispatch_ready(rows, targets, table, leaves_host)
        return dispatch_ready(rows, targets, table, leaves_host, self.hosts.check_silence)

    def _begin(
        self,
        lowered: Lowered,
        instructions: Sequence[Instruction],
        at: Moment,
    ) -> None:
        """Tells the monitor and the transport that rows are about to be dispatched.

        The transport numbers the copies of a step by their rows, so it must know where steps begin.
        """
        self._step = at.step
        if self.monitor is not None:
            self.monitor.begin(
                lowered,
                instructions,
                self.ledger.live,
                named=self.profiled,
                flows=at.flows,
            )
        if self.hosts is not None:
            self.hosts.connected.begin()

    def _abandoned(
        self,
        error: BaseException,
        row: Row | None,
        at: Moment,
        marked: int,
    ) -> StageError | None:
        """Finds the cause of a run's failure, and forgets the marks of the run.

        Args:
            error: the error that was raised.
            row: the row that was being dispatched.
            at: the step.
            marked: how many marks there were before the run.

        Returns:
            The error to raise; None for an interrupt.
        """
        failure = self.failure(error, row, at) if isinstance(error, Exception) else None
        # One of the marks may show the cause, so marks are removed only after it is found.
        while len(self.marks) > marked:
            self.marks.pop()
        return failure

    def check(self) -> None:
        """Raises the first failure of a marked row, if one has failed by now; does not wait."""
        while self.marks and _jax.is_ready(self.marks[0].array):
            self._pass_first()

    def settle(self, count: int | None = None) -> None:
        """Waits for the oldest `count` marks, or for all, and raises the first failure."""
        for _ in range(len(self.marks) if count is None else count):
            self._pass_first()

    def _pass_first(self) -> None:
        """Waits for the oldest mark, and removes it; raises an error if its row has failed."""
        mark = self.marks[0]
        error = self._error_of(mark.array)
        if error is None:
            self.marks.popleft()
            return
        failure = self.failure(error)
        # The mark stays, so that every later use of the state raises the failure again. An
        # evaluation changes no state, so its failure is raised only once.
        if mark.row.kind is Kind.E:
            self.marks.clear()
        raise failure from error

    def _error_of(self, array: jax.Array) -> Exception | None:
        """Waits for an array; returns the error of its computation, if that has failed."""
        try:
            if self.hosts is not None:
                self.hosts.come(array)
            array.block_until_ready()
        except Exception as error:
            return error
        return None

    def arrive(self, array: jax.Array) -> None:
        """Waits for an array; raises the error if its computation has failed."""
        if error := self._error_of(array):
            raise self.failure(error) from error

    def failure(
        self,
        error: Exception,
        row: Row | None = None,
        at: Moment | None = None,
    ) -> StageError:
        """Returns the error for the user; it names the row that failed first, if that is known.

        If another process is gone, that is probably the cause, and the error is a `HostLost`.

        Args:
            error: the error that was raised.
            row: the row that was being dispatched, if there was one.
            at: the step of that row.
        """
        # The error may follow from an earlier one. Then the oldest mark whose row has failed shows
        # the cause.
        for mark in () if isinstance(error, HostLost) else self.marks:
            cause = self._error_of(mark.array)
            if cause is not None:
                error, row, at = cause, mark.row, mark.at
                break
        if isinstance(error, HostLost):  # its message is complete
            return error
        where = "something outside of all steps"
        if row and at:
            where = describe(row, at, self.microbatches, self.first_step)
        gone = self.hosts.gone(wait_s=CLOSING_S) if self.hosts is not None else ""
        if not gone:
            return StageError(f"{where} failed: {_message(error)}")
        if not (row and at):
            assert self.hosts is not None
            awaited = self.hosts.awaited() or "all stages"
            where = f"step {self.first_step + self._step}, {awaited}"
        advice = "go on from the last checkpoint"
        return HostLost(f"{gone}, {advice}: {where} failed: {_message(error)}")


def _watch(
    monitor: Monitor,
    index: int,
    instruction: Instruction,
    out: Sequence[Any],
    arriving: Arriving,
) -> None:
    """Tells the monitor that a row was dispatched, if the row yields an array to wait for.

    Args:
        monitor: the monitor of the run.
        index: the number of the row.
        instruction: the instruction that the row is bound to.
        out: the results of the row. A program yields a marker after the buffers that it writes. A
            copy yields no marker, and its result serves as one.
        arriving: gets an entry for a moved array that later rows may overwrite.
    """
    row, writes, mark = instruction.row, instruction.writes, instruction.mark
    has_marker = len(out) > len(writes)
    if not has_marker and not (out and row.kind in WATCHED):
        return
    monitor.dispatched(index, row, None if mark else out[-1])
    if mark:
        arriving[writes[0]] = index, row, mark


def describe(row: Row, at: Moment, microbatches: int, first_step: int = 0) -> str:
    """Describes a row for messages: its step, micro-batch, stage, task and device.

    Args:
        row: a row of a step.
        at: the step.
        microbatches: how many micro-batches a step has.
        first_step: the number by which messages call the first step of a run.

    >>> describe(Row(Kind.B, 1, 1, 4, -1, (), ()), Moment(3, flows=True), 8)
    'step 2, micro-batch 7: stage 1, task 1B7[layer 4], device 1'
    """
    when = f"step {first_step + at.step}"
    if row.microbatch >= 0 or (at.flows and row.layer >= 0 and row.microbatch != NEVER):
        # Micro-batches count from the start of the step, so those of earlier steps are negative.
        step, m = divmod(at.step * microbatches + row.microbatch, microbatches)
        when, row = f"step {first_step + step}, micro-batch {m}", replace(row, microbatch=m)
    where = f"stage {row.stage}" if row.stage >= 0 else "all stages"
    return f"{when}: {where}, task {row}, device {row.place}"


def _message(error: Exception) -> str:
    """Returns the first and the last line of an error; between them is usually a traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    ends = dict.fromkeys([*lines[:1], *lines[-1:]])
    return f"{type(error).__name__}: " + " ... ".join(ends)
