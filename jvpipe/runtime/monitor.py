"""What each task took, seen without holding the pipeline up.

Every program yields a marker, four bytes that nothing takes; a copy to the host or back is its own. A thread per device
waits on the markers in their order, another on the copies, and notes when each is there. A task started when its
device was free, its inputs were there and it was dispatched.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import jax

from jvpipe._jax import Device
from jvpipe.ir.buffers import Lowered
from jvpipe.ir.span import Span
from jvpipe.ir.task import Row


@dataclass(frozen=True, slots=True)
class Measured:
    """What a step did.

    `swapped_bytes` went to the host; their copies took `copy_s` both ways, of which devices were idle for `exposed_s`.
    Forwards that ran again took `rerun_s`.
    """

    spans: tuple[Span, ...]
    swapped_bytes: int
    copy_s: float
    exposed_s: float
    rerun_s: float

    @property
    def hidden_s(self) -> float:
        """Seconds of copies beside which the devices worked."""
        return max(0.0, self.copy_s - self.exposed_s)


class Record:
    """The marks of one step."""

    def __init__(self, lowered: Lowered, before: Sequence[float]) -> None:
        self.lowered, self.before = lowered, list(before)  # when each place had ended what came before
        self.dispatched: dict[int, float] = {}
        self.ended: dict[int, float] = {}
        self.done = threading.Semaphore(0)
        self.closed = False


Item = tuple[Record, int, jax.Array | None]


class Monitor:
    """Watches the steps of a run; what it knows of the last two can be asked for."""

    def __init__(self, devices: Sequence[Device]) -> None:
        names = [str(device) for device in devices]
        self._names = [*names, *(f"{name} host" for name in names)]
        self._queues: list[SimpleQueue[Item]] = [SimpleQueue() for _ in self._names]
        self._last = [0.0] * len(self._names)
        self._records: deque[Record] = deque(maxlen=2)
        for place, queue in enumerate(self._queues):
            threading.Thread(target=self._watch, args=(place, queue), daemon=True).start()

    def begin(self, lowered: Lowered) -> None:
        """A step is about to be dispatched."""
        if self._records:
            self._close(self._records[-1])
        self._records.append(Record(lowered, self._last))

    def dispatched(self, index: int, row: Row, mark: jax.Array) -> None:
        """A row has been dispatched; `mark` is there when it has run."""
        record = self._records[-1]
        record.dispatched[index] = time.perf_counter()
        self._queues[self._place(row)].put((record, index, mark))

    def measured(self, *, before: bool = False) -> Measured:
        """What the last step did, or the one `before`; waits for its end."""
        record = self._records[0 if before else -1]
        self._close(record)
        for _ in self._queues:
            record.done.acquire()
        for _ in self._queues:  # it may be asked again
            record.done.release()
        rows, buffers = record.lowered.rows, record.lowered.buffers
        made: dict[int, float] = {}  # when each buffer was there
        fetched: set[int] = set()  # buffers that came back from the host
        held: set[int] = set()  # devices that waited for a FREE since their last program
        free = list(record.before)
        spans, swapped, exposed_s = [], 0, 0.0
        for index, row in enumerate(rows):
            inputs_s = max((made.get(b, 0.0) for b in row.reads), default=0.0)
            end_s = record.ended.get(index, inputs_s)
            made |= dict.fromkeys(row.writes, end_s)
            if row.kind == "FREE":
                held.add(row.device)
            if index not in record.ended:
                continue
            place, dispatched_s = self._place(row), record.dispatched[index]
            start_s = min(end_s, max(free[place], inputs_s, dispatched_s))
            if row.kind == "OUT":
                swapped += buffers[row.writes[0]].bytes
            elif row.kind == "IN":
                fetched.update(row.writes)
            else:
                else_s = max([made.get(b, 0.0) for b in row.reads if b not in fetched], default=0.0)
                else_s = max(free[place], else_s, 0.0 if row.device in held else dispatched_s)
                exposed_s += max(0.0, start_s - else_s) if free[place] else 0.0
                held.discard(row.device)
            free[place] = end_s
            name = f"{row.stage}{row.kind}{max(row.microbatch, 0)}"
            spans.append(Span(self._names[place], name, start_s, end_s, row.kind, {"layer": row.layer}))
        took_s = {kind: sum((s.end_s - s.start_s for s in spans if s.kind == kind), 0.0) for kind in ("OUT", "IN", "R")}
        return Measured(tuple(spans), swapped, took_s["OUT"] + took_s["IN"], exposed_s, took_s["R"])

    def _place(self, row: Row) -> int:
        """The device of a row, or its link to the host."""
        return row.device + len(self._names) // 2 * (row.kind in ("OUT", "IN"))

    def _close(self, record: Record) -> None:
        """Lets the watchers say when they have passed the end of a step."""
        if not record.closed:
            record.closed = True
            for queue in self._queues:
                queue.put((record, -1, None))

    def _watch(self, place: int, queue: "SimpleQueue[Item]") -> None:
        while True:
            record, index, mark = queue.get()
            if mark is None:
                record.done.release()
                continue
            try:
                mark.block_until_ready()
            except Exception:  # whoever reads the result is told
                continue
            finally:
                del mark  # a copy that is held here is not gone
            record.ended[index] = self._last[place] = time.perf_counter()
