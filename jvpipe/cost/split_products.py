"""Products whose sums a GPU's compiler cuts into parts, so that all of its cores have work.

    parts      a result has tiles of 64 x 128, and the compiler wants one and a half per core; if there
               are fewer, the sum is cut into a power of two of parts. Products that move much for
               what they compute are cut further
    bytes      each part is a whole result in float32, and the parts are summed up afterwards
    padding    if the parts do not divide the length of the sum, both operands are copied and filled up

This is XLA's rule (`splitk_rewriter`), with its constants.
"""

from jvpipe.cost.products import Product

_TILE = 64, 128
_TILES_PER_CORE = 1.5
_FEW_OPERATIONS = 240  # multiply-adds per 32 bytes that are moved
_SHORTEST, _SHORTEST_OF_FEW = 1220, 768  # sums, after they are cut
_MOST_PARTS = 128


def sum_parts(product: Product, cores: int) -> int:
    """Returns the number of parts into which the sum of a product is cut.

    Args:
        product: its shape.
        cores: of the GPU.

    >>> sum_parts(Product(1, 304, 1024, 30522), 132), sum_parts(Product(1, 8192, 1024, 50257), 132)
    (8, 1)
    """
    m = product.m
    n = product.n
    k = product.k
    elements = m * k, n * k, m * n
    sizes = (count * itemsize for count, itemsize in zip(elements, product.itemsizes, strict=True))
    moved_bits = 8 * sum(sizes)
    operations = 256 * m * n * k
    if operations < _FEW_OPERATIONS * moved_bits:
        return min(_MOST_PARTS, _power(k // _SHORTEST_OF_FEW))
    tile_rows, tile_columns = _TILE
    tiles = product.b * -(-m // tile_rows) * -(-n // tile_columns)
    target = -(-int(_TILES_PER_CORE * cores) // max(1, tiles))
    largest = 1 << max(1, k // _SHORTEST).bit_length() - 1
    return _power(min(target, largest))


def split_bytes(product: Product, cores: int) -> int:
    """Counts the bytes of the parts, and of operands that are copied for them.

    0 if the sum is not cut.

    Args:
        product: its shape.
        cores: of the GPU.

    >>> split_bytes(Product(1, 304, 1024, 30522), 132) / 2**20
    164.15234375
    """
    parts = sum_parts(product, cores)
    if parts == 1:
        return 0
    left, right, _ = product.itemsizes
    copies = 0
    # Operands are copied to be filled up with zeros if the sum has no parts of equal length.
    if product.k % parts:
        filled = -(-product.k // parts) * parts
        copies = product.b * filled * (product.m * left + product.n * right)
    results = product.b * product.m * product.n
    return copies + 4 * parts * results


def _power(count: int) -> int:
    """Returns the least power of two that is no less than a count."""
    return 1 << (max(1, count) - 1).bit_length()
