"""A layer's backward as two programs: I for the cotangents that others wait for, W for the gradients.

I hands W what it has computed at a cost, products and the like; W computes again what is cheap. So that both together
yield the bits of the whole backward, handed values stand behind a barrier there too, and what both compute is made by
calls that are compiled alike in all three (see `outline`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import jax

from jvpipe import _jax
from jvpipe._jax import Atom, ClosedJaxpr, JaxprEqn, Var
from jvpipe.ir.layers import Signature, SplitSignature
from jvpipe.programs.outline import Call, calls
from jvpipe.trace import jaxprs
from jvpipe.trace.graph import array_of
from jvpipe.trace.primitives import is_cheap, is_move


@dataclass(frozen=True)
class Halves:
    """Both halves of a layer's backward.

    `input` is `(sources, cotangents, partial sums) -> (cotangents of inputs, handed values)`; `weight` is `(sources,
    cotangents, handed values, accumulators) -> accumulators`.
    """

    input: ClosedJaxpr
    weight: ClosedJaxpr
    signature: SplitSignature


@dataclass(frozen=True)
class _Cut:
    """The equations of both halves, some in either, and the values that the first hands to the second."""

    input: list[JaxprEqn]
    weight: list[JaxprEqn]
    handed: list[Var]

    @staticmethod
    def of(backward: ClosedJaxpr, gradients: int) -> "_Cut":
        """Finds by liveness what the cotangents are made of, and what the sums are made of beside that."""
        eqns, results = backward.jaxpr.eqns, backward.jaxpr.outvars
        first = jaxprs.prune(eqns, results[gradients:])
        in_first = set(map(id, first))
        made: set[Var] = set()  # by the first half, at a cost or with an effect
        again = []  # what the second half may compute
        for eqn in eqns:
            behind = _is_barrier(eqn) and not made.isdisjoint(jaxprs.variables(eqn.invars))
            if id(eqn) in in_first and (behind or eqn.effects or not is_cheap(eqn)):
                made.update(eqn.outvars)
            else:
                again.append(eqn)
        second = jaxprs.prune(again, results[:gradients])
        return _Cut(first, second, [v for v in jaxprs.free_variables(second) if v in made])


def _is_barrier(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "optimization_barrier"


def settle(backward: ClosedJaxpr, gradients: int) -> ClosedJaxpr:
    """A backward that yields the same bits whole and in halves.

    Args:
        backward: of a layer.
        gradients: how many of its results are accumulators; they come first, cotangents follow.
    """
    jaxpr = backward.jaxpr
    if gradients in (0, len(jaxpr.outvars)):
        return backward
    cut = _Cut.of(backward, gradients)
    handed = set(cut.handed) - {v for eqn in jaxpr.eqns if _is_barrier(eqn) for v in eqn.outvars}
    made = _shared(backward, cut)
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        eqns += (
            [made[id(eqn)].equation()]
            if id(eqn) in made
            else _held(eqn, [v for v in eqn.outvars if v in handed])
        )
    return ClosedJaxpr(jaxpr.replace(eqns=jaxprs.prune(eqns, jaxpr.outvars)), backward.consts)


def _shared(backward: ClosedJaxpr, cut: _Cut) -> dict[int, Call]:
    """The calls that make what both halves compute, by the ids of the equations that they replace."""
    jaxpr, second = backward.jaxpr, set(map(id, cut.weight))
    both = {
        id(eqn): eqn for eqn in cut.input if id(eqn) in second and eqn.primitive.name != "outlined"
    }
    wanted = {v for eqn in jaxpr.eqns if id(eqn) not in both for v in jaxprs.variables(eqn.invars)}
    wanted.update(jaxprs.variables(jaxpr.outvars))
    eqns = list(both.values())
    for eqn in reversed(eqns):
        if is_move(eqn) and not wanted.isdisjoint(eqn.outvars):  # its readers do that by themselves
            wanted.difference_update(eqn.outvars)
            wanted.update(jaxprs.variables(eqn.invars))
    return {id(eqns[i]): call for i, call in calls(eqns, wanted, ()).items()}


def _held(eqn: JaxprEqn, values: Sequence[Var]) -> Iterator[JaxprEqn]:
    """Yields an equation with a barrier behind some of its results."""
    if not values:
        yield eqn
        return
    bare = {v: _jax.new_variable(_jax.aval(v)) for v in values}
    shapes = [jax.ShapeDtypeStruct(_jax.aval(v).shape, _jax.aval(v).dtype) for v in values]
    (barrier,) = jax.make_jaxpr(jax.lax.optimization_barrier)(shapes).jaxpr.eqns
    yield eqn.replace(outvars=[bare.get(v, v) for v in eqn.outvars])
    yield barrier.replace(invars=list(bare.values()), outvars=list(values))


def halve(backward: ClosedJaxpr, signature: Signature) -> Halves | None:
    """Cuts a settled backward; None if it yields cotangents alone, or gradients alone.

    Args:
        backward: of a layer.
        signature: of that layer.
    """
    if not signature.returned or not signature.gradients:
        return None
    jaxpr, count = backward.jaxpr, len(signature.gradients)
    cut, sums, returned = _Cut.of(backward, count), jaxpr.outvars[:count], jaxpr.outvars[count:]
    partial = jaxpr.invars[len(signature.sources) + len(signature.cotangents) : -count]
    first = replace(signature, gradients=())
    second = replace(signature, partial=(), returned=())
    input_half, first = _half(backward, first, cut.input, partial, [*returned, *cut.handed])
    weight_half, second = _half(
        backward, second, cut.weight, [*cut.handed, *jaxpr.invars[-count:]], sums
    )
    handed = tuple(array_of(v, f"handed{i}") for i, v in enumerate(cut.handed))
    return Halves(input_half, weight_half, SplitSignature(handed, first, second))


def _half(
    whole: ClosedJaxpr,
    signature: Signature,
    eqns: Sequence[JaxprEqn],
    own: Sequence[Var],
    results: Sequence[Atom],
) -> tuple[ClosedJaxpr, Signature]:
    """Some equations of a backward as a program, and what that reads; `own` is taken after sources and cotangents."""
    jaxpr = whole.jaxpr
    read = {*jaxprs.free_variables(eqns), *jaxprs.variables(results)}
    sources = {v: s for v, s in zip(jaxpr.invars, signature.sources, strict=False) if v in read}
    others = jaxpr.invars[len(signature.sources) :]
    cotangents = {v: c for v, c in zip(others, signature.cotangents, strict=False) if v in read}
    constants = {v: c for v, c in zip(jaxpr.constvars, whole.consts, strict=True) if v in read}
    invars = [*sources, *cotangents, *own]
    assert read <= {*invars, *constants, *(v for eqn in eqns for v in eqn.outvars)}, (
        "a half reads what is the other's"
    )
    half = jaxpr.replace(
        constvars=list(constants), invars=invars, eqns=list(eqns), outvars=list(results)
    )
    narrowed = replace(
        signature, sources=tuple(sources.values()), cotangents=tuple(cotangents.values())
    )
    return ClosedJaxpr(half, list(constants.values())), narrowed
