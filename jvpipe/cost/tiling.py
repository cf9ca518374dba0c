"""Estimates the seconds of matrix products on a device whose cores each compute a tile at a time.

A tile is a rectangle of the result, which one core computes. A wave is the set of tiles that the
cores work on at the same time:

    a result of 5 x 2 tiles on 4 cores takes three waves       wave 1  wave 2  wave 3
    t: a core works on a tile; .: a core is idle               t t t t t t t t t t . .

The last wave takes as long as the others, although some cores are idle. A tile that extends beyond
the edge of the result takes as long as a whole tile. Small tiles leave fewer cores idle, but load
more operands for each operation, so libraries of products have tiles of several sizes. If cores
would be idle, libraries also cut long sums into parts, which different cores compute. Libraries
choose the fastest combination of tile size and number of parts, and so does this model.

A dense convolution of 3 x 3 pixels takes the faster of two ways: as one product, or as the products
of Winograd's algorithm (`matrix_products.py`).
"""

import math
from dataclasses import dataclass

from jvpipe.cost.matrix_products import Product

TILES = ((128, 128, 1.0), (128, 64, 0.9), (64, 64, 0.75))
"""The sizes of tiles: rows, columns, and the share of the largest tile's rate that a tile reaches.

The sizes are those of NVIDIA's "Matrix Multiplication Background User's Guide" (DU-09799-001),
section 2.3. The guide says that smaller tiles reach less of the rate. The shares are assumed.
"""
_PARTS = tuple(2**i for i in range(8))
"""The numbers of parts into which a sum may be cut; 1 leaves it whole."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """The efficiency of a device at products.

    Attributes:
        start: the time to load a tile's first operands and to write its result. It is expressed as
            the number of terms that a core could add to each sum of the tile in that time.
        winograd: the share of the rate of products that Winograd's algorithm reaches, less than 1
            because it also transforms images and kernels; 0 if the device does not use it.
    """

    start: float = 0.0
    winograd: float = 0.0


def product_s(
    product: Product,
    tiling: Tiling,
    cores: int,
    flops_per_s: float,
    result_bytes_per_s: float,
) -> float:
    """Estimates the seconds of a product, computed in the fastest way.

    The example has results of 80, 81 and 160 tiles on 80 cores. With whole sums, 81 tiles would
    take two waves, as long as 160 tiles. With sums cut into eight parts, the result of 81 tiles
    takes only 17% longer than the result of 80 tiles.

    Args:
        product: the shape of the product.
        tiling: the efficiency of the device.
        cores: the cores of the device; each works on one tile at a time.
        flops_per_s: the rate of all cores together on the largest tiles.
        result_bytes_per_s: the rate at which the float32 parts of a sum are written, and read again
            to be added up.

    >>> gpu = Tiling()
    >>> [round(product_s(Product(1, 128 * rows, 128, 100), gpu, 80, 80e9, 1e15), 6) for rows in (80, 81, 160)]
    [0.003277, 0.003834, 0.006554]
    """
    ways = [(product, flops_per_s)]
    if product.minimal and tiling.winograd:
        ways.append((product.minimal, flops_per_s * tiling.winograd))
    return min(_waves_s(way, tiling, cores, rate, result_bytes_per_s) for way, rate in ways)


def _waves_s(
    product: Product,
    tiling: Tiling,
    cores: int,
    flops_per_s: float,
    result_bytes_per_s: float,
) -> float:
    """Estimates the seconds of a product with the fastest tile size and number of parts.

    Winograd's algorithm is not considered here. The arguments are those of `product_s`.
    """
    core_flops_per_s = flops_per_s / cores
    sums_bytes = 4 * product.b * product.m * product.n
    least = math.inf
    for rows, columns, share in TILES:
        tiles = product.b * -(-product.m // rows) * -(-product.n // columns)
        for parts in _PARTS:
            terms = -(-product.k // parts) + tiling.start
            # A wave takes the same time however many cores are busy, so the number is rounded up.
            waves = -(-tiles * parts // cores)
            tile_flops = 2 * rows * columns * terms
            seconds = waves * tile_flops / (core_flops_per_s * share)
            # Each part is an array as large as the result. All parts are written, and then read.
            if parts > 1:
                seconds += 2 * parts * sums_bytes / result_bytes_per_s
            least = min(least, seconds)
    return least
