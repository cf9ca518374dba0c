"""An optimizer cut into pieces that run where their operands live.

`optimizer.update` and `init` are traced over the whole tree of parameters. Every parameter has an owner, a layer; so
has the state that belongs to it. Each equation runs with the layer that its operands belong to. What mixes layers, a
global norm say, runs in a global program between two rounds of the layers' own.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax

from jvpipe import _jax
from jvpipe._jax import ClosedJaxpr, JaxprEqn, TreeDef, Var
from jvpipe.ir.layers import Array, Parameter
from jvpipe.ir.optimizer import Optimizer
from jvpipe.ir.paths import path_name
from jvpipe.ir.sharding import Sharding
from jvpipe.programs.flow import Flow
from jvpipe.programs.optimizer_trace import (
    TracedOptimizer,
    evaluate,
    paths_of,
    scope,
    transformation,
)
from jvpipe.programs.ownership import Input, Output, Placement, check_outputs, destinations, place
from jvpipe.programs.pieces import Piece, Slot, SlotKind
from jvpipe.programs.stacked_trace import trace_stacked
from jvpipe.trace import jaxprs
from jvpipe.trace.flatten import flatten
from jvpipe.trace.stacks import Stacks

PER_LAYER = (
    'With Pipeline(stacked="per_layer") it sees each layer of those that the loss scans over alone'
)


@dataclass(frozen=True)
class StateLeaf:
    """A leaf of the optimizer's state and the layer that owns it; None: every layer has a copy of its own.

    `parameter` is the one that it belongs to, if to any.
    """

    array: Array
    owner: int | None
    parameter: int | None


@dataclass(frozen=True)
class OptimizerCut:
    """An optimizer in pieces; those of `init` and of `update` can run in the order in which they stand.

    Parameters and state belong to the layer of the piece that reads or writes them: replicated state has a copy per
    layer, and one for the global program if this reads it. All other slots mean the same array to every piece.
    A leaf that no piece of `update` writes stays as it is. `cross_layer` names the transformations through which a
    layer's update depends on other layers.
    """

    init: tuple[Piece, ...]
    update: tuple[Piece, ...]
    state: tuple[StateLeaf, ...]
    state_tree: TreeDef
    cross_layer: tuple[str, ...]

    @cached_property
    def holders(self) -> frozenset[tuple[int, int | None]]:
        """Pairs of a leaf of the state and a layer (None: the global program) that has it, as its own or a copy."""
        pieces = (*self.init, *self.update)
        slots = ((piece.layer, slot) for piece in pieces for slot in (*piece.reads, *piece.writes))
        return frozenset(
            (slot.index, layer) for layer, slot in slots if slot.kind is SlotKind.STATE
        )

    def held_by(self, layer: int | None) -> tuple[int, ...]:
        """The leaves of the state that a layer, or the global program, has."""
        return tuple(sorted(i for i, holder in self.holders if holder == layer))


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
        readers: the number of layers that read each leaf: it has as many gradient accumulators. They are added
            in that order.
        microbatches: what the gradients are divided by; None if their weight is an input of the update.
        grad_norm: also yield the norm of all gradients; it counts as a diagnostic, not as a dependence of layers.
        traced: the optimizer, if it was traced before for all of these but the owners.
        stacks: arrays that the optimizer is to see, whose slices `params` has; None: it sees those.
        frozen: leaves that it does not see; what it freezes by itself is found.

    Raises:
        ValueError: the optimizer mixes large arrays of several layers, or needs more than gradients, state and
            parameters.

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
    traced = traced or trace_stacked(
        optimizer, params, readers, microbatches, grad_norm=grad_norm, stacks=stacks, frozen=frozen
    )
    update, init = _programs(traced, readers, weighted=microbatches is None, grad_norm=grad_norm)
    state, parameters = (
        [slot for slot in update.results if slot.kind is SlotKind.STATE],
        init.inputs,
    )
    gradients = [slot for slot in update.inputs if slot.kind is SlotKind.GRADIENT]
    norm = [slot for slot in update.results if slot.kind is SlotKind.GRAD_NORM]
    names = _names(params, stacks)
    of_leaf = [Input(owner, name) for owner, name in zip(owners, names, strict=True)]
    owned = {slot: of_leaf[slot.index] for slot in (*gradients, *parameters)}
    matches = zip(state, traced.parameter_of, strict=True)
    owned |= {slot: of_leaf[leaf] for slot, leaf in matches if leaf is not None}
    owned |= {slot: Input("global") for slot in norm}
    try:
        flow, owned = _settled(update, owned, _updated(traced, owners))
    except ValueError as error:
        if not stacks:
            raise
        raise ValueError(f"{error}. {PER_LAYER}") from error
    first = replace(init.flow(owned, flow.layers), shared=flow.shared)
    _check(first, owned)
    owner_of = {slot: given.home for slot, given in owned.items() if isinstance(given.home, int)}
    return OptimizerCut(
        first.pieces(),
        flow.pieces(),
        tuple(
            StateLeaf(array, owner_of.get(slot), parameter)
            for array, slot, parameter in zip(traced.state, state, traced.parameter_of, strict=True)
        ),
        traced.state_tree,
        _cross_layer(flow),
    )


def laid_state(
    cut: OptimizerCut, parameters: Sequence[Parameter], sharding: Sharding
) -> OptimizerCut:
    """The same optimizer, where state of the path and the shape of a parameter lies over devices as this does.

    Args:
        cut: the optimizer.
        parameters: as they lie.
        sharding: their rules.
    """

    def laid(leaf: StateLeaf) -> StateLeaf:
        own = None if leaf.parameter is None else parameters[leaf.parameter].array
        if own is None or own.shape != leaf.array.shape:
            return leaf
        return replace(leaf, array=sharding.laid(leaf.array, own.spec))

    return replace(cut, state=tuple(map(laid, cut.state)))


_EVERYWHERE = Input("everywhere")


@dataclass(frozen=True)
class _Program:
    """A traced function whose inputs and results have names."""

    closed: ClosedJaxpr
    inputs: tuple[Slot, ...]
    results: tuple[Slot, ...]

    def outputs(self, owned: Mapping[Slot, Input]) -> list[Output]:
        named = zip(self.closed.jaxpr.outvars, self.results, strict=True)
        return [Output(atom, owned.get(slot, _EVERYWHERE).home, slot) for atom, slot in named]

    def origins(self, owned: Mapping[Slot, Input]) -> dict[Var, Input]:
        named = zip(self.closed.jaxpr.invars, self.inputs, strict=True)
        constants = dict.fromkeys(self.closed.jaxpr.constvars, _EVERYWHERE)
        return constants | {var: owned.get(slot, _EVERYWHERE) for var, slot in named}

    def placed(self, owned: Mapping[Slot, Input]) -> tuple["_Program", Placement]:
        """Places all equations; scans over several layers are split first."""
        eqns = self.closed.jaxpr.eqns
        placement = place(eqns, self.origins(owned), self.outputs(owned))
        if not placement.splits:
            return self, placement
        splits = {id(eqns[i]): split for i, split in placement.splits.items()}

        def run(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
            with jax.named_scope(scope(eqn)):
                return splits[id(eqn)](values) if id(eqn) in splits else _jax.bind(eqn, values)

        closed = flatten(lambda *xs: evaluate(self.closed, xs, run), *self.closed.in_avals)
        return replace(self, closed=closed).placed(owned)

    def flow(self, owned: Mapping[Slot, Input], layers: Sequence[int]) -> Flow:
        program, placement = self.placed(owned)
        jaxpr, consts = program.closed.jaxpr, program.closed.consts
        constants = dict(zip(jaxpr.constvars, consts, strict=True))
        inputs = dict(zip(jaxpr.invars, self.inputs, strict=True))
        return Flow(jaxpr.eqns, constants, inputs, program.outputs(owned), placement, layers)


def _names(params: Any, stacks: Stacks | None) -> list[str]:
    """The names of the parameters, of each slice that of its stack if the optimizer sees this."""
    if not stacks:
        return [path_name(path) for path in paths_of(params)]
    given = paths_of(stacks.join(params, lambda *slices: slices[0]))
    return [
        path_name(path)
        for path, n in zip(given, stacks.lengths, strict=True)
        for _ in range(1 if n is None else n)
    ]


def _updated(traced: TracedOptimizer, owners: Sequence[int]) -> list[int]:
    """The layers that an update concerns: they own parameters that it changes, or have state that belongs to one."""
    changed = set(range(len(owners))) - traced.frozen
    return sorted({owners[i] for i in (*changed, *traced.parameter_of) if i is not None})


def _programs(
    traced: TracedOptimizer, readers: Sequence[int], *, weighted: bool, grad_norm: bool
) -> tuple[_Program, _Program]:
    """Names what a traced optimizer's update and its init take and give."""
    gradients = (
        Slot(SlotKind.GRADIENT, leaf, reader)
        for leaf, n in enumerate(readers)
        for reader in range(n)
    )
    weight = [Slot(SlotKind.WEIGHT)] if weighted else []
    parameters = tuple(Slot(SlotKind.PARAMETER, leaf) for leaf in range(len(readers)))
    state = tuple(Slot(SlotKind.STATE, leaf) for leaf in range(len(traced.state)))
    norm = [Slot(SlotKind.GRAD_NORM)] if grad_norm else []
    update = _Program(
        traced.update, (*gradients, *weight, *parameters, *state), (*parameters, *state, *norm)
    )
    return update, _Program(traced.init, parameters, state)


