"""Cuts an optimizer into pieces, each of which runs where the arrays that it reads lie.

`optimizer.update` and `optimizer.init` are traced over the whole tree of parameters. Every
parameter has an owner, which is a layer; the layer also owns the optimizer's state that belongs to
the parameter. Each traced equation runs with the layer that owns its operands. An equation that
mixes layers, such as the one of a global norm, runs in a global program. The home of a value or an
equation is a layer, the global program, or everywhere; a value that is everywhere has a copy in
each layer. The pieces of layers and the global program take turns, in phases. With clipping by the
global norm:

    phase    who          computes
    0        each layer   its sum of squares
    0        global       the norm
    1        each layer   clipped gradients, Adam's moments, new parameters

The cut decides where an equation runs, and must never change what the equation computes.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax

from jvpipe import _jax
from jvpipe._jax import Atom, ClosedJaxpr, JaxprEqn, TreeDef, Var
from jvpipe.ir.layers import Array, Parameter
from jvpipe.ir.optimizer import Optimizer
from jvpipe.ir.sharding import Sharding
from jvpipe.programs.flow import Flow
from jvpipe.programs.optimizer_trace import (
    TracedOptimizer,
    paths_of,
    scope_of,
    transformation,
)
from jvpipe.programs.ownership import (
    Input,
    Output,
    Placement,
    check_owned,
    destinations,
    place_operands,
)
from jvpipe.programs.pieces import Piece, Slot, SlotKind
from jvpipe.programs.stacked_trace import trace_stacked
from jvpipe.trace import jaxprs
from jvpipe.trace.flatten import flatten
from jvpipe.trace.stacks import Stacks
from jvpipe.util.paths import path_name

PER_LAYER = (
    'With Pipeline(stacked="per_layer") the optimizer sees an array for each layer of a scan, not '
    "the stack of these arrays"
)


@dataclass(frozen=True)
class StateLeaf:
    """A leaf of the optimizer's state.

    Attributes:
        array: its name, shape and type.
        owner: the layer that has it; None if every layer has a copy.
        parameter: the parameter that it belongs to; None if it belongs to none.
    """

    array: Array
    owner: int | None
    parameter: int | None


@dataclass(frozen=True)
class OptimizerCut:
    """An optimizer in pieces.

    A piece reads and writes slots, which are names of arrays. Most slots name one array, whichever
    piece uses them. The exception is state that belongs to no layer. Each layer has a copy of it,
    and so has the global program if it reads that state. In a piece, the slot of such state names
    the copy of the layer, or of the global program, that runs the piece. A leaf that no piece of
    `update` writes stays as it is.

    Attributes:
        init: the pieces that make the state, in an order in which they can run.
        update: the pieces of an update, in an order in which they can run.
        state: the leaves of the state.
        state_tree: the tree of these leaves, as the optimizer has it.
        cross_layer: the names of transformations through which a layer's update depends on other
            layers.
    """

    init: tuple[Piece, ...]
    update: tuple[Piece, ...]
    state: tuple[StateLeaf, ...]
    state_tree: TreeDef
    cross_layer: tuple[str, ...]

    @cached_property
    def holders(self) -> frozenset[tuple[int, int | None]]:
        """Pairs of a leaf of the state and a layer that has it or has a copy of it.

        None in place of a layer stands for the global program.
        """
        holders = set()
        for piece in (*self.init, *self.update):
            for slot in (*piece.reads, *piece.writes):
                if slot.kind is SlotKind.STATE:
                    holders.add((slot.index, piece.layer))
        return frozenset(holders)

    def held_by(self, layer: int | None) -> tuple[int, ...]:
        """Returns the leaves of the state that a layer has; None stands for the global program."""
        leaves = (i for i, holder in self.holders if holder == layer)
        return tuple(sorted(leaves))


def cut_optimizer(
    optimizer: Optimizer,
    params: Any,
    owners: Sequence[int],
    readers: Sequence[int],
    *,
    microbatches: int | None,
    grad_norm: bool = False,
    traced: TracedOptimizer | None = None,
    stacks: Stacks | None = None,
    frozen: Collection[int] = (),
) -> OptimizerCut:
    """Cuts an optimizer by the owners of the parameters.

    Args:
        optimizer: any `optax.GradientTransformation`.
        params: arrays or `jax.ShapeDtypeStruct`.
        owners: the layer that owns each leaf, in tree order.
        readers: the number of layers that read each leaf. Each reader has a gradient accumulator,
            and the accumulators are added up in the order of the readers.
        microbatches: the number by which gradients are divided; None if they are divided by
            a weight, which is then an input of the update.
        grad_norm: whether the update also yields the norm of all gradients. The norm is a
            diagnostic, and does not count as a dependence between layers.
        traced: the optimizer, if it was traced before with the same arguments except `owners`.
        stacks: which leaves of `params` are slices of a stack, if the optimizer sees the stacks;
            None if it sees the leaves of `params`.
        frozen: leaves that the optimizer does not see. Parameters that the optimizer itself leaves
            unchanged are found and frozen as well.

    Raises:
        ValueError: the optimizer mixes large arrays of several layers, or needs more than
            gradients, state and parameters.

    >>> import jax.numpy as jnp
    >>> params = {"a": jnp.ones(3), "b": jnp.ones(3)}
    >>> import optax
    >>> optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    >>> cut = cut_optimizer(optimizer, params, owners=[0, 1], readers=[1, 1], microbatches=4)
    >>> [(piece.layer, piece.phase) for piece in cut.update]
    [(0, 0), (1, 0), (None, 0), (0, 1), (1, 1)]
    >>> [(str(slot.kind), slot.source, slot.dtype) for slot in cut.update[0].writes]
    [('partial', 0, 'float32')]
    >>> cut.cross_layer
    ('clip_by_global_norm',)
    """
    if traced is None:
        options: Any = {"grad_norm": grad_norm, "stacks": stacks, "frozen": frozen}
        traced = trace_stacked(
            optimizer,
            params,
            readers,
            microbatches,
            **options,
        )
    update, init = _programs(
        traced,
        readers,
        weighted=microbatches is None,
        grad_norm=grad_norm,
    )
    of_leaf = list(map(Input, owners, _names(params, stacks)))
    homes = _homes(update, init, traced, of_leaf)
    layers = _updated(traced, owners)
    try:
        flow, homes = _settled(update, homes, layers)
    except ValueError as error:
        if not stacks:
            raise
        raise ValueError(f"{error}. {PER_LAYER}") from error
    # `init` has to make each leaf of the state in all homes in which the update has it.
    first = replace(init.flow(homes, flow.layers), shared=flow.shared)
    _check(first, homes)
    return OptimizerCut(
        init=first.pieces(),
        update=flow.pieces(),
        state=_state_leaves(update, traced, homes),
        state_tree=traced.state_tree,
        cross_layer=_cross_layer(flow),
    )


def _homes(
    update: "_Program",
    init: "_Program",
    traced: TracedOptimizer,
    of_leaf: Sequence[Input],
) -> dict[Slot, Input]:
    """Returns the homes of slots: parameters, with their gradients and state, belong to layers.

    Args:
        update: the update, with the slots that it takes and yields.
        init: `init`, with its slots.
        traced: says which parameter each leaf of the state belongs to.
        of_leaf: the home of each parameter.
    """
    gradients = [slot for slot in update.inputs if slot.kind is SlotKind.GRADIENT]
    homes = {slot: of_leaf[slot.index] for slot in (*gradients, *init.inputs)}
    states = update.of_kind(SlotKind.STATE)
    for slot, leaf in zip(states, traced.parameter_of, strict=True):
        if leaf is not None:
            homes[slot] = of_leaf[leaf]
    # The norm is a number about all layers, which the global program yields.
    for slot in update.of_kind(SlotKind.GRAD_NORM):
        homes[slot] = Input("global")
    return homes


def _state_leaves(
    update: "_Program",
    traced: TracedOptimizer,
    homes: Mapping[Slot, Input],
) -> tuple[StateLeaf, ...]:
    slots = update.of_kind(SlotKind.STATE)
    leaves = []
    for array, slot, parameter in zip(traced.state, slots, traced.parameter_of, strict=True):
        home = homes.get(slot, _EVERYWHERE).home
        owner = home if isinstance(home, int) else None
        leaves.append(StateLeaf(array, owner, parameter))
    return tuple(leaves)


def laid_state(
    cut: OptimizerCut,
    parameters: Sequence[Parameter],
    sharding: Sharding,
) -> OptimizerCut:
    """Returns the same optimizer, with its state cut over the devices of a mesh.

    State that belongs to a parameter and has the parameter's shape is cut as the parameter is.
    Other state stays whole.

    Args:
        cut: the optimizer.
        parameters: the parameters, with the axes along which they are cut.
        sharding: the rules by which arrays are cut.
    """

    def laid(leaf: StateLeaf) -> StateLeaf:
        if leaf.parameter is None:
            return leaf
        parameter = parameters[leaf.parameter].array
        # State of another shape, such as a factored moment, stays whole on each device.
        if parameter.shape != leaf.array.shape:
            return leaf
        return replace(leaf, array=sharding.laid(leaf.array, parameter.spec))

    return replace(cut, state=tuple(map(laid, cut.state)))


_EVERYWHERE = Input("everywhere")


@dataclass(frozen=True)
class _Program:
    """A traced function whose inputs and results have names."""

    closed: ClosedJaxpr
    inputs: tuple[Slot, ...]
    results: tuple[Slot, ...]

    def of_kind(self, kind: SlotKind) -> list[Slot]:
        """Returns the results of a kind."""
        return [slot for slot in self.results if slot.kind is kind]

    def outputs(self, homes: Mapping[Slot, Input]) -> list[Output]:
        """Returns the results, each with its home; a slot that `homes` lacks is everywhere."""
        named = zip(self.closed.jaxpr.outvars, self.results, strict=True)
        return [Output(atom, homes.get(slot, _EVERYWHERE).home, slot) for atom, slot in named]

    def origins(self, homes: Mapping[Slot, Input]) -> dict[Var, Input]:
        """Returns the home of each input; constants and slots that `homes` lacks are everywhere."""
        named = zip(self.closed.jaxpr.invars, self.inputs, strict=True)
        constants = dict.fromkeys(self.closed.jaxpr.constvars, _EVERYWHERE)
        inputs = {var: homes.get(slot, _EVERYWHERE) for var, slot in named}
        return constants | inputs

    def placed(self, homes: Mapping[Slot, Input]) -> tuple["_Program", Placement]:
        """Places all equations; a scan over several layers is split first into one per layer.

        After a split everything is placed again. The recursion ends, because the parts of a split
        scan work on one layer each, so they are not split again.
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
            return jaxprs.evaluate(self.closed, values, apply)

        closed = flatten(run, *self.closed.in_avals)
        return replace(self, closed=closed).placed(homes)

    def flow(self, homes: Mapping[Slot, Input], layers: Sequence[int]) -> Flow:
        """Returns the placed equations, with the slots of inputs and results, for some layers."""
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


