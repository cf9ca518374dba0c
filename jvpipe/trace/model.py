"""A model made ready for planning and running: its loss traced, layers stacked for a scan taken apart, cut."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jvpipe.trace.graph import Traced, build_graph
from jvpipe.trace.loss import trace_loss
from jvpipe.trace.stacks import Stacks, find_stacks

Tree = Any


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
    cuts: Sequence[int] | None = None,
    splits: Sequence[int] = (),
    *,
    has_aux: bool = False,
    has_state: bool = False,
) -> Model:
    """Traces at the shapes of a micro-batch; `params` may be shapes alone.

    `cuts` and `splits` are those of an earlier trace.

    Args:
        loss_fn: as `jvpipe.Pipeline` takes it.
        params: arrays or shapes.
        micro_batch: arrays or shapes of one micro-batch.
        rng: a key, or None.
        model_state: with `has_state`.
        cuts: of an earlier trace; None: the narrow places.
        splits: of an earlier trace.
        has_aux: the loss returns `(loss, aux)`.
        has_state: the loss takes the model state and returns it.
    """
    loss = trace_loss(loss_fn, params, micro_batch, rng, model_state, has_aux=has_aux, has_state=has_state)
    stacks = find_stacks(loss, params)
    if stacks:  # layers stacked for a scan become layers of their own
        params, sliced = stacks.split(params), stacks.of_slices(loss_fn)
        loss = trace_loss(sliced, params, micro_batch, rng, model_state, has_aux=has_aux, has_state=has_state)
    return Model(build_graph(loss, cuts, splits), stacks, params)
