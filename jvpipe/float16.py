"""Losses that compute in float16, with scaled gradients, so that small gradients do not underflow.

The scale is kept with the parameters, because the backward reads it and the update writes it:

    forward    computes the loss without the scale
    backward   multiplies the loss's cotangent by the scale, and so all gradients
    update     divides the gradients by the scale. If a gradient is not finite, parameters and
               optimizer state do not change, and a scale above 1 is halved. After `growth_updates`
               updates in a row with finite gradients, the scale is doubled if the result is finite

A scale is a power of two. Multiplying and dividing by it changes only exponents, so results that
neither underflow nor overflow are bitwise identical to those without a scale.
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
from jvpipe.session.arguments import whole_number
from jvpipe.trace.leaves import is_initializer

Tree = Any


def scaled(
    loss_fn: Callable[..., Any],
    optimizer: Optimizer,
    scale: float = 2.0**15,
    growth_updates: int = 2000,
) -> "ScaledLoss":
    """Returns a loss with scaled gradients, and an optimizer that divides them by the scale.

    Args:
        loss_fn: a loss as `Pipeline` takes it, which casts to float16 itself and returns float32.
        optimizer: the optimizer, for parameters in float32.
        scale: the scale at the start, a power of two.
        growth_updates: the scale doubles after this many updates in a row without an overflow.

    Raises:
        ValueError: `scale` is not a power of two, or `growth_updates` is not a whole number
            of at least 1.

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
    growth_updates = whole_number("growth_updates", growth_updates)
    return ScaledLoss(loss_fn, loss_scale_of_float16(optimizer, growth_updates), float(scale))


@dataclass(frozen=True)
class ScaledLoss:
    """A loss with scaled gradients, and its optimizer.

    For a `ScaledLoss` named `made`, call `Pipeline(made, made.optimizer)`, and then
    `pipe.init(made.init(params), ...)`. The parameters become `{"params": ..., "scale": ...}`, so
    the parameters of the original loss are `pipe.params(state)["params"]`.
    """

    loss_fn: Callable[..., Any]
    optimizer: Optimizer
    scale: float

    def init(self, params: Tree) -> Tree:
        """Adds the initial scale to parameters, which are a tree or a function of a key."""
        if is_initializer(params):
            return lambda key: self.init(params(key))
        return {"params": params, "scale": jnp.float32(self.scale)}

    def __call__(self, params: dict[str, Any], *others: Any) -> Any:
        """Returns the loss with scaled gradients, and the other results of `loss_fn` unchanged."""
        value = self.loss_fn(params["params"], *others)
        scale = params["scale"]
        if isinstance(value, tuple) and not isinstance(value, Weighted):
            loss, *beside = value
            return (_with_scale(loss, scale), *beside)
        return _with_scale(value, scale)


def _with_scale(loss: Any, scale: Any) -> Any:
    """Returns a loss whose gradients are scaled."""
    if isinstance(loss, Weighted):
        return loss._replace(total=_times(loss.total, scale))
    return _times(loss, scale)


@jax.custom_vjp
def _times(loss: Float[Array, ""], scale: Float[Array, ""]) -> Float[Array, ""]:
    """Returns the loss; its derivative multiplies the cotangent by the scale."""
    return loss


def _forward(loss: Any, scale: Any) -> tuple[Any, Any]:
    return loss, scale


def _backward(scale: Any, cotangent: Any) -> tuple[Any, Any]:
    return (cotangent * scale).astype(cotangent.dtype), jnp.zeros_like(scale)


_times.defvjp(_forward, _backward)


class ScaledState(NamedTuple):
    """The state of the wrapped optimizer, and a count of updates.

    Attributes:
        updates: the number of updates since the last overflow or the last growth of the scale.
        inner: the state of the wrapped optimizer.
    """

    updates: Int32[Array, ""]
    inner: Any


def loss_scale_of_float16(
    optimizer: Optimizer, growth_updates: int
) -> optax.GradientTransformation:
    """Returns an optimizer of `{"params": ..., "scale": ...}` that takes scaled gradients.

    Messages name it by the name of this function.
    """

    def init(params: Tree) -> ScaledState:
        return ScaledState(jnp.zeros((), jnp.int32), optimizer.init(params["params"]))

    def update(
        updates: Tree,
        state: Any,
        params: Tree = None,
    ) -> tuple[Tree, ScaledState]:
        """Returns the changes of the parameters and of the scale, and the new state.

        Args:
            updates: the gradients, each multiplied by the scale; their dtypes are the parameters'.
            state: the `ScaledState` before the update.
            params: `{"params": ..., "scale": ...}`, whose scale is a float32 scalar.
        """
        scale = params["scale"]
        scaled_gradient = updates["params"]
        gradient = jax.tree.map(lambda g: g / scale.astype(g.dtype), scaled_gradient)
        are_finite = [jnp.isfinite(g).all() for g in jax.tree.leaves(gradient)]
        finite = jnp.all(jnp.array(are_finite))

        def if_finite(new: Any, old: Any) -> jax.Array:
            return jnp.where(finite, new, old)

        moves, inner = optimizer.update(gradient, state.inner, params["params"])
        moves = jax.tree.map(lambda u: if_finite(u, jnp.zeros_like(u)), moves)
        inner = jax.tree.map(if_finite, inner, state.inner)
        count = if_finite(state.updates + 1, 0)
        grows = count >= growth_updates
        grown = jnp.where(grows & jnp.isfinite(scale * 2), scale * 2, scale)
        # A scale of at most 1 is not halved.
        halved = jnp.maximum(scale / 2, jnp.minimum(scale, 1.0))
        change = if_finite(grown, halved) - scale
        # The pipeline adds updates to parameters, so the scale's entry must be a change, too.
        new_state = ScaledState(jnp.where(grows, 0, count), inner)
        return {"params": moves, "scale": change}, new_state

    return optax.GradientTransformation(init, update)
