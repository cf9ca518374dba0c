"""Traces a user's loss, splits stacked parameters into slices, and cuts the loss into layers."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import jax

from jvpipe.ir.layers import Spec
from jvpipe.ir.reductions import Reductions
from jvpipe.ir.sharding import Sharding, words
from jvpipe.trace.deferred_state import deferred
from jvpipe.trace.graph import Traced, build_graph
from jvpipe.trace.loss import LossJaxpr, trace_loss
from jvpipe.trace.reshaped import reshaped
from jvpipe.trace.stacks import Stacks, find_stacks
from jvpipe.util.paths import path_names

Tree = Any


@dataclass(frozen=True)
class Model:
    """A traced loss, cut into layers.

    Attributes:
        traced: the layers.
        stacks: which leaves of the user's parameters are stacks of layers.
        params: the parameters, with each stack split into the slices that layers read.
    """

    traced: Traced
    stacks: Stacks
    params: Tree


def trace_model(
    loss_fn: Callable[..., Any],
    params: Tree,
    micro_batch: Tree,
    rng: jax.Array | None,
    model_state: Tree = None,
    present: Traced | None = None,
    *,
    stacks: Stacks | None = None,
    has_aux: bool = False,
    has_state: bool = False,
    sharding: Sharding | None = None,
    reductions: Reductions = Reductions(),  # noqa: B008 - it is frozen
    deferred_over: int = 1,
    whole_layers: bool = False,
    is_trained: bool = True,
) -> Model:
    """Traces a loss at the shapes of a micro-batch, and cuts it into layers.

    Args:
        loss_fn: as `jvpipe.Pipeline` takes it.
        params: a tree of arrays or shapes.
        micro_batch: a tree of arrays or shapes.
        rng: a key, or None.
        model_state: the model state; used only with `has_state`.
        present: the layers of the loss at the shapes of another batch, to cut the loss into the
            same layers; None to choose the cuts from scratch.
        stacks: the parameters to split into slices, one per layer; None to split each parameter
            that is read only by scans over layers.
        has_aux: whether the loss returns aux besides its value.
        has_state: whether the loss takes the model state and returns a new one.
        sharding: how parameters are cut over the devices of a place (a device, or a mesh of several
            devices); None if each place is one device.
        reductions: the user's choice of how leaves of aux and of the model state are reduced.
        deferred_over: k if the running statistics of batch norms change once in k micro-batches,
            at the last of the k; 1 if they change in every micro-batch.
        whole_layers: whether layers are recomputed by their own forward programs.
        is_trained: whether the loss has to have a gradient for at least one parameter.

    Raises:
        ValueError: `sharding` does not fit the parameters, or a layer would read other parameters
            than the same layer of `present` does.
    """
    # The specs are made first, because the slices of stacks replace `params` below.
    specs = {} if sharding is None else _specs(sharding, params)
    kinds: Any = {"has_aux": has_aux, "has_state": has_state, "is_trained": is_trained}
    trace = partial(
        trace_loss, batch=micro_batch, rng=rng, state=model_state, reductions=reductions, **kinds
    )
    loss, stacks, params = _of_layers(trace, loss_fn, params, stacks)
    loss = replace(deferred(loss, deferred_over), whole_layers=whole_layers)
    if sharding is not None:
        loss = _sharded(loss, sharding, specs, stacks)
    traced = reshaped(loss, present) if present else build_graph(loss)
    return Model(traced, stacks, params)


def _of_layers(
    trace: Callable[[Callable[..., Any], Tree], LossJaxpr],
    loss_fn: Callable[..., Any],
    params: Tree,
    stacks: Stacks | None,
) -> tuple[LossJaxpr, Stacks, Tree]:
    """Traces a loss in which each slice of a stack is a parameter.

    Args:
        trace: traces a loss with parameters.
        loss_fn: the user's loss.
        params: the user's parameters.
        stacks: which of them are stacks; None to find them.

    Returns:
        The loss, the stacks, and the parameters with slices in place of stacks.
    """
    if stacks is None:
        loss = trace(loss_fn, params)
        stacks = find_stacks(loss, params)
        if not stacks:
            return loss, stacks, params
    if not stacks:
        return trace(loss_fn, params), stacks, params
    # Each slice becomes a parameter, so the loss has to be traced again.
    slices = stacks.split(params)
    return trace(stacks.of_slices(loss_fn), slices), stacks, slices


def _specs(sharding: Sharding, params: Tree) -> dict[str, Spec]:
    """Returns how each parameter is cut over the devices of a place, by the parameter's path."""
    shapes = [tuple(leaf.shape) for leaf in jax.tree.leaves(params)]
    return sharding.specs(dict(zip(path_names(params), shapes, strict=True)))


def _sharded(
    loss: LossJaxpr,
    sharding: Sharding,
    specs: dict[str, Spec],
    stacks: Stacks,
) -> LossJaxpr:
    """Returns a loss whose parameters are cut over the devices of a place.

    Args:
        loss: the loss, whose parameters are the slices of stacks.
        sharding: how parameters are cut.
        specs: how each of the user's parameters is cut, by its path.
        stacks: which of the user's parameters are stacks.
    """
    slices = map(_of_slices, specs.keys(), specs.values(), stacks.lengths)
    return replace(
        loss,
        sharding=sharding,
        specs=tuple(chain.from_iterable(slices)),
    )


def _of_slices(path: str, spec: Spec, length: int | None) -> tuple[Spec, ...]:
    """Returns the specs of a stack's slices, or the one spec of a parameter without slices.

    Args:
        path: the path of the user's parameter.
        spec: along which axes of a place its dimensions are cut.
        length: the number of slices; None if the parameter is not a stack.

    Raises:
        ValueError: a stack is cut along its first dimension, which counts the slices.
    """
    if length is None:
        return (spec,)
    if spec and spec[0] is not None:
        raise ValueError(
            f"sharding {words(spec)} cuts parameter '{path}' along its first dimension, which "
            "counts the layers of a scan: begin with None"
        )
    return (spec[1:],) * length
