"""Losses of predictions: cross entropies of targets, each multiplied by a weight.

Axes: *B all axes of the targets, V the classes or the vocabulary.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jvpipe.ir.weighted import Weighted
from jvpipe.models.blocks import Key

Logits = Callable[[Any, Any, Key], Float[Array, "*B V"]]
"""A function from parameters, a batch and a key to logits."""
LossFunction = Callable[[Any, Any, Key], Weighted]
"""A function from parameters, a batch and a key to a sum of losses and the sum of their weights."""


def cross_entropies(logits: Float[Array, "*B V"], targets: Any) -> Float[Array, "*B"]:
    """Returns the cross entropy of each target [*B] in nats."""
    likelihoods = jax.nn.log_softmax(logits)
    scores = jnp.take_along_axis(likelihoods, targets[..., None], axis=-1)  # [*B, 1]
    return -jnp.squeeze(scores, -1)


def prediction_loss(
    logits: Float[Array, "*B V"], batch: Mapping[str, Any], smoothing: float = 0.0
) -> Weighted:
    """Computes the loss of predicting the batch's `targets` [*B], each multiplied by its weight.

    Args:
        logits: the logits of each target.
        batch: has `targets` and `weights` [*B].
        smoothing: the fraction of each target's probability that label smoothing spreads over all V
            (arXiv:1512.00567).

    Returns:
        The sum of the weighted cross entropies in nats, and the sum of weights.
    """
    nats = cross_entropies(logits, batch["targets"])
    weights = batch["weights"]
    if smoothing:
        # Against a uniform target, the cross entropy is the mean of all -log likelihoods.
        likelihoods = jax.nn.log_softmax(logits)
        nats = (1 - smoothing) * nats - smoothing * jnp.mean(likelihoods, -1)
    # From sums and weights, jvpipe gets the exact mean even if micro-batches differ in weight.
    return Weighted(jnp.sum(nats * weights), jnp.sum(weights))


def predicting(logits: Logits, dropout: float, smoothing: float = 0.0) -> LossFunction:
    """Makes `loss_fn(params, batch, rng)`, the loss of predictions as in `prediction_loss`.

    Args:
        logits: computes the logits of the model.
        dropout: the fraction of values that training drops. If it is 0, `logits` gets no key.
        smoothing: as in `prediction_loss`.
    """

    def loss_fn(params: Any, batch: Any, rng: Key) -> Weighted:
        batch = jax.tree.map(jnp.asarray, batch)
        # Even an unused key would be an input of every layer, and would be sent over each cut.
        key = rng if dropout > 0 else None
        return prediction_loss(logits(params, batch, key), batch, smoothing)

    return loss_fn
