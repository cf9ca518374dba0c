"""The update: the pieces of an optimizer become operations on values, in this order.

    U(layer 0) ...  partial results that the global program needs, such as a layer's sum of squares
    U(none)         the global program, at the place of the loss: a norm, a flag
    U(layer 0) ...  each layer's parameters and optimizer state, with the global program's results

The optimizer is cut in programs/optimizer_pieces.py. The global program is the part that mixes
layers. A piece reads and writes slots, such as "the gradient of parameter 3", which stand for
values.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import assert_never

from jvpipe.ir.kinds import Kind
from jvpipe.ir.layers import LayerGraph
from jvpipe.ir.rows import PieceRun
from jvpipe.ir.values import NEVER, NONE, Value, ValueKind
from jvpipe.lowering.expand import Expander, gradient_norm
from jvpipe.lowering.operation import Delivery, Operation, Write
from jvpipe.programs.optimizer_pieces import OptimizerCut
from jvpipe.programs.pieces import Slot, SlotKind


class Slots:
    """The values that the slots of an optimizer's pieces stand for.

    `newest[p]` is the newest version of parameter p so far.

    >>> import jax
    >>> slots = Slots(LayerGraph((), (), ()), OptimizerCut((), (), (), jax.tree.structure(None), ()))
    >>> print(slots.value(Slot(SlotKind.STATE, 2), layer=1))
    optimizer 2 layer 1
    """

    def __init__(self, graph: LayerGraph, optimizer: OptimizerCut) -> None:
        self.graph, self.optimizer = graph, optimizer
        self.newest = [0] * len(graph.parameters)  # by parameter
        pieces = [*optimizer.update, *optimizer.init]
        slots: dict[Slot, None] = {}
        for piece in pieces:
            slots |= dict.fromkeys((*piece.reads, *piece.writes))
        # A value that pieces exchange has no index. It gets the number of its slot instead.
        self._numbers = {slot: i for i, slot in enumerate(slots)}

    def operation(
        self,
        expander: Expander,
        number: int,
        update: int = 0,
        m: int = NEVER,
    ) -> Operation:
        """Makes the operation of a piece, whose new versions of parameters later pieces read.

        Args:
            expander: makes operations.
            number: the number of the piece in the optimizer's update.
            update: the number of the update whose gradients the piece takes.
            m: in a stream, the micro-batch after which the piece runs.
        """
        piece = self.optimizer.update[number]
        layer = NONE if piece.layer is None else piece.layer
        reads = [self.value(slot, layer, update, m) for slot in piece.reads]
        writes: list[Write] = []
        for slot, aval in zip(piece.writes, piece.program.out_avals, strict=True):
            if slot.kind is SlotKind.PARAMETER:
                self.newest[slot.index] += 1
            size = math.prod(aval.shape) * aval.dtype.itemsize
            writes.append(Write(self.value(slot, layer, update, m), size))
        m = NONE if m == NEVER else m
        return expander.operation(Kind.U, layer, m, reads, writes, PieceRun(number))

    def value(
        self,
        slot: Slot,
        layer: int,
        update: int = 0,
        m: int = NEVER,
    ) -> Value:
        """Names the value that a slot stands for: for a parameter, its newest version.

        Args:
            slot: the slot that the piece reads or writes.
            layer: the piece's layer; NONE for the global program.
            update: the number of the update whose gradients the piece takes.
            m: in a stream, the micro-batch after which the piece runs.
        """
        match slot.kind:
            case SlotKind.GRADIENT:  # a tied parameter has a sum for each reader
                reader = self.graph.parameters[slot.index].readers[slot.source]
                return Value(
                    ValueKind.GRADIENT,
                    slot.index,
                    reader,
                    version=update,
                )
            case SlotKind.WEIGHT:
                return Value(
                    ValueKind.WEIGHT,
                    0,
                    self.graph.loss_layer,
                    version=update,
                )
            case SlotKind.PARAMETER:
                return self.graph.parameter(slot.index, self.newest[slot.index])
            case SlotKind.STATE:
                return Value(ValueKind.OPTIMIZER, slot.index, layer)
            case SlotKind.PARTIAL | SlotKind.KEPT:
                return Value(
                    ValueKind.EXCHANGE,
                    self._numbers[slot],
                    slot.source,
                    m,
                )
            case SlotKind.GLOBAL:
                return Value(
                    ValueKind.EXCHANGE,
                    self._numbers[slot],
                    NONE,
                    m,
                )
            case SlotKind.GRAD_NORM:
                return gradient_norm(self.graph)
            case _:
                assert_never(slot.kind)


def update_step(expander: Expander, slots: Slots) -> Iterator[Operation]:
    """Yields the update of a synchronous step.

    The new version of a parameter goes to all layers that read it.

    Args:
        expander: the expander of the step.
        slots: the values of the optimizer's slots.
    """
    parameters = slots.graph.parameters
    for number in range(len(slots.optimizer.update)):
        operation = slots.operation(expander, number)
        delivers = []
        for value, *_ in operation.writes:
            if value.kind is ValueKind.PARAMETER:
                readers = parameters[value.index].readers
                delivers.append(Delivery(value, readers))
        yield replace(operation, delivers=tuple(delivers))
