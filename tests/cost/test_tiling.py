"""Products in tiles and waves, counted by hand."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jvpipe.cost.matrix_products import Product, product_of
from jvpipe.cost.tiling import Tiling, product_s

CORES, RATE = 10, 1e12
FULL = 2 * 128 * 128 * 100 / (RATE / CORES)
"""Seconds of a wave of the largest tiles, of sums over 100 terms."""


def products(fn: Any, *shapes: tuple[int, ...]) -> list[Product]:
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    found = (product_of(eqn) for eqn in jax.make_jaxpr(fn)(*arrays).eqns)
    return [product for product in found if product]


def flops(product: Product) -> int:
    return 2 * product.b * product.m * product.n * product.k


def seconds(product: Product, **said: float) -> float:
    return product_s(product, Tiling(**said), CORES, RATE, math.inf)


def test_a_full_wave_reaches_the_rate() -> None:
    whole = Product(1, 128 * CORES, 128, 100)
    assert seconds(whole) == pytest.approx(FULL)
    assert seconds(whole) == pytest.approx(flops(whole) / RATE)


def test_a_wave_that_is_not_full_takes_as_long() -> None:
    assert seconds(Product(7, 128, 128, 1)) == pytest.approx(FULL / 100)


def test_a_tile_that_sticks_out_takes_as_long_as_one_that_does_not() -> None:
    assert seconds(Product(1, 128 * CORES - 60, 128, 100)) == pytest.approx(FULL)


def test_every_tile_has_a_start() -> None:
    assert seconds(Product(CORES, 128, 128, 100), start=50.0) == pytest.approx(1.5 * FULL)


def test_long_sums_are_cut_for_idle_cores_unless_their_parts_take_too_long_to_add() -> None:
    long = Product(1, 128, 128, 10**6)
    assert seconds(long) < flops(long) / RATE * 1.3
    slow = product_s(long, Tiling(), CORES, RATE, 1e3)
    assert slow > 3 * seconds(long)


@pytest.mark.parametrize("of", ["forward", "images", "kernels"])
def test_dense_convolutions_of_three_by_three_take_fewer_products(of: str) -> None:
    def convolved(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def gradient(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.grad(lambda *xs: jnp.sum(convolved(*xs) ** 2), of == "kernels")(x, kernel)

    fn = convolved if of == "forward" else gradient
    *_, last = products(fn, (8, 32, 32, 128), (3, 3, 128, 256))
    assert flops(last) == 2 * 8 * 32 * 32 * 128 * 256 * 9
    assert last.minimal is not None
    assert flops(last.minimal) * 9 == flops(last) * 4
    assert seconds(last, winograd=1.0) < seconds(last) / 2


def test_a_small_image_is_not_taken_for_the_gradient_of_a_kernel() -> None:
    def convolved(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    (one,) = products(convolved, (8, 3, 3, 128), (1, 1, 128, 256))
    assert one.minimal is None


def test_strides_have_no_shorter_way_and_their_gradients_multiply_no_zeros() -> None:
    def strided(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def gradient(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.grad(lambda x: jnp.sum(strided(x, kernel) ** 2))(x)

    forward, of_images = products(gradient, (8, 32, 32, 64), (3, 3, 64, 64))
    assert forward.minimal is of_images.minimal is None
    assert flops(of_images) == flops(forward) == 2 * 8 * 16 * 16 * 64 * 64 * 9


def test_matrices_in_batches_are_one_product() -> None:
    assert products(lambda a, b: jnp.einsum("bij,bkj->bik", a, b), (3, 5, 7), (3, 11, 7)) == [
        Product(3, 5, 11, 7)
    ]
