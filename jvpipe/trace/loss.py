"""A user's loss function as one flat jaxpr with named inputs and outputs.

Inputs are the leaves of parameters, model state and batch, the seed, and the arrays that the loss
captured. Outputs are the loss, the new model state and aux. A `Ref` names each input and
each output by kind and number, so that later passes know what a variable stands for.
"""

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jvpipe import _jax
from jvpipe._jax import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, TreeDef, Var
from jvpipe.ir.layers import Ref, Spec
from jvpipe.ir.reductions import AuxReduction, Reductions, StateReduction, chosen
from jvpipe.ir.sharding import Sharding
from jvpipe.ir.values import ValueKind
from jvpipe.ir.weighted import Weighted
from jvpipe.trace import jaxprs
from jvpipe.trace.batches import resized
from jvpipe.trace.chosen import chosen_aux
from jvpipe.trace.flat_loss import FlatLoss
from jvpipe.trace.keys import is_key, lift_key_constants
from jvpipe.trace.leaves import abstract
from jvpipe.trace.modules import check_modules
from jvpipe.util.devices import unshared
from jvpipe.util.paths import path_names

Tree = Any


@dataclass(frozen=True)
class LossJaxpr:
    """The loss of one micro-batch, as equations.

    Attributes:
        eqns: the equations, in order.
        inputs: the input variables, each with its `Ref`.
        outputs: the results, each with its `Ref`.
        names: for each kind of value, the paths of its leaves.
        constants: the arrays that the loss captured.
        weighted: whether the loss returns a total and a weight.
        aux_tree: the tree of aux, in which a `Weighted` is a leaf.
        aux_weighted: marks the leaves of aux that are `Weighted`.
        seed_words: the length of the seed vector (`KeyKind.seed`); 0 if the loss has no seed.
        of_size: traces the same loss on another number of examples.
        sharding: how parameters are cut over the devices of a place; None if a place is one device.
        specs: for each parameter, along which axes of a place its dimensions are cut.
        aux_chosen: for each leaf of aux, the reduction that the user chose, if any.
        state_chosen: for each leaf of the model state, the reduction that the user chose, if any.
        frozen: the numbers of the parameters that have no updates and need no gradients.
        whole_layers: whether layers are recomputed by their own forward programs.
    """

    eqns: tuple[JaxprEqn, ...]
    inputs: dict[Var, Ref]
    outputs: tuple[tuple[Atom, Ref], ...]
    names: dict[ValueKind, tuple[str, ...]]
    constants: tuple[Any, ...]
    weighted: bool
    aux_tree: TreeDef
    aux_weighted: tuple[bool, ...]
    seed_words: int
    of_size: Callable[[int], "LossJaxpr"] | None = field(
        default=None,
        compare=False,
        repr=False,
    )
    sharding: Sharding | None = None
    specs: tuple[Spec, ...] = ()
    aux_chosen: tuple[AuxReduction | None, ...] = ()
    state_chosen: tuple[StateReduction | None, ...] = ()
    frozen: frozenset[int] = frozenset()
    whole_layers: bool = False

    def inputs_of(self, kind: ValueKind) -> list[Var]:
        """Returns the variables of the inputs of a kind."""
        return [v for v, ref in self.inputs.items() if ref.kind is kind]

    def outputs_of(self, kind: ValueKind) -> list[Atom]:
        """Returns the atoms of the outputs of a kind."""
        return [atom for atom, ref in self.outputs if ref.kind is kind]

    @property
    def jaxpr(self) -> Jaxpr:
        """The whole loss as a jaxpr, to print or to compare."""
        results = [atom for atom, _ in self.outputs]
        return Jaxpr((), list(self.inputs), results, list(self.eqns))


def trace_loss(
    loss_fn: Callable[..., Any],
    params: Tree,
    batch: Tree,
    rng: jax.Array | None,
    state: Tree = None,
    *,
    has_aux: bool = False,
    has_state: bool = False,
    reductions: Reductions = Reductions(),  # noqa: B008 - it is frozen
    is_trained: bool = True,
) -> LossJaxpr:
    """Traces `loss_fn` at the shapes of one micro-batch.

    Args:
        loss_fn: as `jvpipe.Pipeline` takes it.
        params: arrays or `ShapeDtypeStruct`.
        batch: arrays or `ShapeDtypeStruct` of one micro-batch.
        rng: a PRNG key, typed or raw, or None.
        state: the model state; used only with `has_state`.
        has_aux: whether the loss returns aux besides its value.
        has_state: whether the loss takes the model state and returns a new one.
        reductions: the user's choice of how leaves of aux and of the model state are reduced.
        is_trained: whether the loss has to have a gradient for at least one parameter.

    Raises:
        ValueError: the loss is not a real scalar or depends on no parameter, or a reduction does
            not fit its leaf.
    """
    params, batch = abstract(params), abstract(batch, "batch leaf")
    state = abstract(state, "leaf of the model state")
    trees = {ValueKind.PARAMETER: params, ValueKind.STATE: state, ValueKind.BATCH: batch}
    names = {kind: path_names(tree) for kind, tree in trees.items()}
    check_modules(params)
    key = None if rng is None else KeyKind.of(rng)
    seed = None if key is None else key.seed
    key_of = None if key is None else key.micro_batch_key
    flat = FlatLoss(loss_fn, key_of, has_aux=has_aux, has_state=has_state)
    closed, loss_tree, aux_tree = flat.traced(params, state, batch, seed)
    traced = _labeled(closed, loss_tree, aux_tree, names, seed, reductions)
    if is_trained:
        _check_dependence(traced)
    returns: Any = {
        "has_aux": has_aux,
        "has_state": has_state,
        "reductions": reductions,
        "is_trained": is_trained,
    }

    @functools.cache  # called often, for the few sizes of the replicas' slices
    def of_size(examples: int) -> LossJaxpr:
        return trace_loss(loss_fn, params, resized(batch, examples), rng, state, **returns)

    return replace(traced, of_size=of_size)