def _names(params: Any, stacks: Stacks | None) -> list[str]:
    """Returns the names of the parameters; a slice has the name of the stack that it belongs to."""
    if not stacks:
        return [path_name(path) for path in paths_of(params)]
    joined = stacks.join(params, lambda *slices: slices[0])
    names: list[str] = []
    for path, length in zip(paths_of(joined), stacks.lengths, strict=True):
        slices = 1 if length is None else length
        names += [path_name(path)] * slices
    return names


def _updated(traced: TracedOptimizer, owners: Sequence[int]) -> list[int]:
    """Returns the layers of an update: owners of parameters that it changes or has state for."""
    changed = set(range(len(owners))) - traced.frozen
    with_state = {i for i in traced.parameter_of if i is not None}
    return sorted({owners[i] for i in changed | with_state})


def _programs(
    traced: TracedOptimizer,
    readers: Sequence[int],
    *,
    weighted: bool,
    grad_norm: bool,
) -> tuple[_Program, _Program]:
    """Returns a traced optimizer's update and init, with the slots of their inputs and results."""
    gradients: list[Slot] = []
    for leaf, count in enumerate(readers):
        gradients += [Slot(SlotKind.GRADIENT, leaf, reader) for reader in range(count)]
    weight = [Slot(SlotKind.WEIGHT)] if weighted else []
    parameters = tuple(Slot(SlotKind.PARAMETER, leaf) for leaf in range(len(readers)))
    state = tuple(Slot(SlotKind.STATE, leaf) for leaf in range(len(traced.state)))
    norm = [Slot(SlotKind.GRAD_NORM)] if grad_norm else []
    inputs = (*gradients, *weight, *parameters, *state)
    results = (*parameters, *state, *norm)
    update = _Program(traced.update, inputs, results)
    return update, _Program(traced.init, parameters, state)


