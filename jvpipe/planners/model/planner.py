"""What is known of a planner before it is asked: its name, what it needs, and what it decides."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from jvpipe.planners.model.problem import Decision, Problem


class FateRule(Enum):
    """How a planner treats what layers leave for their backwards."""

    KEEPS = "keeps everything"
    RECOMPUTES = "recomputes everything from the stage's input"
    CHOOSES = "chooses each layer's fates under a memory limit"


@dataclass(frozen=True)
class Planner:
    """A strategy, as it is registered.

    Attributes:
        name: what users call it.
        decide: answers a problem; raises `Infeasible` where it finds nothing that fits.
        why: one sentence that says why its cuts are where they are.
        fate_rule: how it treats what layers leave for their backwards.
        asks_seconds: whether it looks at layers' seconds, which then have to be measured.
        as_paper: whether it is to do as its paper says and no more: it cuts between whole layers,
            takes devices in the order given, and leaves the order of tasks to the schedule's rule.
    """

    name: str
    decide: Callable[[Problem], Decision]
    why: str
    fate_rule: FateRule = FateRule.KEEPS
    asks_seconds: bool = True
    as_paper: bool = True
