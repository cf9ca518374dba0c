"""The controller: one thread that dispatches the rows of a lowered step in their order.

Dispatch is asynchronous: a program starts when its device is free and its inputs are there. The controller only
names arrays, so its own time per row is what limits small models.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple, assert_never

import jax

from jvpipe import _jax
from jvpipe._jax import Device
from jvpipe.ir.buffers import HOST, Buffer, Lowered
from jvpipe.ir.kinds import Kind
from jvpipe.ir.rows import Row
from jvpipe.runtime.monitor import WATCHED, Monitor
from jvpipe.runtime.tensors import Ledger
from jvpipe.runtime.turns import turns

# feeds[kind, index][m] is what micro-batch m reads from the host
Feeds = Mapping[tuple[str, int], Sequence[Any]]


class StageError(RuntimeError):
    """A program or a copy failed: says in which stage, task and layer.

    `state` is whole if what failed lay between two steps, a migration or a change of models: the run goes on from it,
    or it is saved. `table` are the arrays that there were.
    """

    state: Any = None
    table: Sequence[Any] = ()


class Instruction(NamedTuple):
    """A row bound to what runs it, so that running it looks nothing up.

    `run` is an executable, or a copy; `feed` names what comes from the host. `born_bytes` are held on device `target`
    from the row on, `freed_bytes` on device `source` no longer; `temporary_bytes` only while the row runs. `mark` gives
    a program that reads a moved array alone, which others may overwrite.
    """

    run: Callable[..., Any]
    feed: tuple[str, int] | None
    gather: Callable[[list[Any]], Sequence[Any]]
    writes: tuple[int, ...]
    frees: tuple[int, ...]
    target: int
    born_bytes: int
    temporary_bytes: int
    source: int
    freed_bytes: int
    watched: bool
    row: Row
    mark: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Bound:
    """A lowered step, ready to run."""

    lowered: Lowered
    instructions: tuple[Instruction, ...]

    @cached_property
    def targets(self) -> list[int]:
        """Where what each row makes lies."""
        return [it.target for it in self.instructions]

    @cached_property
    def leaves_host(self) -> frozenset[int]:
        """The rows that free bytes of the host."""
        return frozenset(i for i, it in enumerate(self.instructions) if it.source == HOST and it.frees)

    @property
    def temporary_bytes(self) -> list[int]:
        """What each row's program needs while it runs."""
        return [it.temporary_bytes for it in self.instructions]

    def compile_marks(self) -> None:
        """Makes ready what only a run that is measured needs."""
        for it in self.instructions:
            if it.mark:
                it.mark()


def bind(
    lowered: Lowered,
    devices: Sequence[Device],
    executable_of: Callable[[Row], Any],
    calls_host: Callable[[Row], bool],
    mark_of: Callable[[Buffer], Callable[[], Any] | None],
) -> Bound:
    """Binds rows to executables and copies; rows that call the host can fail and are watched."""
    buffers = lowered.buffers
    temporary_bytes: dict[int, int] = {}  # by executable
    bound = []
    for row, (born, dead) in zip(lowered.rows, lowered.changes(), strict=True):
        target, source = (_place(buffers, found) if found else row.place for found in (born, dead))
        feed, temporary, mark = None, 0, None
        match row.kind:
            case Kind.SEND | Kind.RETURN | Kind.MOVE:
                run = _in_list(_jax.copier(devices[target]))
                mark = mark_of(buffers[row.writes[0]]) if row.kind is Kind.MOVE else None
            case Kind.OUT:
                run = _in_list(_jax.swapper(devices[row.place], "pinned_host"))
            case Kind.IN:
                run = _in_list(_jax.swapper(devices[row.place], "device"))
            case Kind.FREE:
                run = _wait
            case Kind.DROP:
                run = _nothing
            case Kind.FEED:
                leaf = buffers[row.writes[0]].value
                feed, run = (leaf.kind, leaf.index), _jax.feeder(devices[target])
            case (
                Kind.F
                | Kind.B
                | Kind.R
                | Kind.E
                | Kind.U
                | Kind.ZERO
                | Kind.LOSS
                | Kind.WEIGHT
                | Kind.SHIFT
                | Kind.SETTLE
            ):
                run = executable_of(row)
                if id(run) not in temporary_bytes:
                    temporary_bytes[id(run)] = run.memory_analysis().temp_size_in_bytes
                temporary = temporary_bytes[id(run)]
            case _:
                assert_never(row.kind)
        born_bytes, dead_bytes = (sum(buffers[b].bytes for b in found) for found in (born, dead))
        bound.append(
            Instruction(
                run=run,
                feed=feed,
                gather=_gather(row.reads),
                writes=row.writes,
                frees=dead,
                target=target,
                born_bytes=born_bytes,
                temporary_bytes=temporary,
                source=source,
                freed_bytes=dead_bytes,
                watched=calls_host(row),
                row=row,
                mark=mark,
            )
        )
    return Bound(lowered, tuple(bound))


