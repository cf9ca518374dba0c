"""Seconds of each task, seen without holding the pipeline up.

Every program yields a marker, four bytes that nothing takes; a copy to the host or back is its own
marker. A thread per device waits on the markers in their order, another on the copies, and notes
when each has come. JAX tells nothing of starts: a task started when its device was free, its inputs
had come and it had been dispatched.

    device 0   [  F0  ][  F1  ]      [ B0 ]         free, inputs, dispatched: the last of the three is the start
    link 0             [ OUT 0 ]  [IN 0]            where only IN 0 kept B0 waiting, that time is exposed

An array that moves to another device may be overwritten there, so no thread may wait on it. The
controller looks at it whenever it dispatches something; if the array is about to be overwritten and
has not come, a program that only reads it yields a marker, which a third thread waits on.
"""

import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from queue import SimpleQueue

import jax

from jvpipe._jax import Device
from jvpipe.ir.buffers import Lowered
from jvpipe.ir.kinds import KINDS, Kind, Runs
from jvpipe.ir.rows import AskRun, Row
from jvpipe.ir.span import Span
from jvpipe.runtime.engine.binding import Instruction

_PASSES = {kind for kind, info in KINDS.items() if info.busy and info.runs is Runs.LAYER}
_HALVES = {Kind.I, Kind.W}
_BEGIN, _END = ({kind for kind, info in KINDS.items() if info.in_flight == n} for n in (1, -1))
WATCHED = frozenset(kind for kind, info in KINDS.items() if info.watched)
"""Kinds of copies that are watched."""
TICK_S = 1e-9
"""The least seconds of what ran: the watcher may wake too late to see any."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Spans and seconds of a step, and of the moves between the step before and it.

    Attributes:
        spans: what ran, one for each task and copy.
        swapped_bytes: went to the host.
        copy_s: of the copies to the host and back.
        exposed_s: of these, the seconds for which a device was idle.
        recomputed_s: of forwards that ran again.
        exposed: `exposed_s` by the name of the device.
    """

    spans: tuple[Span, ...]
    swapped_bytes: int
    copy_s: float
    exposed_s: float
    recomputed_s: float
    exposed: Mapping[str, float] = field(default_factory=dict)

    def layer_s(self, layers: int) -> list[float]:
        """Returns the seconds of each layer for a micro-batch: forward, backward, and what runs again.

        They are medians over micro-batches. The slowest replica counts, because the others wait for
        it. If a backward is split only now and then, only the whole ones count.

        Args:
            layers: how many there are.

        Returns:
            0 for a layer whose forward or backward did not run.

        >>> took_s = {Kind.F: 1.0, Kind.B: 2.0}
        >>> spans = [Span("a", f"0{kind}0", 0.0, s, kind, {"layer": 0}) for kind, s in took_s.items()]
        >>> Measured(tuple(spans), 0, 0.0, 0.0, 0.0).layer_s(2)
        [3.0, 0.0]
        """
        all_s: dict[tuple[object, Kind, str], list[float]] = defaultdict(list)
        for span in self.spans:
            took_s = max(span.end_s - span.start_s, TICK_S)
            all_s[span.args["layer"], span.kind, span.device].append(took_s)
        median_s: dict[tuple[object, Kind], float] = {}
        for (layer, kind, _), of_place_s in all_s.items():
            slowest_s = median_s.get((layer, kind), 0.0)
            median_s[layer, kind] = max(slowest_s, statistics.median(of_place_s))
        return [self._one_layer_s(layer, median_s) for layer in range(layers)]

    @staticmethod
    def _one_layer_s(layer: int, median_s: Mapping[tuple[object, Kind], float]) -> float:
        kinds = {kind for of_layer, kind in median_s if of_layer == layer}
        if not (_BEGIN & kinds and _END & kinds):
            return 0.0
        # The halves of the few micro-batches whose backward was split add nothing to the whole of
        # the others.
        counted = _PASSES - _HALVES if Kind.B in kinds else _PASSES
        return sum(median_s.get((layer, kind), 0.0) for kind in counted)

    @property
    def hidden_s(self) -> float:
        """Seconds of copies beside which the devices worked."""
        return max(0.0, self.copy_s - self.exposed_s)


class Record:
    """The marks of one step.

    Args:
        lowered: the rows.
        before: when each queue had ended what came before the step.
        moves: the record of the copies between the step before and this one.
        instructions: what the rows are bound to, for pictures.
        held_bytes: in each memory before the step, for pictures.
        named: a profile shows each wait by the name of its row.

    Attributes:
        order: the numbers of the rows as they were dispatched.
        times: once the record was read, the start and end of each row.
        after: when each queue had ended what belongs to the step.
        dispatched: by row, when that was.
        ended: by row, when its marker came.
        passed: by queue, set once all of the step has passed through it.
        closed: everything has been dispatched.
    """

    def __init__(
        self,
        lowered: Lowered,
        before: list[float],
        moves: "Record | None" = None,
        instructions: Sequence[Instruction] = (),
        held_bytes: Sequence[int] = (),
        named: bool = False,
    ) -> None:
        self.lowered = lowered
        self.before = before
        self.moves = moves
        self.instructions = instructions
        self.held_bytes = held_bytes
        self.named = named
        self.order: list[int] = []
        self.times: dict[int, tuple[float, float]] = {}
        self.after = [0.0] * len(before)
        self.dispatched: dict[int, float] = {}
        self.ended: dict[int, float] = {}
        self.passed = [threading.Event() for _ in before]
        self.closed = False


