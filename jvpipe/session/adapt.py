"""Measures how long steps take, and changes the plan during training if the change saves time.

A migration is the move of layers to the devices of another plan. `Migrations` is the queue
of migrations that the user or the watcher asks for. `Adapter` is the watcher.

The training thread only hands over the marks of a step, which are arrays that become ready when the
step's tasks have run. A second thread reads the marks, asks the judge (trigger.py) whether another
plan would save time, and compiles the migration. The training thread makes the migration between
two steps.

If there are several processes, each reports the seconds of its layers, the first process decides,
and all migrate before the same step. Processes exchange news in a round every
`ADAPTING.round_steps` steps. The columns are the round's step, its news and the next action:

    step 4     each process: the seconds of its layers      the first process asks its judge
    step 8     the first process: a proposed plan           all prepare it, beside the training
    step 12    each process: it is ready                    all migrate

Between two rounds, no process waits for another. Each process acts only on news that all processes
have received, so all take the same action. If a process is not ready to migrate, all wait for the
next round. A single process needs no rounds: its second thread decides and prepares as soon as it
has read a step, and the next step begins with the migration.

`ADAPTING` sets how often steps are read. `Rule` (planners/replanning.py) sets how much evidence a
migration needs.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from jvpipe.cost.hardware import INFINITE, Link
from jvpipe.cost.links import links_between
from jvpipe.ir.plan import Plan
from jvpipe.planners.replanning import Rule
from jvpipe.runtime.engine.beside_training import Thread
from jvpipe.runtime.engine.compiled_plan import CompiledPlan
from jvpipe.runtime.engine.controller import Controller
from jvpipe.runtime.engine.failures import HostLost, StageError
from jvpipe.runtime.engine.host_link import link_between
from jvpipe.runtime.engine.hosts import Hosts
from jvpipe.runtime.engine.monitor import Measured, Monitor
from jvpipe.runtime.engine.row_agreement import agree_on_rows
from jvpipe.runtime.engine.tensors import Limits
from jvpipe.runtime.engine.training_state import State
from jvpipe.runtime.state.migrate import (
    UNFORESEEN,
    Migration,
    moved_between_steps,
    prepare_migration,
    state_after_failed_move,
)
from jvpipe.runtime.state.plan_change import PlanChange
from jvpipe.session.compiled_plans import CompiledPlans
from jvpipe.session.trigger import Judge, Proposal, Told, seen
from jvpipe.util.devices import first_of


@dataclass(frozen=True)
class AdaptEffort:
    """Limits on the work of the second thread and on the exchange of news.

    Attributes:
        waiting_steps: how many steps may wait to be read by the second thread. While that
            many wait, new steps are skipped.
        round_steps: the steps between two exchanges of news, equal in all processes.
    """

    waiting_steps: int = 4
    round_steps: int = 4


ADAPTING = AdaptEffort()
_log = logging.getLogger("jvpipe")


class Adapter:
    """The watcher of a pipeline's steps. While it is on, it queues migrations that save time.

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
        self._thread, self._judge = Thread("jvpipe-adapt"), Judge(Rule(), compiled_plans, limits)
        self._stream_steps = 0

    def switch(self, on: bool, rule: Rule) -> None:
        """Switches the watcher on or off, and sets its rule; all processes must do the same.

        Raises:
            Disagreement: another process is switched differently, or has another rule.
        """
        if self._hosts:
            self._hosts.agree("adapting", [("on", str(on)), ("rule", str(rule))])
        self._thread.switch(on=on)
        self._judge = Judge(rule, self._compiled_plans, self._limits)

    def follow(self, compiled_plans: CompiledPlans) -> None:
        """Watches another model from now on, and drops the readings of the earlier model."""
        self._compiled_plans = compiled_plans
        self._judge = Judge(self._judge.rule, compiled_plans, self._limits)

    def observe(
        self, monitor: Monitor | None, compiled: CompiledPlan, step: int, stream_steps: int
    ) -> None:
        """Lets the second thread read a dispatched step; returns at once.

        Args:
            monitor: holds the marks of the step.
            compiled: the plan under which the whole step ran.
            step: the step's number.
            stream_steps: how many steps the stream (a run without flushes) has had, with this one.
        """
        self._stream_steps = stream_steps
        if not self._thread or monitor is None:
            return
        record, first = monitor.close(), self._compiled_plans.current
        is_free = self._thread.waiting < ADAPTING.waiting_steps
        # Seconds depend on batch shapes, so only steps on the first shape are compared.
        if record and is_free and compiled.traced is first.traced:
            if not self._hosts or not self._hosts.process:  # this process decides
                self._judge.plans[step] = first.plan
            read = partial(monitor.read, record)
            self._thread.ask(self._look, self._judge, read, first, step, stream_steps)

    def offer(self, step: int) -> None:
        """Exchanges news before `step` if a round is due; then prepares or queues a migration."""
        if not self._thread:
            return
        judge, hosts, current = self._judge, self._hosts, self._compiled_plans.current
        judge.link = self._link
        if hosts is None:
            # A single process needs no rounds: it migrates as soon as its second thread is ready.
            if judge.preparing is not None and not self._queue:
                self._move(judge.preparing, [judge.news()], step)
            return
        if step % ADAPTING.round_steps:
            return
        # All processes reach this line at the same steps, so they exchange news of the same round.
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

    @cached_property
    def _link(self) -> Link:
        """The link between processes, or between two devices if there is one process.

        It is measured before the first watched step.
        """
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
            _log.warning("%s, but cuts %s cannot be used: %s", proposal.why, cuts, refusals[0])
            judge.refuse(proposal.new)
        elif current.plan == proposal.old and not self._queue:
            assert isinstance(migration, Migration), "nobody refuses"
            # Processes that have prepared different kinds of migration cannot migrate together.
            # `UNFORESEEN` makes all processes prepare the same migration again once it is due.
            foreseen = UNFORESEEN
            if len({one.how for one in news}) == 1:
                agree_on_rows(migration.new, "migrations", migration.rows)
                foreseen = migration.stream_steps
            change = replace(migration.change, step=step)
            self._queue.append(replace(migration, change=change, stream_steps=foreseen))

    def _look(
        self,
        judge: Judge,
        read: Callable[[], Measured],
        compiled: CompiledPlan,
        step: int,
        stream_steps: int,
    ) -> None:
        """Reads the marks of a step; a single process also decides and prepares at once."""
        try:
            seconds = seen(read(), compiled)
        except Exception:
            _log.exception("the marks of step %d could not be read", step)
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


