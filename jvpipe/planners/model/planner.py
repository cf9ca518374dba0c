"""Defines a registered planner: its name, its function, what it needs and what it decides."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from jvpipe.planners.model.local_segments import LocalSegments
from jvpipe.planners.model.problem import Decide
from jvpipe.planners.model.shapes import Path

ShapeRule = Callable[[LocalSegments, int], Path | None]
"""A function from segments and the examples per micro-batch to a shape and its bounds.

It returns None if nothing fits.
"""


class FateRule(Enum):
    """How a planner treats the residuals that layers leave for their backwards."""

    KEEPS = "keeps everything"
    RECOMPUTES = "recomputes everything from the stage's input"
    CHOOSES = "chooses each layer's fates under a memory limit"


@dataclass(frozen=True)
class Planner:
    """A planner as the registry of planners holds it (`jvpipe.papers.registry`).

    Attributes:
        name: the name that users give.
        decide: answers a problem; raises `Infeasible` if it finds nothing that fits.
        why: a clause that tells users why its cuts are where they are.
        fate_rule: how the planner treats the residuals that layers leave for their backwards.
        asks_seconds: whether the planner reads layers' seconds, which then have to be measured.
        as_paper: whether the planner does what its paper says and nothing more: it cuts between
            whole layers, takes devices in the order given, and leaves the order of tasks to the
            schedule's rule.
        shape_rule: how a paper's planner divides devices among stages, given the size of a
            micro-batch; None: it gives each stage one device. jvpipe's own planner also has
            None, because it divides devices in a search of its own.
    """

    name: str
    decide: Decide
    why: str
    fate_rule: FateRule = FateRule.KEEPS
    asks_seconds: bool = True
    as_paper: bool = True
    shape_rule: ShapeRule | None = None

    @property
    def chooses_fates(self) -> bool:
        """Whether the planner decides what is kept, swapped and recomputed."""
        return self.fate_rule is FateRule.CHOOSES

    @property
    def shapes(self) -> bool:
        """Whether the planner decides how many devices each stage has."""
        return not self.as_paper or self.shape_rule is not None
