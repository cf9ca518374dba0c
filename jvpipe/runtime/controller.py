"""The controller: one thread that dispatches the rows of a lowered step in their order.

Dispatch is asynchronous: a program starts when its device is free and its inputs are there. The controller only
names arrays, so its own time per row is what limits small models.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import jax

from jvpipe import _jax
from jvpipe._jax import Device
from jvpipe.ir.buffers import Lowered
from jvpipe.ir.task import Row
from jvpipe.runtime.monitor import Monitor
from jvpipe.runtime.tensors import Ledger

# feeds[kind, index][m] is what micro-batch m reads from the host
Feeds = Mapping[tuple[str, int], Sequence[Any]]


class StageError(RuntimeError):
    """A program failed: says in which stage, task and layer."""


class Instruction(NamedTuple):
    """A row bound to what runs it, so that running it looks nothing up.

    `run` is an executable, or a copy; `feed` names what comes from the host. `born_bytes` are held on device `target`
    from the row on, `freed_bytes` on device `source` no longer; `temporary_bytes` only while the row runs.
    """

    run: Callable[..., Any]
    feed: tuple[str, int] | None
    gather: Callable[[list[Any]], Sequence[Any]]
    writes: tuple[int, ...]
    frees: tuple[int, ...]
    target: int
    born_bytes: int
    temporary_bytes: int
    source: int
    freed_bytes: int
    row: Row


def bind(lowered: Lowered, devices: Sequence[Device], executable_of: Callable[[Row], Any]) -> tuple[Instruction, ...]:
    """Binds rows to executables and copies."""
    buffers = lowered.buffers
    bound = []
    for row, (born, dead) in zip(lowered.rows, lowered.changes(), strict=True):
        target = buffers[row.writes[0]].device if row.kind == "SEND" else row.device
        feed, temporary = None, 0
        match row.kind:
            case "SEND":
                run = _in_list(_jax.copier(devices[target]))
            case "FEED":
                kind, index, *_ = buffers[row.writes[0]].key
                feed, run = (str(kind), int(str(index))), _jax.feeder(devices[target])
            case _:
                run = executable_of(row)
                temporary = run.memory_analysis().temp_size_in_bytes
        sizes = [sum(buffers[b].bytes for b in found) for found in (born, dead)]
        gather = _gather(row.reads)
        bound.append(
            Instruction(run, feed, gather, row.writes, dead, target, sizes[0], temporary, row.device, sizes[1], row)
        )
    return tuple(bound)


def _in_list(copy: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
    return lambda x: [copy(x)]


def _gather(ids: tuple[int, ...]) -> Callable[[list[Any]], Sequence[Any]]:
    """A function that picks these ids from the table."""
    if len(ids) > 1:
        return itemgetter(*ids)
    return (lambda table: (table[ids[0]],)) if ids else (lambda table: ())


@dataclass
class Controller:
    """Runs bound steps; keeps the markers of the last one, to find out what failed."""

    ledger: Ledger
    monitor: Monitor | None = None

    def __post_init__(self) -> None:
        self.marks: list[tuple[Row, jax.Array]] = []

    def run(self, instructions: Sequence[Instruction], table: list[Any], feeds: Feeds) -> list[Any]:
        """Dispatches every row; `table` holds the persistent arrays first and is as long as the buffer table."""
        live, peak = self.ledger.live, self.ledger.peak
        marks = self.marks = []
        monitor = self.monitor
        if monitor is not None:
            monitor.begin([it.row for it in instructions])
        for index, it in enumerate(instructions):
            run, feed, gather, writes, frees, target, born, temporary, source, freed, row = it
            live[target] += born
            if live[target] + temporary > peak[target]:
                peak[target] = live[target] + temporary
            if feed is not None:
                table[writes[0]] = run(feeds[feed][row.microbatch])
            else:
                try:
                    out = run(*gather(table))
                except Exception as error:
                    raise self.failure(error, row) from error
                for b, x in zip(writes, out):  # noqa: B905 - a marker may follow
                    table[b] = x
                if len(out) > len(writes):
                    marks.append((row, out[-1]))
                    if monitor is not None:
                        monitor.dispatched(index, source, out[-1])
            for b in frees:
                table[b] = None
            live[source] -= freed
        return table

    def failure(self, error: Exception, row: Row | None = None) -> StageError:
        """The error of the first row that failed: by the markers of what was dispatched, else `row`."""
        for marked, mark in self.marks:
            try:
                mark.block_until_ready()
            except Exception as first:
                return StageError(f"{describe(marked)} failed: {_first_line(first)}")
        return StageError(f"{describe(row) if row else 'a step'} failed: {_first_line(error)}")


def describe(row: Row) -> str:
    """A row in words."""
    return f"stage {row.stage}, task {row}, device {row.device}"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:2000]}"
