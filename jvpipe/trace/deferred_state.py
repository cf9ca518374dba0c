"""Changes running statistics of batch norms once per batch, from sums over its micro-batches.

Each micro-batch adds its sums to leaves of the model state that the user does not see. The last
micro-batch of the batch computes the new running statistics from these leaves, as the loss on the
whole batch would, and sets the leaves to 0. Below, a batch has four micro-batches, sk are the sums
of micro-batch k, r is a running statistic, and h is the formula by which the loss computes the new
value of r from r and the sums:

    after micro-batch          none    0     1          2               3
    the added leaves           0       s0    s0 + s1    s0 + s1 + s2    0
    the running statistic      r       r     r          r               h(r, s0 + s1 + s2 + s3)

The examples are still normalized by the mean and variance of their own micro-batch, as in
torchgpipe's `DeferredBatchNorm`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jvpipe import _jax
from jvpipe._jax import Atom, JaxprEqn, Var
from jvpipe.ir.layers import Ref
from jvpipe.ir.values import ValueKind
from jvpipe.trace import jaxprs
from jvpipe.trace.flatten import flatten
from jvpipe.trace.loss import LossJaxpr
from jvpipe.trace.running import RunningLeaf, Sum, TwoTraces, state_after, state_before


def deferred(loss: LossJaxpr, microbatches: int) -> LossJaxpr:
    """Defers the updates of batch norms' running statistics to the last micro-batch of a batch.

    Args:
        loss: the loss of a micro-batch; all micro-batches of a batch have the same size.
        microbatches: the number of micro-batches of a batch.

    Returns:
        The loss with additional leaves of the model state after the user's. For each running
        statistic of a batch norm, these are a counter of the micro-batches so far, and one leaf for
        each sum over them.

    Raises:
        ValueError: no leaf is a running statistic of a batch norm, or the formula that
            updates such a leaf cannot be computed from sums.
    """
    if microbatches == 1:
        return loss
    assert loss.of_size is not None
    examples = loss.inputs_of(ValueKind.BATCH)[0]
    whole = loss.of_size(microbatches * _jax.aval(examples).shape[0])
    traces = TwoTraces(loss, whole)
    eqns = list(loss.eqns)
    after: dict[Ref, Atom] = {}
    inputs: dict[Var, Ref] = {}
    names = list(loss.names[ValueKind.STATE])
    for leaf in traces.find():
        change = _change(traces, leaf, microbatches)
        eqns += change.eqns
        after[Ref(ValueKind.STATE, leaf.index)] = change.value
        pairs = zip(change.inputs, change.results, strict=True)
        for i, (var, atom) in enumerate(pairs):
            ref = Ref(ValueKind.STATE, len(names))
            inputs[var], after[ref] = ref, atom
            names.append(f"{names[leaf.index]}/of_batch{i}")
    outputs = [(after.pop(ref, atom), ref) for atom, ref in loss.outputs]
    outputs += [(atom, ref) for ref, atom in after.items()]

    def of_size(count: int) -> LossJaxpr:
        assert loss.of_size is not None
        return deferred(loss.of_size(count), microbatches)

    return replace(
        loss,
        eqns=tuple(jaxprs.prune(eqns, [atom for atom, _ in outputs])),
        inputs=loss.inputs | inputs,
        outputs=tuple(outputs),
        names=loss.names | {ValueKind.STATE: tuple(names)},
        of_size=cache(of_size),
        state_chosen=(*loss.state_chosen, *[None] * len(inputs)),
    )


@dataclass(frozen=True)
class _Change:
    """The equations that replace the loss's own update of a leaf.

    Attributes:
        eqns: the equations, which run in every micro-batch.
        value: the leaf's new value.
        inputs: the added leaves of the model state: the number of micro-batches seen so far, then
            the sums over them.
        results: the new values of the added leaves, in the order of `inputs`.
    """

    eqns: Sequence[JaxprEqn]
    value: Atom
    inputs: Sequence[Var]
    results: Sequence[Atom]


def _change(
    traces: TwoTraces,
    leaf: RunningLeaf,
    microbatches: int,
) -> _Change:
    """Makes the equations that add up sums and, in the last micro-batch, change the leaf.

    Args:
        traces: the loss at the shapes of a micro-batch and of a whole batch.
        leaf: a running statistic of a batch norm.
        microbatches: the number of micro-batches of a batch.
    """
    before = state_before(traces.micro, leaf.index)
    sum_eqns = [traces.eqns[x.eqn] for x in leaf.sums]
    sums = [eqn.outvars[0] for eqn in sum_eqns]
    shapes = [_jax.aval(var).shape for var in sums]
    totals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    number = jax.ShapeDtypeStruct((), jnp.int32)
    closed = flatten(
        partial(_updated, traces, leaf, microbatches),
        _jax.aval(before),
        list(map(_jax.aval, sums)),
        number,
        totals,
    )
    # The first inputs are values that the loss makes. The others, the counter and the sums so far,
    # become new inputs of the loss: the added leaves.
    reads = [before, *sums]
    names = dict(zip(closed.jaxpr.invars, reads, strict=False))
    eqns = jaxprs.renamed(closed.jaxpr.eqns, names)
    value, *results = closed.jaxpr.outvars
    assert not closed.consts
    assert names.keys().isdisjoint(closed.jaxpr.outvars), "an update returns one of its inputs"
    return _Change(
        eqns,
        value,
        closed.jaxpr.invars[len(reads) :],
        results,
    )


def _updated(
    traces: TwoTraces,
    leaf: RunningLeaf,
    microbatches: int,
    old: Array,
    parts: list[Array],
    seen: Array,
    so_far: list[Array],
) -> Any:
    """Returns the leaf's value, and the counter and the sums for the next micro-batch.

    Args:
        traces: the loss at the shapes of a micro-batch and of a whole batch.
        leaf: a running statistic of a batch norm.
        microbatches: the number of micro-batches of a batch.
        old: the leaf's value before the micro-batch.
        parts: the sums of this micro-batch.
        seen: how many micro-batches of the batch came before.
        so_far: the sums over these earlier micro-batches.
    """
    wide = [part.astype(jnp.float32) for part in parts]
    after = _added(leaf.sums, seen, so_far, wide)
    is_last = seen + 1 == microbatches
    ended = _ended(traces, leaf, old, after)
    value = jnp.where(is_last, ended, old)
    # The last micro-batch of a batch sets the counter and the sums to 0, for the next batch.
    counters = [seen + 1, *after]
    return value, [jnp.where(is_last, jnp.zeros_like(x), x) for x in counters]


def _added(
    kinds: Sequence[Sum],
    seen: Array,
    so_far: Sequence[Array],
    parts: Sequence[Array],
) -> list[Array]:
    """Adds the sums of a micro-batch to the sums over the micro-batches before it.

    If squares are centered, each micro-batch has subtracted its own mean from its values, but in
    the total, the mean of all micro-batches must be subtracted. If k micro-batches of n values each
    came before, and their mean differs from this micro-batch's mean by d, d**2 * n k / (k + 1) must
    be added to the total (Chan et al., 1983).

    Args:
        kinds: the kinds of the sums.
        seen: how many micro-batches came before.
        so_far: the sums over the micro-batches before.
        parts: the sums of this micro-batch.
    """
    places = [kind.eqn for kind in kinds]
    batches = seen.astype(jnp.float32)
    after = [before + part for before, part in zip(so_far, parts, strict=True)]
    for i, kind in enumerate(kinds):
        if kind.mean_of is None:
            continue
        j = places.index(kind.mean_of)
        count = kind.count
        off = parts[j] / count - so_far[j] / (count * jnp.maximum(batches, 1.0))
        after[i] += off**2 * (count * batches / (batches + 1.0))
    return after


def _ended(
    traces: TwoTraces,
    leaf: RunningLeaf,
    old: Array,
    totals: Sequence[Array],
) -> Array:
    """Returns the value that a leaf has after a whole batch.

    Args:
        traces: the loss at the shapes of a micro-batch and of a whole batch.
        leaf: a running statistic of a batch norm.
        old: the leaf's value before the batch.
        totals: the sums over all micro-batches of the batch.
    """
    whole = traces.whole
    env: dict[Var, Any] = {state_before(whole, leaf.index): old}
    for kind, total in zip(leaf.sums, totals, strict=True):
        (var,) = whole.eqns[kind.eqn].outvars
        env[var] = total.astype(_jax.aval(var).dtype)
    jaxprs.run_jaxpr([whole.eqns[place] for place in leaf.eqns], env)
    (value,) = jaxprs.read_by([state_after(whole, leaf.index)], env)
    return value
