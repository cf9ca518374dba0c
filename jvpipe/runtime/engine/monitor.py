"""Measures the seconds of each task without delaying the pipeline.

The tasks of a stage run as rows: programs and copies. The end of a row is observed. Every program
yields a marker, an array of four bytes that no other program reads. A copy to the host or back
needs no marker, because its result serves as one. For each device, one thread waits for the markers
of programs in their order, and another one for the results of copies to the host and back. Each
thread notes when a marker or a result comes.

The start of a row is computed from the ends of earlier rows, because JAX does not report it
(record.py).

An array that moves to another device may be overwritten there, so no thread may wait for it. The
controller checks such an array whenever it dispatches a row. If the row would overwrite the array
before it has come, the controller first runs a program that only reads the array. This program
yields a marker, for which a third thread waits.
"""

import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from queue import SimpleQueue

import jax

from jvpipe.ir.buffers import Lowered
from jvpipe.ir.kinds import KINDS, Kind, Runs
from jvpipe.ir.rows import AskRun, OfferRun, Row
from jvpipe.ir.span import Span
from jvpipe.ir.values import NEVER
from jvpipe.runtime.engine.binding import Instruction
from jvpipe.runtime.engine.record import WATCHED, Reading, Record
from jvpipe.util.devices import Device

_PASSES = {kind for kind, info in KINDS.items() if info.busy and info.runs is Runs.LAYER}
_HALVES = {Kind.I, Kind.W}
_BACKWARDS = _HALVES | {Kind.B}
_BEGIN = {kind for kind, info in KINDS.items() if info.in_flight == 1}
_END = {kind for kind, info in KINDS.items() if info.in_flight == -1}
TICK_S = 1e-9
"""The shortest time of a task, in seconds: a thread that wakes late may see two markers at once."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of a step.

    Attributes:
        spans: the start, end and device of each task and copy. Moves of layers just before the step
            are included.
        swapped_bytes: how many bytes were copied to the host.
        copy_s: the seconds of copies to the host and back.
        exposed_s: the part of `copy_s` in which a device was idle because of a copy.
        recomputed_s: the seconds of forwards that ran again. If `with_inside` has added them, also
            the seconds in which backwards computed values again.
        exposed: the seconds of `exposed_s`, by the name of the device.
    """

    spans: tuple[Span, ...]
    swapped_bytes: int
    copy_s: float
    exposed_s: float
    recomputed_s: float
    exposed: Mapping[str, float] = field(default_factory=dict)

    def layer_s(self, layers: int) -> list[float]:
        """Returns each layer's seconds for a micro-batch: its forward, backward and recomputing.

        They are medians over micro-batches. A layer whose forward or backward did not run has 0. If
        a layer has replicas, the slowest counts, because the others wait for it. A backward may run
        whole or in two halves. If a layer has backwards of both forms, only the whole ones count.

        Args:
            layers: how many layers the model has.

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
            here_s = statistics.median(of_place_s)
            median_s[layer, kind] = max(slowest_s, here_s)
        return [self._one_layer_s(layer, median_s) for layer in range(layers)]

    @staticmethod
    def _one_layer_s(layer: int, median_s: Mapping[tuple[object, Kind], float]) -> float:
        """Adds up a layer's seconds; `median_s` has those of all layers, by layer and kind."""
        kinds = {kind for of_layer, kind in median_s if of_layer == layer}
        if not (_BEGIN & kinds and _END & kinds):
            return 0.0
        # If some backwards were whole, adding the halves of others would count the work twice.
        counted = _PASSES - _HALVES if Kind.B in kinds else _PASSES
        return sum(median_s.get((layer, kind), 0.0) for kind in counted)

    def with_inside(self, shares: Sequence[float], kept: int | None) -> "Measured":
        """Returns the same, but `recomputed_s` also has the recomputing inside of backwards.

        Args:
            shares: by layer, the share of its backward's time that computes values again.
            kept: the micro-batch of which every value is kept, if there is one. Its backwards
                compute nothing again.
        """
        inside_s = 0.0
        for span in self.spans:
            # The step may be older than a change of the model that has removed layers.
            has_share = span.kind in _BACKWARDS and span.args["layer"] < len(shares)
            if has_share and span.args["microbatch"] != kept:
                inside_s += shares[span.args["layer"]] * (span.end_s - span.start_s)
        return replace(self, recomputed_s=self.recomputed_s + inside_s)

    @property
    def hidden_s(self) -> float:
        """The seconds of copies during which the devices worked."""
        return max(0.0, self.copy_s - self.exposed_s)


Item = tuple[Record, int, jax.Array | None]
"""What a thread gets: a record, the number of a row in it, and the row's marker. An item without a
marker stands for the end of the record."""