def _settled(
    update: _Program,
    homes: Mapping[Slot, Input],
    layers: Sequence[int],
) -> tuple[Flow, dict[Slot, Input]]:
    """Places an update, again and again until the homes of the state no longer change.

    Placing may show that a leaf of state is a single layer's. With this leaf at its layer, other
    equations may get other places, so everything is placed again. The rounds end, because each
    gives another leaf to a layer, and a leaf that has a layer keeps it.

    Args:
        update: the traced update.
        homes: the homes that are known.
        layers: the layers that own parameters.

    Returns:
        The placed update, and all homes.
    """
    homes = dict(homes)
    flow = update.flow(homes, layers)
    claims = _claims(flow)
    # With the claimed leaves placed, further leaves may turn out to be a single layer's.
    while claims:
        homes |= claims
        flow = update.flow(homes, layers)
        claims = _claims(flow)
    _check(flow, homes)
    # The global program has copies of the shared state that it reads. To update these copies, it
    # may read further shared state. The rounds end, because each makes another leaf shared.
    while (shared := _read_globally(flow)) != flow.shared:
        flow = replace(flow, shared=shared)
    return flow, homes


def _claims(flow: Flow) -> dict[Slot, Input]:
    """Returns the state that belongs to no parameter, but that one layer alone makes and reads."""
    maker: dict[Slot, int] = {}
    for out in flow.outputs:
        home = flow.placement.of(out.atom).home
        if out.home == "everywhere" and isinstance(home, int):
            maker[out.slot] = home
    # A result in `maker` has no home yet. If it were one of `others`, it would count as needed
    # everywhere. So would the values that it is made of, such as its leaf before the update.
    others = [out for out in flow.outputs if out.slot not in maker]
    goes_to = destinations(flow.eqns, others)
    variables = {slot: var for var, slot in flow.inputs.items()}
    claims: dict[Slot, Input] = {}
    for slot, home in maker.items():
        reader = goes_to.get(variables[slot], home)
        if reader == home:
            claims[slot] = Input(home)
    return claims


