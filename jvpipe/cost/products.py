"""Matrix products, and convolutions as products, as equations have them.

A convolution has as many rows as its result has pixels, and sums over the pixels of a kernel and its inputs.
"""

import math
from dataclasses import dataclass
from typing import Literal

from jvpipe import _jax
from jvpipe._jax import JaxprEqn

SINGLE = 4, 4, 4
"""The bytes of elements of float32."""


@dataclass(frozen=True, slots=True)
class Product:
    """A batch of b products of m x k by k x n; the bytes of an element of each operand, and of the result.

    `three` says what a convolution has of 3 x 3 pixels, if it is dense: its kernel, or, if it finds the gradient of
    one, its result.
    """

    b: int
    m: int
    n: int
    k: int
    itemsizes: tuple[int, int, int] = SINGLE
    three: Literal["kernel", "result"] | None = None

    @property
    def flops(self) -> int:
        """Counts its floating-point operations."""
        return 2 * self.b * self.m * self.n * self.k

    @property
    def minimal(self) -> "Product | None":
        """The products that Winograd's algorithm F(2 x 2, 3 x 3) makes of a convolution of 3 x 3 pixels.

        Four pixels of a result take 16 multiplications in place of 36 (Lavin and Gray, "Fast algorithms for
        convolutional neural networks", CVPR 2016): 16 products of a quarter of the rows and a ninth of the sums.
        """
        if self.three is None:
            return None
        if self.three == "kernel":
            m, k = -(-self.m // 4), self.k // 9
        else:
            m, k = self.m // 9, -(-self.k // 4)
        return Product(16 * self.b, m, self.n, k, self.itemsizes)


def product_of(eqn: JaxprEqn) -> Product | None:
    """Reads off the product that an equation is; None if it is none.

    >>> import jax, jax.numpy as jnp
    >>> a, b = jax.ShapeDtypeStruct((8, 4, 16), jnp.float32), jax.ShapeDtypeStruct((8, 16, 2), jnp.float32)
    >>> product_of(jax.make_jaxpr(jnp.matmul)(a, b).eqns[0])
    Product(b=8, m=4, n=2, k=16, itemsizes=(4, 4, 4), three=None)
    """
    if eqn.primitive.name == "dot_general":
        return _matrices(eqn)
    if eqn.primitive.name == "conv_general_dilated":
        return _convolution(eqn)
    return None


def _matrices(eqn: JaxprEqn) -> Product:
    (summed, _), (batch, _) = eqn.params["dimension_numbers"]
    left, right = (_jax.aval(v) for v in eqn.invars)
    b, k = (math.prod(left.shape[d] for d in dims) for dims in (batch, summed))
    every = max(1, b * k)
    return Product(b, left.size // every, right.size // every, k, _itemsizes(eqn))


def _convolution(eqn: JaxprEqn) -> Product:
    """The product that a convolution is; zeros that lie between dilated inputs are not multiplied."""
    params = eqn.params
    numbers = params["dimension_numbers"]
    kernel = [_jax.aval(eqn.invars[1]).shape[d] for d in numbers.rhs_spec]
    result = [_jax.aval(eqn.outvars[0]).shape[d] for d in numbers.out_spec]
    groups = params["feature_group_count"] * params["batch_group_count"]
    spread = math.prod(params["lhs_dilation"])
    dense = spread == math.prod(params["window_strides"]) == math.prod(params["rhs_dilation"]) == 1
    three = None
    if dense and kernel[2:] == [3, 3]:
        three = "kernel"
    elif dense and result[2:] == [3, 3]:
        three = "result"
    m = -(-result[0] * math.prod(result[2:]) // spread)
    k = kernel[1] * math.prod(kernel[2:])
    return Product(groups, m, result[1] // groups, k, _itemsizes(eqn), three)


def _itemsizes(eqn: JaxprEqn) -> tuple[int, int, int]:
    left, right, result = (_jax.aval(v).dtype.itemsize for v in (*eqn.invars, *eqn.outvars))
    return left, right, result
