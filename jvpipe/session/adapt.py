"""Follows what steps take, and has another plan ready when that pays: one process by itself, several together.

The controller's thread only hands over the marks of a step. A thread beside it reads them, asks the trigger, and lowers
and compiles the migration; the pipeline makes it at the next boundary between two steps. If there are several
processes, all tell what their devices took, the first one decides, and all move at one step:

    step 4     every process tells the seconds of its layers     the first one asks the trigger
    step 8     the first one proposes another plan all make it ready, beside the training
    step 12    every process tells that it is ready              all move

Nobody is asked between these steps, so that a process may run ahead of the others. What all were told decides what each
does; a process that is not ready is waited for at a later one of these steps. A process alone need not tell anybody:
its thread decides and makes ready as soon as a step was read, and what is ready is done before the next step.
"""

import gc
import json
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
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
from jvpipe.runtime.engine.monitor import Measured, Monitor, Record
from jvpipe.runtime.engine.tensors import Limits
from jvpipe.runtime.state.migrate import UNFORESEEN, Migration, copied_bytes, prepare_migration
from jvpipe.session.asking import Planned
from jvpipe.session.compiled_plans import CompiledPlans
from jvpipe.session.planning import planned_again
from jvpipe.session.settings import agreed_rows
from jvpipe.session.trigger import Replan, Rule, Seen, Trigger, all_of

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
_outside: list[
    tuple[float, bool]
] = []  # what each that is inside has found; the first is what holds outside


@contextmanager
def beside_training() -> Iterator[None]:
    """Keeps work beside the training from holding up the thread that dispatches.

    That thread gives the interpreter up at each dispatch and then asks for it again. So turns end
    after `ADAPTING.turn_s`. And tracing does not set off collections of garbage, which look at every
    object and take half a second.

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


# The adapter

_log = logging.getLogger("jvpipe")


@dataclass(frozen=True, slots=True)
class Proposal:
    """A plan that is to take another one's place, and why."""

    old: Plan
    new: Plan
    why: str


