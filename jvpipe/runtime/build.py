"""A traced loss and a plan, made ready to run: programs compiled, rows bound."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import jax

from jvpipe._jax import Device
from jvpipe.ir.buffers import Lowered, Peak, peaks
from jvpipe.ir.fates import Fates
from jvpipe.ir.layers import Array
from jvpipe.ir.plan import Plan
from jvpipe.ir.task import COPIES, Row, RowKind
from jvpipe.programs.layer import inference, program_key
from jvpipe.programs.loss import loss_program, zeros_program
from jvpipe.programs.model import backward_program, forward_program, layer_programs
from jvpipe.programs.optimizer import OptimizerCut
from jvpipe.programs.store import Program, ProgramStore
from jvpipe.runtime.controller import Bound, bind
from jvpipe.runtime.state import piece_program
from jvpipe.schedules import find_schedule
from jvpipe.schedules.lower import lower_evaluation, lower_step
from jvpipe.trace.graph import Traced
from jvpipe.trace.primitives import calls_host


@dataclass
class Build:
    """Everything that a step of one batch shape needs."""

    traced: Traced
    plan: Plan
    optimizer: OptimizerCut
    microbatches: int
    devices: tuple[Device, ...]
    store: ProgramStore
    layer_s: Sequence[float] | None = None
    _evaluation: Bound | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.executables: set[tuple[Hashable, Device]] = set()  # which programs are used where
        graph = self.traced.graph
        self.programs = [layer_programs(self.store, self.traced, Fates.of(graph, self.plan))]
        if self.plan.keep_last:
            self.programs.append(layer_programs(self.store, self.traced))
        lists = find_schedule(self.plan.schedule).lists(len(self.plan.stages), self.microbatches)
        signatures, *last = [[p.signature for p in programs] for programs in self.programs]
        self.lowered = lower_step(graph, signatures, self.plan, lists, self.optimizer, self.layer_s, *last)
        self.step = self._bound(self.lowered)
        self.peaks = self.peaks_of(self.step)

    def peaks_of(self, bound: Bound) -> tuple[Peak, ...]:
        """The most bytes on each device, and last on the host, while a bound step runs."""
        return peaks(bound.lowered, len(self.devices), bound.temporary_bytes)

    def evaluation(self) -> Bound:
        """The forward alone, compiled when first asked for."""
        if self._evaluation is None:
            lowered = lower_evaluation(self.traced.graph, self.plan, self.optimizer, self.microbatches)
            self._evaluation = self._bound(lowered)
        return self._evaluation

    def _bound(self, lowered: Lowered) -> Bound:
        tasks = {_task(row): row for row in lowered.rows if row.kind not in COPIES}
        wanted = [(self._program(lowered, row), self.devices[row.device]) for row in tasks.values()]
        executables = dict(zip(tasks, self.store.compile(wanted), strict=True))
        self.executables |= {(program.key, device) for program, device in wanted}
        return bind(lowered, self.devices, lambda row: executables[_task(row)], self._calls_host)

    def _calls_host(self, row: Row) -> bool:
        return row.kind in ("F", "R", "B", "E") and any(map(calls_host, self.traced.bodies[row.layer].eqns))

    def _program(self, lowered: Lowered, row: Row) -> Program:
        graph, layer = self.traced.graph, row.layer
        match row.kind:
            case "F" | "R":
                return forward_program(self.programs[row.program][layer])
            case "B":
                return backward_program(self.programs[row.program][layer])
            case "E":
                closed = inference(self.traced.bodies[layer])
                return Program.of(closed, marked=True, key=("E", program_key(closed)))
            case "ZERO":
                parameters = [lowered.buffers[b].key[1] for b in row.writes]
                return zeros_program([shape(graph.parameters[int(str(p))].array) for p in parameters])
            case "LOSS":
                parts = [self.traced.loss_shapes, [shape(a) for a in graph.aux]]
                shapes = [s for part in parts for s in part for _ in range(self.microbatches)]
                return loss_program(graph, shapes, self.microbatches)
            case _:
                return piece_program(self.optimizer.update[row.program])


def _task(row: Row) -> tuple[RowKind, int, int, int]:
    """What distinguishes executables: rows that differ in the micro-batch alone share one."""
    kind = "F" if row.kind == "R" else row.kind
    return kind, row.layer, row.program, row.device


def shape(array: Array) -> jax.ShapeDtypeStruct:
    """An array's shape and type, for JAX."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype)
