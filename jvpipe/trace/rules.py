"""How cotangents in a user's own derivative rule must lie over the examples.

A slice of a micro-batch computes its backward by itself. So how a value lies over the examples
decides how its cotangent has to lie:

    the value                        its cotangent
    has a part for each example      has a part for each example
    depends on no example            is a sum: the cotangents of all slices are added up
    is a sum over examples           depends on no example: it is the same for every slice
    is a mean over n examples        depends on no example, but has the factor n: a slice's mean
                                     counts by the slice's share, which grows with n

To check a rule, `jvpipe.trace.spread` follows the equations of the rule's backward, as it
follows the loss. The backward begins with cotangents of the results, which lie as the table
says. It ends with cotangents of the operands, which must lie as the table says, too.
"""

from operator import attrgetter

from jvpipe.ir.examples import Over
from jvpipe.trace.sums_and_means import NONE, Lies, counted


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
