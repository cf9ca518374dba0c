"""How hard the planners of the papers try: numbers that trade their seconds for better plans."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PaperEffort:
    """The effort of all planners of the papers; larger searches find better plans and take longer.

    Attributes:
        replica_counts: how many numbers of devices DAPPLE tries for a stage, at most. If a cluster
            has more devices than this, DAPPLE tries only the multiples of some number.
        bounds: how many bounds DawnPiper tries between two groups of stages, at most. If there are
            more, it tries cb, mb, and those that the fewest bytes cross (appendix B.2).
        imbalance: how far the seconds of a side may be from its share in vPipe's bisection, as a
            fraction of the mean stage's seconds; and how much longer the slower of two stages may
            take after the refinement, as a fraction of its least seconds.
        heavy: the most seconds of a coarse vertex in vPipe's bisection, as a fraction of the mean
            stage's seconds; a nest (`kernighan_lin.py`) that takes more becomes several vertices.
        quanta: the number of quanta (units of bytes) in AdaPipe's knapsack; together they
            cover all bytes that a stage may use.
        fine_quanta: the number of quanta with which the stages of AdaPipe's best cuts choose again.
        caps_times_layers: the most caps that AdaPipe tries, times the number of layers; 3 caps are
            always allowed. A cap bounds a layer's working bytes, and has a knapsack of its own.
        growth_parts: n, where a limit grows by 1/n of itself until a planner finds a plan.
        limit_tolerance: how far the limit in an error may be above a limit at which the planner
            fails, as a fraction of the limit in the error.
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
