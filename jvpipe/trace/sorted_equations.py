"""Sorts the equations of a loss into main and floating equations.

A main equation is computed by exactly one layer. A floating equation is cheap, so every layer that
needs its result computes it, and the result is never sent from layer to layer:

    mask = i < n          floating: depends only on constants, and on inputs that all stages can get
    w16 = cast(w)         floating: depends only on parameters and constants
    y = dot(x, w16)       main
"""

from dataclasses import dataclass

from jvpipe._jax import JaxprEqn, Var
from jvpipe.ir.values import VALUES, ValueKind
from jvpipe.trace import jaxprs
from jvpipe.trace.keys import derives_key
from jvpipe.trace.loss import LossJaxpr
from jvpipe.trace.primitives import is_cheap, is_heavy

_DERIVATIONS = 6
"""Each layer that needs a PRNG key derives it, if the key is at most this many steps from the seed.

A key that takes more steps is sent as a tensor. Otherwise, in a model that splits one key at each
layer, each layer would need more splits than the layer before, and no two layers could share a
program.
"""


@dataclass(frozen=True)
class Sorted:
    """The equations of a loss, sorted into floating and main ones.

    Attributes:
        floating: the equations that each layer computes for itself if it needs them.
        main: the equations that exactly one layer computes, in order.
        weighted: marks the main equations that do heavy work with parameters, such as products.
    """

    floating: tuple[JaxprEqn, ...]
    main: tuple[JaxprEqn, ...]
    weighted: tuple[bool, ...]

    @staticmethod
    def of(loss: LossJaxpr) -> "Sorted":
        """Sorts the equations of a loss in one pass, each by its primitive and its operands."""
        source = {v: ref.kind for v, ref in loss.inputs.items()}
        constants = {v for v, kind in source.items() if kind is ValueKind.CONSTANT}
        free = constants | {v for v, kind in source.items() if VALUES[kind].fed}
        parametric = {v for v, kind in source.items() if kind is ValueKind.PARAMETER}
        floating = []
        main = []
        weighted = []
        reading = []
        derivations: dict[Var, int] = {}  # how often a key was derived on the way from the seed
        for eqn in loss.eqns:
            read = set(jaxprs.variables(eqn.invars))
            before = max((derivations.get(v, 0) for v in read), default=0)
            steps = before + derives_key(eqn)
            derivations |= dict.fromkeys(eqn.outvars, steps)
            cheap = is_cheap(eqn) and not eqn.effects and steps <= _DERIVATIONS
            # Masks, positions and keys depend only on constants and on inputs that all stages can
            # get.
            if cheap and read <= free:
                free.update(eqn.outvars)
                constants.update(eqn.outvars if read <= constants else ())
                floating.append(eqn)
            # Casts and the like depend only on parameters and constants.
            elif cheap and read <= parametric | constants:
                parametric.update(eqn.outvars)
                floating.append(eqn)
            else:
                main.append(eqn)
                reading.append(not read.isdisjoint(parametric))
                weighted.append(is_heavy(eqn) and reading[-1])
        # If at most one equation is heavy and reads a parameter, as in a model without
        # products, all main equations that read parameters count as weighted.
        weighted = weighted if sum(weighted) > 1 else reading
        return Sorted(tuple(floating), tuple(main), tuple(weighted))
