"""Replays a pipeline's run on one device, from the run's ledger of versions.

The version of a layer's weights is the number of updates that they have had. In an asynchronous
run, a forward and its backward may read different versions. The ledger says which version each of
them read. So one device can run the same tasks one after another, with bitwise identical results.
This shows that a pipeline has computed what its schedule says. The tasks themselves are run in
`runtime/state/one_device.py`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import jax
import numpy as np

from jvpipe.ir.use import Use
from jvpipe.pipeline import Pipeline
from jvpipe.programs.optimizer_trace import masked
from jvpipe.runtime.engine.tensors import Ledger
from jvpipe.runtime.engine.versions import VersionLedger
from jvpipe.runtime.state.one_device import Replay
from jvpipe.session.arguments import check_arrays, check_key
from jvpipe.session.session import Session
from jvpipe.trace.batches import micro_batch_shapes, shapes_of
from jvpipe.trace.loss import key_words
from jvpipe.util.brief import brief
from jvpipe.util.given import is_stream

Tree = Any


def replay(
    ledger: Ledger,
    pipe: Pipeline,
    params: Tree,
    batches: Iterable[Tree],
    rng: jax.Array | None,
    model_state: Tree = None,
) -> tuple[Tree, list[float]]:
    """Replays an asynchronous run on one device, with bitwise identical results.

    Args:
        ledger: the ledger of the run, `pipe.ledger`.
        pipe: the pipeline, whose layers, optimizer and fates the replay uses.
        params: the parameters at the start of the run; the replay makes the optimizer's first
            state from them.
        batches: the batches of the run, from its first; batches after its last are ignored.
        rng: the key of the run.
        model_state: the model state at the start, if the loss has one (`has_state`).

    Raises:
        ValueError: the run was synchronous; or it was resumed from a checkpoint, or its model was
            changed: then its ledger begins at a later step, but a replay begins at the first.
            Another cause is an argument that differs from what the run had, such as too few
            batches.

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
    _check_given(ledger, pipe, params, rng, model_state)
    versions, session = ledger.versions, pipe.session
    if not versions.complete:
        raise ValueError(
            "this run was resumed from a checkpoint, or its model was changed, so its ledger lacks "
            "the first steps: replay a run that began with init and kept its model"
        )
    run = _begun(session, versions, params, model_state)
    words = None if rng is None else key_words(rng)
    uses_of = versions.microbatches()
    losses: list[float] = []
    count = session.settings.microbatches
    steps = -(-sum(1 for _ in versions.microbatches()) // count)
    for batch in _taken(batches, steps):
        micro_batch_shapes(batch, count)  # raises ValueError for a batch that cannot be split
        losses += _losses(session, run, batch, words, islice(uses_of, count))
    return jax.tree.map(np.asarray, session.trees.join_params(run.parameters)), losses


def _check_given(
    ledger: Any,
    pipe: Any,
    params: Tree,
    rng: Any,
    model_state: Tree,
) -> None:
    """Raises ValueError for arguments of `replay` that are not like those of the run."""
    if not isinstance(pipe, Pipeline):
        raise ValueError(f"pipe must be the jvpipe.Pipeline of the run, not {brief(pipe)}")
    if not isinstance(ledger, Ledger):
        raise ValueError(f"ledger must be the ledger of a run, pipe.ledger, not {brief(ledger)}")
    schedule = pipe.session.settings.schedule
    if schedule.synchronous:
        raise ValueError(
            f"the run had the synchronous schedule {schedule.name!r}, of which no versions are "
            "recorded: compare its results with those of one stage, or replay an asynchronous run"
        )
    trees = pipe.session.trees
    check_arrays(params, "parameter")
    trees.split_params(params)
    if shapes_of(model_state) != shapes_of(trees.model_state):
        raise ValueError(
            f"model_state is {brief(model_state)}, that of the run was {brief(trees.model_state)}: "
            "give the model_state of init"
        )
    if rng is not None:
        check_key(rng)
    if (rng is None) != (trees.rng is None):
        has, given = ("no key", "one") if trees.rng is None else ("a key", "none")
        raise ValueError(f"the run had {has}, and the replay got {given}: give the rng of init")


def _taken(batches: Iterable[Tree], steps: int) -> list[Tree]:
    """Returns the batches of a run.

    Args:
        batches: the batches as the user gave them. Batches after the run's last one are ignored.
        steps: how many batches the run had.

    Raises:
        ValueError: there are fewer batches than the run had.
    """
    if isinstance(batches, Mapping) or not is_stream(batches):
        raise ValueError(f"batches must be a list of all batches of the run, not {brief(batches)}")
    found = list(islice(batches, steps))
    if len(found) < steps:
        raise ValueError(
            f"the run had {steps} batches, and the replay got {len(found)}: give all of them"
        )
    return found


def _losses(
    session: Session,
    run: Replay,
    batch: Tree,
    words: np.ndarray | None,
    uses_of_step: Iterable[tuple[Sequence[Use], bool]],
) -> Iterator[float]:
    """Replays the micro-batches of one batch, and yields the loss of each.

    Args:
        session: the session of the run.
        run: the replay, which has computed all earlier micro-batches.
        batch: the batch.
        words: the integers of the run's random key, or None.
        uses_of_step: for each micro-batch, the versions that its tasks read and made, and whether
            the pipeline was drained after it (until nothing was in flight).
    """
    count = len(jax.tree.leaves(batch))
    feeds: Any = None
    for m, (uses, drained) in enumerate(uses_of_step):
        first = uses[0]
        if feeds is None:
            step = first.microbatch // session.settings.microbatches
            feeds = session.feeds(batch, words, step)
        leaves = [feeds["batch", i][m] for i in range(count)]
        seed = None if words is None else feeds["seed", 0][m]
        compiled = session.compiled_in_the_past(batch, first.microbatch, first.version)
        yield run.microbatch(compiled, uses, leaves, seed)
        if drained:
            run.forget()


def _begun(
    session: Session,
    versions: VersionLedger,
    params: Tree,
    model_state: Tree,
) -> Replay:
    """Returns a replay at the start of a run, with a fresh optimizer state.

    A stack is a parameter with one slice per layer, over which the loss scans. A replay has each
    slice as a parameter of its own. The optimizer's `init` must see what it saw in the run: with
    the option `stacked` the slices, and otherwise the stacks. In the second case, its state is
    split afterwards.

    Args:
        session: the session of the run.
        versions: the ledger of the run.
        params: the parameters at the start.
        model_state: the model state at the start.
    """
    compiled, settings = session.compiled, session.settings
    stacks, cut = session.trees.stacks, compiled.optimizer
    split = stacks.split(params)
    shapes = jax.tree.unflatten(cut.state_tree, cut.state)
    init = settings.optimizer.init
    if settings.stacked:
        frozen = stacks.slices_named(settings.frozen)
        first = _kept(shapes, init(masked(split, frozen)))
    else:
        matches = stacks.named(settings.frozen)
        frozen = [i for i, matched in enumerate(matches) if matched]
        joined = stacks.join(shapes, lambda *slices: slices[0])
        first = stacks.split_like(shapes, _kept(joined, init(masked(params, frozen))))
    both = zip(jax.tree.leaves(first), cut.state, strict=True)
    # Updates do not change the types of the state, and the run began with these types, too.
    leaves = [x if x.dtype == s.array.dtype else x.astype(s.array.dtype) for x, s in both]
    of_layers = {(j, layer): leaves[j] for j, layer in cut.holders if layer is not None}
    first_version = min((use.version for use in versions.uses()), default=0)
    return Replay(
        compiled,
        jax.tree.leaves(split),
        of_layers,
        jax.tree.leaves(model_state),
        first_version,
    )


def _kept(shapes: Tree, state: Tree) -> Tree:
    """Returns the part of an optimizer state that the pipeline keeps.

    If `shapes` has `optax.MaskedNode()` in place of a leaf, nothing reads the leaf, and the result
    has `optax.MaskedNode()` there, too.
    """
    import optax  # not at the top of the file, because importing optax takes long

    def is_nothing(leaf: Any) -> bool:
        return isinstance(leaf, optax.MaskedNode)

    def kept(like: Any, leaf: Any) -> Any:
        return like if is_nothing(like) else leaf

    return jax.tree.map(kept, shapes, state, is_leaf=is_nothing)