class Monitor:
    """An observer of a run's steps, which keeps the records of the last few.

    Each device has three queues of rows: its programs, its copies to the host and back, and the
    moved arrays that come from other devices. The rows of a queue end in order, so one thread per
    queue can wait for their markers one after another.

    Args:
        devices: the device of each place.
        kept: how many of the last steps are kept, at least two.
        layer_s: the seconds of each layer, if they are known. A group of layers that run as one
            program is measured as a whole, and its time is divided in proportion to these seconds.
        microbatches: how many micro-batches a step has.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        kept: int = 2,
        layer_s: Sequence[float] = (),
        microbatches: int = 1,
    ) -> None:
        self._layer_s, self._microbatches = layer_s, microbatches
        names = [str(device) for device in devices]
        self.memories = [*names, "host"]
        links = [f"{name} host" for name in names]
        self._names = [*names, *links]
        # The queues of all devices' programs, then of their links to the host, then of their links
        # from other devices.
        queues = range(3 * len(names))
        self._queues: list[SimpleQueue[Item]] = [SimpleQueue() for _ in queues]
        self._last = [0.0] * len(self._queues)
        # Each entry has the record of a step, and the record of the drain after it, if there was
        # one. A drain finishes the micro-batches that a stream has in flight.
        self._steps: deque[list[Record]] = deque(maxlen=max(2, kept))
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
        flows: bool = False,
    ) -> None:
        """Begins a record of a step, or of the moves of layers between two steps.

        Args:
            lowered: the rows that are about to be dispatched.
            instructions: the instructions that the rows are bound to.
            held_bytes: the bytes in each memory before the rows, as the ledger counts them.
            named: whether a profile shows each wait by the name of its row.
            flows: whether rows may work on micro-batches of earlier steps.
        """
        before = self.close()
        # Moves are not a step. They are read together with the step after them.
        moves = before if before and not _computes(before.lowered) else None
        ended = before.after if before else [0.0] * len(self._queues)
        self._now = Record(
            lowered,
            ended,
            moves,
            instructions,
            list(held_bytes),
            named,
            flows,
        )
        if _begins_microbatches(lowered) or (_is_step(lowered) and not self._steps):
            self._steps.append([self._now])
        elif _is_step(lowered):
            self._steps[-1].append(self._now)

    def noting(self, order: Iterable[int]) -> Iterator[int]:
        """Yields the given numbers of rows, and notes them in the record, in their order."""
        assert self._now is not None, "begun"
        for index in order:
            self._now.order.append(index)
            yield index

    def dispatched(self, index: int, row: Row, mark: jax.Array | None) -> None:
        """Notes that a row has been dispatched.

        Args:
            index: the number of the row in the step.
            row: the row.
            mark: the marker, an array that comes when the row has run. None if `watch` or `arrived`
                is called for the row later.
        """
        assert self._now is not None, "begun"
        self._now.dispatched[index] = time.perf_counter()
        if mark is not None:
            self.watch(index, row, mark)

    def watch(self, index: int, row: Row, mark: jax.Array) -> None:
        """Lets the thread of a row's queue wait for the row's marker.

        Args:
            index: the number of the row in the step.
            row: the row.
            mark: the marker, an array that comes when the row has run.
        """
        assert self._now is not None, "begun"
        queue = self._queues[self._place(row, self._now.lowered)]
        queue.put((self._now, index, mark))

    def arrived(self, index: int) -> None:
        """Notes that a moved array has arrived.

        Args:
            index: the number of the row that has moved it.
        """
        assert self._now is not None, "begun"
        self._now.ended[index] = time.perf_counter()

    def close(self) -> Record | None:
        """Closes the newest record, whose rows have all been dispatched, and returns it."""
        record = self._now
        if record and not record.closed:
            record.closed = True
            # In each queue, an item without a marker follows all others of the record. When the
            # thread meets this item, all rows of the record in its queue have ended.
            for queue in self._queues:
                queue.put((record, -1, None))
        return record

    def last(self, count: int) -> list[Record]:
        """Returns the records of the last `count` steps and of their drains, if they are kept."""
        self.close()
        return [record for step in list(self._steps)[-count:] for record in step]

    def measured(self, *, before: bool = False) -> Measured:
        """Waits for the last step, and returns what was measured of it, without a drain after it.

        Args:
            before: whether to read the step before the last one, if there is one.
        """
        self.close()
        steps = list(self._steps)[-2:]
        return self.read(steps[0 if before else -1][0])

    def read(self, record: Record) -> Measured:
        """Waits for the rows of a closed record; returns their times. Any thread may call this."""
        # The thread of each queue sets an event when it has seen all of the queue's rows end.
        for passed in record.passed:
            passed.wait()
        reading = Reading(list(record.before))
        spans, swapped_bytes = [], 0
        for index, row in enumerate(record.lowered.rows):
            place = self._place(row, record.lowered)
            start_s, end_s = reading.pass_row(record, index, place)
            record.times[index] = start_s, end_s
            if index not in record.ended:
                continue
            if row.kind is Kind.OUT:
                swapped_bytes += record.lowered.buffers[row.writes[0]].bytes
            spans += self._spans(record, row, start_s, end_s)
        took_s: dict[str, float] = defaultdict(float)
        for span in spans:
            took_s[span.kind] += span.end_s - span.start_s
        # If layers were moved just before the step, the moves are shown in front of it.
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

    def _spans(
        self,
        record: Record,
        row: Row,
        start_s: float,
        end_s: float,
    ) -> Iterator[Span]:
        """Yields the spans of a row: one, or one for each layer of a group.

        The time of a group is divided in proportion to the layers' expected times (`_weight`).

        Args:
            record: the record of the step.
            row: one of its rows.
            start_s: when it started.
            end_s: when it ended.
        """
        weights = [self._weight(part) for part in row.parts]
        at_s = start_s
        for part, weight in zip(row.parts, weights, strict=True):
            until_s = at_s + (end_s - start_s) * weight / sum(weights)
            yield self._span(record, part, at_s, until_s)
            at_s = until_s

    def _weight(self, part: Row) -> float:
        """Returns how long a layer's part of a group should take, relative to the other parts.

        A layer without known seconds, and a kind without an assumed time, count as 1.
        """
        has_seconds = 0 <= part.layer < len(self._layer_s)
        of_layer = self._layer_s[part.layer] if has_seconds else 0.0
        of_kind = KINDS[part.kind].weight
        return (of_kind or 1.0) * (of_layer or 1.0)

    def _span(self, record: Record, row: Row, start_s: float, end_s: float) -> Span:
        """Makes the span of a row, or of one layer of a group.

        Args:
            record: the record of the step.
            row: the row of the layer.
            start_s: when it started.
            end_s: when it ended.
        """
        m = row.microbatch
        args: dict[str, int] = {"layer": row.layer, "microbatch": m}
        if row.kind in WATCHED:
            args["bytes"] = sum(record.lowered.buffers[b].bytes for b in row.writes)
        # In a stream, micro-batches of earlier steps have negative numbers here. Readers of spans
        # expect numbers that count from the start of the micro-batch's own step.
        if m < 0 and record.flows and m != NEVER:
            step, m = divmod(m, self._microbatches)
            args |= {"microbatch": m, "steps_ago": -step}
        return Span(
            self._named(row, record.lowered),
            f"{row.stage}{row.kind}{max(m, 0)}",
            start_s,
            end_s,
            row.kind,
            args,
        )

    def _place(self, row: Row, lowered: Lowered) -> int:
        """Returns the number of a row's queue.

        The queues of devices' programs come first, then those of the links to the host, then those
        of the links from other devices.
        """
        devices = len(self._names) // 2
        # If a MOVE goes to another process, this process runs only the source's half, which writes
        # nothing.
        if row.kind is Kind.MOVE and row.writes:
            return lowered.buffers[row.writes[0]].memory + 2 * devices
        return row.place + devices * (row.kind in WATCHED)

    def _named(self, row: Row, lowered: Lowered) -> str:
        """Returns the name of a row's device, or of the link that it takes."""
        if row.kind is not Kind.MOVE:
            return self._names[self._place(row, lowered)]
        source = self._names[row.place]
        if isinstance(row.run, OfferRun):
            return f"{source} to process {row.run.process}"
        if isinstance(row.run, AskRun):
            source = f"process {row.run.process}"
        target = lowered.buffers[row.writes[0]].memory
        return f"{source} to {self._names[target]}"

    def _watch(self, place: int, queue: "SimpleQueue[Item]") -> None:
        """Waits for the markers of a queue, one after another, and notes when each has come."""
        while True:
            record, index, mark = queue.get()
            if mark is None:
                record.after[place] = self._last[place]
                record.passed[place].set()
                continue
            try:
                with _annotated(record, index):
                    mark.block_until_ready()
            except Exception:  # whoever reads the row's result gets this error, too
                continue
            finally:
                del mark  # a copy to the host would otherwise stay in memory after its FREE
            record.ended[index] = self._last[place] = time.perf_counter()


def _annotated(record: Record, index: int) -> AbstractContextManager[object]:
    """Returns a context in which a profiler sees a row's name, if the record is named."""
    if not record.named:
        return nullcontext()
    return jax.profiler.TraceAnnotation(str(record.lowered.rows[index]))


def _computes(lowered: Lowered) -> bool:
    """Tells whether rows run programs, and are not only moves of layers."""
    return any(KINDS[row.kind].computes for row in lowered.rows)


def _is_step(lowered: Lowered) -> bool:
    """Tells whether rows are a step, and not moves of layers or an evaluation."""
    return any(KINDS[row.kind].busy for row in lowered.rows)


def _begins_microbatches(lowered: Lowered) -> bool:
    """Tells whether rows are a step and not a drain, which has only earlier micro-batches."""
    return any(KINDS[row.kind].busy and row.microbatch >= 0 for row in lowered.rows)
