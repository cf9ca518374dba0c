"""Follows what steps take, and has another plan ready when that pays: one process by itself, several together.

The controller's thread only hands over the marks of a step. A thread beside it reads them, asks the
trigger, and lowers and compiles the migration; the pipeline makes it at the next boundary between
two steps. Several processes all tell what their devices took, the first one decides, and all move
at one step:

    step 4     every process tells the seconds of its layers     the first one asks the trigger
    step 8     the first one proposes another plan               all make it ready, beside the training
    step 12    every process tells that it is ready              all move

Nobody is asked between these steps, so that a process may run ahead of the others. What all were
told decides what each does; a process that is not ready is waited for at a later one of these
steps. A process alone need not tell anybody: its thread decides and makes ready as soon as a step
was read, and what is ready is done before the next step.
"""

import gc
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import Any, TypeVar

from jvpipe._jax import first_of
from jvpipe.cost.hardware import INFINITE, Link
from jvpipe.cost.links import links_between
from jvpipe.ir.plan import Plan
from jvpipe.lowering.step import lower_move
from jvpipe.planners.user_fates import recut
from jvpipe.runtime.engine.compiled_plan import CompiledPlan
from jvpipe.runtime.engine.host_link import link_between
from jvpipe.runtime.engine.hosts import Hosts
from jvpipe.runtime.engine.monitor import Measured, Monitor
from jvpipe.runtime.engine.tensors import Limits
from jvpipe.runtime.state.migrate import UNFORESEEN, Migration, copied_bytes, prepare_migration
from jvpipe.session.compiled_plans import CompiledPlans, agree_on_rows
from jvpipe.session.planning import Planned, planned_again
from jvpipe.session.trigger import Proposal, Replan, Rule, Seen, Told, Trigger, all_of

T = TypeVar("T")


@dataclass(frozen=True)
class AdaptEffort:
    """How much of a run's time may go into looking at it.

    Attributes:
        turn_s: seconds after which a thread beside the training gives up the interpreter. Python's
            5 ms would keep each dispatch waiting that long.
        waiting_steps: steps that may wait to be looked at; more are passed over.
        round_steps: steps after which several processes tell one another what they have seen.
    """

    turn_s: float = 1e-4
    waiting_steps: int = 4
    round_steps: int = 4


ADAPTING = AdaptEffort()
_lock = Lock()
_outside: list[tuple[float, bool]] = []
"""What each that is inside has found; the first is what holds outside."""


@contextmanager
def beside_training() -> Iterator[None]:
    """Keeps work beside the training from holding up the thread that dispatches.

    That thread gives the interpreter up at each dispatch and then asks for it again. So turns end
    after `ADAPTING.turn_s`. And tracing does not set off collections of garbage, which look at
    every object and take half a second.

    >>> with beside_training():
    ...     round(sys.getswitchinterval(), 4), gc.isenabled()
    (0.0001, False)
    """
    with _lock:
        _outside.append((sys.getswitchinterval(), gc.isenabled()))
        sys.setswitchinterval(min(ADAPTING.turn_s, _outside[0][0]))
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
        """Begins again, or ends; what has not begun by then is not done."""
        if self._pool:
            self._pool.shutdown(cancel_futures=True)
        self._pool, self._asked = ThreadPoolExecutor(1, self._name) if on else None, []

    @property
    def waiting(self) -> int:
        """How much it has not done yet."""
        # Finished calls are forgotten, so the list stays short.
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


_log = logging.getLogger("jvpipe")


