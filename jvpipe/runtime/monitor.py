"""What each task took, seen without holding the pipeline up.

Every program yields a marker, four bytes that nothing takes; a thread per device waits on the markers in their order
and notes when each is there. A task started when its device was free, its inputs were there and it was dispatched.
"""

import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue

import jax

from jvpipe._jax import Device
from jvpipe.ir.span import Span
from jvpipe.ir.task import Row


class Monitor:
    """Watches one step at a time."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._names = [str(device) for device in devices]
        self._queues: list[SimpleQueue[tuple[int, jax.Array] | None]] = [SimpleQueue() for _ in devices]
        self._dispatched: dict[int, float] = {}
        self._ended: dict[int, float] = {}
        self._rows: Sequence[Row] = ()
        self._done = threading.Semaphore(0)
        for queue in self._queues:
            threading.Thread(target=self._watch, args=(queue,), daemon=True).start()

    def begin(self, rows: Sequence[Row]) -> None:
        """A step of these rows is about to be dispatched."""
        self._rows, self._dispatched, self._ended = rows, {}, {}

    def dispatched(self, index: int, device: int, mark: jax.Array) -> None:
        """A row has been dispatched; `mark` is there when it has run."""
        self._dispatched[index] = time.perf_counter()
        self._queues[device].put((index, mark))

    def spans(self) -> list[Span]:
        """The spans of the step; waits for its end."""
        for queue in self._queues:
            queue.put(None)
        for _ in self._queues:
            self._done.acquire()
        made: dict[int, float] = {}  # when each buffer was there
        free = [0.0] * len(self._queues)
        spans = []
        for index, row in enumerate(self._rows):
            inputs_s = max((made.get(b, 0.0) for b in row.reads), default=0.0)
            end_s = self._ended.get(index, inputs_s)
            made |= dict.fromkeys(row.writes, end_s)
            if index in self._ended:
                start_s = min(end_s, max(free[row.device], inputs_s, self._dispatched[index]))
                free[row.device] = end_s
                args = {"layer": row.layer}
                name = f"{row.stage}{row.kind}{max(row.microbatch, 0)}"
                spans.append(Span(self._names[row.device], name, start_s, end_s, row.kind, args))
        return spans

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
            self._ended[index] = time.perf_counter()
