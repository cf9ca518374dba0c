"""Adapting over several processes: all tell what their devices took, the first one decides, all move at one step.

    step 4     every process tells the seconds of its layers     the first one asks the trigger
    step 8     the first one tells of another plan               all make it ready, beside the training
    step 12    every process tells that it is ready              all move

Nobody is asked between these steps, so that a process may run ahead of the others. What all were told decides what each
does; a process that is not ready is waited for at a later one of these steps.
"""

import json
import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace

from jvpipe.cost.hardware import INFINITE, Link
from jvpipe.ir.plan import Plan
from jvpipe.lowering.step import lower_move
from jvpipe.runtime.compiled_plan import CompiledPlan
from jvpipe.runtime.host_link import link_between
from jvpipe.runtime.hosts import Hosts
from jvpipe.runtime.migrate import UNFORESEEN, Migration, copied_bytes, prepare_migration
from jvpipe.runtime.monitor import Monitor, Record
from jvpipe.runtime.tensors import Limits
from jvpipe.session import adapt
from jvpipe.session.adapt import Thread, beside_training
from jvpipe.session.compiled_plans import CompiledPlans
from jvpipe.session.settings import agreed_rows
from jvpipe.session.trigger import Rule, Seen, Trigger

ROUND_STEPS = 4
"""The processes tell one another every so many steps."""
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


class AdapterOfAll:
    """Looks at the steps of a pipeline over several processes, once all have switched it on at the same step.

    Args:
        compiled_plans: those of the model.
        queue: the migrations that wait.
        limits: kept while layers move.
        hosts: the processes.
    """

    def __init__(
        self, compiled_plans: CompiledPlans, queue: deque[Migration], limits: Limits, hosts: Hosts
    ) -> None:
        self._compiled_plans, self._queue, self._limits, self._hosts = (
            compiled_plans,
            queue,
            limits,
            hosts,
        )
        self._thread, self._judge = Thread("jvpipe-adapt"), _Judge(Rule())
        self._read: deque[tuple[int, Seen]] = deque()  # steps that the others have not been told of
        self._preparing: tuple[Proposal, Future[Migration | str]] | None = None
        self._stream_steps, self._link = 0, INFINITE

    def switch(self, on: bool, rule: Rule) -> None:
        """On, under a rule, or off; in all processes alike.

        Raises:
            Disagreement: another process was asked for something else.
        """
        self._hosts.agree("adapting", [("on", str(on)), ("rule", str(rule))])
        self._thread.switch(on=on)
        self._judge, self._preparing = _Judge(rule), None
        self._link = link_between(self._hosts) if on else INFINITE
        self._read.clear()

    def follow(self, compiled_plans: CompiledPlans) -> None:
        """Another model is trained from here on."""
        self._compiled_plans = compiled_plans
        self._judge, self._preparing = _Judge(self._judge.rule), None
        self._read.clear()

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
        if record and self._thread.waiting < adapt.AHEAD and compiled.traced is first.traced:
            if not self._hosts.process:
                self._judge.plans[step] = first.plan
            self._thread.ask(self._look, monitor, record, first, step)

    def offer(self, step: int) -> None:
        """Every few steps tells the others, and does what all were told: nothing, prepare, or move before `step`."""
        if not self._thread or step % ROUND_STEPS:
            return
        told = [
            Told.from_json(text.decode())
            for text in self._hosts.exchange("seconds", self._news().encode())
        ]
        if self._preparing is not None:
            self._move(*self._preparing, told, step)
        elif (proposal := told[0].proposal) is not None:
            self._prepare(proposal, step)
        if not self._hosts.process:
            first, layer_s = self._compiled_plans.current, self._compiled_plans.layer_s
            self._thread.ask(self._judge.decide, told, first, layer_s, self._link)

    def wait(self) -> None:
        """Waits until every step that was seen has been looked at."""
        self._thread.wait()

    def _news(self) -> str:
        """What this process has to tell."""
        seconds = dict(self._read.popleft() for _ in range(len(self._read)))
        proposal, how, refusal = self._judge.proposal, "", ""
        self._judge.proposal = None
        if self._preparing is not None and self._preparing[1].done():
            made = self._preparing[1].result()
            how, refusal = ("", made) if isinstance(made, str) else (made.change.how, "")
        return Told(seconds, proposal, how, refusal).to_json()

    def _prepare(self, proposal: Proposal, step: int) -> None:
        """Has a migration made ready in the background, unless another plan is in use by now, or to come."""
        current = self._compiled_plans.current
        if current.plan == proposal.old and not self._queue:
            self._preparing = (
                proposal,
                self._thread.ask(self._made, current, proposal, step, self._stream_steps),
            )

    def _move(
        self, proposal: Proposal, made: Future[Migration | str], told: Sequence[Told], step: int
    ) -> None:
        """Queues a migration once all are ready for it; forgets it if one of them cannot make it."""
        refusals = [one.refusal for one in told if one.refusal]
        if not refusals and not all(one.how for one in told):
            return
        self._preparing = None
        if refusals:
            _log.warning(
                "%s, but cuts %s cannot be: %s", proposal.why, list(proposal.new.cuts), refusals[0]
            )
            self._judge.refuse(proposal.new)
        elif self._compiled_plans.current.plan == proposal.old and not self._queue:
            migration = made.result()
            assert isinstance(migration, Migration), "nobody refuses"
            self._hosts.agree(
                "migrations", [("plan", str(proposal.new.to_json())), *agreed_rows(migration.new)]
            )
            foreseen = migration.stream_steps if len({one.how for one in told}) == 1 else UNFORESEEN
            change = replace(migration.change, step=step)
            self._queue.append(replace(migration, change=change, stream_steps=foreseen))

    # In the background

    def _look(self, monitor: Monitor, record: Record, compiled: CompiledPlan, step: int) -> None:
        try:
            self._read.append((step, adapt.seen(monitor.read(record), compiled)))
        except Exception:
            _log.exception("step %d could not be looked at", step)

    def _made(
        self, current: CompiledPlan, proposal: Proposal, step: int, stream_steps: int
    ) -> Migration | str:
        """Makes a migration ready, by the way that this process has room for; or says why it cannot."""
        try:
            with beside_training():
                new = self._compiled_plans.with_plan(proposal.new, current)
                migration = prepare_migration(
                    current, new, (step, 0), proposal.why, self._limits, stream_steps
                )
                migration.bound.compile_marks()
                return migration
        except Exception as error:
            return str(error) or type(error).__name__


