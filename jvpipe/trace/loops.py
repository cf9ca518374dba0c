"""Finds how the results of loops and branches depend on the examples (`Lies`).

A loop's body is followed again and again, until an iteration no longer changes how the carry
depends on the examples:

    carry    [zero, key]    before the loop: both values depend on no example
             [sum, key]     after one iteration: the body adds a sum over examples to the zero
             [sum, key]     after another iteration: no change, so this is the answer

Every slice must run the same iterations and the same branches. So the values that decide about
iterations and branches must not depend on any example.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

from jvpipe import _jax
from jvpipe._jax import Jaxpr, JaxprEqn
from jvpipe.ir.examples import Over
from jvpipe.trace.coupled import CoupledError
from jvpipe.trace.sums_and_means import Lies


@runtime_checkable
class Walk(Protocol):
    """The walk over the equations around a loop (`jvpipe.trace.spread.Spreading`)."""

    def inside(
        self,
        eqn: JaxprEqn,
        body: Jaxpr,
        small: Jaxpr,
        ins: Iterable[Lies],
    ) -> list[Lies]:
        """Returns how the results of a body depend on the examples.

        Args:
            eqn: the loop that has the body.
            body: the body.
            small: the same body in the other trace.
            ins: how the inputs of the body depend on the examples.
        """
        ...

    def refused(self, eqn: JaxprEqn, why: str) -> CoupledError:
        """Returns the error for an equation that couples examples."""
        ...


Loop = Callable[[Walk, JaxprEqn, JaxprEqn, Sequence[Lies]], list[Lies]]
"""A function that returns how the results of a loop depend on the examples.

Its arguments are the walk, the loop, the same loop in the trace at another size, and how the
operands depend on the examples.
"""


def _scan(
    walk: Walk,
    eqn: JaxprEqn,
    small: JaxprEqn,
    ins: Sequence[Lies],
) -> list[Lies]:
    # The body reads consts, carry and one row of each of xs; it returns carry and one row of
    # each of ys.
    consts, carry, xs = _jax.scan_operands(eqn, ins)
    if any(x.over is Over.ALONG and x.axis == 0 for x in xs):
        raise walk.refused(eqn, "goes through the examples one after another")
    # The scan goes over axis 0: an iteration reads xs without this axis, and ys have it again.
    xs = [_moved(x, -1) for x in xs]
    body = _jax.inner_jaxprs(eqn)[0]
    fewer = _jax.inner_jaxprs(small)[0]

    def step(now: list[Lies]) -> list[Lies]:
        return walk.inside(eqn, body, fewer, [*consts, *now, *xs])

    carry, outs = _settled(walk, eqn, carry, step)
    ys = [_moved(y, 1) for y in outs[len(carry) :]]
    return [*carry, *ys]


def _moved(lies: Lies, by: int) -> Lies:
    """Returns how a value depends on the examples after its axes are renumbered.

    Args:
        lies: how it depends on the examples before.
        by: the number that is added to the index of each axis.
    """
    return replace(lies, axis=lies.axis + by) if lies.over is Over.ALONG else lies


def _while(
    walk: Walk,
    eqn: JaxprEqn,
    small: JaxprEqn,
    ins: Sequence[Lies],
) -> list[Lies]:
    # The condition and the body each read their own constants, and the carry.
    first = eqn.params["cond_nconsts"]
    start = first + eqn.params["body_nconsts"]
    of_condition, of_body, carry = ins[:first], ins[first:start], ins[start:]

    def run(key: str, inputs: Sequence[Lies]) -> list[Lies]:
        return walk.inside(
            eqn,
            eqn.params[key].jaxpr,
            small.params[key].jaxpr,
            inputs,
        )

    def step(now: list[Lies]) -> list[Lies]:
        return run("body_jaxpr", [*of_body, *now])

    settled, _ = _settled(walk, eqn, carry, step)
    (goes_on,) = run("cond_jaxpr", [*of_condition, *settled])
    _check_same_for_all(walk, eqn, goes_on)
    return settled


def _cond(
    walk: Walk,
    eqn: JaxprEqn,
    small: JaxprEqn,
    ins: Sequence[Lies],
) -> list[Lies]:
    chosen, *operands = ins
    _check_same_for_all(walk, eqn, chosen)
    both = zip(eqn.params["branches"], small.params["branches"], strict=True)
    first, *others = (walk.inside(eqn, a.jaxpr, b.jaxpr, operands) for a, b in both)
    for outs in others:
        first = [_joined(walk, eqn, a, b) for a, b in zip(first, outs, strict=True)]
    return first


LOOPS: Mapping[str, Loop] = {"scan": _scan, "while": _while, "cond": _cond}
"""The function for each primitive that is a loop or has branches."""


def _check_same_for_all(walk: Walk, eqn: JaxprEqn, decision: Lies) -> None:
    if decision.over is not Over.NONE:
        raise walk.refused(eqn, "branches on its examples")


def _settled(
    walk: Walk,
    eqn: JaxprEqn,
    carry: Sequence[Lies],
    step: Callable[[list[Lies]], list[Lies]],
) -> tuple[list[Lies], list[Lies]]:
    """Returns the `Lies` of a loop's carry once they no longer change, and of the results.

    The search ends because joining undoes nothing: roots are only added, and a value that has
    become mixed stays mixed.

    Args:
        walk: the walk around the loop.
        eqn: the loop.
        carry: how the initial values of the carry depend on the examples.
        step: follows one iteration, from the `Lies` of the carry to those of the results.
    """
    now = list(carry)
    while True:
        outs = step(now)
        pairs = zip(now, outs[: len(now)], strict=True)
        joined = [_joined(walk, eqn, a, b) for a, b in pairs]
        if joined == now:
            return now, outs
        now = joined


def _joined(
    walk: Walk,
    eqn: JaxprEqn,
    a: Lies,
    b: Lies,
) -> Lies:
    """Joins the `Lies` of the same result in two iterations, or in two branches.

    Args:
        walk: the walk around the loop.
        eqn: the loop, or the equation with branches.
        a: how the result of the first iteration or branch depends on the examples.
        b: how the result of the second depends on the examples.
    """
    # A loop often begins with zeros, which fit any other value: they are an empty sum, or a zero
    # for each example.
    if a.is_zero or b.is_zero:
        return a if b.is_zero else b
    if Over.ALONG in (a.over, b.over) and (a.over, a.axis) != (b.over, b.axis):
        raise walk.refused(eqn, "keeps examples apart in some branches or iterations only")
    same = (a.over, a.power, a.excess) == (b.over, b.power, b.excess)
    if not same and a.over is Over.ALONG:
        raise walk.refused(eqn, "uses the number of examples in the values of single examples")
    return replace(
        a if same else Lies(Over.MIXED),
        divisor=a.divisor if a.divisor == b.divisor else None,
        roots=a.roots | b.roots,
        open=a.open | b.open,
        deviation=a.deviation if a.deviation == b.deviation else 0,
    )
