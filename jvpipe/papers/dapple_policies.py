"""DAPPLE's three policies of device placement: which devices a new stage gets.

Paper: Fan et al., PPoPP 2021, figure 5. A machine is used if at least one of its devices is not
free. Example: a stage needs 4 devices. There are three machines with 4 devices each, and the first
has only 2 free devices left:

    free             2 4 4
    fresh first      0 4 0    unused machines first, so that the stage fits into one machine
    append first     2 2 0    used machines first, so that few devices are left over
    scatter first    2 1 1    used machines first, then unused ones; equally many devices of each
"""

from functools import partial

Free = tuple[int, ...]
"""A number of devices for each machine, such as the number of its free devices."""


def in_turn(used: bool, free: Free, whole: Free, m: int) -> Free:
    """Takes devices machine by machine, from used machines first or from unused machines first.

    A machine is used if at least one of its devices is not free.

    Args:
        used: whether used machines come first; if not, unused machines come first.
        free: the number of free devices of each machine.
        whole: the number of all devices of each machine.
        m: how many devices are taken.

    Returns:
        The number of devices that are taken from each machine.

    >>> in_turn(True, (2, 4, 4), (4, 4, 4), 6), in_turn(False, (2, 4, 4), (4, 4, 4), 6)
    ((2, 4, 0), (0, 4, 2))
    """

    def is_later(k: int) -> bool:
        is_used = free[k] < whole[k]
        return is_used != used

    taken = [0] * len(free)
    for k in sorted(range(len(free)), key=is_later):
        taken[k] = min(free[k], m - sum(taken))
    return tuple(taken)


fresh_first = partial(in_turn, False)
append_first = partial(in_turn, True)


def scatter_first(free: Free, whole: Free, m: int) -> Free:
    """Takes equally many devices from each used machine, then from each unused machine.

    Args:
        free: the number of free devices of each machine.
        whole: the number of all devices of each machine.
        m: how many devices are taken.

    Returns:
        The number of devices that are taken from each machine.

    >>> scatter_first((2, 3, 4), (4, 4, 4), 4), scatter_first((4, 4, 4), (4, 4, 4), 4)
    ((2, 2, 0), (2, 1, 1))
    """
    every = range(len(free))
    used = [k for k in every if free[k] < whole[k]]
    fresh = [k for k in every if k not in used]
    taken = [0] * len(free)
    for machines in (used, fresh):
        for _ in range(max(whole)):
            for k in machines:
                if sum(taken) < m and taken[k] < free[k]:
                    taken[k] += 1
    return tuple(taken)
