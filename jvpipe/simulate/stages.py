"""Turns task lists of stages into a graph for the simulator, by which planners predict seconds.

A device has a list of tasks in the order in which it runs them, and each task names its stage. From
the lists this module makes these tasks, for each stage and micro-batch:

    F, B            the forward and the backward
    R               forwards that are recomputed while the cotangents for B are on their way
    I, W            the two halves of a split backward; below, what is true of B is true of I
    SEND, RETURN    copies of activations to the next stage, and of cotangents to the previous one;
                    none between stages of one device
    OUT, IN         copies of swapped values to the host after F, and back before B
    REDUCE          sums of gradients among the replicas of a stage, once, after its last backward
    U               the update of a stage, if its list has one

A device holds the swapped values of at most two micro-batches at a time. Two rules keep this bound:

    F     waits for the OUTs of all earlier forwards on the device, except the last OUT. In the
          drawing F2 waits for OUT0, so that only the values of F1 are left when F2 makes its own.
    IN    waits until the B before its own has begun, and until the last OUT before this
          earlier B has ended. In the drawing IN2 waits for B1 to begin, because then the
          values that B0 has read are gone.

    device    F0 F1 F2 F3 ...  B0 B1 B2
    host         OUT0 OUT1 ...  IN1 IN2

Nothing is swapped for a B that comes directly after its own F.

The replicas of a stage run in step, so a "device" here may be a group of devices at one place. If
the machines of the devices are given, transfers between places and REDUCE occupy the networks of
these machines, outgoing and incoming. Then transfers of several stages wait for each other.

The link between a device and its host carries OUT and IN, one at a time. If sends between devices
pass through the host, this link carries them, too. Otherwise devices of neighboring stages have a
link in each direction. R waits for its turn on the device and for swapped values. If the
program of a backward recomputes values itself, the seconds of B include that.

`jvpipe.simulate.rows` simulates the rows that the controller dispatches, layer by layer.
tests/simulate/test_two_levels.py compares the two. Bytes are the same. Without swaps, seconds
are the same. With swaps, the first of these rules differs under GPipe, the second under 1F1B:

    task                    waits in rows for              waits here for
    F before the first B    all OUTs that are not done     all OUTs but the last one
    IN                      the end of the task before     the start of the B before its own

For random loads with swaps, the seconds of rows were 0.8 to 1.25 times the seconds found
here. Both are at least the seconds of a step whose copies take no time, and exceed those by
at most the seconds of all copies.
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
"""The kinds of a stage's tasks, in the order of the fields of `StageLoad` and of `slots`."""
WAYS = ("out", "in")
"""The directions of a machine's network."""


@dataclass(frozen=True, slots=True)
class StageLoad:
    """The seconds and bytes of one stage per micro-batch.

    The seconds come first, and must stay in the order of `PARTS`. The halves I and W of a split
    backward take `input_s` and `weight_s`.

    `static_bytes` are held all the time, `kept_bytes` and `swapped_bytes` from a forward to its
    backward, `handed_bytes` between the halves of a backward.
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
        """The seconds of the stage, in the order of `PARTS`."""
        return _parts_s(self)


_parts_s = attrgetter(*[field.name for field in fields(StageLoad)][: len(PARTS)])


@dataclass(frozen=True)
class Features:
    """The parts that are simulated besides F and B; a part that takes no time can be left out.

    `shared` tells whether sends take the links to the host. `machines` has the machines of the
    devices at each place; it is empty if no networks are shared.
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
            parts_s: for each stage, seconds in the order of `PARTS`.
            shared: whether sends take the links to the host.
            swaps: whether something is swapped, even if the copies take no time.
            machines: the machines of the devices at each place; empty if no networks are shared.
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
    """Task lists as a `TaskGraph`.

    Planners make and compare millions of tasks, so a task is coded as one integer. M is
    `microbatches`, and `part` is a position in `PARTS`, which has 11 entries:

        slot = 11 stage + part
        code = slot M + micro-batch

    Task i of `work` has the code `codes[i]` and the slot `slots[i]`. The seconds of all stages form
    one list: first stage 0, in the order of `PARTS`, then stage 1, and so on. A task takes the
    seconds at the position `slot` in this list.
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
        """The position of each task's seconds in the list of all stages' seconds."""
        return [code // self.microbatches for code in self.codes]

    @cached_property
    def tasks(self) -> list[Task]:
        """All tasks, in the order of `codes`."""
        return [_task(code, self.microbatches) for code in self.codes]

    @cached_property
    def ids(self) -> dict[Task, int]:
        """The number of each task in `work`."""
        return {task: i for i, task in enumerate(self.tasks)}

    @property
    def resources(self) -> tuple[str, ...]:
        """The names of the resources, in the order of their numbers (see `_occupied`)."""
        devices = range(1 + max(self.places))
        what = "stage" if self.stages == len(devices) else "device"
        names = [f"{what} {d}" for d in devices]
        names += [f"{what} {d} host" for d in devices]
        # Each device gets names for a link to the next device and for one to the previous
        # device. If there are two devices, each has only one link. The other name is not
        # used: it names a device 2 or 3, which does not exist.
        loop = len(devices) if len(devices) > 2 else 4
        for step in (1, -1):
            names += [f"{what} {d} to {(d + step) % loop}" for d in devices]
        machines = (self.work.resources - len(names) + 1) // 2
        for k in range(machines):
            names += [f"network of machine {k}, {way}" for way in WAYS]
        return tuple(names)

    def seconds(self, stages: Sequence[Sequence[float]]) -> list[float]:
        """Returns each task's seconds.

        Args:
            stages: for each stage, seconds in the order of `PARTS`.
        """
        flat = [seconds for parts_s in stages for seconds in parts_s]
        return [flat[slot] for slot in self.slots]


def stage_work(lists: TaskLists, features: Features) -> StageWork:
    """Makes the graph of task lists, with the tasks that follow from them.

    Args:
        lists: the tasks of each device.
        features: the parts that are simulated.

    Raises:
        ValueError: the lists cannot progress; the message says which task waits for which others.

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
    """Returns the device of each stage; a stage that is in no list has the device of its number."""
    device_of = {task.stage: d for d, tasks in enumerate(lists) for task in tasks}
    stages = max([len(lists), *(s + 1 for s in device_of)])
    return tuple(device_of.get(s, min(s, len(lists) - 1)) for s in range(stages))