@dataclass(frozen=True, slots=True)
class Told:
    """What a process tells the others: the seconds of its layers by step; of the first one, what it proposes.

    `how` it would make the proposal before, once it is ready for it; `refusal`: why it cannot.
    """

    seconds: dict[int, Seen]
    proposal: Proposal | None = None
    how: str = ""
    refusal: str = ""

    def to_json(self) -> str:
        """As text.

        >>> told = Told({3: Seen([1.0], [0.0])}, Proposal(Plan.from_cuts([1]), Plan.from_cuts([1], [1]), "slow"))
        >>> Told.from_json(told.to_json()) == told
        True
        """
        seconds = [[step, asdict(seen)] for step, seen in self.seconds.items()]
        told = self.proposal and [
            self.proposal.old.to_json(),
            self.proposal.new.to_json(),
            self.proposal.why,
        ]
        return json.dumps([seconds, told, self.how, self.refusal])

    @staticmethod
    def from_json(text: str) -> "Told":
        """What `to_json` gave."""
        seconds, told, how, refusal = json.loads(text)
        proposal = told and Proposal(Plan.from_json(told[0]), Plan.from_json(told[1]), told[2])
        return Told({step: Seen(**seen) for step, seen in seconds}, proposal, how, refusal)


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
        self._thread, self._judge = Thread("jvpipe-adapt"), _Judge(Rule())
        self._stream_steps = 0
        self._link: Link | None = None  # measured before the first step

    def switch(self, on: bool, rule: Rule) -> None:
        """On, under a rule, or off; in all processes alike.

        Raises:
            Disagreement: another process was asked for something else.
        """
        if self._hosts:
            self._hosts.agree("adapting", [("on", str(on)), ("rule", str(rule))])
        self._thread.switch(on=on)
        self._judge = _Judge(rule)

    def follow(self, compiled_plans: CompiledPlans) -> None:
        """Another model is trained from here on; what is still read of the one before is for nobody."""
        self._compiled_plans, self._judge = compiled_plans, _Judge(self._judge.rule)

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
        if (
            record
            and self._thread.waiting < ADAPTING.waiting_steps
            and compiled.traced is first.traced
        ):
            if self._decides:
                self._judge.plans[step] = first.plan
            read = self._judge, monitor, record, first, step, stream_steps
            self._thread.ask(self._look, *read)

    def offer(self, step: int) -> None:
        """Does what all were told, now and then: tells the others, prepares, or moves before `step`."""
        if not self._thread:
            return
        if self._link is None:
            self._link = self._measured_link()
        judge, hosts = self._judge, self._hosts
        if hosts is None:
            if judge.preparing is not None and not self._queue:
                self._move(judge.preparing, [judge.news()], step)
            return
        if step % ADAPTING.round_steps:
            return
        news = hosts.exchange("seconds", judge.news().to_json().encode())
        told = [Told.from_json(text.decode()) for text in news]
        if judge.preparing is not None:
            self._move(judge.preparing, told, step)
        elif (proposal := told[0].proposal) is not None:
            current = self._compiled_plans.current
            if current.plan == proposal.old and not self._queue:
                judge.preparing = proposal
                self._thread.ask(self._prepare, judge, proposal, current, step, self._stream_steps)
        if self._decides:
            self._thread.ask(self._propose, judge, told, self._compiled_plans.current)

    def wait(self) -> None:
        """Waits until every step that was seen has been looked at."""
        self._thread.wait()

    @property
    def _decides(self) -> bool:
        return self._hosts is None or not self._hosts.process

    def _measured_link(self) -> Link:
        """Between processes, or between the devices of one."""
        if self._hosts:
            return link_between(self._hosts)
        first, *others = map(first_of, self._compiled_plans.current.devices)
        return links_between(first, others[0]).send if others else INFINITE

    def _move(self, proposal: Proposal, told: Sequence[Told], step: int) -> None:
        """Queues a migration once all are ready for it; forgets it if one of them cannot make it."""
        judge, current = self._judge, self._compiled_plans.current
        refusals = [one.refusal for one in told if one.refusal]
        if not refusals and not all(one.how for one in told):
            return
        migration, judge.preparing, judge.made = judge.made, None, None
        if refusals:
            cuts = list(proposal.new.cuts)
            _log.warning("%s, but cuts %s cannot be: %s", proposal.why, cuts, refusals[0])
            judge.refuse(proposal.new)
        elif current.plan == proposal.old and not self._queue:
            assert isinstance(migration, Migration), "nobody refuses"
            if self._hosts:
                rows = agreed_rows(migration.new)
                self._hosts.agree("migrations", [("plan", str(proposal.new.to_json())), *rows])
            foreseen = migration.stream_steps if len({one.how for one in told}) == 1 else UNFORESEEN
            change = replace(migration.change, step=step)
            self._queue.append(replace(migration, change=change, stream_steps=foreseen))

    # In the background

    def _look(
        self,
        judge: "_Judge",
        monitor: Monitor,
        record: Record,
        compiled: CompiledPlan,
        step: int,
        stream_steps: int,
    ) -> None:
        try:
            took = seen(monitor.read(record), compiled)
        except Exception:
            _log.exception("step %d could not be looked at", step)
            return
        if self._hosts:
            judge.read.append((step, took))
            return
        if judge.preparing is not None:  # the other thread has not come to it
            return
        self._propose(judge, [Told({step: took})], compiled)
        proposal, judge.proposal = judge.proposal, None
        if proposal is not None:
            self._prepare(judge, proposal, compiled, step + 1, stream_steps)
            judge.preparing = proposal

    def _propose(self, judge: "_Judge", told: Sequence[Told], compiled: CompiledPlan) -> None:
        try:
            with beside_training():
                judge.decide(told, compiled, self._compiled_plans, self._link or INFINITE)
        except Exception:
            _log.exception("what steps took could not be judged")

    def _prepare(
        self,
        judge: "_Judge",
        proposal: Proposal,
        compiled: CompiledPlan,
        step: int,
        stream_steps: int,
    ) -> None:
        """Makes a migration ready, by the way that this process has room for; or says why it cannot."""
        try:
            with beside_training():
                new = self._compiled_plans.with_plan(proposal.new, compiled)
                why, limits = proposal.why, self._limits
                migration = prepare_migration(compiled, new, (step, 0), why, limits, stream_steps)
                migration.bound.compile_marks()
                judge.made = migration
        except Exception as error:
            judge.made = str(error) or type(error).__name__