Item = tuple[Record, int, jax.Array | None]


class Monitor:
    """Watches the steps of a run, and keeps the records of the last ones.

    It has three queues per device, each with a thread: of the device's programs, of its link to the
    host, and of the links from other devices. What passes through one queue ends in order.

    Args:
        devices: by place.
        kept: so many steps can be asked for, two at least.
        layer_s: seconds of each layer, as far as they are known, by which those of a group are
            shared out.
    """

    def __init__(
        self, devices: Sequence[Device], kept: int = 2, layer_s: Sequence[float] = ()
    ) -> None:
        self._layer_s = layer_s
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
        held_bytes: Sequence[int] = (),
        *,
        named: bool = False,
    ) -> None:
        """Begins a record, of a step or of the copies between two steps, which are told with the step after them.

        Args:
            lowered: the rows that are about to be dispatched.
            instructions: what they are bound to.
            held_bytes: in each memory before them, as the ledger counts.
            named: a profile shows each wait by the name of its row.
        """
        before = self.close()
        # Moves are not a step of their own: they are read with the step that follows them.
        moves = before if before and not _computes(before.lowered) else None
        ended = before.after if before else [0.0] * len(self._queues)
        self._now = Record(lowered, ended, moves, instructions, list(held_bytes), named)
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
            mark: an array that comes when it has run; None if `watch` or `arrived` will report
                that.
        """
        assert self._now is not None, "begun"
        self._now.dispatched[index] = time.perf_counter()
        if mark is not None:
            self.watch(index, row, mark)

    def watch(self, index: int, row: Row, mark: jax.Array) -> None:
        """Makes a thread wait for a row.

        Args:
            index: its number in the step.
            row: the row.
            mark: an array that comes when it has run.
        """
        assert self._now is not None, "begun"
        self._queues[self._place(row, self._now.lowered)].put((self._now, index, mark))

    def arrived(self, index: int) -> None:
        """Notes that the array which a row moved has arrived."""
        assert self._now is not None, "begun"
        self._now.ended[index] = time.perf_counter()

    def close(self) -> Record | None:
        """Closes the newest record, of which everything has been dispatched, and returns it."""
        record = self._now
        if record and not record.closed:
            record.closed = True
            # An item without a mark follows all others of the record: it tells when they have
            # passed.
            for queue in self._queues:
                queue.put((record, -1, None))
        return record

    def last(self, count: int) -> list[Record]:
        """Returns the records of the last steps, as many as are asked for or kept."""
        self.close()
        return list(self._records)[-count:]

    def measured(self, *, before: bool = False) -> Measured:
        """Reads the last step, or the one `before`; waits for its end."""
        self.close()
        return self.read(self._records[0 if before else -1])

    def read(self, record: Record) -> Measured:
        """Reads a closed record; waits for its end. Any thread may ask."""
        # A queue is served in order, so all of the step has ended once its last item has passed.
        for passed in record.passed:
            passed.wait()
        reading = _Reading(list(record.before))
        spans, swapped_bytes = [], 0
        for index, row in enumerate(record.lowered.rows):
            place = self._place(row, record.lowered)
            start_s, end_s = reading.pass_row(record, index, place)
            record.times[index] = start_s, end_s
            if index not in record.ended:
                continue
            if row.kind is Kind.OUT:
                swapped_bytes += record.lowered.buffers[row.writes[0]].bytes
            spans += self._spans(record.lowered, row, start_s, end_s)
        took_s = {
            kind: sum((s.end_s - s.start_s for s in spans if s.kind == kind), 0.0)
            for kind in (Kind.OUT, Kind.IN, Kind.R)
        }
        # Layers that moved just before the step are shown in front of it.
        moves = self.read(record.moves).spans if record.moves else ()
        exposed: dict[str, float] = defaultdict(float)
        for place, seconds in reading.exposed_s.items():
            exposed[self._names[place]] += seconds
        return Measured(
            (*moves, *spans),
            swapped_bytes,
            copy_s=took_s[Kind.OUT] + took_s[Kind.IN],
            exposed_s=sum(exposed.values(), 0.0),
            recomputed_s=took_s[Kind.R],
            exposed=exposed,
        )

    def _spans(self, lowered: Lowered, row: Row, start_s: float, end_s: float) -> Iterator[Span]:
        """Yields the spans of a row: of a group one for each layer, as long as its share of what the layers take."""
        weights = [self._weight(part) for part in row.parts]
        at_s = start_s
        for part, weight in zip(row.parts, weights, strict=True):
            until_s = at_s + (end_s - start_s) * weight / sum(weights)
            yield self._span(lowered, part, at_s, until_s)
            at_s = until_s

    def _weight(self, part: Row) -> float:
        """Returns how long a part of a group is beside the others."""
        known = 0 <= part.layer < len(self._layer_s)
        of_layer = self._layer_s[part.layer] if known else 0.0
        return (KINDS[part.kind].weight or 1.0) * (of_layer or 1.0)

    def _span(self, lowered: Lowered, row: Row, start_s: float, end_s: float) -> Span:
        args: dict[str, int] = {"layer": row.layer, "microbatch": row.microbatch}
        if row.kind in WATCHED:
            args["bytes"] = sum(lowered.buffers[b].bytes for b in row.writes)
        name = f"{row.stage}{row.kind}{max(row.microbatch, 0)}"
        return Span(self._named(row, lowered), name, start_s, end_s, row.kind, args)

    def _place(self, row: Row, lowered: Lowered) -> int:
        """Returns the queue of a row: its device's, that of the link to the host, or that of links from devices."""
        devices = len(self._names) // 2
        if row.kind is Kind.MOVE:
            return lowered.buffers[row.writes[0]].memory + 2 * devices
        return row.place + devices * (row.kind in WATCHED)

    def _named(self, row: Row, lowered: Lowered) -> str:
        """Returns the name of a row's device, or of the link that it takes."""
        if row.kind is not Kind.MOVE:
            return self._names[self._place(row, lowered)]
        source = self._names[row.place]
        if isinstance(row.run, AskRun):
            source = f"process {row.run.process}"
        target = lowered.buffers[row.writes[0]].memory
        return f"{source} to {self._names[target]}"

    def _watch(self, place: int, queue: "SimpleQueue[Item]") -> None:
        while True:
            record, index, mark = queue.get()
            if mark is None:
                record.after[place] = self._last[place]
                record.passed[place].set()
                continue
            try:
                with _annotated(record, index):
                    mark.block_until_ready()
            except Exception:  # whoever reads the result meets it
                continue
            finally:
                del mark  # else a copy would outlive its FREE here
            record.ended[index] = self._last[place] = time.perf_counter()


