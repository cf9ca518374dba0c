"""Task lists at the level of stages as work for the simulator: what planners count with.

    F, B            forward and backward of a stage
    R               what is computed again before the first of the cotangents is read: while these are on their way
    I, W            the halves of a backward that is not whole: what holds for B below holds for I
    SEND, RETURN    of activations to the next stage, of cotangents to the previous one; none on one device
    OUT, IN         of what a stage swaps: it leaves after F, and is back before B
    REDUCE          of gradients among the replicas of a stage, once, after its last backward
    U               the update of a stage, on its device, where the list has one

A list is that of a device, and its tasks name their stages. At most two micro-batches' swapped
bytes are on the device: an F waits for the OUT of the F before the last one; an IN waits until the
B before its own begins, and until the F before that B is out. What is read by a B that follows its
own F stays.

    device    F0 F1 F2 F3 ...  B0 B1 B2        F2 waits for OUT0: of F0 and F1 only F1 is left
    host         OUT0 OUT1 ...  IN1 IN2        IN2 waits for B1 to begin, so that B0's bytes are gone

The replicas of a stage are in step, so a device here may be a group of devices at a place. If their
machines are given, transfers between places and reduces take the networks of machines, out and in,
on which those of several stages wait for each other.

A device's link to its host carries OUT and IN and, if the host is between the devices, the device's
sends too, all one at a time; otherwise devices whose stages follow each other have a link for each
direction. R waits for its turn and for what was swapped; what a backward computes again within its
own program is part of B.

`jvpipe.simulate.rows` simulates the rows that a controller dispatches
(tests/simulate/test_two_levels.py holds the two together). Bytes are the same. Seconds are, too,
with these exceptions:

    with swaps    the rows' F before a first B waits for all that is on its way out, here for all but the last (GPipe)
                  the rows' IN waits for the task before it in the dispatch to end, here for the B before it to begin
                  (1F1B)

Over random loads the rows took up to 1.25 times as long with swaps, and no less than 0.8 times.
Both lie between a step whose copies take no time and that step plus all its copies.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

from jvpipe.ir.kinds import KINDS, Kind
from jvpipe.ir.task import Task, TaskLists, cannot_progress
from jvpipe.simulate.engine import TaskGraph

PARTS = (
    *(Kind.F, Kind.B, Kind.R, Kind.OUT, Kind.IN, Kind.SEND, Kind.RETURN),
    *(Kind.I, Kind.W, Kind.REDUCE, Kind.U),
)
"""What a stage does, in the order of the seconds of `StageLoad`."""
WAYS = ("out", "in")
"""The directions of a machine's network."""


@dataclass(frozen=True, slots=True)
class StageLoad:
    """The seconds and bytes of one stage per micro-batch; `static_bytes` are taken all the time.

    Halves of a backward take `input_s` and `weight_s`, and hold `handed_bytes` between them.
    The seconds come first, in the order of `PARTS`.
    """

    forward_s: float
    backward_s: float
    recompute_s: float = 0.0
    out_s: float = 0.0
    in_s: float = 0.0
    send_s: float = 0.0
    return_s: float = 0.0
    input_s: float = 0.0
    weight_s: float = 0.0
    reduce_s: float = 0.0
    update_s: float = 0.0
    static_bytes: int = 0
    kept_bytes: int = 0
    swapped_bytes: int = 0
    handed_bytes: int = 0

    @property
    def parts_s(self) -> tuple[float, ...]:
        """Seconds in the order of `PARTS`."""
        return _parts_s(self)


_parts_s = attrgetter(*[field.name for field in fields(StageLoad)][: len(PARTS)])


@dataclass(frozen=True)
class Features:
    """The parts that are simulated besides F and B; whatever takes no time can be left out.

    `machines` are those of the devices at each place, where places share their networks.
    """

    recompute: bool = True
    swaps: bool = True
    sends: bool = True
    shared: bool = False
    reduces: bool = False
    updates: bool = False
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
        columns = zip(PARTS, zip(*parts_s, strict=True), strict=True)
        takes = {part: any(column) for part, column in columns}
        sends = takes[Kind.SEND] or takes[Kind.RETURN]
        reduces = takes[Kind.REDUCE]
        return Features(
            recompute=takes[Kind.R],
            swaps=swaps or takes[Kind.OUT] or takes[Kind.IN],
            sends=sends,
            shared=shared and sends,
            reduces=reduces,
            updates=takes[Kind.U],
            machines=machines if sends or reduces else (),
        )


