"""The small programs between replicas."""

import jax
import numpy as np

from jvpipe.ir.layers import Ref
from jvpipe.ir.rows import SliceRun
from jvpipe.ir.values import ValueKind
from jvpipe.programs.between_replicas import cut_program, join_program, reduce_program

X = np.arange(24, dtype=np.float32).reshape(6, 4)
EDGE = Ref(ValueKind.TENSOR, 0)


def like(x: np.ndarray) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def test_parts_that_are_cut_and_joined_are_the_whole() -> None:
    parts = [
        cut_program(like(X), SliceRun(EDGE, 1, a, b)).fn(X)[0] for a, b in ((0, 1), (1, 3), (3, 4))
    ]
    assert [part.shape for part in parts] == [(6, 1), (6, 2), (6, 1)]
    (whole,) = join_program([like(np.asarray(part)) for part in parts], 1).fn(*parts)
    np.testing.assert_array_equal(whole, X)


def test_sums_are_added_up_in_the_order_of_replicas() -> None:
    large, small = np.array([2**24], np.float32), np.array([1], np.float32)
    program = reduce_program([like(large), like(X)], 3)
    assert [array.shape for array in program.inputs] == [(1,)] * 3 + [(6, 4)] * 3
    first, second = program.fn(large, small, small, X, X, X)
    assert first == np.float32(2**24), (
        "each of the small ones is lost; added up first they would not be"
    )
    assert program.fn(small, small, large, X, X, X)[0] == np.float32(2**24 + 2)
    np.testing.assert_array_equal(second, 3 * X)
    assert reduce_program([like(X), like(X)], 2, in_place=True).donated == (0, 2)
