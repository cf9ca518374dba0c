"""Finds which values computed from sums and means over examples are again sums or means.

Each replica of a stage has a slice of the micro-batch's examples. Sums and means can be computed
from the slices' values: a sum is the sum of the slices' sums, and a mean is the sum of the slices'
means, each times the slice's share (its fraction of the examples). Below, `decay` depends on no
example, `count` is a sum over examples, and `size` is the number of examples:

    2 * sum(x), sum(x) + sum(y)          sums
    mean(x) + decay                      a mean: shares of decay add up to decay
    sum(x) + decay, sum(x) + mean(y)     sums, if a slice adds only its share of decay or of mean(y)
    sum(x) / count * count               a sum, though sum(x) / count alone is neither sum nor mean
    mean(x) * size                       a sum

A count of items, such as tokens, may be zero in a slice, though not in the whole micro-batch:

- In sum(x) / count, a slice without items would divide zero by zero, so its divisor becomes one. If
  only the count is zero, because it adds up weights of both signs, the result is NaN.
- If the count is a whole number, max(count, 1) differs from it only if there are no items. So a
  slice uses its count itself in place of max(count, 1).
- If the count adds up fractional weights, it may be between zero and one, so max(count, 1) may
  differ from it. Slices cannot compute this maximum, so it counts as mixed.

A value that no rule recognizes counts as mixed, too. So if a rule is missing, some losses are
refused. But a rule that mistakes another value for a sum or a mean gives wrong results.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import jax.numpy as jnp

from jvpipe import _jax
from jvpipe._jax import Atom, JaxprEqn, Literal, Var
from jvpipe.ir.examples import Over
from jvpipe.trace.alike import Alike

_PRODUCTS = ("dot_general", "conv_general_dilated")
"""Primitives that are linear in each operand."""
_JOINING = ("add", "sub", "add_any", "concatenate", "stack", "select_n", "pad", "scatter-add")
"""Primitives that are linear in all operands together, except for predicates and indices."""
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
"""Primitives that are linear in their operand."""
_ZERO_OF_ZERO = ("broadcast_in_dim", "convert_element_type", "reshape", "squeeze", "neg", "copy")
"""Primitives whose result counts as zero if their operand counts as zero."""


class Beside(StrEnum):
    """The operand of an equation that a slice changes, and how the slice changes it."""

    LEFT = "left"  # the left operand, which is added to a sum, is multiplied by the slice's share
    RIGHT = "right"  # the same with the right operand
    DIVISOR = "divisor"  # the divisor becomes one if it is zero
    GUARD = "guard"  # max(count, bound) becomes the count, even if the count is below the bound
    FIRST_LEFT = "first left"  # only the first slice adds the left operand: integers stay exact
    FIRST_RIGHT = "first right"  # the same with the right operand


@dataclass(frozen=True, slots=True)
class Lies:
    """How a value depends on the examples of a micro-batch.

    Attributes:
        over: whether the value has a part for each example along an axis, is a sum, is a mean, is
            mixed, or depends on no example.
        axis: the examples' axis; -1 if the value has no such axis.
        roots: the reductions over examples that the value depends on.
        power: p, if the value, or each example's part of it, has the factor n^p, where n is
            the number of examples. In a slice, n is the number of the slice's examples.
        divisor: if the value is a sum divided by a count, the number that `Alike` gives the count.
        beside: how slices must change the equation that makes the value, so that `over` holds for
            their results; None if the equation stays.
        open: the batch-norm statistics by which the value is centered but not yet scaled
            (`jvpipe.trace.normalized`).
        deviation: p, if the value has the factor s^p, where s is a batch norm's standard deviation;
            a product closes statistics if its p is -1.
        excess: p, if the value is a sum over examples, times n^p.
        is_zero: whether the value is zero for any batch; a zero may count as any `over`.
    """

    over: Over
    axis: int = -1
    roots: frozenset[Var] = frozenset()
    power: int = 0
    divisor: int | None = None
    beside: Beside | None = None
    open: frozenset[Var] = frozenset()
    deviation: int = 0
    excess: int = 0
    is_zero: bool = False

    @property
    def is_count(self) -> bool:
        """Whether the value is a power of the number of examples, times a constant factor."""
        return self.power != 0 and self.over is not Over.ALONG

    @property
    def reduced(self) -> bool:
        """Whether the value depends on several examples and has no part for each of them."""
        return self.over in (Over.SUM, Over.MEAN, Over.MIXED)


NONE = Lies(Over.NONE)
ZERO = Lies(Over.NONE, is_zero=True)


def roots_of(values: Iterable[Lies]) -> frozenset[Var]:
    """Returns the reductions that values depend on."""
    return frozenset[Var]().union(*(x.roots for x in values))


def open_of(values: Iterable[Lies]) -> frozenset[Var]:
    """Returns the statistics that are open in values."""
    return frozenset[Var]().union(*(x.open for x in values))


def counted(power: int) -> Lies:
    """Returns the `Lies` of a power of the number of examples."""
    if not power:
        return NONE
    return Lies(Over.SUM if power == 1 else Over.MIXED, power=power)


def summed_axes(power: int) -> Lies:
    """Returns the `Lies` of a sum over n examples if each summand has the factor n^power."""
    match power:
        case 0:
            return Lies(Over.SUM)
        case -1:
            return Lies(Over.MEAN)
        case _:
            return Lies(Over.MIXED, excess=power)


def makes_zero(eqn: JaxprEqn, ins: Sequence[Lies], *, in_rule: bool) -> bool:
    """Tells whether a result is zero because operands are zero.

    Args:
        eqn: the equation that makes the result.
        ins: how its operands depend on the examples.
        in_rule: whether the equation is in a derivative rule; only there, a product may count as
            zero.
    """
    name = eqn.primitive.name
    if name == "mul" and in_rule:
        return any(x.is_zero for x in ins)
    return name in _ZERO_OF_ZERO and all(x.is_zero for x in ins)


def power_after(eqn: JaxprEqn, ins: Sequence[Lies]) -> int | None:
    """Returns p such that n^p is a factor of an equation's result, for n examples.

    Args:
        eqn: an equation with an operand that has a part for each example.
        ins: how its operands depend on the examples.

    Returns:
        The power p; None if the result depends on n in any other way.
    """
    name = eqn.primitive.name
    powers = [x.power for x in ins]
    # A loss may divide each example by n before it sums: sum(x / n) is a mean, which a slice makes
    # with its own n.
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
    # n x + n y is n (x + y), but n x + y has no such factor. Zeros have every factor.
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
    """Returns how results depend on the examples if no operand has a part for each example.

    Args:
        eqn: an equation whose results all depend on the examples in the same way.
        ins: how its operands depend on the examples.
        alike: tells which operands are equal, and which are whole numbers.
        in_rule: whether the equation is in a derivative rule. A `select_n` there selects between
            cotangents, and its result depends on the examples as they do. A `select_n` in a loss
            often selects between values of the model state. Its result is mixed, so the user must
            choose how the leaf is reduced.
    """
    name = eqn.primitive.name
    moving = [x for x in ins if x.over is not Over.NONE]
    roots = roots_of(moving)
    if not moving:
        return NONE
    if _rounds(eqn, alike):
        return Lies(Over.MIXED, roots=roots)
    # If an equation f is linear in the only operand that depends on examples, f(a + b) is
    # f(a) + f(b). So a sum stays a sum, and a mean stays a mean.
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
    """Returns the `Lies` of a result made of parts: mixed unless the parts are alike."""
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
    """Tells whether an equation rounds, so that slices' results do not add up to the whole's."""
    made = _jax.aval(eqn.outvars[0]).dtype
    is_whole = not jnp.issubdtype(made, jnp.inexact)
    match eqn.primitive.name:
        case "convert_element_type":
            is_bool = made == jnp.bool_
            rounds = is_whole and not alike.is_whole(eqn.invars[0])
            return is_bool or rounds or _widens_wrapped(_jax.aval(eqn.invars[0]).dtype, made)
        case "div":
            return is_whole
        case _:
            return False


def _widens_wrapped(old: Any, new: Any) -> bool:
    """Tells whether integers that may have wrapped around become wider.

    These are integers of 8 or 16 bits, or without a sign. A sum in them may wrap around in the
    micro-batch alone, and not in its slices.

    >>> _widens_wrapped(jnp.dtype("uint8"), jnp.dtype("float32"))
    True
    """
    is_unsigned = jnp.issubdtype(old, jnp.unsignedinteger)
    may_wrap = is_unsigned or (jnp.issubdtype(old, jnp.integer) and old.itemsize < 4)
    return may_wrap and not (jnp.issubdtype(new, jnp.integer) and new.itemsize <= old.itemsize)


def guarded(
    eqn: JaxprEqn,
    ins: Sequence[Lies],
    alike: Alike,
) -> Atom | None:
    """Returns the count in an equation like max(count, 1) if the count is whole, else None.

    Args:
        eqn: the equation.
        ins: how its operands depend on the examples.
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
    """Returns the `Lies` of a sum of two values; None if slices' results do not determine it."""
    a, b = ins
    if a.is_zero or b.is_zero:
        return b if a.is_zero else a
    # Equal powers of the number of examples n add up: 2 n + 3 n is a multiple of n.
    are_alike = (a.power, a.excess) == (b.power, b.excess)
    if are_alike and (a.is_count or a.excess):
        return replace(a, roots=frozenset())
    # A value that depends on no example counts as a mean, because the slices' shares add up to 1.
    overs = {a.over, b.over}
    if overs <= {Over.MEAN, Over.NONE}:
        return Lies(Over.MEAN)
    if overs == {Over.SUM}:
        return Lies(Over.SUM)
    if Over.SUM in overs and overs <= {Over.SUM, Over.MEAN, Over.NONE}:
        # All slices together must add the other operand once. So each slice adds its share of the
        # operand or, for integers, only the first slice adds the operand.
        is_left = b.over is Over.SUM
        if jnp.issubdtype(_jax.aval(eqn.outvars[0]).dtype, jnp.inexact):
            return Lies(Over.SUM, beside=Beside.LEFT if is_left else Beside.RIGHT)
        return Lies(Over.SUM, beside=Beside.FIRST_LEFT if is_left else Beside.FIRST_RIGHT)
    # Two quotients with the same count as divisor, such as two terms of a loss, add up to a
    # quotient with this divisor.
    divisors = {x.divisor for x in ins if x.over is not Over.NONE}
    if len(divisors) == 1 and None not in divisors:
        return Lies(Over.MIXED, divisor=divisors.pop())
    return None


