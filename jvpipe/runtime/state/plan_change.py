"""Records a change of plan in a run's history, and finds the layers that the change moves."""

from dataclasses import dataclass

from jvpipe.ir.plan import Plan


@dataclass(frozen=True, slots=True)
class PlanChange:
    """A change from one plan to another.

    Attributes:
        step: the step at which the plan changed.
        microbatch: the first micro-batch of that step under the new plan.
        why: the reason, for the history.
        old: the plan before.
        new: the plan after.
        layers: the layers that moved: (layer, device before, device after).
        moved_bytes: the number of bytes that were copied.
        how: "inside" a step; "between" two steps; or "by host": between two steps and through the
            host's memory, because some device could not hold the layers that leave it and those
            that arrive at the same time.
    """

    step: int
    microbatch: int
    why: str
    old: Plan
    new: Plan
    layers: tuple[tuple[int, int, int], ...]
    moved_bytes: int
    how: str

    def __str__(self) -> str:
        moves = [f"{layer} from {a} to {b}" for layer, a, b in self.layers]
        ending = "only fates changed"
        if moves:
            ending = f"layers {', '.join(moves)}"
        elif self.old.cuts != self.new.cuts:
            ending = "no layer changes its device"
        return (
            f"step {self.step}, micro-batch {self.microbatch}: {self.why}; "
            f"cuts {list(self.old.cuts)} to {list(self.new.cuts)}, "
            f"{self.moved_bytes:,} bytes moved {self.how}; "
            f"{ending}"
        )


def moved_layers(old: Plan, new: Plan) -> tuple[tuple[int, int, int], ...]:
    """Returns the layers that change devices: (layer, device before, device after).

    If a layer has replicas (copies on several devices), the result names one pair of devices: the
    first that the layer leaves and the first that it enters. If the layer leaves no device, its
    first device under the old plan is named; if it enters none, its first device under the new
    plan.

    >>> moved_layers(Plan.from_cuts([2, 1]), Plan.from_cuts([1, 2]))
    ((1, 0, 1),)
    """
    before, after = _devices_of(old), _devices_of(new)
    moved = []
    for layer, places in before.items():
        left = [d for d in places if d not in after[layer]]
        entered = [d for d in after[layer] if d not in places]
        if left or entered:
            first_left, *_ = left or places
            first_entered, *_ = entered or after[layer]
            moved.append((layer, first_left, first_entered))
    return tuple(moved)


def _devices_of(plan: Plan) -> dict[int, tuple[int, ...]]:
    return {layer: stage.devices for stage in plan.stages for layer in stage.layers}
