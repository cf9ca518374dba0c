"""A pipeline's run again, on one device, by its ledger of versions alone."""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from jvpipe.pipeline import Pipeline
from jvpipe.runtime.replay import Replay
from jvpipe.runtime.tensors import Ledger
from jvpipe.trace.loss import key_words

Tree = Any


def replay(
    ledger: Ledger,
    pipe: Pipeline,
    params: Tree,
    batches: Iterable[Tree],
    rng: jax.Array | None,
    model_state: Tree = None,
) -> tuple[Tree, list[float]]:
    """What an asynchronous run computed, computed once more; the bits are the same.

    Args:
        ledger: that of the run, `pipe.ledger`: which weights every forward and backward read.
        pipe: whose layers, optimizer and fates.
        params: what the run began with, its optimizer fresh.
        batches: what it saw since.
        rng: the key of the run.
        model_state: with `has_state`.

    Raises:
        ValueError: the run was resumed in flight.

    Returns:
        each layer's newest parameters, as numpy arrays, and the loss of every micro-batch.

    >>> import jax.numpy as jnp, optax
    >>> def loss_fn(params, batch, rng):
    ...     x = batch
    ...     for w in params:
    ...         x = jnp.tanh(x @ w)
    ...     return jnp.mean(x**2)
    >>> params, batch = [0.5 * jnp.eye(4)] * 3, np.ones((8, 4), np.float32)
    >>> pipe = Pipeline(loss_fn, optax.sgd(0.1), stages=2, schedule="pipedream", planner="even")
    >>> for state, metrics in pipe.run(pipe.init(params, batch, None), [batch] * 3):
    ...     pass
    >>> again, losses = replay(pipe.ledger, pipe, params, [batch] * 3, None)
    >>> all((a == b).all() for a, b in zip(pipe.params(state), again)), len(losses)
    (True, 12)
    """
    versions, build = ledger.versions, pipe.build
    if not versions.complete:
        raise ValueError(
            "this run was resumed in flight, and its ledger does not go back to its start: replay one that was not"
        )
    split = pipe.stacks.split(params)
    moments = jax.tree.leaves(pipe.optimizer.init(split))
    run = Replay(
        build,
        jax.tree.leaves(split),
        {(j, layer): moments[j] for j, layer in build.optimizer.holders if layer is not None},
        jax.tree.leaves(model_state),
        build.traced.loss.constants,
        min((use.version for use in versions.uses()), default=0),
    )
    losses: list[float] = []
    words = None if rng is None else key_words(rng)
    found = versions.microbatches()
    for batch in batches:
        feeds: Any = None
        for m, (uses, drained) in zip(range(build.microbatches), found, strict=False):
            feeds = feeds or pipe.feeds(batch, words, uses[0].microbatch // build.microbatches)
            leaves = [feeds["batch", i][m] for i in range(len(jax.tree.leaves(batch)))]
            step = pipe.build_of(batch, uses[0].microbatch, uses[0].version)
            losses.append(run.microbatch(step, uses, leaves, None if rng is None else feeds["seed", 0][m]))
            if drained:
                run.forget()
    joined = pipe.stacks.join(jax.tree.unflatten(jax.tree.structure(split), run.parameters))
    return jax.tree.map(np.asarray, joined), losses
