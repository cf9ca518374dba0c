"""Derivative rules of the user's own: what they send back must come apart over examples, as what went forward does.

    what went forward        what comes back of it
    has a part for each      a part for each
    of no example            a sum: what slices send back is added up
    a sum                    of no example: every slice has the same
    a mean                   that, times the number of examples: a slice counts by its share

So a rule is followed as the loss is, from cotangents that lie like that, and what it gives back has to lie like that.
"""

from jvpipe.ir.examples import Over
from jvpipe.trace.reductions import NONE, Lies, counted


def cotangent(lies: Lies) -> Lies:
    """How the cotangent of a value lies.

    Args:
        lies: the value.
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


def fits(found: Lies, wanted: Lies) -> bool:
    """Tells whether a cotangent lies as it has to.

    Args:
        found: how it does.
        wanted: how it should.
    """
    if found.is_zero or wanted.over is Over.MIXED:
        return True
    return (found.over, found.axis, found.power) == (wanted.over, wanted.axis, wanted.power)