class Adapter:
    """Looks at the steps of a pipeline, once it is switched on; what is to move goes into the queue of its moves.

    Args:
        compiled_plans: those of the model.
        queue: the migrations that wait.
        limits: kept while layers move.
        hosts: the processes, if there are several.
    """

    def __init__(
        self,
        compiled_plans: CompiledPlans,
        queue: deque[Migration],
        limits: Limits,
        hosts: Hosts | None,
    ) -> None:
        self._compiled_plans, self._queue = compiled_plans, queue
        self._limits, self._hosts = limits, hosts
        self._thread, self._judge = Thread("jvpipe-adapt"), _Judge(Rule(), compiled_plans, limits)
        self._stream_steps = 0
        self._link: Link | None = None  # measured before the first step

    def switch(self, on: bool, rule: Rule) -> None:
        """Switches it on, under a rule, or off; in all processes alike.

        Raises:
            Disagreement: another process was asked for something else.
        """
        if self._hosts:
            self._hosts.agree("adapting", [("on", str(on)), ("rule", str(rule))])
        self._thread.switch(on=on)
        self._judge = _Judge(rule, self._compiled_plans, self._limits)

    def follow(self, compiled_plans: CompiledPlans) -> None:
        """Looks at another model from here on; what is still read of the one before is for nobody."""
        self._compiled_plans = compiled_plans
        self._judge = _Judge(self._judge.rule, compiled_plans, self._limits)

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
        self._stream_steps = stream_steps
        if not self._thread or monitor is None:
            return
        record, first = monitor.close(), self._compiled_plans.current
        is_free = self._thread.waiting < ADAPTING.waiting_steps
        if record and is_free and compiled.traced is first.traced:
            if not self._hosts or not self._hosts.process:  # who decides
                self._judge.plans[step] = first.plan
            self._thread.ask(
                self._look, self._judge, partial(monitor.read, record), first, step, stream_steps
            )

    def offer(self, step: int) -> None:
        """Does what all were told, now and then: tells the others, prepares, or moves before `step`."""
        if not self._thread:
            return
        judge, hosts, current = self._judge, self._hosts, self._compiled_plans.current
        if self._link is None:
            self._link = self._measured_link()
        judge.link = self._link
        if hosts is None:
            # Alone: what the thread has prepared by now is all that there is to know.
            if judge.preparing is not None and not self._queue:
                self._move(judge.preparing, [judge.news()], step)
            return
        if step % ADAPTING.round_steps:
            return
        # All processes come here at the same step, so each exchange is of the same round for all.
        words = hosts.exchange("seconds", judge.news().to_json().encode())
        news = [Told.from_json(word.decode()) for word in words]
        proposal = news[0].proposal
        if judge.preparing is not None:
            self._move(judge.preparing, news, step)
        elif proposal is not None and current.plan == proposal.old and not self._queue:
            judge.preparing = proposal
            self._thread.ask(judge.prepare, proposal, current, step, self._stream_steps)
        if not hosts.process:
            self._thread.ask(judge.decide, news, current)

    def wait(self) -> None:
        """Waits until every step that was seen has been looked at."""
        self._thread.wait()

    def _measured_link(self) -> Link:
        """Measures the link between processes, or between the devices of one."""
        if self._hosts:
            return link_between(self._hosts)
        first, *others = map(first_of, self._compiled_plans.current.devices)
        return links_between(first, others[0]).send if others else INFINITE

    def _move(self, proposal: Proposal, news: Sequence[Told], step: int) -> None:
        """Queues a migration once all are ready for it.

        Forgets it if one of them cannot make it.
        """
        judge, current = self._judge, self._compiled_plans.current
        refusals = [one.refusal for one in news if one.refusal]
        if not refusals and not all(one.how for one in news):
            return
        migration, judge.preparing, judge.ready = judge.ready, None, None
        if refusals:
            cuts = list(proposal.new.cuts)
            _log.warning("%s, but cuts %s cannot be: %s", proposal.why, cuts, refusals[0])
            judge.refuse(proposal.new)
        elif current.plan == proposal.old and not self._queue:
            assert isinstance(migration, Migration), "nobody refuses"
            agree_on_rows(migration.new, "migrations")
            # Processes that would move by different ways prepare again, all by one.
            foreseen = migration.stream_steps if len({one.how for one in news}) == 1 else UNFORESEEN
            change = replace(migration.change, step=step)
            self._queue.append(replace(migration, change=change, stream_steps=foreseen))

    def _look(
        self,
        judge: "_Judge",
        read: Callable[[], Measured],
        compiled: CompiledPlan,
        step: int,
        stream_steps: int,
    ) -> None:
        """Reads the marks of a step; a process alone decides and makes ready at once."""
        try:
            seconds = seen(read(), compiled)
        except Exception:
            _log.exception("step %d could not be looked at", step)
            return
        if self._hosts:
            judge.untold.append((step, seconds))
            return
        if judge.preparing is not None:  # the thread that trains has not come to it
            return
        judge.decide([Told({step: seconds})], compiled)
        proposal, judge.proposal = judge.proposal, None
        if proposal is not None:
            judge.prepare(proposal, compiled, step + 1, stream_steps)
            judge.preparing = proposal


