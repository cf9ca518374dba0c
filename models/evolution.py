"""Regularised evolution (Real et al. 2019, arXiv:1802.01548, algorithm 1): a stream of architectures."""

import math
from collections import deque

import numpy as np

from jvpipe.models.architecture import Architecture, SearchSpace

Member = tuple[Architecture, float]
"""A trained architecture and its loss."""


class RegularizedEvolution:
    """An endless iterator over architectures, to which the loss of each is reported.

    The first `population` architectures are drawn at random. From then on each is a mutation of the best of `sample`
    members, which are drawn from the population with replacement. An architecture that is reported joins the
    population, and the oldest member leaves it. The stream depends only on the seed and the reports, so a search is
    resumed by making the same reports again.

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
        """The next architecture to train.

        Raises:
            ValueError: as many as the population holds were given, and none was reported.

        """
        size = self._members.maxlen or 0
        if self._drawn < size:
            self._drawn += 1
            return self.space.random(self._rng)
        if not self._members:
            raise ValueError(
                f"{size} architectures were given and no loss was reported: call report() for each"
            )
        # A tournament with replacement, as in the paper: even the worst member may win one.
        chosen = self._rng.integers(len(self._members), size=self._sample)
        tournament = [self._members[int(i)] for i in chosen]
        parent, _ = min(tournament, key=_loss)
        return self.space.mutate(parent, self._rng)

    def report(self, architecture: Architecture, loss: float) -> None:
        """Adds a trained architecture to the population; a loss that is not a number counts as the worst."""
        # The queue has a greatest length: the oldest member leaves it, however good it is (section 3).
        ranked = math.inf if math.isnan(loss) else loss
        self._members.append((architecture, ranked))

    @property
    def population(self) -> tuple[Member, ...]:
        """The members with their losses, oldest first."""
        return tuple(self._members)

    @property
    def best(self) -> Member:
        """The member of the least loss; ValueError if there is none yet."""
        return min(self._members, key=_loss)


def _loss(member: Member) -> float:
    return member[1]
