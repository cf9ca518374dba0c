"""Binds each row of a step to the program or copy that runs it, so that a step needs no look-ups.

A row is one program, one copy, a wait, or the end of buffers, on one place (a device, or a mesh of
several). A step's arrays lie in a table, and a buffer is an entry of this table, named by its
number. A row is bound to an `Instruction`, which consists of three things: the compiled program or
a function that copies; the numbers of the buffers that the row reads, makes and frees; and the
bytes that it makes and frees. The controller (`controller.py`) then only follows the instructions.
A new kind of row needs a case in `_copy`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from operator import itemgetter
from typing import Any, NamedTuple, assert_never

import jax
import numpy as np

from jvpipe import _jax
from jvpipe.cost.compiling import Sizes
from jvpipe.ir.buffers import HOST, Buffer, Lowered
from jvpipe.ir.kinds import KINDS, Kind, Runs
from jvpipe.ir.layers import Spec
from jvpipe.ir.lazy_array import LazyArray
from jvpipe.ir.rows import Row
from jvpipe.ir.values import Value
from jvpipe.util.devices import Device, swapper

_PROMPT_BYTES = 1 << 16
"""The largest array, in bytes, that the dispatching thread copies itself.

Waking another thread to copy such an array would take longer than the copy.
"""


class Instruction(NamedTuple):
    """A row with everything that running it needs.

    A memory is named by the number of its place, or by `HOST`.

    Attributes:
        run: the executable, or a function that copies, waits or does nothing.
        feed: for a FEED, which copies a leaf of the batch from the host: the kind and index of the
            leaf; else None.
        gather: picks the arrays that the row reads from the table of all arrays.
        writes: the numbers of the buffers that the row writes.
        frees: the numbers of the buffers that end with the row, because no later row needs them.
        target: the memory of the buffers that the row makes; the row's place if it makes none.
        born_bytes: the bytes of the buffers that the row makes.
        temporary_bytes: the further bytes that the program holds in `target` while it runs.
        source: the memory of the buffers that end with the row; the row's place if none end.
        freed_bytes: the bytes of the buffers that end with the row.
        watched: whether the row calls code on the host, and can therefore fail after its dispatch.
        row: the row.
        mark: for a copy whose result later rows may overwrite, compiles a program that only reads
            the result; else None. A monitor (`monitor.py`) waits for this program instead of the
            result, because nothing may wait for an array that is being overwritten.
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
    """A lowered step, ready to run.

    Attributes:
        lowered: the rows that this process runs.
        instructions: the same rows, with their programs.
        whole: the rows of all processes, before any are joined into groups. The processes compare
            them before they run. Empty for a single process.
    """

    lowered: Lowered
    instructions: tuple[Instruction, ...]
    whole: tuple[Row, ...] = ()

    @cached_property
    def named(self) -> tuple[Instruction, ...]:
        """The instructions, with functions whose calls a profiler shows by the row's name."""
        runs = [_named(one.run, f"dispatch {one.row}") for one in self.instructions]
        pairs = zip(self.instructions, runs, strict=True)
        return tuple(one._replace(run=run) for one, run in pairs)

    @cached_property
    def targets(self) -> list[int]:
        """The memory of the buffers that each row makes."""
        return [instruction.target for instruction in self.instructions]

    @cached_property
    def waits(self) -> bool:
        """Whether some row must not be dispatched before a copy has come."""
        return any(KINDS[one.row.kind].runs is Runs.WAIT for one in self.instructions)

    @cached_property
    def leaves_host(self) -> frozenset[int]:
        """The numbers of the rows that free bytes of the host."""
        numbered = enumerate(self.instructions)
        return frozenset(i for i, one in numbered if one.source == HOST and one.frees)

    @cached_property
    def feeds(self) -> frozenset[tuple[str, int]]:
        """The kinds and indices of the values that the rows read from the host."""
        return frozenset(one.feed for one in self.instructions if one.feed)

    @cached_property
    def laid(self) -> Lowered:
        """The lowered step, with the sizes that the device gives to buffers.

        Some devices pad arrays. Programs that were compiled for absent hardware report the padded
        sizes of their arguments and results; other programs do not. Several programs may report a
        buffer. It gets the largest of these sizes.
        """
        padded: dict[int, int] = {}  # by buffer, its bytes
        for one in self.instructions:
            if not isinstance(one.run, Sizes):
                continue
            taken = zip(one.row.reads, one.run.each_argument, strict=False)
            yielded = zip(one.row.writes, one.run.each_result, strict=False)  # a marker may follow
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
        """The temporary bytes of each row's program."""
        return [instruction.temporary_bytes for instruction in self.instructions]

    def compile_marks(self) -> None:
        """Compiles the programs of `Instruction.mark`, which only measured runs need."""
        for instruction in self.instructions:
            if instruction.mark:
                instruction.mark()


