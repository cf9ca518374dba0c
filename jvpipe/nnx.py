"""Losses of Flax NNX modules, with dropout and running statistics, for a pipeline.

An NNX module holds its parameters, statistics and random streams in one object. A pipeline needs
the three parts separately:

    part           has                         comes from
    parameters     the trained arrays          `NnxLoss.init`
    model state    statistics of batch norm    `NnxLoss.model_state`, then the previous micro-batch
    streams        keys of dropout             the key of the micro-batch

A stream is a key and a count of the numbers drawn from it. Streams are made again from the key of
each micro-batch. So each micro-batch has its own dropout masks, and a resumed run draws the same
masks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from jvpipe.trace.keys import is_key
from jvpipe.util.extras import extra

with extra("models"):
    from flax import nnx

Tree = Any


def loss(
    model_fn: Callable[[nnx.Rngs], nnx.Module],
    loss_fn: Callable[[Any, Any], Any],
) -> "NnxLoss":
    """Makes a loss for a pipeline from an NNX module and a function that calls the module.

    Args:
        model_fn: builds the module, `model_fn(rngs)`.
        loss_fn: `loss_fn(module, batch)` returns the loss of a micro-batch, as a number or a
            `jvpipe.Weighted`. The module is in training mode in training steps, and in evaluation
            mode (`module.eval()`) in `pipe.evaluate`.

    >>> def build(rngs):
    ...     return nnx.Sequential(nnx.Linear(4, 4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))
    >>> def squares(module, batch):
    ...     return jnp.mean(module(batch) ** 2)
    >>> made = loss(build, squares)
    >>> made.has_state
    False
    >>> params = made.init(jax.random.key(0))
    >>> halves = [made(params, jnp.ones((2, 4)), jax.random.key(i)) for i in (1, 2)]
    >>> bool(halves[0] == halves[1])
    False
    """
    return NnxLoss(model_fn, loss_fn)


@dataclass(frozen=True)
class NnxLoss:
    """A loss of (params, batch, rng), or of (params, model_state, batch, rng) with `has_state`.

    For an `NnxLoss` named `made`, call `Pipeline(made, optimizer, has_state=made.has_state)`, and
    then `pipe.init(made.init, batch, key, made.model_state(key))`.
    """

    model_fn: Callable[[nnx.Rngs], nnx.Module]
    loss_fn: Callable[[Any, Any], Any]

    def init(self, key: jax.Array) -> dict[Any, Any]:
        """Returns new parameters: nested dicts of arrays, by the paths of the module."""
        module = self.model_fn(nnx.Rngs(key))
        _, params, _, _ = self._split(module)
        return nnx.to_pure_dict(params)

    def model_state(self, key: jax.Array) -> dict[Any, Any] | None:
        """Returns the arrays that are neither parameters nor streams, such as running statistics.

        Returns None if the module has no such arrays.
        """
        module = self.model_fn(nnx.Rngs(key))
        _, _, _, state = self._split(module)
        return nnx.to_pure_dict(state) if self.has_state else None

    @property
    def has_state(self) -> bool:
        """Whether the module has a model state, such as running statistics."""
        _, _, _, state = self._structure
        return bool(jax.tree.leaves(state))

    def module(
        self,
        params: Tree,
        model_state: Tree = None,
        rng: jax.Array | None = None,
    ) -> Any:
        """Builds the module, in training mode if a key is given, and otherwise in evaluation mode.

        Args:
            params: the parameters.
            model_state: the model state, if the module has one.
            rng: the key from which the random streams are derived.
        """
        graph, _, streams, _ = self._structure
        # With `copy`, the module has variables of its own. So batch norm and dropout, which change
        # variables, leave the arguments as they are.
        module = nnx.merge(
            graph,
            params,
            _streams(streams, rng),
            model_state or {},
            copy=True,
        )
        module.eval() if rng is None else module.train()
        return module

    def __call__(self, params: Tree, *others: Any) -> Any:
        """Computes the loss; with `has_state`, returns it with the new model state."""
        *model_state, batch, rng = others
        module = self.module(params, model_state[0] if model_state else None, rng)
        value = self.loss_fn(module, batch)
        if not self.has_state:
            return value
        _, _, _, state = self._split(module)
        return value, nnx.to_pure_dict(state)

    @cached_property
    def _structure(self) -> Any:
        """The module's graph, and the shapes of its parameters, streams and model state."""
        module = nnx.eval_shape(lambda: self.model_fn(nnx.Rngs(0)))
        return self._split(module)

    @staticmethod
    def _split(module: nnx.Module) -> Any:
        """Splits a module into its graph, parameters, random streams, and model state."""
        return nnx.split(module, nnx.Param, nnx.RngState, ...)


def _streams(shapes: Any, rng: jax.Array | None) -> Any:
    """Returns the random streams in their initial state, with keys derived from `rng`.

    Without `rng`, the module is in evaluation mode. The keys are then derived from a fixed key.
    """
    leaves, tree = jax.tree.flatten(shapes)
    key = jax.random.key(0) if rng is None else rng

    arrays = []
    for i, shape in enumerate(leaves):
        if is_key(shape):
            arrays.append(jax.random.fold_in(key, i))
        else:
            # Each of the other leaves counts the numbers that a stream has drawn so far.
            arrays.append(jnp.zeros(shape.shape, shape.dtype))
    return jax.tree.unflatten(tree, arrays)
