"""An optimizer cut into pieces, each of which runs with the layer whose arrays it reads.

`optimizer.update` and `optimizer.init` are traced over the whole tree of parameters. Every
parameter has an owner, which is a layer; the layer also owns the optimizer's state that belongs to
the parameter. Each traced equation runs with the layer that owns its operands. An equation that
mixes layers, such as the sum in a global norm, runs in a global program. The home of a value or an
equation is a layer, the global program, or "everywhere". A value that is everywhere has a copy in
each layer. The pieces of layers and the global program take turns, in phases. With clipping by the
global norm:

    phase    who          computes
    0        each layer   its sum of squares
    0        global       the norm
    1        each layer   clipped gradients, Adam's moments, new parameters

The cut decides where an equation runs, and never changes what the equation computes.

>>> import jax.numpy as jnp, optax
>>> params = {"a": jnp.ones(3), "b": jnp.ones(3)}
>>> optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
>>> cut = cut_optimizer(optimizer, params, owners=[0, 1], readers=[1, 1], microbatches=4)
>>> [(piece.layer, piece.phase) for piece in cut.update]
[(0, 0), (1, 0), (None, 0), (0, 1), (1, 1)]
>>> [(str(slot.kind), slot.source, slot.dtype) for slot in cut.update[0].writes]
[('partial', 0, 'float32')]
>>> cut.cross_layer
('clip_by_global_norm',)
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from jvpipe._jax import Atom, TreeDef
from jvpipe.ir.layers import Array, Parameter
from jvpipe.ir.optimizer import Optimizer
from jvpipe.ir.sharding import Sharding
from jvpipe.programs.flow import Flow
from jvpipe.programs.optimizer_trace import TracedOptimizer, paths_of
from jvpipe.programs.pieces import Piece, Slot, SlotKind
from jvpipe.programs.places import Input
from jvpipe.programs.slot_program import EVERYWHERE, SlotProgram, slot_programs
from jvpipe.programs.stacked_trace import trace_stacked
from jvpipe.programs.state_homes import check_homes, homes_of, settled_homes
from jvpipe.programs.transformations import transformation
from jvpipe.trace import jaxprs
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
        array: the leaf's name, shape and type.
        owner: the layer that owns the leaf; None if every layer has a copy.
        parameter: the parameter that the leaf belongs to, or None.
    """

    array: Array
    owner: int | None
    parameter: int | None


@dataclass(frozen=True)
class OptimizerCut:
    """An optimizer in pieces.

    A piece reads and writes slots, which are names of arrays. Most slots name the same array in
    every piece. The exception is state that belongs to no layer. Each layer has a copy of such
    state, and so has the global program if it reads the state. In a piece, the slot of such state
    names the copy of the layer, or of the global program, that runs the piece. A leaf that no piece
    of `update` writes stays unchanged.

    Attributes:
        init: the pieces that make the state, in an order in which they can run.
        update: the pieces of an update, in an order in which they can run.
        state: the leaves of the state.
        state_tree: the tree structure of the state, as the optimizer returns it.
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
        """Pairs of a leaf of the state and a layer that has the leaf or a copy of it.

        None stands for the global program in place of a layer.
        """
        holders = set()
        for piece in (*self.init, *self.update):
            for slot in (*piece.reads, *piece.writes):
                if slot.kind is SlotKind.STATE:
                    holders.add((slot.index, piece.layer))
        return frozenset(holders)

    def held_by(self, layer: int | None) -> tuple[int, ...]:
        """Returns the leaves of the state that a layer, or the global program (None), has."""
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
        microbatches: the number by which gradients are divided. If it is None, the update takes
            the divisor (a sum of weights) as an input.
        grad_norm: whether the update also yields the norm of all gradients. The norm is a
            diagnostic, and does not count as a dependence between layers.
        traced: the optimizer, if it was traced before with the same arguments except `owners`.
        stacks: which leaves of `params` are slices of stacks that the optimizer sees; None if the
            optimizer sees the leaves of `params`.
        frozen: leaves that the optimizer does not see. Parameters that the optimizer itself leaves
            unchanged are found and frozen as well.

    Raises:
        ValueError: the optimizer mixes large arrays of several layers, or needs more than
            gradients, state and parameters.
    """
    if traced is None:
        traced = trace_stacked(
            optimizer,
            params,
            readers,
            microbatches,
            grad_norm=grad_norm,
            stacks=stacks,
            frozen=frozen,
        )
    programs = slot_programs(
        traced,
        readers,
        weighted=microbatches is None,
        grad_norm=grad_norm,
    )
    names = _names(params, stacks)
    hint = f". {PER_LAYER}" if stacks else ""
    return _cut_traced(traced, programs, owners, names, hint)


