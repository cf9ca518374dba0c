"""Products as devices work on them: in tiles of their results, so many at once.

A tile is that part of a result which one core of a device sums up at a time. All cores work on a wave of tiles; the
last wave takes as long as the others although some of its cores are idle, and so do tiles that stick out of the result.
Libraries have tiles of several sizes, the smaller of which load more operands for each operation, and cut long sums in
parts for cores that would be idle; they take what is fastest, and so does this model.

Dense convolutions of 3 x 3 pixels take the shorter of two ways, the direct one and Winograd's (`products.py`).
"""

import math
from dataclasses import dataclass

from jvpipe.cost.products import Product

TILES = ((128, 128, 1.0), (128, 64, 0.9), (64, 64, 0.75))
"""The rows and columns of tiles, and the share of the largest one's rate that each reaches. Sizes are those of NVIDIA's
"Matrix Multiplication Background User's Guide" (DU-09799-001), section 2.3, by which smaller ones reach less; how much
less is assumed."""
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
    direct_s = _waves_s(product, tiling, cores, flops_per_s, result_bytes_per_s)
    minimal = product.minimal
    if minimal is None or not tiling.winograd:
        return direct_s
    rate = flops_per_s * tiling.winograd
    return min(direct_s, _waves_s(minimal, tiling, cores, rate, result_bytes_per_s))


def _waves_s(
    product: Product, tiling: Tiling, cores: int, flops_per_s: float, result_bytes_per_s: float
) -> float:
    core_flops_per_s = flops_per_s / cores
    sums_bytes = 4 * product.b * product.m * product.n
    least = math.inf
    for rows, columns, share in TILES:
        tiles = product.b * -(-product.m // rows) * -(-product.n // columns)
        for parts in _PARTS:
            terms = -(-product.k // parts) + tiling.start
            waves = -(-tiles * parts // cores)
            seconds = waves * 2 * rows * columns * terms / (core_flops_per_s * share)
            if parts > 1:
                seconds += 2 * parts * sums_bytes / result_bytes_per_s
            least = min(least, seconds)
    return least
