"""Improves an order of tasks by tabu search, as for job shops (Nowicki and Smutnicki).

An order is a list of tasks for each device. Its longest path is a chain of tasks and transfers that
takes as long as the whole training step. The training step becomes shorter only if its longest path
changes. The path consists of blocks: tasks that a device runs one after the other without a pause.
Reordering the inside of a block does not help: a task must move to the front or to the end of its
block. Letters are tasks in the list of a device:

    block          a b c d e      a waits for another device, and another device waits for e
    ahead          c a b d e      c moves to the front, and no longer waits for a and b
    behind         a b d e c      c moves to the end; d and e no longer wait for c
    split, behind  a b I d e W    c is a backward: its second half W moves to the end

Two halves that are near each other may also be joined into a whole backward. No task passes
another task of its own stage and kind, so that the results stay bitwise identical. What the device
holds must fit after each of its tasks.

In each turn some moves are drawn. Each is judged by the longest path through the tasks that it
moves. The best move is made, even if the order becomes longer. A task that has moved then rests for
some turns, so that the search does not undo the move at once. The search ends after a number of
turns, after a number of turns without a gain, or when no order can be faster (`Loads.bound_s`).

The limits in `ORDER` (`effort.py`) may be changed: they trade time for faster orders. In this file,
a step is a task encoded as a number (`order_course.py`), not a training step.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from random import Random
from typing import NamedTuple

from jvpipe.ir.task import TaskLists
from jvpipe.planners.joint.effort import ORDER
from jvpipe.planners.joint.order_course import Course, CourseBlock
from jvpipe.planners.joint.order_loads import Loads
from jvpipe.util.sizes import ROUNDING


class Move(NamedTuple):
    """A change of consecutive entries in a device's list, and how good it is.

    Moves are sorted as tuples, so the first two attributes must stay in this order.

    Attributes:
        path_s: seconds of the longest path through the steps that change; less is better.
        draw: a random number that decides between moves with equal `path_s`; 0 until it is drawn.
        device: the device whose list changes.
        first: the first index of the list that changes.
        end: the index after the last one that changes.
        steps: what replaces the entries from `first` up to, but not including, `end`.
        moved: the step that moves.
        flips: the cell (see `order_course.py`) of the backward that is split or joined; -1 if none.
    """

    path_s: float
    draw: float
    device: int
    first: int
    end: int
    steps: list[int]
    moved: int
    flips: int


def climbed(
    loads: Loads,
    order: TaskLists,
    tries: int,
) -> TaskLists:
    """Returns the best order that the search finds, which may be the given one.

    The random numbers have a fixed seed, so that equal arguments give equal orders.

    Args:
        loads: the seconds and bytes of the plan's stages.
        order: where the search begins; it must fit the devices.
        tries: the most turns.
    """
    draw = Random(0)
    course = Course(loads, order)
    bound_s = loads.bound_s() * (1 + ROUNDING)  # no order can be faster
    best = order
    best_s = course.step_s
    gainless = 0  # turns since the last gain; turns without a move count several times
    rest_until = dict[int, int]()  # by step: the turn from which it may move again
    course.follow()
    for turn in range(tries):
        if best_s <= bound_s or gainless > ORDER.gainless:
            break
        short_s = best_s * (1 - ROUNDING)
        drawn = (move._replace(draw=draw.random()) for move in _neighbors(course, draw))
        # Even a resting step may move if that promises an order faster than the best (aspiration).
        free = (
            move for move in drawn if rest_until.get(move.moved, 0) <= turn or move.path_s < short_s
        )
        judged = sorted(islice(free, ORDER.moves))
        moves = _together(judged, course.step_s)
        # If no move is possible, the next turn may draw another longest path, or find that steps
        # have rested for long enough.
        if not moves:
            gainless += ORDER.blocked
            continue
        gainless += 1
        # The best move is made even if the order becomes slower, to leave a local optimum.
        for move in moves:
            rest_until[move.moved] = turn + draw.randrange(ORDER.rest, 2 * ORDER.rest)
        _make(course, moves)
        if course.step_s < short_s:
            best = course.order
            best_s = course.step_s
            gainless = 0
    return best


def _together(moves: Sequence[Move], step_s: float) -> list[Move]:
    """Picks the best of the sorted moves, and for each other device its best move that gains.

    A move gains if the path through its steps is shorter than the whole order (`step_s`).
    """
    by_device: dict[int, Move] = {}
    for move in moves:
        if not by_device or move.path_s < step_s * (1 - ROUNDING):
            by_device.setdefault(move.device, move)
    return list(by_device.values())


def _make(course: Course, moves: Sequence[Move]) -> None:
    """Makes all moves; if that is impossible, only the first; if even that is impossible, none.

    Moves are impossible if steps then wait for each other in a circle.
    """
    # Each move was judged by itself. Two moves that are possible alone may be impossible together.
    back = [make(course, move) for move in moves]
    course.run()
    if course.step_s == float("inf"):
        for move in back:
            make(course, move)
        if len(moves) > 1:
            _make(course, moves[:1])
            return
        course.run()
    course.follow()


def make(course: Course, move: Move) -> Move:
    """Makes a move, but leaves the times as they are; returns the move that takes it back."""
    steps = course.lists[move.device]
    if move.flips >= 0:  # flipping twice undoes the flip
        course.flip(move.flips)
    course.put(move.device, [*steps[: move.first], *move.steps, *steps[move.end :]])
    end = move.first + len(move.steps)
    return move._replace(end=end, steps=steps[move.first : move.end])


def all_moves(course: Course) -> Iterator[Move]:
    """Yields all moves that fit, of all steps, even of steps that are on no longest path.

    Args:
        course: the order, with times and tails.
    """
    for d, steps in enumerate(course.lists):
        end = len(steps) - 1
        for at in range(len(steps)):
            yield from _ahead(course, CourseBlock(d, at, end))
            yield from _behind(course, CourseBlock(d, 0, at))


def _neighbors(course: Course, draw: Random) -> Iterator[Move]:
    """Yields the moves that fit and that lead to the order's neighbors.

    One of the longest paths is drawn at random. Its blocks yield their moves in random order.
    """
    blocks = course.path(draw)
    draw.shuffle(blocks)
    for block in blocks:
        steps = course.lists[block.device]
        # The first block of the path starts at time 0: it waits for no other device, so another
        # front gains nothing. No other device waits for the last block, so another end gains
        # nothing.
        if course.starts[steps[block.first]] > 0.0:
            yield from _ahead(course, block)
        if course.tails[steps[block.last]] > course.updates_s[block.device]:
            yield from _behind(course, block)


def _ahead(course: Course, block: CourseBlock) -> Iterator[Move]:
    """Yields the moves of a step to the front of its block."""
    d, first, last = block
    steps = course.lists[d]
    for at in range(first + 1, min(last, first + ORDER.farthest) + 1):
        step = steps[at]
        passed = steps[first:at]
        if all(_may_pass(course, step, other) for other in passed):
            yield from _move(course, d, first, at + 1, [step, *passed], step)


def _behind(course: Course, block: CourseBlock) -> Iterator[Move]:
    """Yields the moves of a step to the end of its block, and moves that split or join."""
    d, first, last = block
    steps = course.lists[d]
    cells = course.cells
    for at in range(last, max(first, last - ORDER.farthest) - 1, -1):
        step = steps[at]
        passed = steps[at + 1 : last + 1]
        if passed and all(_may_pass(course, other, step) for other in passed):
            yield from _move(course, d, at, last + 1, [*passed, step], step)
        cell = step - cells
        is_backward = 0 <= cell < cells
        # Only backwards are split or joined. The first stage's (`cell < M`) stay whole, because
        # no stage waits for their cotangents.
        if is_backward and cell >= course.M and course.loads.splits[cell // course.M]:
            yield from _flip(course, d, at, last, cell)


def _flip(
    course: Course,
    d: int,
    at: int,
    last: int,
    cell: int,
) -> Iterator[Move]:
    """Yields the move that splits a whole backward, or that joins the halves of a split one.

    A split puts the second half at the end of the block. Halves are joined where the first one is,
    unless they are far apart.

    Args:
        course: the order, which stays as it is.
        d: the device.
        at: the index of the backward, or of its first half, in the device's list.
        last: the index of the block's last step.
        cell: the backward's cell.
    """
    steps = course.lists[d]
    step = steps[at]
    weight = step + course.cells
    joins = course.half[cell]
    end = course.place[weight] if joins else last + 1
    passed = steps[at + 1 : end]
    is_far = joins and len(passed) > ORDER.farthest
    if is_far or any(_bound(course, weight, other) for other in passed):
        return
    # Judging the move needs the seconds and bytes after it. So the backward is split or joined
    # for a moment.
    course.flip(cell)
    changed = [step, *passed] if joins else [step, *passed, weight]
    moved = weight if joins else step
    every = list(_move(course, d, at, end + joins, changed, moved, cell))
    course.flip(cell)
    yield from every


def _may_pass(course: Course, step: int, other: int) -> bool:
    """Tells whether a step may run before `other`, and may gain something by that.

    It gains nothing if its input arrives only after `other` ends: it would just wait.
    """
    there_s = course.there[step]
    end_s = course.ends[other]
    return there_s < end_s and not _bound(course, step, other)


def _bound(
    course: Course,
    step: int,
    other: int,
) -> bool:
    """Tells whether two steps of a device must stay in order.

    Steps of different stages may change places. Two steps of one stage must stay in order if they
    have the same kind or the same micro-batch, or if both add to the gradients: floating-point
    sums depend on their order.
    """
    kind, cell = divmod(step, course.cells)
    other_kind, other_cell = divmod(other, course.cells)
    if cell // course.M != other_cell // course.M:
        return False
    if kind == other_kind or cell == other_cell:
        return True
    # A second half (kind 2) adds to the gradients. So does a step of kind 1 if it is a whole
    # backward, but not if it is a first half.
    backward = cell if kind == 1 else other_cell
    return kind + other_kind == 3 and not course.half[backward]


def _move(
    course: Course,
    d: int,
    first: int,
    end: int,
    steps: list[int],
    moved: int,
    flips: int = -1,
) -> Iterator[Move]:
    """Yields a move, judged by the longest path through its steps, if the device has room.

    The longest path through a step takes the step's end plus its tail (the seconds of all that
    must follow). New ends are counted from the step before the change onwards, new tails from
    the step after the change backwards. Steps on other devices count with their present ends
    and tails. If the move changes these, `path_s` is only an estimate.

    The arguments are the attributes of the `Move`.
    """
    held_bytes = course.held[d][first - 1] if first else 0.0
    room = course.loads.room_bytes[d]
    # After the changed steps the device holds as many bytes as without the move, so only the
    # changed steps can exceed the room.
    for step in steps:
        held_bytes += course.bytes[step]
        if held_bytes > room:
            return
    here = course.lists[d]
    seconds = course.seconds
    source = course.source
    to = course.to
    answers = course.answers
    now = course.ends[here[first - 1]] if first else 0.0
    ends = dict[int, float]()
    for step in steps:
        # If one of the changed steps makes the input, the input arrives when that step ends.
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
    yield Move(path_s, 0.0, d, first, end, steps, moved, flips)
