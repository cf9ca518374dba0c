"""Follows what steps take, and has another plan ready when that pays.

The controller's thread only hands over the marks of a step. A thread beside it waits for them, asks the trigger, and
lowers and compiles the migration; the pipeline makes it at the next boundary between two steps.
"""

import gc
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from threading import Lock
from typing import Any, TypeVar

from jvpipe._jax import first_of
from jvpipe.cost.hardware import INFINITE, Link
from jvpipe.cost.links import links_between
from jvpipe.ir.plan import Plan
from jvpipe.planners.user_fates import recut
from jvpipe.runtime.compiled_plan import CompiledPlan
from jvpipe.runtime.migrate import Migration, prepare_migration
from jvpipe.runtime.monitor import Measured, Monitor, Record
from jvpipe.runtime.tensors import Limits, MemoryLimitExceeded
from jvpipe.session.compiled_plans import CompiledPlans
from jvpipe.session.trigger import Replan, Rule, Seen, Trigger
from jvpipe.trace.graph import Traced

T = TypeVar("T")
TURN_S = 1e-4
_lock = Lock()
_outside: list[
    tuple[float, bool]
] = []  # what each that is inside has found; the first is what holds outside


@contextmanager
def beside_training() -> Iterator[None]:
    """While it lasts nobody keeps the interpreter for long: every wait of the dispatching thread is one of a device.

    Turns end after `TURN_S`, not after 5 ms: a dispatch gives the interpreter up and asks for it again. And tracing
    does not set off collections of garbage, of which one that looks at every object takes half a second.

    >>> with beside_training():
    ...     round(sys.getswitchinterval(), 4), gc.isenabled()
    (0.0001, False)
    """
    with _lock:
        _outside.append((sys.getswitchinterval(), gc.isenabled()))
        sys.setswitchinterval(min(TURN_S, _outside[0][0]))
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            interval_s, collecting = _outside.pop()
            if not _outside:
                sys.setswitchinterval(interval_s)
                if collecting:
                    gc.enable()