def _settled(
    update: _Program, owned: Mapping[Slot, Input], layers: Sequence[int]
) -> tuple[Flow, dict[Slot, Input]]:
    """Places an update until no layer claims more of the state and the global program reads no more of it.

    Args:
        update: the traced update.
        owned: what is known to belong to a layer.
        layers: those that own parameters.

    Returns:
        The update, placed, and what belongs to layers by then.
    """
    owned = dict(owned)
    flow = update.flow(owned, layers)
    while claims := _claims(flow):
        owned |= claims
        flow = update.flow(owned, layers)
    _check(flow, owned)
    while (shared := _read_globally(flow)) != flow.shared:
        flow = replace(flow, shared=shared)
    return flow, owned


def _claims(flow: Flow) -> dict[Slot, Input]:
    """State that matches no parameter's path but is made of one layer's values and read by that layer alone."""
    made = {
        out.slot: flow.placement.of(out.atom).home
        for out in flow.outputs
        if out.home == "everywhere"
    }
    made = {slot: home for slot, home in made.items() if isinstance(home, int)}
    goes_to = destinations(flow.eqns, [out for out in flow.outputs if out.slot not in made])
    variables = {slot: var for var, slot in flow.inputs.items()}
    return {
        slot: Input(home)
        for slot, home in made.items()
        if goes_to.get(variables[slot], home) == home
    }


