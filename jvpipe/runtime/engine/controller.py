"""The controller: one thread that dispatches the rows of a lowered step in their order.

Dispatch is asynchronous: a program starts when its device is free and its inputs are there. The
controller only names arrays, so its own time per row is what limits small models.
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
from jvpipe.runtime.engine.binding import Bound, Instruction
from jvpipe.runtime.engine.channel import CLOSING_S
from jvpipe.runtime.engine.dispatch import dispatch_ready
from jvpipe.runtime.engine.failures import HostLost, StageError
from jvpipe.runtime.engine.hosts import Hosts
from jvpipe.runtime.engine.monitor import WATCHED, Monitor
from jvpipe.runtime.engine.tensors import Ledger

Feeds = Mapping[tuple[str, int], Sequence[Any]]
"""Leaves of the batch and seeds on the host: `feeds[kind, index][m]` is what micro-batch m reads."""
Arriving = dict[int, tuple[int, Row, Callable[[], Any]]]
"""Moved buffers that may not have come yet: the number of the row, the row, and what compiles its marker."""


def _look(
    monitor: Monitor | None, arriving: Arriving, table: Sequence[Any], taken: Sequence[int]
) -> None:
    """Tells the monitor which moved arrays have come, and puts a marker behind those that cannot be asked later.

    No other thread may look: asking an array that a program is overwriting ends the process.

    Args:
        monitor: of the run; there is one if anything is arriving.
        arriving: loses those that need no further look.
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
    """The step at which rows run; in a stream that `flows` rows may be of a micro-batch of the step before."""

    step: int
    flows: bool = False


class Mark(NamedTuple):
    """An array that a row yields which may fail only while it runs: waiting for it tells whether it has."""

    array: jax.Array
    row: Row
    at: Moment

    def error(self) -> Exception | None:
        """Waits for the row; returns the error that it failed with."""
        try:
            self.array.block_until_ready()
        except Exception as error:
            return error
        return None


@dataclass
class Controller:
    """Runs bound steps, and turns whatever fails into an error that names the row.

    Args:
        ledger: counts the bytes that rows make and free.
        microbatches: of a step.
        host_limited: the host has a limit, so that no late copy may make it hold more than the
            lists say.
        monitor: measures the rows, if somebody asks for that.
        marks: of rows that can fail and are not known to have succeeded, in the order of dispatch.
            The first that failed is the cause of whatever failed after it.
        first_step: the number that messages give the first step of a run.
        hosts: the processes that run the steps together, if there are several.
        profiled: names rows for a profiler.
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
        self, bound: Bound, arrays: Sequence[jax.Array], feeds: Feeds, at: Moment
    ) -> tuple[tuple[jax.Array, ...], list[jax.Array]]:
        """Dispatches every row; returns the arrays that outlive the step, and the metrics.

        Args:
            bound: the rows.
            arrays: the state, which the step consumes.
            feeds: what comes from the host.
            at: the moment that an error names.

        Raises:
            StageError: a row failed on dispatch; its `table` has the arrays that there were.
        """
        lowered = bound.lowered
        unmade = len(lowered.buffers) - lowered.persistent
        table: list[Any] = [*arrays, *[None] * unmade]
        self._dispatch(bound, table, feeds, at)
        for b in lowered.metrics:  # from here on the caller holds these, not the run
            buffer = lowered.buffers[b]
            self.ledger.live[buffer.memory] -= buffer.bytes
        return tuple(table[b] for b in lowered.final), [table[b] for b in lowered.metrics]

    def _dispatch(self, bound: Bound, table: list[Any], feeds: Feeds, at: Moment) -> None:
        """Dispatches every row.

        Fills the table with what the rows make, and empties it of what they free. The loop is what
        limits models of small layers: it neither calls nor looks up more than a row needs.
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
                # The ledger counts in the order of dispatch: first what the row makes, last what it
                # frees.
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
                    # An array that only these names hold would count as live until the next row.
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
        """Returns the numbers of the rows in the order of dispatch: that of the lists unless a copy can be late."""
        if not bound.waits:
            return range(len(bound.instructions))
        leaves_host = bound.leaves_host if self.host_limited else ()
        return dispatch_ready(bound.lowered.rows, bound.targets, table, leaves_host)

    def _begin(self, lowered: Lowered, instructions: Sequence[Instruction], at: Moment) -> None:
        self._step = at.step
        if self.monitor is not None:
            self.monitor.begin(lowered, instructions, self.ledger.live, named=self.profiled)
        if self.hosts is not None:
            self.hosts.connected.begin()

    def _abandoned(
        self, error: BaseException, row: Row | None, at: Moment, marked: int
    ) -> StageError | None:
        """Forgets the marks of a run that failed.

        Args:
            error: that came up.
            row: that was being dispatched.
            at: when.
            marked: the count of marks that there were before the run.

        Returns:
            What to raise; None for an interrupt.
        """
        failure = self.failure(error, row, at) if isinstance(error, Exception) else None
        # Only after the cause was found: the marks of this run may have it.
        while len(self.marks) > marked:
            self.marks.pop()
        return failure

    def check(self) -> None:
        """Raises the first failure, if it is known by now."""
        while self.marks and _jax.is_ready(self.marks[0].array):
            self._pass_first()

    def settle(self, count: int | None = None) -> None:
        """Waits for the oldest `count` marks, or for all, and raises the first failure."""
        for _ in range(len(self.marks) if count is None else count):
            self._pass_first()

    def _pass_first(self) -> None:
        mark = self.marks[0]
        if self.hosts is not None:
            self.hosts.come(mark.array)
        error = mark.error()
        if error is None:
            self.marks.popleft()
            return
        failure = self.failure(error)
        # The mark stays, so that whoever uses the state meets the failure again. An evaluation
        # changes no state.
        if mark.row.kind is Kind.E:
            self.marks.clear()
        raise failure from error

    def arrive(self, array: jax.Array) -> None:
        """Waits for an array; raises what went wrong on its way."""
        try:
            if self.hosts is not None:
                self.hosts.come(array)
            array.block_until_ready()
        except Exception as error:
            raise self.failure(error) from error

    def failure(
        self, error: Exception, row: Row | None = None, at: Moment | None = None
    ) -> StageError:
        """Returns what to raise for an error.

        It names the row that failed first, as far as that is known.

        Args:
            error: that came up.
            row: that ran then, if one did.
            at: when that was.
        """
        if isinstance(error, HostLost):  # says it all
            return error
        # The error may be a consequence: the oldest mark that failed is the cause.
        for mark in self.marks:
            cause = mark.error()
            if cause is not None:
                error, row, at = cause, mark.row, mark.at
                break
        where = self._where(row, at)
        gone = self.hosts.gone(wait_s=CLOSING_S) if self.hosts is not None else ""
        if not gone:
            return StageError(f"{where} failed: {_message(error)}")
        if not (row and at):
            assert self.hosts is not None
            awaited = self.hosts.awaited() or "all stages"
            where = f"step {self.first_step + self._step}, {awaited}"
        advice = "go on from the last checkpoint"
        return HostLost(f"{gone}, {advice}: {where} failed: {_message(error)}")

    def _where(self, row: Row | None, at: Moment | None) -> str:
        if not (row and at):
            return "something outside of all steps"
        return describe(row, at, self.microbatches, self.first_step)


