"""Holds a plan with the problem that it solves, and derives its seconds and the reasons for it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from jvpipe.cost.costs import LayerCost
from jvpipe.cost.slowness import work_s
from jvpipe.ir.plan import Plan
from jvpipe.planners.cut_reasons import cut_reasons, device_reasons
from jvpipe.planners.joint.ordered_plan import OrderedPlan
from jvpipe.planners.joint.rough_plan import RoughPlan
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.stage_cost import Evaluation, evaluate_decision
from jvpipe.planners.model.stage_simulation import simulated_step_s
from jvpipe.planners.order_reasons import order_reasons, search_reasons, update_reasons


@dataclass(frozen=True)
class Planned:
    """A plan, with the problem that it solves and the planner's decision.

    `ordered` is the result of the search for an order of tasks, if there was one. `shapes` has the
    best rough plan of each kind of shape, if the planner decided how many devices stages have.
    """

    plan: Plan
    problem: Problem
    decision: Decision
    ordered: OrderedPlan | None = None
    shapes: Mapping[str, RoughPlan] = field(default_factory=dict)

    @property
    def layer_s(self) -> list[float] | None:
        """Each layer's forward plus backward seconds in the problem's costs; None if all are 0."""
        seconds = work_s(self.problem.costs.layers)
        return seconds if any(seconds) else None

    @property
    def evaluation(self) -> Evaluation:
        """The seconds and bytes of the decision."""
        return evaluate_decision(self.problem, self.decision)

    @property
    def step_s(self) -> float:
        """The seconds of a simulated step."""
        return simulated_step_s(self.problem, self.evaluation.stages)

    def reasons(self, cross_layer: Sequence[str]) -> list[str]:
        """Says how devices differ, why each cut is where it is, and what the order of tasks gains.

        Args:
            cross_layer: names of the optimizer's transformations that need a value of all layers.
        """
        lines = device_reasons(self.problem)
        lines += cut_reasons(self.problem, self.decision)
        lines += order_reasons(self.problem, self.decision, cross_layer)
        lines += update_reasons(self.problem, self.decision)
        if self.ordered:
            lines.append(search_reasons(self.ordered))
        return lines

    @property
    def placed(self) -> list[LayerCost]:
        """The costs of each layer on the device where the plan puts it."""
        spans = enumerate(pairwise(self.decision.bounds))
        return [layer for s, (i, j) in spans for layer in self.problem.layers_on(s)[i:j]]
