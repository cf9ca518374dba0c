"""Task lists of stages, as a graph for the simulator, with which planners predict seconds.

A device has a list of tasks in the order in which it runs them. Each task of a list is an F, B, I,
W or U of one of the device's stages. This module adds the others, for each stage and micro-batch:

    F, B            the forward and the backward
    I, W            the two halves of a split backward; what is true of B is true of I, too
    U               the update of a stage
    R               forwards that are recomputed while the cotangents for B are on their way
    SEND, RETURN    copies of activations to the next stage, and of cotangents to the previous one;
                    none between stages of one device
    OUT, IN         copies of swapped values to the host after F, and back before B
    REDUCE          sums of gradients among the replicas of a stage, once, after its last backward

The replicas of a stage do the same work at the same time, so a "device" here may be a group of
devices. If the machines of the devices are given, transfers between machines occupy their networks,
outgoing and incoming. Then transfers of different stages may wait for each other.

The link between a device and its host carries OUT and IN, one at a time. If sends between devices
pass through the host, this link carries them, too. Otherwise devices of neighboring stages have a
link in each direction. R waits for its turn on the device and for swapped values, but not for the
cotangents. If the program of a backward recomputes values itself, the seconds of B include that.

`simulate` (in simulator.py) simulates the rows that the controller dispatches, layer by layer.
tests/simulate/test_two_levels.py compares the two. The bytes of devices are the same. Without
swaps, seconds are the same, too. With swaps, the first of these waits differs under GPipe, the
second under 1F1B (waits.py has the rules and their reasons):

    task                         waits in rows for             waits here for
    last F before the first B    all OUTs                      all OUTs but the last one
    IN                           the end of the task before    the start of the B before its own

For random loads with swaps, the seconds of rows were 0.8 to 1.25 times the seconds found
here. Both are at least the seconds of a step whose swaps take no time, and exceed those by
at most the seconds of all swaps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import chain, pairwise
from operator import attrgetter

from jvpipe.ir.kinds import KINDS, Kind
from jvpipe.ir.task import Task, TaskLists, cannot_progress
from jvpipe.simulate.resources import Resources, resource_names
from jvpipe.simulate.task_graph import TaskGraph
from jvpipe.simulate.waits import Codes, DeviceWalk
from jvpipe.simulate.work_parts import PARTS, Features


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


_NAMES = [field.name for field in fields(StageLoad)]
_parts_s = attrgetter(*_NAMES[: len(PARTS)])


@dataclass(frozen=True)
class StageWork:
    """Task lists as a `TaskGraph`.

    Planners make and compare millions of tasks, so a task is coded as one integer. M is
    `microbatches`, and `part` is the position of the task's kind in `PARTS`, which has 11 entries:

        slot = 11 * stage + part
        code = M * slot + micro-batch

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
        """The names of the resources, in the order of their numbers (see resources.py)."""
        devices = 1 + max(self.places)
        # The graph counts resources up to the last that a task occupies. All after the links are
        # networks. Each machine has two, but perhaps no task occupies the second of the last one.
        networks = max(0, self.work.resources - 4 * devices)
        return resource_names(self.stages, devices, machines=(networks + 1) // 2)

    def seconds(self, stages: Sequence[Sequence[float]]) -> list[float]:
        """Returns each task's seconds.

        Args:
            stages: for each stage, seconds in the order of `PARTS`.
        """
        flat = [seconds for parts_s in stages for seconds in parts_s]
        return [flat[slot] for slot in self.slots]


def stage_work(lists: TaskLists, features: Features) -> StageWork:
    """Makes the graph of task lists, with the tasks that are added to them.

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
    tasks = list(chain(*lists))
    M = 1 + max([task.microbatch for task in tasks], default=0)
    places = _places(lists)
    stages = range(len(places))
    halves = {(s, m) for s, kind, m in tasks if KINDS[kind].between > 0}
    stage = len(PARTS) * M  # from a task's code to that of the same task on the next stage
    starts = range(0, len(places) * stage, stage)
    codes_of: list[dict[Kind, int]] = [
        dict(zip(PARTS, range(at, at + stage, M), strict=True)) for at in starts
    ]
    crosses = [features.sends and here != to for here, to in pairwise((*places, places[-1]))]
    waits: dict[int, Codes] = {}  # by code: the codes that it waits for
    for of_device in lists:
        for code, needs in DeviceWalk(features, codes_of, crosses, halves).along(of_device):
            if code in waits:
                raise ValueError(f"task {_task(code, M)} is twice in its list")
            waits[code] = needs
    # Tasks are numbered list by list, because a dictionary keeps the order in which keys came.
    codes = tuple(waits)
    resources = Resources(places, len(lists), features)
    occupied = [resources.occupied(s, part) for s in stages for part in PARTS]  # by slot
    work = TaskGraph(
        waits=_numbered(waits, M),
        occupies=[occupied[code // M] for code in codes],
        in_order=resources.in_order,
        name=lambda i: str(_task(codes[i], M)),
    )
    return StageWork(work, codes, places, M)


def _places(lists: TaskLists) -> tuple[int, ...]:
    """Returns the device of each stage.

    A stage in no list gets the device of its own number or, if there is none, the last device.
    """
    last = len(lists) - 1
    device_of = {task.stage: d for d, tasks in enumerate(lists) for task in tasks}
    stages = 1 + max([last, *device_of])
    return tuple(device_of.get(s, min(s, last)) for s in range(stages))


def _numbered(waits: Mapping[int, Codes], M: int) -> list[tuple[int, ...]]:
    """Returns, for each task, the numbers of the tasks that it waits for.

    Args:
        waits: by the code of a task, the codes of the tasks that it waits for.
        M: the number of micro-batches.

    Raises:
        ValueError: a task waits for one that is in no list.
    """
    ids = {code: i for i, code in enumerate(waits)}
    try:
        return [tuple([ids[need] for need in needs]) for needs in waits.values()]
    except KeyError as error:
        need = error.args[0]
        code = next(code for code, needs in waits.items() if need in needs)
        other = f"{_task(need, M)}, which is in no list"
        raise cannot_progress({_task(code, M): [other]}) from None


def _task(code: int, M: int) -> Task:
    """Returns the task that a code names."""
    slot, m = divmod(code, M)
    stage, part = divmod(slot, len(PARTS))
    return Task(stage, PARTS[part], m)
