"""Improves an order by tabu search on its longest path, as job shops are solved.

The method is that of Nowicki and Smutnicki.

A step becomes shorter only by a change of what its longest path goes through. That path consists of
blocks of tasks that a device runs without a pause, and only a task at either end of a block is
worth another place:

    block          a b c d e      a waits for another device, and another one waits for e
    ahead          c a b d e      c no longer waits for a and b
    behind         a b d e c      d and e no longer wait for c
    split, behind  a b I d e W    c is a backward: its second half moves behind the block

Two halves beside each other may become one again. A task never passes one of its own stage and
kind, so that values stay the same, and what its device holds must fit. Among the moves that are
drawn, the one with the shortest longest path through what moved is made, be it longer than before;
what has moved rests for some moves, so that the search does not go back to where it came from. It
ends after so many moves, or so many without a gain.
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
    """A change of a device's list from one place to another, and the longest path through it.

    Attributes:
        path_s: seconds of that path.
        draw: what decides between equal ones.
        device: whose list.
        first: the first place that changes.
        steps: what stands there from then on.
        moved: the step that moves.
        cell: of the backward that is split or becomes whole; -1 where none does.
        more: steps by which the list becomes longer.
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
    """Finds the best order that so many moves lead to.

    Args:
        loads: the plan's stages.
        order: to begin with; it fits.
        tries: moves that are made at most.
        seed: of what is drawn.
    """
    draw = Random(seed)
    course = Course(loads, order)
    bound_s = loads.bound_s() * (1 + ROUNDING)  # an order that meets it is the best there is
    best, best_s = course.copy(), course.step_s
    gainless = 0  # moves since the last gain
    rest_until = dict[int, int]()  # the turn up to which a step that has moved rests
    course.follow()
    for turn in range(tries):
        if best_s <= bound_s or gainless > ORDER.gainless:
            break
        short_s = best_s * (1 - ROUNDING)
        # A step that rests may move all the same if that leads below the best known (aspiration).
        free = (
            move
            for move in _Neighbours(course, draw).moves()
            if rest_until.get(move.moved, 0) <= turn or move.path_s < short_s
        )
        moves = _together(sorted(islice(free, ORDER.moves)), course.step_s)
        # Without a move the next turn draws another longest path, or steps have rested for long
        # enough.
        if not moves:
            gainless += ORDER.blocked
            continue
        gainless += 1
        # The best move is made though it makes the order longer: so a climb leaves a valley.
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
    """Picks the best move, and on other devices the best one each that shortens its path."""
    by_device: dict[int, Move] = {}
    for move in moves:
        if not by_device or move.path_s < step_s * (1 - ROUNDING):
            by_device.setdefault(move.device, move)
    return list(by_device.values())


def _make(course: Course, moves: Sequence[Move]) -> None:
    """Makes moves; if steps would then wait for each other, the first alone, or none."""
    # Each move fits and makes sense by itself. Two at once can make steps wait in a circle.
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
    """The moves that lead from an order to its neighbours; `draw` orders them, and chooses."""

    course: Course
    draw: Random

    def moves(self) -> Iterator[Move]:
        """Yields the moves of a longest path's blocks that have room, in a random order."""
        course = self.course
        blocks = course.path(self.draw)
        self.draw.shuffle(blocks)
        for block in blocks:
            steps = course.lists[block.device]
            # A block that starts at once has nothing to win at its front, one that ends the order
            # nothing at its end.
            if course.starts[steps[block.first]] > 0.0:
                yield from self._ahead(block)
            if course.tails[steps[block.last]] > course.updates_s[block.device]:
                yield from self._behind(block)

    def _ahead(self, block: CourseBlock) -> Iterator[Move]:
        """Yields moves of tasks before the first one of a block."""
        d, first, last = block
        steps = self.course.lists[d]
        for at in range(first + 1, min(last, first + ORDER.farthest) + 1):
            step = steps[at]
            passed = steps[first:at]
            if all(self._may_pass(step, other) for other in passed):
                yield from self._move(d, first, [step, *passed], step)

    def _behind(self, block: CourseBlock) -> Iterator[Move]:
        """Yields moves of tasks, or of second halves, behind the last one of a block."""
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
            # Nobody waits for what a backward of the first stage gives back: it has no halves.
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
            at: the place of the backward.
            cell: of the backward.
            passed: the steps behind it that its second half passes.
        """
        course = self.course
        step = course.cells + cell
        weight = 2 * course.cells + cell
        if not any(self._bound(weight, other) for other in passed):
            # The move is judged with the seconds and bytes of halves, then the course is as it was.
            course.cut(cell, half=True)
            every = list(self._move(d, at, [step, *passed, weight], step, cell, 1))
            course.cut(cell, half=False)
            yield from every

    def _whole(self, d: int, at: int, cell: int) -> Iterator[Move]:
        """Yields the move that makes two halves one, unless they are far apart.

        Args:
            d: the device.
            at: the place of the first half.
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
        """Returns whether a step may run before another one, and has its input before that ends."""
        there_s = self.course.there[step]
        end_s = self.course.ends[other]
        return there_s < end_s and not self._bound(step, other)

    def _bound(self, step: int, other: int) -> bool:
        """Tells whether two steps must stay in order: of one stage and kind, or of one sum."""
        course = self.course
        kind, cell = divmod(step, course.cells)
        other_kind, other_cell = divmod(other, course.cells)
        if cell // course.M != other_cell // course.M:
            return False
        if kind == other_kind or cell == other_cell:
            return True
        # A whole backward adds to the gradients, and so does a second half.
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

        Heads are counted on from what starts before the steps, tails back from what follows them;
        of steps on other devices both are those of the order as it is. So the path is a bound where
        the move changes these too, and exact where it does not.

        Args:
            d: the device.
            first: the first place that changes.
            steps: what is to stand there.
            moved: the step that moves.
            cell: of the backward that is split or becomes whole.
            more: steps by which the list becomes longer.
        """
        course = self.course
        held_bytes = course.held[d][first - 1] if first else 0.0
        room = course.loads.room_bytes[d]
        # Behind the steps that move the device holds what it held before, so only these are looked
        # at.
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
            # What comes from a step that moves too is there as soon as that ends.
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
