"""Capuchin's memory optimization, as DawnPiper uses it on each stage.

Papers: Peng et al., "Capuchin: Tensor-based GPU Memory Management for Deep Learning", ASPLOS 2020;
DawnPiper, section 4.3.

Legend, in the paper's words:
    FreeTime    the seconds between a tensor's use in the forward and its use in the backward, less
                the seconds of its copies to the host and back
    MSPS        memory saved per second of overhead
    k           the number of micro-batches in flight on the stage

In the drawing, time runs to the right. Between a layer's forward and its backward, the stage runs
the forwards and backwards of its later layers, and k - 1 other micro-batches:

    layer's forward | later forwards | k - 1 micro-batches | later backwards | layer's backward
                     [ copy out ]             FreeTime               [ copy in ]
"""

from jvpipe.papers.selection import FateChange, Selection


def free_time_s(stage: Selection, change: FateChange) -> float:
    """Returns the FreeTime of the values that a change swaps; negative if the stage has to wait.

    The seconds between a layer's forward and backward are counted as in the drawing above. For 1F1B
    they are exact in the steady state of a stage that never waits. For GPipe they are a rough
    estimate: only the forward or the backward of each other micro-batch runs in between.

    Args:
        stage: the stage of the change.
        change: a change that swaps more.
    """
    others_s = (stage.in_flight - 1) * stage.compute_s
    between_s = others_s + stage.later_s(change.layer)
    one_way_s = stage.problem.host.seconds(change.swapped_bytes)
    return between_s - 2 * one_way_s


def memory_saved_per_second(stage: Selection, change: FateChange) -> float:
    """Returns the MSPS of a change; the overhead is its recomputation and all of its copies.

    No copy counts as hidden, because `optimize` has already taken the swaps that can be hidden.

    Args:
        stage: the stage of the change.
        change: any change of the stage's fates.
    """
    one_way_s = stage.problem.host.seconds(max(0, change.swapped_bytes))
    overhead_s = change.extra_s + 2 * one_way_s
    return change.saved_bytes / overhead_s if overhead_s > 0 else float("inf")


def optimize(stage: Selection) -> None:
    """Changes a stage's fates until the stage fits or no change is left.

    First it takes swaps in order of falling FreeTime. Each of these swaps must have a FreeTime of
    at least 0, and the link to the host must have time for its copies while the stage computes.
    Then it takes swaps and recomputations in order of falling MSPS.
    """

    def free_time(change: FateChange) -> float:
        return free_time_s(stage, change)

    def per_second(change: FateChange) -> float:
        return memory_saved_per_second(stage, change)

    def is_hidden(change: FateChange) -> bool:
        return free_time(change) >= 0 and stage.hides(change)

    stage.spend(
        stage.changes.swaps,
        score=free_time,
        allowed=is_hidden,
    )
    stage.spend(
        stage.changes.after,
        score=per_second,
        allowed=stage.host_has_room,
    )
