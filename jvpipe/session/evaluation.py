"""Evaluation: the forward of a batch alone, with the newest parameters of a state or with others."""

from collections.abc import Sequence
from typing import Any

from jvpipe.ir.buffers import HOST
from jvpipe.ir.values import Owner, ValueKind
from jvpipe.runtime.checkpoints.flight import brought_arrays, names_of, with_leaves
from jvpipe.runtime.controller import Moment
from jvpipe.runtime.state import State
from jvpipe.session.session import Metrics, Session

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
    compiled, devices = session.compiled_plans.for_batch(batch), session.settings.devices
    arrays, peaks = session.plain_arrays(compiled, state), compiled.evaluation_peaks
    if session.settings.hosts is not None:
        try:
            arrays = brought_arrays(compiled, state, arrays)
        except Exception as error:
            raise session.controller.failure(error) from error
    owned = [buffer for buffer in compiled.persistent if params and buffer.owner is Owner.PARAMETER]
    beside = [
        sum(buffer.bytes for buffer in owned if buffer.memory == d) for d in range(len(devices))
    ]
    peaks = (
        *(peak.beside("given parameters", n) for peak, n in zip(peaks, beside, strict=False)),
        peaks[HOST],
    )
    session.limits.check(peaks, devices)
    for device, size in enumerate(beside):
        session.ledger.hold(device, size)
    monitor, session.controller.monitor = session.controller.monitor, None
    try:
        if params:
            arrays = with_leaves(
                names_of(compiled, 0), arrays, ValueKind.PARAMETER, params, consume=False
            )
        feeds = session.feeds(batch, state.words, state.step, compiled.evaluation)
        _, values = session.controller.run(compiled.evaluation, arrays, feeds, Moment(state.step))
        session.controller.settle()
    finally:
        session.controller.monitor = monitor
        for device, size in enumerate(beside):
            session.ledger.drop(device, size)
    return session.metrics_of(compiled, session.readable(values))
