"""Task lists at the level of stages as work for the simulator: what planners count with.

    F, B            forward and backward of a stage; R, recomputing, straight before B
    SEND, RETURN    of activations to the next stage, of cotangents to the previous one
    OUT, IN         of what a stage swaps: it leaves after F, and is back before B

Two micro-batches' swapped bytes at most are on the device: an F waits for the OUT of the F before the last one, an IN
until the B before its own begins and the F before that B is out. What a B needs that follows its own F stays.

A stage's link to its host carries OUT and IN, and, where the host is between the devices, the stage's sends too, all
one at a time; else neighbours have a link for each direction. R waits for the cotangents, as B does.

Against `jvpipe.simulate.rows`, which has the rows that a controller dispatches (tests/simulate/test_two_levels.py holds
the two together): bytes are the same, and seconds too, but that
    with swaps, the rows' F before a first B waits for all that is on its way out, here for all but the last (GPipe),
    and the rows' IN for the task before it in the dispatch to end, here for the B before its own to begin (1F1B);
    with R, the rows recompute while the cotangents are on their way.
Over random loads the rows took up to 1.25 times as long with swaps, and no less than 0.8 times; both lie between a step
whose copies take no time and that plus all its copies.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from jvpipe.ir.kinds import Kind
from jvpipe.ir.task import Task, TaskLists, cannot_progress
from jvpipe.simulate.engine import Work

PARTS = (Kind.F, Kind.R, Kind.B, Kind.OUT, Kind.IN, Kind.SEND, Kind.RETURN)


@dataclass(frozen=True, slots=True)
class StageLoad:
    """The seconds and bytes of one stage per micro-batch; `static_bytes` are there all the time."""

    forward_s: float
    backward_s: float
    recompute_s: float = 0.0
    out_s: float = 0.0
    in_s: float = 0.0
    send_s: float = 0.0
    return_s: float = 0.0
    static_bytes: int = 0
    kept_bytes: int = 0
    swapped_bytes: int = 0

    @property
    def parts_s(self) -> tuple[float, ...]:
        """Seconds in the order of `PARTS`."""
        return (
            self.forward_s,
            self.recompute_s,
            self.backward_s,
            self.out_s,
            self.in_s,
            self.send_s,
            self.return_s,
        )


@dataclass(frozen=True)
class Features:
    """The parts that are simulated beside F and B; whatever takes no seconds can be left out."""

    recompute: bool = True
    swaps: bool = True
    sends: bool = True
    shared: bool = False

    @staticmethod
    def of(parts_s: Sequence[Sequence[float]], *, shared: bool, swaps: bool = False) -> "Features":
        """Finds the parts that stages need.

        Args:
            parts_s: per stage, seconds in the order of `PARTS`.
            shared: whether sends take the links to the host.
            swaps: whether something is swapped even if that takes no time.
        """
        _, recomputes, _, out, back, sent, returned = (any(column) for column in zip(*parts_s, strict=True))
        sends = sent or returned
        return Features(recomputes, swaps or out or back, sends, shared and sends)


@dataclass(frozen=True)
class StageWork:
    """Task lists as `Work`.

    Task i of the work is named by `codes[i]` = (7 stage + part) M + micro-batch; M is `microbatches`. Seconds stand in
    one list, stage after stage, `PARTS` of each: those of task i are at `slots[i]`.
    """

    work: Work
    codes: tuple[int, ...]
    stages: int
    microbatches: int

    @cached_property
    def slots(self) -> list[int]:
        """The positions of each task's seconds."""
        return [code // self.microbatches for code in self.codes]

    @cached_property
    def tasks(self) -> list[Task]:
        """The tasks; their kinds are `PARTS`."""
        parts = [(s, part) for s in range(self.stages) for part in PARTS]
        return [Task(*parts[slot], code % self.microbatches) for slot, code in zip(self.slots, self.codes, strict=True)]

    @cached_property
    def ids(self) -> dict[Task, int]:
        """Their numbers."""
        return {task: i for i, task in enumerate(self.tasks)}

    @property
    def resources(self) -> tuple[str, ...]:
        """The names of the resources: devices, their links to the host, to the next stage, to the previous one."""
        count = range(self.stages)
        links = (f"stage {s} to {s + step}" for step in (1, -1) for s in count)
        return (*(f"stage {s}" for s in count), *(f"stage {s} host" for s in count), *links)

    def seconds(self, stages: Sequence[Sequence[float]]) -> list[float]:
        """Each task's seconds from the stages', which are in the order of `PARTS`."""
        flat = [seconds for parts_s in stages for seconds in parts_s]
        return [flat[slot] for slot in self.slots]


def stage_work(lists: TaskLists, features: Features) -> StageWork:
    """The work of task lists.

    Raises:
        ValueError: the lists cannot progress; it says which task waits for what.

    >>> from jvpipe.ir.task import text
    >>> from jvpipe.schedules.one_f_one_b import one_f_one_b
    >>> text(stage_work(one_f_one_b(2, 1), Features(recompute=False, swaps=False)).tasks)
    '0F0 0SEND0 0B0 1F0 1B0 1RETURN0'
    """
    S = len(lists)
    M = 1 + max((task.microbatch for tasks in lists for task in tasks), default=0)
    waits: dict[int, tuple[int, ...]] = {}
    for s, tasks in enumerate(lists):
        for code, needs in _stage(s, tasks, features, M, final=s == S - 1):
            if code in waits:
                raise ValueError(f"task {_task(code, M)} is twice in its list")
            waits[code] = needs
    ids = {code: i for i, code in enumerate(waits)}
    try:
        numbered = [tuple([ids[need] for need in needs]) for needs in waits.values()]
    except KeyError:
        code, need = next((c, n) for c, needs in waits.items() for n in needs if n not in ids)
        raise cannot_progress({_task(code, M): [f"{_task(need, M)}, which is in no list"]}) from None
    codes = tuple(waits)
    occupied = [_occupied(s, part, S, shared=features.shared) for s in range(S) for part in PARTS]
    in_order = [r for r in range(4 * S) if not S <= r < 2 * S]  # links to the host serve by readiness
    work = Work(numbered, [occupied[code // M] for code in codes], in_order, lambda i: str(_task(codes[i], M)))
    return StageWork(work, codes, S, M)


def _task(code: int, M: int) -> Task:
    slot, m = divmod(code, M)
    return Task(slot // len(PARTS), PARTS[slot % len(PARTS)], m)


def _occupied(s: int, part: Kind, S: int, *, shared: bool) -> tuple[int, ...]:
    """The resources of a part of a stage, numbered as `StageWork.resources` names them."""
    match part:
        case Kind.OUT | Kind.IN:
            return (S + s,)
        case Kind.SEND:
            return (S + s, S + s + 1) if shared else (2 * S + s,)
        case Kind.RETURN:
            return (S + s, S + s - 1) if shared else (3 * S + s,)
        case Kind.F | Kind.R | Kind.B:
            return (s,)
        case _:
            raise AssertionError(f"{part} is no part of a stage's work")


def _stage(
    s: int, tasks: Sequence[Task], on: Features, M: int, *, final: bool
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yields what a stage does, in order, and what each waits for, as codes; the engine keeps the device's order."""
    stage = len(PARTS) * M  # from a task to the same of the next stage
    F, R, B, OUT, IN, SEND, RETURN = range(s * stage, (s + 1) * stage, M)  # micro-batch 0 of each part
    source, answer = (SEND - stage, RETURN + stage) if on.sends else (F - stage, B + stage)
    last: tuple[int, ...] = ()  # the task before on the device
    outs: list[int] = []
    begun: tuple[int, ...] | None = None  # what the B before waited for, and the last OUT before it
    tasks = [task for task in tasks if task.kind != Kind.U]  # updates take no time at this level
    for task, following in zip(tasks, [*tasks[1:], None], strict=True):
        _, kind, m = task
        if kind == Kind.F:
            yield F + m, (*([source + m] if s else []), *outs[-2:-1])
            last = (F + m,)
            if on.swaps and following != (s, Kind.B, m):
                outs.append(OUT + m)
                yield OUT + m, last
            if on.sends and not final:
                yield SEND + m, last
        elif kind == Kind.B:
            needs = (F + m,) if final else (F + m, answer + m)
            if on.swaps and last != (F + m,):
                yield IN + m, (OUT + m, *(outs[-2:-1] if begun is None else begun))
                needs = (*needs, IN + m)
            begun = (*last, *needs, *outs[-1:])
            if on.recompute:
                yield R + m, needs
                needs = (R + m,)
            yield B + m, needs
            last = (B + m,)
            if on.sends and s:
                yield RETURN + m, last
        else:
            raise ValueError(f"task {task}: lists at the level of stages hold F and B")
