"""Improves an order of tasks by tabu search on its longest path, as job shops are solved.

The method is that of Nowicki and Smutnicki.

The longest path is a chain of tasks and transfers that takes as long as the whole step. The step
becomes shorter only if something on its longest path changes. The path consists of blocks: tasks
that a device runs one after the other without a pause. A change inside a block does not help; a
task has to leave the block at its front or at its end. Letters are tasks in the list of a device:

    block          a b c d e      a waits for another device, and another device waits for e
    ahead          c a b d e      c moves to the front, and no longer waits for a and b
    behind         a b d e c      c moves to the end; d and e no longer wait for c
    split, behind  a b I d e W    c is a backward: its second half W moves to the end

Two halves that are near each other may also become a whole backward again. A task never passes
another task of its own stage and kind, so that the results stay bitwise identical, and what the
device holds must always fit.

Each turn draws some moves. The move is made whose longest path through the moved tasks is shortest,
even if that is longer than before. A step that has moved rests for some turns, so that the search
does not undo the move at once. The search ends after a number of moves, after a number of moves
without a gain, or when the order meets the lower bound.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import NamedTuple

from jvpipe.planners.joint.effort import ORDER
from jvpipe.planners.joint.order_course import Course, CourseBlock
from jvpipe.planners.joint.order_loads import Loads, Order
from jvpipe.util.sizes import ROUNDING


class Move(NamedTuple):
    """A change of a run of a device's list, and the longest path through what changed.

    A step is a task, written as a number (see `order_course.py`).

    Attributes:
        path_s: seconds of the longest path through the steps that change.
        draw: a random number that decides between moves with equal `path_s`. The order of these two
            attributes matters, because moves are sorted as tuples.
        device: whose list changes.
        first: the first index of the list that changes.
        steps: the new entries of the list from `first` on.
        moved: the step that moves.
        cell: of the backward that is split or becomes whole; -1 if no backward does.
        more: by how many entries the list becomes longer: 1, 0 or -1.
    """

    path_s: float
    draw: float
    device: int
    first: int
    steps: list[int]
    moved: int
    cell: int = -1
    more: int = 0


def climbed(
    loads: Loads,
    order: Order,
    tries: int,
    seed: int = 0,
) -> Order:
    """Returns the best order that is found in a number of moves.

    Args:
        loads: the plan's stages.
        order: to begin with, which must fit the devices.
        tries: how many moves are made at most.
        seed: of the random numbers.
    """
    draw = Random(seed)
    course = Course(loads, order)
    bound_s = loads.bound_s() * (1 + ROUNDING)  # no order can be faster
    best, best_s = course.copy(), course.step_s
    gainless = 0  # moves since the last gain
    rest_until = dict[int, int]()  # the turn until which a step that has moved rests
    course.follow()
    for turn in range(tries):
        if best_s <= bound_s or gainless > ORDER.gainless:
            break
        short_s = best_s * (1 - ROUNDING)
        # A resting step may move if the move leads below the best known order (aspiration).
        free = (
            move
            for move in _Neighbours(course, draw).moves()
            if rest_until.get(move.moved, 0) <= turn or move.path_s < short_s
        )
        moves = _together(sorted(islice(free, ORDER.moves)), course.step_s)
        # If no move is possible, the next turn may draw another longest path, or find that steps
        # have rested for long enough.
        if not moves:
            gainless += ORDER.blocked
            continue
        gainless += 1
        # The best move is made even if it makes the order longer, so that a climb can leave a local
        # optimum.
        for move in moves:
            rest_until[move.moved] = turn + draw.randrange(ORDER.rest, 2 * ORDER.rest)
        _make(course, moves)
        if course.step_s < short_s:
            best = course.copy()
            best_s = course.step_s
            gainless = 0
    course.lists, course.half = best
    return course.order


def _together(moves: Sequence[Move], step_s: float) -> list[Move]:
    """Picks the best move of all, and each other device's best move that shortens its path."""
    by_device: dict[int, Move] = {}
    for move in moves:
        if not by_device or move.path_s < step_s * (1 - ROUNDING):
            by_device.setdefault(move.device, move)
    return list(by_device.values())


def _make(course: Course, moves: Sequence[Move]) -> None:
    """Makes all moves; if steps then wait for each other in a circle, the first alone, or none."""
    # Each move was judged by itself; two moves at once can make steps wait in a circle.
    before = [list(course.lists[move.device]) for move in moves]
    for move in moves:
        if move.more:
            course.cut(move.cell, half=move.more > 0)
        end = move.first + len(move.steps) - move.more
        course.lists[move.device][move.first : end] = move.steps
        course.placed(move.device)
    course.run()
    if course.step_s == float("inf"):
        for move, steps in zip(moves, before, strict=True):
            if move.more:
                course.cut(move.cell, half=move.more < 0)
            course.lists[move.device] = steps
            course.placed(move.device)
        if len(moves) > 1:
            _make(course, moves[:1])
            return
        course.run()
    course.follow()


