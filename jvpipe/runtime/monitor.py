"""Seconds of each task, seen without holding the pipeline up.

Every program yields a marker, four bytes that nothing takes; a copy to the host or back is its own. A thread per device
waits on the markers in their order, another on the copies, and notes when each is there. A task started when its
device was free, its inputs were there and it was dispatched.

An array that moves to another device may be overwritten there, so no thread may wait on it. The controller looks at it
whenever it dispatches something; if it is about to be taken and is not there, a program that only reads it yields a
marker, which a third thread waits on.
"""

import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from queue import SimpleQueue

import jax

from jvpipe._jax import Device
from jvpipe.ir.buffers import Lowered
from jvpipe.ir.kinds import KINDS, Kind, Runs
from jvpipe.ir.rows import AskRun, Row
from jvpipe.ir.span import Span
from jvpipe.runtime.binding import Instruction

_PASSES = {kind for kind, info in KINDS.items() if info.busy and info.runs is Runs.LAYER}
_HALVES = {Kind.I, Kind.W}
_BEGIN, _END = ({kind for kind, info in KINDS.items() if info.in_flight == n} for n in (1, -1))
WATCHED = frozenset(kind for kind, info in KINDS.items() if info.watched)
"""Kinds of copies that are watched."""
_TICK_S = 1e-9  # what ran took some time, though the watcher may wake too late to see it


@dataclass(frozen=True, slots=True)
class Measured:
    """Spans and seconds of a step, and of the moves between the step before and it.

    `swapped_bytes` went to the host; their copies took `copy_s` both ways, of which devices were idle for `exposed_s`,
    each by its name for `exposed`. Forwards that ran again took `recomputed_s`.
    """

    spans: tuple[Span, ...]
    swapped_bytes: int
    copy_s: float
    exposed_s: float
    recomputed_s: float
    exposed: Mapping[str, float] = field(default_factory=dict)

    def layer_s(self, layers: int) -> list[float]:
        """Seconds of each layer for a micro-batch: forward, backward, and what runs again; medians over micro-batches.

        Of replicas those of the slowest, for which the others wait. 0 for a layer whose forward or backward did not
        run. Of a backward that is split now and then the whole counts.

        >>> took_s = {Kind.F: 1.0, Kind.B: 2.0}
        >>> spans = [Span("a", f"0{kind}0", 0.0, s, kind, {"layer": 0}) for kind, s in took_s.items()]
        >>> Measured(tuple(spans), 0, 0.0, 0.0, 0.0).layer_s(2)
        [3.0, 0.0]
        """
        took: dict[tuple[object, Kind], dict[str, list[float]]] = defaultdict(
            lambda: defaultdict(list)
        )
        for span in self.spans:
            took[span.args["layer"], span.kind][span.device].append(
                max(span.end_s - span.start_s, _TICK_S)
            )
        middle = {
            key: max(map(statistics.median, by_place.values())) for key, by_place in took.items()
        }
        kinds = [{kind for layer, kind in middle if layer == i} for i in range(layers)]
        ran = [bool(_BEGIN & known) and bool(_END & known) for known in kinds]
        counted = [_PASSES - _HALVES if Kind.B in known else _PASSES for known in kinds]
        took_s = [sum(middle.get((i, kind), 0.0) for kind in counted[i]) for i in range(layers)]
        return [
            seconds if all_of_it else 0.0 for seconds, all_of_it in zip(took_s, ran, strict=True)
        ]

    @property
    def hidden_s(self) -> float:
        """Seconds of copies beside which the devices worked."""
        return max(0.0, self.copy_s - self.exposed_s)


