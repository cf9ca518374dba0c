"""Whose turn it is: rows in the order of the lists, but that a late copy holds up its own device alone.

A FREE waits until its copy has reached the host. Meanwhile its device puts its rows off; so does one that would send
to it, for what it holds must be what the buffer table says; and one whose inputs are not there. The others go on. But
nothing that layers leave behind is dropped before all of it has arrived elsewhere, and where the host has a limit
nothing goes there before what was to leave it.
"""

import time
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

from jvpipe import _jax
from jvpipe.ir.buffers import HOST
from jvpipe.ir.kinds import Kind
from jvpipe.ir.rows import Row

_POLL_S = 5e-5


def turns(
    rows: Sequence[Row], targets: Sequence[int], table: Sequence[Any], leaves_host: Container[int] = ()
) -> Iterator[int]:
    """The numbers of the rows, each when it may be dispatched.

    Args:
        rows: of all devices, in the order of their dispatch.
        targets: where the buffers lie that each row makes.
        table: the array of each buffer, None before it is made; it fills up as rows are dispatched.
        leaves_host: the rows whose bytes on the host others wait for, if it has a limit.
    """
    late: dict[int, deque[int]] = {}  # by device, the rows that it has put off

    def put_off_before(index: int, such: Callable[[int], bool]) -> bool:
        return any(i < index and such(i) for queue in late.values() for i in queue)

    def may_go(index: int) -> bool:
        row, target = rows[index], targets[index]
        if target in late and late[target][0] < index:
            return False
        if row.kind is Kind.DROP and put_off_before(index, lambda i: _awaits_move(rows[i])):
            return False
        if target == HOST and put_off_before(index, lambda i: i in leaves_host):
            return False
        if row.kind is Kind.FREE:  # its copy was made before it: if that is gone, another device has used it already
            return table[row.reads[1]] is None or _jax.is_ready(table[row.reads[1]])
        return all(table[b] is not None for b in row.reads)

    def by_now() -> Iterator[int]:
        """What may go by now of what had to wait."""
        for device in sorted(late, key=lambda d: late[d][0]):
            queue = late[device]
            while queue and may_go(queue[0]):
                yield queue[0]
                queue.popleft()
            if not queue:
                del late[device]

    for index, row in enumerate(rows):
        if late:
            yield from by_now()
        if row.place in late:
            late[row.place].append(index)
        elif (late or row.kind is Kind.FREE) and not may_go(index):
            late[row.place] = deque([index])
        else:
            yield index
    while late:
        before = sum(map(len, late.values()))
        yield from by_now()
        if sum(map(len, late.values())) == before:
            time.sleep(_POLL_S)


def _awaits_move(row: Row) -> bool:
    """Whether a row waits for what leaves with a layer; what is swapped leaves with a task of its own."""
    return row.kind is Kind.FREE and row.layer < 0
