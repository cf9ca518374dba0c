"""Steps of pipelines that compute again while they wait: by recursion, for papers' own settings.

    GPipe   F0 F1 F2 | R2 B2 R1 B1 R0 B0        1F1B   F0 F1 | R0 B0 F2 | R1 B1 | R2 B2

A stage computes in this order, each task as soon as what it reads is there. R reads nothing of
other stages, so it runs while the cotangent that its B reads is on the way.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Order = Literal["gpipe", "1f1b"]


@dataclass(frozen=True)
class Stage:
    """The seconds of a stage per micro-batch; `send_s` takes what it makes to the next stage, or
    its cotangent back.
    """

    forward_s: float
    again_s: float
    backward_s: float
    send_s: float = 0.0


def tasks(order: Order, stage: int, stages: int, microbatches: int) -> Iterator[tuple[str, int]]:
    """Yields the forwards and backwards of a stage.

    >>> [kind + str(m) for kind, m in tasks("1f1b", 0, 2, 3)]
    ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    """
    warm = microbatches if order == "gpipe" else min(stages - stage, microbatches)
    yield from (("F", m) for m in range(warm))
    for m in range(microbatches):
        yield "B", microbatches - 1 - m if order == "gpipe" else m
        if warm + m < microbatches:
            yield "F", warm + m


def step_s(
    order: Order, stages: Sequence[Stage], microbatches: int, *, all_again: bool = True
) -> float:
    """Simulates the seconds of a step.

    Args:
        order: of the tasks.
        stages: one for each device.
        microbatches: of the step.
        all_again: the last micro-batch is computed again as the others are.

    >>> equal = [Stage(1.0, 1.0, 2.0)] * 8
    >>> step_s("gpipe", equal, 4), step_s("gpipe", equal, 32)
    (37.0, 149.0)
    """
    count = len(stages)
    lists = [list(tasks(order, s, count, microbatches)) for s in range(count)]
    free_s, next_of, ends = [0.0] * count, [0] * count, dict[tuple[int, str, int], float]()
    todo = True
    while todo:
        todo = False
        for s, stage in enumerate(stages):
            while next_of[s] < len(lists[s]):
                kind, m = lists[s][next_of[s]]
                source = s - 1 if kind == "F" else s + 1
                if 0 <= source < count and (source, kind, m) not in ends:
                    break
                sent_s = stages[min(s, source)].send_s
                ready_s = ends[source, kind, m] + sent_s if 0 <= source < count else 0.0
                again = kind == "B" and (all_again or m < microbatches - 1)
                start_s = max(ready_s, free_s[s] + (stage.again_s if again else 0.0))
                free_s[s] = start_s + (stage.forward_s if kind == "F" else stage.backward_s)
                ends[s, kind, m] = free_s[s]
                next_of[s] += 1
                todo = True
    return max(free_s)
