"""Task lists at the level of stages as work for the simulator: what planners count with.

    F, B            forward and backward of a stage; R, recomputing, straight before B
    I, W            the halves of a backward that is not whole: what is said of B below is said of I
    SEND, RETURN    of activations to the next stage, of cotangents to the previous one; none on one device
    OUT, IN         of what a stage swaps: it leaves after F, and is back before B
    REDUCE          of gradients among the replicas of a stage, once, after its last backward

A list is that of a device, and its tasks name their stages. Two micro-batches' swapped bytes at most are on the device:
an F waits for the OUT of the F before the last one, an IN until the B before its own begins and the F before that B is
out. What a B needs that follows its own F stays.

The replicas of a stage are in step, so what is said of a device is said of the group of devices at a place. Where it is
said on which machines these are, transfers between places and reduces take the networks of machines, out and in: those
of several stages wait for each other there.

A device's link to its host carries OUT and IN, and, where the host is between the devices, its sends too, all one at a
time; else devices that stages follow each other on have a link for each direction. R waits for the cotangents, as B
does.

Against `jvpipe.simulate.rows`, which has the rows that a controller dispatches (tests/simulate/test_two_levels.py holds
the two together): bytes are the same, and seconds too, but that
    with swaps, the rows' F before a first B waits for all that is on its way out, here for all but the last (GPipe),
    and the rows' IN for the task before it in the dispatch to end, here for the B before its own to begin (1F1B);
    with R, the rows recompute while the cotangents are on their way.
Over random loads the rows took up to 1.25 times as long with swaps, and no less than 0.8 times; both lie between a step
whose copies take no time and that plus all its copies.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from jvpipe.ir.kinds import KINDS, Kind
from jvpipe.ir.task import Task, TaskLists, cannot_progress
from jvpipe.simulate.engine import Work

PARTS = (
    Kind.F,
    Kind.R,
    Kind.B,
    Kind.OUT,
    Kind.IN,
    Kind.SEND,
    Kind.RETURN,
    Kind.I,
    Kind.W,
    Kind.REDUCE,
)

WAYS = ("out", "in")
"""The directions of a machine's network."""


@dataclass(frozen=True, slots=True)
class StageLoad:
    """The seconds and bytes of one stage per micro-batch; `static_bytes` are there all the time.

    Halves of a backward take `input_s` and `weight_s`, and hold `handed_bytes` between them.
    """

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
    input_s: float = 0.0
    weight_s: float = 0.0
    handed_bytes: int = 0
    reduce_s: float = 0.0

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
            self.input_s,
            self.weight_s,
            self.reduce_s,
        )


@dataclass(frozen=True)
class Features:
    """The parts that are simulated beside F and B; whatever takes no seconds can be left out.

    `machines` are those of the devices at each place, where places share their networks.
    """

    recompute: bool = True
    swaps: bool = True
    sends: bool = True
    shared: bool = False
    reduces: bool = False
    machines: tuple[tuple[int, ...], ...] = ()

    @staticmethod
    def of(
        parts_s: Sequence[Sequence[float]],
        *,
        shared: bool,
        swaps: bool = False,
        machines: tuple[tuple[int, ...], ...] = (),
    ) -> "Features":
        """Finds the parts that stages need.

        Args:
            parts_s: per stage, seconds in the order of `PARTS`.
            shared: whether sends take the links to the host.
            swaps: whether something is swapped even if that takes no time.
            machines: of the devices at each place; none: no networks are shared.
        """
        _, recomputes, _, out, back, sent, returned, _, _, reduces = (
            any(column) for column in zip(*parts_s, strict=True)
        )
        sends = sent or returned
        shares = machines if sends or reduces else ()
        return Features(recomputes, swaps or out or back, sends, shared and sends, reduces, shares)


