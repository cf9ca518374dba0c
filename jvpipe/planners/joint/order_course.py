"""The course of an order: when its steps start and end, and the longest path through them.

An order is a list of steps per device. Each step starts when the one before it on its device has
ended and what it reads has arrived, so that one pass over the lists, device by device as far as
each can go, finds all times. The same pass backwards finds how long the order goes on after each
step at least, and a walk from the last end to a step that starts at once finds a longest path.

    device 0   F0 F1 F2 .. B0 B1 B2        a step's number is (kind V + stage) M + micro-batch,
    device 1      F0 B0 F1 B1 F2 B2        for V stages and M micro-batches of kind 0, 1 and 2:
               +- block --+                a forward, a backward or its first half, a second half

Legend: a cell is a stage and a micro-batch, hence the number of its forward. A step's tail is how
long the order goes on after its end, at least. A block is a run of steps of one device on a longest
path: each starts when the one before it ends. A backward may begin early: by what it computes again
before it reads its cotangents.

The clock is the simulator's without swaps, where no two transfers share a link, and a test holds it
to that. What counts in the end is simulated (`simulated_step_s`).
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from operator import add
from random import Random
from typing import NamedTuple

from jvpipe.ir.kinds import Kind
from jvpipe.planners.joint.order_loads import Loads, Order, Step
from jvpipe.util.sizes import ROUNDING

NOT_YET = -1.0
"""When something arrives that was not sent yet."""


class CourseBlock(NamedTuple):
    """Steps of a device on a longest path, by their places in its list, the last one included."""

    device: int
    first: int
    last: int


class Course:
    """An order as lists of numbers that may be changed, and its times at the last `run`.

    Whoever changes `lists[d]` calls `placed(d)`; `half` says of each cell whether its backward runs
    in halves, and is changed by `cut` alone.

    Attributes:
        M: micro-batches.
        cells: stages times micro-batches.
        lists: the steps of each device.
        half: of each cell, whether its backward runs in halves.
        to: for each step the one that waits for it; -1 where there is none.
        source: for each step the one that it waits for; -1 where there is none.
        device: where each step runs.
        place: where in the list of its device each step stands.
        held: what each device holds after each of its steps.
        step_s: the seconds of the whole order.
    """

    def __init__(self, loads: Loads, order: Order) -> None:
        M = loads.microbatches
        cells = len(loads.places) * M
        self.loads = loads
        self.M = M
        self.cells = cells
        self.to, self.source = _ways(M, cells)
        # A backward has one number whether it is whole or not, so that splitting it renumbers
        # nothing.
        base = {Kind.F: 0, Kind.B: cells, Kind.I: cells, Kind.W: 2 * cells}
        self.lists = [[base[kind] + s * M + m for kind, s, m in steps] for steps in order]
        self.seconds, self.bytes, self.send_s, self.early_s = _of_steps(loads)
        self.updates_s = [loads.updates_s(d) for d in range(len(order))]
        self.half = [False] * cells
        for steps in order:
            for kind, s, m in steps:
                if kind is Kind.I:
                    self.cut(s * M + m, half=True)
        self.device = [-1] * (3 * cells)
        self.place = [-1] * (3 * cells)
        self.held = [[0.0]] * len(order)
        for d in range(len(order)):
            self.placed(d)
        self.run()

    @property
    def order(self) -> Order:
        """Returns the order as tasks."""
        return [[self._step(step) for step in steps] for steps in self.lists]

    def copy(self) -> tuple[list[list[int]], list[bool]]:
        """Copies the lists, and which backwards are in halves."""
        return [list(steps) for steps in self.lists], list(self.half)

    def _step(self, step: int) -> Step:
        """Returns the step of a number."""
        kind, cell = divmod(step, self.cells)
        s, m = divmod(cell, self.M)
        backward = Kind.I if self.half[cell] else Kind.B
        return (Kind.F, backward, Kind.W)[kind], s, m

    def cut(self, cell: int, *, half: bool) -> None:
        """Runs a backward in halves, or whole."""
        s = cell // self.M
        step = self.cells + cell
        handed = self.loads.handed_bytes[s] if half else 0.0
        self.half[cell] = half
        self.seconds[step] = self.loads.seconds[Kind.I if half else Kind.B][s]
        self.bytes[step] = handed - self.loads.kept_bytes[s]

    def placed(self, d: int) -> None:
        """Notes where the steps of a device stand, and what it holds after each."""
        steps = self.lists[d]
        for at, step in enumerate(steps):
            self.device[step] = d
            self.place[step] = at
        self.held[d] = list(accumulate(map(self.bytes.__getitem__, steps)))

    def run(self) -> None:
        """Clocks the order: `step_s` is infinite if steps wait for each other.

        Each device goes on until it reaches a step whose input was not sent yet; whoever sends that
        has the device go on. So every step is looked at once, and once more for each such stop.
        """
        cells = self.cells
        lists = self.lists
        device = self.device
        seconds = self.seconds
        to = self.to
        send_s = self.send_s
        early_s = self.early_s
        # When each step may begin for its input; the last part stands for what would follow second
        # halves.
        there = [NOT_YET] * (4 * cells)
        there[: self.M] = [0.0] * self.M  # nothing is sent to the first stage
        starts = [0.0] * (3 * cells)
        ends = [0.0] * (3 * cells)
        ran = list[int]()
        free_s = [0.0] * len(lists)
        done = [0] * len(lists)
        ready = list(range(len(lists)))  # devices that can go on
        waits = dict[int, int]()  # the device that has stopped at a step
        links = dict[tuple[int, int], float]()  # when the last transfer of a link ends
        while ready:
            d = ready.pop()
            now = free_s[d]
            steps = lists[d]
            for at in range(done[d], len(steps)):
                step = steps[at]
                begin = there[step]
                if begin < 0.0:
                    # Whoever sends this step's input wakes the device. If nobody does, steps wait
                    # for each other, and not all of them have run at the end.
                    waits[step], done[d] = d, at
                    break
                if begin > now:
                    now = begin
                starts[step] = now
                now += seconds[step]
                ends[step] = now
                ran.append(step)
                if step >= cells:
                    there[step + cells] = now  # a second half may follow its first one
                target = to[step]
                if target < 0:
                    continue
                arrives = now
                if takes_s := send_s[step]:
                    # Transfers between two devices keep the order of the sender's list. The list
                    # is walked in that order, so the link's last transfer is the one before.
                    link = d, device[target]
                    arrives = max(now, links.get(link, 0.0)) + takes_s
                    links[link] = arrives
                # The target computes again for so long before it reads what arrives.
                there[target] = max(0.0, arrives - early_s[target])
                if target in waits:
                    ready.append(waits.pop(target))
            free_s[d] = now
        self.there = there
        self.starts = starts
        self.ends = ends
        self.ran = ran
        all_ran = len(ran) == sum(map(len, lists))
        ends_s = map(add, free_s, self.updates_s)
        self.step_s = max(ends_s) if all_ran else float("inf")

    def follow(self) -> None:
        """Counts tails after a run: `tails` of steps, and `answers`, due to what a step sends."""
        tails = [0.0] * (3 * self.cells)
        answers = [0.0] * (3 * self.cells)
        seconds = self.seconds
        to = self.to
        send_s = self.send_s
        device = self.device
        later_s = list(self.updates_s)  # from the start of the last step seen on a device
        links = dict[tuple[int, int], float]()  # from the start of the last transfer seen
        # Whatever follows a step has run after it, so in reverse all that its tail is made of is
        # known.
        for step in reversed(self.ran):
            d = device[step]
            target = to[step]
            if target >= 0:
                answer = seconds[target] - self.early_s[target] + tails[target]
                # The transfer goes on to its target, and holds up the next one on its link.
                if takes_s := send_s[step]:
                    link = d, device[target]
                    answer = takes_s + max(answer, links.get(link, 0.0))
                    links[link] = answer
                answers[step] = answer
                if answer > later_s[d]:
                    later_s[d] = answer
            tails[step] = later_s[d]
            later_s[d] += seconds[step]
        self.tails = tails
        self.answers = answers

    def path(self, draw: Random) -> list[CourseBlock]:
        """Finds the blocks of a longest path, the last one first; of several paths, a drawn one."""
        starts = self.starts
        ends = self.ends
        near_s = ROUNDING * self.step_s
        devices = zip(self.lists, self.updates_s, strict=True)
        lasts = [(steps[-1], update_s) for steps, update_s in devices if steps]
        _, step = max((ends[step] + update_s, step) for step, update_s in lasts)
        blocks = list[CourseBlock]()
        last = self.place[step]
        # From step to step backwards: to the one before on the device, or to the one that sent the
        # input, whichever ends as this one starts. A step that waited for neither began at time 0.
        while True:
            d = self.device[step]
            at = self.place[step]
            before = self.lists[d][at - 1]
            follows = at > 0 and ends[before] >= starts[step] - near_s
            waits = self.source[step] >= 0 and self.there[step] >= starts[step] - near_s
            if follows and (not waits or draw.random() < 0.5):
                step = before
                continue
            blocks.append(CourseBlock(d, at, last))
            if not waits:
                return blocks
            step = self._sender(step, near_s)
            last = self.place[step]

    def _sender(self, step: int, near_s: float) -> int:
        """Finds the step whose end a step waits for.

        It is the source of its input, or a step whose transfer is before that one on the same link
        and ends as it begins.
        """
        source = self.source[step]
        arrives = self.there[step] + self.early_s[step]
        d = self.device[source]
        e = self.device[step]
        for at in range(self.place[source], -1, -1):
            other = self.lists[d][at]
            if not self.send_s[other] or self.device[self.to[other]] != e:
                continue
            # Back by one transfer: the link was busy from here on, or this step's end began it.
            arrives -= self.send_s[other]
            if self.ends[other] >= arrives - near_s:
                return other
        return source


def _of_steps(loads: Loads) -> tuple[list[float], list[float], list[float], list[float]]:
    """Lists of each step what it takes, if backwards are whole.

    Returns:
        Its seconds, the bytes that it adds, the seconds of its send, and of what it computes before
        it reads its input.
    """
    M = loads.microbatches
    stages = len(loads.places)
    seconds = [loads.seconds[kind] for kind in (Kind.F, Kind.B, Kind.W)]
    ends_bytes = [-size for size in loads.kept_bytes]
    late_bytes = [-size for size in loads.handed_bytes]
    sizes = [loads.kept_bytes, ends_bytes, late_bytes]
    send_s = [loads.send_s, loads.return_s, [0.0] * stages]

    def by_step(kinds: Sequence[Sequence[float]]) -> list[float]:
        return [each for stages in kinds for each in stages for _ in range(M)]

    early_s = [[0.0] * stages, loads.early_s, [0.0] * stages]
    return by_step(seconds), by_step(sizes), by_step(send_s), by_step(early_s)


@lru_cache(maxsize=32)
def _ways(M: int, cells: int) -> tuple[list[int], list[int]]:
    """Lists for each step the one that waits for it, and the one it waits for; -1 if none does.

    A forward is waited for by that of the next stage, the last one by its own backward, a backward
    by that of the stage before. A second half waits for its first one, which sends nothing to it.
    """
    nowhere = [-1] * M
    last_stage = range(cells - M, cells)
    to = [
        *range(M, cells),
        *(cells + cell for cell in last_stage),
        *nowhere,
        *range(cells, 2 * cells - M),
        *[-1] * cells,
    ]
    source = [
        *nowhere,
        *range(cells - M),
        *range(cells + M, 2 * cells),
        *last_stage,
        *range(cells, 2 * cells),
    ]
    return to, source