def _check(flow: Flow, owned: Mapping[Slot, Input]) -> None:
    inputs = {var: owned.get(slot, _EVERYWHERE) for var, slot in flow.inputs.items()}
    check_outputs(flow.eqns, inputs, flow.outputs, flow.placement)


def _read_globally(flow: Flow) -> frozenset[Slot]:
    """The replicated state that the global program reads."""
    copied = {v: slot for v, slot in flow.inputs.items() if slot.kind is SlotKind.STATE}
    copied = {v: slot for v, slot in copied.items() if flow.placement.of(v).home == "everywhere"}
    return frozenset(slot for v, slot in copied.items() if "global" in flow.readers[v])


def _cross_layer(flow: Flow) -> tuple[str, ...]:
    """The transformations that read one layer's values for another layer's sake."""
    wanted = [out for out in flow.outputs if out.slot.kind is not SlotKind.GRAD_NORM]
    relayed = {
        out.atom
        for out in wanted
        if flow.placement.of(out.atom).home not in (out.home, "everywhere", "global")
    }
    names: dict[str, None] = {}
    for eqn in jaxprs.prune(flow.eqns, [out.atom for out in wanted]):
        home = flow.placement.of(eqn.outvars[0]).home
        homes = {flow.placement.of(atom).home for atom in eqn.invars}
        if any(isinstance(h, int) and h != home for h in homes) or not relayed.isdisjoint(
            eqn.outvars
        ):
            names[transformation(eqn) or "the optimizer"] = None
    return tuple(names)
