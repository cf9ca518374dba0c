"""Recognizes batch norms, which center and scale each example by statistics of several examples.

    m = mean(x)           a statistic of several examples
    c = x - m             m is open in c: c depends on m and is not yet scaled
    v = mean(c**2)        a statistic of c; m is open in v, too
    s = sqrt(v + e)       the standard deviation; rsqrt(v + e) is s^-1
    c * s**-1             m is closed, because the scale s^-1 was made from m

On a slice of the examples, a batch norm is still a batch norm, so a replica may normalize its own
examples. A loss that only centers, or that uses the statistic in any other way, is not a batch norm
and is refused. So only linear functions, sums, products and squares may read a value in which
a statistic is open, and the statistic must be closed before the loss.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

from jvpipe import _jax
from jvpipe._jax import JaxprEqn, Literal, Var
from jvpipe.ir.examples import Over
from jvpipe.trace.structure import comparable
from jvpipe.trace.sums_and_means import Lies, open_of, roots_of

_SHAPING = frozenset(
    """
    broadcast_in_dim concatenate conv_general_dilated convert_element_type copy copy_p dot_general
    expand_dims name neg optimization_barrier pad reduce_precision reduce_sum reshape rev select_n
    sharding_constraint slice squeeze stop_gradient transpose
    """.split()  # noqa: SIM905 - read as a table
)
"""Linear and bilinear primitives. An open statistic stays open in their results."""
_SUMS = ("add", "sub", "add_any")
_PRODUCTS = ("mul", "div")
_ROOTS = {"sqrt": 1, "rsqrt": -1}  # to the power of the standard deviation


def first_of_same(eqns: Iterable[JaxprEqn]) -> dict[Var, Var]:
    """Maps each result to the result of the first equation that computes the same value.

    For example, if `jnp.var` computes a mean again, its result is mapped to the first mean.

    Args:
        eqns: the equations, in their order.
    """
    first: dict[Var, Var] = {}
    seen: dict[Hashable, JaxprEqn] = {}
    for eqn in eqns:
        if eqn.effects or _jax.inner_jaxprs(eqn):
            continue
        operands = tuple(str(x) if isinstance(x, Literal) else first.get(x, x) for x in eqn.invars)
        key = (eqn.primitive.name, comparable(eqn.params), operands)
        before = seen.setdefault(key, eqn)
        first.update(zip(eqn.outvars, before.outvars, strict=True))
    return first


def normalized(
    eqn: JaxprEqn,
    ins: Sequence[Lies],
    out: Lies,
) -> Lies | None:
    """Adds `open` and `deviation`, which describe batch norms, to the `Lies` of a result.

    Args:
        eqn: an equation that is neither a loop nor a call.
        ins: how its operands depend on the examples.
        out: how its result depends on the examples, without `open` and `deviation`.

    Returns:
        The `Lies` of the result; None if the equation reads an open statistic in a way that is not
        part of a batch norm.
    """
    name = eqn.primitive.name
    moving = [x for x in ins if x.over is not Over.NONE]
    scales = [x for x in moving if x.deviation]
    deviation = _deviation(eqn, ins)
    opened = open_of(moving)
    if out.over is not Over.ALONG:
        if out.reduced:
            deviation = _ROOTS.get(name, deviation)
        return replace(out, open=opened, deviation=deviation)
    # If an equation combines a statistic with single examples, the statistic is open in its result.
    entering = [x for x in moving if x.reduced and not x.deviation]
    opened |= roots_of(entering)
    if deviation and len(scales) == len(moving):  # a scale, repeated for each example
        roots = roots_of(scales)
        return replace(out, open=opened, deviation=deviation, roots=roots)
    # Division by a standard deviation closes the statistics that it was made of.
    if deviation == -1 and name in _PRODUCTS:
        return replace(out, open=opened.difference(*(x.roots for x in scales)))
    opened |= roots_of(scales)
    return replace(out, open=opened) if not opened or _keeps(eqn, ins) else None


def _deviation(eqn: JaxprEqn, ins: Sequence[Lies]) -> int:
    """Returns p if the result has the factor s^p, where s is a batch norm's standard deviation."""
    powers = [x.deviation for x in ins]
    match eqn.primitive.name:
        case "mul":
            return sum(powers)
        case "div":
            return powers[0] - powers[1]
        case "integer_pow":
            return powers[0] * eqn.params["y"]
        case _:
            return next(filter(None, powers), 0)


def _keeps(eqn: JaxprEqn, ins: Sequence[Lies]) -> bool:
    """Tells whether an equation is linear or a square, and so may read open values."""
    name = eqn.primitive.name
    if name in _SHAPING or name in _SUMS or name == "square":
        return True
    if name == "integer_pow":
        return eqn.params["y"] == 2
    if name == "div":  # linear in the dividend alone
        return ins[1].over is Over.NONE
    operands = zip(eqn.invars, ins, strict=True)
    # A product is linear if only one operand depends on examples, a square if both are equal.
    moving = {id(atom) for atom, lies in operands if lies.over is not Over.NONE}
    return name == "mul" and len(moving) == 1
