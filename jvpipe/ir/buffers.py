"""The buffer table: every array of a step, who owns it, how large it is and where it lies."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jvpipe.ir.task import Row

Owner = Literal["parameter", "optimizer", "state", "constant", "gradient", "residual", "edge", "batch", "metric"]
PERSISTENT = ("parameter", "optimizer", "state", "constant")
HOST = -1
"""Stands for the host where a device's number would; tables by device have a last row for it."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """An array of a step. `key` names it: its kind and what distinguishes it from others of its kind.

    `device` is where it lies, `HOST` if it has been swapped out.
    """

    key: tuple[Hashable, ...]
    owner: Owner
    bytes: int
    device: int


@dataclass(frozen=True, slots=True)
class Lowered:
    """A step as rows in the order of their dispatch; a device's own list is the rows that run on it.

    The first `persistent` buffers exist before the step; `final` are the buffers that hold the same things after it.
    """

    rows: tuple[Row, ...]
    buffers: tuple[Buffer, ...]
    persistent: int
    final: tuple[int, ...]
    metrics: tuple[int, ...]

    def device_rows(self, device: int) -> tuple[Row, ...]:
        """One device's list."""
        return tuple(row for row in self.rows if row.device == device)

    def changes(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Per row, the buffers that are born and those that die at it."""
        alive = set(range(self.persistent))
        found = []
        for row in self.rows:
            born = tuple(b for b in row.writes if b not in alive)
            alive.update(born)
            alive.difference_update(row.frees)
            found.append((born, row.frees))
        return found


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes that a device holds in a step, at which row, and who holds them."""

    bytes: int
    row: Row | None
    holders: tuple[tuple[str, int], ...]


def peaks(lowered: Lowered, devices: int, temporary: Sequence[int] = ()) -> tuple[Peak, ...]:
    """Each device's peak, and last the host's: buffers, and temporaries of the program that runs (bytes per row)."""
    live = np.zeros(devices + 1, int)
    for buffer in lowered.buffers[: lowered.persistent]:
        live[buffer.device] += buffer.bytes
    best, at = live.copy(), [-1] * len(live)
    for i, (row, (born, dead)) in enumerate(zip(lowered.rows, lowered.changes(), strict=True)):
        for b in born:
            live[lowered.buffers[b].device] += lowered.buffers[b].bytes
        for d in {row.device, *(lowered.buffers[b].device for b in born)}:
            now = live[d] + (temporary[i] if temporary and d == row.device else 0)
            if now > best[d]:
                best[d], at[d] = now, i
        for b in dead:
            live[lowered.buffers[b].device] -= lowered.buffers[b].bytes
    return tuple(
        Peak(int(best[d]), lowered.rows[at[d]] if at[d] >= 0 else None, _holders(lowered, d, at[d]))
        for d in (*range(devices), HOST)
    )


def _holders(lowered: Lowered, device: int, until: int) -> tuple[tuple[str, int], ...]:
    """Bytes by owner on a device while row `until` runs, the largest first."""
    alive = set(range(lowered.persistent))
    for i, (row, (born, _)) in enumerate(zip(lowered.rows[: until + 1], lowered.changes(), strict=False)):
        alive.update(born)
        if i < until:
            alive.difference_update(row.frees)
    total: dict[str, int] = {}
    for b in alive:
        buffer = lowered.buffers[b]
        if buffer.device == device:
            total[buffer.owner] = total.get(buffer.owner, 0) + buffer.bytes
    return tuple(sorted(total.items(), key=lambda item: -item[1]))
