"""A model made ready for planning and running: its loss traced, layers stacked for a scan taken apart, cut."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypedDict

import jax

from jvpipe.ir.layers import Spec
from jvpipe.ir.paths import path_names
from jvpipe.ir.reductions import Reductions
from jvpipe.ir.sharding import Sharding, words
from jvpipe.trace.graph import Traced, build_graph
from jvpipe.trace.loss import trace_loss
from jvpipe.trace.reshaped import reshaped
from jvpipe.trace.stacks import Stacks, find_stacks

Tree = Any


class Returns(TypedDict):
    """What a loss returns beside its value, and how that is reduced."""

    has_aux: bool
    has_state: bool
    reductions: Reductions


@dataclass(frozen=True)
class Model:
    """A traced loss; `params` are its parameters with stacked leaves split into the slices that layers read."""

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
) -> Model:
    """Traces at the shapes of a micro-batch; `params` may be shapes alone.

    Args:
        loss_fn: as `jvpipe.Pipeline` takes it.
        params: arrays or shapes.
        micro_batch: arrays or shapes of one micro-batch.
        rng: a key, or None.
        model_state: with `has_state`.
        present: the model at the shapes of another batch, whose layers it is to have; None: it is cut anew.
        stacks: which parameters are split into layers; None: those that are stacked for a scan.
        has_aux: the loss returns `(loss, aux)`.
        has_state: the loss takes the model state and returns it.
        sharding: how parameters lie over the devices of a place, if there are several.
        reductions: what the user says of leaves of aux and of the model state.

    Raises:
        ValueError: the parameters cannot lie so, or not in the layers that the model has at present.
    """
    specs = {} if sharding is None else _specs(sharding, params)
    returns: Returns = {"has_aux": has_aux, "has_state": has_state, "reductions": reductions}
    loss = None
    if stacks is None:
        loss = trace_loss(loss_fn, params, micro_batch, rng, model_state, **returns)
        stacks = find_stacks(loss, params)
    if stacks:  # layers stacked for a scan become layers of their own
        params, loss_fn, loss = stacks.split(params), stacks.of_slices(loss_fn), None
    if loss is None:
        loss = trace_loss(loss_fn, params, micro_batch, rng, model_state, **returns)
    if sharding is not None:
        slices = (
            _of_slices(path, spec, n)
            for (path, spec), n in zip(specs.items(), stacks.lengths, strict=True)
        )
        loss = replace(loss, sharding=sharding, specs=tuple(chain.from_iterable(slices)))
    return Model(reshaped(loss, present) if present else build_graph(loss), stacks, params)


def _specs(sharding: Sharding, params: Tree) -> dict[str, Spec]:
    """How the parameters lie, by their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    paths = path_names([path for path, _ in leaves])
    return sharding.specs(
        {path: tuple(leaf.shape) for path, (_, leaf) in zip(paths, leaves, strict=True)}
    )


def _of_slices(path: str, spec: Spec, length: int | None) -> tuple[Spec, ...]:
    """How each slice of a parameter lies, if that is stacked for a scan over layers, else the parameter."""
    if length is None:
        return (spec,)
    if spec and spec[0] is not None:
        raise ValueError(
            f"sharding {words(spec)} cuts parameter '{path}' along its first dimension, which a scan over layers takes "
            "apart: begin with None"
        )
    return (spec[1:],) * length
