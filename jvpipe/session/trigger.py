"""The judge of a run's steps: proposes another plan if measured seconds show that it saves time."""

import json
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from jvpipe.cost.hardware import INFINITE
from jvpipe.ir.plan import Plan
from jvpipe.lowering.step import lower_move
from jvpipe.planners.planned_problem import Planned
from jvpipe.planners.replanning import Replan, Rule, Seen, Trigger, all_of
from jvpipe.planners.user_fates import recut
from jvpipe.runtime.engine.beside_training import beside_training, program_ends
from jvpipe.runtime.engine.compiled_plan import CompiledPlan
from jvpipe.runtime.engine.monitor import Measured
from jvpipe.runtime.engine.tensors import Limits
from jvpipe.runtime.state.migrate import Migration, copied_bytes, prepare_migration
from jvpipe.session.planning import planned_again
from jvpipe.session.settings import Settings
from jvpipe.util.brief import brief

_log = logging.getLogger("jvpipe")


def checked_rule(rule: Any) -> Rule:
    """Checks a rule for changes of the plan, and returns it; None stands for the default rule."""
    if not isinstance(rule, Rule | None):
        raise ValueError(
            f"rule must be a jvpipe.session.trigger.Rule, such as Rule(gain=0.1), not {brief(rule)}"
        )
    return rule or Rule()


@dataclass(frozen=True, slots=True)
class Proposal:
    """A plan that may replace another plan, and the reason."""

    old: Plan
    new: Plan
    why: str


@dataclass(frozen=True, slots=True)
class Told:
    """The news that a process sends to the others in a round.

    Args:
        seconds: the seconds of the process's layers and stages, by step.
        proposal: a new proposal; only the first process makes proposals.
        how: the kind of migration that the process has prepared; empty until it is ready.
        refusal: why the process cannot make the migration; empty if it can or is not ready.
    """

    seconds: dict[int, Seen]
    proposal: Proposal | None = None
    how: str = ""
    refusal: str = ""

    def to_json(self) -> str:
        """Returns the news as a text.

        >>> told = Told({3: Seen([1.0], [0.0])}, Proposal(Plan.from_cuts([1]), Plan.from_cuts([1], [1]), "slow"))
        >>> Told.from_json(told.to_json()) == told
        True
        """
        seconds = list(self.seconds.items())
        to_come = self.proposal
        proposal = to_come and [to_come.old.to_json(), to_come.new.to_json(), to_come.why]
        return json.dumps([seconds, proposal, self.how, self.refusal])

    @staticmethod
    def from_json(text: str) -> "Told":
        """Reads the news from a text that `to_json` returned."""
        seconds, words, *rest = json.loads(text)
        proposal = None
        if words is not None:
            old, new, why = words
            proposal = Proposal(Plan.from_json(old), Plan.from_json(new), why)
        return Told({step: Seen(*step_s) for step, step_s in seconds}, proposal, *rest)


@runtime_checkable
class ModelPlans(Protocol):
    """The part of the interface of `CompiledPlans` that a judge uses.

    Attributes:
        settings: what the user asked for.
        planned: the planner's first plan; None if the user gave the plan.
    """

    settings: Settings
    planned: Planned | None

    def with_plan(self, plan: Plan, base: CompiledPlan | None = None) -> CompiledPlan:
        """Compiles the model under another plan."""
        ...


