"""Rows bound to what runs them: executables and copies, so that running a step looks nothing up."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple, assert_never

import jax

from jvpipe import _jax
from jvpipe._jax import Device
from jvpipe.cost.target_store import AbsentProgram
from jvpipe.ir.buffers import HOST, Buffer, Lowered
from jvpipe.ir.kinds import KINDS, Kind, Runs
from jvpipe.ir.layers import Spec
from jvpipe.ir.rows import Row
from jvpipe.ir.values import Value

_PROMPT_BYTES = 1 << 16
"""Up to here a copy takes less than waking the thread that would make it."""


class Instruction(NamedTuple):
    """A row bound to what runs it, so that running it looks nothing up.

    `run` is an executable, or a copy; `feed` names what comes from the host. `born_bytes` are held on device `target`
    from the row on, `freed_bytes` on device `source` no longer; `temporary_bytes` only while the row runs. `mark` gives
    a program that reads a moved array alone, which others may overwrite.
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
        return tuple(
            it._replace(run=_named(it.run, f"dispatch {it.row}")) for it in self.instructions
        )

    @cached_property
    def targets(self) -> list[int]:
        """The place of what each row makes."""
        return [it.target for it in self.instructions]

    @cached_property
    def waits(self) -> bool:
        """Tells whether a row may have to be put off, because a copy is late."""
        return any(KINDS[it.row.kind].runs is Runs.WAIT for it in self.instructions)

    @cached_property
    def leaves_host(self) -> frozenset[int]:
        """The rows that free bytes of the host."""
        return frozenset(
            i for i, it in enumerate(self.instructions) if it.source == HOST and it.frees
        )

    @cached_property
    def feeds(self) -> frozenset[tuple[str, int]]:
        """What the rows read from the host."""
        return frozenset(it.feed for it in self.instructions if it.feed)

    @cached_property
    def laid(self) -> Lowered:
        """The lowered step, its buffers as large as programs say that they lie: with padding, on absent hardware."""
        sizes: dict[int, int] = {}
        for it in self.instructions:
            if isinstance(it.run, AbsentProgram):
                told = it.run.sizes
                for b, size in (
                    *zip(it.row.reads, told.each_argument, strict=False),
                    *zip(it.row.writes, told.each_result, strict=False),  # a mark comes last
                ):
                    sizes[b] = max(sizes.get(b, 0), size)
        if not sizes:
            return self.lowered
        every = enumerate(self.lowered.buffers)
        buffers = tuple(replace(x, bytes=sizes[b]) if b in sizes else x for b, x in every)
        return replace(self.lowered, buffers=buffers)

    @property
    def temporary_bytes(self) -> list[int]:
        """Bytes that each row's program needs while it runs."""
        return [it.temporary_bytes for it in self.instructions]

    def compile_marks(self) -> None:
        """Makes ready what only a run that is measured needs."""
        for it in self.instructions:
            if it.mark:
                it.mark()


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
        executable_of: gives the executable of a row that runs a program.
        calls_host: tells of such a row if it calls the host: those can fail and are watched.
        mark_of: gives what compiles the program that says when a moved buffer has arrived.
        crossing_of: gives what runs this process's half of a copy between processes; None for other rows.
        spec_of: tells how a leaf of the batch lies over a group of devices.
    """
    buffers = lowered.buffers
    temporary_bytes: dict[int, int] = {}  # by executable
    instructions = []
    for row, (born, dead) in zip(lowered.rows, lowered.changes(), strict=True):
        target, source = (_place(buffers, ids) if ids else row.place for ids in (born, dead))
        run, temporary = crossing_of(row) or _copy(row, buffers, devices, target, spec_of), 0
        if run is None:
            run = executable_of(row)
            if id(run) not in temporary_bytes:
                temporary_bytes[id(run)] = run.memory_analysis().temp_size_in_bytes
            temporary = temporary_bytes[id(run)]
        leaf = buffers[row.writes[0]].value if row.kind is Kind.FEED else None
        instructions.append(
            Instruction(
                run=run,
                feed=(leaf.kind, leaf.index) if leaf else None,
                gather=_gather(row.reads),
                writes=row.writes,
                frees=dead,
                target=target,
                born_bytes=sum(buffers[b].bytes for b in born),
                temporary_bytes=temporary,
                source=source,
                freed_bytes=sum(buffers[b].bytes for b in dead),
                watched=calls_host(row),
                row=row,
                mark=mark_of(buffers[row.writes[0]])
                if row.kind in (Kind.MOVE, Kind.IN) and row.writes
                else None,
            )
        )
    return Bound(lowered, tuple(instructions))


def _copy(
    row: Row,
    buffers: Sequence[Buffer],
    devices: Sequence[Device],
    target: int,
    spec_of: Callable[[Value], Spec],
) -> Callable[..., Any] | None:
    """Makes what runs a row that only copies, waits or drops; None for one that runs a program."""
    match row.kind:
        case Kind.SEND | Kind.RETURN | Kind.MOVE:
            size, source = buffers[row.reads[0]].bytes, devices[row.place]
            prompt = size <= _PROMPT_BYTES
            return _in_list(
                _jax.prompt_copier(source, devices[target])
                if prompt
                else _jax.copier(devices[target])
            )
        case Kind.OUT:
            return _in_list(_jax.swapper(devices[row.place], "pinned_host"))
        case Kind.IN:
            return _in_list(_jax.swapper(devices[row.place], "device"))
        case Kind.FREE:
            return _wait
        case Kind.RECEIPT:
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
    """Feeds a leaf of the batch; to a replica its own examples."""
    if leaf.examples is None:
        return feed
    start, stop = leaf.examples
    return lambda x: feed(x[start:stop])


def _place(buffers: Sequence[Buffer], ids: Sequence[int]) -> int:
    """The place of some buffers; those that are born or die together do so in one place."""
    (place,) = {buffers[b].memory for b in ids}
    return place


def _wait(source: jax.Array, copy: jax.Array | None) -> tuple[()]:
    """Returns once the copy is there; it may have been used and gone."""
    if copy is not None:
        copy.block_until_ready()
    return ()


def _received(witness: jax.Array, *offered: jax.Array) -> tuple[()]:
    """Raises if what would tell of the arrival has failed to come; it is waited for before."""
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
    return lambda x: [copy(x)]


def _gather(ids: tuple[int, ...]) -> Callable[[list[Any]], Sequence[Any]]:
    """A function that picks these ids from the table."""
    if len(ids) > 1:
        return itemgetter(*ids)
    return (lambda table: (table[ids[0]],)) if ids else (lambda table: ())
