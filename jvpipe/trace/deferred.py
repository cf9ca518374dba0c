"""A batch norm for users to call, with running statistics of whole batches, not of micro-batches.

Each micro-batch adds its values to sums. The last micro-batch of a batch updates the running
statistics from these sums.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jvpipe.util.brief import brief
from jvpipe.util.given import is_whole


class BatchStatistics(NamedTuple):
    """The running statistics of each feature, and sums over the micro-batches of the current batch.

    They are a part of the model state. An evaluation normalizes with `mean` and `variance`. `total`
    is the sum of the differences between values and `mean`, and `squares` is the sum of the squares
    of these differences. If values are far from zero, a sum of the squares of the values themselves
    would lose the variance to rounding.

    >>> BatchStatistics.of(3).variance.tolist()
    [1.0, 1.0, 1.0]
    """

    mean: Float[Array, "features"]
    variance: Float[Array, "features"]
    total: Float[Array, "features"]
    squares: Float[Array, "features"]
    items: Int[Array, ""]  # how many values each sum has so far
    seen: Int[Array, ""]  # how many micro-batches of the current batch came before

    @staticmethod
    def of(features: int) -> "BatchStatistics":
        """Returns the statistics before the first batch: a mean of 0, a variance of 1.

        Args:
            features: the size of the last axis of the values that are normalized.

        Raises:
            ValueError: `features` is not a whole number of at least 1.
        """
        if not is_whole(features) or features < 1:
            raise ValueError(
                f"features must be a whole number of at least 1, not {brief(features)}"
            )
        zeros = jnp.zeros(features, jnp.float32)
        return BatchStatistics(zeros, zeros + 1.0, zeros, zeros, jnp.int32(0), jnp.int32(0))


def deferred_batch_norm(
    x: Float[Array, "... features"],
    statistics: BatchStatistics,
    microbatches: int,
    *,
    momentum: float = 0.1,
    epsilon: float = 1e-5,
) -> tuple[Float[Array, "... features"], BatchStatistics]:
    """Normalizes features by a micro-batch's statistics; updates running ones once per batch.

    A plain batch norm in a pipeline updates its running statistics in every micro-batch, each time
    from few examples. This function updates them once per batch, from all examples of the batch, as
    torchgpipe's `DeferredBatchNorm` does (Kim et al., 2020, section 3.3). So the running statistics
    do not depend on how a batch is split.

    Args:
        x: the values, with features along the last axis and any axes before. The result is neither
            scaled nor shifted; the caller does that.
        statistics: the statistics that the call for the previous micro-batch returned.
        microbatches: the number of micro-batches per batch, the same as the pipeline's.
        momentum: the weight of a batch in the running statistics.
        epsilon: the number that is added to the variance.

    Returns:
        The normalized values in the type of `x`, and the statistics for the next micro-batch.

    Raises:
        ValueError: the number of micro-batches is below 1.

    >>> x, statistics = jnp.arange(8.0).reshape(4, 2), BatchStatistics.of(2)
    >>> for half in x[:2], x[2:]:
    ...     y, statistics = deferred_batch_norm(half, statistics, microbatches=2, momentum=1.0)
    >>> statistics.mean.tolist(), statistics.variance.tolist(), y[0].round(2).tolist()
    ([3.0, 4.0], [5.0, 5.0], [-1.0, -1.0])
    """
    if not is_whole(microbatches) or microbatches < 1:
        raise ValueError(
            f"microbatches must be the pipeline's number, at least 1, not {brief(microbatches)}"
        )
    values = x.astype(jnp.float32)
    axes = tuple(range(x.ndim - 1))
    size = x.size // x.shape[-1]
    mean = jnp.mean(values, axes, keepdims=True)
    variance = jnp.mean((values - mean) ** 2, axes, keepdims=True)
    y = (values - mean) * jax.lax.rsqrt(variance + epsilon)
    off = mean.ravel() - statistics.mean
    squares = size * (variance.ravel() + off**2)
    remembered = _remembered(statistics, size * off, squares, size, microbatches, momentum)
    return y.astype(x.dtype), remembered


def _remembered(
    before: BatchStatistics,
    total: Float[Array, "features"],
    squares: Float[Array, "features"],
    size: int,
    microbatches: int,
    momentum: float,
) -> BatchStatistics:
    """Returns the statistics after one more micro-batch.

    Args:
        before: the statistics before the micro-batch.
        total: for each feature, the sum of the micro-batch's values minus the running mean.
        squares: for each feature, the sum of the squares of these differences.
        size: how many values of each feature the micro-batch has.
        microbatches: the number of micro-batches of a batch.
        momentum: the weight of a batch in the running statistics.
    """
    total = before.total + total
    squares = before.squares + squares
    items = before.items + size
    seen = before.seen + 1
    whole = seen == microbatches
    count = items.astype(jnp.float32)
    # `total` and `squares` are sums over differences from the running mean, which does not change
    # within a batch. So the batch's mean is the running mean plus `off`.
    off = total / count
    mean = before.mean + off
    variance = jnp.maximum(squares / count - off**2, 0.0)
    new_mean = (1 - momentum) * before.mean + momentum * mean
    new_variance = (1 - momentum) * before.variance + momentum * variance
    none = jnp.zeros_like(total)
    return BatchStatistics(
        jnp.where(whole, new_mean, before.mean),
        jnp.where(whole, new_variance, before.variance),
        jnp.where(whole, none, total),
        jnp.where(whole, none, squares),
        jnp.where(whole, 0, items),
        jnp.where(whole, 0, seen),
    )
