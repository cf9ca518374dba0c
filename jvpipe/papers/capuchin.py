"""Capuchin's memory optimisation, as DawnPiper uses it on each stage.

Papers: Peng et al., "Capuchin: Tensor-based GPU Memory Management for Deep Learning", ASPLOS 2020;
DawnPiper, section 4.3.

Legend, in the paper's words:
    FreeTime    of a tensor: the seconds between its use in the forward and its use in the backward,
                less those of its copies to the host and back
    MSPS        memory saved per second of overhead
    k           micro-batches in flight on the stage

    layer's forward | later forwards | k - 1 micro-batches | later backwards | layer's backward
                     [ out ...        what is left: FreeTime          ... in ]
"""

from jvpipe.papers.selection import FateChange, Selection


def free_time_s(stage: Selection, change: FateChange) -> float:
    """Returns the FreeTime of what a change swaps.

    It is negative if the stage would wait for the copies.

    Between a layer's forward and backward run those of the layers after it, and the whole stage for
    each of the k - 1 other micro-batches. This is exact in the steady state of 1F1B, and the mean
    over a step of GPipe.
    """
    between_s = (stage.in_flight - 1) * stage.compute_s + stage.later_s(change.layer)
    one_way_s = stage.problem.host.seconds(change.swapped_bytes)
    return between_s - 2 * one_way_s


def memory_saved_per_second(stage: Selection, change: FateChange) -> float:
    """Returns the MSPS of a change.

    Its overhead is recomputation and copies, of which none is hidden now.
    """
    one_way_s = stage.problem.host.seconds(max(0, change.swapped_bytes))
    overhead_s = change.extra_s + 2 * one_way_s
    return change.saved_bytes / overhead_s if overhead_s > 0 else float("inf")


def optimise(stage: Selection) -> None:
    """Changes a stage's fates until it fits, or as far as that goes.

    Swaps come first, by falling FreeTime, as long as their copies hide in it and the link to the
    host has time left beside the computation. Then swaps and recomputations follow by falling MSPS.
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