class _Judge:
    """What a process knows of the steps of a model under a rule; of several the first one proposes.

    Args:
        rule: how much evidence is enough.
        compiled_plans: those of the model.
        limits: kept while layers move.
    """

    def __init__(self, rule: Rule, compiled_plans: CompiledPlans, limits: Limits) -> None:
        self.rule, self.link = rule, INFINITE
        self._compiled_plans, self._limits = compiled_plans, limits
        self.plans: dict[int, Plan] = {}  # under which the steps ran that not all have told of
        self.untold: deque[tuple[int, Seen]] = deque()  # steps that the others do not know of
        self.proposal: Proposal | None = None  # not told yet
        self.preparing: Proposal | None = None  # what all make ready
        self.ready: Migration | str | None = None  # for it, or why it cannot be
        self._parts: dict[int, list[Seen]] = {}  # of steps, as the processes tell them
        self._trigger: Trigger | None = None
        self._replaced: Plan | None = None  # another one is proposed for it: not judged again
        self._answer: Planned | None = None  # the planner's last one
        self._asked: tuple[int, ...] = ()  # the cuts for which the plan that is proposed was found

    def news(self) -> Told:
        """Returns what the others do not know yet, and counts it as told."""
        seconds = dict(self.untold.popleft() for _ in range(len(self.untold)))
        proposal, self.proposal = self.proposal, None
        ready = self.ready
        how = ready.change.how if isinstance(ready, Migration) else ""
        return Told(seconds, proposal, how, ready if isinstance(ready, str) else "")

    def decide(self, news: Sequence[Told], compiled: CompiledPlan) -> None:
        """Asks the trigger about every step that all have told of by now.

        Args:
            news: what each process has told.
            compiled: the plan in use.
        """
        try:
            with beside_training():
                for one in news:
                    for step, part in one.seconds.items():
                        self._parts.setdefault(step, []).append(part)
                complete = [s for s, parts in self._parts.items() if len(parts) == len(news)]
                for step in sorted(complete):
                    self._judge(self.plans[step], all_of(self._parts[step]), compiled)
                    # Earlier steps are too late to decide anything.
                    self._parts = {s: parts for s, parts in self._parts.items() if s > step}
                    self.plans = {s: plan for s, plan in self.plans.items() if s > step}
        except Exception:
            _log.exception("what steps took could not be judged")

    def prepare(
        self, proposal: Proposal, compiled: CompiledPlan, step: int, stream_steps: int
    ) -> None:
        """Makes a migration ready, by the way that this process has room for; or says why it cannot.

        Args:
            proposal: the plan to come.
            compiled: the plan in use.
            step: before which it may be made.
            stream_steps: those of the stream by then.
        """
        try:
            with beside_training():
                new = self._compiled_plans.with_plan(proposal.new, compiled)
                moment = (step, 0)
                migration = prepare_migration(
                    compiled, new, moment, proposal.why, self._limits, stream_steps
                )
                migration.bound.compile_marks()
                self.ready = migration
        except Exception as error:
            self.ready = str(error) or type(error).__name__

    def refuse(self, plan: Plan) -> None:
        """Asks no more for a plan that cannot be made."""
        if self._trigger is not None:
            self._trigger.refuse(plan.cuts)
            self._trigger.refuse(self._asked)
        self._replaced = None

    def _judge(self, plan: Plan, seconds: Seen, compiled: CompiledPlan) -> None:
        """Proposes another plan if a step asks for one that pays for its way there.

        Args:
            plan: under which the step ran.
            seconds: that it took.
            compiled: the plan in use.
        """
        if self._trigger is None:
            synchronous, layer_s = compiled.schedule.synchronous, self._compiled_plans.layer_s
            self._trigger = Trigger(
                layer_s, compiled.microbatches, synchronous=synchronous, rule=self.rule
            )
        if plan == self._replaced:  # a proposal to leave this plan is on its way
            return
        self._replaced, trigger = None, self._trigger
        replan = trigger.observe(plan, seconds)
        if replan is None or plan != compiled.plan:
            return
        new = self._plan_for(replan, trigger.home, compiled)
        if new is None:
            trigger.refuse(replan.cuts)
            return
        moved_bytes = copied_bytes(lower_move(compiled.traced.graph, plan, new, compiled.optimizer))
        if replan.repays(moved_bytes, self.link, self.rule):
            trigger.expect(new.cuts)
            self._asked = replan.cuts
            self.proposal, self._replaced = Proposal(plan, new, replan.why), plan
            return
        too_dear = "%s, but cuts %s do not repay the %d bytes that would move"
        _log.info(too_dear, replan.why, new.cuts, moved_bytes)
        trigger.refuse(replan.cuts)

    def _plan_for(self, replan: Replan, home: Plan, compiled: CompiledPlan) -> Plan | None:
        """Finds the plan to move to.

        Args:
            replan: the cuts that a step asks for.
            home: the plan that was planned or asked for.
            compiled: the plan in use.

        Returns:
            The plan at home; or the planner's for the devices as they are, None if it gains too
                little; or other cuts
            alone, where no planner made the plan at home, or whoever did is not asked again.
        """
        compiled_plans, graph = self._compiled_plans, compiled.traced.graph
        planned, settings = compiled_plans.planned, compiled_plans.settings
        if replan.cuts == home.cuts:
            return home

        def placed(plan: Plan) -> Plan:
            """Puts the optimizer's state where it lies at home."""
            like_home = zip(plan.stages, recut(graph, home, plan.cuts).stages, strict=True)
            stages = tuple(replace(s, state_fates=x.state_fates) for s, x in like_home)
            return replace(plan, stages=stages, splits=home.splits)

        def held_bytes(plan: Plan) -> list[int]:
            peaks = compiled_plans.with_plan(placed(plan), compiled).peaks
            return [max(peaks[d].bytes for d in stage.devices) for stage in plan.stages]

        answer = None
        by_user = settings.fates or settings.checkpoint is not None
        if planned is not None and not by_user and _alike(planned.plan, home):
            held_bytes_of = None if settings.hosts else held_bytes  # others' bytes are unknown here
            answer = planned_again(planned, replan.slowness, held_bytes_of)
        if answer is None:
            return recut(graph, home, replan.cuts)
        candidates = (x for x in (self._answer, planned) if x and _alike(x.plan, compiled.plan))
        if present := next(candidates, None):
            now = replace(answer, decision=present.decision)
            if answer.step_s > (1 - self.rule.gain) * now.step_s:
                return None
        self._answer = answer
        return placed(answer.plan)


