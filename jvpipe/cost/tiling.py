"""Products as devices work on them: in tiles of their results, so many at once.

A tile is that part of a result which one core of a device sums up at a time. All cores work on a wave of tiles; the
last wave takes as long as the others although some of its cores are idle, and so do tiles that stick out of the result.
Libraries have tiles of several sizes, the smaller of which load more operands for each operation, and cut long sums in
parts for cores that would be idle; they take what is fastest, and so does this model.

A convolution is a product too: of as many rows as its result has pixels, of sums over the pixels of a kernel and its
inputs. Of 3 x 3 pixels without stride it is 16 products of a quarter of the rows and a ninth of the sums, by Winograd's
algorithm F(2 x 2, 3 x 3) (Lavin and Gray, "Fast algorithms for convolutional neural networks", CVPR 2016).
"""

import math
from dataclasses import dataclass

from jvpipe import _jax
from jvpipe._jax import JaxprEqn

TILES = ((128, 128, 1.0), (128, 64, 0.9), (64, 64, 0.75))
"""The rows and columns of tiles, and the share of the largest one's rate that each reaches: as in NVIDIA's "Matrix
Multiplication Background User's Guide" (DU-09799-001), section 2.3, by size."""
_PARTS = tuple(2**i for i in range(8))
"""In how many parts a sum may be cut."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a device works on products.

    Attributes:
        start: terms that a sum seems to have beside its own: the first operands are awaited, results are written.
        winograd: the share of a product's rate that Winograd's algorithm reaches, which transforms images and kernels.
    """

    start: float = 0.0
    winograd: float = 0.0


@dataclass(frozen=True, slots=True)
class Product:
    """So many products of matrices, whose results have `rows` and `columns` of sums over `depth` terms.

    `kernel` is what a convolution has of 3 x 3 pixels without stride: its "kernel", or, if it is that which finds
    the gradient of one, its "result".
    """

    count: int
    rows: int
    columns: int
    depth: int
    kernel: str = ""

    @property
    def flops(self) -> int:
        """Counts its floating-point operations."""
        return 2 * self.count * self.rows * self.columns * self.depth

    @property
    def minimal(self) -> "Product | None":
        """The products that Winograd's algorithm makes of it, if it is one of that kind."""
        if self.kernel == "kernel":
            rows, depth = -(-self.rows // 4), self.depth // 9
        elif self.kernel == "result":
            rows, depth = self.rows // 9, -(-self.depth // 4)
        else:
            return None
        return Product(16 * self.count, rows, self.columns, depth)


def product_of(eqn: JaxprEqn) -> Product | None:
    """Reads off the product that an equation is; None if it is none.

    >>> import jax, jax.numpy as jnp
    >>> a, b = jax.ShapeDtypeStruct((8, 4, 16), jnp.float32), jax.ShapeDtypeStruct((8, 16, 2), jnp.float32)
    >>> product_of(jax.make_jaxpr(jnp.matmul)(a, b).eqns[0])
    Product(count=8, rows=4, columns=2, depth=16, kernel='')
    """
    if eqn.primitive.name == "dot_general":
        return _matrices(eqn)
    if eqn.primitive.name == "conv_general_dilated":
        return _convolution(eqn)
    return None


def _matrices(eqn: JaxprEqn) -> Product:
    (summed, _), (batched, _) = eqn.params["dimension_numbers"]
    left, right = (_jax.aval(x).shape for x in eqn.invars)
    count = math.prod(left[d] for d in batched)
    depth = math.prod(left[d] for d in summed)
    each = max(count * depth, 1)
    return Product(count, math.prod(left) // each, math.prod(right) // each, depth)


def _convolution(eqn: JaxprEqn) -> Product:
    """The product that a convolution is; zeros that lie between dilated inputs are not multiplied."""
    told, params = eqn.params["dimension_numbers"], eqn.params
    kernel = [_jax.aval(eqn.invars[1]).shape[d] for d in told.rhs_spec]
    result = [_jax.aval(eqn.outvars[0]).shape[d] for d in told.out_spec]
    groups = params["feature_group_count"] * params["batch_group_count"]
    spread = math.prod(params["lhs_dilation"])
    dense = math.prod(params["window_strides"]) == 1 == math.prod(params["rhs_dilation"])
    of = ""
    if dense and spread == 1:
        of = "kernel" if kernel[2:] == [3, 3] else "result" if result[2:] == [3, 3] else ""
    rows = -(-result[0] * math.prod(result[2:]) // spread)
    return Product(groups, rows, result[1] // groups, kernel[1] * math.prod(kernel[2:]), of)


def product_s(
    product: Product, tiling: Tiling, cores: int, flops_per_s: float, result_bytes_per_s: float
) -> float:
    """Estimates the seconds of a product in the waves of tiles that are the fastest.

    Args:
        product: its shape.
        tiling: of the device.
        cores: that it has, each of which works on one tile.
        flops_per_s: that all cores reach together on the largest tiles.
        result_bytes_per_s: at which parts of sums are written, read and added up, as float32.

    >>> gpu = Tiling()
    >>> [round(product_s(Product(1, 128 * rows, 128, 100), gpu, 80, 80e9, 1e15), 6) for rows in (80, 81, 160)]
    [0.003277, 0.003834, 0.006554]
    """
    known_s = _waves_s(product, tiling, cores, flops_per_s, result_bytes_per_s)
    minimal = product.minimal
    if minimal is None or not tiling.winograd:
        return known_s
    rate = flops_per_s * tiling.winograd
    return min(known_s, _waves_s(minimal, tiling, cores, rate, result_bytes_per_s))


def _waves_s(
    product: Product, tiling: Tiling, cores: int, flops_per_s: float, result_bytes_per_s: float
) -> float:
    core_flops_per_s = flops_per_s / cores
    bytes_ = 4 * product.count * product.rows * product.columns
    least = math.inf
    for rows, columns, share in TILES:
        tiles = product.count * -(-product.rows // rows) * -(-product.columns // columns)
        for parts in _PARTS:
            terms = -(-product.depth // parts) + tiling.start
            waves = -(-tiles * parts // cores)
            seconds = waves * 2 * rows * columns * terms / (core_flops_per_s * share)
            if parts > 1:
                seconds += 2 * parts * bytes_ / result_bytes_per_s
            least = min(least, seconds)
    return least