@dataclass(frozen=True)
class StageWork:
    """Task lists as `TaskGraph`.

    Tasks are named by integers, for planners make and compare millions of them:

        code = slot M + micro-batch         slot = 11 stage + part         M is `microbatches`

    Task i of the work has `codes[i]`. The seconds of all stages stand in one list, `PARTS` of each
    stage after another: those of task i are at `slots[i]`.
    """

    work: TaskGraph
    codes: tuple[int, ...]
    places: tuple[int, ...]  # the device of each stage
    microbatches: int

    @property
    def stages(self) -> int:
        """The number of stages, on any number of devices."""
        return len(self.places)

    @cached_property
    def slots(self) -> list[int]:
        """The positions of each task's seconds."""
        return [code // self.microbatches for code in self.codes]

    @cached_property
    def tasks(self) -> list[Task]:
        """The tasks; their kinds are `PARTS`."""
        return [_task(code, self.microbatches) for code in self.codes]

    @cached_property
    def ids(self) -> dict[Task, int]:
        """The number of each task."""
        return {task: i for i, task in enumerate(self.tasks)}

    @property
    def resources(self) -> tuple[str, ...]:
        """The names of the resources: devices, their links to the host, to the next stage, to the previous one, and
        the networks of machines.
        """
        devices = range(1 + max(self.places))
        what = "stage" if self.stages == len(devices) else "device"
        names = [f"{what} {d}" for d in devices]
        names += [f"{what} {d} host" for d in devices]
        loop = len(devices) if len(devices) > 2 else 4  # of two, both neighbours are the other one
        for step in (1, -1):
            names += [f"{what} {d} to {(d + step) % loop}" for d in devices]
        machines = (self.work.resources - len(names) + 1) // 2
        for k in range(machines):
            names += [f"network of machine {k}, {way}" for way in WAYS]
        return tuple(names)

    def seconds(self, stages: Sequence[Sequence[float]]) -> list[float]:
        """Returns each task's seconds.

        Args:
            stages: of each, seconds in the order of `PARTS`.
        """
        flat = [seconds for parts_s in stages for seconds in parts_s]
        return [flat[slot] for slot in self.slots]


def stage_work(lists: TaskLists, features: Features) -> StageWork:
    """Makes the work of task lists.

    Args:
        lists: of each device.
        features: the parts that are simulated.

    Raises:
        ValueError: the lists cannot progress; it says which task waits for what.

    >>> from jvpipe.ir.task import text
    >>> from jvpipe.schedules.one_f_one_b import one_f_one_b
    >>> text(stage_work(one_f_one_b(2, 1), Features(recompute=False, swaps=False)).tasks)
    '0F0 0SEND0 0B0 1F0 1B0 1RETURN0'
    """
    M = 1 + max((task.microbatch for tasks in lists for task in tasks), default=0)
    D, places = len(lists), _places(lists)
    halves = frozenset((s, m) for tasks in lists for s, kind, m in tasks if KINDS[kind].between > 0)
    around = [_Around.of(s, places, features, M) for s in range(len(places))]
    waits: dict[int, tuple[int, ...]] = {}  # by code: the codes that it waits for
    for tasks in lists:
        for code, needs in _device(tasks, features, around, halves):
            if code in waits:
                raise ValueError(f"task {_task(code, M)} is twice in its list")
            waits[code] = needs
    codes = tuple(waits)
    resources = [
        _occupied(s, part, places, D, features) for s in range(len(places)) for part in PARTS
    ]
    work = TaskGraph(
        waits=_numbered(waits, M),
        occupies=[resources[code // M] for code in codes],
        in_order=[*range(D), *range(2 * D, 4 * D)],  # all but the links to the host
        name=lambda i: str(_task(codes[i], M)),
    )
    return StageWork(work, codes, places, M)


def _places(lists: TaskLists) -> tuple[int, ...]:
    """Returns the device of each stage; one that is in no list is where its number would be."""
    device_of = {task.stage: d for d, tasks in enumerate(lists) for task in tasks}
    stages = max([len(lists), *(s + 1 for s in device_of)])
    return tuple(device_of.get(s, min(s, len(lists) - 1)) for s in range(stages))


def _numbered(waits: Mapping[int, tuple[int, ...]], M: int) -> list[tuple[int, ...]]:
    """Returns, for each task, the numbers of those that it waits for.

    Raises ValueError if one is in no list.
    """
    ids = {code: i for i, code in enumerate(waits)}
    try:
        return [tuple([ids[need] for need in needs]) for needs in waits.values()]
    except KeyError:
        code, need = next((c, n) for c, needs in waits.items() for n in needs if n not in ids)
        missing = f"{_task(need, M)}, which is in no list"
        raise cannot_progress({_task(code, M): [missing]}) from None


def _task(code: int, M: int) -> Task:
    """Returns the task that a code names."""
    slot, m = divmod(code, M)
    return Task(slot // len(PARTS), PARTS[slot % len(PARTS)], m)


def _occupied(s: int, part: Kind, places: Sequence[int], D: int, on: Features) -> tuple[int, ...]:
    """Returns the resources of a part of a stage, numbered as `StageWork.resources` names them.

        0 .. D   devices   .. 2D   links to the host   .. 3D   to the next   .. 4D   to the previous   ..   networks

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
        case Kind.F | Kind.R | Kind.B | Kind.I | Kind.W | Kind.U:
            return (d,)
        case _:
            raise AssertionError(f"{part} is not part of a stage's work")


def _link(d: int, to: int, D: int, on: Features) -> tuple[int, ...]:
    """Returns the link between places: up to the next, down to the previous one.

    A loop of three or more closes itself. Between places on other machines it is the networks of
    these.

    Args:
        d: the place that sends.
        to: the place that receives.
        D: how many there are.
        on: says which resources are shared.
    """
    if on.machines and on.machines[d] != on.machines[to]:
        networks = _networks(on.machines[d], on.machines[to], D)
        if networks:
            return networks
    if on.shared:
        return (D + d, D + to)
    closes_loop = d == 0 and to == D - 1 > 1
    down = to == d - 1 or closes_loop
    return ((3 if down else 2) * D + d,)


def _networks(senders: Sequence[int], readers: Sequence[int], D: int) -> tuple[int, ...]:
    """Returns the networks by which devices on some machines send, and others receive; none inside one machine.

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
    """Codes of a stage's `parts` for micro-batch 0, and of what they wait for; those of micro-batch m are m larger.

    F waits for the `source`, B for the `answer`, or for the `half_answer` where the next stage
    splits its backward.
    """

    parts: tuple[int, ...]
    source: int | None
    answer: int | None
    half_answer: int | None
    sends: bool
    returns: bool

    @staticmethod
    def of(s: int, places: Sequence[int], on: Features, M: int) -> "_Around":
        """Finds the tasks around a stage.

        Args:
            s: the stage.
            places: the device of each.
            on: the parts that stages need.
            M: micro-batches.
        """
        stage = len(PARTS) * M  # from a task to the same of the next stage
        parts = tuple(range(s * stage, (s + 1) * stage, M))
        code = dict(zip(PARTS, parts, strict=True))
        is_first = s == 0
        is_last = s == len(places) - 1
        returns = on.sends and not is_first and places[s] != places[s - 1]
        sends = on.sends and not is_last and places[s] != places[s + 1]
        source = answer = half_answer = None
        if not is_first:
            source = code[Kind.SEND if returns else Kind.F] - stage
        if not is_last:
            answer = code[Kind.RETURN if sends else Kind.B] + stage
            half_answer = code[Kind.RETURN if sends else Kind.I] + stage
        return _Around(parts, source, answer, half_answer, sends, returns)


def _device(
    tasks: Sequence[Task],
    on: Features,
    around: Sequence[_Around],
    halves: Collection[tuple[int, int]],
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yields what a device does, in order, and what each waits for, as codes.

    That tasks of a device follow each other is not said here: the engine keeps their order.

    Args:
        tasks: of the device.
        on: the parts that stages need.
        around: of each stage.
        halves: the stages and micro-batches whose backwards are split.
    """
    last: tuple[int, ...] = ()  # the task before on the device
    outs: list[int] = []
    begun: tuple[int, ...] | None = None  # what the B before waited for, and the last OUT before it
    tasks = [task for task in tasks if on.updates or task.kind != Kind.U]
    ends = {t.stage: t for t in tasks if KINDS[t.kind].accumulates} if on.reduces else {}
    for task, following in zip(tasks, [*tasks[1:], None], strict=True):
        s, kind, m = task
        parts, source, answer, half_answer, sends, returns = around[s]
        F, _, R, OUT, IN, SEND, RETURN, I, W, REDUCE, U = parts  # noqa: E741
        match kind:
            case Kind.F:
                needs = () if source is None else (source + m,)
                yield F + m, (*needs, *outs[-2:-1])
                last = (F + m,)
                if on.swaps and not _is_own_backward(task, following):
                    outs.append(OUT + m)
                    yield OUT + m, last
                if sends:
                    yield SEND + m, last
            case Kind.B | Kind.I:
                after = half_answer if (s + 1, m) in halves else answer
                needs: tuple[int, ...] = (F + m,)
                if on.swaps and last != (F + m,):
                    # Before its first B a device has room once the OUT before the last has ended.
                    room = outs[-2:-1] if begun is None else begun
                    yield IN + m, (OUT + m, *room)
                    needs = (*needs, IN + m)
                if on.recompute:
                    yield R + m, needs
                    needs = last = (R + m,)
                if after is not None:
                    needs = (*needs, after + m)
                begun = (*last, *needs, *outs[-1:])
                last = (parts[PARTS.index(kind)] + m,)
                yield last[0], needs
                if returns:
                    yield RETURN + m, last
            case Kind.W:
                last = (W + m,)
                yield W + m, (I + m,)
            case Kind.U:
                last = (U + m,)
                yield U + m, (REDUCE + ends[s].microbatch,) if s in ends else ()
            case _:
                raise ValueError(f"task {task}: lists at the level of stages hold F, B, I, W and U")
        if ends.get(s) == task:  # its last backward: all gradients are there
            yield REDUCE + m, last


def _is_own_backward(task: Task, following: Task | None) -> bool:
    """Tells whether the task after a forward is its own backward, or the first half of that."""
    if following is None or KINDS[following.kind].in_flight >= 0:
        return False
    return (following.stage, following.microbatch) == (task.stage, task.microbatch)
