"""Dispatches rows in their lowered order, except that a late copy delays only its device.

A FREE waits until a copy to the host or to another device has arrived. It then frees the buffer
that was copied. A RECEIPT waits until another process reports the arrival of a copy. While a FREE
or a RECEIPT waits, its device is blocked, and later rows of the device queue up behind it. Rows of
other devices go on. But such a row also waits, and then blocks its own device, if it

- makes a buffer on a blocked device, and a blocked row there comes earlier in the list: the device
  must not hold more than the buffer table says;
- reads a buffer that has not been made yet;
- is a DROP of arrays that moved layers leave behind, while any moved array has not arrived;
- writes to the host, if the host has a limit and an earlier blocked row frees bytes of the host.

In this example F0 and F0' (two layers), OUT0, FREE0 and SEND0 are rows of one device. F1 and F2 are
rows of another:

    lists       F0 OUT0 FREE0 F1  F0' SEND0 F2 ...      the copy of OUT0 is late
    dispatched  F0 OUT0       F1            F2 ...      FREE0, F0' and SEND0 wait for the copy

No row waits forever. Take the blocked row that comes first in the list. All rows before it were
dispatched, so its inputs have been made. It waits only for a copy that is under way.
"""

import time
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jvpipe import _jax
from jvpipe.ir.buffers import HOST
from jvpipe.ir.kinds import KINDS, Kind, Runs
from jvpipe.ir.rows import Row

_POLL_S = 5e-5
"""Seconds of sleep between two tries while all remaining rows are blocked."""
_WAITING = tuple(kind for kind, info in KINDS.items() if info.runs is Runs.WAIT)


def dispatch_ready(
    rows: Sequence[Row],
    targets: Sequence[int],
    table: Sequence[Any],
    leaves_host: Container[int] = (),
    check: Callable[[], None] = lambda: None,
) -> Iterator[int]:
    """Yields the number of each row once it may be dispatched.

    Args:
        rows: the rows of all devices, in the order of the lists.
        targets: the memory of the buffers that each row makes.
        table: the array of each buffer; None before it is made. The caller adds a row's arrays
            before it asks for the next number.
        leaves_host: the numbers of the rows that free bytes of the host, if the host has a limit.
        check: called repeatedly while all remaining rows wait for copies. It raises an
            error if a copy will never come, because the other process is stopped.
    """
    blocked = _Blocked(rows, targets, table, leaves_host)
    queues = blocked.queues
    for index, row in enumerate(rows):
        if queues:
            yield from blocked.retry()
        if row.place in queues:
            queues[row.place].append(index)
        elif (queues or row.kind in _WAITING) and not blocked.is_ready(index):
            queues[row.place] = deque([index])
        else:
            # If nothing is blocked, all earlier rows have been dispatched, so the inputs are made.
            yield index
    while queues:
        before = sum(map(len, queues.values()))
        yield from blocked.retry()
        if sum(map(len, queues.values())) == before:
            check()
            time.sleep(_POLL_S)


@dataclass
class _Blocked:
    """The rows that are blocked or queued behind a blocked row.

    `queues` has their numbers by device, in the order of the lists. A device is in `queues` only
    while it is blocked. The other fields are the arguments of `dispatch_ready`.
    """

    rows: Sequence[Row]
    targets: Sequence[int]
    table: Sequence[Any]
    leaves_host: Container[int]
    queues: dict[int, deque[int]] = field(default_factory=dict)

    def retry(self) -> Iterator[int]:
        """Yields the blocked rows that may be dispatched by now.

        The device whose first blocked row comes earliest in the lists goes first.
        """
        for device in sorted(self.queues, key=lambda d: self.queues[d][0]):
            queue = self.queues[device]
            while queue and self.is_ready(queue[0]):
                # The row may block other rows until it is dispatched, so it stays in its queue.
                yield queue[0]
                queue.popleft()
            if not queue:
                del self.queues[device]

    def is_ready(self, index: int) -> bool:
        """Returns whether a row may be dispatched, if no earlier row of its device is blocked."""
        return self._may_enter(index) and self._has_inputs(self.rows[index])

    def _may_enter(self, index: int) -> bool:
        """Returns whether a row may make its buffers, or drop arrays, before the blocked rows."""
        target = self.targets[index]
        if target in self.queues and self.queues[target][0] < index:
            return False
        if self.rows[index].kind is Kind.DROP:
            return not self._is_before(index, lambda i: _awaits_move(self.rows[i]))
        if target == HOST:
            return not self._is_before(index, lambda i: i in self.leaves_host)
        return True

    def _is_before(self, index: int, condition: Callable[[int], bool]) -> bool:
        """Returns whether a blocked row before row `index` meets a condition."""
        earlier = (i for queue in self.queues.values() for i in queue if i < index)
        return any(map(condition, earlier))

    def _has_inputs(self, row: Row) -> bool:
        """Returns whether a row's inputs are made or, for a FREE or RECEIPT, have arrived."""
        if row.kind is Kind.FREE:
            # The copy was dispatched earlier. If the table lacks it, it was already used and freed.
            copy = self.table[row.reads[1]]
            return copy is None or _jax.is_ready(copy)
        if row.kind is Kind.RECEIPT:
            witness = self.table[row.reads[0]]
            return witness is not None and _jax.is_ready(witness)
        return all(self.table[b] is not None for b in row.reads)


def _awaits_move(row: Row) -> bool:
    """Tells whether a row is the FREE of a moved array; the FREE of a swapped value has a layer."""
    return row.kind is Kind.FREE and row.layer < 0
