"""A loss that is a mean over a number of items that differs between micro-batches."""

from typing import Any, NamedTuple


class Weighted(NamedTuple):
    """The sum of the items' losses and the number of items.

    The loss of a batch is `sum(total) / sum(weight)` over its micro-batches, and gradients are
    exactly those of this quotient, however the batch was split. Both are scalars; `weight` depends
    on no parameter.

    >>> import jax.numpy as jnp
    >>> Weighted(total=jnp.float32(6.0), weight=jnp.float32(3.0)).weight.item()
    3.0
    """

    total: Any  # arrays, or what stands for them while JAX traces
    weight: Any