@dataclass(frozen=True)
class StageWork:
    """Task lists as `Work`.

    Task i of the work is named by `codes[i]` = (10 stage + part) M + micro-batch; M is `microbatches`. Seconds stand in
    one list, stage after stage, `PARTS` of each: those of task i are at `slots[i]`.
    """

    work: Work
    codes: tuple[int, ...]
    places: tuple[int, ...]  # the device of each stage
    microbatches: int

    @property
    def stages(self) -> int:
        """How many stages there are, on any number of devices."""
        return len(self.places)

    @cached_property
    def slots(self) -> list[int]:
        """The positions of each task's seconds."""
        return [code // self.microbatches for code in self.codes]

    @cached_property
    def tasks(self) -> list[Task]:
        """The tasks; their kinds are `PARTS`."""
        parts = [(s, part) for s in range(self.stages) for part in PARTS]
        return [
            Task(*parts[slot], code % self.microbatches)
            for slot, code in zip(self.slots, self.codes, strict=True)
        ]

    @cached_property
    def ids(self) -> dict[Task, int]:
        """Their numbers."""
        return {task: i for i, task in enumerate(self.tasks)}

    @property
    def resources(self) -> tuple[str, ...]:
        """The names of the resources: devices, their links to the host, to the next stage, to the previous one, and
        the networks of machines.
        """
        devices = range(1 + max(self.places))
        machines = (self.work.resources - 4 * len(devices) + 1) // 2
        networks = (f"network of machine {k}, {way}" for k in range(machines) for way in WAYS)
        what = "stage" if self.stages == len(devices) else "device"
        loop = len(devices) if len(devices) > 2 else 4  # of two, both neighbours are the other one
        links = (f"{what} {d} to {(d + step) % loop}" for step in (1, -1) for d in devices)
        hosts = (f"{what} {d} host" for d in devices)
        return (*(f"{what} {d}" for d in devices), *hosts, *links, *networks)

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
    M = 1 + max((task.microbatch for tasks in lists for task in tasks), default=0)
    device_of = {task.stage: d for d, tasks in enumerate(lists) for task in tasks}
    places = tuple(
        device_of.get(s, min(s, len(lists) - 1))
        for s in range(max([len(lists), *(s + 1 for s in device_of)]))
    )
    halves = frozenset((s, m) for tasks in lists for s, kind, m in tasks if KINDS[kind].between > 0)
    around = [_Around.of(s, places, features, M) for s in range(len(places))]
    waits: dict[int, tuple[int, ...]] = {}
    for tasks in lists:
        for code, needs in _device(tasks, features, around, halves):
            if code in waits:
                raise ValueError(f"task {_task(code, M)} is twice in its list")
            waits[code] = needs
    ids = {code: i for i, code in enumerate(waits)}
    try:
        numbered = [tuple([ids[need] for need in needs]) for needs in waits.values()]
    except KeyError:
        code, need = next((c, n) for c, needs in waits.items() for n in needs if n not in ids)
        raise cannot_progress(
            {_task(code, M): [f"{_task(need, M)}, which is in no list"]}
        ) from None
    codes, D = tuple(waits), len(lists)
    occupied = [
        _occupied(s, part, places, D, features) for s in range(len(places)) for part in PARTS
    ]
    in_order = [
        r for r in range(4 * D) if not D <= r < 2 * D
    ]  # links to the host serve by readiness
    work = Work(
        numbered,
        [occupied[code // M] for code in codes],
        in_order,
        lambda i: str(_task(codes[i], M)),
    )
    return StageWork(work, codes, places, M)


def _task(code: int, M: int) -> Task:
    slot, m = divmod(code, M)
    return Task(slot // len(PARTS), PARTS[slot % len(PARTS)], m)


def _occupied(s: int, part: Kind, places: Sequence[int], D: int, on: Features) -> tuple[int, ...]:
    """The resources of a part of a stage, numbered as `StageWork.resources` names them.

    Args:
        s: the stage.
        part: of it.
        places: those of all stages.
        D: how many there are.
        on: says which resources are shared.
    """
    d = places[s]
    match part:
        case Kind.OUT | Kind.IN:
            return (D + d,)
        case Kind.SEND:
            return _link(d, places[(s + 1) % len(places)], D, on)
        case Kind.RETURN:
            return _link(d, places[s - 1], D, on)
        case Kind.REDUCE:
            return _networks(on.machines[d], on.machines[d], D) if on.machines else ()
        case Kind.F | Kind.R | Kind.B | Kind.I | Kind.W:
            return (d,)
        case _:
            raise AssertionError(f"{part} is no part of a stage's work")


def _link(d: int, to: int, D: int, on: Features) -> tuple[int, ...]:
    """The link between places: up to the next, down to the previous one; a loop of three or more closes itself.

    Between places on other machines it is the networks of these.
    """
    apart = on.machines and on.machines[d] != on.machines[to]
    if apart and (shared := _networks(on.machines[d], on.machines[to], D)):
        return shared
    down = to == d - 1 or (d == 0 and to == D - 1 > 1)
    return (D + d, D + to) if on.shared else ((3 if down else 2) * D + d,)


def _networks(senders: Sequence[int], readers: Sequence[int], D: int) -> tuple[int, ...]:
    """The networks that devices on some machines send by, and others receive by; none inside one machine.

    Args:
        senders: the machine of each device that sends.
        readers: of each that receives.
        D: how many places there are, whose resources come before the networks.
    """
    if len({*senders, *readers}) == 1:
        return ()
    out = (4 * D + 2 * k for k in sorted(set(senders)))
    into = (4 * D + 2 * k + 1 for k in sorted(set(readers)))
    return (*out, *into)


class _Around(NamedTuple):
    """Codes of a stage's parts for micro-batch 0, and of what its F and B wait for; whether it sends anything."""

    parts: tuple[int, ...]
    source: int | None
    answer: int | None
    half_answer: int | None
    sends: bool
    returns: bool

    @staticmethod
    def of(s: int, places: Sequence[int], on: Features, M: int) -> "_Around":
        """The tasks around a stage.

        Args:
            s: the stage.
            places: the device of each.
            on: the parts that stages need.
            M: micro-batches.
        """
        stage = len(PARTS) * M  # from a task to the same of the next stage
        F, _, B, _, _, SEND, RETURN, I, _, _ = parts = tuple(range(s * stage, (s + 1) * stage, M))  # noqa: E741
        first, last = s == 0, s == len(places) - 1
        returns, sends = (
            on.sends and not end and places[s] != places[(s + step) % len(places)]
            for end, step in ((first, -1), (last, 1))
        )
        return _Around(
            parts=parts,
            source=None if first else (SEND if returns else F) - stage,
            answer=None if last else (RETURN if sends else B) + stage,
            half_answer=None if last else (RETURN if sends else I) + stage,
            sends=sends,
            returns=returns,
        )


def _device(
    tasks: Sequence[Task],
    on: Features,
    around: Sequence[_Around],
    halves: Collection[tuple[int, int]],
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yields what a device does, in order, and what each waits for, as codes; the engine keeps the device's order."""
    last: tuple[int, ...] = ()  # the task before on the device
    outs: list[int] = []
    begun: tuple[int, ...] | None = None  # what the B before waited for, and the last OUT before it
    tasks = [task for task in tasks if task.kind != Kind.U]  # updates take no time at this level
    ends = {t.stage: t for t in tasks if KINDS[t.kind].accumulates} if on.reduces else {}
    for task, following in zip(tasks, [*tasks[1:], None], strict=True):
        s, kind, m = task
        parts, source, answer, half_answer, sends, returns = around[s]
        F, R, _, OUT, IN, SEND, RETURN, I, W, REDUCE = parts  # noqa: E741
        match kind:
            case Kind.F:
                yield F + m, (*([] if source is None else [source + m]), *outs[-2:-1])
                last = (F + m,)
                if on.swaps and not (
                    following
                    and KINDS[following.kind].in_flight < 0
                    and following[::2] == task[::2]
                ):
                    outs.append(OUT + m)
                    yield OUT + m, last
                if sends:
                    yield SEND + m, last
            case Kind.B | Kind.I:
                after = half_answer if (s + 1, m) in halves else answer
                needs = (F + m,) if after is None else (F + m, after + m)
                if on.swaps and last != (F + m,):
                    yield IN + m, (OUT + m, *(outs[-2:-1] if begun is None else begun))
                    needs = (*needs, IN + m)
                begun = (*last, *needs, *outs[-1:])
                if on.recompute:
                    yield R + m, needs
                    needs = (R + m,)
                last = (parts[PARTS.index(kind)] + m,)
                yield last[0], needs
                if returns:
                    yield RETURN + m, last
            case Kind.W:
                last = (W + m,)
                yield W + m, (I + m,)
            case _:
                raise ValueError(f"task {task}: lists at the level of stages hold F, B, I and W")
        if ends.get(s) == task:  # its last backward: all gradients are there
            yield REDUCE + m, last
