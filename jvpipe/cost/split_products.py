"""Products that a GPU's compiler cuts along what they sum over, so that all of its cores have work.

    parts      the cores have tiles of 64 x 128 of the result to make, one and a half each; where there are fewer, the
               sum is cut into parts, a power of two. Small ones, which move much for what they compute, are cut further
    bytes      each part is a whole result in float32; their sum is made of them afterwards
    padding    a sum of a length that the parts do not divide is filled up: both operands are copied for that

This is XLA's rule (`splitk_rewriter`), with its constants.
"""

import math
from dataclasses import dataclass

from jvpipe import _jax
from jvpipe._jax import JaxprEqn

_TILE = 64, 128
_TILES_PER_CORE = 1.5
_FEW_OPERATIONS = 240  # multiply-adds per 32 bytes that are moved
_SHORTEST, _SHORTEST_OF_FEW = 1220, 768  # sums, after they are cut
_MOST_PARTS = 128


@dataclass(frozen=True, slots=True)
class Product:
    """A batch of b products of m x k by k x n; the bytes of an element of each operand, and of the result."""

    b: int
    m: int
    n: int
    k: int
    itemsizes: tuple[int, int, int]

    @staticmethod
    def of(eqn: JaxprEqn) -> "Product":
        """The product that an equation is."""
        (summed, _), (batch, _) = eqn.params["dimension_numbers"]
        left, right, result = (_jax.aval(v) for v in (*eqn.invars, *eqn.outvars))
        b, k = (math.prod(left.shape[d] for d in dims) for dims in (batch, summed))
        every = max(1, b * k)
        sizes = left.dtype.itemsize, right.dtype.itemsize, result.dtype.itemsize
        return Product(b, left.size // every, right.size // every, k, sizes)

    def parts(self, cores: int) -> int:
        """Into how many parts the sum is cut.

        Args:
            cores: of the GPU.

        >>> head = Product(1, 304, 1024, 30522, (4, 4, 4))
        >>> head.parts(132), Product(1, 8192, 1024, 50257, (4, 4, 4)).parts(132)
        (8, 1)
        """
        m, n, k = self.m, self.n, self.k
        moved = 8 * sum(x * y for x, y in zip((m * k, n * k, m * n), self.itemsizes, strict=True))
        if 256 * m * n * k < _FEW_OPERATIONS * moved:
            return min(_MOST_PARTS, _power(k // _SHORTEST_OF_FEW))
        tiles = self.b * -(-m // _TILE[0]) * -(-n // _TILE[1])
        wanted = -(-int(_TILES_PER_CORE * cores) // max(1, tiles))
        most = 1 << max(1, k // _SHORTEST).bit_length() - 1
        return _power(min(wanted, most))

    def split_bytes(self, cores: int) -> int:
        """Counts the bytes of the parts, and of operands that are copied for them; nothing if there is one part.

        Args:
            cores: of the GPU.

        >>> Product(1, 304, 1024, 30522, (4, 4, 4)).split_bytes(132) / 2**20
        164.15234375
        """
        parts = self.parts(cores)
        if parts == 1:
            return 0
        filled = -(-self.k // parts) * parts if self.k % parts else 0
        left, right, _ = self.itemsizes
        copies = self.b * filled * (self.m * left + self.n * right)
        return copies + parts * self.b * self.m * self.n * 4


def _power(count: int) -> int:
    """The least power of two that is no less."""
    return 1 << (max(1, count) - 1).bit_length()
