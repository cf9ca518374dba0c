"""What planners answer, in words and as JSON; `tables.py` has the tables."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


def _with_lists(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns fields by name, tuples as the lists that JSON knows."""
    return {name: list(x) if isinstance(x, tuple) else x for name, x in fields}


@dataclass(frozen=True)
class AnsweredStage:
    """What a stage takes per micro-batch, and what each of its devices holds at most.

    `name` says which of several unlike devices it runs on; it is empty where they are alike.
    """

    name: str
    layers: tuple[int, ...]
    devices: tuple[int, ...]
    forward_s: float
    backward_s: float
    recompute_s: float
    swap_s: float
    comm_s: float
    reduce_s: float
    input_s: float
    weight_s: float
    in_flight: int
    peak_bytes: int
    host_bytes: int
    fates: Mapping[str, str]

    def as_json(self) -> dict[str, Any]:
        """Returns the stage in the form of `--json`."""
        fields = asdict(self, dict_factory=_with_lists)
        del fields["name"], fields["host_bytes"]
        return fields | {"replicas": len(self.devices)}


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
    """A planner's answer as plain numbers; without stages no plan fits, and `reason` says why.

    `shape` says how many devices the stages have and `shapes` are the others that were looked at,
    where that was decided too; `devices` is how many there were, `batch` how many examples.
    """

    planner: str
    schedule: str
    planning_s: float
    feasible: bool
    stages: tuple[AnsweredStage, ...] = ()
    microbatches: int = 0
    bottleneck_s: float = math.inf
    peak_bytes: int = 0
    step_s: float = math.inf
    lower_bound_s: float = math.inf
    bubble_fraction: float = 0.0
    splits: tuple[int, ...] = ()
    tasks: tuple[str, ...] = ()
    shape: str = ""
    shapes: tuple[AnsweredShape, ...] = ()
    devices: int = 0
    batch: int = 0
    reason: str = ""
    smallest_limit_bytes: int = 0

    def as_json(self) -> dict[str, Any]:
        """Returns the answer in the form of `--json`."""
        head = {"planner": self.planner, "schedule": self.schedule, "feasible": self.feasible}
        if not self.stages:
            return head | {
                "reason": self.reason,
                "smallest_limit_bytes": self.smallest_limit_bytes,
                "stages": [],
                "planning_s": self.planning_s,
            }
        found = head | {
            "stages": [stage.as_json() for stage in self.stages],
            "bottleneck_s": self.bottleneck_s,
            "step_s": self.step_s,
            "lower_bound_s": self.lower_bound_s if math.isfinite(self.lower_bound_s) else None,
            "bubble_fraction": self.bubble_fraction,
            "planning_s": self.planning_s,
            "splits": list(self.splits),
            "tasks": list(self.tasks),
        }
        if self.shape:
            found["devices"] = self.devices
            found["microbatches"] = self.microbatches
            found["shapes"] = [asdict(shape, dict_factory=_with_lists) for shape in self.shapes]
        return found

    def summary(self) -> str:
        """Says how long a step is, how slow the slowest stage and how idle the devices."""
        shape = f"on {self.devices} devices {self.shape}, " if self.shape else ""
        size = f" of {self.batch // self.microbatches}" if self.shape else ""
        reduce_s = max(stage.reduce_s for stage in self.stages)
        reduced = f"all-reduces of up to {1e3 * reduce_s:.2f} ms, " if reduce_s else ""
        bound = "no plan keeps the limit"
        if math.isfinite(self.lower_bound_s):
            bound = f"no plan is under {1e3 * self.lower_bound_s:.2f}"
        split = f"; {len(self.splits)} layers are cut in two" if self.splits else ""
        return (
            f"planner {self.planner}, schedule {self.schedule}, {shape}{self.microbatches} "
            f"micro-batches{size}: step {1e3 * self.step_s:.2f} ms simulated ({bound}), "
            f"slowest stage {1e3 * self.bottleneck_s:.2f} ms, {reduced}"
            f"{self.bubble_fraction:.1%} idle, planned in {self.planning_s:.2f} s{split}"
        )
