"""How hard the planners of the papers try: numbers that trade their seconds for better plans."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PaperEffort:
    """The numbers of all of them; "bounds" lie between groups of layers.

    Attributes:
        replica_counts: counts of devices that DAPPLE tries for a stage; of more devices, a stage
            gets multiples of a unit.
        bounds: that DawnPiper tries between two groups; of more, those that the fewest bytes cross
            (appendix B.2).
        imbalance: the distance of a side's seconds from its share in vPipe's bisection, in seconds
            of a mean stage.
        heavy: the seconds of a coarse vertex there, in the same unit; heavier nests are not merged
            as a whole.
        quanta: of bytes in AdaPipe's knapsack; all of them are what a stage may have.
        fine_quanta: with which the stages of its best cuts choose again.
        caps_times_layers: more layers mean fewer caps, each of which is a knapsack of its own.
        growth_parts: the part of a limit that is added until a planner finds something: one in so
            many.
        limit_tolerance: the distance between the named limit and one at which the planner fails, as
            a share of it.
    """

    replica_counts: int = 16
    bounds: int = 50
    imbalance: float = 0.1
    heavy: float = 0.25
    quanta: int = 512
    fine_quanta: int = 8192
    caps_times_layers: int = 600
    growth_parts: int = 20
    limit_tolerance: float = 0.02


PAPER = PaperEffort()