def _cut_traced(
    traced: TracedOptimizer,
    programs: tuple[SlotProgram, SlotProgram],
    owners: Sequence[int],
    names: Sequence[str],
    hint: str,
) -> OptimizerCut:
    """Cuts a traced optimizer.

    Args:
        traced: the optimizer.
        programs: the optimizer's update and its init.
        owners: the layer that owns each parameter.
        names: the name of each parameter.
        hint: text to append to the error message if the optimizer cannot be cut.
    """
    update, init = programs
    of_leaf = list(map(Input, owners, names))
    homes = homes_of(update, init, traced, of_leaf)
    layers = _updated(traced, owners)
    try:
        flow, homes = settled_homes(update, homes, layers)
    except ValueError as error:
        if not hint:
            raise
        raise ValueError(f"{error}{hint}") from error
    # `init` makes each leaf of the state in all homes in which the update reads or writes the leaf.
    first = replace(init.flow(homes, flow.layers), shared=flow.shared)
    check_homes(first, homes)
    return OptimizerCut(
        init=first.pieces(),
        update=flow.pieces(),
        state=_state_leaves(update, traced, homes),
        state_tree=traced.state_tree,
        cross_layer=_cross_layer(flow),
    )


def _state_leaves(
    update: SlotProgram,
    traced: TracedOptimizer,
    homes: Mapping[Slot, Input],
) -> tuple[StateLeaf, ...]:
    """Returns the leaves of the state with their owners; leaves without an owner are everywhere."""
    slots = update.of_kind(SlotKind.STATE)
    leaves = []
    for array, slot, parameter in zip(traced.state, slots, traced.parameter_of, strict=True):
        home = homes.get(slot, EVERYWHERE).home
        owner = home if isinstance(home, int) else None
        leaves.append(StateLeaf(array, owner, parameter))
    return tuple(leaves)


def laid_state(
    cut: OptimizerCut,
    parameters: Sequence[Parameter],
    sharding: Sharding,
) -> OptimizerCut:
    """Returns the same optimizer, with its state cut over the devices of a mesh.

    State that belongs to a parameter and has the parameter's shape is cut like the parameter.
    Other state is not cut, so every device has a full copy.

    Args:
        cut: the optimizer.
        parameters: the parameters, with the axes along which they are cut.
        sharding: the rules by which arrays are cut.
    """

    def laid(leaf: StateLeaf) -> StateLeaf:
        if leaf.parameter is None:
            return leaf
        parameter = parameters[leaf.parameter].array
        # State of another shape, such as a factored moment, is not cut.
        if parameter.shape != leaf.array.shape:
            return leaf
        return replace(leaf, array=sharding.laid(leaf.array, parameter.spec))

    return replace(cut, state=tuple(map(laid, cut.state)))


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
    """Returns the layers of an update: the owners of parameters that change or that have state."""
    changed = set(range(len(owners))) - traced.frozen
    with_state = {i for i in traced.parameter_of if i is not None}
    return sorted({owners[i] for i in changed | with_state})


def _cross_layer(flow: Flow) -> tuple[str, ...]:
    """Returns the transformations that use values of one layer for results of another one.

    The norm of all gradients does not count as a result.
    """
    results = [out for out in flow.outputs if out.slot.kind is not SlotKind.GRAD_NORM]
    # A result that one layer makes and another layer needs crosses layers, even if the equation
    # that makes it reads values of only one layer.
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
