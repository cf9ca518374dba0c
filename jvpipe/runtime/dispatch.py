"""The order of dispatch: that of the lists, but that a late copy holds up its own device alone.

A FREE waits until its copy has reached the host. Meanwhile its device puts its rows off; so does one that would send
to it, for what it holds must be what the buffer table says; and one whose inputs are not there. The others go on. But
nothing that layers leave behind is dropped before all of it has arrived elsewhere, and where the host has a limit
nothing goes there before what was to leave it. A RECEIPT waits in the same way for what comes from another process.

    lists       F0 OUT0 FREE0 F1  F0' SEND0 F2 ...      the copy of OUT0 is late:
    dispatched  F0 OUT0       F1            F2 ...      FREE0, F0' and SEND0 are blocked until it is there
"""

import time
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

from jvpipe import _jax
from jvpipe.ir.buffers import HOST
from jvpipe.ir.kinds import KINDS, Kind, Runs
from jvpipe.ir.rows import Row

_POLL_S = 5e-5
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
        targets: where the buffers lie that each row makes.
        table: the array of each buffer, None before it is made; it fills up as rows are dispatched.
        leaves_host: the rows whose bytes on the host others wait for, if it has a limit.
    """
    blocked: dict[int, deque[int]] = {}  # by device, the rows that it has put off

    def blocked_before(index: int, such: Callable[[int], bool]) -> bool:
        return any(i < index and such(i) for queue in blocked.values() for i in queue)

    def is_ready(index: int) -> bool:
        row, target = rows[index], targets[index]
        if target in blocked and blocked[target][0] < index:
            return False
        if row.kind is Kind.DROP and blocked_before(index, lambda i: _awaits_move(rows[i])):
            return False
        if target == HOST and blocked_before(index, lambda i: i in leaves_host):
            return False
        if (
            row.kind is Kind.FREE
        ):  # its copy was made before it: if that is gone, another device has used it already
            return table[row.reads[1]] is None or _jax.is_ready(table[row.reads[1]])
        if row.kind is Kind.RECEIPT:
            return table[row.reads[0]] is not None and _jax.is_ready(table[row.reads[0]])
        return all(table[b] is not None for b in row.reads)

    def retry_blocked() -> Iterator[int]:
        for device in sorted(blocked, key=lambda d: blocked[d][0]):
            queue = blocked[device]
            while queue and is_ready(queue[0]):
                yield queue[0]
                queue.popleft()
            if not queue:
                del blocked[device]

    for index, row in enumerate(rows):
        if blocked:
            yield from retry_blocked()
        if row.place in blocked:
            blocked[row.place].append(index)
        elif (blocked or row.kind in _WAITING) and not is_ready(index):
            blocked[row.place] = deque([index])
        else:
            yield index
    while blocked:
        before = sum(map(len, blocked.values()))
        yield from retry_blocked()
        if sum(map(len, blocked.values())) == before:
            time.sleep(_POLL_S)


def _awaits_move(row: Row) -> bool:
    """True for a row that waits for what leaves with a layer; what is swapped leaves with a task of its own."""
    return row.kind is Kind.FREE and row.layer < 0
