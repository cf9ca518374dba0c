"""How long devices are measured, and how many options layers have: numbers that trade seconds for better costs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MeasuringEffort:
    """How often programs and copies are run to learn their seconds.

    Attributes:
        turns: all programs are run one after another, in so many turns: a slow moment of the machine
            hits all alike, or is left out.
        runs: of a program in a turn, after one that warms up.
        long_s: programs that take longer are run in the first turn only, and less often.
        copies: of a size over a link between devices, or between a device and its host.
        host_copies: of a size over a link between processes, the first of which warms up.
        lending_turns: in which a device runs alone and beside all others.
        lending_turn_s: seconds of such a turn on one device, at least: a moment is not enough to tell.
    """

    turns: int = 3
    runs: int = 3
    long_s: float = 0.1
    copies: int = 5
    host_copies: int = 6
    lending_turns: int = 5
    lending_turn_s: float = 0.02


@dataclass(frozen=True)
class OptionEffort:
    """How many ways to treat what a layer leaves for its backward are offered to planners.

    Attributes:
        options: of a layer, at most.
        all_subsets: up to so many candidates all subsets are tried.
        prices: of a byte at which a minimum cut is made, else.
        flow_units: the whole numbers into which all seconds are split for that cut.
    """

    options: int = 24
    all_subsets: int = 10
    prices: int = 24
    flow_units: int = 10**9


MEASURING = MeasuringEffort()
OPTIONS = OptionEffort()
