"""Finds how cotangents in a user's derivative rule must depend on the examples.

Each slice of a micro-batch computes its backward independently. So how a value depends on the
examples (`Lies`) determines how its cotangent must depend on them:

    the value                        its cotangent
    has a part for each example      has a part for each example
    depends on no example            is a sum: the cotangents of all slices are added up
    is a sum over examples           depends on no example: it is the same for every slice
    is a mean over n examples        depends on no example, but has the factor n: a slice's mean
                                     is multiplied by the slice's share, which is proportional to n

To check a rule, `jvpipe.trace.spread` follows the equations of the rule's backward, as it follows
those of the loss. The walk begins with the cotangents of the rule's results, which depend on the
examples as the table says. It ends with the cotangents of the rule's operands, which must also
depend on the examples as the table says.
"""

from operator import attrgetter

from jvpipe.ir.examples import Over
from jvpipe.trace.sums_and_means import NONE, Lies, counted


def cotangent(lies: Lies) -> Lies:
    """Returns how the cotangent of a value must depend on the examples.

    Args:
        lies: how the value depends on the examples.
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
    """Tells whether a cotangent depends on the examples as required.

    Args:
        actual: how the cotangent depends on the examples.
        required: how the cotangent must depend on the examples.
    """
    if actual.is_zero or required.over is Over.MIXED:
        return True
    compared = attrgetter("over", "axis", "power")
    return compared(actual) == compared(required)
