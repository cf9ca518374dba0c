"""Finds the program of each row of a lowered step, and how its arrays lie over a mesh.

A row is one program or one copy of a step. It has a kind, a layer, buffers and perhaps a `run`,
which holds its further operands. The program of the row follows from these. For a layer's row, it
also depends on the layout of the micro-batch: the values that the layer's programs take and leave.
So a program can be found, and compiled, before any array exists. A row runs on a place, which may
be a mesh of several devices. The spec of a value then says how the value is cut over them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar, assert_never

import jax

from jvpipe.ir.buffers import Lowered
from jvpipe.ir.kinds import Kind
from jvpipe.ir.layers import LayerGraph, Spec
from jvpipe.ir.rows import AddRun, GroupRun, LayerRun, PieceRun, Row, SettleRun, ShiftRun, SumRun
from jvpipe.ir.values import Value, ValueKind
from jvpipe.programs import weight_programs
from jvpipe.programs.between_replicas import reduce_program
from jvpipe.programs.group_program import group_program
from jvpipe.programs.layer import LayerPrograms
from jvpipe.programs.loss_programs import loss_program, zeros_program
from jvpipe.programs.model_programs import (
    backward_program,
    evaluation_program,
    forward_program,
    input_program,
    piece_program,
    single_backward_program,
    weight_program,
)
from jvpipe.programs.optimizer_pieces import OptimizerCut
from jvpipe.programs.store import Program, types_of
from jvpipe.runtime.engine.replicas import Replicas
from jvpipe.runtime.engine.value_shapes import shape, value_shape, value_spec
from jvpipe.schedules.schedule import Schedule
from jvpipe.trace.graph import Traced
from jvpipe.util.devices import Device, placed

R = TypeVar("R")

_EDGES = (ValueKind.TENSOR, ValueKind.COTANGENT, ValueKind.AUX)
"""The kinds of values that a replica may have only in part, namely for its own examples."""


@dataclass(frozen=True)
class RowPrograms:
    """The programs of rows.

    Args:
        traced: the model.
        graph: the layers. The tensors between them have their specs over a mesh.
        optimizer: the optimizer's update, cut into pieces.
        schedule: says what is remembered of each update, if the schedule predicts or corrects
            weights by it (XPipe, PipeMare).
        has_sums: whether an update has several micro-batches, so that backwards add their gradients
            to sums.
        layouts: for each layout, in the order of the layouts' numbers, the programs of all layers.
        replicas: the programs on slices of a micro-batch, if a stage has replicas.
    """

    traced: Traced
    graph: LayerGraph
    optimizer: OptimizerCut
    schedule: Schedule
    has_sums: bool
    layouts: Sequence[Sequence[LayerPrograms]]
    replicas: Replicas | None

    def laid(self, lowered: Lowered, row: Row) -> Program:
        """Returns the program of a row, for arrays that are cut over a mesh as the row's are.

        Args:
            lowered: the step of the row.
            row: a row that runs a program.
        """
        specs: dict[int, Spec] = {}  # by buffer
        for part in row.parts:
            # Only residuals need the programs of the layer, and an evaluation has no residuals.
            is_training = isinstance(part.run, LayerRun) and part.kind is not Kind.E
            programs = self._layer(part) if is_training else None
            for b in (*part.reads, *part.writes):
                specs[b] = self.spec(lowered.buffers[b].value, programs)
        takes, gives = ([specs[b] for b in ids] for ids in (row.reads, row.writes))
        return self.program(lowered, row).laid(takes, gives)

    def spec(self, value: Value, programs: LayerPrograms | None = None) -> Spec:
        """Returns how a value is cut over the devices of a mesh.

        Args:
            value: a value of a step.
            programs: the programs of its layer; by default, those for the first layout.
        """
        # The spec of a residual was chosen when its forward was compiled. The graph and the
        # optimizer have the specs of all other values.
        if value.kind is ValueKind.RESIDUAL:
            of_layer = programs or self.layouts[0][value.layer]
            return of_layer.signature.residuals[value.index].spec
        return value_spec(self.graph, self.optimizer, value)

    def program(self, lowered: Lowered, row: Row) -> Program:
        """Returns the program of a row.

        Args:
            lowered: the step of the row.
            row: a row that runs a program, and does not only copy or wait.
        """
        if isinstance(row.run, GroupRun):
            return group_program([self.laid(lowered, part) for part in row.parts], row.wires)
        read = [lowered.buffers[b].value for b in row.reads]
        written = [lowered.buffers[b].value for b in row.writes]
        match row.kind:
            case Kind.F | Kind.R:
                return forward_program(self._layer(row), recompute=row.kind is Kind.R)
            case Kind.B:
                return self.backward_program(self._layer(row))
            case Kind.I:
                return input_program(self._layer(row))
            case Kind.W:
                return weight_program(self._layer(row))
            case Kind.E:
                return evaluation_program(self._examples_of(row).bodies[row.layer])
            case Kind.ZERO:
                return zeros_program(self._shapes(written))
            case Kind.SHIFT:
                updates = _operand(row, ShiftRun).updates
                return weight_programs.shifted(self._shapes(written), updates)
            case Kind.SETTLE:
                return self._settle_program(row, written)
            case Kind.WEIGHT:
                return weight_programs.total(
                    self.traced.loss_shapes[1], _operand(row, SumRun).count, self.graph.weight_type
                )
            case Kind.LOSS:
                return self._loss_program(read)
            case Kind.REDUCE if self.replicas is None:
                return self._turns_program(row, read)
            case Kind.SLICE | Kind.CONCAT | Kind.REDUCE:
                assert self.replicas, "only replicas cut micro-batches"
                return self.replicas.program(row, read)
            case Kind.U:
                run = _operand(row, PieceRun)
                return piece_program(self.optimizer.update[run.piece], keeps=run.keeps)
            case Kind.ARRIVE:
                return arrival(self._shapes(read))
            case (
                Kind.FEED
                | Kind.SEND
                | Kind.RETURN
                | Kind.MOVE
                | Kind.OUT
                | Kind.FREE
                | Kind.IN
                | Kind.DROP
                | Kind.RECEIPT
            ):
                raise AssertionError(f"{row} runs no program")
            case _:
                assert_never(row.kind)

    def _turns_program(self, row: Row, read: Sequence[Value]) -> Program:
        """Returns the program that adds up the gradients of two devices of a stage.

        In an asynchronous schedule, the devices of a stage take turns with whole micro-batches.
        Each has gradient sums of its own. The row reads each sum from both devices.

        Args:
            row: the row.
            read: the values that it reads: each sum of the first device, followed by the same sum
                of the second.
        """
        in_place = isinstance(row.run, AddRun)
        return reduce_program(self._shapes(read[::2]), 2, in_place=in_place)

    def _layer(self, row: Row) -> LayerPrograms:
        """Returns the programs of a row's layer, on the slice of examples that the row is for."""
        run = _operand(row, LayerRun)
        if run.examples is None:
            return self.layouts[run.layout][row.layer]
        assert self.replicas
        return self.replicas.programs(run.layout, run.examples, row.layer)

    def _examples_of(self, row: Row) -> Traced:
        """Returns the model on the slice of examples that a row is for."""
        if not isinstance(row.run, LayerRun) or row.run.examples is None:
            return self.traced
        assert self.replicas
        return self.replicas.sliced(row.run.examples)

    def backward_program(self, programs: LayerPrograms) -> Program:
        """Returns a layer's backward.

        It adds its gradients to sums, unless each micro-batch has an update of its own.
        """
        return backward_program(programs) if self.has_sums else single_backward_program(programs)

    def _settle_program(self, row: Row, written: Sequence[Value]) -> Program:
        """Returns the program of a SETTLE, which records what an update has changed.

        XPipe keeps the last change of each weight, and PipeMare a mean of the last changes.
        """
        # A SETTLE may also write new weights and a count. Their shapes are not needed here.
        remembered = [v for v in written if v.kind in (ValueKind.DELTA, ValueKind.APPLIED)]
        shapes = self._shapes(remembered)
        decay = self.schedule.decay
        if decay is None:
            return weight_programs.difference(shapes)
        tau = _operand(row, SettleRun).tau
        return weight_programs.settled(shapes, tau, decay, self.schedule.anneal_updates)

    def _loss_program(self, read: Sequence[Value]) -> Program:
        """Returns the program that reduces losses and aux over micro-batches, in their order."""
        graph = self.traced.graph
        microbatches = len({value.microbatch for value in read})
        if self.replicas:
            of_part = self.replicas.shape
            shapes = [self.shape(v) if v.kind is ValueKind.LOSS else of_part(v) for v in read]
            return loss_program(graph, shapes, microbatches, self.replicas.loss_parts())
        of_one = [*self.traced.loss_shapes, *map(shape, graph.aux)]
        of_all = [array for array in of_one for _ in range(microbatches)]
        return loss_program(graph, of_all, microbatches)

    def crossing_array(self, whole: Lowered, b: int) -> jax.ShapeDtypeStruct:
        """Returns the shape and type of an array that another process makes and this one copies.

        Args:
            whole: the rows of all processes.
            b: the number of the array's buffer.
        """
        array = self.known_shape(whole.buffers[b].value)
        if array is not None:
            return array
        # Only the program that makes the array knows the shape, so it is traced abstractly.
        maker = next(row for row in whole.rows if b in row.writes)
        program = self.program(whole, maker)
        results = jax.eval_shape(program.fn, *program.inputs)
        return results[maker.writes.index(b)]

    def known_shape(self, value: Value) -> jax.ShapeDtypeStruct | None:
        """Returns the shape and type of a value, or of a replica's part of the value.

        Returns None for values such as residuals, whose shape only their program knows.
        """
        if self.replicas and value.kind in _EDGES:
            return self.replicas.shape(value)
        return value_shape(self.traced, self.optimizer, value)

    def shape(self, value: Value) -> jax.ShapeDtypeStruct:
        """Returns the shape and type of a value for which `known_shape` is not None."""
        array = self.known_shape(value)
        assert array is not None, f"the shape of {value} is unknown"
        return array

    def _shapes(self, values: Sequence[Value]) -> list[jax.ShapeDtypeStruct]:
        return [self.shape(value) for value in values]

    def placed(self, value: Value, device: Device) -> jax.ShapeDtypeStruct:
        """Returns the shape, type and place of a value that lies on a device or over a mesh.

        Args:
            value: a value for which `known_shape` is not None.
            device: the device, or the mesh.
        """
        return placed(self.shape(value), device, self.spec(value))


def arrival(arrays: Sequence[jax.ShapeDtypeStruct]) -> Program:
    """Returns a program that only reads arrays. So its marker comes once all arrays have come."""
    return Program(("arrival", *types_of(arrays)), lambda *xs: [jax.numpy.int32(0)], tuple(arrays))


def _operand(row: Row, kind: type[R]) -> R:
    """Returns the operand of a row, which must be of the given type."""
    assert isinstance(row.run, kind), row
    return row.run
