"""Capuchin's memory optimisation (Peng et al., ASPLOS 2020), as DawnPiper uses it on each stage (section 4.3).

Legend: the FreeTime of a tensor is what is left of the time between its use in the forward and its use in the
backward when it has been copied to the host and back; MSPS is memory saved per second of overhead. k is the stage's
number of micro-batches in flight.
"""

from jvpipe.papers.selection import FateChange, Selection


def free_time_s(stage: Selection, change: FateChange) -> float:
    """FreeTime of what a change swaps; negative if its copies would be waited for.

    Between a layer's forward and its backward lie both of the layers after it, and the k - 1 other micro-batches, for
    each of which the stage takes its forward and its backward. That is exact in the steady state of 1F1B, and the mean
    over a step of GPipe.
    """
    between_s = (stage.in_flight - 1) * stage.compute_s + stage.later_s(change.layer)
    return between_s - 2 * stage.problem.host.seconds(change.swapped_bytes)


def memory_saved_per_second(stage: Selection, change: FateChange) -> float:
    """MSPS: overhead is what is computed again, and the copies, for which the link has no hidden time left."""
    overhead_s = change.extra_s + 2 * stage.problem.host.seconds(max(0, change.swapped_bytes))
    return change.saved_bytes / overhead_s if overhead_s > 0 else float("inf")


def optimise(stage: Selection) -> None:
    """Changes a stage's fates until it fits, or as far as that goes.

    Swaps come first, the longest FreeTime before others, as long as their copies hide in it and the link to the host
    has room beside the computation. Then whatever has the highest MSPS, swap or recomputation.
    """
    stage.spend(
        stage.changes.swaps,
        score=lambda change: free_time_s(stage, change),
        allowed=lambda change: free_time_s(stage, change) >= 0 and stage.hides(change),
    )
    stage.spend(
        stage.changes.after,
        score=lambda change: memory_saved_per_second(stage, change),
        allowed=stage.host_has_room,
    )