def _multiplied(ins: Sequence[Lies], numbers: Sequence[int]) -> Lies | None:
    """Returns the `Lies` of a product of two values; None if slices' results do not determine it.

    Args:
        ins: how its operands depend on the examples.
        numbers: the operands' numbers in `Alike`, which show whether one operand is the count that
            the other was divided by.
    """
    # The operands may be in either order; n is the number of examples, and c is another count:
    #
    #     sum * n^p -> n^p sum                  mean * n -> sum
    #     (n^k sum) * n^p -> n^(k+p) sum        (sum / c) * c -> sum
    a, b = ins
    of_a, of_b = numbers
    for value, factor, its in ((a, b, of_b), (b, a, of_a)):
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
    """Returns the `Lies` of a quotient; None if slices' results do not determine it.

    Args:
        ins: how its operands depend on the examples.
        divisor: the number of the divisor in `Alike`.
        is_scalar: whether the divisor is a scalar.
    """
    # As in `_multiplied`, n is the number of examples, and c is another count:
    #
    #     n^p / n^q -> n^(p-q)    (n^k sum) / n -> n^(k-1) sum    sum / n -> mean    sum / c: below
    a, b = ins
    if b.is_count and (a.is_count or a.over is Over.NONE):
        return counted(a.power - b.power)
    if a.excess and b.is_count:
        return summed_axes(a.excess - b.power)
    if a.over is Over.SUM and not a.power and b.is_count:
        return summed_axes(-b.power)
    # A slice's count differs from the micro-batch's, so the quotient is mixed. But the product of
    # the quotient and the same count is the sum again.
    if a.over is Over.SUM and not a.power and is_scalar:
        return Lies(
            Over.MIXED,
            divisor=divisor,
            beside=Beside.DIVISOR,
        )
    return None
