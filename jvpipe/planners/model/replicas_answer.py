"""What planners of replicated stages answer."""

from collections.abc import Iterable
from dataclasses import dataclass

from jvpipe.planners.model.replicas_plan import ReplicaPlan
from jvpipe.planners.model.replicas_stage import ReplicaStage


@dataclass(frozen=True)
class Simulated:
    """A plan that keeps the limit, what its stages take, and its simulated seconds per step."""

    plan: ReplicaPlan
    stages: tuple[ReplicaStage, ...]
    step_s: float


@dataclass(frozen=True)
class ReplicaAnswer:
    """The best plan, the best ones of each shape, and a bound that no plan is below."""

    best: Simulated
    shapes: dict[str, Simulated]
    bound_s: float
    planning_s: float
    planner: str = "jvpipe"

    @property
    def gap(self) -> float:
        """By which part the best plan is above the bound at most."""
        return self.best.step_s / self.bound_s - 1 if self.bound_s else 0.0


def of_each_shape(plans: Iterable[Simulated]) -> dict[str, Simulated]:
    """The first plan of each shape."""
    shapes: dict[str, Simulated] = {}
    for each in plans:
        shapes.setdefault(each.plan.shape, each)
    return shapes
