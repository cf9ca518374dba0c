"""A process of a run that trains on and on, given PROCESS COUNT PORT; one of them is killed.

With `moving` behind it the last one kills itself when it has offered the first of what leaves it
with its layers, between two steps or with `inside` behind that in the middle of one. With `saving`,
a folder and a process, that one kills itself in its second save: the first one before it renames
the draft, another when it has written its part.
"""

import os
import signal
import sys
from collections.abc import Container, Sequence
from typing import Any

import jax

import jvpipe
from jvpipe.ir.kinds import Kind
from jvpipe.ir.rows import OfferRun
from jvpipe.runtime.engine.hosts import present_hosts
from jvpipe.runtime.engine.transport import Transport
from tests.bits import batches_of
from tests.hosts.worker import begun, pipeline
from tests.zoo import CASES


class Deadly(Transport):
    """A transport whose process is gone once it has offered an array of a `fatal` number."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.fatal: Container[int] = ()

    def begin(self) -> None:
        self._inner.begin()

    def offer(self, number: int, array: jax.Array) -> None:
        self._inner.offer(number, array)
        if number in self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    def ask(self, process: int, number: int, like: jax.ShapeDtypeStruct) -> jax.Array:
        return self._inner.ask(process, number, like)

    def lost(self) -> list[int]:
        return self._inner.lost()


def dies_in_a_save(process: int) -> None:
    """Has this process die at an operation on files that it comes to in its next save."""
    fatal, name = (
        ("os.rename", ".draft") if process == 0 else ("open", f"part-{process:04d}.safetensors")
    )

    def hook(event: str, args: Any) -> None:
        if event == fatal and str(args[0]).endswith(name):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def leaving(pipe: jvpipe.Pipeline) -> frozenset[int]:
    """The numbers of what leaves this process in the migration that is due."""
    (migration,) = pipe.session.migrations.queue
    offers = (row.run for row in migration.bound.lowered.rows if row.kind is Kind.MOVE)
    return frozenset(run.number for run in offers if isinstance(run, OfferRun))


def main(arguments: Sequence[str]) -> None:
    process, count, port = map(int, arguments[:3])
    begun(process, count, port)
    hosts = present_hosts()
    assert hosts is not None
    hosts.connect()
    hosts.transport = transport = Deadly(hosts.connected)
    doing, *options = arguments[3:] or ["training"]
    m = CASES["pre-norm" if doing == "training" else "mlp"]()
    pipe = pipeline(m, "1f1b", planner="even")
    batch = batches_of(m)[0]
    state: Any = pipe.init(m.params, batch, m.rng, m.state)
    try:
        for step in range(100_000):
            state, _ = pipe.step(state, batch)
            if step == 3:
                pipe.wait(state)
                print("trains", flush=True)
            if doing == "saving":
                if step == 1 and process == int(options[1]):
                    dies_in_a_save(process)
                pipe.save(options[0], state)
            if step == 3 and doing == "moving":
                away, dies = (
                    jvpipe.Plan.from_cuts([2, 2, 1], devices=[2, 0, 1]),
                    process == count - 1,
                )
                transport.fatal = range(
                    dies and not options and 1 << 40
                )  # between two steps nothing else is offered
                state = pipe.migrate(state, away, (state.step, 2) if options else None)
                transport.fatal = leaving(pipe) if dies and options else ()
    except jvpipe.HostLost as lost:
        print(f"lost: {lost}", flush=True)
        os._exit(75)