def _alike(one: Plan, other: Plan) -> bool:
    """Tells whether two plans have the same layers on the same devices, with the same fates of what they leave."""

    def stages(plan: Plan) -> list[Any]:
        return [(stage.layers, stage.devices, dict(stage.fates)) for stage in plan.stages]

    return stages(one) == stages(other)


def seen(measured: Measured, compiled: CompiledPlan) -> Seen:
    """Returns seconds of a measured step per micro-batch, by layer and by stage.

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


# Layers begin apart, and those that have moved run by programs of their own until those of their
# groups are compiled, beside the run. Nobody knows how long a run will be. Unless groups are asked
# for, they are compiled once the steps of a plan have taken as long as its programs took to compile,
# and on CPUs alone: there groups were measured, and their results compared bit by bit.
#
#     |-- compile layers --|-- steps of layers apart --|-- steps, groups are compiled --|-- groups --
#     |<------- c -------->|<---------- c ------------>|
#
# So a run that ends early has compiled no group, and the groups of a longer one take about as long
# as it has already spent.


class Grouping:
    """Has a plan of layers apart compiled in groups, by a thread beside the training, and then run so."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._apart: CompiledPlan | None = None
        self._stepping_s = 0.0  # what steps of `_apart` have taken
        self._grouped: Future[CompiledPlan] | None = None
        self._begun = False

    def note_step(self, taken_s: float) -> None:
        """Counts the seconds that the thread of the training was within a step."""
        self._stepping_s += taken_s

    def pass_step(self, compiled_plans: CompiledPlans) -> None:
        """Begins to compile the groups of a plan that has none, or takes over what has been compiled.

        Args:
            compiled_plans: those of the model, between two steps, with no change of plan to come.
        """
        current, asked = compiled_plans.current, compiled_plans.settings.group
        if current.grouped or asked is False:
            return
        if asked is None and first_of(compiled_plans.settings.devices[0]).platform != "cpu":
            return
        if self._apart is not current:
            self._apart, self._grouped, self._begun = current, None, False
            self._stepping_s = 0.0
        if not self._begun:
            if asked or self._stepping_s > current.compile_s:
                self._pool = self._pool or ThreadPoolExecutor(1, "jvpipe-groups")
                self._grouped = self._pool.submit(_compiled, compiled_plans, current)
                self._begun = True
        elif self._grouped and self._grouped.done():
            grouped, self._grouped = self._grouped, None
            if error := grouped.exception():
                _log.warning("layers stay apart, for their groups cannot be compiled: %s", error)
            elif grouped.result() is not current:  # else there is no room for groups
                compiled_plans.adopt(grouped.result())

    def wait(self) -> None:
        """Waits until what is being compiled is there; the next step runs it."""
        if self._grouped:
            self._grouped.exception()


def _compiled(compiled_plans: CompiledPlans, apart: CompiledPlan) -> CompiledPlan:
    with beside_training():
        return compiled_plans.in_groups(apart)
