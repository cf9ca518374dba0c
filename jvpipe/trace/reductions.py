"""What is made of sums and means over examples: whether it is one itself, so that slices give the whole.

    2 * sum(x), sum(x) + sum(y)          sums
    mean(x) + decay                      a mean: what depends on no example counts by the share of a slice, as means do
    sum(x) + decay, sum(x) + mean(y)     sums, if a slice takes its share of what stands beside the sum
    sum(x) / count * count               a sum; sum(x) / count alone is not made of those of slices
    mean(x) * size                       a sum

A slice whose count and sum are nothing divides by one instead. Where its sum alone is something, as of weights below
zero, the loss is NaN. And max(count, 1) of whole numbers is there for no items at all: a slice has its count. Other
weights may add up to less than one, where slices would not make the whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import jax.numpy as jnp

from jvpipe import _jax
from jvpipe._jax import Atom, JaxprEqn, Literal, Var
from jvpipe.ir.examples import Over
from jvpipe.trace.alike import Alike

_PRODUCTS = ("dot_general", "conv_general_dilated")
"""What is linear in each operand."""
_JOINING = ("add", "sub", "add_any", "concatenate", "stack", "select_n", "pad", "scatter-add")
"""What is linear in all operands, but for those that say which."""
_PICKING = ("gather", "dynamic_slice", "cumsum")
"""What is linear in its first operand."""
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

    LEFT = "left"  # its share of what is added to a sum
    RIGHT = "right"
    DIVISOR = "divisor"  # one where it is zero, and what is divided too
    GUARD = "guard"  # the count as it is, though it be less
    FIRST_LEFT = (
        "first left"  # what is added to a sum, in the first slice alone: exact, for what is counted
    )
    FIRST_RIGHT = "first right"


@dataclass(frozen=True, slots=True)
class Lies:
    """How a value lies over the examples; `power` of a number that is the examples' count, or one over it.

    What has a part for each example may have a power too: a slice makes it with its own count.
    `roots` are the reductions over examples that it was made of. It is a sum divided by what has
    the number `divisor`. Where `beside` says so it is what `over` says if slices compute it in
    another way. It depends on what is `open`, and is a scale that may close that
    (`jvpipe.trace.normalised`).
    """

    over: Over
    axis: int = -1
    roots: frozenset[Var] = frozenset()
    power: int = 0
    divisor: int | None = None
    beside: Beside | None = None
    open: frozenset[Var] = frozenset()
    is_scale: bool = False
    excess: int = 0  # of a sum over examples, times that power of their number
    is_zero: bool = False  # nothing, whatever the examples: it goes with all

    @property
    def is_count(self) -> bool:
        """True for a power of the number of examples, times what depends on none."""
        return self.power != 0 and self.over is not Over.ALONG

    @property
    def reduced(self) -> bool:
        """True for what was made of several examples, and has no part for each."""
        return self.over in (Over.SUM, Over.MEAN, Over.MIXED)


NONE = Lies(Over.NONE)
ZERO = Lies(Over.NONE, is_zero=True)


def counted(power: int) -> Lies:
    """How that power of the number of examples lies."""
    return Lies(Over.SUM if power == 1 else Over.MIXED, power=power) if power else NONE


def summed(power: int) -> Lies:
    """How a sum lies, over the examples, of values that are times that power of their number."""
    known = {0: Over.SUM, -1: Over.MEAN}
    return Lies(known[power]) if power in known else Lies(Over.MIXED, excess=power)


def power_after(eqn: JaxprEqn, ins: Sequence[Lies]) -> int | None:
    """The power of the number of examples in a result that has a part for each; None: no power of it.

    Args:
        eqn: of which an operand has a part for each example.
        ins: its operands.
    """
    powers, name = [x.power for x in ins], eqn.primitive.name
    if not any(powers):
        return 0
    if name in ("mul", "dot_general", "conv_general_dilated"):
        return sum(powers)
    if name == "div":
        return powers[0] - powers[1]
    same = {x.power for x in (ins[1:] if name == "select_n" else ins) if not x.is_zero}
    alike = len(same) == 1 and not any(x.is_count for x in ins)
    if name in _LINEAR or name in _JOINING:
        return same.pop() if alike and (name != "select_n" or not ins[0].power) else None
    return powers[0] if name in _PICKING and not any(powers[1:]) else None


def reduced(eqn: JaxprEqn, ins: Sequence[Lies], alike: Alike, *, in_rule: bool = False) -> Lies:
    """Tells how the result of an equation lies, none of whose operands has a part for each example.

    Args:
        eqn: of one result, or of several that lie alike.
        ins: its operands.
        alike: tells which operands are equal, and which are whole numbers.
        in_rule: in a derivative rule, which chooses between cotangents; what a loss chooses
            between is model state, of which the user speaks.
    """
    name = eqn.primitive.name
    moving = [x for x in ins if x.over is not Over.NONE]
    roots = frozenset[Var]().union(*(x.roots for x in moving))
    if not moving:
        return NONE
    if _rounds(eqn, alike):
        return Lies(Over.MIXED, roots=roots)
    if len(moving) == 1 and (
        name in (*_LINEAR, *_PRODUCTS) or (name in _PICKING and ins[0] in moving)
    ):
        return moving[0]
    match name:
        case "concatenate" | "stack" | "pad" | "scatter-add":
            return _joined(eqn, ins)
        case "select_n" if in_rule:
            return _joined(eqn, ins)
        case "add" | "sub" | "add_any":
            lies = _added(eqn, ins)
        case "mul" if len(moving) == 1:
            return moving[0]
        case "mul":
            lies = _multiplied(ins, [alike.number(atom) for atom in eqn.invars])
        case "div" if len(moving) == 1 and ins[0].over is not Over.NONE:
            return moving[0]
        case "div":
            lies = _divided(
                ins, alike.number(eqn.invars[1]), is_scalar=not _jax.aval(eqn.invars[1]).shape
            )
        case "max" if guarded(eqn, ins, alike) is not None:
            lies = Lies(Over.MIXED, beside=Beside.GUARD)
        case _:
            lies = None
    return replace(lies or Lies(Over.MIXED), roots=roots)


def _joined(eqn: JaxprEqn, ins: Sequence[Lies]) -> Lies:
    """How what is put together lies: as its parts do, if these are alike."""
    chosen, others = ins, ins[:0]
    if eqn.primitive.name == "select_n":
        chosen, others = ins[1:], ins[:1]
    elif eqn.primitive.name == "scatter-add":
        chosen, others = (ins[0], ins[2]), ins[1:2]
    roots = frozenset[Var]().union(*(x.roots for x in ins))
    kinds = {(x.over, x.power, x.excess) for x in chosen if not x.is_zero}
    if len(kinds) != 1 or any(x.over is not Over.NONE for x in others):
        return Lies(Over.MIXED, roots=roots)
    ((over, power, excess),) = kinds
    return Lies(over, roots=roots, power=power, excess=excess)


def _rounds(eqn: JaxprEqn, alike: Alike) -> bool:
    """Tells whether an equation makes whole numbers of what may be none: those of slices are not those of the whole."""
    is_whole = not jnp.issubdtype(_jax.aval(eqn.outvars[0]).dtype, jnp.inexact)
    match eqn.primitive.name:
        case "convert_element_type":
            is_bool = _jax.aval(eqn.outvars[0]).dtype == bool
            return is_bool or (is_whole and not alike.is_whole(eqn.invars[0]))
        case "div":
            return is_whole
        case _:
            return False


def guarded(eqn: JaxprEqn, ins: Sequence[Lies], alike: Alike) -> Atom | None:
    """The count, a whole number, of which a maximum takes at least one, or less; None of others."""
    counts = [
        atom for atom, x in zip(eqn.invars, ins, strict=True) if x.over is Over.SUM and not x.power
    ]
    least = [float(atom.val) for atom in eqn.invars if isinstance(atom, Literal)]
    if len(counts) != 1 or len(least) != 1 or _jax.aval(counts[0]).shape:
        return None
    return counts[0] if least[0] <= 1 and alike.is_whole(counts[0]) else None


def _added(eqn: JaxprEqn, ins: Sequence[Lies]) -> Lies | None:
    a, b = ins
    if a.is_zero or b.is_zero:
        return b if a.is_zero else a
    if a.power == b.power and a.excess == b.excess and (a.is_count or a.excess):
        return replace(a, roots=frozenset())
    overs = {a.over, b.over}
    if overs <= {Over.MEAN, Over.NONE}:
        return Lies(Over.MEAN)
    if overs == {Over.SUM}:
        return Lies(Over.SUM)
    if Over.SUM in overs and overs <= {Over.SUM, Over.MEAN, Over.NONE}:
        is_left = b.over is Over.SUM
        if jnp.issubdtype(_jax.aval(eqn.outvars[0]).dtype, jnp.inexact):
            return Lies(Over.SUM, beside=Beside.LEFT if is_left else Beside.RIGHT)
        return Lies(Over.SUM, beside=Beside.FIRST_LEFT if is_left else Beside.FIRST_RIGHT)
    divisors = {x.divisor for x in ins if x.over is not Over.NONE}
    if len(divisors) == 1 and all(x.divisor is not None or x.over is Over.NONE for x in ins):
        return Lies(Over.MIXED, divisor=divisors.pop())
    return None


def _multiplied(ins: Sequence[Lies], numbers: Sequence[int]) -> Lies | None:
    for value, factor, its in ((*ins, numbers[1]), (*ins[::-1], numbers[0])):
        if value.over is Over.SUM and not value.power and factor.is_count:
            return summed(factor.power)
        if value.over is Over.MEAN and factor.power == 1:
            return Lies(Over.SUM)
        if value.excess and factor.is_count:
            return summed(value.excess + factor.power)
        if value.divisor == its and factor.over is Over.SUM:
            return Lies(Over.SUM)
    return counted(sum(x.power for x in ins)) if all(x.is_count for x in ins) else None


def _divided(ins: Sequence[Lies], divisor: int, *, is_scalar: bool) -> Lies | None:
    a, b = ins
    if b.is_count and (a.is_count or a.over is Over.NONE):
        return counted(a.power - b.power)
    if a.excess and b.is_count:
        return summed(a.excess - b.power)
    if a.over is Over.SUM and not a.power and b.is_count:
        return summed(-b.power)
    if a.over is Over.SUM and not a.power and is_scalar:
        return Lies(Over.MIXED, divisor=divisor, beside=Beside.DIVISOR)
    return None
