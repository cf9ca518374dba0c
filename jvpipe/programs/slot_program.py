"""A traced optimizer's `update` and `init` as functions whose inputs and results are slots.

A slot is the name of an array (see `jvpipe.programs.pieces`). Given the homes of the slots, each
equation of such a function gets a place (a home and a phase), and the result is a `Flow`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from jvpipe import _jax
from jvpipe._jax import ClosedJaxpr, JaxprEqn, Var
from jvpipe.programs.flow import Flow
from jvpipe.programs.optimizer_trace import TracedOptimizer
from jvpipe.programs.ownership import place_operands
from jvpipe.programs.pieces import Slot, SlotKind
from jvpipe.programs.places import Input, Output, VariablePlaces
from jvpipe.programs.transformations import scope_of
from jvpipe.trace import jaxprs
from jvpipe.trace.flatten import flatten

EVERYWHERE = Input("everywhere")
"""The home of a slot of which each layer has a copy."""


@dataclass(frozen=True)
class SlotProgram:
    """A traced `update` or `init`.

    Attributes:
        closed: the function's equations.
        inputs: the slot of each input.
        results: the slot of each result.
    """

    closed: ClosedJaxpr
    inputs: tuple[Slot, ...]
    results: tuple[Slot, ...]

    def of_kind(self, kind: SlotKind) -> list[Slot]:
        """Returns the results of a given kind."""
        return [slot for slot in self.results if slot.kind is kind]

    def outputs(self, homes: Mapping[Slot, Input]) -> list[Output]:
        """Returns the results, each with its home; a slot that `homes` lacks is everywhere."""
        named = zip(self.closed.jaxpr.outvars, self.results, strict=True)
        return [Output(atom, homes.get(slot, EVERYWHERE).home, slot) for atom, slot in named]

    def origins(self, homes: Mapping[Slot, Input]) -> dict[Var, Input]:
        """Returns the home of each input; constants and slots that `homes` lacks are everywhere."""
        named = zip(self.closed.jaxpr.invars, self.inputs, strict=True)
        constants = dict.fromkeys(self.closed.jaxpr.constvars, EVERYWHERE)
        inputs = {var: homes.get(slot, EVERYWHERE) for var, slot in named}
        return constants | inputs

    def placed(self, homes: Mapping[Slot, Input]) -> tuple["SlotProgram", VariablePlaces]:
        """Places all equations; a scan over several layers is split into one scan per layer.

        After a split, all equations are placed again. The recursion ends, because each part of a
        split scan works on one layer and is not split again.
        """
        eqns = self.closed.jaxpr.eqns
        placement = place_operands(
            eqns,
            self.origins(homes),
            self.outputs(homes),
        )
        if not placement.splits:
            return self, placement
        splits = {id(eqns[i]): split for i, split in placement.splits.items()}

        def apply(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
            with jax.named_scope(scope_of(eqn)):
                split = splits.get(id(eqn))
                return _jax.bind(eqn, values) if split is None else split(values)

        def run(*values: Any) -> list[Any]:
            return jaxprs.evaluate_jaxpr(self.closed, values, apply)

        # Tracing again turns each split scan into its parts; all other equations stay as they are.
        closed = flatten(run, *self.closed.in_avals)
        return replace(self, closed=closed).placed(homes)

    def flow(self, homes: Mapping[Slot, Input], layers: Sequence[int]) -> Flow:
        """Returns the placed equations with the slots of their inputs and results.

        Args:
            homes: the homes of the slots; other slots are everywhere.
            layers: the layers that own parameters.
        """
        program, placement = self.placed(homes)
        jaxpr = program.closed.jaxpr
        return Flow(
            eqns=jaxpr.eqns,
            constants=dict(zip(jaxpr.constvars, program.closed.consts, strict=True)),
            inputs=dict(zip(jaxpr.invars, self.inputs, strict=True)),
            outputs=program.outputs(homes),
            placement=placement,
            layers=layers,
        )


def slot_programs(
    traced: TracedOptimizer,
    readers: Sequence[int],
    *,
    weighted: bool,
    grad_norm: bool,
) -> tuple[SlotProgram, SlotProgram]:
    """Returns a traced optimizer's update and init, with the slots of their inputs and results.

    Args:
        traced: the optimizer.
        readers: the number of gradient accumulators of each parameter.
        weighted: whether the divisor of the gradients is an input of the update.
        grad_norm: whether the update also yields the norm of the gradients.
    """
    # The slots follow the order of the arguments with which the optimizer was traced:
    #
    #     update   gradients of all readers, weight if there is one, parameters, state
    #              -> parameters, state, norm of the gradients if it is wanted
    #     init     parameters -> state
    gradients: list[Slot] = []
    for leaf, count in enumerate(readers):
        gradients += [Slot(SlotKind.GRADIENT, leaf, reader) for reader in range(count)]
    weight = [Slot(SlotKind.WEIGHT)] if weighted else []
    parameters = tuple(Slot(SlotKind.PARAMETER, leaf) for leaf in range(len(readers)))
    state = tuple(Slot(SlotKind.STATE, leaf) for leaf in range(len(traced.state)))
    norm = [Slot(SlotKind.GRAD_NORM)] if grad_norm else []
    inputs = (*gradients, *weight, *parameters, *state)
    results = (*parameters, *state, *norm)
    update = SlotProgram(traced.update, inputs, results)
    return update, SlotProgram(traced.init, parameters, state)
