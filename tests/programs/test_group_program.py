"""The program of a group: what it takes, what it overwrites, and the bits of its parts."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvpipe.programs.group_program import group_program
from jvpipe.programs.store import Program, ProgramStore

X = jax.ShapeDtypeStruct((4, 4), jnp.float32)
WIRES = (((0, 1), (2,)), ((2, 1), (3,)), ((0, 1), (3,)))
"""Two parts that share an input; the second reads what the first makes."""


def program(fn: Callable[..., Any], *inputs: Any, donated: tuple[int, ...] = ()) -> Program:
    return Program.of(jax.make_jaxpr(fn)(*inputs), donated, key=fn.__name__)


def product(x: jax.Array, w: jax.Array) -> list[jax.Array]:
    return [jnp.tanh(x @ w)]


def added(total: jax.Array, x: jax.Array) -> list[jax.Array]:
    return [total + x]


def run(whole: Program, *arrays: Any) -> list[np.ndarray]:
    (executable,) = ProgramStore().compile([(whole, jax.devices()[0])])
    return [np.asarray(x) for x in executable(*map(jnp.array, arrays))]


def test_parts_run_one_after_another_and_a_mark_follows() -> None:
    part = program(product, X, X)
    x, w = np.random.default_rng(0).standard_normal((2, 4, 4)).astype(np.float32)
    whole = group_program([part, part], WIRES)
    found, mark = run(whole, x, w)
    between, _ = run(part, x, w)
    np.testing.assert_array_equal(found, run(part, between, w)[0])
    assert mark == 0
    assert (len(whole.inputs), whole.donated) == (2, ())


def test_what_a_part_overwrites_the_group_does() -> None:
    part = program(added, X, X, donated=(0,))
    whole = group_program([part, part], (((0, 1), (0,)), ((0, 2), (0,)), ((0, 1, 2), (0,))))
    assert whole.donated == (0,)
    ones = np.ones((4, 4), np.float32)
    np.testing.assert_array_equal(run(whole, ones, ones, 2 * ones)[0], 4 * ones)


def test_a_group_is_known_by_its_parts_and_how_they_are_wired() -> None:
    part, other = program(product, X, X), program(added, X, X)
    key = group_program([part, part], WIRES).key
    assert key == group_program([program(product, X, X)] * 2, WIRES).key
    assert key != group_program([part, other], WIRES).key
    assert key != group_program([part, part], (WIRES[0], ((1, 2), (3,)), WIRES[2])).key


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("axes", [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")], ids=str)
def test_derivatives_of_convolutions_have_the_bits_of_a_program_of_their_own(
    axes: tuple[str, str, str], dtype: Any
) -> None:
    """XLA puts their axes in order at the top of a program alone."""
    shapes = {
        "NHWC": (2, 8, 8, 3),
        "NCHW": (2, 3, 8, 8),
        "HWIO": (3, 3, 3, 5),
        "OIHW": (5, 3, 3, 3),
    }
    draw = np.random.default_rng(0)
    x, w = (draw.standard_normal(shapes[kind]).astype(np.float32) for kind in axes[:2])

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        x, w = x.astype(dtype), w.astype(dtype)  # in bfloat16 gradients are widened again
        out = jax.lax.conv_general_dilated(x, w, (2, 1), "SAME", dimension_numbers=axes)
        return jnp.sum(jnp.tanh(out))

    def gradients(x: jax.Array, w: jax.Array) -> list[jax.Array]:
        return [*jax.grad(loss, (0, 1))(x, w)]

    alone = program(gradients, x, w)
    wire = (0, 1), (2, 3)
    whole = group_program([alone], (wire, wire))
    for a, b in zip(run(alone, x, w), run(whole, x, w), strict=True):
        np.testing.assert_array_equal(a, b)
