"""Pieces of an optimizer: what they take, what they may overwrite, which of them share a
program.
"""

import jax
import numpy as np
import optax
import pytest

from jvpipe.programs.optimizer_pieces import OptimizerCut, cut_optimizer
from jvpipe.programs.pieces import SlotKind

SHAPES = [jax.ShapeDtypeStruct((2, 3), np.float32), jax.ShapeDtypeStruct((2, 3), np.float32)]


def cut(optimizer: optax.GradientTransformation, readers: tuple[int, int] = (1, 1)) -> OptimizerCut:
    return cut_optimizer(optimizer, SHAPES, [0, 1], readers, microbatches=2)


@pytest.fixture(scope="module")
def clipped() -> OptimizerCut:
    return cut(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)))


def test_arrays_stand_in_the_order_of_their_kinds(clipped: OptimizerCut) -> None:
    for piece in clipped.update:
        orders = [(slot.kind.order, slot.index, slot.source) for slot in piece.reads]
        assert orders == sorted(orders)
        assert len(piece.program.in_avals) == len(piece.reads)
        assert len(piece.program.out_avals) == len(piece.writes)


def test_layers_alike_share_a_program_in_every_phase(clipped: OptimizerCut) -> None:
    keys = [(piece.phase, piece.key) for piece in clipped.update if piece.layer is not None]
    assert len(set(keys)) == 2


def test_the_last_piece_of_a_layer_overwrites_what_it_owns(clipped: OptimizerCut) -> None:
    first, last = (piece for piece in clipped.update if piece.layer == 0)
    assert first.donated == ()
    donated = {last.reads[i].kind for i in last.donated}
    assert donated == {SlotKind.PARAMETER, SlotKind.STATE}
    assert {last.reads[i] for i in last.donated} <= set(last.writes)


def test_what_layers_tell_is_one_vector_each_as_is_the_answer(clipped: OptimizerCut) -> None:
    told = [
        slot for piece in clipped.update for slot in piece.writes if slot.kind is SlotKind.PARTIAL
    ]
    answer = [
        slot for piece in clipped.update for slot in piece.writes if slot.kind is SlotKind.GLOBAL
    ]
    assert [slot.source for slot in told] == [0, 1]
    assert len(answer) == 1
    (middle,) = (piece for piece in clipped.update if piece.layer is None)
    assert set(told) <= set(middle.reads)


def test_every_reading_layer_has_a_sum_of_its_own() -> None:
    (first, second) = cut(optax.sgd(0.1), (3, 1)).update
    sums = [
        [(s.index, s.source) for s in piece.reads if s.kind is SlotKind.GRADIENT]
        for piece in (first, second)
    ]
    assert sums == [[(0, 0), (0, 1), (0, 2)], [(1, 0)]]