class Thread:
    """A thread beside the training, once it is switched on: it does one thing after another.

    >>> thread = Thread("jvpipe-example")
    >>> thread.switch(on=True)
    >>> asked = thread.ask(sum, [1, 2])
    >>> thread.wait()
    >>> asked.result(), thread.waiting
    (3, 0)
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pool: ThreadPoolExecutor | None = None
        self._asked: list[Future[Any]] = []

    def __bool__(self) -> bool:
        return self._pool is not None

    def switch(self, *, on: bool) -> None:
        """Begins anew, or ends; what has not begun by then is not done."""
        if self._pool:
            self._pool.shutdown(cancel_futures=True)
        self._pool, self._asked = ThreadPoolExecutor(1, self._name) if on else None, []

    @property
    def waiting(self) -> int:
        """How much it has not done yet."""
        self._asked = [future for future in self._asked if not future.done()]
        return len(self._asked)

    def ask(self, act: Callable[..., T], *args: Any) -> Future[T]:
        """Has it do something; returns at once."""
        assert self._pool is not None, "switched on"
        self._asked.append(future := self._pool.submit(act, *args))
        return future

    def wait(self) -> None:
        """Waits until all is done."""
        for future in self._asked:
            future.result()


# Follows what steps take, and has another plan ready when that pays.

AHEAD = 4
"""So many steps may wait to be looked at; more are passed over."""
_log = logging.getLogger("jvpipe")


class Adapter:
    """Looks at the steps of a pipeline, once it is switched on; what is to move goes into the queue of its moves."""

    def __init__(
        self, compiled_plans: CompiledPlans, queue: deque[Migration], limits: Limits
    ) -> None:
        self._compiled_plans, self._queue, self._limits = compiled_plans, queue, limits
        self._thread = Thread("jvpipe-adapt")
        self._rule = Rule()
        self._link: Link | None = None  # between devices, measured before the first step
        self._trigger: tuple[Traced, Trigger] | None = None
        self._ready: Migration | None = None
        self._replaced: Plan | None = None  # the plan whose replacement is ready; not judged again

    def switch(self, on: bool, rule: Rule) -> None:
        """On, under a rule, or off."""
        self._thread.switch(on=on)
        self._rule, self._trigger, self._ready, self._replaced = rule, None, None, None

    def follow(self, compiled_plans: CompiledPlans) -> None:
        """Another model is trained from here on."""
        self._compiled_plans, self._ready = compiled_plans, None

    def observe(
        self, monitor: Monitor | None, compiled: CompiledPlan, step: int, stream_steps: int
    ) -> None:
        """Has a dispatched step looked at in the background; returns at once.

        Args:
            monitor: has its marks.
            compiled: all of it ran under this plan.
            step: its number.
            stream_steps: those of the stream after it.
        """
        if not self._thread or monitor is None:
            return
        record, first = monitor.close(), self._compiled_plans.current
        if record and self._thread.waiting < AHEAD and compiled.traced is first.traced:
            trigger = self._trigger_of(first, self._compiled_plans.layer_s)
            self._thread.ask(self._judge, trigger, monitor, record, first, step, stream_steps)

    def offer(self, step: int) -> None:
        """Lets what is ready be done before `step`, unless something else is under way."""
        if self._thread and self._link is None:
            first, *others = map(first_of, self._compiled_plans.current.devices)
            self._link = links_between(first, others[0]).send if others else INFINITE
        ready = self._ready
        if ready and not self._queue:
            self._ready = None
            current = self._compiled_plans.current
            if ready.old.plan == current.plan and ready.old.traced is current.traced:
                self._queue.append(replace(ready, change=replace(ready.change, step=step)))

    def wait(self) -> None:
        """Waits until every step that was seen has been looked at."""
        self._thread.wait()

    def _judge(
        self,
        trigger: Trigger,
        monitor: Monitor,
        record: Record,
        compiled: CompiledPlan,
        step: int,
        stream_steps: int,
    ) -> None:
        try:
            if compiled.plan == self._replaced:
                return
            self._replaced = None
            replan = trigger.observe(compiled.plan, seen(monitor.read(record), compiled))
            if replan is not None:
                with beside_training():
                    self._prepare(trigger, replan, compiled, step, stream_steps)
        except Exception:
            _log.exception("step %d could not be looked at", step)

    def _trigger_of(self, compiled: CompiledPlan, layer_s: Sequence[float] | None) -> Trigger:
        """That of the model at hand."""
        if self._trigger is None or self._trigger[0] is not compiled.traced:
            synchronous = compiled.schedule.synchronous
            trigger = Trigger(
                layer_s, compiled.microbatches, synchronous=synchronous, rule=self._rule
            )
            self._trigger = compiled.traced, trigger
        return self._trigger[1]

    def _prepare(
        self, trigger: Trigger, replan: Replan, compiled: CompiledPlan, step: int, stream_steps: int
    ) -> None:
        """Makes the migration ready, if it keeps the limit and repays what it moves."""
        cuts = list(replan.cuts)
        try:
            new = self._compiled_plans.with_plan(plan_for(replan, trigger, compiled), compiled)
            migration = prepare_migration(
                compiled, new, (step + 1, 0), replan.why, self._limits, stream_steps
            )
        except MemoryLimitExceeded as error:
            _log.warning("%s, but cuts %s cannot be: %s", replan.why, cuts, error)
            trigger.refuse(replan.cuts)
            return
        if not replan.repays(migration.change.moved_bytes, self._link or INFINITE, self._rule):
            size = migration.change.moved_bytes
            _log.info(
                "%s, but cuts %s do not repay the %d bytes that would move", replan.why, cuts, size
            )
            trigger.refuse(replan.cuts)
            return
        migration.bound.compile_marks()
        self._ready, self._replaced = migration, compiled.plan


def plan_for(replan: Replan, trigger: Trigger, compiled: CompiledPlan) -> Plan:
    """The plan with other cuts, on the devices and with the fates of the one at home.

    Args:
        replan: the cuts.
        trigger: that asked for them.
        compiled: has the layers.
    """
    home = trigger.home
    return home if replan.cuts == home.cuts else recut(compiled.traced.graph, home, replan.cuts)


def seen(measured: Measured, compiled: CompiledPlan) -> Seen:
    """Seconds of a measured step per micro-batch, by layer and by stage.

    Where devices of a stage take turns, each has as many times longer for one of its own.
    """
    places = [str(compiled.devices[stage.devices[0]]) for stage in compiled.plan.stages]
    exposed_s = [
        measured.exposed.get(place, 0.0) / compiled.microbatches / places.count(place)
        for place in places
    ]
    layer_s = measured.layer_s(len(compiled.traced.graph.layers))
    if not compiled.schedule.synchronous:
        layer_s = [
            layer_s[i] / len(stage.devices) for stage in compiled.plan.stages for i in stage.layers
        ]
    return Seen(layer_s, exposed_s)
