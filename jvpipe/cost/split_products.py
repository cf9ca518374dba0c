"""The parts into which a GPU's compiler cuts the sums of a product, so that all cores have work.

Each element of a product is a sum, and different cores may compute parts of one sum. The rules and
constants are those of XLA (`splitk_rewriter`), so they change only if XLA changes:

    parts      The compiler wants one and a half tiles of 64 x 128 per core. If the result has fewer
               tiles, each sum is cut into parts, whose number is a power of two. A product with few
               operations per byte that it moves is cut by the length of its sums alone.
    bytes      Each part is as large as the whole result, in float32. The parts are added up last.
    padding    If the sums cannot be cut into equal parts, both operands are copied, and filled up
               with zeros.
"""

from jvpipe.cost.matrix_products import Product

_TILE = 64, 128
_TILES_PER_CORE = 1.5
_FEW_OPERATIONS = 240  # multiply-adds per 32 bytes moved; a product with fewer has few operations
# Least lengths of a part. In a product with few operations, a part may be down to half as long,
# because the number of parts is rounded up to a power of two.
_SHORTEST, _SHORTEST_OF_FEW = 1220, 768
_MOST_PARTS = 128


def sum_parts(product: Product, cores: int) -> int:
    """Returns the number of parts into which each sum of a product is cut; 1 if none is cut.

    Args:
        product: the shape of the product.
        cores: the cores of the GPU.

    >>> sum_parts(Product(1, 304, 1024, 30522), 132), sum_parts(Product(1, 8192, 1024, 50257), 132)
    (8, 1)
    """
    m, n, k = product.m, product.n, product.k
    left, right, result = product.itemsizes
    moved_bytes = m * k * left + n * k * right + m * n * result
    if 32 * m * n * k < _FEW_OPERATIONS * moved_bytes:
        return min(_MOST_PARTS, _power(k // _SHORTEST_OF_FEW))
    tile_rows, tile_columns = _TILE
    down = -(-m // tile_rows)
    across = -(-n // tile_columns)
    tiles = product.b * down * across
    target = -(-int(_TILES_PER_CORE * cores) // max(1, tiles))
    largest = 1 << max(1, k // _SHORTEST).bit_length() - 1
    return _power(min(target, largest))


def split_bytes(product: Product, cores: int) -> int:
    """Counts the bytes of the parts, and of padded copies of operands; 0 if no sum is cut.

    Args:
        product: the shape of the product.
        cores: the cores of the GPU.

    >>> split_bytes(Product(1, 304, 1024, 30522), 132) / 2**20
    164.15234375
    """
    parts = sum_parts(product, cores)
    if parts == 1:
        return 0
    left, right, _ = product.itemsizes
    total = 4 * parts * product.b * product.m * product.n
    # Operands are padded if the sums cannot be cut into parts of equal length.
    if product.k % parts:
        filled = -(-product.k // parts) * parts
        total += product.b * filled * (product.m * left + product.n * right)
    return total


def _power(count: int) -> int:
    """Returns the least power of two that is at least `count`."""
    return 1 << (max(1, count) - 1).bit_length()
