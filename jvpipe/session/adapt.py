"""Watches how long steps take, and moves to another plan during training when the move pays.

The training thread only hands over the marks of a step: arrays that become ready when the step's
tasks have run. A second thread reads the marks, asks the trigger (trigger.py) whether another plan
would pay, and compiles the migration: the move of layers to the devices of the other plan. The
training thread makes the migration between two steps.

If there are several processes, each reports the seconds of its layers, the first one decides, and
all migrate before the same step. They exchange news in rounds, every `ADAPTING.round_steps` steps.
The columns are the step of the round, what the news says, and what follows:

    step 4     each process: the seconds of its layers      the first process asks the trigger
    step 8     the first process: a proposed plan           all prepare it, beside the training
    step 12    each process: it is ready                    all migrate

Between two rounds no process waits for another. Each process acts only on news that all have
received, so all do the same. If a process is not ready to migrate, all wait for the next round. A
single process needs no rounds: its second thread decides and prepares as soon as it has read a
step, and the migration is made before the next step that begins.

How often steps are read is set in `ADAPTING`, and how much evidence a move needs in `Rule`.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jvpipe._jax import first_of
from jvpipe.cost.hardware import INFINITE, Link
from jvpipe.cost.links import links_between
from jvpipe.ir.plan import Plan
from jvpipe.lowering.step import lower_move
from jvpipe.planners.user_fates import recut
from jvpipe.runtime.engine.beside_training import Thread, beside_training, program_ends
from jvpipe.runtime.engine.compiled_plan import CompiledPlan
from jvpipe.runtime.engine.host_link import link_between
from jvpipe.runtime.engine.hosts import Hosts
from jvpipe.runtime.engine.monitor import Measured, Monitor
from jvpipe.runtime.engine.row_agreement import agree_on_rows
from jvpipe.runtime.engine.tensors import Limits
from jvpipe.runtime.state.migrate import UNFORESEEN, Migration, copied_bytes, prepare_migration
from jvpipe.session.compiled_plans import CompiledPlans
from jvpipe.session.planning import Planned, planned_again
from jvpipe.session.trigger import Proposal, Replan, Rule, Seen, Told, Trigger, all_of


@dataclass(frozen=True)
class AdaptEffort:
    """How much of a run's time may go into watching it.

    Attributes:
        waiting_steps: how many steps may wait to be read by the second thread. While that many
            wait, new steps are skipped.
        round_steps: steps from one exchange of news to the next, the same in all processes.
    """

    waiting_steps: int = 4
    round_steps: int = 4


ADAPTING = AdaptEffort()
_log = logging.getLogger("jvpipe")


class Adapter:
    """The watcher of a pipeline's steps: once switched on, it queues migrations that pay.

    Args:
        compiled_plans: the compiled plans of the model.
        queue: the pipeline's migrations that are still to be made.
        limits: the limits of memory in bytes; they also hold while the layers of a migration move.
        hosts: the processes of the run, if there are several.
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
        self._link: Link | None = None  # measured before the first watched step

    def switch(self, on: bool, rule: Rule) -> None:
        """Switches watching on, under a rule, or off; all processes must do the same.

        Raises:
            Disagreement: another process is switched differently, or has another rule.
        """
        if self._hosts:
            self._hosts.agree("adapting", [("on", str(on)), ("rule", str(rule))])
        self._thread.switch(on=on)
        self._judge = _Judge(rule, self._compiled_plans, self._limits)

    def follow(self, compiled_plans: CompiledPlans) -> None:
        """Watches another model from now on; readings of the earlier model are no longer used."""
        self._compiled_plans = compiled_plans
        self._judge = _Judge(self._judge.rule, compiled_plans, self._limits)

    def observe(
        self, monitor: Monitor | None, compiled: CompiledPlan, step: int, stream_steps: int
    ) -> None:
        """Lets the second thread read a dispatched step; returns at once.

        Args:
            monitor: has the marks of the step.
            compiled: the plan under which the whole step ran.
            step: the step's number.
            stream_steps: how many steps a stream (a run without flushes) has had after this one.
        """
        self._stream_steps = stream_steps
        if not self._thread or monitor is None:
            return
        record, first = monitor.close(), self._compiled_plans.current
        is_free = self._thread.waiting < ADAPTING.waiting_steps
        # Steps on batches of other shapes take other times, so they are not compared.
        if record and is_free and compiled.traced is first.traced:
            if not self._hosts or not self._hosts.process:  # this process decides
                self._judge.plans[step] = first.plan
            self._thread.ask(
                self._look, self._judge, partial(monitor.read, record), first, step, stream_steps
            )

    def offer(self, step: int) -> None:
        """Does a round before `step` if one is due: exchanges news, then prepares or migrates."""
        if not self._thread:
            return
        judge, hosts, current = self._judge, self._hosts, self._compiled_plans.current
        if self._link is None:
            self._link = self._measured_link()
        judge.link = self._link
        if hosts is None:
            # A single process needs no rounds: it migrates as soon as its second thread is ready.
            if judge.preparing is not None and not self._queue:
                self._move(judge.preparing, [judge.news()], step)
            return
        if step % ADAPTING.round_steps:
            return
        # All processes come here at the same steps, so they exchange news of the same round.
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
        """Waits until the second thread has read every step that was handed to it."""
        self._thread.wait()

    def _measured_link(self) -> Link:
        """Measures the link between processes, or between two devices if there is one process."""
        if self._hosts:
            return link_between(self._hosts)
        first, *others = map(first_of, self._compiled_plans.current.devices)
        return links_between(first, others[0]).send if others else INFINITE

    def _move(self, proposal: Proposal, news: Sequence[Told], step: int) -> None:
        """Queues a migration once all processes are ready for it; drops it if one refuses."""
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
            # Processes that have prepared to move in different ways cannot move together.
            # `UNFORESEEN` makes all prepare again once the move is due, all in the same way.
            foreseen = UNFORESEEN
            if len({one.how for one in news}) == 1:
                agree_on_rows(migration.new, "migrations", migration.rows)
                foreseen = migration.stream_steps
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
        """Reads the marks of a step; a single process also decides and prepares at once."""
        try:
            seconds = seen(read(), compiled)
        except Exception:
            _log.exception("step %d could not be looked at", step)
            return
        if self._hosts:
            judge.untold.append((step, seconds))
            return
        if judge.preparing is not None:  # the training thread has not taken the last migration yet
            return
        judge.decide([Told({step: seconds})], compiled)
        proposal, judge.proposal = judge.proposal, None
        if proposal is not None:
            judge.prepare(proposal, compiled, step + 1, stream_steps)
            judge.preparing = proposal


