"""The controller: one thread that dispatches the rows of a lowered step in their order.

Dispatch is asynchronous: a program starts when its device is free and its inputs are there. The controller only
names arrays, so its own time per row is what limits small models.
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
from jvpipe.runtime.binding import Bound, Instruction
from jvpipe.runtime.dispatch import dispatch_ready
from jvpipe.runtime.failures import HostLost, StageError
from jvpipe.runtime.hosts import Hosts
from jvpipe.runtime.monitor import WATCHED, Monitor
from jvpipe.runtime.tensors import Ledger

_CLOSING_S = 0.5
"""How long it may take to see that a process is gone, once something of it has failed."""

# feeds[kind, index][m] is what micro-batch m reads from the host
Feeds = Mapping[tuple[str, int], Sequence[Any]]


# moved buffers that are not known to be there: the number of the row, the row, and what gives its marker
Arriving = dict[int, tuple[int, Row, Callable[[], Any]]]


def _look(
    monitor: Monitor | None, arriving: Arriving, table: Sequence[Any], taken: Sequence[int]
) -> None:
    """Tells the monitor what has arrived; what is about to be `taken`, or freed, and has not yet gets a marker.

    No other thread may look: to ask an array that is being taken is fatal.
    """
    for b, (index, row, mark) in tuple(arriving.items()):
        assert monitor is not None, "nobody else wants to know"
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
    """An array that a row which can fail has yielded once it has run."""

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
    """Runs bound steps; where the host has a limit, late copies do not have it hold more than the lists say.

    `marks` are those of the run's rows that can fail and are not known to have gone well, in the order of dispatch: the
    first that failed is the cause of whatever failed after it. `first_step` is the number that messages give the first
    step of a run. While it is `profiled`, tasks are named for a profiler.
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
            arrays: the state.
            feeds: what comes from the host.
            at: what an error tells of when that was.
        """
        lowered, monitor = bound.lowered, self.monitor
        live, peak = self.ledger.live, self.ledger.peak
        table: list[Any] = [*arrays, *[None] * (len(lowered.buffers) - lowered.persistent)]
        instructions = bound.named if self.profiled else bound.instructions
        self._begin(lowered, instructions, at)
        arriving: Arriving = {}
        before, marked = list(live), len(self.marks)
        persistent, row = lowered.persistent, None
        try:
            ready = self._order(bound, table)
            for index in ready if monitor is None else monitor.noting(ready):
                it = instructions[index]
                (
                    run,
                    feed,
                    gather,
                    writes,
                    frees,
                    target,
                    born,
                    temporary,
                    source,
                    freed,
                    watched,
                    row,
                    mark,
                ) = it
                live[target] += born
                if live[target] + temporary > peak[target]:
                    peak[target] = live[target] + temporary
                if feed is not None:
                    table[writes[0]] = run(feeds[feed][row.microbatch])
                else:
                    if arriving:
                        _look(monitor, arriving, table, (*writes, *frees))
                    out = run(*gather(table))
                    for b, x in zip(writes, out):  # noqa: B905 - a marker may follow
                        table[b] = x
                    if watched:
                        self.marks.append(Mark(out[-1], row, at))
                    if monitor is not None and (
                        len(out) > len(writes) or (out and row.kind in WATCHED)
                    ):
                        monitor.dispatched(index, row, None if mark else out[-1])
                        if mark:
                            arriving[writes[0]] = index, row, mark
                    x = out = None  # what nobody reads is gone
                for b in frees:
                    if b < persistent:  # the state that is consumed still knows it
                        table[b].delete()
                    table[b] = None
                live[source] -= freed
        except BaseException as error:
            live[:] = before
            failure = self._abandoned(error, row, at, marked)
            if failure is None:
                raise
            failure.table = table
            raise failure from error
        _look(monitor, arriving, table, tuple(arriving))
        for b in lowered.metrics:  # these are the caller's from here on
            live[lowered.buffers[b].memory] -= lowered.buffers[b].bytes
        return tuple(table[b] for b in lowered.final), [table[b] for b in lowered.metrics]

    def _order(self, bound: Bound, table: Sequence[Any]) -> Iterable[int]:
        """The numbers of the rows in the order of dispatch: that of the lists where no copy can be late."""
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
        """Forgets all marks but the first `marked`: this run failed; returns what to raise, None for an interrupt."""
        failure = self.failure(error, row, at) if isinstance(error, Exception) else None
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
        if (error := mark.error()) is not None:
            failure = self.failure(error)
            if mark.row.kind is Kind.E:  # of an evaluation no state knows
                self.marks.clear()
            raise failure from error
        self.marks.popleft()

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
        """Makes what to raise for an error: it tells of the row that failed first, as far as that is known.

        Args:
            error: that came up.
            row: that ran then, if one did.
            at: when that was.
        """
        if isinstance(error, HostLost):  # that says all
            return error
        marked = ((mark, mark.error()) for mark in self.marks)
        if first := next(((mark, cause) for mark, cause in marked if cause), None):
            (_, row, at), error = first
        where = (
            describe(row, at, self.microbatches, self.first_step)
            if row and at
            else "something outside of all steps"
        )
        if self.hosts is not None and (gone := self.hosts.gone(wait_s=_CLOSING_S)):
            if not (row and at):
                where = (
                    f"step {self.first_step + self._step}, {self.hosts.awaited() or 'all stages'}"
                )
            return HostLost(
                f"{gone}, go on from the last checkpoint: {where} failed: {_message(error)}"
            )
        return StageError(f"{where} failed: {_message(error)}")


def describe(row: Row, at: Moment, microbatches: int, first_step: int = 0) -> str:
    """A row in words.

    Args:
        row: a row of a step.
        at: that step.
        microbatches: of a step.
        first_step: the number of the first step of a run.

    >>> describe(Row(Kind.B, 1, 1, 4, -1, (), ()), Moment(3, flows=True), 8)
    'step 2, micro-batch 7: stage 1, task 1B7[layer 4], device 1'
    """
    when = f"step {first_step + at.step}"
    if row.microbatch >= 0 or (at.flows and row.layer >= 0 and row.kind is not Kind.LOSS):
        step, m = divmod(at.step * microbatches + row.microbatch, microbatches)
        when, row = f"step {first_step + step}, micro-batch {m}", replace(row, microbatch=m)
    return f"{when}: {f'stage {row.stage}' if row.stage >= 0 else 'all stages'}, task {row}, device {row.place}"


def _message(error: Exception) -> str:
    """The first line of an error and the last: between them an error of the host has its traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: " + " ... ".join(dict.fromkeys([*lines[:1], *lines[-1:]]))
