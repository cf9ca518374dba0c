"""Values that are made of sums and means over examples: which of them are such themselves,
so that slices make them.

    2 * sum(x), sum(x) + sum(y)          sums
    mean(x) + decay                      a mean: what depends on no example counts by the share of a slice, as means do
    sum(x) + decay, sum(x) + mean(y)     sums, if a slice takes its share of what stands beside the sum
    sum(x) / count * count               a sum; sum(x) / count alone is not made of those of slices
    mean(x) * size                       a sum

A slice whose count and sum are zero divides by one instead. If only its count is zero, as that of
weights below zero may be, the loss is NaN. In max(count, 1) of whole numbers the one is there for
the case of no items: a slice uses its count as it is. Other weights may add up to less than one,
and then slices would not make the whole.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import jax.numpy as jnp

from jvpipe import _jax
from jvpipe._jax import Atom, JaxprEqn, Literal, Var
from jvpipe.ir.examples import Over
from jvpipe.trace.alike import Alike

_PRODUCTS = ("dot_general", "conv_general_dilated")
"""Primitives that are linear in each operand."""
_JOINING = ("add", "sub", "add_any", "concatenate", "stack", "select_n", "pad", "scatter-add")
"""Primitives that are linear in all operands together, without those that choose among them."""
_PICKING = ("gather", "dynamic_slice", "cumsum")
"""Primitives that are linear in their first operand."""
_LINEAR = (
    "neg",
    "convert_element_type",
    "copy",
    "copy_p",
    "reshape",
    "broadcast_in_dim",
    "squeeze",
    "expand_dims",
    "transpose",
    "reduce_precision",
    "name",
    "stop_gradient",
    "optimization_barrier",
    "reduce_sum",
    "slice",
    "real",
    "imag",
    "rev",
)


class Beside(StrEnum):
    """The operand of an equation that a slice computes with in another way."""

    LEFT = "left"  # a slice takes its share of what is added to a sum
    RIGHT = "right"
    DIVISOR = "divisor"  # one, where both the divisor and what is divided are zero
    GUARD = "guard"  # the count as it is, even below the least that it is guarded with
    FIRST_LEFT = "first left"  # only the first slice adds it to the sum: exact, for what is counted
    FIRST_RIGHT = "first right"


@dataclass(frozen=True, slots=True)
class Lies:
    """How a value lies over the examples.

    Attributes:
        over: along an axis of it, a sum, a mean, mixed; or it depends on none.
        axis: that of the examples.
        roots: the reductions over examples that it was made of.
        power: of the number of examples, if it is such a power; what has a part for each example
            may have one, too: a slice makes it with its own number.
        divisor: it is a sum divided by what has this number in `Alike`.
        beside: it lies so if slices compute it in this way.
        open: of a batch norm, the statistics that it depends on (`jvpipe.trace.normalised`).
        is_scale: it may close them.
        excess: it is a sum over examples, times this power of their number.
        is_zero: it is nothing, whatever the examples: it goes with everything.
    """

    over: Over
    axis: int = -1
    roots: frozenset[Var] = frozenset()
    power: int = 0
    divisor: int | None = None
    beside: Beside | None = None
    open: frozenset[Var] = frozenset()
    is_scale: bool = False
    excess: int = 0
    is_zero: bool = False

    @property
    def is_count(self) -> bool:
        """Whether it is a power of the number of examples, times what depends on none."""
        return self.power != 0 and self.over is not Over.ALONG

    @property
    def reduced(self) -> bool:
        """Whether it was made of several examples, and has no part for each."""
        return self.over in (Over.SUM, Over.MEAN, Over.MIXED)


NONE = Lies(Over.NONE)
ZERO = Lies(Over.NONE, is_zero=True)


def roots_of(values: Iterable[Lies]) -> frozenset[Var]:
    """Returns the reductions that values were made of."""
    return frozenset[Var]().union(*(x.roots for x in values))


def open_of(values: Iterable[Lies]) -> frozenset[Var]:
    """Returns the statistics that are open in values."""
    return frozenset[Var]().union(*(x.open for x in values))


def counted(power: int) -> Lies:
    """Returns how a power of the number of examples lies."""
    if not power:
        return NONE
    return Lies(Over.SUM if power == 1 else Over.MIXED, power=power)


def summed_axes(power: int) -> Lies:
    """Returns how a sum over the examples lies, of values with that power of their number as a
    factor.
    """
    match power:
        case 0:
            return Lies(Over.SUM)
        case -1:
            return Lies(Over.MEAN)
        case _:
            return Lies(Over.MIXED, excess=power)


def power_after(eqn: JaxprEqn, ins: Sequence[Lies]) -> int | None:
    """Returns the power of the number of examples that is a factor of a result with a part for
    each.

    Args:
        eqn: of which an operand has a part for each example.
        ins: how its operands lie.

    Returns:
        None if the result depends on that number otherwise.
    """
    name = eqn.primitive.name
    powers = [x.power for x in ins]
    # Each example may be divided by n before the mean is summed: sum(x / n) is what a slice makes
    # with its own n, too.
    if not any(powers):
        return 0
    if name in ("mul", "dot_general", "conv_general_dilated"):
        return sum(powers)
    if name == "div":
        return powers[0] - powers[1]
    if name in _PICKING:
        return None if any(powers[1:]) else powers[0]
    if name not in _LINEAR and name not in _JOINING:
        return None
    # n x + n y is n (x + y), but n x + y has no such factor; nothing (zeros) has any.
    chooses_by_power = name == "select_n" and ins[0].power
    values = ins[1:] if name == "select_n" else ins
    same = {x.power for x in values if not x.is_zero}
    if chooses_by_power or len(same) != 1 or any(x.is_count for x in ins):
        return None
    return same.pop()


def reduced(
    eqn: JaxprEqn,
    ins: Sequence[Lies],
    alike: Alike,
    *,
    in_rule: bool = False,
) -> Lies:
    """Returns how the result of an equation lies, none of whose operands has a part for each
    example.

    Args:
        eqn: of one result, or of several that lie alike.
        ins: how its operands lie.
        alike: tells which operands are equal, and which are whole numbers.
        in_rule: in a derivative rule, which chooses between cotangents; what a loss chooses between
            is model state, of which the user speaks.
    """
    name = eqn.primitive.name
    moving = [x for x in ins if x.over is not Over.NONE]
    roots = roots_of(moving)
    if not moving:
        return NONE
    if _rounds(eqn, alike):
        return Lies(Over.MIXED, roots=roots)
    # What is linear in its only operand of examples: f(a + b) = f(a) + f(b), so sums stay sums, and
    # means means.
    is_linear = name in (*_LINEAR, *_PRODUCTS, "mul")
    is_linear_in_first = name in (*_PICKING, "div") and ins[0] in moving
    if len(moving) == 1 and (is_linear or is_linear_in_first):
        return moving[0]
    match name:
        case "concatenate" | "stack" | "pad" | "scatter-add":
            return _joined(eqn, ins)
        case "select_n" if in_rule:
            return _joined(eqn, ins)
        case "add" | "sub" | "add_any":
            lies = _added(eqn, ins)
        case "mul":
            lies = _multiplied(ins, [alike.number(atom) for atom in eqn.invars])
        case "div":
            divisor = eqn.invars[1]
            is_scalar = not _jax.aval(divisor).shape
            lies = _divided(
                ins,
                alike.number(divisor),
                is_scalar=is_scalar,
            )
        case "max" if guarded(eqn, ins, alike) is not None:
            lies = Lies(Over.MIXED, beside=Beside.GUARD)
        case _:
            lies = None
    return replace(lies or Lies(Over.MIXED), roots=roots)


def _joined(eqn: JaxprEqn, ins: Sequence[Lies]) -> Lies:
    """Returns how what is put together lies: as its parts do, if these lie alike."""
    chosen, others = ins, ins[:0]
    if eqn.primitive.name == "select_n":
        chosen = ins[1:]
        others = ins[:1]
    elif eqn.primitive.name == "scatter-add":
        chosen = (ins[0], ins[2])
        others = ins[1:2]
    roots = roots_of(ins)
    kinds = {(x.over, x.power, x.excess) for x in chosen if not x.is_zero}
    if len(kinds) != 1 or any(x.over is not Over.NONE for x in others):
        return Lies(Over.MIXED, roots=roots)
    ((over, power, excess),) = kinds
    return Lies(over, roots=roots, power=power, excess=excess)


def _rounds(eqn: JaxprEqn, alike: Alike) -> bool:
    """Tells whether an equation makes whole numbers of others: those of slices do not add up to
    those of the whole.
    """
    is_whole = not jnp.issubdtype(_jax.aval(eqn.outvars[0]).dtype, jnp.inexact)
    match eqn.primitive.name:
        case "convert_element_type":
            is_bool = _jax.aval(eqn.outvars[0]).dtype == bool
            return is_bool or (is_whole and not alike.is_whole(eqn.invars[0]))
        case "div":
            return is_whole
        case _:
            return False


def guarded(
    eqn: JaxprEqn,
    ins: Sequence[Lies],
    alike: Alike,
) -> Atom | None:
    """Returns the count, a whole number, that an equation guards as in max(count, 1).

    None if it does something else.

    Args:
        eqn: the equation.
        ins: how its operands lie.
        alike: tells which operands are whole numbers.
    """
    operands = zip(eqn.invars, ins, strict=True)
    counts = [atom for atom, x in operands if x.over is Over.SUM and not x.power]
    bounds = [float(atom.val) for atom in eqn.invars if isinstance(atom, Literal)]
    if len(counts) != 1 or len(bounds) != 1:
        return None
    (count,), (bound,) = counts, bounds
    is_number = not _jax.aval(count).shape and alike.is_whole(count)
    return count if is_number and bound <= 1 else None


def _added(eqn: JaxprEqn, ins: Sequence[Lies]) -> Lies | None:
    """Returns how a sum of two values lies; None if it is not made of those of slices."""
    a, b = ins
    if a.is_zero or b.is_zero:
        return b if a.is_zero else a
    # Alike powers of the number of examples: 2 n + 3 n is a multiple of n.
    are_alike = (a.power, a.excess) == (b.power, b.excess)
    if are_alike and (a.is_count or a.excess):
        return replace(a, roots=frozenset())
    # The shares of slices add up to one: what depends on no example is the mean of itself.
    overs = {a.over, b.over}
    if overs <= {Over.MEAN, Over.NONE}:
        return Lies(Over.MEAN)
    if overs == {Over.SUM}:
        return Lies(Over.SUM)
    if Over.SUM in overs and overs <= {Over.SUM, Over.MEAN, Over.NONE}:
        # What stands beside the sum is there once, in all slices together.
        is_left = b.over is Over.SUM
        if jnp.issubdtype(_jax.aval(eqn.outvars[0]).dtype, jnp.inexact):
            return Lies(Over.SUM, beside=Beside.LEFT if is_left else Beside.RIGHT)
        return Lies(Over.SUM, beside=Beside.FIRST_LEFT if is_left else Beside.FIRST_RIGHT)
    # Quotients by the same count, such as two terms of a loss: their sum is one, too.
    divisors = {x.divisor for x in ins if x.over is not Over.NONE}
    if len(divisors) == 1 and all(x.divisor is not None or x.over is Over.NONE for x in ins):
        return Lies(Over.MIXED, divisor=divisors.pop())
    return None


def _multiplied(ins: Sequence[Lies], numbers: Sequence[int]) -> Lies | None:
    """Returns how a product of two values lies; None if it is not made of those of slices.

    Args:
        ins: how its operands lie.
        numbers: of these in `Alike`: a sum divided by a count, times that count, is the sum.
    """
    # With the operands either way round; n is the number of examples, c a count of the user's:
    #
    #     sum * n^p -> n^p sum        mean * n -> sum        (n^k sum) * n^p -> n^(k+p) sum        (sum / c) * c -> sum
    for value, factor, its in ((*ins, numbers[1]), (*ins[::-1], numbers[0])):
        if value.over is Over.SUM and not value.power and factor.is_count:
            return summed_axes(factor.power)
        if value.over is Over.MEAN and factor.power == 1:
            return Lies(Over.SUM)
        if value.excess and factor.is_count:
            return summed_axes(value.excess + factor.power)
        if value.divisor == its and factor.over is Over.SUM:
            return Lies(Over.SUM)
    if not all(x.is_count for x in ins):
        return None
    return counted(sum(x.power for x in ins))


def _divided(
    ins: Sequence[Lies],
    divisor: int,
    *,
    is_scalar: bool,
) -> Lies | None:
    """Returns how a quotient lies; None if it is not made of those of slices.

    Args:
        ins: how its operands lie.
        divisor: the number of the divisor in `Alike`.
        is_scalar: whether the divisor is a scalar.
    """
    #     n^p / n^q -> n^(p-q)        (n^k sum) / n -> n^(k-1) sum        sum / n -> mean        sum / c: see below
    a, b = ins
    if b.is_count and (a.is_count or a.over is Over.NONE):
        return counted(a.power - b.power)
    if a.excess and b.is_count:
        return summed_axes(a.excess - b.power)
    if a.over is Over.SUM and not a.power and b.is_count:
        return summed_axes(-b.power)
    # A slice has another count: only times that count this becomes a sum again.
    if a.over is Over.SUM and not a.power and is_scalar:
        return Lies(
            Over.MIXED,
            divisor=divisor,
            beside=Beside.DIVISOR,
        )
    return None