class _Judge:
    """What a process knows about the steps of a model; the first process proposes other plans.

    Args:
        rule: how much evidence is enough for another plan.
        compiled_plans: the compiled plans of the model.
        limits: the limits of memory in bytes; they also hold while the layers of a migration move.
    """

    def __init__(self, rule: Rule, compiled_plans: CompiledPlans, limits: Limits) -> None:
        self.rule, self.link = rule, INFINITE
        self._compiled_plans, self._limits = compiled_plans, limits
        self.plans: dict[int, Plan] = {}  # by step: the plan it ran under, until it is judged
        self.untold: deque[tuple[int, Seen]] = deque()  # steps not yet reported to the others
        self.proposal: Proposal | None = None  # not yet reported to the others
        self.preparing: Proposal | None = None  # all processes prepare this one
        self.ready: Migration | str | None = None  # the migration of `preparing`, or an error
        self._parts: dict[int, list[Seen]] = {}  # by step: the seconds of each process so far
        self._trigger: Trigger | None = None
        self._replaced: Plan | None = None  # a proposal replaces this plan; its steps do not count
        self._answer: Planned | None = None  # the last plan that the planner gave
        self._asked: tuple[int, ...] = ()  # the cuts that the trigger asked for last

    def news(self) -> Told:
        """Returns what the other processes do not know yet, and counts it as reported."""
        seconds = dict(self.untold.popleft() for _ in range(len(self.untold)))
        proposal, self.proposal = self.proposal, None
        ready = self.ready
        how = ready.change.how if isinstance(ready, Migration) else ""
        return Told(seconds, proposal, how, ready if isinstance(ready, str) else "")

    def decide(self, news: Sequence[Told], compiled: CompiledPlan) -> None:
        """Asks the trigger about every step whose seconds all processes have reported by now.

        Args:
            news: what each process reports in this round.
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
                    # This step and those before it are not looked at again.
                    self._parts = {s: parts for s, parts in self._parts.items() if s > step}
                    self.plans = {s: plan for s, plan in self.plans.items() if s > step}
        except Exception:
            if not program_ends():
                _log.exception("what steps took could not be judged")

    def prepare(
        self, proposal: Proposal, compiled: CompiledPlan, step: int, stream_steps: int
    ) -> None:
        """Prepares a migration within the limits; sets `ready` to the result or the error's text.

        Args:
            proposal: has the plan to move to.
            compiled: the plan in use.
            step: the earliest step before which the migration can be made.
            stream_steps: how many steps the stream, if there is one, will have had by then.
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
        """Tells the trigger not to ask again for a plan to which no migration is possible."""
        if self._trigger is not None:
            self._trigger.refused |= {plan.cuts, self._asked}
        self._replaced = None

    def _judge(self, plan: Plan, seconds: Seen, compiled: CompiledPlan) -> None:
        """Proposes another plan if a step shows that a faster one would repay the move to it.

        Args:
            plan: the plan under which the step ran.
            seconds: what the step took.
            compiled: the plan in use.
        """
        if self._trigger is None:
            synchronous, layer_s = compiled.schedule.synchronous, self._compiled_plans.layer_s
            self._trigger = Trigger(
                layer_s, compiled.microbatches, synchronous=synchronous, rule=self.rule
            )
        if plan == self._replaced:  # a proposal to leave this plan is in preparation
            return
        self._replaced, trigger = None, self._trigger
        replan = trigger.observe(plan, seconds)
        if replan is None or plan != compiled.plan:
            return
        new = self._plan_for(replan, trigger.home, compiled)
        if new is None:
            trigger.refused.add(replan.cuts)
            return
        moved_bytes = copied_bytes(lower_move(compiled.traced.graph, plan, new, compiled.optimizer))
        if replan.repays(moved_bytes, self.link, self.rule):
            trigger.asked = new.cuts
            self._asked = replan.cuts
            self.proposal, self._replaced = Proposal(plan, new, replan.why), plan
            return
        too_dear = "%s, but cuts %s do not repay the %d bytes that would move"
        _log.info(too_dear, replan.why, new.cuts, moved_bytes)
        trigger.refused.add(replan.cuts)

    def _plan_for(self, replan: Replan, home: Plan, compiled: CompiledPlan) -> Plan | None:
        """Finds the plan to move to.

        Args:
            replan: the cuts that the trigger asks for.
            home: the plan with which the run began, made by the planner or given by the user.
            compiled: the plan in use.

        Returns:
            `home`, if its cuts are asked for. Otherwise the planner's plan for devices as slow as
            they are now; None if that plan saves less than `Rule.gain` over the plan in use. If the
            planner gives no plan, or the user chose `home` or its fates: `home` with the cuts that
            are asked for.
        """
        compiled_plans, graph = self._compiled_plans, compiled.traced.graph
        planned, settings = compiled_plans.planned, compiled_plans.settings
        if replan.cuts == home.cuts:
            return home

        def placed(plan: Plan) -> Plan:
            """Puts the optimizer's state of each layer where `home` has it."""
            like_home = zip(plan.stages, recut(graph, home, plan.cuts).stages, strict=True)
            stages = tuple(replace(s, state_fates=x.state_fates) for s, x in like_home)
            return replace(plan, stages=stages, splits=home.splits)

        def held_bytes(plan: Plan) -> list[int]:  # of the fullest device of each stage
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
    """Tells whether two plans have equal layers, devices and fates of residuals in each stage."""

    def stages(plan: Plan) -> list[Any]:
        return [(stage.layers, stage.devices, dict(stage.fates)) for stage in plan.stages]

    return stages(one) == stages(other)


