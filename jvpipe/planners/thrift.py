"""The fewest bytes that a segment's layers can hold and work with.

Legend: W bounds the working bytes; held(W) is the least that choices hold whose working bytes are at most W: a shortest
path over layers, each with its own thriftiest choice, or in a run [a, b) computed again, which holds the input of layer
a alone. held falls as W rises, so between two values of W nothing takes less than low + held(high).
"""

from heapq import heappop, heappush

import numpy as np
from jaxtyping import Float, Int

from jvpipe.planners.choices import Choices
from jvpipe.planners.problem import RERUN, RERUN_ON


class Thrift:
    """Layers [i, j) with k micro-batches in flight."""

    def __init__(self, choices: Choices, k: int, i: int, j: int) -> None:
        layers = slice(i, j)
        self.n = j - i
        self.allowed = choices.allowed[layers, :-2]
        self.held = choices.held_bytes(k, layers)[:, :-2]
        self.working = choices.working_bytes[layers, :-2]
        self.input_bytes = choices.input_bytes[layers]
        self.kept_bytes = k * self.input_bytes
        self.total = np.concatenate([[0.0], np.cumsum(choices.run_bytes[layers])])
        self.temporary_bytes = choices.temporary_bytes[layers]
        self.least = float(choices.least_working_bytes[layers].max())

    def fewest(self, tolerance: float = 0.0) -> tuple[float, tuple[int, ...]]:
        """The fewest bytes, held and working, and choices that take them; to a relative tolerance."""
        most = max(float(self.total[-1] + self.temporary_bytes.max()), float(self.working[self.allowed].max()))
        best = self._path(most)
        heap = [(self.least + best[1], self.least, most)]
        while heap and heap[0][0] < sum(best[:2]) * (1 - tolerance):
            _, low, high = heappop(heap)
            middle = np.floor((low + high) / 2)
            found = self._path(middle)
            if sum(found[:2]) < sum(best[:2]):
                best = found
            if found[0] > low:
                heappush(heap, (low + found[1], low, found[0] - 1))
            if middle < high:
                held = self._held(high)[-1]
                heappush(heap, (middle + 1 + held, middle + 1, high))
        return float(best[0] + best[1]), tuple(int(c) for c in best[2])

    def _held(self, limit: float) -> Float[np.ndarray, "N"]:
        return self._table(limit)[0]

    def _table(self, limit: float) -> tuple[Float[np.ndarray, "M"], Int[np.ndarray, "M"], Int[np.ndarray, "N"]]:
        """The least held by the first layers, for each number of them; where the last piece began; the own choice."""
        own = np.where(self.allowed & (self.working <= limit), self.held, np.inf)
        choice, own = own.argmin(1), own.min(1)
        held, began = np.full(self.n + 1, np.inf), np.zeros(self.n + 1, dtype=int)
        held[0] = 0.0
        alone = np.zeros(self.n + 1, dtype=bool)
        for a in range(self.n):
            if held[a] + own[a] < held[a + 1]:
                held[a + 1], began[a + 1], alone[a + 1] = held[a] + own[a], a, True
            # A run from layer a reaches as far as its working bytes allow.
            working = self.total[a + 1 :] - self.total[a] - self.input_bytes[a] + self.temporary_bytes[a:]
            over = working > limit
            length = int(over.argmax()) if over.any() else self.n - a
            reached = slice(a + 1, a + 1 + length)
            better = held[a] + self.kept_bytes[a] < held[reached]
            held[reached][better] = held[a] + self.kept_bytes[a]
            began[reached][better], alone[reached][better] = a, False
        return held, began, np.where(alone[1:], choice, RERUN)

    def _path(self, limit: float) -> tuple[float, float, np.ndarray]:
        """Working bytes, held bytes and choices of the thriftiest path within a limit of working bytes."""
        held, began, last = self._table(limit)
        choices, working, b = np.zeros(self.n, dtype=int), 0.0, self.n
        if np.isinf(held[-1]):
            return limit, np.inf, choices
        while b > 0:
            a = int(began[b])
            if last[b - 1] == RERUN:
                choices[a:b] = RERUN_ON
                choices[a] = RERUN
                run = self.total[a + 1 : b + 1] - self.total[a] - self.input_bytes[a] + self.temporary_bytes[a:b]
                working = max(working, float(run.max()))
            else:
                choices[a] = last[b - 1]
                working = max(working, float(self.working[a, last[b - 1]]))
            b = a
        return working, float(held[-1]), choices
