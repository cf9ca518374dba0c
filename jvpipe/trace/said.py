"""What makes the whole of what slices give, where the trace cannot say and the user does: of aux and of model state.

A leaf that the user speaks of is made of what the loss gives on each slice as it is. So it must not be made of a sum of
which a slice has taken its share, or which it has left to the first.
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
from jvpipe.trace.loss import LossJaxpr
from jvpipe.trace.reductions import Beside, Lies
from jvpipe.trace.spread import CoupledError, reaching

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
_SHARED = (Beside.LEFT, Beside.RIGHT, Beside.FIRST_LEFT, Beside.FIRST_RIGHT)


@dataclass(frozen=True)
class Said:
    """What a loss yields, judged by the trace first and by the user's word then.

    Args:
        graph: of a micro-batch.
        found: how each output lies over the examples, by the trace.
        atoms: the outputs.
        normalising: the statistics that a batch norm divides by.
    """

    graph: LayerGraph
    found: Mapping[Ref, Lies]
    atoms: Mapping[Ref, Atom]
    normalising: Collection[Var]

    @cached_property
    def aux(self) -> dict[Ref, Lies]:
        """How the leaves of aux lie that the user speaks of, and the trace does not know."""
        return {
            ref: Lies(_AUX[said])
            for ref, lies in self.found.items()
            if ref.kind is ValueKind.AUX and _is_unknown(lies)
            if (said := self.graph.aux_chosen[aux_group(self.graph, ref.index)])
        }

    @cached_property
    def state(self) -> tuple[Spread | None, ...]:
        """How each leaf of the model state is made of what replicas make; None: each makes all of it.

        Raises:
            CoupledError: neither the trace nor the user can say it of a leaf.
        """
        return tuple(self._state(k) for k in range(len(self.graph.state)))

    def _state(self, k: int) -> Spread | None:
        ref, name, said = (
            Ref(ValueKind.STATE, k),
            self.graph.state[k].name,
            self.graph.state_chosen[k],
        )
        lies = self.found[ref]
        if lies.over is Over.ALONG:
            raise CoupledError(
                f"model state '{name}' has a part for each example: replicas cannot share it"
            )
        if lies.over is Over.NONE:
            return None
        if not _is_unknown(lies):
            return Spread(lies.over)
        if said is not None:
            check_state_reduction(name, self.atoms[ref], said)
            return Spread(_STATE[said])
        if self._is_of_batch_norm(lies):  # whose replicas normalise by their own
            return Spread(Over.MEAN)
        raise CoupledError(
            f"model state '{name}' cannot be made of what the replicas of a stage make of it: it is neither a mean "
            "nor a sum over examples, nor what a batch norm divides by. Say how it is made, "
            f"model_state_reduce={{'{name}': 'mean'}} (over examples), 'sum' (of what each has added) or 'same' (on "
            "all), or use one device for each stage"
        )

    def _is_of_batch_norm(self, lies: Lies) -> bool:
        return bool(lies.roots) and lies.roots <= set(self.normalising)

    def plain(self, loss: LossJaxpr, amended: Mapping[int, Beside]) -> dict[int, Beside]:
        """The equations that slices compute in another way, less those of leaves that the trace does not know.

        Args:
            loss: whose equations.
            amended: all, by their identity.

        Raises:
            CoupledError: what it does know is made of such an equation too.
        """
        unknown = {ref for ref, lies in self.found.items() if _is_unknown(lies)}
        leaves = reaching(loss.eqns, [self.atoms[ref] for ref in unknown])
        others = reaching(
            loss.eqns, [atom for ref, atom in self.atoms.items() if ref not in unknown]
        )
        kept = dict(amended)
        for eqn in (eqn for eqn in loss.eqns if amended.get(id(eqn)) in _SHARED):
            (out,) = eqn.outvars
            if out in leaves:
                if out in others:
                    names = ", ".join(sorted(f"{ref.kind} {ref.index}" for ref in unknown))
                    raise CoupledError(
                        f"a sum over examples, and what is added to it, is a part of what replicas make exactly and of "
                        f"what they do not ({names}): compute it twice, or use one device for each stage"
                    )
                del kept[id(eqn)]
        return kept


def _is_unknown(lies: Lies) -> bool:
    """Whether the trace cannot say how the whole is made of what slices give."""
    return lies.over is Over.MIXED or bool(lies.open)


def aux_group(graph: LayerGraph, index: int) -> int:
    """The leaf of aux that a value is of: two are of one that is `Weighted`.

    Args:
        graph: of a micro-batch.
        index: of the value.
    """
    return next(g for g, members in enumerate(graph.aux_groups) if index in members)
