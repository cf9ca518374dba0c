"""Finds the factor n or 1/n of a literal, where n is the number of examples.

The literal of a mean has such a factor, and so differs between traces at two sizes:

    at 4 examples    at 2 examples    factor
    4.0              2.0              n
    0.25             0.5              1/n
"""

import numpy as np


def factor_power(one: np.ndarray, other: np.ndarray, ratio: float) -> int | None:
    """Returns p if a literal has the factor n^p, where p is 1 or -1; None if it has neither factor.

    Args:
        one: the literal's value in one trace.
        other: its value, of the same type, in the other trace.
        ratio: the number of examples in the first trace, divided by that in the other.

    >>> factor_power(np.array(4.0), np.array(2.0), 2.0), factor_power(np.array(0.25), np.array(0.5), 2.0)
    (1, -1)
    """
    # 16-bit types have few digits, so the tolerance is larger.
    tolerance = 1e-2 if one.dtype.itemsize < 4 else 1e-6
    for power in (1, -1):
        if np.isclose(float(one), float(other) * ratio**power, rtol=tolerance):
            return power
    return None
