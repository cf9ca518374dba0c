"""How thoroughly the papers' planners search: numbers that trade planning time for better plans."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PaperEffort:
    """The search effort of the papers' planners; larger searches find better plans and take longer.

    Attributes:
        replica_counts: DAPPLE tries at most this many numbers of devices for a stage. If a cluster
            has more devices, DAPPLE tries only the multiples of some number.
        bounds: DawnPiper tries at most this many bounds between two groups of stages. If there are
            more, it tries cb, mb, and the bounds that the fewest bytes cross (appendix B.2).
        imbalance: in vPipe's bisection, how far the seconds of a side may differ from its share, as
            a fraction of the mean stage's seconds. In the refinement, how much longer the slower of
            two stages may become, as a fraction of its least seconds.
        heavy: the most seconds of a coarse vertex in vPipe's bisection, as a fraction of the mean
            stage's seconds. A nest (`kernighan_lin.py`) that takes more becomes several vertices.
        quanta: the number of quanta (units of bytes) in AdaPipe's knapsack; together they
            cover all bytes that a stage may use.
        fine_quanta: the number of quanta with which the stages of AdaPipe's best cuts choose again.
        caps_times_layers: AdaPipe tries at most this number divided by the number of layers as
            caps, but 3 caps are always allowed. A cap bounds a layer's working bytes, and each cap
            has a knapsack.
        growth_parts: a limit grows by 1 / `growth_parts` of itself until a planner finds a plan.
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
