"""Joins siblings, which a GPU runs as one kernel: steps over one shape that read the same array.

Each step joins the first group of siblings that it may join. It may not join a group if either one
waits for the other, because the joined step would wait for itself. In this example, c waits for a
by way of b, so a and c may not be joined although both read x:

    a: reads x, writes y        b: reads y, writes z        c: reads x and z
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from jvpipe import _jax
from jvpipe._jax import Var
from jvpipe.cost.kernel_steps import KernelStep, Shape


def with_siblings(steps: Sequence[KernelStep]) -> list[KernelStep]:
    """Joins each group of siblings into one step, at the place of the last sibling if possible.

    For n steps, this takes at most n^2 comparisons and unions of sets.
    """
    # `behind` stays transitive, and no step ever waits for itself, so groups form no cycles.
    behind = _waits(steps)
    groups_over: dict[Shape | None, list[list[int]]] = {}
    for i, step in enumerate(steps):
        groups = groups_over.setdefault(step.loop, [])
        siblings = (group for group in groups if _may_join(steps, behind, i, group))
        group = next(siblings, None)
        if group:
            group.append(i)
            _join(behind, group)
        else:
            groups.append([i])
    every = chain.from_iterable(groups_over.values())
    return [_joined([steps[i] for i in group]) for group in _in_order(every, behind)]


def _waits(steps: Sequence[KernelStep]) -> list[int]:
    """Returns, for each step, the set of all steps that it waits for; binary digit j is step j."""
    maker = {v: i for i, step in enumerate(steps) for v in step.writes}
    behind = [0] * len(steps)
    for i, step in enumerate(steps):
        for j in {maker[v] for v in step.reads if v in maker}:
            behind[i] |= behind[j] | 1 << j
    return behind


def _may_join(
    steps: Sequence[KernelStep],
    behind: Sequence[int],
    i: int,
    group: Sequence[int],
) -> bool:
    """Tells whether step i may join a group of steps that loop over the same shape.

    Args:
        steps: all steps.
        behind: for each step the steps that it waits for, as binary digits.
        i: the number of the step.
        group: the numbers of the steps in the group, which all wait for the same steps.
    """
    step = steps[i]
    if step.loop is None or behind[i] & _digits(group) or behind[group[0]] >> i & 1:
        return False
    # Siblings share a large array: one with at least as many elements as the loop has rounds.
    shared = (v for j in group for v in step.reads & steps[j].reads)
    return any(_jax.aval(v).size >= math.prod(step.loop) for v in shared)


def _digits(steps: Sequence[int]) -> int:
    """Returns a set of steps as binary digits."""
    return sum(1 << j for j in steps)


def _join(behind: list[int], group: Sequence[int]) -> None:
    """Joins steps into one step, which waits for every step that a member waits for.

    From now on, a step that waits for one member waits for all members.

    Args:
        behind: for each step the steps that it waits for, as binary digits; changed in place.
        group: the steps that become one.
    """
    members = _digits(group)
    # All steps but the last were joined before, so they wait for the same steps.
    needs = behind[group[0]] | behind[group[-1]]
    # No member waits for a member, so this changes only steps outside of the group.
    for k, waits in enumerate(behind):
        if waits & members:
            behind[k] |= needs | members
    for j in group:
        behind[j] = needs


def _in_order(groups: Iterable[list[int]], behind: Sequence[int]) -> Iterator[list[int]]:
    """Yields groups of steps in the order of their last members, but after groups they wait for."""
    todo = sorted(groups, key=max)
    done = 0
    while todo:
        # A group is always ready, because groups form no cycles.
        ready = next(group for group in todo if not behind[group[0]] & ~done)
        todo.remove(ready)
        done |= _digits(ready)
        yield ready


def _joined(several: Sequence[KernelStep]) -> KernelStep:
    """Makes one step of several."""
    reads = frozenset[Var]().union(*(step.reads for step in several))
    writes = frozenset[Var]().union(*(step.writes for step in several))
    return KernelStep(reads, writes, several[0].loop, sum(step.own_bytes for step in several))
