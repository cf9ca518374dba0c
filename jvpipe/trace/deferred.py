"""Batch norm that remembers the statistics of whole batches: micro-batches add to them in turn,
the last ends it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jvpipe.util.brief import brief
from jvpipe.util.given import is_whole


class BatchStatistics(NamedTuple):
    """The running statistics of each feature, and what the micro-batches of a batch have come to so
    far.

    A part of a model state. `mean` and `variance` are what an evaluation would normalise with.
    `total` and `squares` are of values less `mean`: far from zero, squares would say little of how
    values differ.

    >>> BatchStatistics.of(3).variance.tolist()
    [1.0, 1.0, 1.0]
    """

    mean: Float[Array, "features"]
    variance: Float[Array, "features"]
    total: Float[Array, "features"]
    squares: Float[Array, "features"]
    items: Int[Array, ""]
    seen: Int[Array, ""]  # micro-batches

    @staticmethod
    def of(features: int) -> "BatchStatistics":
        """Returns the statistics before the first batch: a mean of 0, a variance of 1.

        Args:
            features: the size of the last axis of what is normalised.
        """
        zeros = jnp.zeros(features, jnp.float32)
        return BatchStatistics(
            zeros,
            zeros + 1.0,
            zeros,
            zeros,
            jnp.int32(0),
            jnp.int32(0),
        )


def deferred_batch_norm(
    x: Float[Array, "... features"],
    statistics: BatchStatistics,
    microbatches: int,
    *,
    momentum: float = 0.1,
    epsilon: float = 1e-5,
) -> tuple[Float[Array, "... features"], BatchStatistics]:
    """Normalises each feature by the statistics of a micro-batch, and remembers those of whole
    batches.

    A pipeline normalises micro-batches, so that running statistics which each of them updates are
    those of small batches, updated often. Here they are updated once per batch, with the statistics
    of all its examples, as by torchgpipe's `DeferredBatchNorm` (Kim et al., 2020, section 3.3):
    they do not depend on how a batch is split.

    Args:
        x: values, features last; any axes before. Scale and shift them yourself.
        statistics: as the micro-batch before has left them.
        microbatches: of a batch: those of the pipeline.
        momentum: how much a batch counts in the running statistics.
        epsilon: added to the variance.

    Returns:
        The normalised values in the type of `x`, and the statistics for the next micro-batch.

    Raises:
        ValueError: a number of micro-batches below 1.

    >>> x, statistics = jnp.arange(8.0).reshape(4, 2), BatchStatistics.of(2)
    >>> for half in x[:2], x[2:]:
    ...     y, statistics = deferred_batch_norm(half, statistics, microbatches=2, momentum=1.0)
    >>> statistics.mean.tolist(), statistics.variance.tolist(), y[0].round(2).tolist()
    ([3.0, 4.0], [5.0, 5.0], [-1.0, -1.0])
    """
    if not is_whole(microbatches) or microbatches < 1:
        raise ValueError(
            f"microbatches must be those of the pipeline, at least 1, not {brief(microbatches)}"
        )
    values = x.astype(jnp.float32)
    axes = tuple(range(x.ndim - 1))
    size = x.size // x.shape[-1]
    mean = jnp.mean(values, axes, keepdims=True)
    variance = jnp.mean((values - mean) ** 2, axes, keepdims=True)
    y = (values - mean) * jax.lax.rsqrt(variance + epsilon)
    off = mean.ravel() - statistics.mean
    squares = size * (variance.ravel() + off**2)
    return y.astype(x.dtype), _remembered(
        statistics, size * off, squares, size, microbatches, momentum
    )


def _remembered(
    before: BatchStatistics,
    total: Float[Array, "features"],
    squares: Float[Array, "features"],
    size: int,
    microbatches: int,
    momentum: float,
) -> BatchStatistics:
    """Returns the statistics after one more micro-batch, whose values and their squares come to
    these sums.

    Args:
        before: the statistics.
        total: of the values of each feature, less the mean.
        squares: of their squares.
        size: how many values each feature has.
        microbatches: of a batch.
        momentum: how much a batch counts.
    """
    total, squares = before.total + total, before.squares + squares
    items = before.items + size
    seen = before.seen + 1
    whole = seen == microbatches
    off = total / items.astype(jnp.float32)
    mean, variance = (
        before.mean + off,
        jnp.maximum(squares / items.astype(jnp.float32) - off**2, 0.0),
    )
    none = jnp.zeros_like(total)
    return BatchStatistics(
        jnp.where(whole, (1 - momentum) * before.mean + momentum * mean, before.mean),
        jnp.where(whole, (1 - momentum) * before.variance + momentum * variance, before.variance),
        jnp.where(whole, none, total),
        jnp.where(whole, none, squares),
        jnp.where(whole, 0, items),
        jnp.where(whole, 0, seen),
    )
