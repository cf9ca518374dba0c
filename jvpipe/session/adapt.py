"""Follows what steps take, and has another plan ready when that pays.

The controller's thread only hands over the marks of a step. A thread beside it waits for them, asks the trigger, and
lowers and compiles the migration; the pipeline makes it at the next boundary between two steps.
"""

import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from jvpipe.cost.hardware import INFINITE, Link
from jvpipe.cost.links import links_between
from jvpipe.ir.plan import Plan
from jvpipe.planners.user_fates import recut
from jvpipe.runtime.compiled_plan import Build
from jvpipe.runtime.migrate import Migration, prepare
from jvpipe.runtime.monitor import Measured, Monitor, Record
from jvpipe.runtime.tensors import Limits, MemoryLimitExceeded
from jvpipe.session.background import beside_training
from jvpipe.session.compiled_plans import Builds
from jvpipe.session.trigger import Replan, Rule, Seen, Trigger
from jvpipe.trace.graph import Traced

_AHEAD = 4
"""So many steps may wait to be looked at; more are passed over."""
_log = logging.getLogger("jvpipe")


class Adapter:
    """Looks at the steps of a pipeline, once it is switched on; what is to move goes into the queue of its moves."""

    def __init__(self, builds: Builds, queue: deque[Migration], limits: Limits) -> None:
        self._builds, self._queue, self._limits = builds, queue, limits
        self._pool: ThreadPoolExecutor | None = None
        self._waiting: list[Future[None]] = []
        self._rule = Rule()
        self._link: Link | None = None  # between devices, measured before the first step
        self._trigger: tuple[Traced, Trigger] | None = None
        self._found: Migration | None = None
        self._left: Plan | None = None  # from which there is a way already

    def switch(self, on: bool, rule: Rule) -> None:
        """On, under a rule, or off."""
        if self._pool:
            self._pool.shutdown(cancel_futures=True)
        self._pool = ThreadPoolExecutor(1, "jvpipe-adapt") if on else None
        self._rule, self._waiting, self._trigger, self._found, self._left = rule, [], None, None, None

    def follow(self, builds: Builds) -> None:
        """Another model is trained from here on."""
        self._builds, self._found = builds, None

    def saw(self, monitor: Monitor | None, build: Build, step: int, flight: int) -> None:
        """A step has been dispatched, all of it under the plan of `build`; returns at once."""
        if self._pool is None or monitor is None:
            return
        record, first = monitor.close(), self._builds.first
        self._waiting = [future for future in self._waiting if not future.done()]
        if record and len(self._waiting) < _AHEAD and build.traced is first.traced:
            trigger = self._trigger_of(first, self._builds.layer_s)
            self._waiting.append(self._pool.submit(self._follow, trigger, monitor, record, first, step, flight))

    def offer(self, step: int) -> None:
        """Lets what is ready be done before `step`, unless something else is under way."""
        if self._pool and self._link is None:
            first, *others = self._builds.first.devices
            self._link = links_between(first, others[0]).send if others else INFINITE
        found = self._found
        if found and not self._queue:
            self._found = None
            first = self._builds.first
            if found.old.plan == first.plan and found.old.traced is first.traced:
                self._queue.append(replace(found, change=replace(found.change, step=step)))

    def wait(self) -> None:
        """Waits until every step that was seen has been looked at."""
        for future in self._waiting:
            future.result()

    def _follow(self, trigger: Trigger, monitor: Monitor, record: Record, build: Build, step: int, flight: int) -> None:
        try:
            if build.plan == self._left:
                return
            self._left = None
            replan = trigger.observe(build.plan, seen(monitor.read(record), build))
            if replan is not None:
                with beside_training():
                    self._prepare(trigger, replan, build, step, flight)
        except Exception:
            _log.exception("step %d could not be looked at", step)

    def _trigger_of(self, build: Build, layer_s: Sequence[float] | None) -> Trigger:
        """That of the model at hand."""
        if self._trigger is None or self._trigger[0] is not build.traced:
            synchronous = build.schedule.synchronous
            trigger = Trigger(layer_s, build.microbatches, synchronous=synchronous, rule=self._rule)
            self._trigger = build.traced, trigger
        return self._trigger[1]

    def _prepare(self, trigger: Trigger, replan: Replan, build: Build, step: int, flight: int) -> None:
        """Makes the migration ready, if it keeps the limit and repays what it moves."""
        home, cuts = trigger.home, list(replan.cuts)
        plan = home if replan.cuts == home.cuts else recut(build.traced.graph, home, replan.cuts)
        try:
            found = prepare(build, self._builds.under(plan, build), (step + 1, 0), replan.why, self._limits, flight)
        except MemoryLimitExceeded as error:
            _log.warning("%s, but cuts %s cannot be: %s", replan.why, cuts, error)
            trigger.refuse(replan.cuts)
            return
        if not replan.repays(found.change.moved_bytes, self._link or INFINITE, self._rule):
            size = found.change.moved_bytes
            _log.info("%s, but cuts %s do not repay the %d bytes that would move", replan.why, cuts, size)
            trigger.refuse(replan.cuts)
            return
        found.bound.compile_marks()
        self._found, self._left = found, build.plan


def seen(measured: Measured, build: Build) -> Seen:
    """What a step took of a micro-batch, by layer and by stage."""
    places = [str(build.devices[stage.devices[0]]) for stage in build.plan.stages]
    exposed_s = [measured.exposed.get(place, 0.0) / build.microbatches for place in places]
    return Seen(measured.layer_s(len(build.traced.graph.layers)), exposed_s)
