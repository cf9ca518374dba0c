"""Who waits for an array of another process notices that the process is stopped, wherever it waits."""

from collections.abc import Callable
from itertools import count

import jax
import numpy as np
import pytest

from jvpipe import _jax
from jvpipe.ir.buffers import Lowered
from jvpipe.ir.kinds import Kind
from jvpipe.ir.rows import Row
from jvpipe.ir.values import NONE
from jvpipe.runtime.engine.controller import Controller, Mark, Moment
from jvpipe.runtime.engine.failures import HostLost
from jvpipe.runtime.engine.host_link import link_between
from jvpipe.runtime.engine.hosts import Carried, Hosts
from jvpipe.runtime.engine.pulse import Pulses
from jvpipe.runtime.engine.tensors import Ledger
from jvpipe.runtime.engine.transport import Transport
from tests.runtime.hand_made import BUFFERS, Executable, F, bound

LIKE = jax.ShapeDtypeStruct((), np.float32)
LATE = jax.numpy.zeros((), np.float32)


class SilentPulses(Pulses):
    """Those of a peer that was heard once, and has been silent for a minute since."""

    def __init__(self) -> None: ...

    def silent_s(self, process: int) -> float:
        return 61.0


class LateTransport(Transport):
    """A connection to a stopped process: it is not lost, and nothing comes from it."""

    def __init__(self) -> None: ...

    def begin(self) -> None: ...

    def offer(self, number: int, array: jax.Array) -> None: ...

    def ask(self, process: int, number: int, like: jax.ShapeDtypeStruct) -> jax.Array:
        return LATE

    def lost(self) -> list[int]:
        return []


def stopped() -> Hosts:
    return Hosts(0, 2, None, transport=LateTransport(), pulses=SilentPulses())


def controller() -> Controller:
    return Controller(Ledger(tuple(jax.devices()[:2])), 1, hosts=stopped())


def dispatches() -> None:
    """What is moved was sent by the stopped process, so its copy does not come either."""
    move = Row(Kind.MOVE, 0, NONE, NONE, NONE, (0,), (3,))
    free = Row(Kind.FREE, 0, NONE, NONE, NONE, (0, 3), (), (0,))
    moving = bound(Executable(), lowered=Lowered((move, free), BUFFERS, 1, (3,), ()))
    controller().run(moving, [LATE], {}, Moment(0))


def fails() -> None:
    """A row fails here while an earlier one waits for the stopped process."""
    it = controller()
    it.marks.append(Mark(LATE, F, Moment(0)))
    raise it.failure(ValueError("no room"), F, Moment(0))


WAITS: dict[str, Callable[[], object]] = {
    "gather": lambda: stopped().gather([1], [LIKE], [None]),
    "gather what is made here": lambda: stopped().gather([0], [LIKE], [LATE]),
    "carry": lambda: stopped().carry([Carried(1, 0, LIKE)], [None]),
    "measure the link": lambda: link_between(stopped()),
    "dispatch": dispatches,
    "find the cause of a failure": fails,
}


@pytest.mark.parametrize("waits", WAITS.values(), ids=list(WAITS))
def test_a_stopped_process_is_noticed_wherever_one_waits_for_it(
    waits: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = count()

    def is_ready(array: jax.Array) -> bool:
        return next(asked) > 1000  # at last they come, so that no test waits forever

    monkeypatch.setattr(_jax, "is_ready", is_ready)
    with pytest.raises(HostLost) as lost:
        waits()
    assert str(lost.value) == "process 1 has been silent for 61 s, go on from the last checkpoint"
