"""Computes when the tasks of an order start and end, and the longest path through them.

An order is a list of tasks for each device. This file calls a task a step, and stores it as a
number. The course of an order is its lists with the times of all steps. Legend:

    V, M    the stages; the micro-batches
    kind    0 is a forward, 1 a whole backward or a first half, 2 a second half
    step    the number (kind * V + stage) * M + micro-batch
    cell    a stage and a micro-batch, as the number stage * M + micro-batch
    tail    the seconds from a step's end to the end of the order, if all that must follow the step
            runs as early as it can
    block   steps of a longest path that one device runs one after the other without a pause

A step starts when the step before it on its device has ended and its input has arrived. One pass
over the lists, device by device as far as each can go, finds all times (`run`). The same pass
backwards finds all tails (`follow`). A walk back from the end of the order finds a longest path and
its blocks (`path`). Columns of this drawing are equal times; dots are pauses:

    device 0   F0 F1 F2 B0 .. B1 .. B2      the longest path: F0 of device 0, the block of
    device 1   .. F0 B0 F1 B1 F2 B2         device 1, and B2 of device 0
                  +--- a block ---+

A backward may begin early: it may recompute for `early_s` seconds before it reads its cotangents.

The times are those that the simulator finds if nothing is swapped and devices of neighboring stages
have a link in each direction. A test compares these times with the simulator's. This file is faster
than the simulator, so a search can judge thousands of orders. Plans are finally chosen by simulated
times (`simulated_step_s`).
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from operator import add
from random import Random
from typing import NamedTuple

from jvpipe.ir.kinds import Kind
from jvpipe.ir.task import Task, TaskLists
from jvpipe.planners.joint.order_loads import Loads
from jvpipe.util.sizes import ROUNDING

NOT_YET = -1.0
"""The arrival time of an input that was not sent yet; any negative number works."""


class CourseBlock(NamedTuple):
    """A block: a device, and where the block's first and last step are in the device's list."""

    device: int
    first: int
    last: int


class Course:
    """An order whose lists may be changed, and its times as of the last `run`.

    Only `put` changes `lists`, and only `flip` changes `half`. A flip must come before the `put` of
    the new list, which counts bytes. After both, `run` updates the times, and then `follow` updates
    the tails.

    Attributes:
        M: the number of micro-batches.
        cells: the number of cells.
        lists: the steps of each device.
        half: for each cell, whether its backward runs in halves.
        to: for each step, the step that waits for its result; -1 if none does.
        source: for each step, the step that makes its input; -1 if none does.
        seconds: for each step, how long it takes.
        bytes: for each step, what it adds to the bytes that its device holds.
        send_s: for each step, the seconds of sending its result.
        early_s: for each step, how long it may run before it reads its input.
        updates_s: for each device, the seconds of its updates after all steps.
        device: for each step, the device that it runs on.
        place: for each step, its index in the list of its device.
        held: for each device, the bytes that it holds after each of its steps.
        there: for each step, the earliest start that its input allows (from `run`).
        starts: for each step, when it starts (from `run`).
        ends: for each step, when it ends (from `run`).
        ran: all steps in the order in which `run` found their times.
        step_s: the seconds of the whole order (from `run`).
        tails: for each step, its tail (from `follow`).
        answers: for each step, its tail if nothing followed on its own device (from `follow`).
    """

    def __init__(self, loads: Loads, order: TaskLists) -> None:
        """Makes the course of an order, and runs it.

        Args:
            loads: of the plan's stages.
            order: the tasks of each device; backwards may be whole or in halves.
        """
        M = loads.microbatches
        cells = len(loads.places) * M
        self.loads = loads
        self.M = M
        self.cells = cells
        # The result of a forward goes to the forward of the next stage; on the last stage, it goes to
        # the backward of the same stage. The result of a backward or a first half goes to the stage
        # before. A second half waits for its first half, but nothing is sent between the two.
        forwards = list(range(cells))
        backwards = list(range(cells, 2 * cells))
        nowhere = [-1] * M
        self.to = [*forwards[M:], *backwards[-M:], *nowhere, *backwards[:-M], *[-1] * cells]
        self.source = [*nowhere, *forwards[:-M], *backwards[M:], *forwards[-M:], *backwards]
        # A whole backward and a first half have the same number, so splitting a backward changes
        # no other number.
        base = {Kind.F: 0, Kind.B: cells, Kind.I: cells, Kind.W: 2 * cells}

        def by_step(by_kind: Iterable[Sequence[float]]) -> list[float]:
            return list(chain.from_iterable([number] * M for number in chain(*by_kind)))

        # Backwards are whole until `flip` splits them.
        kinds = Kind.F, Kind.B, Kind.W
        none_s = [0.0] * len(loads.places)
        return_s = 0.0, *loads.send_s[:-1]  # for each stage, of returns to the stage before
        self.seconds = by_step(loads.seconds[kind] for kind in kinds)
        self.bytes = by_step(loads.more_bytes[kind] for kind in kinds)
        self.send_s = by_step([loads.send_s, return_s, none_s])
        self.early_s = by_step([none_s, loads.early_s, none_s])
        self.device = [d for d in loads.places for _ in range(M)] * 3
        self.updates_s = loads.updates_s
        self.half = [False] * cells
        for s, kind, m in chain.from_iterable(order):
            if kind is Kind.I:
                self.flip(s * M + m)
        self.place = [-1] * (3 * cells)
        self.lists = [list[int]()] * len(order)
        self.held = [list[float]()] * len(order)
        for d, tasks in enumerate(order):
            steps = [base[kind] + s * M + m for s, kind, m in tasks]
            self.put(d, steps)
        self.run()

    @property
    def order(self) -> TaskLists:
        """Returns the order as tasks."""
        return tuple(tuple(map(self._task, steps)) for steps in self.lists)

    def _task(self, step: int) -> Task:
        """Returns the task of a step's number."""
        kind, cell = divmod(step, self.cells)
        s, m = divmod(cell, self.M)
        backward = Kind.I if self.half[cell] else Kind.B
        kinds = Kind.F, backward, Kind.W
        return Task(s, kinds[kind], m)

    def flip(self, cell: int) -> None:
        """Splits a cell's backward, or joins its halves if it is split; lists and times stay."""
        s = cell // self.M
        step = self.cells + cell
        half = self.half[cell] = not self.half[cell]
        kind = Kind.I if half else Kind.B
        self.seconds[step] = self.loads.seconds[kind][s]
        self.bytes[step] = self.loads.more_bytes[kind][s]

    def put(self, d: int, steps: list[int]) -> None:
        """Gives a device another list, and counts what the device holds after each of its steps."""
        self.lists[d] = steps
        for at, step in enumerate(steps):
            self.place[step] = at
        self.held[d] = list(accumulate(map(self.bytes.__getitem__, steps)))

    def run(self) -> None:
        """Finds the times of all steps; `step_s` is infinite if steps wait in a circle.

        A device runs its steps until it reaches one whose input was not sent yet. The step that
        later sends the input lets the device go on. So each step is visited once, and once more if
        its device has stopped at it.
        """
        cells = self.cells
        lists = self.lists
        device = self.device
        seconds = self.seconds
        to = self.to
        send_s = self.send_s
        early_s = self.early_s
        # Nothing is sent to the first stage. The last `cells` entries are never read: with them, the
        # line marked (*) needs no test for second halves.
        self.there = there = [0.0] * self.M + [NOT_YET] * (4 * cells - self.M)
        self.starts = starts = [0.0] * (3 * cells)
        self.ends = ends = [0.0] * (3 * cells)
        self.ran = ran = list[int]()
        free_s = [0.0] * len(lists)
        done = [0] * len(lists)
        ready = list(range(len(lists)))  # devices that can go on
        waits = dict[int, int]()  # by step: the device that has stopped at it
        links = dict[tuple[int, int], float]()  # by link: when its last transfer ends
        while ready:
            d = ready.pop()
            now = free_s[d]
            steps = lists[d]
            for at in range(done[d], len(steps)):
                step = steps[at]
                begin = there[step]
                if begin < 0.0:
                    # The step that sends this input wakes the device; in a circle, none does.
                    waits[step], done[d] = d, at
                    break
                if begin > now:
                    now = begin
                starts[step] = now
                now += seconds[step]
                ends[step] = now
                ran.append(step)
                if step >= cells:
                    there[step + cells] = now  # (*) a second half may follow its first half
                target = to[step]
                if target < 0:
                    continue
                arrives = now
                if takes_s := send_s[step]:
                    # A link carries its transfers in the order of the sender's list.
                    link = d, device[target]
                    arrives = max(now, links.get(link, 0.0)) + takes_s
                    links[link] = arrives
                # The target may begin `early_s` before the arrival: it recomputes until then.
                there[target] = max(0.0, arrives - early_s[target])
                if target in waits:
                    ready.append(waits.pop(target))
            free_s[d] = now
        is_whole = len(ran) == sum(map(len, lists))
        self.step_s = max(map(add, free_s, self.updates_s)) if is_whole else float("inf")

    def follow(self) -> None:
        """Finds `tails` and `answers` from the last `run`.

        After a step's end, the order needs time for what follows on the step's own device, and for
        what follows from its result: the transfer, and all that waits for it. A tail is the larger
        of the two. An answer is the time for the result alone.
        """
        self.tails = tails = [0.0] * (3 * self.cells)
        self.answers = answers = [0.0] * (3 * self.cells)
        seconds = self.seconds
        to = self.to
        send_s = self.send_s
        device = self.device
        # What the order needs from the start of the step last seen on each device, and from the
        # start of the transfer last seen on each link.
        later_s = list(self.updates_s)
        links = dict[tuple[int, int], float]()
        # A step ran before all that follows it. So in reverse order, the tails of all that follows
        # are known.
        for step in reversed(self.ran):
            d = device[step]
            target = to[step]
            if target >= 0:
                answer = seconds[target] - self.early_s[target] + tails[target]
                # After the transfer come its target and the next transfer on the link.
                if takes_s := send_s[step]:
                    link = d, device[target]
                    answer = takes_s + max(answer, links.get(link, 0.0))
                    links[link] = answer
                answers[step] = answer
                if answer > later_s[d]:
                    later_s[d] = answer
            tails[step] = later_s[d]
            later_s[d] += seconds[step]

    def path(self, draw: Random) -> list[CourseBlock]:
        """Finds the blocks of a longest path, the last block first.

        If several paths are longest, one is drawn.
        """
        starts = self.starts
        ends = self.ends
        near_s = ROUNDING * self.step_s
        lists = zip(self.lists, self.updates_s, strict=True)
        lasts = [(ends[steps[-1]] + update_s, steps[-1]) for steps, update_s in lists if steps]
        _, step = max(lasts)
        blocks = list[CourseBlock]()
        last = self.place[step]
        # Each step starts when the step before it on the device ends, or when its input arrives, or
        # at time 0. The walk goes back to what the step waited for: to the step before (`follows`),
        # or to the step that sent the input (`waits`).
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
        """Finds the step that made another step wait for its input.

        If the input was sent at once, it is the step that makes the input. If the link was busy, it
        is the step whose transfer began the link's busy period.

        Args:
            step: the step that waited.
            near_s: times that differ by at most this count as equal.
        """
        source = self.source[step]
        arrives = self.there[step] + self.early_s[step]
        d = self.device[source]
        e = self.device[step]
        for at in range(self.place[source], -1, -1):
            other = self.lists[d][at]
            target = self.to[other]
            if not self.send_s[other] or self.device[target] != e:
                continue
            # `arrives` becomes the time when the transfer of `other` started. If `other` ended
            # before that, the link was busy with an earlier transfer.
            arrives -= self.send_s[other]
            if self.ends[other] >= arrives - near_s:
                return other
        return source
