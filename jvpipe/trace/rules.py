"""Derivative rules of the user's own: what they send back must come apart over examples,
as what went forward does.

    what went forward        its cotangent
    has a part for each      has a part for each
    of no example            a sum: what slices send back is added up
    a sum                    of no example: it is the same for every slice
    a mean                   that, times the number of examples: a slice counts by its share

So a rule is followed as the loss is, from cotangents that lie so, and the cotangents that it
returns have to lie so.
"""

from operator import attrgetter

from jvpipe.ir.examples import Over
from jvpipe.trace.reductions import NONE, Lies, counted


def cotangent(lies: Lies) -> Lies:
    """Returns how the cotangent of a value has to lie.

    Args:
        lies: how the value lies.
    """
    match lies.over:
        case Over.ALONG:
            return Lies(Over.ALONG, lies.axis, power=-lies.power)
        case Over.NONE:
            return Lies(Over.SUM)
        case Over.SUM if not lies.power:
            return NONE
        case Over.MEAN:
            return counted(1)
        case _:
            return Lies(Over.MIXED)


def fits(actual: Lies, required: Lies) -> bool:
    """Tells whether a cotangent lies as it has to.

    Args:
        actual: how it lies.
        required: how it has to lie.
    """
    if actual.is_zero or required.over is Over.MIXED:
        return True
    compared = attrgetter("over", "axis", "power")
    return compared(actual) == compared(required)