def _check(flow: Flow, homes: Mapping[Slot, Input]) -> None:
    inputs = {var: homes.get(slot, _EVERYWHERE) for var, slot in flow.inputs.items()}
    check_owned(flow.eqns, inputs, flow.outputs, flow.placement)


def _read_globally(flow: Flow) -> frozenset[Slot]:
    """Returns the state of which each layer has a copy and which the global program reads, too."""
    read = set()
    for v, slot in flow.inputs.items():
        is_copied = flow.placement.of(v).home == "everywhere"
        if slot.kind is not SlotKind.STATE or not is_copied:
            continue
        if "global" in flow.readers[v]:
            read.add(slot)
    return frozenset(read)


def _cross_layer(flow: Flow) -> tuple[str, ...]:
    """Returns the transformations that use the values of one layer for results of another."""
    results = [out for out in flow.outputs if out.slot.kind is not SlotKind.GRAD_NORM]
    # If one layer makes a result that another one needs, the result crosses layers, even if its
    # equation reads values of one layer only.
    relayed: set[Atom] = set()
    for out in results:
        maker = flow.placement.of(out.atom).home
        if maker not in (out.home, "everywhere", "global"):
            relayed.add(out.atom)
    names: dict[str, None] = {}
    for eqn in jaxprs.prune(flow.eqns, [out.atom for out in results]):
        home = flow.placement.of(eqn.outvars[0]).home
        operands = {flow.placement.of(atom).home for atom in eqn.invars}
        reads_others = any(isinstance(layer, int) for layer in operands - {home})
        if reads_others or not relayed.isdisjoint(eqn.outvars):
            names[transformation(eqn) or "the optimizer"] = None
    return tuple(names)