@dataclass(frozen=True)
class _Neighbours:
    """The moves that lead from an order to its neighbours, drawn at random."""

    course: Course
    draw: Random

    def moves(self) -> Iterator[Move]:
        """Yields the moves that fit, from the blocks of a longest path in a random order."""
        course = self.course
        blocks = course.path(self.draw)
        self.draw.shuffle(blocks)
        for block in blocks:
            steps = course.lists[block.device]
            # A block that starts at time 0 gains nothing by another front, and a block that ends
            # the whole step gains nothing by another end.
            if course.starts[steps[block.first]] > 0.0:
                yield from self._ahead(block)
            if course.tails[steps[block.last]] > course.updates_s[block.device]:
                yield from self._behind(block)

    def _ahead(self, block: CourseBlock) -> Iterator[Move]:
        """Yields the moves of a task to the front of its block."""
        d, first, last = block
        steps = self.course.lists[d]
        for at in range(first + 1, min(last, first + ORDER.farthest) + 1):
            step = steps[at]
            passed = steps[first:at]
            if all(self._may_pass(step, other) for other in passed):
                yield from self._move(d, first, [step, *passed], step)

    def _behind(self, block: CourseBlock) -> Iterator[Move]:
        """Yields the moves of a task, or of a second half, to the end of its block."""
        d, first, last = block
        course = self.course
        steps = course.lists[d]
        cells = course.cells
        for at in range(last, max(first, last - ORDER.farthest) - 1, -1):
            step = steps[at]
            passed = steps[at + 1 : last + 1]
            if passed and all(self._may_pass(other, step) for other in passed):
                yield from self._move(d, at, [*passed, step], step)
            cell = step - cells
            is_backward = 0 <= cell < cells
            # A backward of the first stage has no halves, because no stage waits for its
            # cotangents.
            if not is_backward or cell < course.M or not course.loads.splits[cell // course.M]:
                continue
            if course.half[cell]:
                yield from self._whole(d, at, cell)
            else:
                yield from self._split(d, at, cell, passed)

    def _split(
        self,
        d: int,
        at: int,
        cell: int,
        passed: Sequence[int],
    ) -> Iterator[Move]:
        """Yields the move that splits a whole backward and puts its second half behind others.

        Args:
            d: the device.
            at: the index of the backward in the device's list.
            cell: of the backward.
            passed: the steps after the backward, which the second half passes.
        """
        course = self.course
        step = course.cells + cell
        weight = 2 * course.cells + cell
        if not any(self._bound(weight, other) for other in passed):
            # The course is cut while the move is judged, which needs the seconds and bytes of
            # halves, and made whole again afterwards.
            course.cut(cell, half=True)
            every = list(self._move(d, at, [step, *passed, weight], step, cell, 1))
            course.cut(cell, half=False)
            yield from every

    def _whole(self, d: int, at: int, cell: int) -> Iterator[Move]:
        """Yields the move that joins two halves to a whole backward, unless they are far apart.

        Args:
            d: the device.
            at: the index of the first half in the device's list.
            cell: of the backward.
        """
        course = self.course
        steps = course.lists[d]
        weight = 2 * course.cells + cell
        passed = steps[at + 1 : course.place[weight]]
        is_near = len(passed) <= ORDER.farthest
        if is_near and not any(self._bound(weight, other) for other in passed):
            course.cut(cell, half=False)
            every = list(self._move(d, at, [steps[at], *passed], weight, cell, -1))
            course.cut(cell, half=True)
            yield from every

    def _may_pass(self, step: int, other: int) -> bool:
        """Tells whether a step may run before `other`, and has its input before `other` ends."""
        there_s = self.course.there[step]
        end_s = self.course.ends[other]
        return there_s < end_s and not self._bound(step, other)

    def _bound(self, step: int, other: int) -> bool:
        """Tells whether two steps must stay in order.

        They must if they belong to one stage and are of one kind, are of one micro-batch, or add to
        the same gradients: floating-point sums depend on the order.
        """
        course = self.course
        kind, cell = divmod(step, course.cells)
        other_kind, other_cell = divmod(other, course.cells)
        if cell // course.M != other_cell // course.M:
            return False
        if kind == other_kind or cell == other_cell:
            return True
        # Kinds 1 and 2: a whole backward adds to the gradients, and so does a second half.
        return kind + other_kind == 3 and not course.half[cell if kind == 1 else other_cell]

    def _move(
        self,
        d: int,
        first: int,
        steps: list[int],
        moved: int,
        cell: int = -1,
        more: int = 0,
    ) -> Iterator[Move]:
        """Yields the move with the longest path through its steps, if its device has room.

        The path through a step is the step's end plus its tail. Ends are counted forwards from the
        step before the change, tails backwards from the step after the change. Steps on other
        devices count with their present ends and tails: `path_s` is exact if the move leaves these
        as they are, and an estimate if it changes them.

        Args:
            d: the device.
            first: the first index of the list that changes.
            steps: the new entries from `first` on.
            moved: the step that moves.
            cell: of the backward that is split or becomes whole; -1 if no backward does.
            more: by how many entries the list becomes longer.
        """
        course = self.course
        held_bytes = course.held[d][first - 1] if first else 0.0
        room = course.loads.room_bytes[d]
        # After the changed steps the device holds the same bytes as before the move, so that it is
        # enough to look at the changed steps.
        for step in steps:
            held_bytes += course.bytes[step]
            if held_bytes > room:
                return
        here = course.lists[d]
        end = first + len(steps) - more
        seconds = course.seconds
        source = course.source
        to = course.to
        answers = course.answers
        now = course.ends[here[first - 1]] if first else 0.0
        ends = dict[int, float]()
        for step in steps:
            # An input that one of these steps makes is there as soon as that step ends.
            begin = course.there[step]
            if source[step] in ends:
                begin = ends[source[step]] - course.early_s[step]
            now = max(now, begin) + seconds[step]
            ends[step] = now
        path_s = 0.0
        tails = dict[int, float]()
        later_s = course.updates_s[d]
        if end < len(here):
            later_s = seconds[here[end]] + course.tails[here[end]]
        for step in reversed(steps):
            target = to[step]
            answer = answers[step]
            if target in tails:
                answer = seconds[target] - course.early_s[target] + tails[target]
            tails[step] = max(later_s, answer)
            path_s = max(path_s, ends[step] + tails[step])
            later_s = tails[step] + seconds[step]
        yield Move(path_s, self.draw.random(), d, first, steps, moved, cell, more)