def _labeled(
    closed: ClosedJaxpr,
    loss_tree: TreeDef,
    aux_tree: TreeDef,
    names: dict[ValueKind, tuple[str, ...]],
    seed: jax.ShapeDtypeStruct | None,
    reductions: Reductions,
) -> LossJaxpr:
    """Returns a traced loss with a `Ref` for each of its inputs and outputs.

    Args:
        closed: the loss, a function from the leaves of parameters, model state and batch, and from
            the seed, to the leaves of the loss, the model state and aux.
        loss_tree: the tree of the loss: one leaf, or the two of a `Weighted`.
        aux_tree: the tree of aux.
        names: the paths of the leaves of parameters, model state and batch, in this order.
        seed: the shape of the seed; None if the loss has none.
        reductions: the user's choice of how leaves of aux and of the model state are reduced.
    """
    # A number that a key is derived with, such as a layer's index, becomes an input. With a
    # literal, each layer would need a separate program.
    eqns, lifted = lift_key_constants(closed.jaxpr.eqns)
    constants = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True)) | lifted
    # The inputs are the leaves in the order of `names`, then the seed, if there is one, then the
    # arrays that the loss captured, then the lifted numbers.
    inputs = {kind: len(paths) for kind, paths in names.items()}
    inputs[ValueKind.SEED] = 0 if seed is None else 1
    inputs[ValueKind.CONSTANT] = len(constants)
    outputs = {
        ValueKind.LOSS: loss_tree.num_leaves,
        ValueKind.STATE: len(names[ValueKind.STATE]),
        ValueKind.AUX: aux_tree.num_leaves,
    }
    variables = [*closed.jaxpr.invars, *constants]
    results = closed.jaxpr.outvars
    of_aux = results[len(results) - aux_tree.num_leaves :]
    aux = aux_tree.unflatten(map(jaxprs.shape_of, of_aux))
    aux_paths, aux_parts = _leaves_of_aux(aux)
    return LossJaxpr(
        tuple(eqns),
        dict(zip(variables, _refs(inputs), strict=True)),
        tuple(zip(results, _refs(outputs), strict=True)),
        names,
        tuple(map(unshared, constants.values())),
        loss_tree.num_leaves == 2,
        jax.tree.structure(aux, is_leaf=_is_weighted),
        tuple(len(parts) == 2 for parts in aux_parts),
        0 if seed is None else seed.size,
        aux_chosen=chosen_aux(reductions, aux_paths, aux_parts),
        state_chosen=chosen("model_state_reduce", reductions.state, names[ValueKind.STATE]),
    )


def _leaves_of_aux(aux: Tree) -> tuple[tuple[str, ...], list[Any]]:
    """Returns the paths of the leaves of aux, and the values of each leaf: two for a `Weighted`."""
    leaves = jax.tree.leaves(aux, is_leaf=_is_weighted)
    return path_names(aux, is_leaf=_is_weighted), list(map(jax.tree.leaves, leaves))


def _refs(counts: dict[ValueKind, int]) -> list[Ref]:
    """Returns a `Ref` for each value, given the number of values of each kind."""
    refs = []
    for kind, count in counts.items():
        refs += [Ref(kind, i) for i in range(count)]
    return refs


def _is_weighted(x: Any) -> bool:
    return isinstance(x, Weighted)


@dataclass(frozen=True)
class KeyKind:
    """The form of a user's key: the shape of its words, and its implementation (None if raw)."""

    shape: tuple[int, ...]
    impl: str | None

    @staticmethod
    def of(rng: jax.Array) -> "KeyKind":
        """Returns the form of a key.

        >>> KeyKind.of(jax.random.key(0))
        KeyKind(shape=(2,), impl='threefry2x32')
        """
        impl = str(jax.random.key_impl(rng)) if is_key(rng) else None
        return KeyKind(key_words(rng).shape, impl)

    @property
    def seed(self) -> jax.ShapeDtypeStruct:
        """The shape of the seed vector: the key's words, then step and micro-batch."""
        return jax.ShapeDtypeStruct((int(np.prod(self.shape)) + 2,), np.uint32)

    def micro_batch_key(self, seed: jax.Array) -> jax.Array:
        """Returns `fold_in(fold_in(rng, step), microbatch)`, from a seed vector."""
        key = seed[:-2].reshape(self.shape)
        if self.impl is not None:
            key = jax.random.wrap_key_data(key, impl=self.impl)
        # The key depends on step and micro-batch, but not on the stage. So a model draws the same
        # numbers, however it is cut into stages.
        of_step = jax.random.fold_in(key, seed[-2])
        return jax.random.fold_in(of_step, seed[-1])


