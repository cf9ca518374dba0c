"""Running statistics that change once per batch, by sums over its micro-batches.

Each micro-batch adds to the sums. The last one computes the new statistics from them, and sets them
to 0 again.

    after micro-batch   (before)   0    1          2    3, the last
    sums                0          s0   s0 + s1    ...  0            leaves that the user does not see
    statistics r        r          r    r          r    h(r, all)    as one whole batch would have it

The examples themselves are normalised by the mean and variance of their micro-batch, as in
torchgpipe's `DeferredBatchNorm`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
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
    """Puts off what batch norms do to the model state until the last micro-batch of a batch.

    Args:
        loss: of a micro-batch, all of a batch being of one size.
        microbatches: of a batch.

    Returns:
        the loss with more leaves of the model state, behind the user's: for each leaf that follows
        a batch norm the number of micro-batches that have been seen, and their sums.

    Raises:
        ValueError: no leaf follows one, or one does in a way that cannot be put off.
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
    """What takes the place of a leaf's own update.

    Attributes:
        eqns: of a micro-batch.
        value: the leaf's new value.
        inputs: the added leaves of the model state: how many micro-batches were seen, and each sum
            so far.
        results: their new values.
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
    """Makes the equations that add a micro-batch's sums, and after the last one give the leaf its
    new value.
    """
    before = state_before(traces.micro, leaf.index)
    sum_eqns = [traces.eqns[x.eqn] for x in leaf.sums]
    sums = [eqn.outvars[0] for eqn in sum_eqns]

    def update(
        old: Array,
        parts: list[Array],
        seen: Array,
        so_far: list[Array],
    ) -> Any:
        """Returns the leaf's value, and what was seen and summed so far."""
        after = _added(
            leaf.sums,
            seen,
            so_far,
            [part.astype(jnp.float32) for part in parts],
        )
        is_last = seen + 1 == microbatches
        value = jnp.where(
            is_last,
            _ended(traces, leaf, old, after),
            old,
        )
        # The last micro-batch of a batch leaves nothing for the next batch.
        counters = [seen + 1, *after]
        return value, [jnp.where(is_last, jnp.zeros_like(x), x) for x in counters]

    shapes = [_jax.aval(var).shape for var in sums]
    totals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    number = jax.ShapeDtypeStruct((), jnp.int32)
    closed = flatten(
        update,
        _jax.aval(before),
        list(map(_jax.aval, sums)),
        number,
        totals,
    )
    # What it adds to the model state are inputs of its own; all else it reads of the micro-batch.
    reads = [before, *sums]
    env = dict(zip(closed.jaxpr.invars, reads, strict=False))

    def read(atoms: Sequence[Atom]) -> list[Atom]:
        return [env.get(atom, atom) if isinstance(atom, Var) else atom for atom in atoms]

    eqns = [eqn.replace(invars=read(eqn.invars)) for eqn in closed.jaxpr.eqns]
    value, *results = read(closed.jaxpr.outvars)
    assert not closed.consts
    return _Change(
        eqns,
        value,
        closed.jaxpr.invars[len(reads) :],
        results,
    )


def _added(
    kinds: Sequence[Sum],
    seen: Array,
    so_far: Sequence[Array],
    parts: Sequence[Array],
) -> list[Array]:
    """Adds the sums of a micro-batch to those before.

    Squares that each micro-batch has centred by its own mean are centred by that of all of them
    (Chan et al., 1983).

    Args:
        kinds: of the sums.
        seen: how many micro-batches came before.
        so_far: their sums.
        parts: those of this one.
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
    """Returns the value that a whole batch gives a leaf.

    Args:
        traces: of the loss.
        leaf: that follows a batch norm.
        old: its value before the batch.
        totals: the sums of all micro-batches.
    """
    whole = traces.whole
    env: dict[Var, Any] = {state_before(whole, leaf.index): old}
    for kind, total in zip(leaf.sums, totals, strict=True):
        (var,) = whole.eqns[kind.eqn].outvars
        env[var] = total.astype(_jax.aval(var).dtype)
    jaxprs.run_jaxpr([whole.eqns[place] for place in leaf.eqns], env)
    (value,) = jaxprs.read_by([state_after(whole, leaf.index)], env)
    return value
