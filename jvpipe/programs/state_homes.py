"""The homes of an optimizer's slots: the layers of gradients, parameters and leaves of the state.

A parameter belongs to its owner, and so do its gradients and the state that mirrors it. Placing the
update may show that only one layer makes and reads some other leaf of the state; such a leaf
belongs to that layer. Each layer has a copy of the remaining state, such as a count of updates. The
global program has a copy of the remaining state that it reads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from jvpipe.programs.flow import Flow
from jvpipe.programs.optimizer_trace import TracedOptimizer
from jvpipe.programs.ownership import check_owned, destinations
from jvpipe.programs.pieces import Slot, SlotKind
from jvpipe.programs.places import Input
from jvpipe.programs.slot_program import EVERYWHERE, SlotProgram


def homes_of(
    update: SlotProgram,
    init: SlotProgram,
    traced: TracedOptimizer,
    of_leaf: Sequence[Input],
) -> dict[Slot, Input]:
    """Returns the homes of slots: parameters, with their gradients and state, belong to layers.

    Args:
        update: the update, with the slots of its inputs and results.
        init: `init`, with the slots of its inputs and results.
        traced: the optimizer; its `parameter_of` maps leaves of the state to parameters.
        of_leaf: the home of each parameter.
    """
    gradients = [slot for slot in update.inputs if slot.kind is SlotKind.GRADIENT]
    homes = {slot: of_leaf[slot.index] for slot in (*gradients, *init.inputs)}
    states = update.of_kind(SlotKind.STATE)
    for slot, leaf in zip(states, traced.parameter_of, strict=True):
        if leaf is not None:
            homes[slot] = of_leaf[leaf]
    # The norm is over all layers, so the global program yields it.
    for slot in update.of_kind(SlotKind.GRAD_NORM):
        homes[slot] = Input("global")
    return homes


def settled_homes(
    update: SlotProgram,
    homes: Mapping[Slot, Input],
    layers: Sequence[int],
) -> tuple[Flow, dict[Slot, Input]]:
    """Places an update repeatedly, until the homes of the state no longer change.

    Placing may show that a leaf of the state belongs to a single layer. With this leaf at its
    layer, equations may get other places, so everything is placed again. The loop ends, because
    each round assigns another leaf to a layer for good.

    Args:
        update: the traced update.
        homes: the homes of gradients, parameters and their state.
        layers: the layers that own parameters.

    Returns:
        The placed update, and all homes.

    Raises:
        ValueError: the update mixes large arrays of several layers, or has side effects.
    """
    homes = dict(homes)
    flow = update.flow(homes, layers)
    claims = _claims(flow)
    while claims:
        homes |= claims
        flow = update.flow(homes, layers)
        claims = _claims(flow)
    check_homes(flow, homes)
    # The global program has copies of the shared state that it reads. To update these copies, it
    # may read further shared state. The loop ends, because each round makes another leaf shared.
    while (shared := _read_globally(flow)) != flow.shared:
        flow = replace(flow, shared=shared)
    return flow, homes


def _claims(flow: Flow) -> dict[Slot, Input]:
    """Returns the state that belongs to no parameter, but that only one layer makes and reads."""
    maker: dict[Slot, int] = {}
    for out in flow.outputs:
        home = flow.placement.of(out.atom).home
        if out.home == "everywhere" and isinstance(home, int):
            maker[out.slot] = home
    # A result in `maker` has no home yet. If it were in `others`, it would count as needed
    # everywhere, and so would the values that it is computed from, such as the leaf before the
    # update.
    others = [out for out in flow.outputs if out.slot not in maker]
    goes_to = destinations(flow.eqns, others)
    variables = {slot: var for var, slot in flow.inputs.items()}
    claims: dict[Slot, Input] = {}
    for slot, home in maker.items():
        reader = goes_to.get(variables[slot], home)
        if reader == home:
            claims[slot] = Input(home)
    return claims


def check_homes(flow: Flow, homes: Mapping[Slot, Input]) -> None:
    """Checks that each home makes all the large results that it needs.

    Args:
        flow: a placed `update` or `init`.
        homes: the homes of its slots; other slots are everywhere.

    Raises:
        ValueError: a layer makes a large result that another home needs.
    """
    inputs = {var: homes.get(slot, EVERYWHERE) for var, slot in flow.inputs.items()}
    check_owned(flow.eqns, inputs, flow.outputs, flow.placement)


def _read_globally(flow: Flow) -> frozenset[Slot]:
    """Returns the state that the global program reads and of which each layer has a copy."""
    read = set()
    for v, slot in flow.inputs.items():
        is_copied = flow.placement.of(v).home == "everywhere"
        if slot.kind is not SlotKind.STATE or not is_copied:
            continue
        if "global" in flow.readers[v]:
            read.add(slot)
    return frozenset(read)
