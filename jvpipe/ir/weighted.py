"""Weighted losses: means over items, such as tokens, whose number differs between micro-batches."""

from typing import Any, NamedTuple


class Weighted(NamedTuple):
    """The sum of the items' losses and the number of items, such as tokens that are not padding.

    The loss of a batch is `sum(total) / sum(weight)` over its micro-batches. Gradients are
    exactly those of this quotient, however the batch is split. Both fields are scalars.
    `weight` must not depend on a parameter.

    >>> import jax.numpy as jnp
    >>> Weighted(total=jnp.float32(6.0), weight=jnp.float32(3.0)).weight.item()
    3.0
    """

    total: Any  # an array, or a tracer while JAX traces
    weight: Any
