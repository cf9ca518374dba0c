"""The largest size that works, in few trials."""

from bisect import bisect_left
from collections.abc import Callable


def largest(works: Callable[[int], bool], near: int = 1, bits: int = 6) -> int:
    """The largest size that works, sought from `near` on; 0 if none does.

    Tried are the numbers of `bits` binary digits and zeros: with six, all up to 64, then in steps
    of at most 3.1%.

    >>> largest(lambda size: size <= 77), largest(lambda size: size <= 77, near=96), largest(lambda size: False)
    (76, 76, 0)
    >>> largest(lambda size: size <= 77, bits=3)
    64
    """
    sizes = [n for n in range(1, 4096) if n % (1 << max(0, n.bit_length() - bits)) == 0]
    at, step = bisect_left(sizes, max(1, near)), 1
    below, above = (at, len(sizes)) if works(sizes[at]) else (-1, at)
    while above - below > 1:
        if above == len(sizes):  # nothing is known to be too much
            middle = min(below + step, above - 1)
        elif below == -1:
            middle = max(above - step, 0)
        else:
            middle = (below + above) // 2
        below, above = (middle, above) if works(sizes[middle]) else (below, middle)
        step *= 2
    return sizes[below] if below >= 0 else 0
