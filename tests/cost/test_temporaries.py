"""Temporaries of programs whose buffers can be counted by hand, and of some that compilers were
asked about.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jvpipe.cost import presets
from jvpipe.cost.matrix_products import Product
from jvpipe.cost.split_products import split_bytes, sum_parts
from jvpipe.cost.temporaries import temporary_bytes
from jvpipe.trace.flatten import flatten

N = 64
ARRAY = jax.ShapeDtypeStruct((N, N), jnp.float32)
BYTES = 4 * N * N
GPU = replace(presets.H100, cores=0)  # none of its products is cut


def counted(fn: Any, arrays: int = 1, device: Any = GPU) -> int:
    return temporary_bytes(flatten(fn, *[ARRAY] * arrays), device)


@pytest.mark.parametrize("products", [2, 3, 6])
def test_every_other_value_of_a_chain_lies_where_the_result_will(products: int) -> None:
    def chain(x: jax.Array, w: jax.Array) -> jax.Array:
        for _ in range(products):
            x = x @ w
        return x

    assert counted(chain, 2) == BYTES, "as compiled"


def test_what_is_read_late_is_a_temporary_until_then() -> None:
    def skip(x: jax.Array, w: jax.Array) -> jax.Array:
        first = x @ w
        second = first @ w
        return (second @ w) @ first

    assert counted(skip, 2) == 2 * BYTES, "second lies where the result will"


def test_siblings_are_there_at_once() -> None:
    def both(x: jax.Array, w: jax.Array) -> jax.Array:
        first = jnp.tanh(x) @ w
        return (jnp.sin(x) * (first + 1.0)) @ w[:, :1]  # too small a result to hold one of them

    assert 2 * BYTES <= counted(both, 2) < 2.1 * BYTES, "tanh(x) waits for nobody, sin(x) for it"

    def apart(x: jax.Array, y: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.tanh(x) @ w[:, :1], jnp.sin(y) @ w[:, :1]

    assert BYTES <= counted(apart, 3) < 1.1 * BYTES
    assert 2 * BYTES <= counted(lambda x, w: apart(x, x, w), 2) < 2.1 * BYTES


def test_what_is_computed_twice_is_there_once() -> None:
    def once(x: jax.Array, w: jax.Array) -> jax.Array:
        wave = jnp.tanh(x)
        return (wave * (wave @ w)) @ w

    def twice(x: jax.Array, w: jax.Array) -> jax.Array:
        return (jnp.tanh(x) * (jnp.tanh(x) @ w)) @ w

    assert counted(twice, 2) == counted(once, 2)


def test_one_of_two_convolutions_lies_where_their_sum_will() -> None:
    image = jax.ShapeDtypeStruct((1, N, N, 1), jnp.float32)
    kernel = jax.ShapeDtypeStruct((3, 3, 1, 1), jnp.float32)

    def both(x: jax.Array, y: jax.Array, w: jax.Array) -> jax.Array:
        images = (jax.lax.conv_general_dilated(z, w, (1, 1), "SAME") for z in (x, y))
        first, second = (jnp.transpose(z, (0, 3, 1, 2)) for z in images)
        return first + second

    nhwc = [jnp.transpose(jnp.zeros(x.shape), (0, 3, 1, 2)) for x in (image, image)]
    weights = jnp.zeros((1, 1, *kernel.shape[:2]))
    assert temporary_bytes(flatten(both, *nhwc, weights), GPU) == BYTES


@pytest.mark.parametrize("join", [jnp.add, jnp.multiply, jnp.maximum])
def test_one_of_two_products_lies_where_the_result_will(join: Any) -> None:
    # An H100's compiler has a buffer for the other one: 4 MiB for products of 512 x 2048.
    assert counted(lambda x, v, w: join(x @ v, x @ w), 3) == BYTES


def test_a_scattered_sum_that_is_turned_is_copied() -> None:
    def scattered(x: jax.Array, w: jax.Array, turn: bool) -> jax.Array:
        added = jnp.zeros((N, N)).at[jnp.arange(N)[::-1]].add(x)
        return (added.T if turn else added) @ w

    straight, turned = (
        temporary_bytes(flatten(lambda x, w, turn=turn: scattered(x, w, turn), ARRAY, ARRAY), GPU)
        for turn in (False, True)
    )
    assert turned - straight == BYTES


def test_what_is_summed_over_two_axes_apart_is_there_once() -> None:
    """As compiled for an H100: additive attention of GNMT sums the cotangent of its tanh over
    queries and over keys.
    """

    def sums(x: jax.Array, w: jax.Array, fn: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        wave = fn(x) * 2.0
        return jnp.sum(wave, 0), jnp.sum(wave, 1), w

    assert counted(lambda x, w: sums(x, w, jnp.tanh), 2) == BYTES
    assert counted(lambda x, w: sums(x, w, jnp.square), 2) == 0, "each sum squares for itself"
    assert counted(lambda x, w: sums(x, w, jnp.tanh)[1:], 2) == 0


def test_a_gradient_is_summed_where_the_sum_lies() -> None:
    assert counted(lambda x, w, total: total + x.T @ w, 3) == 0

    def read_twice(x: jax.Array, w: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array]:
        product = x.T @ w
        return total + product, jnp.sum(jnp.sin(product), 0)

    assert counted(read_twice, 3) == BYTES


def test_the_loss_has_cotangents_twice_on_a_gpu() -> None:
    targets = jnp.arange(N) % 7

    def cotangent(x: jax.Array, w: jax.Array) -> jax.Array:
        loss = lambda z: -jnp.take_along_axis(jax.nn.log_softmax(z), targets[:, None], 1).sum()  # noqa: E731
        return jax.grad(loss)(x) @ w[:, :1]

    assert 2 * BYTES <= counted(cotangent, 2) < 2.2 * BYTES
    large = replace(presets.TPU_V5E, scratch_bytes=0)
    once = 2 * N * 128  # in tiles of 128, as bfloat16
    assert once <= counted(cotangent, 2, large) < 1.5 * once


def test_parts_of_a_product_are_there_beside_what_was_copied_for_them() -> None:
    x, w = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 30522), (30522, 128)))
    closed = flatten(lambda x, w: x @ w, x, w)
    assert temporary_bytes(closed, GPU) == 0
    product = Product(1, 64, 128, 30522)
    assert sum_parts(product, 132) == 16
    filled = 16 * 1908
    expected = 4 * filled * (64 + 128) + 16 * 4 * 64 * 128
    assert temporary_bytes(closed, presets.H100) == split_bytes(product, 132) == expected


@pytest.mark.parametrize(("order", "copies"), [("HWIO", 1), ("OHWI", 0)])
def test_a_kernel_that_lies_otherwise_is_copied(order: str, copies: int) -> None:
    """As compiled for an H100: U-Net's layers of 3 x 3 x 2048 x 2048 take 144 MiB in the
    forward.
    """
    shape = [{"O": 32, "I": 16, "H": 3, "W": 3}[letter] for letter in order]
    image, kernel = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1, 2, 2, 16), shape))

    def forward(x: jax.Array, w: jax.Array) -> jax.Array:
        numbers = ("NHWC", order, "NHWC")
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)

    assert temporary_bytes(flatten(forward, image, kernel), GPU) == copies * kernel.size * 4


def test_gradients_of_kernels_are_added_at_once() -> None:
    """As compiled for an H100: U-Net's five layers in one held all five gradients at once
    before.
    """
    image, kernel = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1, 4, 4, 16), (3, 3, 16, 16)))

    def backward(xs: Any, cotangent: jax.Array, w: jax.Array, sums: Any) -> Any:
        def made(x: jax.Array, w: jax.Array) -> jax.Array:
            numbers = ("NHWC", "HWIO", "NHWC")
            return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)

        gradients = [jax.vjp(lambda w, x=x: made(x, w), w)[1](cotangent)[0] for x in xs]
        return [total + gradient for total, gradient in zip(sums, gradients, strict=True)]

    several = (backward, [image] * 5, image, kernel, [kernel] * 5)
    assert temporary_bytes(flatten(*several), GPU) == kernel.size * 4


def test_images_of_a_tpu_lie_with_their_channels_in_lanes() -> None:
    """As compiled for a v5e: VGG's second convolution takes 1,960 MiB in its forward, for 392 of
    pixels.
    """
    image, kernel = (
        jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8, 64, 64, 16), (3, 3, 16, 16))
    )

    def forward(x: jax.Array, w: jax.Array) -> jax.Array:
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)

    lanes = image.size // 16 * 128 * 4
    large = replace(presets.TPU_V5E, scratch_bytes=0)
    # A copy of the image in bfloat16, the result, and that turned.
    assert temporary_bytes(flatten(forward, image, kernel), large) == lanes // 2 + 2 * lanes


def test_the_backward_of_a_pool_has_numbers_of_places() -> None:
    """As compiled for an H100: 882 MiB for arrays of 392 before and 98 after the pool."""
    x = jax.ShapeDtypeStruct((8, 32, 32, 16), jnp.float32)
    size = x.size * 4

    def backward(x: jax.Array, cotangent: jax.Array) -> jax.Array:
        windows = (1, 2, 2, 1)
        pool = lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, windows, windows, "SAME")  # noqa: E731
        made = jax.vjp(pool, jax.nn.relu(x))[1](cotangent)[0]
        return made + jnp.sum(made)

    cotangent = jax.ShapeDtypeStruct((8, 16, 16, 16), jnp.float32)
    closed = flatten(backward, x, cotangent)
    assert temporary_bytes(closed, GPU) == size + 5 * size // 4


@pytest.mark.parametrize(("vocabulary", "copies"), [(37000, 1), (36992, 0)])
def test_logits_that_lie_along_the_tokens_are_copied_by_the_loss_of_a_tpu(
    vocabulary: int, copies: int
) -> None:
    """As compiled for a v5e: the last backward of a Transformer takes 870 MiB, for logits of 578.

    A vocabulary that fills the columns of tiles is left as it lies.
    """
    logits = jax.ShapeDtypeStruct((32, 128, vocabulary), jnp.float32)
    x = jax.ShapeDtypeStruct((32, 128, 1024), jnp.float32)

    def backward(logits: jax.Array, x: jax.Array) -> jax.Array:
        cotangent = jax.nn.softmax(logits)
        return jnp.einsum("btv,btd->vd", cotangent, x)

    along_tokens = 32 * 128 * vocabulary * 4
    columns = -(-vocabulary // 128) * 128
    for_product = 32 * 128 * columns * 2
    copied = copies * 32 * 128 * columns * 4
    found = temporary_bytes(flatten(backward, logits, x), presets.TPU_V5E)
    assert found == pytest.approx(copied + for_product, rel=0.01)
    assert not copies or found == pytest.approx(870 / 578 * along_tokens, rel=0.01)


def test_a_number_summed_from_a_table_turned_is_a_product_without_rows() -> None:
    def number(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        total = jnp.tensordot(x.T, y, 2)
        return total, jnp.tanh(total)

    assert counted(number, 2, presets.TPU_V5E) >= 0
