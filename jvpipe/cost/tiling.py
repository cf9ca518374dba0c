"""Seconds of matrix products: a device works on tiles of their results,
as many at once as it has cores.

    a result of 5 x 2 tiles on 4 cores: three waves       wave 1  wave 2  wave 3
                                                          t t t t t t t t t t . .

A tile is the part of a result that one core sums up at a time. The last wave takes as long as the
others although some of its cores are idle, and a tile that sticks out of the result takes as long
as a whole one. Libraries have tiles of several sizes, the smaller of which load more operands for
each operation, and cut long sums in parts for cores that would be idle. They take the fastest way,
and so does this model.

Dense convolutions of 3 x 3 pixels take the shorter of two ways, the direct one and Winograd's
(`products.py`).
"""

import math
from dataclasses import dataclass

from jvpipe.cost.products import Product

TILES = ((128, 128, 1.0), (128, 64, 0.9), (64, 64, 0.75))
"""The rows and columns of tiles, and the share of the largest one's rate that each reaches. Sizes
are those of NVIDIA's "Matrix Multiplication Background User's Guide" (DU-09799-001), section 2.3,
by which smaller ones reach less; how much less is assumed.
"""
_PARTS = tuple(2**i for i in range(8))
"""The numbers of parts into which a sum may be cut."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """The way a device works on products.

    Attributes:
        start: terms that a sum seems to have beside its own, for the wait for the first operands
            and for writing the result.
        winograd: the share of a product's rate that Winograd's algorithm reaches, which also
            transforms images and kernels; 0 if the device does not use it.
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
    """Estimates the seconds of a product by the fastest way.

    Args:
        product: its shape.
        tiling: of the device.
        cores: of the device; each works on one tile.
        flops_per_s: the rate of all cores together on the largest tiles.
        result_bytes_per_s: the rate at which parts of sums are written, read and added up, as
            float32.

    >>> gpu = Tiling()
    >>> [round(product_s(Product(1, 128 * rows, 128, 100), gpu, 80, 80e9, 1e15), 6) for rows in (80, 81, 160)]
    [0.003277, 0.003834, 0.006554]
    """
    direct_s = _waves_s(
        product,
        tiling,
        cores,
        flops_per_s,
        result_bytes_per_s,
    )
    minimal = product.minimal
    if minimal is None or not tiling.winograd:
        return direct_s
    rate = flops_per_s * tiling.winograd
    return min(direct_s, _waves_s(minimal, tiling, cores, rate, result_bytes_per_s))


def _waves_s(
    product: Product,
    tiling: Tiling,
    cores: int,
    flops_per_s: float,
    result_bytes_per_s: float,
) -> float:
    """Estimates the seconds of a product in waves of tiles, of the best size and number of parts."""
    core_flops_per_s = flops_per_s / cores
    sums_bytes = 4 * product.b * product.m * product.n
    least = math.inf
    for rows, columns, share in TILES:
        tiles = product.b * -(-product.m // rows) * -(-product.n // columns)
        for parts in _PARTS:
            terms = -(-product.k // parts) + tiling.start
            waves = -(-tiles * parts // cores)
            seconds = waves * 2 * rows * columns * terms / (core_flops_per_s * share)
            # Each part writes a result of its own, and the sum of them reads it again.
            if parts > 1:
                seconds += 2 * parts * sums_bytes / result_bytes_per_s
            least = min(least, seconds)
    return least