def bind_rows(
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
        lowered: the rows and buffers of a step.
        devices: the device of each place.
        executable_of: returns the executable of a row that runs a program.
        calls_host: tells whether a row calls code on the host.
        mark_of: returns `Instruction.mark` for a buffer that a copy makes.
        crossing_of: returns a function that runs this process's half of a copy between processes;
            None for other rows.
        spec_of: tells how a leaf of the batch lies over a mesh.
    """
    buffers = lowered.buffers
    # Many rows share an executable. Each executable is asked only once, because asking is the
    # slowest part of binding.
    temporary_bytes = cache(lambda run: run.memory_analysis().temp_size_in_bytes)
    instructions = []
    for row, (born, dead) in zip(lowered.rows, lowered.changes(), strict=True):
        target = _memory(buffers, born) if born else row.place
        source = _memory(buffers, dead) if dead else row.place
        copy = crossing_of(row) or _copy(row, buffers, devices, target, spec_of)
        run = executable_of(row) if copy is None else copy
        # A FEED copies a leaf of the batch from the host. The value that it writes names the leaf.
        leaf = buffers[row.writes[0]].value if row.kind is Kind.FEED else None
        # A monitor must notice that a copied array has arrived before a later row overwrites it.
        # Copies to the host need no mark, because they are never overwritten.
        moves = row.kind in (Kind.MOVE, Kind.IN) and row.writes
        instruction = Instruction(
            run=run,
            feed=(leaf.kind, leaf.index) if leaf else None,
            gather=_gather(row.reads),
            writes=row.writes,
            frees=dead,
            target=target,
            born_bytes=sum(buffers[b].bytes for b in born),
            temporary_bytes=temporary_bytes(run) if copy is None else 0,
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
    """Returns a function for a row that only copies, waits or drops; None if it runs a program.

    Args:
        row: the row.
        buffers: the buffers of the step.
        devices: the device of each place.
        target: the place of the buffer that the row makes.
        spec_of: tells how a leaf of the batch lies over a mesh.
    """
    match row.kind:
        case Kind.SEND | Kind.RETURN | Kind.MOVE:
            source, goal = devices[row.place], devices[target]
            is_prompt = buffers[row.reads[0]].bytes <= _PROMPT_BYTES
            copier = _jax.prompt_copier(source, goal) if is_prompt else _jax.copier(goal)
            return _in_list(copier)
        case Kind.OUT:
            return _in_list(swapper(devices[row.place], "pinned_host"))
        case Kind.IN:
            return _in_list(swapper(devices[row.place], "device"))
        case Kind.FREE:
            return _wait
        case Kind.RECEIPT:
            # `dispatch_ready` has waited for the witness, so it has come or failed by now.
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
    """Returns a function that copies a leaf of the batch to a device.

    A replica copies only its own examples. If the leaf is lazy (read from its file when it is
    used), the replica also reads only these examples.
    """
    if leaf.examples is None:
        return lambda x: feed(_read(x))
    start, stop = leaf.examples
    return lambda x: feed(_read(x[start:stop]))


def _read(leaf: Any) -> Any:
    return np.asarray(leaf) if isinstance(leaf, LazyArray) else leaf


def _memory(buffers: Sequence[Buffer], ids: Sequence[int]) -> int:
    """Returns the memory of the buffers that a row makes or frees, which all lie in one."""
    (memory,) = {buffers[b].memory for b in ids}
    return memory


def _wait(source: jax.Array, copy: jax.Array | None) -> tuple[()]:
    """Runs a FREE: waits until the copy of `source` has arrived, so that `source` can be freed.

    If the copy was already used and freed, it has arrived. Then `copy` is None.
    """
    if copy is not None:
        copy.block_until_ready()
    return ()


def _received(witness: jax.Array, *offered: jax.Array) -> tuple[()]:
    """Runs a RECEIPT: raises an error if a copy to another process has failed.

    The `witness` is an array that the other process has sent back after the copy. It depends on the
    copy, so it has failed if the copy has.
    """
    witness.block_until_ready()
    return ()


def _nothing(*arrays: jax.Array) -> tuple[()]:
    """Runs a DROP: the controller frees the buffers that end with the row."""
    return ()


def _named(run: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Returns a function whose calls a profiler shows by a name."""

    def annotated(*arrays: Any) -> Any:
        with jax.profiler.TraceAnnotation(name):
            return run(*arrays)

    return annotated


def _in_list(copy: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
    """Returns a function that gives its result in a list, as programs do."""
    return lambda x: [copy(x)]


def _gather(ids: tuple[int, ...]) -> Callable[[list[Any]], Sequence[Any]]:
    """Returns a function that picks the arrays with these ids from the table."""
    # With one id, `itemgetter` would yield the array itself, not a tuple. Without ids, it raises.
    if len(ids) > 1:
        return itemgetter(*ids)
    return (lambda table: (table[ids[0]],)) if ids else (lambda table: ())