def _watch(
    monitor: Monitor, index: int, instruction: Instruction, out: Sequence[Any], arriving: Arriving
) -> None:
    """Tells the monitor that a row has been dispatched, if it yields something to wait on.

    Args:
        monitor: of the run.
        index: the number of the row.
        instruction: what ran it.
        out: what it yielded: a marker follows what a program writes, and a copy is its own.
        arriving: gets what a copy has moved where others may overwrite it.
    """
    row, writes, mark = instruction.row, instruction.writes, instruction.mark
    has_marker = len(out) > len(writes)
    if not has_marker and not (out and row.kind in WATCHED):
        return
    monitor.dispatched(index, row, None if mark else out[-1])
    if mark:
        arriving[writes[0]] = index, row, mark


def describe(row: Row, at: Moment, microbatches: int, first_step: int = 0) -> str:
    """Returns a row in words.

    Args:
        row: a row of a step.
        at: that step.
        microbatches: of a step.
        first_step: the number of the first step of a run.

    >>> describe(Row(Kind.B, 1, 1, 4, -1, (), ()), Moment(3, flows=True), 8)
    'step 2, micro-batch 7: stage 1, task 1B7[layer 4], device 1'
    """
    when = f"step {first_step + at.step}"
    flows_on = at.flows and row.layer >= 0 and row.kind is not Kind.LOSS
    if row.microbatch >= 0 or flows_on:
        # In a stream a negative number is that of a micro-batch of an earlier step.
        step, m = divmod(at.step * microbatches + row.microbatch, microbatches)
        when, row = f"step {first_step + step}, micro-batch {m}", replace(row, microbatch=m)
    where = f"stage {row.stage}" if row.stage >= 0 else "all stages"
    return f"{when}: {where}, task {row}, device {row.place}"


def _message(error: Exception) -> str:
    """Returns the first line of an error and the last.

    Between them an error of the host has its traceback.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    ends = dict.fromkeys([*lines[:1], *lines[-1:]])
    return f"{type(error).__name__}: " + " ... ".join(ends)
