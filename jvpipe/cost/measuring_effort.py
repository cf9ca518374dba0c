"""The effort of measuring and of offering options: numbers that trade time for better costs.

These numbers may be changed. With other options of layers, planners may find other plans. A change
does not cause seconds that are in the archive to be measured again.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class MeasuringEffort:
    """The number of times that programs and copies are run to measure their seconds.

    Attributes:
        turns: the number of turns. In each turn, all programs run one after another. A program gets
            its least seconds of all turns, so a slow moment of the machine in one turn does no
            harm.
        runs: the runs of each program in a turn, after one run that warms up.
        long_s: a program that takes at least these seconds runs only in the first turn, where two
            runs follow the one that warms up.
        copies: the copies of each size over a link between devices, or between device and host,
            after one copy that warms up.
        shared: two copies count as sharing a link if both at once take more than this many times as
            long as the slower copy alone.
        host_copies: the copies of each size over a link between processes; the first one of these
            warms up.
        lending_turns: the turns in which a program runs on one device, and then on all at once,
            to find the time that idle devices lend to the others (`lending.py`).
        lending_turn_s: the least seconds of one device in such a turn; less would be mostly noise.
    """

    turns: int = 3
    runs: int = 3
    long_s: float = 0.1
    copies: int = 5
    shared: float = 1.5
    host_copies: int = 6
    lending_turns: int = 5
    lending_turn_s: float = 0.02


@dataclass(frozen=True)
class OptionEffort:
    """The number of options that planners have for each layer.

    An option is a way to treat the candidates of a layer: values that its forward may keep.

    Attributes:
        options: the most options of a layer.
        all_subsets: the most candidates of a layer for which all subsets are tried. If a layer has
            more candidates, minimum cuts find the best subsets (`recompute.py`).
        prices: the number of minimum cuts, each with another price of a kept byte, in seconds.
        flow_units: the sum of the finite capacities in the graph of a minimum cut. Capacities are
            rounded to whole numbers, so a larger sum is more exact. Twice the sum must fit 32 bits:
            it is the capacity of edges that no cut may contain.
    """

    options: int = 24
    all_subsets: int = 10
    prices: int = 24
    flow_units: int = 10**9


MEASURING = MeasuringEffort()
OPTIONS = OptionEffort()
