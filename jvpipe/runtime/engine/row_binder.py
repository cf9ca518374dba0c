"""Compiles the programs of a plan's rows, each once for all rows that share it, and binds the rows.

A row is one program, one copy, a wait, or the end of buffers, on one place (a device, or a mesh of
several). A layout says which values the programs of each layer take and leave. Rows become
instructions in these steps:

    project     this process keeps the rows of its own places, and its halves of copies from and to
                other processes
    group       if layers run in groups, rows of consecutive layers are joined into one
    compile     one program for each device and each key (`_task`), which equal rows share
    bind        each row gets its program, or the function that copies (binding.py)
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from jvpipe.ir.buffers import Buffer, Lowered
from jvpipe.ir.kinds import KINDS
from jvpipe.ir.rows import AskRun, OfferRun, Row
from jvpipe.ir.values import VALUES, ValueKind
from jvpipe.lowering.group import grouped
from jvpipe.lowering.projection import projected, telling_all
from jvpipe.lowering.receipts import with_receipts
from jvpipe.programs.layer import LayerPrograms
from jvpipe.programs.store import Program, ProgramStore
from jvpipe.runtime.engine.binding import Bound, bind_rows
from jvpipe.runtime.engine.hosts import Hosts
from jvpipe.runtime.engine.phases import phase
from jvpipe.runtime.engine.row_programs import RowPrograms, arrival
from jvpipe.util.devices import Device, placed

LayerLayouts = Sequence[Sequence[LayerPrograms]]
"""For each layout, the programs of all layers. Rows name a layout by its position here."""


@dataclass(eq=False)
class RowBinder:
    """The binder of a plan's rows, which remembers the programs that it has compiled.

    Args:
        store: compiles programs, and keeps them.
        devices: the device of each place of the plan.
        hosts: the processes that run the plan together, if there are several.
        stand_in: a device of this process to use in place of all devices; see `CompiledPlan`.
        grouped: whether consecutive layers of a stage run as one program.

    Attributes:
        executables: the programs of all rows that were bound, by the programs' keys and devices.
        compile_s: how long these programs took to compile, one after another.
    """

    store: ProgramStore
    devices: tuple[Device, ...]
    hosts: Hosts | None = None
    stand_in: Device | None = None
    grouped: bool = False
    executables: dict[tuple[Hashable, Device], Program] = field(default_factory=dict, init=False)
    compile_s: float = field(default=0.0, init=False)

    def bound(
        self,
        lowered: Lowered,
        row_programs: RowPrograms,
        layouts: LayerLayouts,
    ) -> Bound:
        """Compiles the programs of rows, and binds each row to its program.

        If there are several processes, all lower the same rows. Each process binds the rows of its
        own places, and its own half of each copy between processes.

        Args:
            lowered: the rows.
            row_programs: the programs of the plan's rows.
            layouts: for each layout that the rows name, the programs of all layers. In a stream,
                these also include the layouts of earlier plans.
        """
        rows = replace(row_programs, layouts=layouts)
        # A copy between processes is numbered by its row among the rows of all processes, so the
        # rows of all processes are kept.
        whole = self._whole(lowered)
        lowered = self._of_process(whole)
        if self.grouped:
            lowered = _in_groups(lowered, rows)
        devices = self.devices
        if self.stand_in:
            devices = (self.stand_in,) * len(devices)
        # Rows that differ only in their micro-batch share an executable.
        tasks = _tasks(lowered)
        programs = {task: rows.laid(lowered, row) for task, row in tasks.items()}
        on_devices = [(programs[task], devices[row.place]) for task, row in tasks.items()]
        executables = dict(zip(tasks, self._compiled(on_devices), strict=True))
        can_fail = {task for task, program in programs.items() if program.calls_host}
        bound = bind_rows(
            lowered,
            devices,
            executable_of=lambda row: executables[_task(row)],
            calls_host=lambda row: _task(row) in can_fail,
            mark_of=partial(self._mark, row_programs),
            crossing_of=partial(self._crossing, whole, rows, row_programs),
            spec_of=row_programs.spec,
        )
        # Before they run, the processes compare `whole` (row_agreement.py). It is left out if this
        # process only stands in for the others.
        is_part = self.hosts is not None and self.stand_in is None
        return replace(bound, whole=whole.rows if is_part else ())

    def _whole(self, lowered: Lowered) -> Lowered:
        """Returns the rows of all processes, with the rows that only several processes need.

        By these rows, each process gets all metrics, and learns when arrays that it sends have
        arrived.
        """
        if self.hosts is None:
            return lowered
        processes = self._processes
        return with_receipts(telling_all(lowered, processes), processes)

    def _of_process(self, whole: Lowered) -> Lowered:
        """Returns the rows of this process; all rows if it stands in for the others."""
        if self.hosts is None or self.stand_in is not None:
            return whole
        return projected(whole, self._processes, self.hosts.process)

    @property
    def _processes(self) -> list[int]:
        """The process of each place."""
        return [device.process_index for device in self.devices]

    def _compiled(self, programs: Sequence[tuple[Program, Device]]) -> Sequence[Any]:
        """Compiles programs, each for a device, and returns their executables."""
        with phase("compiling, or loading what was compiled"):
            executables = self.store.compile(programs)
        self.executables |= {(program.key, device): program for program, device in programs}
        self.compile_s = self.store.compile_s(self.executables)
        return executables

    def _crossing(
        self,
        whole: Lowered,
        rows: RowPrograms,
        row_programs: RowPrograms,
        row: Row,
    ) -> Callable[..., Any] | None:
        """Returns a function that runs this process's half of a copy between processes.

        Args:
            whole: the rows of all processes.
            rows: the programs of these rows, under all layouts that they name.
            row_programs: the programs of the plan's rows, under the plan's own layouts.
            row: a row of this process.

        Returns:
            The function; None for a row that is not such a copy.
        """
        if not isinstance(row.run, OfferRun | AskRun):
            return None
        assert self.hosts is not None, "a single process copies to no other"
        if isinstance(row.run, OfferRun):
            return self.hosts.offering(row.run)
        # The number of a copy is that of its row among the rows of all processes.
        copy = whole.rows[row.run.number]
        copied = copy.reads[0]
        array = rows.crossing_array(whole, copied)
        spec = row_programs.spec(whole.buffers[copied].value)
        like = placed(array, self.devices[row.place], spec)
        return self.hosts.asking(row.run, copy, like)

    def _mark(self, row_programs: RowPrograms, moved: Buffer) -> Callable[[], Any] | None:
        """Returns a function that compiles a program for a monitor to wait for.

        The program only reads an array that was moved, so it ends once the array has arrived.

        Args:
            row_programs: the programs of the plan's rows.
            moved: the buffer with the array.

        Returns:
            The function; None for an array that no row overwrites. A monitor waits for such an
            array itself.
        """
        kind = moved.value.kind
        is_overwritten = VALUES[kind].alone or kind is ValueKind.PARAMETER
        if not is_overwritten:
            return None
        array = row_programs.shape(moved.value)
        spec = row_programs.spec(moved.value)
        program = arrival([array]).laid([spec], ())
        return lambda: self.store.compile([(program, self.devices[moved.memory])])[0]


def _in_groups(lowered: Lowered, rows: RowPrograms) -> Lowered:
    """Joins rows into groups that run as one program, except rows that call code on the host.

    A row that calls such code can fail while it runs. The message must then name the row's layer,
    which would be unknown if the row were in a group.
    """
    alone = {task for task, row in _tasks(lowered).items() if rows.program(lowered, row).calls_host}
    return grouped(lowered, lambda row: _task(row) not in alone)


def _tasks(lowered: Lowered) -> dict[Hashable, Row]:
    """Returns, by the key of each executable of a step, one of the rows that share it."""
    return {_task(row): row for row in lowered.rows if KINDS[row.kind].computes}


def _task(row: Row) -> Hashable:
    """Returns the key of a row's executable.

    Rows with the same key must have equal programs. No program depends on the micro-batch or the
    versions of arrays, so the key leaves them out, and all micro-batches share it. Some rows of a
    kind and layer read or write more arrays than others, so the key has the counts of both.
    """
    if len(row.parts) > 1:
        return row.place, *map(_task, row.parts), row.wires
    return row.kind, row.layer, row.run, row.place, len(row.reads), len(row.writes)