def _numbered(waits: Mapping[int, tuple[int, ...]], M: int) -> list[tuple[int, ...]]:
    """Returns, for each task, the numbers of the tasks that it waits for.

    Raises ValueError if a task waits for one that is in no list.
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
    """Returns the resources that a part of a stage occupies, by the numbers of `resources`.

        numbers             resources
        0 up to D           devices
        D up to 2 D         links between a device and its host
        2 D up to 3 D       links to the next device
        3 D up to 4 D       links to the previous device
        4 D and more        networks of machines, two for each: out and in

    Args:
        s: the stage.
        part: the kind of the task, one of `PARTS`.
        places: the device of each stage.
        D: the number of devices.
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
    """Returns the resources that a transfer from one place to a neighboring one occupies.

    Between different machines, a transfer occupies the networks of both. Otherwise, if sends pass
    through the host, it occupies the links of both places to their host. Otherwise it occupies the
    link between the places. In a loop of three or more places, the first and the last are next to
    each other.

    Args:
        d: the place that sends.
        to: the place that receives.
        D: the number of places.
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
    """Returns the networks that a transfer between some machines occupies; none within a machine.

    Args:
        senders: the machine of each device that sends.
        readers: the machine of each device that receives.
        D: the number of places, whose resources come before the networks.
    """
    if len({*senders, *readers}) == 1:
        return ()
    out = (4 * D + 2 * k for k in sorted(set(senders)))
    into = (4 * D + 2 * k + 1 for k in sorted(set(readers)))
    return (*out, *into)


class _Around(NamedTuple):
    """The codes of a stage's `parts` for micro-batch 0, and of the tasks that they wait for.

    The codes for micro-batch m are larger by m. F waits for the `source`, which brings values from
    the stage before. B waits for the `answer`, which brings cotangents from the next stage, or for
    the `half_answer` if the next stage splits its backward.
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
            places: the device of each stage.
            on: the parts that stages need.
            M: the number of micro-batches.
        """
        stage = len(PARTS) * M  # from a task's code to that of the same task on the next stage
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
    """Yields the codes of a device's tasks in order, each with the codes that it waits for.

    A task does not list the task before it on the device, because the engine keeps their order.

    Args:
        tasks: the list of the device.
        on: the parts that stages need.
        around: the codes around each stage.
        halves: pairs of a stage and a micro-batch whose backward is split.
    """
    last: tuple[int, ...] = ()  # the task before this one on the device
    outs: list[int] = []
    # The tasks that the last B waited for, and the last OUT before it. The B begins when they end.
    begun: tuple[int, ...] | None = None
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
                    # Before its first B the device has room when the second-to-last OUT has ended.
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
        if ends.get(s) == task:  # the last backward of the stage completes its gradients
            yield REDUCE + m, last


def _is_own_backward(task: Task, following: Task | None) -> bool:
    """Tells whether the task after a forward is its own backward, or the backward's first half."""
    if following is None or KINDS[following.kind].in_flight >= 0:
        return False
    return (following.stage, following.microbatch) == (task.stage, task.microbatch)
