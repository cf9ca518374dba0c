"""Losses of Flax NNX modules: dropout draws again for each micro-batch, running statistics are kept.

A module of NNX holds parameters, statistics and streams of random numbers in one object. A pipeline
wants them apart:

    parameters    what is trained             `NnxLoss.init`
    model state   statistics of batch norm    `NnxLoss.model_state`, carried from micro-batch to micro-batch
    streams       keys of dropout             derived from the key of the micro-batch, so that a resumed run draws alike
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
    model_fn: Callable[[nnx.Rngs], nnx.Module], loss_fn: Callable[[Any, Any], Any]
) -> "NnxLoss":
    """Makes what a pipeline trains of a module of NNX and a loss that calls it.

    Args:
        model_fn: builds the module, `model_fn(rngs)`.
        loss_fn: `loss_fn(module, batch)` gives the loss of a micro-batch, a number or a
            `jvpipe.Weighted`. The module is in training mode, or as after `module.eval()` where the
            pipeline evaluates.

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
    """A loss of parameters, a batch and a key; with `has_state` a model state stands after the parameters.

    It is what `Pipeline` takes: `Pipeline(made, optimizer, has_state=made.has_state)`, then
    `pipe.init(made.init, batch, key, made.model_state(key))`.
    """

    model_fn: Callable[[nnx.Rngs], nnx.Module]
    loss_fn: Callable[[Any, Any], Any]

    def init(self, key: jax.Array) -> dict[Any, Any]:
        """Draws the parameters: nested dicts of arrays, by the paths of the module."""
        _, params, _, _ = self._split(self.model_fn(nnx.Rngs(key)))
        return nnx.to_pure_dict(params)

    def model_state(self, key: jax.Array) -> dict[Any, Any] | None:
        """Makes what is neither trained nor drawn, such as running statistics.

        Returns None if there is nothing.
        """
        _, _, _, state = self._split(self.model_fn(nnx.Rngs(key)))
        return nnx.to_pure_dict(state) if self.has_state else None

    @property
    def has_state(self) -> bool:
        """Whether the module has a state beside its parameters."""
        _, _, _, state = self._structure
        return bool(jax.tree.leaves(state))

    def module(self, params: Tree, model_state: Tree = None, rng: jax.Array | None = None) -> Any:
        """Builds the module with these parameters and this state, in training mode if there is a key."""
        graph, _, streams, _ = self._structure
        module = nnx.merge(graph, params, _streams(streams, rng), model_state or {}, copy=True)
        module.eval() if rng is None else module.train()
        return module

    def __call__(self, params: Tree, *others: Any) -> Any:
        """Computes the loss; with a model state, which then stands behind `params`, also the new one."""
        *model_state, batch, rng = others
        module = self.module(params, model_state[0] if model_state else None, rng)
        value = self.loss_fn(module, batch)
        if not self.has_state:
            return value
        _, _, _, state = self._split(module)
        return value, nnx.to_pure_dict(state)

    @cached_property
    def _structure(self) -> Any:
        """The module without arrays: its graph, and the shapes of parameters, streams and state."""
        return self._split(nnx.eval_shape(lambda: self.model_fn(nnx.Rngs(0))))

    @staticmethod
    def _split(module: nnx.Module) -> Any:
        """Takes a module apart: its graph, parameters, streams of random numbers, and all else."""
        return nnx.split(module, nnx.Param, nnx.RngState, ...)


def _streams(shapes: Any, rng: jax.Array | None) -> Any:
    """Returns the streams of random numbers, each at its beginning, with a key of its own."""
    leaves, tree = jax.tree.flatten(shapes)
    key = jax.random.key(0) if rng is None else rng

    def leaf(i: int, shape: Any) -> jax.Array:
        if is_key(shape):
            return jax.random.fold_in(key, i)
        return jnp.zeros(shape.shape, shape.dtype)  # how many were drawn

    return jax.tree.unflatten(tree, [leaf(i, shape) for i, shape in enumerate(leaves)])
