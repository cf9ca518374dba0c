"""The loss and aux of a batch from those of its micro-batches."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jvpipe.ir.layers import Array, LayerGraph
from jvpipe.programs.loss_programs import loss_program

SCALAR = jax.ShapeDtypeStruct((), np.float32)


def reduced(graph: LayerGraph, micro: int, *columns: Any) -> list[Any]:
    values = [jnp.asarray(x) for column in columns for x in column]
    shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in values]
    return [np.asarray(x) for x in loss_program(graph, shapes, micro).fn(*values)]


def scalars(*values: float) -> list[np.float32]:
    return [np.float32(v) for v in values]


PLAIN = LayerGraph((), (), ())


def test_a_plain_loss_is_a_mean() -> None:
    (loss,) = reduced(PLAIN, 4, scalars(1, 2, 3, 6))
    assert loss == 3.0


def test_a_weighted_loss_is_one_quotient() -> None:
    loss, weight = reduced(
        replace(PLAIN, weighted=True), 2, scalars(6, 1), [np.int32(2), np.int32(5)]
    )
    assert (loss, weight) == (1.0, 7)


def test_sums_are_taken_in_ascending_order() -> None:
    (loss,) = reduced(PLAIN, 3, scalars(1e8, -1e8, 1))
    assert loss == np.float32(1) / np.float32(3)  # from behind it would be 0


def test_aux_is_averaged_weighted_or_stacked() -> None:
    graph = replace(
        PLAIN,
        aux=(
            Array("a", (), "float32", 4),
            Array("b", (), "float32", 4),
            Array("c", (), "float32", 4),
            Array("d", (2,), "float32", 8),
            Array("e", (), "int32", 4),
        ),
        aux_groups=((0,), (1, 2), (3,), (4,)),
    )
    rows = [np.arange(2, dtype=np.float32), np.ones(2, np.float32)]
    counts = [np.int32(7), np.int32(9)]
    loss, mean, ratio, stacked, whole = reduced(
        graph, 2, scalars(1, 3), scalars(2, 4), scalars(6, 4), scalars(1, 4), rows, counts
    )
    assert (loss, mean, ratio) == (2.0, 3.0, 2.0)
    np.testing.assert_array_equal(stacked, [[0, 1], [1, 1]])
    np.testing.assert_array_equal(whole, [7, 9])
