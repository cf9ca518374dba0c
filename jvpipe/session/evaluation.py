"""Evaluation: the forward of a batch alone, with the newest parameters of a state or with others."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from jvpipe.ir.buffers import HOST
from jvpipe.ir.values import Owner, ValueKind
from jvpipe.runtime.engine.compiled_plan import CompiledPlan
from jvpipe.runtime.engine.controller import Moment
from jvpipe.runtime.engine.training_state import State
from jvpipe.runtime.state.checkpoints.flight import brought_arrays, names_of, with_leaves
from jvpipe.session.session import Metrics, Session
from jvpipe.session.trees import check_fed, feeds_of

Tree = Any


def evaluate(session: Session, state: State, batch: Tree, params: Sequence[Any] = ()) -> Metrics:
    """Runs the forward of a batch; nothing changes, and what is measured of steps stays.

    Args:
        session: what the state belongs to.
        state: its newest arrays are evaluated.
        batch: of any size that the micro-batches divide.
        params: leaves in the parameters' place, which lie beside these meanwhile; none for the state's own.

    Raises:
        MemoryLimitExceeded: an evaluation does not keep the limit.
        StageError: it failed; the state is whole.
    """
    compiled = session.compiled_plans.for_batch(batch)
    arrays = newest_arrays(session, compiled, state)
    owned = [buffer for buffer in compiled.persistent if params and buffer.owner is Owner.PARAMETER]
    beside = [
        sum(buffer.bytes for buffer in owned if buffer.memory == d)
        for d in range(len(compiled.devices))
    ]
    with holding(session, compiled, "given parameters", beside, beside):
        if params:
            names = names_of(compiled, 0)
            arrays = with_leaves(names, arrays, ValueKind.PARAMETER, params, consume=False)
        values = forwards(session, compiled, state, arrays, batch, state.words)
    return session.metrics_of(compiled, session.readable(values))


def newest_arrays(session: Session, compiled: CompiledPlan, state: State) -> tuple[jax.Array, ...]:
    """The newest of what a state has, each array where the plan has it.

    Args:
        session: what the state belongs to.
        compiled: the plan that it lies by.
        state: perhaps in flight.
    """
    arrays = session.plain_arrays(compiled, state)
    if session.settings.hosts is None:
        return arrays
    try:
        return brought_arrays(compiled, state, arrays)
    except Exception as error:
        raise session.controller.failure(error) from error


@contextmanager
def holding(
    session: Session, compiled: CompiledPlan, what: str, beside: Sequence[int], new: Sequence[int]
) -> Iterator[None]:
    """Checks that devices may hold more than a forward takes, and counts what is new of it meanwhile.

    Args:
        session: has the limits and the ledger.
        compiled: the plan whose forward is to run.
        what: lies beside, for the message.
        beside: its bytes on each device.
        new: those that the ledger does not know of.

    Raises:
        MemoryLimitExceeded: they do not keep the limit.
    """
    peaks = compiled.evaluation_peaks
    both = zip(peaks, beside, strict=False)
    more = (*(peak.beside(what, size) for peak, size in both), peaks[HOST])
    session.limits.check(more, session.settings.devices)
    for device, size in enumerate(new):
        session.ledger.hold(device, size)
    try:
        yield
    finally:
        for device, size in enumerate(new):
            session.ledger.drop(device, size)


def forwards(
    session: Session,
    compiled: CompiledPlan,
    state: State,
    arrays: Sequence[jax.Array],
    batch: Tree,
    words: np.ndarray | None,
) -> Sequence[jax.Array]:
    """Runs the forwards of a plan; what is measured of steps stays.

    Args:
        session: whose controller runs them.
        compiled: the plan.
        state: at whose step it is.
        arrays: what lies on the devices.
        batch: what the micro-batches are slices of.
        words: those of the key that they draw from, if from any.
    """
    monitor, session.controller.monitor = session.controller.monitor, None
    try:
        feeds = feeds_of(batch, words, state.step, compiled.microbatches)
        check_fed(feeds, compiled.evaluation.feeds, [x.name for x in compiled.traced.graph.batch])
        _, values = session.controller.run(compiled.evaluation, arrays, feeds, Moment(state.step))
        session.controller.settle()
        return values
    finally:
        session.controller.monitor = monitor