class Judge:
    """Collects the seconds of a model's steps; in the first process, proposes other plans.

    Args:
        rule: sets how much evidence a proposal needs.
        compiled_plans: the compiled plans of the model.
        limits: the limits of memory in bytes; they also hold while the layers of a migration move.
    """

    def __init__(self, rule: Rule, compiled_plans: ModelPlans, limits: Limits) -> None:
        self.rule, self.link = rule, INFINITE
        self._compiled_plans, self._limits = compiled_plans, limits
        self.plans: dict[int, Plan] = {}  # by step: the plan of the step, until the step is judged
        self.untold: deque[tuple[int, Seen]] = deque()  # steps not yet reported to the others
        self.proposal: Proposal | None = None  # not yet reported to the others
        self.preparing: Proposal | None = None  # all processes prepare this one
        self.ready: Migration | str | None = None  # the migration of `preparing`, or an error
        self._parts: dict[int, list[Seen]] = {}  # by step: the seconds of each process so far
        self._trigger: Trigger | None = None
        self._replaced: Plan | None = None  # the plan to leave; its steps are not judged
        self._answer: Planned | None = None  # the last plan that the planner gave
        self._asked: tuple[int, ...] = ()  # the cuts that the trigger asked for last

    def news(self) -> Told:
        """Returns the news that was not reported yet, and marks it as reported."""
        seconds = dict(self.untold.popleft() for _ in range(len(self.untold)))
        proposal, self.proposal = self.proposal, None
        if isinstance(self.ready, Migration):
            return Told(seconds, proposal, self.ready.change.how)
        return Told(seconds, proposal, refusal=self.ready or "")

    def decide(self, news: Sequence[Told], compiled: CompiledPlan) -> None:
        """Asks the trigger about every step whose seconds all processes have reported.

        Args:
            news: the report of each process in this round.
            compiled: the plan in use.
        """
        try:
            with beside_training():
                for one in news:
                    for step, part in one.seconds.items():
                        self._parts.setdefault(step, []).append(part)
                for step in sorted(self._parts):
                    parts = self._parts[step]
                    if len(parts) < len(news):
                        continue
                    plan = self.plans[step]
                    # This step and earlier steps are not judged again, even if judging fails.
                    self._parts = {s: parts for s, parts in self._parts.items() if s > step}
                    # The training thread adds plans meanwhile, so only these entries are deleted.
                    for done in [s for s in list(self.plans) if s <= step]:
                        del self.plans[done]
                    self._judge(plan, all_of(parts), compiled)
        except Exception:
            if not program_ends():
                _log.exception("what steps took could not be judged")

    def prepare(
        self, proposal: Proposal, compiled: CompiledPlan, step: int, stream_steps: int
    ) -> None:
        """Prepares a migration within the limits; sets `ready` to the migration or an error's text.

        Args:
            proposal: has the plan to move to.
            compiled: the plan in use.
            step: the first step that can begin with the migration.
            stream_steps: how many steps the stream will have had before `step`; 0 without a stream.
        """
        try:
            with beside_training():
                new = self._compiled_plans.with_plan(proposal.new, compiled)
                migration = prepare_migration(
                    compiled, new, (step, 0), proposal.why, self._limits, stream_steps
                )
                migration.bound.compile_marks()
                self.ready = migration
        except Exception as error:
            self.ready = str(error) or type(error).__name__

    def refuse(self, plan: Plan) -> None:
        """Makes the trigger ignore a plan from now on, because no migration can reach the plan."""
        if self._trigger is not None:
            self._trigger.refused |= {plan.cuts, self._asked}
        self._replaced = None

    def _judge(self, plan: Plan, seconds: Seen, compiled: CompiledPlan) -> None:
        """Proposes another plan if a step shows that the time saved would repay the migration.

        Args:
            plan: the plan under which the step ran.
            seconds: the seconds of the step.
            compiled: the plan in use.
        """
        if self._trigger is None:
            planned = self._compiled_plans.planned
            self._trigger = Trigger(
                planned and planned.layer_s,
                compiled.microbatches,
                synchronous=compiled.schedule.synchronous,
                rule=self.rule,
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
        _log.info(
            "%s, but cuts %s do not repay the %d bytes that would move",
            replan.why,
            new.cuts,
            moved_bytes,
        )
        trigger.refused.add(replan.cuts)

    def _plan_for(self, replan: Replan, home: Plan, compiled: CompiledPlan) -> Plan | None:
        """Finds the plan to move to.

        Args:
            replan: the cuts that the trigger asks for.
            home: the plan with which the run began, made by the planner or given by the user.
            compiled: the plan in use.

        Returns:
            `home`, if the trigger asks for its cuts. Otherwise, the planner's plan for the present
            speeds of devices, or None if this plan saves less than `Rule.gain` over the plan in
            use. If the planner has no plan, or the user chose `home` or its fates: `home` with the
            trigger's cuts.
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
            # The bytes of other processes are unknown.
            answer = planned_again(planned, replan.slowness, None if settings.hosts else held_bytes)
        if answer is None:
            return recut(graph, home, replan.cuts)
        for present in (self._answer, planned):
            if present and _alike(present.plan, compiled.plan):
                now_s = replace(answer, decision=present.decision).step_s
                if answer.step_s > (1 - self.rule.gain) * now_s:
                    return None
                break
        self._answer = answer
        return placed(answer.plan)


def _alike(one: Plan, other: Plan) -> bool:
    """Tells whether the stages of two plans have equal layers, devices and fates of residuals."""

    def stages(plan: Plan) -> list[Any]:
        return [(stage.layers, stage.devices, dict(stage.fates)) for stage in plan.stages]

    return stages(one) == stages(other)


def seen(measured: Measured, compiled: CompiledPlan) -> Seen:
    """Returns a measured step's seconds per micro-batch, by layer and by stage.

    In an asynchronous schedule, each of the n devices of a stage runs every n-th micro-batch, so
    the stage finishes n micro-batches in the time that a device takes for one. The seconds of the
    stage's layers are therefore divided by n.

    Args:
        measured: the measurements of the monitor.
        compiled: the plan under which the step ran.
    """
    stages = compiled.plan.stages
    places = [str(compiled.devices[stage.devices[0]]) for stage in stages]
    exposed_s = []
    for place in places:
        whole_s = measured.exposed.get(place, 0.0)
        exposed_s.append(whole_s / compiled.microbatches / places.count(place))
    layer_s = measured.layer_s(len(compiled.traced.graph.layers))
    if not compiled.schedule.synchronous:
        layer_s = [layer_s[i] / len(stage.devices) for stage in stages for i in stage.layers]
    return Seen(layer_s, exposed_s)