class Record:
    """The marks of one step; `before` and `after` say when each place had ended what was asked of it.

    `moves` is the record of the copies between the step before and it. For pictures: `held` were the bytes in each
    memory before it, `order` is that in which rows were dispatched, `times` are the starts and ends of all rows, once
    it was read. The waits for rows are `named` for a profiler.
    """

    def __init__(
        self,
        lowered: Lowered,
        before: list[float],
        moves: "Record | None" = None,
        instructions: Sequence[Instruction] = (),
        held: Sequence[int] = (),
        named: bool = False,
    ) -> None:
        self.lowered, self.before, self.moves = lowered, before, moves
        self.instructions, self.held, self.named = instructions, held, named
        self.order: list[int] = []
        self.times: dict[int, tuple[float, float]] = {}
        self.after = [0.0] * len(before)
        self.dispatched: dict[int, float] = {}
        self.ended: dict[int, float] = {}
        self.passed = [threading.Event() for _ in before]
        self.closed = False


Item = tuple[Record, int, jax.Array | None]


class Monitor:
    """Watches the steps of a run; what it knows of the last `kept` can be asked for, of two at least."""

    def __init__(self, devices: Sequence[Device], kept: int = 2) -> None:
        names = [str(device) for device in devices]
        self.memories = [*names, "host"]
        self._names = [*names, *(f"{name} host" for name in names)]
        self._queues: list[SimpleQueue[Item]] = [SimpleQueue() for _ in range(3 * len(names))]
        self._last = [0.0] * len(self._queues)
        self._records: deque[Record] = deque(maxlen=max(2, kept))
        self._now: Record | None = None
        for place, queue in enumerate(self._queues):
            threading.Thread(target=self._watch, args=(place, queue), daemon=True).start()

    def begin(
        self,
        lowered: Lowered,
        instructions: Sequence[Instruction] = (),
        held: Sequence[int] = (),
        *,
        named: bool = False,
    ) -> None:
        """A step is about to be dispatched, or copies between two steps, which are told with the step after them.

        Args:
            lowered: its rows.
            instructions: what they are bound to.
            held: the bytes that are held before it, as the ledger counts them.
            named: the waits for its rows are to be found by name in a profile.
        """
        before = self.close()
        moves = before if before and not _computes(before.lowered) else None
        ended = before.after if before else [0.0] * len(self._queues)
        self._now = Record(lowered, ended, moves, instructions, list(held), named)
        if _is_step(lowered):
            self._records.append(self._now)

    def noting(self, order: Iterable[int]) -> Iterator[int]:
        """Passes on the numbers of rows as they are dispatched."""
        assert self._now is not None, "begun"
        for index in order:
            self._now.order.append(index)
            yield index

    def dispatched(self, index: int, row: Row, mark: jax.Array | None) -> None:
        """Notes that a row has been dispatched.

        Args:
            index: its number in the step.
            row: the row.
            mark: an array that is there when it has run; None if `watch` or `arrived` will tell of that.
        """
        assert self._now is not None, "begun"
        self._now.dispatched[index] = time.perf_counter()
        if mark is not None:
            self.watch(index, row, mark)

    def watch(self, index: int, row: Row, mark: jax.Array) -> None:
        """Has a thread wait for a row.

        Args:
            index: its number in the step.
            row: the row.
            mark: an array that is there when it has run.
        """
        assert self._now is not None, "begun"
        self._queues[self._place(row, self._now.lowered)].put((self._now, index, mark))

    def arrived(self, index: int) -> None:
        """Notes that an array has arrived which a row moved."""
        assert self._now is not None, "begun"
        self._now.ended[index] = time.perf_counter()

    def close(self) -> Record | None:
        """The newest record, of which everything has been dispatched."""
        record = self._now
        if record and not record.closed:
            record.closed = True
            for queue in self._queues:
                queue.put((record, -1, None))
        return record

    def last(self, count: int) -> list[Record]:
        """The records of the last steps, as many as are asked for or kept."""
        self.close()
        return list(self._records)[-count:]

    def measured(self, *, before: bool = False) -> Measured:
        """Reads the last step, or the one `before`; waits for its end."""
        self.close()
        return self.read(self._records[0 if before else -1])

    def read(self, record: Record) -> Measured:
        """Reads a closed record; waits for its end. Any thread may ask."""
        for passed in record.passed:
            passed.wait()
        rows, buffers = record.lowered.rows, record.lowered.buffers
        made: dict[int, float] = {}  # when each buffer was there
        fetched: set[int] = set()  # buffers that came back from the host
        held: set[int] = set()  # devices that waited for a FREE since their last program
        free = list(record.before)
        spans, swapped = [], 0
        exposed: dict[str, float] = defaultdict(float)
        for index, row in enumerate(rows):
            inputs_s = max((made.get(b, 0.0) for b in row.reads), default=0.0)
            end_s = record.ended.get(index, inputs_s)
            made |= dict.fromkeys(row.writes, end_s)
            if row.kind is Kind.FREE:
                held.add(row.place)
            record.times[index] = inputs_s, end_s
            if index not in record.ended:
                continue
            place, dispatched_s = self._place(row, record.lowered), record.dispatched[index]
            start_s = min(end_s, max(free[place], inputs_s, dispatched_s))
            record.times[index] = start_s, end_s
            if row.kind is Kind.OUT:
                swapped += buffers[row.writes[0]].bytes
            elif row.kind is Kind.IN:
                fetched.update(row.writes)
            elif row.kind not in WATCHED:
                else_s = max([made.get(b, 0.0) for b in row.reads if b not in fetched], default=0.0)
                else_s = max(free[place], else_s, 0.0 if row.place in held else dispatched_s)
                exposed[self._names[place]] += max(0.0, start_s - else_s) if free[place] else 0.0
                held.discard(row.place)
            free[place] = end_s
            name = f"{row.stage}{row.kind}{max(row.microbatch, 0)}"
            args: dict[str, int] = {"layer": row.layer, "microbatch": row.microbatch}
            if row.kind in WATCHED:
                args["bytes"] = sum(buffers[b].bytes for b in row.writes)
            spans.append(
                Span(self._named(row, record.lowered), name, start_s, end_s, row.kind, args)
            )
        took_s = {
            kind: sum((s.end_s - s.start_s for s in spans if s.kind == kind), 0.0)
            for kind in (Kind.OUT, Kind.IN, Kind.R)
        }
        copy_s, exposed_s = took_s[Kind.OUT] + took_s[Kind.IN], sum(exposed.values(), 0.0)
        moves = self.read(record.moves).spans if record.moves else ()
        return Measured((*moves, *spans), swapped, copy_s, exposed_s, took_s[Kind.R], exposed)

    def _place(self, row: Row, lowered: Lowered) -> int:
        """The queue of a row: of its device, of the device's link to the host, or of the links from other devices."""
        devices = len(self._names) // 2
        if row.kind is Kind.MOVE:
            return lowered.buffers[row.writes[0]].memory + 2 * devices
        return row.place + devices * (row.kind in WATCHED)

    def _named(self, row: Row, lowered: Lowered) -> str:
        """The device of a row, or the link that it takes."""
        if row.kind is Kind.MOVE:
            source = (
                f"process {row.run.process}"
                if isinstance(row.run, AskRun)
                else self._names[row.place]
            )
            return f"{source} to {self._names[lowered.buffers[row.writes[0]].memory]}"
        return self._names[self._place(row, lowered)]

    def _watch(self, place: int, queue: "SimpleQueue[Item]") -> None:
        while True:
            record, index, mark = queue.get()
            if mark is None:
                record.after[place] = self._last[place]
                record.passed[place].set()
                continue
            try:
                named = (
                    jax.profiler.TraceAnnotation(str(record.lowered.rows[index]))
                    if record.named
                    else nullcontext()
                )
                with named:
                    mark.block_until_ready()
            except Exception:  # whoever reads the result is told
                continue
            finally:
                del mark  # a copy that is held here is not gone
            record.ended[index] = self._last[place] = time.perf_counter()


def _computes(lowered: Lowered) -> bool:
    return any(KINDS[row.kind].computes for row in lowered.rows)


def _is_step(lowered: Lowered) -> bool:
    """False for an evaluation too."""
    return any(KINDS[row.kind].busy for row in lowered.rows)