@dataclass
class _Reading:
    """What is known while the rows of a record are passed in the order of the lists.

    Attributes:
        free_s: when each queue had ended what came before.
        made_s: when each buffer had come.
        fetched: the buffers that came back from the host.
        waiting: the devices that have waited for a FREE since their last program.
        exposed_s: by device, the seconds for which copies to the host and back kept it idle.
    """

    free_s: list[float]
    made_s: dict[int, float] = field(default_factory=dict)
    fetched: set[int] = field(default_factory=set)
    waiting: set[int] = field(default_factory=set)
    exposed_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))

    def pass_row(self, record: Record, index: int, place: int) -> tuple[float, float]:
        """Returns the start and end of a row, and notes what they mean for the rows after it.

        Args:
            record: of the step.
            index: the number of the row.
            place: its queue.
        """
        row = record.lowered.rows[index]
        inputs_s = max((self.made_s.get(b, 0.0) for b in row.reads), default=0.0)
        # A row without a marker, such as a FREE, ends as soon as its inputs have come.
        end_s = record.ended.get(index, inputs_s)
        self.made_s |= dict.fromkeys(row.writes, end_s)
        if row.kind is Kind.FREE:
            self.waiting.add(row.place)
        if index not in record.ended:
            return inputs_s, end_s
        dispatched_s = record.dispatched[index]
        start_s = min(end_s, max(self.free_s[place], inputs_s, dispatched_s))
        if row.kind is Kind.IN:
            self.fetched.update(row.writes)
        elif row.kind not in WATCHED:
            self._expose(row, place, start_s, dispatched_s)
        self.free_s[place] = end_s
        return start_s, end_s

    def _expose(self, row: Row, place: int, start_s: float, dispatched_s: float) -> None:
        """Counts how much earlier a program would have started without copies to the host and back."""
        others = [self.made_s.get(b, 0.0) for b in row.reads if b not in self.fetched]
        inputs_s = max(others, default=0.0)
        # A device that waited for a FREE was also late to dispatch: that wait is the copy's.
        asked_s = 0.0 if row.place in self.waiting else dispatched_s
        possible_s = max(self.free_s[place], inputs_s, asked_s)
        if self.free_s[place]:  # else the first program of a run, which nothing kept waiting
            self.exposed_s[place] += max(0.0, start_s - possible_s)
        self.waiting.discard(row.place)


def _annotated(record: Record, index: int) -> AbstractContextManager[object]:
    """Returns the block in which a profiler sees a row's name, if the record is named."""
    if not record.named:
        return nullcontext()
    return jax.profiler.TraceAnnotation(str(record.lowered.rows[index]))


def _computes(lowered: Lowered) -> bool:
    return any(KINDS[row.kind].computes for row in lowered.rows)


def _is_step(lowered: Lowered) -> bool:
    """Tells a step from moves, and from an evaluation."""
    return any(KINDS[row.kind].busy for row in lowered.rows)