class _Judge:
    """What the first process knows of the steps, and what it proposes."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.plans: dict[int, Plan] = {}  # under which the steps ran that not all have told of
        self.proposal: Proposal | None = None  # not told yet
        self._told: dict[int, list[Seen]] = {}
        self._trigger: Trigger | None = None
        self._replaced: Plan | None = (
            None  # the plan that another one is proposed for; not judged again
        )

    def decide(
        self,
        told: Sequence[Told],
        compiled: CompiledPlan,
        layer_s: Sequence[float] | None,
        link: Link,
    ) -> None:
        """Asks the trigger about every step that all have told of by now.

        Args:
            told: what each process has told.
            compiled: the plan in use.
            layer_s: the seconds of its layers that it was made for, if it was made for any.
            link: between the processes.
        """
        try:
            for seconds in told:
                for step, seen in seconds.seconds.items():
                    self._told.setdefault(step, []).append(seen)
            for step in sorted(
                step for step, parts in self._told.items() if len(parts) == len(told)
            ):
                self._judge(self.plans[step], all_of(self._told[step]), compiled, layer_s, link)
                self._told = {later: parts for later, parts in self._told.items() if later > step}
                self.plans = {later: plan for later, plan in self.plans.items() if later > step}
        except Exception:
            _log.exception("what all processes have told of their steps could not be judged")

    def refuse(self, plan: Plan) -> None:
        """Asks no more for a plan that cannot be made."""
        if self._trigger is not None:
            self._trigger.refuse(plan.cuts)
        self._replaced = None

    def _judge(
        self,
        plan: Plan,
        seen: Seen,
        compiled: CompiledPlan,
        layer_s: Sequence[float] | None,
        link: Link,
    ) -> None:
        if self._trigger is None:
            synchronous = compiled.schedule.synchronous
            self._trigger = Trigger(
                layer_s, compiled.microbatches, synchronous=synchronous, rule=self.rule
            )
        if plan == self._replaced:
            return
        self._replaced, trigger = None, self._trigger
        replan = trigger.observe(plan, seen)
        if replan is None or plan != compiled.plan:
            return
        new = adapt.plan_for(replan, trigger, compiled)
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
            self.proposal, self._replaced = Proposal(plan, new, replan.why), plan


def all_of(parts: Sequence[Seen]) -> Seen:
    """The seconds of a step of which each process has seen its own layers and stages.

    >>> all_of([Seen([1.0, 0.0], [0.5, 0.0]), Seen([0.0, 2.0], [0.0, 0.0])])
    Seen(layer_s=[1.0, 2.0], exposed_s=[0.5, 0.0])
    """
    layer_s, exposed_s = (
        [getattr(part, name) for part in parts] for name in ("layer_s", "exposed_s")
    )
    return Seen(
        [sum(values) for values in zip(*layer_s, strict=True)],
        [sum(v) for v in zip(*exposed_s, strict=True)],
    )
