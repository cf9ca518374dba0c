"""The order of dispatch: that of the lists, except that a late copy holds up its own device alone.

A FREE waits until its copy has reached the host. Meanwhile its device is blocked: its rows queue up
behind the FREE. So do a row that would send to the blocked device, whose memory must be what the
buffer table says, and a row whose inputs have not been made yet. All other devices go on. Two rules
reach across devices: nothing that a moved layer leaves behind is dropped before all of it has
arrived elsewhere; and where the host has a limit, nothing goes there before what was to leave it
has left. A RECEIPT waits in the same way for what another process reports.

    lists       F0 OUT0 FREE0 F1  F0' SEND0 F2 ...      the copy of OUT0 is late:
    dispatched  F0 OUT0       F1            F2 ...      FREE0, F0' and SEND0 are blocked until it is there

It ends: the list is an order in which every row finds its inputs, and of all blocked rows the first
in the list waits for nothing but a copy that is under way.
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
"""How long to sleep when all devices are blocked."""
_WAITING = tuple(kind for kind, info in KINDS.items() if info.runs is Runs.WAIT)


def dispatch_ready(
    rows: Sequence[Row],
    targets: Sequence[int],
    table: Sequence[Any],
    leaves_host: Container[int] = (),
) -> Iterator[int]:
    """Yields the number of each row once it may be dispatched.

    Args:
        rows: of all devices, in the order of the lists.
        targets: the place of what each row makes.
        table: the array of each buffer, None before it is made; it fills up as rows are dispatched.
        leaves_host: the rows that free bytes of the host which others wait for, if it has a limit.
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
            # With nothing blocked the order is that of the lists, in which inputs come first: no
            # look is needed.
            yield index
    while queues:
        before = sum(map(len, queues.values()))
        yield from blocked.retry()
        if sum(map(len, queues.values())) == before:
            time.sleep(_POLL_S)


@dataclass
class _Blocked:
    """The rows that devices have put off.

    `queues` has them by device, in the order of the lists; a device is in it while it is blocked,
    which most of the time none is. The other fields are those of `dispatch_ready`.
    """

    rows: Sequence[Row]
    targets: Sequence[int]
    table: Sequence[Any]
    leaves_host: Container[int]
    queues: dict[int, deque[int]] = field(default_factory=dict)

    def retry(self) -> Iterator[int]:
        """Yields the rows that may be dispatched by now.

        The device whose first row is the oldest comes first.
        """
        for device in sorted(self.queues, key=lambda d: self.queues[d][0]):
            queue = self.queues[device]
            while queue and self.is_ready(queue[0]):
                # The row stays in its queue while it is dispatched: until then it may hold others
                # up.
                yield queue[0]
                queue.popleft()
            if not queue:
                del self.queues[device]

    def is_ready(self, index: int) -> bool:
        """Tells whether a row may be dispatched, as far as its own device is not what holds it up."""
        return self._may_enter(index) and self._has_inputs(self.rows[index])

    def _may_enter(self, index: int) -> bool:
        """Tells whether nothing that is blocked keeps a row from its target, or from dropping what it ends."""
        target = self.targets[index]
        if target in self.queues and self.queues[target][0] < index:
            return False
        if self.rows[index].kind is Kind.DROP:
            return not self._is_before(index, lambda i: _awaits_move(self.rows[i]))
        if target == HOST:
            return not self._is_before(index, lambda i: i in self.leaves_host)
        return True

    def _is_before(self, index: int, such: Callable[[int], bool]) -> bool:
        """Tells whether such a row is blocked that comes before this one in the lists."""
        earlier = (i for queue in self.queues.values() for i in queue if i < index)
        return any(map(such, earlier))

    def _has_inputs(self, row: Row) -> bool:
        if row.kind is Kind.FREE:
            # The copy was made before: if it is no longer in the table, another device has used it
            # already.
            copy = self.table[row.reads[1]]
            return copy is None or _jax.is_ready(copy)
        if row.kind is Kind.RECEIPT:
            witness = self.table[row.reads[0]]
            return witness is not None and _jax.is_ready(witness)
        return all(self.table[b] is not None for b in row.reads)


def _awaits_move(row: Row) -> bool:
    """Tells whether a row waits for a moved array to arrive: its FREE is of no layer, that of a swap is of one."""
    return row.kind is Kind.FREE and row.layer < 0
