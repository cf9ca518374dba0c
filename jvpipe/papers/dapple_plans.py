"""The table of DAPPLE's dynamic program: the best plan so far for each cut and set of devices.

`dapple_replicas.py` defines the symbols. One object holds all plans for one g, so that all of them
are extended at once. A plan does not list its stages. It stores its last stage, and points to the
plan that this stage extends.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float

from jvpipe.papers.dapple import Phases

Places = tuple[int, ...]
"""Devices, by their numbers."""


@dataclass(eq=False)
class Plans:
    """The plans whose L is T_PL(j, g), for one g and all j; each attribute has one item for each j.

    Attributes:
        latency_s: L of the plan; infinite if there is no plan.
        before: the plan that this one extends by a stage, as its `Plans` and its j; None for the
            empty plan, and if there is no plan.
        places: the devices of the plan's last stage.
        phases: the phases of the plan's stages and of the transfers between them, in order.
    """

    latency_s: Float[np.ndarray, "n"]
    before: list[tuple["Plans", int] | None]
    places: list[Places]
    phases: list[tuple[Phases, ...]]

    @staticmethod
    def none(n: int) -> "Plans":
        """Returns a table of n cuts that has no plan yet."""
        return Plans(
            latency_s=np.full(n, np.inf),
            before=[None] * n,
            places=[()] * n,
            phases=[()] * n,
        )

    @cached_property
    def stacked(self) -> list[Phases]:
        """The phases of all plans as arrays over j; shorter plans begin with empty stages."""
        longest = max(map(len, self.phases))
        # The axes: F, B or AR; the stage; j; and an axis of 1, for the ends of a new stage.
        every = np.zeros((3, longest, len(self.phases), 1))
        for j, phases in enumerate(self.phases):
            if phases:
                # A stage without work does not change L: it adds nothing to the warm-up, and its
                # steady phase of 0 seconds cannot make it the pivot.
                begin = longest - len(phases)
                every[:, begin:, j, 0] = np.array(phases).T
        return [Phases(*every[:, s]) for s in range(longest)]

    def stages(self, j: int) -> list[tuple[int, Places]]:
        """Lists the stages of the plan for j, each as the index of its last cut and its devices."""
        before = self.before[j]
        if before is None:
            return []
        plans, end = before
        return [*plans.stages(end), (j, self.places[j])]


def at(phases: Phases, which: Any) -> Phases:
    """Selects some plans from phases whose arrays have an entry for each plan.

    Args:
        phases: the phases of a stage in many plans.
        which: an index of NumPy that selects plans.
    """
    return Phases(*(np.asarray(x)[which] for x in phases))
