"""Rows bound to what runs them: executables and copies, so that running a step looks nothing up."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple, assert_never

import jax
import numpy as np

from jvpipe import _jax
from jvpipe._jax import Device
from jvpipe.cost.target_store import AbsentProgram
from jvpipe.ir.buffers import HOST, Buffer, Lowered
from jvpipe.ir.kinds import KINDS, Kind, Runs
from jvpipe.ir.layers import Spec
from jvpipe.ir.lazy_array import LazyArray
from jvpipe.ir.rows import Row
from jvpipe.ir.values import Value

_PROMPT_BYTES = 1 << 16
"""Up to here a copy takes less than waking the thread that would make it."""


class Instruction(NamedTuple):
    """A row bound to what runs it, so that running it looks nothing up.

    Attributes:
        run: an executable, or a copy.
        feed: the kind and index of what comes from the host; None if nothing does.
        gather: picks from the table what the row reads.
        writes: the buffers that it writes.
        frees: the buffers that end with it.
        target: the memory in which it makes buffers.
        born_bytes: held in `target` from the row on.
        temporary_bytes: held in `target` while the row runs.
        source: the memory in which it ends buffers.
        freed_bytes: held in `source` until the row has run.
        watched: it calls the host, so it can fail after its dispatch.
        row: what it was bound from.
        mark: of an array that has moved to where others may overwrite it, compiles a program that
            only reads it.
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
    watched: bool
    row: Row
    mark: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Bound:
    """A lowered step, ready to run."""

    lowered: Lowered
    instructions: tuple[Instruction, ...]

    @cached_property
    def named(self) -> tuple[Instruction, ...]:
        """The instructions; a profiler sees each dispatch by the name of its row."""
        runs = [_named(one.run, f"dispatch {one.row}") for one in self.instructions]
        pairs = zip(self.instructions, runs, strict=True)
        return tuple(one._replace(run=run) for one, run in pairs)

    @cached_property
    def targets(self) -> list[int]:
        """The place of what each row makes."""
        return [instruction.target for instruction in self.instructions]

    @cached_property
    def waits(self) -> bool:
        """Whether a row may have to be put off, because a copy is late."""
        return any(KINDS[one.row.kind].runs is Runs.WAIT for one in self.instructions)

    @cached_property
    def leaves_host(self) -> frozenset[int]:
        """The rows that free bytes of the host."""
        numbered = enumerate(self.instructions)
        return frozenset(i for i, one in numbered if one.source == HOST and one.frees)

    @cached_property
    def feeds(self) -> frozenset[tuple[str, int]]:
        """The kinds and indices of what the rows read from the host."""
        return frozenset(one.feed for one in self.instructions if one.feed)

    @cached_property
    def laid(self) -> Lowered:
        """The lowered step, its buffers as large as programs say that they lie: with padding, on absent hardware."""
        padded: dict[int, int] = {}  # by buffer, its bytes
        for one in self.instructions:
            if not isinstance(one.run, AbsentProgram):
                continue
            sizes = one.run.sizes
            taken = zip(one.row.reads, sizes.each_argument, strict=False)
            yielded = zip(one.row.writes, sizes.each_result, strict=False)  # a mark comes last
            for b, size in (*taken, *yielded):
                padded[b] = max(padded.get(b, 0), size)
        if not padded:
            return self.lowered
        buffers = list(self.lowered.buffers)
        for b, size in padded.items():
            buffers[b] = replace(buffers[b], bytes=size)
        return replace(self.lowered, buffers=tuple(buffers))

    @property
    def temporary_bytes(self) -> list[int]:
        """The bytes that each row's program needs while it runs."""
        return [instruction.temporary_bytes for instruction in self.instructions]

    def compile_marks(self) -> None:
        """Compiles what only a run that is measured needs."""
        for instruction in self.instructions:
            if instruction.mark:
                instruction.mark()


