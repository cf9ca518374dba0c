"""Losses that compute in float16: their gradients are scaled, so that small ones do not vanish.

The scale lies beside the parameters, for the backward of the loss reads it and the update writes
it:

    forward    the loss as it is
    backward   begins with the scale in place of 1
    update     gradients / scale; where one is not finite nothing is updated, and the scale is halved;
               after `growth_updates` updates without such a gradient it is doubled

A scale is a power of two, so that it changes no bit of what neither vanishes nor overflows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int32

from jvpipe.ir.optimizer import Optimizer
from jvpipe.ir.weighted import Weighted
from jvpipe.trace.leaves import is_initialiser

Tree = Any


def scaled(
    loss_fn: Callable[..., Any],
    optimizer: Optimizer,
    scale: float = 2.0**15,
    growth_updates: int = 2000,
) -> "ScaledLoss":
    """Scales the gradients of a loss, and lets its optimizer see them as they are.

    Args:
        loss_fn: as `Pipeline` takes it; it casts to float16 itself, and gives a loss of float32.
        optimizer: of parameters of float32.
        scale: the first one, a power of two.
        growth_updates: after how many updates without an overflow the scale is doubled.

    Raises:
        ValueError: `scale` is not a power of two, or `growth_updates` is below 1.

    >>> made = scaled(lambda params, batch, rng: jnp.mean(params * batch), optax.sgd(1.0))
    >>> params = made.init(jnp.float32(1.0))
    >>> gradient = jax.grad(made)(params, jnp.float32(3.0), None)
    >>> updates, _ = made.optimizer.update(gradient, made.optimizer.init(params), params)
    >>> float(gradient["params"]), float(updates["params"])
    (98304.0, -3.0)
    """
    mantissa, _ = jnp.frexp(jnp.float32(scale))
    if not scale > 0 or float(mantissa) != 0.5:
        raise ValueError(f"scale must be a power of two, not {scale:g}")
    if growth_updates < 1:
        raise ValueError(f"growth_updates must be 1 at least, not {growth_updates}")
    return ScaledLoss(loss_fn, _unscaling(optimizer, growth_updates), float(scale))


@dataclass(frozen=True)
class ScaledLoss:
    """What a pipeline trains in place of a loss: `Pipeline(made, made.optimizer)`, `pipe.init(made.init(params), ...)`.

    Parameters are `{"params": ..., "scale": ...}`: `pipe.params(state)["params"]` are those of the
    loss.
    """

    loss_fn: Callable[..., Any]
    optimizer: Optimizer
    scale: float

    def init(self, params: Tree) -> Tree:
        """Puts the first scale beside parameters, or beside what a function makes of a key."""
        if is_initialiser(params):
            return lambda key: self.init(params(key))
        return {"params": params, "scale": jnp.float32(self.scale)}

    def __call__(self, params: dict[str, Any], *others: Any) -> Any:
        """Returns the loss, whose gradients are scaled; what is returned beside it stays as it is."""
        value, scale = self.loss_fn(params["params"], *others), params["scale"]
        if isinstance(value, tuple) and not isinstance(value, Weighted):
            loss, *beside = value
            return (_with_scale(loss, scale), *beside)
        return _with_scale(value, scale)


def _with_scale(loss: Any, scale: Any) -> Any:
    """Returns a loss, whose gradients are scaled."""
    if isinstance(loss, Weighted):
        return loss._replace(total=_times(loss.total, scale))
    return _times(loss, scale)


@jax.custom_vjp
def _times(loss: Float[Array, ""], scale: Float[Array, ""]) -> Float[Array, ""]:
    """Returns the loss; what comes back to it is multiplied."""
    return loss


def _forward(loss: Any, scale: Any) -> tuple[Any, Any]:
    return loss, scale


def _backward(scale: Any, cotangent: Any) -> tuple[Any, Any]:
    return (cotangent * scale).astype(cotangent.dtype), jnp.zeros_like(scale)


_times.defvjp(_forward, _backward)


class ScaledState(NamedTuple):
    """How many updates there were since the scale has changed, and the optimizer's own state."""

    updates: Int32[Array, ""]
    inner: Any


def _unscaling(optimizer: Optimizer, growth_updates: int) -> optax.GradientTransformation:
    """Returns an optimizer of `{"params": ..., "scale": ...}`, whose gradients are scaled."""

    def init(params: Tree) -> ScaledState:
        return ScaledState(jnp.zeros((), jnp.int32), optimizer.init(params["params"]))

    def update(updates: Tree, state: Any, params: Tree = None) -> tuple[Tree, ScaledState]:
        scale = params["scale"]
        gradient = jax.tree.map(lambda g: g / scale.astype(g.dtype), updates["params"])
        finite = jnp.all(jnp.array([jnp.isfinite(g).all() for g in jax.tree.leaves(gradient)]))
        moves, inner = optimizer.update(gradient, state.inner, params["params"])
        moves = jax.tree.map(lambda u: jnp.where(finite, u, jnp.zeros_like(u)), moves)
        inner = jax.tree.map(lambda new, old: jnp.where(finite, new, old), inner, state.inner)
        count = jnp.where(finite, state.updates + 1, 0)
        grows = count >= growth_updates
        proposed = jnp.where(
            finite, jnp.where(grows, scale * 2, scale), jnp.maximum(scale / 2, 1.0)
        )
        return {"params": moves, "scale": proposed - scale}, ScaledState(
            jnp.where(grows, 0, count), inner
        )

    return optax.GradientTransformation(init, update)