def seen(measured: Measured, compiled: CompiledPlan) -> Seen:
    """Returns a measured step's seconds per micro-batch, by layer and by stage.

    In an asynchronous schedule, the n devices of a stage take turns: each runs every n-th
    micro-batch, so the stage finishes n micro-batches in the time that a device takes for one. The
    seconds of the stage's layers are therefore divided by n.

    Args:
        measured: what the monitor has measured.
        compiled: the plan under which the step ran.
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


# A group is several consecutive layers of a stage that run as one program. A run begins with layers
# apart, each with its own programs. After a migration, layers are apart again. Groups are compiled
# beside the training, which takes over their programs once they are ready. In a short run, groups
# save less time than their compilation takes, and how long a run will last is not known. So, unless
# the user asks for groups, they are compiled once the steps under a plan have taken as long as the
# plan's programs took to compile (c seconds). Groups that the user does not ask for are compiled
# only on CPUs, where results with groups were measured and found bitwise identical:
#
#     |-- compile layers --|-- steps of layers apart --|-- steps beside compiling --|-- groups --
#     |<------- c -------->|<---------- c ------------>|
#
# A run that ends early thus compiles no groups.


class Grouping:
    """The compiler of groups: works beside the training, which then takes over its programs."""

    def __init__(self) -> None:
        self._thread = Thread("jvpipe-groups")
        self._apart: CompiledPlan | None = None
        self._stepping_s = 0.0  # seconds of the steps under `_apart`
        self._grouped: Future[CompiledPlan] | None = None  # None until it is begun

    def note_step(self, taken_s: float) -> None:
        """Adds the seconds for which the training thread was within a step."""
        self._stepping_s += taken_s

    def pass_step(self, compiled_plans: CompiledPlans) -> None:
        """Begins to compile groups if the plan has none, or takes over groups that are compiled.

        This must be called between two steps, with no migration in the queue.

        Args:
            compiled_plans: the compiled plans of the model.
        """
        current, asked = compiled_plans.current, compiled_plans.settings.group
        if current.grouped or asked is False:
            return
        if asked is None and first_of(compiled_plans.settings.devices[0]).platform != "cpu":
            return
        if self._apart is not current:
            self._apart, self._grouped, self._stepping_s = current, None, 0.0
        if self._grouped is None:
            if asked or self._stepping_s > current.compile_s:
                if not self._thread:
                    self._thread.switch(on=True)
                self._grouped = self._thread.ask(in_groups_or_apart, compiled_plans, current)
        elif not self._thread.waiting and (grouped := self._grouped.result()) is not current:
            compiled_plans.adopt(grouped)

    def wait(self) -> None:
        """Waits until the groups are compiled; the next step runs them."""
        self._thread.wait()


def in_groups_or_apart(compiled_plans: CompiledPlans, apart: CompiledPlan) -> CompiledPlan:
    """Returns a plan in groups, or `apart` itself if groups do not fit or cannot be compiled."""
    with beside_training():
        try:
            grouped = compiled_plans.in_groups(apart)
            if apart.evaluates:  # the next evaluation would compile its groups while all wait
                grouped.evaluation  # noqa: B018 - reading it compiles them
            return grouped
        except Exception as error:
            if not program_ends():
                _log.warning("layers stay apart, for their groups cannot be compiled: %s", error)
            return apart