def key_words(rng: jax.Array) -> np.ndarray:
    """Returns a key's words, whether it is typed or raw."""
    return np.asarray(jax.random.key_data(rng) if is_key(rng) else rng)


def has_gradient(dtype: Any) -> bool:
    """Tells whether parameters of a type can be trained: inexact types of at least 16 bits.

    >>> [has_gradient(jnp.dtype(name)) for name in ("bfloat16", "float8_e4m3fn", "int8")]
    [True, False, False]
    """
    return jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize >= 2


def check_trained(traced: LossJaxpr) -> None:
    """Checks that trained parameters can have gradients, and that the loss depends on one.

    Raises:
        ValueError: a trained parameter is of a type without gradients, or the loss depends on no
            trained parameter.
    """
    for v, ref in traced.inputs.items():
        dtype = _jax.aval(v).dtype
        is_trained = ref.kind == ValueKind.PARAMETER and ref.index not in traced.frozen
        if not is_trained or has_gradient(dtype):
            continue
        name = traced.names[ValueKind.PARAMETER][ref.index]
        frozen = f"name it in frozen=, such as frozen=['{name}']"
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise ValueError(
                f"parameter '{name}' is of type {dtype}, which has no gradient: {frozen}, to leave "
                "it unchanged; or keep it in the model state (has_state=True), or capture it in "
                "the loss"
            )
        raise ValueError(
            f"parameter '{name}' is of type {dtype}, in which gradients cannot be added up: give "
            f"it as bfloat16 or wider, and cast it in the loss, or {frozen}"
        )
    moving = _moving(traced, _trainable(traced, traced.frozen))
    if traced.frozen and traced.outputs[0][0] not in moving:
        raise ValueError(
            f"the loss depends on no trained parameter ({len(traced.frozen)} frozen), so there is "
            "nothing to train. Leave some parameters out of frozen=, or let the optimizer update "
            "some"
        )


def _check_dependence(traced: LossJaxpr) -> None:
    parameters = traced.inputs_of(ValueKind.PARAMETER)
    moving = _moving(traced, parameters)
    total, *weight = traced.outputs_of(ValueKind.LOSS)
    if isinstance(total, _jax.Literal) or total not in moving:
        raise ValueError(
            "the loss depends on no parameter: there is nothing to train; "
            f"compute the loss from at least one of the {len(parameters)} arrays of parameters"
        )
    if not moving.isdisjoint(jaxprs.variables(weight)):
        raise ValueError(
            "the weight of jvpipe.Weighted depends on parameters: count items of the batch, or "
            "apply jax.lax.stop_gradient to the weight"
        )


def active(traced: LossJaxpr, frozen: Collection[int] = ()) -> set[Var]:
    """Returns the variables that a gradient flows through.

    Such a variable is of inexact type and depends on a parameter, and the loss depends on it. A
    trained parameter counts even if the loss does not read it.

    Args:
        traced: the loss.
        frozen: the numbers of the parameters whose gradient is not used.
    """
    # One walk goes back from the loss, one forward from the parameters. A gradient flows through
    # the variables that both reach.
    read = set(jaxprs.variables([traced.outputs[0][0]]))
    for eqn in reversed(traced.eqns):
        if eqn.primitive.name != "stop_gradient" and not read.isdisjoint(eqn.outvars):
            read.update(jaxprs.variables(eqn.invars))
    parameters = _trainable(traced, frozen)
    return parameters | (_moving(traced, parameters) & read)


def _trainable(traced: LossJaxpr, frozen: Collection[int]) -> set[Var]:
    """Returns the parameters that are not frozen and whose type can have a gradient."""
    trainable = set()
    for v in traced.inputs_of(ValueKind.PARAMETER):
        is_frozen = traced.inputs[v].index in frozen
        if not is_frozen and has_gradient(_jax.aval(v).dtype):
            trainable.add(v)
    return trainable


def _moving(traced: LossJaxpr, parameters: Collection[Var]) -> set[Var]:
    """Returns the given parameters and the inexact variables whose values depend on them."""
    moving = set(parameters)
    for eqn in traced.eqns:
        reads_moving = not moving.isdisjoint(jaxprs.variables(eqn.invars))
        if eqn.primitive.name == "stop_gradient" or not reads_moving:
            continue
        for v in eqn.outvars:
            if jnp.issubdtype(_jax.aval(v).dtype, jnp.inexact):
                moving.add(v)
    return moving
