"""Replay of a pipeline's run on one device, from its ledger of versions.

The ledger says which version of the weights each forward and backward read. So one device can run
the same tasks one after another, with bitwise identical results.
"""

from collections.abc import Collection, Iterable
from typing import Any

import jax
import numpy as np

from jvpipe.pipeline import Pipeline
from jvpipe.runtime.engine.tensors import Ledger
from jvpipe.runtime.engine.versions import VersionLedger
from jvpipe.runtime.state.replay import Replay
from jvpipe.session.session import Session
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
    """Computes an asynchronous run again, one task after another, with bitwise identical results.

    Args:
        ledger: the ledger of the run, `pipe.ledger`, which says which version of the weights each
            forward and backward read.
        pipe: the pipeline, whose layers, optimizer and fates the replay uses.
        params: the parameters at the start of the run; the optimizer's state is made from them.
        batches: all batches of the run.
        rng: the key of the run.
        model_state: the model state at the start, if the loss has one (`has_state`).

    Raises:
        ValueError: the run was resumed from a checkpoint with micro-batches in flight, that is,
            between their forwards and backwards.

    Returns:
        The newest parameters of each layer, as numpy arrays, and the loss of each micro-batch.

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
    versions, session = ledger.versions, pipe.session
    if not versions.complete:
        raise ValueError(
            "this run was resumed in flight, and its ledger does not go back to its start: replay a run that was not"
        )
    run = _begun(session, versions, params, model_state)
    losses: list[float] = []
    words = None if rng is None else key_words(rng)
    uses_of = versions.microbatches()
    for batch in batches:
        feeds: Any = None
        for m, (uses, drained) in zip(range(session.settings.microbatches), uses_of, strict=False):
            first = uses[0]
            feeds = feeds or session.feeds(
                batch, words, first.microbatch // session.settings.microbatches
            )
            leaves = [feeds["batch", i][m] for i in range(len(jax.tree.leaves(batch)))]
            compiled = session.compiled_in_the_past(batch, first.microbatch, first.version)
            losses.append(
                run.microbatch(compiled, uses, leaves, None if rng is None else feeds["seed", 0][m])
            )
            if drained:
                run.forget()
    return jax.tree.map(np.asarray, session.trees.join_params(run.parameters)), losses


def _begun(session: Session, versions: VersionLedger, params: Tree, model_state: Tree) -> Replay:
    """Returns a replay at the start of a run, with a fresh optimizer state."""
    compiled = session.compiled
    stacks, cut, settings = session.trees.stacks, compiled.optimizer, session.settings
    split, init = stacks.split(params), settings.optimizer.init
    shapes = jax.tree.unflatten(cut.state_tree, cut.state)
    if settings.stacked:
        named = stacks.slices_named(settings.frozen)
        first = _kept(shapes, init(_seen(split, named)))
    else:
        named = [i for i, matched in enumerate(stacks.named(settings.frozen)) if matched]
        joined = stacks.join(shapes, lambda *slices: slices[0])
        first = stacks.split_like(shapes, _kept(joined, init(_seen(params, named))))
    moments = jax.tree.leaves(first)
    return Replay(
        compiled,
        jax.tree.leaves(split),
        {(j, layer): moments[j] for j, layer in compiled.optimizer.holders if layer is not None},
        jax.tree.leaves(model_state),
        min((use.version for use in versions.uses()), default=0),
    )


def _seen(params: Tree, frozen: Collection[int]) -> Tree:
    """Returns parameters as the optimizer sees them: with `optax.MaskedNode()` for frozen ones."""
    import optax  # imported when needed, as in jvpipe/ir/optimizer.py

    leaves, tree = jax.tree.flatten(params)
    return tree.unflatten(
        optax.MaskedNode() if i in frozen else leaf for i, leaf in enumerate(leaves)
    )


def _kept(shapes: Tree, state: Tree) -> Tree:
    """Returns the part of an optimizer state that the pipeline keeps.

    If the pipeline's shapes have `optax.MaskedNode()` for a leaf, nothing reads the leaf, and the
    result has `optax.MaskedNode()` as well.
    """
    import optax

    def is_nothing(leaf: Any) -> bool:
        return isinstance(leaf, optax.MaskedNode)

    return jax.tree.map(
        lambda like, x: like if is_nothing(like) else x, shapes, state, is_leaf=is_nothing
    )
