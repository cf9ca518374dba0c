"""What planners answer, in words and as JSON; `tables.py` has the tables."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from jvpipe.ir.compiled_stage import CompiledStage
from jvpipe.ir.plan import Plan, Stage


def _with_lists(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns fields by name, tuples as the lists that JSON knows."""
    return {name: list(x) if isinstance(x, tuple) else x for name, x in fields}


@dataclass(frozen=True)
class AnsweredShape:
    """The best plan of a kind of shape: how many devices its stages have, and what a step takes."""

    shape: str
    replicas: tuple[int, ...]
    layers_per_stage: tuple[int, ...]
    microbatches: int
    step_s: float


@dataclass(frozen=True)
class AnsweredPlan:
    """A planner's answer as plain numbers; without a plan none fits, and `reason` says why.

    Attributes:
        planner: who answers.
        schedule: the rule of the order of tasks.
        planning_s: seconds that the answer took.
        feasible: whether there is a plan that keeps the limit.
        plan: the best that was found.
        names: of the devices of each stage; empty where all devices are alike.
        costs: what each stage takes per micro-batch and holds at most, by the names of `--json`.
        compiled: what the compiler of the hardware says of each stage, if it was asked.
        microbatches: of a step.
        bottleneck_s: seconds of the slowest stage.
        step_s: seconds of a simulated step.
        bubble_fraction: the idle share of the devices.
        peak_bytes: the most that any device holds.
        shape: how many devices the stages have, in words, where that was decided too; then `shapes` are
            the others that were looked at, `devices` says how many there were, `batch` how many examples.
    """

    planner: str
    schedule: str
    planning_s: float
    feasible: bool
    plan: Plan | None = None
    names: tuple[str, ...] = ()
    costs: tuple[Mapping[str, float], ...] = ()
    compiled: tuple[CompiledStage, ...] = ()
    microbatches: int = 0
    bottleneck_s: float = math.inf
    step_s: float = math.inf
    bubble_fraction: float = 0.0
    peak_bytes: int = 0
    shape: str = ""
    shapes: tuple[AnsweredShape, ...] = ()
    devices: int = 0
    batch: int = 0
    reason: str = ""
    smallest_limit_bytes: int = 0

    def as_json(self, lower_bound_s: float) -> dict[str, Any]:
        """Returns the answer in the form of `--json`; no plan under the limit takes fewer than `lower_bound_s`."""
        head = {"planner": self.planner, "schedule": self.schedule, "feasible": self.feasible}
        if self.plan is None:
            return head | {
                "reason": self.reason,
                "smallest_limit_bytes": self.smallest_limit_bytes,
                "stages": [],
                "planning_s": self.planning_s,
            }
        stages = [
            _stage_json(stage, costs)
            for stage, costs in zip(self.plan.stages, self.costs, strict=True)
        ]
        for stage, said in zip(stages, self.compiled, strict=False):
            stage |= said.to_json()
        found = head | {
            "stages": stages,
            "bottleneck_s": self.bottleneck_s,
            "step_s": self.step_s,
            "lower_bound_s": lower_bound_s if math.isfinite(lower_bound_s) else None,
            "bubble_fraction": self.bubble_fraction,
            "planning_s": self.planning_s,
            "splits": list(self.plan.splits),
            "tasks": list(self.plan.tasks),
        }
        if self.shape:
            found["devices"] = self.devices
            found["microbatches"] = self.microbatches
            found["shapes"] = [asdict(shape, dict_factory=_with_lists) for shape in self.shapes]
        return found

    def summary(self, lower_bound_s: float) -> str:
        """Says how long a step is, how slow the slowest stage and how idle the devices.

        Args:
            lower_bound_s: seconds that no plan under the limit is below.
        """
        shape = f"on {self.devices} devices {self.shape}, " if self.shape else ""
        size = f" of {self.batch // self.microbatches}" if self.shape else ""
        reduce_s = max(costs["reduce_s"] for costs in self.costs)
        reduced = f"all-reduces of up to {1e3 * reduce_s:.2f} ms, " if reduce_s else ""
        update_s = max(costs["update_s"] for costs in self.costs)
        updated = f"updates of up to {1e3 * update_s:.2f} ms, " if update_s else ""
        bound = "no plan keeps the limit"
        if math.isfinite(lower_bound_s):
            bound = f"no plan is under {1e3 * lower_bound_s:.2f}"
        splits = self.plan.splits if self.plan else ()
        split = f"; {len(splits)} layers are cut in two" if splits else ""
        return (
            f"planner {self.planner}, schedule {self.schedule}, {shape}{self.microbatches} "
            f"micro-batches{size}: step {1e3 * self.step_s:.2f} ms simulated ({bound}), "
            f"slowest stage {1e3 * self.bottleneck_s:.2f} ms, {reduced}{updated}"
            f"{self.bubble_fraction:.1%} idle, planned in {self.planning_s:.2f} s{split}"
        )


def _stage_json(stage: Stage, costs: Mapping[str, float]) -> dict[str, Any]:
    """Returns a stage in the form of `--json`."""
    where = {"layers": list(stage.layers), "devices": list(stage.devices)}
    numbers = {name: number for name, number in costs.items() if name != "host_bytes"}
    away = {"state_fates": dict(stage.state_fates)} if stage.state_fates else {}
    fates = {"fates": dict(stage.fates), **away}
    return where | {"replicas": len(stage.devices)} | numbers | fates