class _Judge:
    """What a process knows of the steps of a model under a rule; of several the first one proposes."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.plans: dict[int, Plan] = {}  # under which the steps ran that not all have told of
        self.read: deque[tuple[int, Seen]] = deque()  # steps that the others have not been told of
        self.proposal: Proposal | None = None  # not told yet
        self.preparing: Proposal | None = None  # what all make ready
        self.made: Migration | str | None = None  # for it, or why it cannot be
        self._told: dict[int, list[Seen]] = {}
        self._trigger: Trigger | None = None
        self._replaced: Plan | None = None  # another one is proposed for it: not judged again
        self._answer: Planned | None = None  # the planner's last one
        self._asked: tuple[int, ...] = ()  # the cuts for which the plan that is proposed was found

    def news(self) -> Told:
        """Returns the news of this process, and counts it as told."""
        seconds = dict(self.read.popleft() for _ in range(len(self.read)))
        proposal, self.proposal = self.proposal, None
        made = self.made
        how = made.change.how if isinstance(made, Migration) else ""
        return Told(seconds, proposal, how, made if isinstance(made, str) else "")

    def decide(
        self,
        told: Sequence[Told],
        compiled: CompiledPlan,
        compiled_plans: CompiledPlans,
        link: Link,
    ) -> None:
        """Asks the trigger about every step that all have told of by now.

        Args:
            told: what each process has told.
            compiled: the plan in use.
            compiled_plans: those of the model.
            link: between the processes.
        """
        try:
            for seconds in told:
                for step, seen in seconds.seconds.items():
                    self._told.setdefault(step, []).append(seen)
            for step in sorted(
                step for step, parts in self._told.items() if len(parts) == len(told)
            ):
                took = all_of(self._told[step])
                self._judge(self.plans[step], took, compiled, compiled_plans, link)
                self._told = {later: parts for later, parts in self._told.items() if later > step}
                self.plans = {later: plan for later, plan in self.plans.items() if later > step}
        except Exception:
            _log.exception("what all processes have told of their steps could not be judged")

    def refuse(self, plan: Plan) -> None:
        """Asks no more for a plan that cannot be made."""
        if self._trigger is not None:
            self._trigger.refuse(plan.cuts)
            self._trigger.refuse(self._asked)
        self._replaced = None

    def _judge(
        self,
        plan: Plan,
        seen: Seen,
        compiled: CompiledPlan,
        compiled_plans: CompiledPlans,
        link: Link,
    ) -> None:
        if self._trigger is None:
            synchronous, layer_s = compiled.schedule.synchronous, compiled_plans.layer_s
            self._trigger = Trigger(
                layer_s, compiled.microbatches, synchronous=synchronous, rule=self.rule
            )
        if plan == self._replaced:
            return
        self._replaced, trigger = None, self._trigger
        replan = trigger.observe(plan, seen)
        if replan is None or plan != compiled.plan:
            return
        new = self._plan_for(replan, trigger.home, compiled, compiled_plans)
        if new is None:
            trigger.refuse(replan.cuts)
            return
        moved_bytes = copied_bytes(lower_move(compiled.traced.graph, plan, new, compiled.optimizer))
        if not replan.repays(moved_bytes, link, self.rule):
            _log.info(
                "%s, but cuts %s do not repay the %d bytes that would move",
                replan.why,
                new.cuts,
                moved_bytes,
            )
            trigger.refuse(replan.cuts)
        else:
            trigger.expect(new.cuts)
            self._asked = replan.cuts
            self.proposal, self._replaced = Proposal(plan, new, replan.why), plan

    def _plan_for(
        self, replan: Replan, home: Plan, compiled: CompiledPlan, compiled_plans: CompiledPlans
    ) -> Plan | None:
        """The plan at home; or the planner's for the devices as they are, None if it gains too little; or cuts alone.

        Cuts alone change where no planner made the plan at home, or whoever did is not asked again.
        """
        planned, settings = compiled_plans.planned, compiled_plans.settings
        if replan.cuts == home.cuts:
            return home
        graph = compiled.traced.graph
        given = settings.fates or settings.checkpoint is not None
        if planned is None or given or not _alike(planned.plan, home):
            return recut(graph, home, replan.cuts)

        def placed(plan: Plan) -> Plan:
            """With the optimizer's state where it lies at home."""
            like_home = zip(plan.stages, recut(graph, home, plan.cuts).stages, strict=True)
            stages = tuple(replace(s, state_fates=x.state_fates) for s, x in like_home)
            return replace(plan, stages=stages, splits=home.splits)

        def held_bytes(plan: Plan) -> list[int]:
            peaks = compiled_plans.with_plan(placed(plan), compiled).peaks
            return [max(peaks[d].bytes for d in stage.devices) for stage in plan.stages]

        held_bytes_of = None if settings.hosts else held_bytes  # others' bytes are not known here
        answer = planned_again(planned, replan.slowness, held_bytes_of)
        if answer is None:
            return recut(graph, home, replan.cuts)
        holds = next(
            (x for x in (self._answer, planned) if x and _alike(x.plan, compiled.plan)), None
        )
        now = replace(answer, decision=holds.decision) if holds else None
        if now is not None and answer.step_s > (1 - self.rule.gain) * now.step_s:
            return None
        self._answer = answer
        return placed(answer.plan)


def _alike(one: Plan, other: Plan) -> bool:
    """Whether two plans have the same layers on the same devices, with the same fates of what they leave."""
    both = zip(one.stages, other.stages, strict=False)
    same = all(
        (s.layers, s.devices, dict(s.fates)) == (x.layers, x.devices, dict(x.fates))
        for s, x in both
    )
    return same and len(one.stages) == len(other.stages)


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
