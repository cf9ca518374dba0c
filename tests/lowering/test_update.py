"""The pieces of an optimizer as operations: what their slots stand for, and in which order they
come.
"""

import jax
import numpy as np
import optax
import pytest

from jvpipe.ir.kinds import Kind
from jvpipe.ir.rows import PieceRun
from jvpipe.ir.values import NONE
from jvpipe.lowering.expand import Expander
from jvpipe.lowering.update import Slots, update_step
from jvpipe.lowering.weight_rule import Weights
from jvpipe.programs.optimizer_pieces import OptimizerCut, cut_optimizer
from jvpipe.programs.pieces import Slot, SlotKind
from tests.lowering.toy import GRAPH, drawn, optimizer

CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))


def clipped(*, grad_norm: bool = False) -> OptimizerCut:
    shapes = [jax.ShapeDtypeStruct((n,), np.float32) for n in (2, 3)]
    return cut_optimizer(CLIPPED, shapes, [0, 1], [2, 1], microbatches=2, grad_norm=grad_norm)


@pytest.mark.parametrize(
    ("slot", "name"),
    [
        (
            Slot(SlotKind.GRADIENT, 0, 1),
            "gradient 0 layer 2 version 3",
        ),  # the second reader is the last layer
        (Slot(SlotKind.WEIGHT), "weight 0 layer 2 version 3"),
        (Slot(SlotKind.PARAMETER, 1), "parameter 1 version 0"),
        (Slot(SlotKind.STATE, 4), "optimizer 4 layer 1"),
        (Slot(SlotKind.GRAD_NORM), "metric 1 micro-batch 0"),
    ],
)
def test_slots_stand_for_values(slot: Slot, name: str) -> None:
    assert str(Slots(GRAPH, optimizer()).value(slot, 1, update=3, m=7)) == name


def test_what_pieces_tell_each_other_is_of_its_maker_and_its_micro_batch() -> None:
    cut = clipped()
    slots = Slots(GRAPH, cut)
    told = {
        slot
        for piece in cut.update
        for slot in piece.writes
        if slot.kind in (SlotKind.PARTIAL, SlotKind.GLOBAL)
    }
    values = {slot: slots.value(slot, 1, m=7) for slot in told}
    assert len(set(values.values())) == len(told) == 3
    assert {(str(slot.kind), value.layer, value.microbatch) for slot, value in values.items()} == {
        ("partial", 0, 7),
        ("partial", 1, 7),
        ("global", NONE, 7),
    }


def test_a_parameter_that_is_written_is_the_next_version() -> None:
    slots, expander = Slots(GRAPH, optimizer()), Expander(GRAPH, Weights(GRAPH), set())
    made = [slots.operation(expander, 0).writes for _ in range(2)]
    assert [(str(write.value), write.bytes) for (write,) in made] == [
        ("parameter 0 version 1", 8),
        ("parameter 0 version 2", 8),
    ]
    assert slots.newest == [2, 0]


def test_a_plain_update_is_a_piece_for_each_layer_that_owns_parameters() -> None:
    operations = list(
        update_step(Expander(GRAPH, Weights(GRAPH), set()), Slots(GRAPH, optimizer()))
    )
    assert [drawn(op) for op in operations] == [
        "U0: gradient 0 layer 0 version 0, gradient 0 layer 2 version 0, parameter 0 version 0 -> "
        "parameter 0 version 1",
        "U1: gradient 1 layer 1 version 0, parameter 1 version 0 -> parameter 1 version 1",
    ]
    assert [[d.layers for d in op.delivers] for op in operations] == [[(0, 2)], [(1,)]], (
        "to all who read it"
    )


def test_a_norm_of_all_gradients_is_made_between_two_rounds_of_layers() -> None:
    expander = Expander(GRAPH, Weights(GRAPH), set())
    operations = list(update_step(expander, Slots(GRAPH, clipped(grad_norm=True))))
    assert [(op.kind, op.layer) for op in operations] == [
        (Kind.U, layer) for layer in (0, 1, NONE, 0, 1)
    ]
    assert [op.run for op in operations] == [PieceRun(i) for i in range(5)]
    made = [{write.value for write in op.writes} for op in operations]
    assert made[0] | made[1] <= set(operations[2].reads)
    assert all(made[2] & set(op.reads) for op in operations[3:])
    assert any(str(value) == "metric 1 micro-batch 0" for values in made for value in values)
