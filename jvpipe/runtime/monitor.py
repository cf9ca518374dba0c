"""What each task took, seen without holding the pipeline up.

Every program yields a marker, four bytes that nothing takes; a copy to the host or back is its own. A thread per device
waits on the markers in their order, another on the copies, and notes when each is there. A task started when its
device was free, its inputs were there and it was dispatched.
"""

import threading
import time
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


class Monitor:
    """Watches one step at a time."""

    def __init__(self, devices: Sequence[Device]) -> None:
        names = [str(device) for device in devices]
        self._names = [*names, *(f"{name} host" for name in names)]
        self._queues: list[SimpleQueue[tuple[int, jax.Array] | None]] = [SimpleQueue() for _ in self._names]
        self._dispatched: dict[int, float] = {}
        self._ended: dict[int, float] = {}
        self._lowered = Lowered((), (), 0, (), ())
        self._done = threading.Semaphore(0)
        for queue in self._queues:
            threading.Thread(target=self._watch, args=(queue,), daemon=True).start()

    def begin(self, lowered: Lowered) -> None:
        """A step is about to be dispatched."""
        self._lowered, self._dispatched, self._ended = lowered, {}, {}

    def dispatched(self, index: int, row: Row, mark: jax.Array) -> None:
        """A row has been dispatched; `mark` is there when it has run."""
        self._dispatched[index] = time.perf_counter()
        self._queues[self._place(row)].put((index, mark))

    def measured(self) -> Measured:
        """What the step did; waits for its end."""
        for queue in self._queues:
            queue.put(None)
        for _ in self._queues:
            self._done.acquire()
        rows, buffers = self._lowered.rows, self._lowered.buffers
        made: dict[int, float] = {}  # when each buffer was there
        fetched: set[int] = set()  # buffers that came back from the host
        held: set[int] = set()  # devices that waited for a FREE since their last program
        free = [0.0] * len(self._queues)
        spans, swapped, exposed_s = [], 0, 0.0
        for index, row in enumerate(rows):
            inputs_s = max((made.get(b, 0.0) for b in row.reads), default=0.0)
            end_s = self._ended.get(index, inputs_s)
            made |= dict.fromkeys(row.writes, end_s)
            if row.kind == "FREE":
                held.add(row.device)
            if index not in self._ended:
                continue
            place, dispatched_s = self._place(row), self._dispatched[index]
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

    def _watch(self, queue: "SimpleQueue[tuple[int, jax.Array] | None]") -> None:
        while True:
            item = queue.get()
            if item is None:
                self._done.release()
                continue
            index, mark = item
            try:
                mark.block_until_ready()
            except Exception:  # whoever reads the result is told
                continue
            finally:
                del item, mark  # a copy that is held here is not gone
            self._ended[index] = time.perf_counter()
