"""The matrix products that equations compute. A convolution counts as a product, too.

The product of a convolution has a row for each pixel of the result, and a column for each output
channel. Each element is a sum over the pixels and input channels of the kernel. In this file, a
kernel is the array of weights that a convolution moves over its images.
"""

import math
from dataclasses import dataclass
from typing import Literal

from jvpipe import _jax
from jvpipe._jax import JaxprEqn

SINGLE = 4, 4, 4
"""The bytes of an element of left operand, right operand and result, if all are float32."""


@dataclass(frozen=True, slots=True)
class Product:
    """A batch of b products of an m x k matrix by a k x n matrix.

    Attributes:
        itemsizes: the bytes of an element of the left operand, the right operand and the result.
        three: which array of a dense convolution (without stride or dilation) has 3 x 3 pixels:
            the kernel, or the result if the result is the gradient of a kernel. None if neither
            has, and for products of matrices.
    """

    b: int
    m: int
    n: int
    k: int
    itemsizes: tuple[int, int, int] = SINGLE
    three: Literal["kernel", "result"] | None = None

    @property
    def minimal(self) -> "Product | None":
        """The products that Winograd's algorithm computes instead; None if it does not apply.

        The algorithm, F(2 x 2, 3 x 3), computes four pixels of a result with 16 multiplications in
        place of 36 (Lavin and Gray, "Fast algorithms for convolutional neural networks", CVPR
        2016). Each of the 16 multiplications becomes a product with a quarter of the rows, and with
        sums of a ninth of the length. For the gradient of a kernel, each product has a ninth of the
        rows, and sums of a quarter of the length.
        """
        if self.three is None:
            return None
        m, k = self.m // 9, -(-self.k // 4)
        if self.three == "kernel":
            m, k = -(-self.m // 4), self.k // 9
        return Product(16 * self.b, m, self.n, k, self.itemsizes)


def product_of(eqn: JaxprEqn) -> Product | None:
    """Returns the product that an equation computes; None if it computes none.

    >>> import jax, jax.numpy as jnp
    >>> a = jax.ShapeDtypeStruct((8, 4, 16), jnp.float32)
    >>> b = jax.ShapeDtypeStruct((8, 16, 2), jnp.float32)
    >>> product_of(jax.make_jaxpr(jnp.matmul)(a, b).eqns[0])
    Product(b=8, m=4, n=2, k=16, itemsizes=(4, 4, 4), three=None)
    """
    if eqn.primitive.name == "dot_general":
        return _matrices(eqn)
    if eqn.primitive.name == "conv_general_dilated":
        return _convolution(eqn)
    return None


def _matrices(eqn: JaxprEqn) -> Product:
    """Returns the product of a `dot_general`.

    Dimensions that are neither batched nor summed are rows (left operand) or columns (right one).
    """
    (summed, _), (batch, _) = eqn.params["dimension_numbers"]
    left, right = (_jax.aval(v) for v in eqn.invars)
    b = math.prod(left.shape[d] for d in batch)
    k = math.prod(left.shape[d] for d in summed)
    shared = max(1, b * k)  # at least 1, so that empty operands do not divide by 0
    return Product(b, left.size // shared, right.size // shared, k, _itemsizes(eqn))


def _convolution(eqn: JaxprEqn) -> Product:
    """Returns the product that a convolution computes, without the zeros of a dilated input.

    A dilated input has zeros between its pixels, so that only one in `spread` pixels is not zero.
    Only this share of the work counts. It is counted as a product with fewer rows.
    """
    params = eqn.params
    numbers = params["dimension_numbers"]
    kernel = [_jax.aval(eqn.invars[1]).shape[d] for d in numbers.rhs_spec]
    result = [_jax.aval(eqn.outvars[0]).shape[d] for d in numbers.out_spec]
    groups = params["feature_group_count"] * params["batch_group_count"]
    spread = math.prod(params["lhs_dilation"])
    stride = math.prod(params["window_strides"])
    dense = spread == stride == math.prod(params["rhs_dilation"]) == 1
    three = None
    if dense and kernel[2:] == [3, 3]:
        three = "kernel"
    elif dense and result[2:] == [3, 3] and math.prod(kernel[2:]) > 9:
        # The gradient of a 3 x 3 kernel is a convolution; its kernel is the cotangent of an image.
        three = "result"
    # Rows are the pixels of all images of the result.
    pixels = result[0] * math.prod(result[2:])
    m = -(-pixels // spread)
    # Each sum goes over the input channels of a group and the pixels of the kernel.
    k = kernel[1] * math.prod(kernel[2:])
    return Product(groups, m, result[1] // groups, k, _itemsizes(eqn), three)


def _itemsizes(eqn: JaxprEqn) -> tuple[int, int, int]:
    avals = map(_jax.aval, (*eqn.invars, *eqn.outvars))
    left, right, result = (aval.dtype.itemsize for aval in avals)
    return left, right, result
