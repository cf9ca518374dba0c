"""A layer's backward as two programs: I yields the cotangents of inputs, and W the gradients.

Other stages wait only for the cotangents, so W may run later. In the table, sources are values of
the forward that the backward reads, and sums are the accumulators of gradients. If later layers
also read an input of this layer, the input's partial sum is the sum of those layers' cotangents.

    program    takes                                        yields
    whole      sources, cotangents, partial sums, sums      sums, cotangents of inputs
    I          sources, cotangents, partial sums            cotangents of inputs, handed values
    W          sources, cotangents, handed values, sums     sums

I hands W the values that W needs and that are costly to compute, such as products. W computes cheap
values again. The results of the two halves are bitwise identical to those of the whole backward,
for two reasons. First, an optimization barrier follows each handed value, also in the whole
backward, so the compiler never fuses a handed value with its readers. Second, values that both
halves compute come from calls that are compiled the same way in all three programs
(`jvpipe.programs.outlining`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import jax

from jvpipe import _jax
from jvpipe._jax import Atom, ClosedJaxpr, JaxprEqn, Var
from jvpipe.ir.layers import Signature, SplitSignature
from jvpipe.programs.outlining import Call, calls
from jvpipe.trace import jaxprs
from jvpipe.trace.graph import array_of
from jvpipe.trace.primitives import is_cheap, is_move


@dataclass(frozen=True)
class Halves:
    """Both halves of a layer's backward.

    `input` is `(sources, cotangents, partial sums) -> (cotangents of inputs, handed values)`;
    `weight` is `(sources, cotangents, handed values, accumulators) -> accumulators`.
    """

    input: ClosedJaxpr
    weight: ClosedJaxpr
    signature: SplitSignature


@dataclass(frozen=True)
class _BackwardCut:
    """The equations of each half, and the values that the first half hands to the second.

    Both halves contain the cheap equations that both need.
    """

    input: list[JaxprEqn]
    weight: list[JaxprEqn]
    handed: list[Var]

    @staticmethod
    def of(backward: ClosedJaxpr, gradients: int) -> "_BackwardCut":
        """Finds the equations that make the cotangents, and the equations that make the sums.

        Args:
            backward: the backward of a layer.
            gradients: the number of its results that are sums of gradients; they come first.
        """
        eqns = backward.jaxpr.eqns
        results = backward.jaxpr.outvars
        first = jaxprs.prune(eqns, results[gradients:])
        in_first = set(map(id, first))
        # `can_be_handed` are the results of costly equations in the first half, and of equations
        # with effects there.
        can_be_handed: set[Var] = set()
        again = []  # the equations that the second half may run
        for eqn in eqns:
            # A barrier that reads such a value counts as costly. So the second half gets the result
            # of the barrier, and does not repeat the barrier.
            reads_one = not can_be_handed.isdisjoint(jaxprs.variables(eqn.invars))
            is_barrier_of_one = reads_one and _is_barrier(eqn)
            runs_once = eqn.effects or is_barrier_of_one or not is_cheap(eqn)
            if id(eqn) in in_first and runs_once:
                can_be_handed.update(eqn.outvars)
            else:
                again.append(eqn)
        second = jaxprs.prune(again, results[:gradients])
        handed = [v for v in jaxprs.free_variables(second) if v in can_be_handed]
        return _BackwardCut(first, second, handed)


def _is_barrier(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "optimization_barrier"


def settle_halves(backward: ClosedJaxpr, gradients: int) -> ClosedJaxpr:
    """Rewrites a backward so that it gives bitwise identical results whole and in halves.

    Args:
        backward: the backward of a layer.
        gradients: the number of its results that are sums of gradients; they come first.
    """
    jaxpr = backward.jaxpr
    if gradients in (0, len(jaxpr.outvars)):
        return backward
    cut = _BackwardCut.of(backward, gradients)
    behind_barriers: set[Var] = set()
    for eqn in filter(_is_barrier, jaxpr.eqns):
        behind_barriers.update(eqn.outvars)
    handed = set(cut.handed) - behind_barriers
    shared = _shared(backward, cut)
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        if id(eqn) in shared:
            eqns.append(shared[id(eqn)].equation())
        else:
            handed_here = [v for v in eqn.outvars if v in handed]
            eqns += _with_barrier(eqn, handed_here)
    needed = jaxprs.prune(eqns, jaxpr.outvars)
    return ClosedJaxpr(jaxpr.replace(eqns=needed), backward.consts)


def _shared(backward: ClosedJaxpr, cut: _BackwardCut) -> dict[int, Call]:
    """Returns calls that make the values that both halves compute.

    The key of a call is the `id` of the last equation in the call, which the call replaces. The
    other equations in the call then have no readers, so `settle_halves` prunes them.
    """
    jaxpr = backward.jaxpr
    second = set(map(id, cut.weight))
    in_both = (eqn for eqn in cut.input if id(eqn) in second)
    eqns = [eqn for eqn in in_both if eqn.primitive.name != "outlined"]  # already a call
    both = set(map(id, eqns))
    others = (eqn for eqn in jaxpr.eqns if id(eqn) not in both)
    read = {v for eqn in others for v in jaxprs.variables(eqn.invars)}
    read.update(jaxprs.variables(jaxpr.outvars))
    for eqn in reversed(eqns):
        # An equation that only moves its operand needs no call, because each reader can repeat the
        # move. So readers of its result count as readers of its operand.
        if is_move(eqn) and not read.isdisjoint(eqn.outvars):
            read.difference_update(eqn.outvars)
            read.update(jaxprs.variables(eqn.invars))
    by_position = calls(eqns, candidates=read, outputs=())
    return {id(eqns[i]): call for i, call in by_position.items()}


def _with_barrier(eqn: JaxprEqn, values: Sequence[Var]) -> Iterator[JaxprEqn]:
    """Yields an equation, and then a barrier for some of its results, `values`.

    Before the barrier, `values` get the memory layout that arrays have between programs, because
    the first half hands these values to the second.
    """
    if not values:
        yield eqn
        return
    bare = {v: _jax.new_variable(_jax.aval(v)) for v in values}

    def laid(xs: list[jax.Array]) -> list[jax.Array]:
        return jax.lax.optimization_barrier([_jax.laid_out(x) for x in xs])

    laid_out = jax.make_jaxpr(laid)(list(map(jaxprs.shape_of, values))).jaxpr
    # The equation now writes new variables (`bare`). The equations of `laid` read the new variables
    # and write the old ones, which later equations read.
    inner = (*laid_out.invars, *laid_out.outvars)
    renamed = dict(zip(inner, (*bare.values(), *values), strict=True))
    yield eqn.replace(outvars=[bare.get(v, v) for v in eqn.outvars])
    yield from jaxprs.renamed(laid_out.eqns, renamed)


def halve(backward: ClosedJaxpr, signature: Signature) -> Halves | None:
    """Cuts a backward into two halves, after `settle_halves` has rewritten it.

    Args:
        backward: the backward of a layer.
        signature: the signature of that layer.

    Returns:
        The halves; None if the backward yields only cotangents or only gradients.
    """
    if not signature.returned or not signature.gradients:
        return None
    jaxpr, count = backward.jaxpr, len(signature.gradients)
    cut = _BackwardCut.of(backward, count)
    sums = jaxpr.outvars[:count]
    returned = jaxpr.outvars[count:]
    first_sum = len(signature.sources) + len(signature.cotangents)
    partial = jaxpr.invars[first_sum:-count]
    accumulators = jaxpr.invars[-count:]
    first = replace(signature, gradients=())
    second = replace(signature, partial=(), returned=())
    input_half, first = _half(
        backward,
        first,
        cut.input,
        partial,
        [*returned, *cut.handed],
    )
    taken = [*cut.handed, *accumulators]
    weight_half, second = _half(
        backward,
        second,
        cut.weight,
        taken,
        sums,
    )
    handed = []
    for i, v in enumerate(cut.handed):
        handed.append(array_of(v, f"handed{i}"))
    return Halves(
        input_half,
        weight_half,
        SplitSignature(tuple(handed), first, second),
    )


def _half(
    whole: ClosedJaxpr,
    signature: Signature,
    eqns: Sequence[JaxprEqn],
    taken: Sequence[Var],
    results: Sequence[Atom],
) -> tuple[ClosedJaxpr, Signature]:
    """Makes a program of some equations of a backward.

    Args:
        whole: the backward.
        signature: the backward's sources and cotangents; the half keeps those that it reads.
        eqns: the equations of the half.
        taken: the arguments of the half after sources and cotangents.
        results: the results of the half.

    Returns:
        The program, and its signature.
    """
    jaxpr = whole.jaxpr
    read = jaxprs.all_reads(eqns, results)
    others = jaxpr.invars[len(signature.sources) :]
    of_sources = zip(jaxpr.invars, signature.sources, strict=False)
    of_cotangents = zip(others, signature.cotangents, strict=False)
    of_constants = zip(jaxpr.constvars, whole.consts, strict=True)
    sources, cotangents, constants = (
        {v: x for v, x in pairs if v in read} for pairs in (of_sources, of_cotangents, of_constants)
    )
    invars = [*sources, *cotangents, *taken]
    computed = jaxprs.defined(eqns)
    assert read <= {*invars, *constants, *computed}, "a half reads what is the other's"
    half = jaxpr.replace(
        constvars=list(constants),
        invars=invars,
        eqns=list(eqns),
        outvars=list(results),
    )
    found_at = tuple(sources.values())
    narrowed = replace(
        signature,
        sources=found_at,
        cotangents=tuple(cotangents.values()),
    )
    return ClosedJaxpr(half, list(constants.values())), narrowed