class Migrations:
    """The queue of migrations (changes of the plan that move layers), the next one first.

    Args:
        compiled_plans: the compiled plans of the model; each migration changes their plan.
        controller: runs the copies that a migration needs.
        limits: the limits of memory in bytes; they also hold while the layers of a migration move.
    """

    def __init__(
        self,
        compiled_plans: CompiledPlans,
        controller: Controller,
        limits: Limits,
    ) -> None:
        self._compiled_plans, self._controller, self._limits = compiled_plans, controller, limits
        self.queue: deque[Migration] = deque()
        self.history: list[PlanChange] = []

    def request(self, state: State, plan: Plan, at: tuple[int, int] | None, why: str) -> None:
        """Prepares a migration and queues it; all processes of the run must request the same.

        Raises the errors of `Pipeline.migrate`.

        Args:
            state: the newest state.
            plan: the plan to migrate to.
            at: (step, micro-batch) from which the plan is used; None: the next step.
            why: the reason, which `history` keeps.
        """
        if (hosts := self._compiled_plans.settings.hosts) is not None:
            asked = {"plan": plan.to_json(), "moment": at, "reason": why, "step": state.step}
            hosts.agree("migrations", [(name, str(value)) for name, value in asked.items()])
        microbatches = self._controller.microbatches
        step, microbatch = at or (state.step, 0)
        if step < state.step or not 0 <= microbatch < microbatches:
            raise ValueError(
                f"at={at} is not a moment of a future step: the next step is {state.step}, and "
                f"micro-batches are 0 to {microbatches - 1}"
            )
        if self.queue and (earliest := self.queue[-1].change.step + 1) > step:
            _log.warning("a migration is under way: the next one waits for step %d", earliest)
            step, microbatch = earliest, 0
        old = self.queue[-1].new if self.queue else self._compiled_plans.current
        stream_steps = state.stream_steps + step - state.step if state.stream_steps else 0
        # The migration is expected to find no micro-batch in flight, so the stream's earlier
        # plans are dropped. If it finds one after all, `run_due` prepares the migration again.
        if old.previous and not stream_steps:
            old = old.after(None)
        if microbatch and (old.plan.replicated or plan.replicated):
            raise ValueError(
                f"at={at} is inside a step: replicated stages can change only between two steps, "
                f"write at=({step + 1}, 0)"
            )
        # The migration starts from `old`, which differs from the present plan if others are queued.
        new = self._compiled_plans.with_plan(plan, old)
        self.queue.append(self._prepared(old, new, (step, microbatch), why, stream_steps))

    def plan_between(self, step: int) -> Plan:
        """Returns the plan of a step whose batch has other shapes than the first batch of the run.

        Migrations that are due inside such a step are made before it.
        """
        due = [migration.new.plan for migration in self.queue if migration.change.step <= step]
        return due[-1] if due else self._compiled_plans.current.plan

    def run_due(
        self, state: State, drain: Callable[[State], State], compiled: CompiledPlan | None = None
    ) -> State:
        """Makes the migrations that are due between two steps; returns the state after them.

        Args:
            state: the newest state.
            drain: finishes the micro-batches in flight.
            compiled: the compiled plan of the next step; None stands for the present one. If the
                next step has the present plan and the synchronous first steps are over, a migration
                that is due inside the step stays queued, and the step makes it. Otherwise the
                migration is made now.

        Raises:
            StageError: a copy failed; the error's `state` has all its arrays under the old plan.
        """
        while self.queue and (change := self.queue[0].change).step <= state.step:
            migration, old = self.queue[0], self._compiled_plans.current
            runs = compiled in (None, old) and state.updates >= old.schedule.warmup_updates
            m = change.microbatch if runs and change.step == state.step else 0
            if not migration.foresaw(old, old.representative(state.stream_steps), m):
                new = migration.new.after(None)
                migration = self._prepared(
                    old, new, (state.step, m), change.why, state.stream_steps
                )
                self.queue[0] = migration
            if migration.change.how == "inside":
                break
            self.queue.popleft()
            # A migration between two steps requires that no micro-batch is in flight.
            state = drain(state)
            state.check(migration.bound.lowered.persistent)
            self._controller.settle()
            try:
                arrays = moved_between_steps(migration, state, self._controller)
            except HostLost:
                raise
            except StageError as error:
                error.state = state_after_failed_move(migration, state, error.table)
                error.add_note(
                    "Nothing has moved and nothing is lost: go on with the `state` of "
                    "this error, or save it."
                )
                raise
            state = replace(state, arrays=arrays)
            self.commit(migration)
        return state

    def _prepared(
        self, old: CompiledPlan, new: CompiledPlan, at: tuple[int, int], why: str, stream_steps: int
    ) -> Migration:
        """Prepares a migration, and checks that all processes have the same rows for it."""
        migration = prepare_migration(old, new, at, why, self._limits, stream_steps, new.hosts)
        agree_on_rows(migration.new, "the rows of a migration", migration.rows)
        if self._controller.monitor:
            migration.bound.compile_marks()
        return migration

    def pop_due_inside(self, step: int) -> Migration | None:
        """Removes and returns the migration that is due inside a step, if there is one."""
        if self.queue and self.queue[0].change.step == step:
            return self.queue.popleft()
        return None

    def commit(self, migration: Migration) -> None:
        """Makes the new plan the present one, and adds the migration to `history`."""
        self._compiled_plans.adopt(migration.new)
        self.history.append(migration.change)
        _log.info("%s", migration.change)

    def begin_run(self) -> None:
        """Forgets the queued and the past migrations, which belong to the previous run."""
        self._discard("run")
        self.history = []

    def follow(self, compiled_plans: CompiledPlans) -> None:
        """Uses another model's compiled plans; drops migrations queued for the previous model."""
        self._discard("model")
        self._compiled_plans = compiled_plans

    def _discard(self, whose: str) -> None:
        if self.queue:
            _log.warning("queued migrations are dropped: they belonged to the %s before", whose)
            self.queue.clear()
