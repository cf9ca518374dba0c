"""The course of an order: when its steps start and end, what follows each of them, and the longest path.

Legend: for V stages and M micro-batches a step is a number, (kind V + stage) M + micro-batch; its kind is 0 for a
forward, 1 for a backward or its first half, 2 for a second half. A step's tail is how long the order goes on after its
end, at least. A block is a run of steps of one device on a longest path: each starts when the one before it ends.
A backward is there early: by what it computes again before it reads its cotangents.

The clock is the simulator's without swaps, where no two transfers share a link; what counts in the end is simulated
(`simulated_step_s`).
"""

from functools import lru_cache
from itertools import accumulate
from operator import add
from random import Random
from typing import NamedTuple

from jvpipe.ir.kinds import Kind
from jvpipe.planners.joint.order_loads import Loads, Order, Step

SAME = 1e-9
"""Times that differ by less are the same, as a share of the step."""


class Block(NamedTuple):
    """Steps of a device on a longest path, by their places in its list, the last one included."""

    device: int
    first: int
    last: int


class Course:
    """An order as lists of numbers, that may be changed, and its times, which are those of the last `run`.

    A change of `lists[d]` is told by `placed(d)`; `half` says of each stage and micro-batch whether its backward runs
    in halves, and is changed by `cut` alone.
    """

    def __init__(self, loads: Loads, order: Order) -> None:
        M, cells = loads.microbatches, len(loads.places) * loads.microbatches
        first = {Kind.F: 0, Kind.B: cells, Kind.I: cells, Kind.W: 2 * cells}
        self.M, self.cells = M, cells
        self.to, self.source = _ways(M, cells)
        self.lists = [[first[kind] + s * M + m for kind, s, m in steps] for steps in order]
        self.half = [False] * cells
        for s, m in ((s, m) for steps in order for kind, s, m in steps if kind is Kind.I):
            self.half[s * M + m] = True
        self.device, self.place, self.held = (
            [-1] * (3 * cells),
            [-1] * (3 * cells),
            [[0.0]] * len(order),
        )
        self.take(loads)

    def take(self, loads: Loads, limit_s: float = float("inf")) -> None:
        """Clocks the order for the loads of another plan with as many stages; see `run`."""
        M, whole = self.M, (loads.seconds[kind] for kind in (Kind.F, Kind.B, Kind.W))
        bytes_of = (
            loads.kept_bytes,
            [-b for b in loads.kept_bytes],
            [-b for b in loads.handed_bytes],
        )
        self.loads = loads
        self.seconds = [s for each in whole for s in each for _ in range(M)]
        self.bytes = [b for each in bytes_of for b in each for _ in range(M)]
        self.send_s = [
            s for each in (loads.send_s, loads.return_s) for s in each for _ in range(M)
        ] + [0.0] * self.cells
        backwards_s = [s for s in loads.early_s for _ in range(M)]
        self.early_s = [0.0] * self.cells + backwards_s + [0.0] * self.cells
        self.updates_s = [loads.updates_s(d) for d in range(len(self.lists))]
        for cell, half in enumerate(self.half):
            if half:
                self.cut(cell, half=True)
        for d in range(len(self.lists)):
            self.placed(d)
        self.run(limit_s)

    @property
    def order(self) -> Order:
        """The order as tasks."""
        return [[self._step(step) for step in steps] for steps in self.lists]

    def copy(self) -> tuple[list[list[int]], list[bool]]:
        """The lists, and which backwards are in halves."""
        return [list(steps) for steps in self.lists], list(self.half)

    def _step(self, step: int) -> Step:
        kind, cell = divmod(step, self.cells)
        s, m = divmod(cell, self.M)
        return (Kind.F, Kind.I if self.half[cell] else Kind.B, Kind.W)[kind], s, m

    def cut(self, cell: int, *, half: bool) -> None:
        """Has a backward run in halves, or whole."""
        s = cell // self.M
        self.half[cell] = half
        self.seconds[self.cells + cell] = self.loads.seconds[Kind.I if half else Kind.B][s]
        self.bytes[self.cells + cell] = (
            self.loads.handed_bytes[s] if half else 0.0
        ) - self.loads.kept_bytes[s]

    def placed(self, d: int) -> None:
        """Notes where the steps of a device stand, and what it holds after each."""
        steps = self.lists[d]
        for at, step in enumerate(steps):
            self.device[step], self.place[step] = d, at
        self.held[d] = list(accumulate(map(self.bytes.__getitem__, steps)))

    def run(self, limit_s: float = float("inf")) -> None:
        """Clocks the order: `step_s` is infinite if steps wait for each other.

        Args:
            limit_s: as soon as it is known that the order takes longer, `step_s` is infinite too.
        """
        cells, lists, seconds, to, send_s = (
            self.cells,
            self.lists,
            self.seconds,
            self.to,
            self.send_s,
        )
        device, early_s = self.device, self.early_s
        there = [-1.0] * (4 * cells)  # the last part stands for what would follow second halves
        there[: self.M] = [0.0] * self.M
        starts, ends, ran = [0.0] * (3 * cells), [0.0] * (3 * cells), list[int]()
        free, done, ready = [0.0] * len(lists), [0] * len(lists), list(range(len(lists)))
        spare_s = [
            limit_s - sum(map(seconds.__getitem__, steps)) - update_s
            for steps, update_s in zip(lists, self.updates_s, strict=True)
        ]
        waits, links = dict[int, int](), dict[tuple[int, int], float]()
        while ready:
            d = ready.pop()
            now, steps = free[d], lists[d]
            for at in range(done[d], len(steps)):
                step = steps[at]
                begin = there[step]
                if begin < 0.0:
                    waits[step], done[d] = d, at
                    break
                if begin > now:
                    spare_s[d] -= begin - now
                    if spare_s[d] < 0.0:
                        self.step_s = float("inf")
                        return
                    now = begin
                starts[step] = now
                now += seconds[step]
                ends[step] = now
                ran.append(step)
                if step >= cells:
                    there[step + cells] = now
                target = to[step]
                if target < 0:
                    continue
                if takes_s := send_s[step]:
                    link = d, device[target]
                    before = links.get(link, 0.0)
                    arrives = links[link] = (before if before > now else now) + takes_s
                else:
                    arrives = now
                there[target] = arrives - early_s[target]
                if target in waits:
                    ready.append(waits.pop(target))
            free[d] = now
        self.there, self.starts, self.ends, self.ran = there, starts, ends, ran
        whole = len(ran) == sum(map(len, lists))
        self.step_s = max(map(add, free, self.updates_s)) if whole else float("inf")

    def follow(self) -> None:
        """Counts tails after a run: `tails` of steps, and `answers`, what of them is due to what a step sends."""
        tails, answers = [0.0] * (3 * self.cells), [0.0] * (3 * self.cells)
        seconds, to, send_s, device = self.seconds, self.to, self.send_s, self.device
        early_s = self.early_s
        later, links = list(self.updates_s), dict[tuple[int, int], float]()
        for step in reversed(self.ran):
            d, target = device[step], to[step]
            if target >= 0:
                answer = seconds[target] - early_s[target] + tails[target]
                if takes_s := send_s[step]:
                    link = d, device[target]
                    answer = takes_s + max(answer, links.get(link, 0.0))
                    links[link] = answer
                answers[step] = answer
                if answer > later[d]:
                    later[d] = answer
            tails[step] = later[d]
            later[d] += seconds[step]
        self.tails, self.answers = tails, answers

    def path(self, draw: Random) -> list[Block]:
        """The blocks of a longest path, the last one first; of several paths one that is drawn."""
        starts, ends, near_s = self.starts, self.ends, SAME * self.step_s
        every = zip(self.lists, self.updates_s, strict=True)
        step = max((ends[x[-1]] + update_s, x[-1]) for x, update_s in every if x)[1]
        blocks, last = [], self.place[step]
        while True:
            d, at = self.device[step], self.place[step]
            steps = self.lists[d]
            follows = at > 0 and ends[steps[at - 1]] >= starts[step] - near_s
            waits = self.source[step] >= 0 and self.there[step] >= starts[step] - near_s
            if follows and (not waits or draw.random() < 0.5):
                step = steps[at - 1]
                continue
            blocks.append(Block(d, at, last))
            if not waits:
                return blocks
            step = self._sender(step, near_s)
            last = self.place[step]

    def _sender(self, step: int, near_s: float) -> int:
        """The step whose end a step waits for: its source, or one whose transfer is before that of the source."""
        source, arrives = self.source[step], self.there[step] + self.early_s[step]
        d, e = self.device[source], self.device[step]
        for at in range(self.place[source], -1, -1):
            other = self.lists[d][at]
            if not self.send_s[other] or self.device[self.to[other]] != e:
                continue
            arrives -= self.send_s[other]
            if self.ends[other] >= arrives - near_s:
                return other
        return source


@lru_cache(maxsize=32)
def _ways(M: int, cells: int) -> tuple[list[int], list[int]]:
    """For each step the one that waits for it, and the one that it waits for; -1 where there is none."""
    nowhere, loss = [-1] * M, range(cells - M, cells)
    to = [
        *range(M, cells),
        *(cells + cell for cell in loss),
        *nowhere,
        *range(cells, 2 * cells - M),
        *[-1] * cells,
    ]
    source = [
        *nowhere,
        *range(cells - M),
        *range(cells + M, 2 * cells),
        *loss,
        *range(cells, 2 * cells),
    ]
    return to, source
