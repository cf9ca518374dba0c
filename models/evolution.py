"""Regularized evolution (Real et al. 2019, arXiv:1802.01548, algorithm 1).

It yields an endless stream of architectures, and the reported losses steer the stream.
"""

import math
from collections import deque

import numpy as np

from jvpipe.models.architecture import Architecture, SearchSpace

Member = tuple[Architecture, float]
"""A trained architecture and its loss."""


class RegularizedEvolution:
    """An endless iterator over architectures. The caller trains each one and reports its loss.

    The first `population` architectures are random. Each later one is a mutation of the best of
    `sample` members, which are drawn from the population with replacement. A reported architecture
    joins the population. If the population is full, its oldest member leaves.

    The stream depends only on the seed and the reports. To resume a search, make the same reports
    again.

    >>> space = SearchSpace(("glu", "ffn1_relu"), ("none", "glu"), slots=4, fewest=2)
    >>> search = RegularizedEvolution(space, seed=0, population=8, sample=4)
    >>> for _ in range(100):
    ...     architecture = next(search)
    ...     search.report(architecture, loss=float(len(architecture.names())))
    >>> search.best[1]
    2.0
    """

    def __init__(
        self, space: SearchSpace, seed: int, population: int = 16, sample: int = 4
    ) -> None:
        if population < 1 or sample < 1:
            raise ValueError(f"population={population} and sample={sample} must be at least 1")
        self.space, self._sample = space, sample
        self._rng = np.random.default_rng(seed)
        self._members: deque[Member] = deque(maxlen=population)
        self._drawn = 0

    def __iter__(self) -> "RegularizedEvolution":
        return self

    def __next__(self) -> Architecture:
        """Returns the next architecture to train.

        Raises:
            ValueError: `population` architectures have been returned, but no loss was reported.
        """
        size = self._members.maxlen or 0
        if self._drawn < size:
            self._drawn += 1
            return self.space.random(self._rng)
        if not self._members:
            raise ValueError(
                f"{size} architectures were returned, but no loss was reported: call report() for "
                "each of them"
            )
        # Members are drawn with replacement, as in the paper. So even the worst member can win,
        # if all draws choose it.
        chosen = self._rng.integers(len(self._members), size=self._sample)
        tournament = [self._members[int(i)] for i in chosen]
        parent, _ = min(tournament, key=_loss)
        return self.space.mutate(parent, self._rng)

    def report(self, architecture: Architecture, loss: float) -> None:
        """Adds a trained architecture to the population. A loss of NaN counts as infinite."""
        # A full queue drops its oldest member even if that is the best one ("aging", section 3).
        ranked = math.inf if math.isnan(loss) else loss
        self._members.append((architecture, ranked))

    @property
    def population(self) -> tuple[Member, ...]:
        """The members with their losses, oldest first."""
        return tuple(self._members)

    @property
    def best(self) -> Member:
        """The member with the least loss.

        Raises:
            ValueError: the population is empty.
        """
        return min(self._members, key=_loss)


def _loss(member: Member) -> float:
    return member[1]