def _place(buffers: Sequence[Buffer], ids: Sequence[int]) -> int:
    """Where some buffers lie; those that are born or die together do so in one place."""
    (place,) = {buffers[b].memory for b in ids}
    return place


def _wait(source: jax.Array, copy: jax.Array | None) -> tuple[()]:
    """Returns once the copy is there; it may have been used and gone."""
    if copy is not None:
        copy.block_until_ready()
    return ()


def _nothing(*arrays: jax.Array) -> tuple[()]:
    return ()


def _in_list(copy: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
    return lambda x: [copy(x)]


def _gather(ids: tuple[int, ...]) -> Callable[[list[Any]], Sequence[Any]]:
    """A function that picks these ids from the table."""
    if len(ids) > 1:
        return itemgetter(*ids)
    return (lambda table: (table[ids[0]],)) if ids else (lambda table: ())


# moved buffers that are not known to be there: the number of the row, the row, and what gives its marker
Arriving = dict[int, tuple[int, Row, Callable[[], Any]]]


def _look(monitor: Monitor | None, arriving: Arriving, table: Sequence[Any], taken: Sequence[int]) -> None:
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
    """What a row that can fail has yielded once it has run."""

    array: jax.Array
    row: Row
    at: Moment

    def error(self) -> Exception | None:
        """What the row failed with, once it has run."""
        try:
            self.array.block_until_ready()
        except Exception as error:
            return error
        return None


@dataclass
class Controller:
    """Runs bound steps; where the host has a limit, late copies do not have it hold more than the lists say.

    `marks` are those of the run's rows that can fail and are not known to have gone well, in the order of dispatch: the
    first that failed is the cause of whatever failed after it.
    """

    ledger: Ledger
    microbatches: int
    host_limited: bool = False
    monitor: Monitor | None = None
    marks: deque[Mark] = field(default_factory=deque)

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
        if monitor is not None:
            monitor.begin(lowered)
        instructions = bound.instructions
        arriving: Arriving = {}
        before, marked = list(live), len(self.marks)
        leaves_host = bound.leaves_host if self.host_limited else ()
        row = None
        try:
            for index in turns(lowered.rows, bound.targets, table, leaves_host):
                it = instructions[index]
                run, feed, gather, writes, frees, target, born, temporary, source, freed, watched, row, mark = it
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
                    if monitor is not None and (len(out) > len(writes) or row.kind in WATCHED):
                        monitor.dispatched(index, row, None if mark else out[-1])
                        if mark:
                            arriving[writes[0]] = index, row, mark
                    x = out = None  # what nobody reads is gone
                for b in frees:
                    if b < lowered.persistent:  # the state that is consumed still knows it
                        table[b].delete()
                    table[b] = None
                live[source] -= freed
        except BaseException as error:
            failure = self.failure(error, row, at) if isinstance(error, Exception) else None
            live[:] = before
            while len(self.marks) > marked:  # what this run did concerns nobody any more
                self.marks.pop()
            if failure is None:
                raise
            failure.table = table
            raise failure from error
        _look(monitor, arriving, table, tuple(arriving))
        for b in lowered.metrics:  # these are the caller's from here on
            live[lowered.buffers[b].memory] -= lowered.buffers[b].bytes
        return tuple(table[b] for b in lowered.final), [table[b] for b in lowered.metrics]

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
        if (error := mark.error()) is not None:
            failure = self.failure(error)
            if mark.row.kind is Kind.E:  # of an evaluation no state knows
                self.marks.clear()
            raise failure from error
        self.marks.popleft()

    def failure(self, error: Exception, row: Row | None = None, at: Moment | None = None) -> StageError:
        """What to raise for an error: it tells of the row that failed first, as far as that is known."""
        marked = ((mark, mark.error()) for mark in self.marks)
        if first := next(((mark, cause) for mark, cause in marked if cause), None):
            (_, row, at), error = first
        where = describe(row, at, self.microbatches) if row and at else "something outside of all steps"
        return StageError(f"{where} failed: {_message(error)}")


def describe(row: Row, at: Moment, microbatches: int) -> str:
    """A row in words.

    >>> describe(Row(Kind.B, 1, 1, 4, -1, (), ()), Moment(3, flows=True), 8)
    'step 2, micro-batch 7: stage 1, task 1B7[layer 4], device 1'
    """
    when = f"step {at.step}"
    if row.microbatch >= 0 or (at.flows and row.layer >= 0 and row.kind is not Kind.LOSS):
        step, m = divmod(at.step * microbatches + row.microbatch, microbatches)
        when, row = f"step {step}, micro-batch {m}", replace(row, microbatch=m)
    return f"{when}: {f'stage {row.stage}' if row.stage >= 0 else 'all stages'}, task {row}, device {row.place}"


def _message(error: Exception) -> str:
    """The first line of an error and the last: between them an error of the host has its traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: " + " ... ".join(dict.fromkeys([*lines[:1], *lines[-1:]]))
