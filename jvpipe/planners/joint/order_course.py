"""The course of an order: when its steps start and end, and the longest path through them.

An order is a list of steps (tasks) for each device. A step starts when the step before it on its
device has ended and its input has arrived. One pass over the lists, device by device as far as each
can go, finds all times. The same pass backwards finds the tail of each step: the time from the
step's end to the end of the order that the order needs at least. A walk back from the step that
ends last, to a step that starts at time 0, finds a longest path.

    device 0   F0 F1 F2 .. B0 B1 B2        columns are equal times; .. is a pause
    device 1      F0 B0 F1 B1 F2 B2
               +- block --+                a run of steps of device 1 on the longest path

A step's number is (kind * V + stage) * M + micro-batch, for V stages and M micro-batches. Kind 0 is
a forward, kind 1 a backward or its first half, kind 2 a second half. A cell is a pair of a stage
and a micro-batch, and has the number of its forward, stage * M + micro-batch.

A block is a run of steps of one device on a longest path, each of which starts when the one before
it ends. A backward may begin early: it may recompute for `early_s` seconds before it reads its
cotangents.

The times are those that the simulator finds if nothing is swapped and no two transfers share a
link; a test compares both. Plans are finally chosen by simulated times (`simulated_step_s`).
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
"""The time at which an input arrives that was not sent yet; any negative number would do."""


class CourseBlock(NamedTuple):
    """A block: a device, and the indices in its list of the block's first step and its last one."""

    device: int
    first: int
    last: int


class Course:
    """An order as lists of step numbers, which may be changed, and its times at the last `run`.

    A caller that changes `lists[d]` must call `placed(d)` afterwards, and `run` to update the
    times. `half` must be changed by `cut` alone, which also updates seconds and bytes.

    Attributes:
        M: micro-batches.
        cells: the number of cells, which is stages times micro-batches.
        lists: the steps of each device.
        half: for each cell, whether its backward runs in halves.
        to: for each step the step that waits for its result; -1 if none does.
        source: for each step the step that makes its input; -1 if none does.
        device: for each step the device that it runs on.
        place: for each step its index in the list of its device.
        held: for each device the bytes that it holds after each of its steps.
        step_s: the seconds of the whole order.
    """

    def __init__(self, loads: Loads, order: Order) -> None:
        M = loads.microbatches
        cells = len(loads.places) * M
        self.loads = loads
        self.M = M
        self.cells = cells
        self.to, self.source = _ways(M, cells)
        # A whole backward and a first half have the same number, so that splitting a backward
        # changes no other number.
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
        """Copies the lists and `half`, by which the order can be restored."""
        return [list(steps) for steps in self.lists], list(self.half)

    def _step(self, step: int) -> Step:
        """Returns the task of a step's number."""
        kind, cell = divmod(step, self.cells)
        s, m = divmod(cell, self.M)
        backward = Kind.I if self.half[cell] else Kind.B
        return (Kind.F, backward, Kind.W)[kind], s, m

    def cut(self, cell: int, *, half: bool) -> None:
        """Makes a cell's backward run in halves, or whole."""
        s = cell // self.M
        step = self.cells + cell
        handed = self.loads.handed_bytes[s] if half else 0.0
        self.half[cell] = half
        self.seconds[step] = self.loads.seconds[Kind.I if half else Kind.B][s]
        self.bytes[step] = handed - self.loads.kept_bytes[s]

    def placed(self, d: int) -> None:
        """Records where a device's steps stand in its list, and what it holds after each step."""
        steps = self.lists[d]
        for at, step in enumerate(steps):
            self.device[step] = d
            self.place[step] = at
        self.held[d] = list(accumulate(map(self.bytes.__getitem__, steps)))

    def run(self) -> None:
        """Finds the times of all steps; `step_s` is infinite if steps wait for each other.

        A device runs its steps until it reaches one whose input was not sent yet. The step that
        sends the input later lets the device go on. So every step is looked at once, and once more
        for each stop.
        """
        cells = self.cells
        lists = self.lists
        device = self.device
        seconds = self.seconds
        to = self.to
        send_s = self.send_s
        early_s = self.early_s
        # The time at which each step's input lets it begin. The last `cells` entries are never
        # read: they let the line that is marked below write for second halves too.
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
                    # The step that sends this input wakes the device. If no step does, steps wait
                    # for each other, and not all steps have run at the end.
                    waits[step], done[d] = d, at
                    break
                if begin > now:
                    now = begin
                starts[step] = now
                now += seconds[step]
                ends[step] = now
                ran.append(step)
                if step >= cells:
                    there[step + cells] = now  # marked: a second half may follow its first half
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
                # The target may begin `early_s` before the arrival: it recomputes until then.
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
        """Counts after a run each step's tail (`tails`), and its tail by way of its result alone.

        The latter (`answers`) is the time that the order needs from the step's end on for what the
        step sends, and for all that waits for it, whatever follows on the step's own device.
        """
        tails = [0.0] * (3 * self.cells)
        answers = [0.0] * (3 * self.cells)
        seconds = self.seconds
        to = self.to
        send_s = self.send_s
        device = self.device
        later_s = list(self.updates_s)  # from the start of the last step seen on a device
        links = dict[tuple[int, int], float]()  # from the start of the last transfer seen
        # All that follows a step ran after it. In reverse order, the tails that a step's tail is
        # computed from are therefore known.
        for step in reversed(self.ran):
            d = device[step]
            target = to[step]
            if target >= 0:
                answer = seconds[target] - self.early_s[target] + tails[target]
                # The transfer is followed by its target, and by the next transfer on its link.
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
        """Finds the blocks of a longest path, the last block first; draws one of several paths."""
        starts = self.starts
        ends = self.ends
        near_s = ROUNDING * self.step_s
        devices = zip(self.lists, self.updates_s, strict=True)
        lasts = [(steps[-1], update_s) for steps, update_s in devices if steps]
        _, step = max((ends[step] + update_s, step) for step, update_s in lasts)
        blocks = list[CourseBlock]()
        last = self.place[step]
        # Go back from step to step: to the step before on the device if it ends when this step
        # starts, or to the step that sent the input if that arrives when this step starts. A step
        # that waited for neither started at time 0.
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
        """Finds the step at whose end the wait for a step's input began.

        It is the step that makes the input, if the transfer of the input starts at once. If the
        link was busy, it is the step whose transfer began the busy period of the link.
        """
        source = self.source[step]
        arrives = self.there[step] + self.early_s[step]
        d = self.device[source]
        e = self.device[step]
        for at in range(self.place[source], -1, -1):
            other = self.lists[d][at]
            if not self.send_s[other] or self.device[self.to[other]] != e:
                continue
            # Go back by one transfer. If `other` ended before the transfer could start, the link
            # was busy with an earlier transfer.
            arrives -= self.send_s[other]
            if self.ends[other] >= arrives - near_s:
                return other
        return source


def _of_steps(loads: Loads) -> tuple[list[float], list[float], list[float], list[float]]:
    """Lists the seconds and bytes of each step if backwards are whole.

    Returns:
        For each step its seconds, the bytes that it adds (or frees, if negative), the seconds of
        sending its result, and the seconds that it may compute before it reads its input.
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
    """Lists for each step the step that waits for its result, and the step that makes its input.

    An entry is -1 if there is no such step. The result of a forward goes to the forward of the next
    stage; on the last stage, to the backward of the same stage. The result of a backward goes to
    the backward of the stage before. A second half waits for its first half, which sends nothing.
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
