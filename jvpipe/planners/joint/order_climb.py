"""From an order to better ones by tabu search on the longest path, as job shops are solved (Nowicki and Smutnicki).

Only a change of what the longest path goes through makes a step shorter: a task of a block moves before its first one,
or behind its last one; or a backward of the block is split, and its second half moves behind, or its halves become one
again. A task never passes its own stage and kind, so that values stay the same, and its device has room. Among the
moves that are drawn, the one with the shortest longest path through what moved is made, be it longer than before; what
has moved rests then.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from random import Random
from typing import NamedTuple

from jvpipe.planners.joint.effort import ORDER
from jvpipe.planners.joint.order_course import SAME, Block, Course
from jvpipe.planners.joint.order_loads import Loads, Order


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


def climbed(loads: Loads, order: Order, tries: int, seed: int = 0, patience: int = 100) -> Order:
    """The best order that so many moves lead to.

    Args:
        loads: the plan's stages.
        order: to begin with; it fits.
        tries: moves that are made at most.
        seed: of what is drawn.
        patience: moves that are made without a gain at most.
    """
    draw, course, bound_s = Random(seed), Course(loads, order), loads.bound_s() * (1 + SAME)
    best, best_s, stale = course.copy(), course.step_s, 0
    rest = dict[int, int]()
    course.follow()
    for turn in range(tries):
        if best_s <= bound_s or stale > patience:
            break
        short_s = best_s * (1 - SAME)
        every = (one for one in _moves(course, draw) if one)
        free = (one for one in every if rest.get(one.moved, 0) <= turn or one.path_s < short_s)
        moves = _together(sorted(islice(free, ORDER.moves)), course.step_s)
        if not moves:
            stale += ORDER.blocked
            continue
        stale += 1
        for move in moves:
            rest[move.moved] = turn + draw.randrange(ORDER.rest, 2 * ORDER.rest)
        _make(course, moves)
        if course.step_s < short_s:
            best, best_s, stale = course.copy(), course.step_s, 0
    course.lists, course.half = best
    return course.order


def _together(moves: Sequence[Move], step_s: float) -> list[Move]:
    """The best move, and on other devices the best one each, if the path through it is shorter than the step."""
    each: dict[int, Move] = {}
    for move in moves:
        if not each or move.path_s < step_s * (1 - SAME):
            each.setdefault(move.device, move)
    return list(each.values())


def _make(course: Course, moves: Sequence[Move]) -> None:
    """Makes moves, unless steps would wait for each other then: in that case the first alone, or none."""
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


def _moves(course: Course, draw: Random) -> Iterator[Move | None]:
    """Yields the moves of the blocks of a longest path, in an order that is drawn."""
    blocks = course.path(draw)
    draw.shuffle(blocks)
    for block in blocks:
        if course.starts[course.lists[block.device][block.first]] > 0.0:
            yield from _ahead(course, block, draw)
        if course.tails[course.lists[block.device][block.last]] > course.updates_s[block.device]:
            yield from _behind(course, block, draw)


def _ahead(course: Course, block: Block, draw: Random) -> Iterator[Move | None]:
    """Yields moves of tasks before the first one of a block."""
    d, first, last = block
    steps = course.lists[d]
    for at in range(first + 1, min(last, first + ORDER.farthest) + 1):
        step, passed = steps[at], steps[first:at]
        if all(
            course.there[step] < course.ends[one] and not _bound(course, step, one)
            for one in passed
        ):
            yield _move(course, draw, d, first, [step, *passed], step)


def _behind(course: Course, block: Block, draw: Random) -> Iterator[Move | None]:
    """Yields moves of tasks, or of second halves that are still part of the whole, behind the last one of a block."""
    d, first, last = block
    steps, cells, splits = course.lists[d], course.cells, course.loads.splits
    for at in range(last, max(first, last - ORDER.farthest) - 1, -1):
        step, passed = steps[at], steps[at + 1 : last + 1]
        if passed and all(
            course.there[one] < course.ends[step] and not _bound(course, step, one)
            for one in passed
        ):
            yield _move(course, draw, d, at, [*passed, step], step)
        cell = step - cells
        if not course.M <= cell < cells or not splits[cell // course.M]:
            continue
        weight = step + cells
        if course.half[cell]:
            yield from _whole(course, draw, d, at, cell)
        elif not any(_bound(course, weight, one) for one in passed):
            course.cut(cell, half=True)
            move = _move(course, draw, d, at, [step, *passed, weight], step, cell, 1)
            course.cut(cell, half=False)
            yield move


def _whole(course: Course, draw: Random, d: int, at: int, cell: int) -> Iterator[Move | None]:
    """Yields the move that makes two halves one, unless they are far apart.

    Args:
        course: the order.
        draw: what decides between equal moves.
        d: the device.
        at: the place of the first half.
        cell: of the backward.
    """
    steps, weight = course.lists[d], 2 * course.cells + cell
    passed = steps[at + 1 : course.place[weight]]
    if len(passed) <= ORDER.farthest and not any(_bound(course, weight, one) for one in passed):
        course.cut(cell, half=False)
        move = _move(course, draw, d, at, [steps[at], *passed], weight, cell, -1)
        course.cut(cell, half=True)
        yield move


def _bound(course: Course, step: int, other: int) -> bool:
    """Whether two steps must stay in their order: of one stage and kind, or adding to the same sums."""
    (kind, cell), (other_kind, other_cell) = divmod(step, course.cells), divmod(other, course.cells)
    if cell // course.M != other_cell // course.M:
        return False
    if kind == other_kind or cell == other_cell:
        return True
    return kind + other_kind == 3 and not course.half[cell if kind == 1 else other_cell]


def _move(
    course: Course,
    draw: Random,
    d: int,
    first: int,
    steps: list[int],
    moved: int,
    cell: int = -1,
    more: int = 0,
) -> Move | None:
    """Makes the move, if its device has room, with the longest path through these steps in their new order.

    Args:
        course: the order.
        draw: what decides between equal moves.
        d: the device.
        first: the first place that changes.
        steps: what is to stand there.
        moved: the step that moves.
        cell: of the backward that is split or becomes whole.
        more: steps by which the list becomes longer.
    """
    held, room = course.held[d][first - 1] if first else 0.0, course.loads.room_bytes[d]
    for step in steps:
        held += course.bytes[step]
        if held > room:
            return None
    mine, end = course.lists[d], first + len(steps) - more
    seconds, source, to, answers = course.seconds, course.source, course.to, course.answers
    now, ends = course.ends[mine[first - 1]] if first else 0.0, dict[int, float]()
    for step in steps:
        there = ends.get(source[step])
        begins = course.there[step] if there is None else there - course.early_s[step]
        now = max(now, begins) + seconds[step]
        ends[step] = now
    path_s, tails = 0.0, dict[int, float]()
    behind = end < len(mine)
    later = seconds[mine[end]] + course.tails[mine[end]] if behind else course.updates_s[d]
    for step in reversed(steps):
        target = to[step]
        answer = answers[step]
        if target in tails:
            answer = seconds[target] - course.early_s[target] + tails[target]
        tails[step] = max(later, answer)
        path_s = max(path_s, ends[step] + tails[step])
        later = tails[step] + seconds[step]
    return Move(path_s, draw.random(), d, first, steps, moved, cell, more)
