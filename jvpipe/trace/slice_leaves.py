"""Decides how leaves of aux and of the model state follow from the values of slices.

A slice is the part of a micro-batch that one replica of a stage computes. A leaf is unknown if the
trace does not show how it follows from the slices' values. Such a leaf is reduced as the user
chose, from the values that the unchanged loss has on each slice. So slices do not change additions
and maxima that an unknown leaf depends on (`Said.plain`).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from jvpipe._jax import Atom, Var
from jvpipe.ir.examples import Over, Spread
from jvpipe.ir.layers import LayerGraph, Ref
from jvpipe.ir.reductions import AuxReduction, StateReduction
from jvpipe.ir.values import ValueKind
from jvpipe.trace.chosen import check_state_reduction
from jvpipe.trace.coupled import CoupledError
from jvpipe.trace.loss import LossJaxpr
from jvpipe.trace.spread import reaching
from jvpipe.trace.sums_and_means import Beside, Lies

_AUX = {
    AuxReduction.MEAN: Over.MEAN,
    AuxReduction.SUM: Over.SUM,
    AuxReduction.MAX: Over.MAX,
    AuxReduction.LAST: Over.LAST,
}
_STATE = {
    StateReduction.MEAN: Over.MEAN,
    StateReduction.SUM: Over.ADDED,
    StateReduction.SAME: Over.FIRST,
}
_CHANGED = (Beside.LEFT, Beside.RIGHT, Beside.FIRST_LEFT, Beside.FIRST_RIGHT, Beside.GUARD)


@dataclass(frozen=True)
class Said:
    """How outputs of a loss depend on the examples, by the trace or else by the user's choice.

    Args:
        graph: the layer graph of a micro-batch.
        traced: how each output depends on the examples, by the trace.
        atoms: the variable or literal of each output.
        normalizing: the statistics that a batch norm divides by.
    """

    graph: LayerGraph
    traced: Mapping[Ref, Lies]
    atoms: Mapping[Ref, Atom]
    normalizing: Collection[Var]

    @cached_property
    def aux(self) -> dict[Ref, Lies]:
        """How the unknown leaves of aux depend on the examples, by the user's choice."""
        aux: dict[Ref, Lies] = {}
        for ref, lies in self.traced.items():
            if ref.kind is ValueKind.AUX and _is_unknown(lies):
                reduction = self.graph.aux_chosen[aux_group(self.graph, ref.index)]
                if reduction:
                    aux[ref] = Lies(_AUX[reduction])
        return aux

    @cached_property
    def state(self) -> tuple[Spread | None, ...]:
        """How each leaf of the model state follows from the replicas' leaves.

        None for a leaf that depends on no example, because each replica computes the whole leaf.

        Raises:
            CoupledError: neither the trace nor the user says how a leaf follows from the replicas'
                leaves.
        """
        return tuple(self._state(k) for k in range(len(self.graph.state)))

    def _state(self, k: int) -> Spread | None:
        ref = Ref(ValueKind.STATE, k)
        name = self.graph.state[k].name
        reduction = self.graph.state_chosen[k]
        lies = self.traced[ref]
        if lies.over is Over.ALONG:
            raise CoupledError(
                f"model state '{name}' has a part for each example, so replicas cannot share it: "
                "use one device for each stage"
            )
        if lies.over is Over.NONE:
            return None
        if not _is_unknown(lies):
            return Spread(lies.over)
        if reduction is not None:
            check_state_reduction(name, self.atoms[ref], reduction)
            return Spread(_STATE[reduction])
        # Each replica has statistics of its own examples. The running statistic is their mean.
        if self._is_of_batch_norm(lies):
            return Spread(Over.MEAN)
        raise CoupledError(
            f"jvpipe cannot tell how to reduce the replicas' values of model state '{name}' to one "
            "value: it is neither a mean nor a sum over examples, nor a statistic by which a batch "
            f"norm divides. Choose a reduction with model_state_reduce={{'{name}': 'mean'}} (over "
            "examples), 'sum' (of the changes of each replica) or 'same' (all replicas have equal "
            "values), or use one device for each stage"
        )

    def _is_of_batch_norm(self, lies: Lies) -> bool:
        return bool(lies.roots) and lies.roots <= set(self.normalizing)

    def plain(self, loss: LossJaxpr, amended: Mapping[int, Beside]) -> dict[int, Beside]:
        """Returns the changes of equations, except those that would change an unknown leaf.

        Args:
            loss: the loss that has the equations.
            amended: how slices could change equations, by the `id` of the equation.

        Raises:
            CoupledError: an unknown leaf and another output depend on the same equation, which
                slices must change only for the other output.
        """
        unknown = {ref for ref, lies in self.traced.items() if _is_unknown(lies)}
        others = [atom for ref, atom in self.atoms.items() if ref not in unknown]
        behind_unknown = reaching(loss.eqns, [self.atoms[ref] for ref in unknown])
        behind_others = reaching(loss.eqns, others)
        kept = dict(amended)
        for eqn in loss.eqns:
            if amended.get(id(eqn)) not in _CHANGED:
                continue
            (out,) = eqn.outvars
            if out not in behind_unknown:
                continue
            if out in behind_others:
                leaves = sorted(f"{ref.kind} {ref.index}" for ref in unknown)
                names = ", ".join(leaves)
                raise CoupledError(
                    "the result of adding to a sum over examples is used both for outputs that "
                    "jvpipe computes exactly and for outputs that it reduces as the user chose "
                    f"({names}): compute it separately for each, or use one device for each stage"
                )
            del kept[id(eqn)]
        return kept


def _is_unknown(lies: Lies) -> bool:
    """Tells whether the trace does not show how a value follows from the slices' values."""
    return lies.over is Over.MIXED or bool(lies.open)


def aux_group(graph: LayerGraph, index: int) -> int:
    """Returns the number of the leaf of aux that a value belongs to.

    The two numbers differ after a `Weighted` leaf, which has two values.

    Args:
        graph: the layer graph of a micro-batch.
        index: the number of the value.
    """
    return next(g for g, members in enumerate(graph.aux_groups) if index in members)
