"""The effort of measuring and of offering options: numbers that trade seconds for better costs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MeasuringEffort:
    """The number of runs of programs and copies from which their seconds are learned.

    Attributes:
        turns: rounds in which all programs run one after another. A slow moment of the machine hits
            all programs alike, or is left out because the least seconds count.
        runs: of a program in a turn, after one that warms up.
        long_s: programs that take longer run in the first turn only, and less often.
        copies: of each size over a link between devices, or between a device and its host.
        shared: two copies share a link if together they take so many times as long as the longer
            one alone.
        host_copies: of each size over a link between processes, the first of which warms up.
        lending_turns: rounds in which a device runs alone and then beside all others.
        lending_turn_s: least seconds of such a round on one device; less would measure noise.
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
    """The number of ways to treat a layer's residuals that planners are offered.

    Attributes:
        options: the most that a layer has.
        all_subsets: the most candidates of a layer of which all subsets are tried.
        prices: prices of a byte at which a minimum cut is made if there are more candidates.
        flow_units: the sum of all capacities of that cut, which are whole numbers.
    """

    options: int = 24
    all_subsets: int = 10
    prices: int = 24
    flow_units: int = 10**9


MEASURING = MeasuringEffort()
OPTIONS = OptionEffort()