def bind(
    lowered: Lowered,
    devices: Sequence[Device],
    executable_of: Callable[[Row], Any],
    calls_host: Callable[[Row], bool],
    mark_of: Callable[[Buffer], Callable[[], Any] | None],
    crossing_of: Callable[[Row], Callable[..., Any] | None] = lambda row: None,
    spec_of: Callable[[Value], Spec] = lambda value: (),
) -> Bound:
    """Binds each row to the program or the copy that runs it.

    Args:
        lowered: the rows.
        devices: by the places of the rows.
        executable_of: returns the executable of a row that runs a program.
        calls_host: tells whether such a row calls the host: those can fail and are watched.
        mark_of: returns what compiles the program that says when a moved buffer has arrived.
        crossing_of: returns what runs this process's half of a copy between processes; None for
            other rows.
        spec_of: tells how a leaf of the batch lies over a group of devices.
    """
    buffers = lowered.buffers
    temporary_bytes: dict[
        int, int
    ] = {}  # by executable: many rows share one, and asking takes longer than binding

    def temporary_of(executable: Any) -> int:
        if id(executable) not in temporary_bytes:
            needs = executable.memory_analysis()
            temporary_bytes[id(executable)] = needs.temp_size_in_bytes
        return temporary_bytes[id(executable)]

    instructions = []
    for row, (born, dead) in zip(lowered.rows, lowered.changes(), strict=True):
        target, source = (_memory(buffers, ids) if ids else row.place for ids in (born, dead))
        copy = crossing_of(row) or _copy(row, buffers, devices, target, spec_of)
        run = executable_of(row) if copy is None else copy
        # What a FEED writes is a leaf of the batch: it names what the row reads on the host.
        leaf = buffers[row.writes[0]].value if row.kind is Kind.FEED else None
        # Whoever measures has to see such an array before it is overwritten; a copy to the host is
        # not.
        moves = row.kind in (Kind.MOVE, Kind.IN) and row.writes
        instruction = Instruction(
            run=run,
            feed=(leaf.kind, leaf.index) if leaf else None,
            gather=_gather(row.reads),
            writes=row.writes,
            frees=dead,
            target=target,
            born_bytes=sum(buffers[b].bytes for b in born),
            temporary_bytes=temporary_of(run) if copy is None else 0,
            source=source,
            freed_bytes=sum(buffers[b].bytes for b in dead),
            watched=calls_host(row),
            row=row,
            mark=mark_of(buffers[row.writes[0]]) if moves else None,
        )
        instructions.append(instruction)
    return Bound(lowered, tuple(instructions))


def _copy(
    row: Row,
    buffers: Sequence[Buffer],
    devices: Sequence[Device],
    target: int,
    spec_of: Callable[[Value], Spec],
) -> Callable[..., Any] | None:
    """Returns what runs a row that only copies, waits or drops; None for one that runs a program.

    Args:
        row: the row.
        buffers: of the step.
        devices: by the places of the rows.
        target: the place of what the row makes.
        spec_of: tells how a leaf of the batch lies over a group of devices.
    """
    match row.kind:
        case Kind.SEND | Kind.RETURN | Kind.MOVE:
            source, goal = devices[row.place], devices[target]
            is_prompt = buffers[row.reads[0]].bytes <= _PROMPT_BYTES
            copier = _jax.prompt_copier(source, goal) if is_prompt else _jax.copier(goal)
            return _in_list(copier)
        case Kind.OUT:
            return _in_list(_jax.swapper(devices[row.place], "pinned_host"))
        case Kind.IN:
            return _in_list(_jax.swapper(devices[row.place], "device"))
        case Kind.FREE:
            return _wait
        case Kind.RECEIPT:
            # Only the order of dispatch waits for a receipt: here it has come, or has failed.
            return _received
        case Kind.DROP:
            return _nothing
        case Kind.FEED:
            leaf = buffers[row.writes[0]].value
            return _fed(_jax.feeder(devices[target], spec_of(leaf)), leaf)
        case (
            Kind.F
            | Kind.B
            | Kind.I
            | Kind.W
            | Kind.R
            | Kind.E
            | Kind.U
            | Kind.ZERO
            | Kind.LOSS
            | Kind.WEIGHT
            | Kind.SHIFT
            | Kind.SETTLE
            | Kind.ARRIVE
            | Kind.SLICE
            | Kind.CONCAT
            | Kind.REDUCE
        ):
            return None
        case _:
            assert_never(row.kind)


def _fed(feed: Callable[[Any], Any], leaf: Value) -> Callable[[Any], Any]:
    """Returns what feeds a leaf of the batch.

    A replica gets, and of a lazy leaf reads, only its own examples.
    """
    if leaf.examples is None:
        return lambda x: feed(_read(x))
    start, stop = leaf.examples
    return lambda x: feed(_read(x[start:stop]))


def _read(leaf: Any) -> Any:
    return np.asarray(leaf) if isinstance(leaf, LazyArray) else leaf


def _memory(buffers: Sequence[Buffer], ids: Sequence[int]) -> int:
    """Returns the memory of some buffers: those that are born or end at one row share it."""
    (memory,) = {buffers[b].memory for b in ids}
    return memory


def _wait(source: jax.Array, copy: jax.Array | None) -> tuple[()]:
    """Returns once the copy has come; None if it has already been used and freed."""
    if copy is not None:
        copy.block_until_ready()
    return ()


def _received(witness: jax.Array, *offered: jax.Array) -> tuple[()]:
    """Raises if the report of the arrival has failed.

    The order of dispatch has waited for it before.
    """
    witness.block_until_ready()
    return ()


def _nothing(*arrays: jax.Array) -> tuple[()]:
    return ()


def _named(run: Callable[..., Any], name: str) -> Callable[..., Any]:
    def annotated(*arrays: Any) -> Any:
        with jax.profiler.TraceAnnotation(name):
            return run(*arrays)

    return annotated


def _in_list(copy: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
    """Returns a copy as a program yields its results: in a list."""
    return lambda x: [copy(x)]


def _gather(ids: tuple[int, ...]) -> Callable[[list[Any]], Sequence[Any]]:
    """Returns a function that picks these ids from the table."""
    # An itemgetter of one id would yield the array itself, and one of none does not exist.
    if len(ids) > 1:
        return itemgetter(*ids)
    return (lambda table: (table[ids[0]],)) if ids else (lambda table: ())
