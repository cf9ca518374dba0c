"""The simulator: predicts when rows of a step or tasks of a schedule run, and the bytes over time.

There are two levels. `simulate` takes the rows that the controller of a run dispatches, and
`simulate_lists` takes the task lists of whole stages, as planners do (`stages.py`).

A row is one program or one copy. Programs run on their device in the order of their dispatch, and
copies run on links as soon as they can. A row waits for the last writer of each buffer that it
reads or writes, and for all readers of a buffer that it overwrites. Three kinds of rows also wait
for memory:

    FREE    waits until a copy has arrived, then frees the original. It holds back all later rows of
            its device, and all later copies to its device
    IN      brings a value back from the host. It waits for the last program that was dispatched to
            its device before the IN
    FEED    brings a leaf of the batch. If it takes no time, it waits as IN does. Otherwise
            it waits only for the second-to-last program, and can run beside the last one

The ledger of a run counts bytes in the order of dispatch: it counts what a program frees as gone
when the next row is dispatched. With these waits, swaps take no more bytes in simulated time than
the ledger counts. Other copies can take more for a while. A FEED that takes time, or a copy from
another device, may arrive while the last program still holds bytes that it will free.

On some devices (CUDA) a new buffer can be used only when the work that the device already
has in its queue is done (`buffers_wait`). On such devices, a copy from another device also
waits for the last program that was dispatched to the receiving device before the copy.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import assert_never

import numpy as np

from jvpipe.ir.buffers import HOST, Lowered, peaks
from jvpipe.ir.kinds import KINDS, CopyLink, Kind, Runs
from jvpipe.ir.rows import Row
from jvpipe.ir.task import TaskLists
from jvpipe.simulate.stages import StageLoad, StageWork, stage_work
from jvpipe.simulate.task_graph import TaskGraph
from jvpipe.simulate.timeline import Curve, Timeline
from jvpipe.simulate.work_parts import Features

_Changes = list[tuple[float, int]]
"""Changes of bytes: pairs of a time in seconds and the bytes added; negative bytes are removed."""
Links = Callable[[Row], Sequence[str]]
"""Returns the names of the links that a copy occupies; no link for a copy that takes no time."""


def links_between_devices(lowered: Lowered) -> Links:
    """Returns a function from a copy to the links that it occupies.

    Every ordered pair of devices has a link of its own. Every device has one link to the host, for
    both directions. FEED occupies no link.

    Args:
        lowered: the step; its buffers say where a copy goes.
    """

    def links(row: Row) -> Sequence[str]:
        link = KINDS[row.kind].link
        match link:
            case CopyLink.PEER:
                copied = lowered.buffers[row.writes[0]]
                return (f"device {row.place} to {copied.memory}",)
            case CopyLink.TO_HOST | CopyLink.FROM_HOST:
                return (f"device {row.place} host",)
            case CopyLink.BATCH | None:
                return ()
            case _:
                assert_never(link)

    return links


def simulate(
    lowered: Lowered,
    seconds_of: Callable[[Row], float],
    links_of: Links | None = None,
    temporary_bytes: Sequence[int] = (),
    *,
    buffers_wait: bool = False,
) -> Timeline:
    """Simulates a lowered step.

    Args:
        lowered: the rows and buffers of the step.
        seconds_of: how long a row takes if it runs alone.
        links_of: returns the names of the links that a copy occupies. Copies that name the same
            link take turns on it. By default, `links_between_devices`.
        temporary_bytes: for each row, the bytes that its program needs while it runs.
        buffers_wait: whether a new buffer can be used only when the work that its device
            already has in its queue is done.
    """
    rows, buffers = lowered.rows, lowered.buffers
    numbers = [buffer.memory for buffer in buffers]
    numbers += [row.place for row in rows]
    devices = 1 + max(numbers, default=-1)
    # Devices come first among the resources; links get numbers in the order in which they appear.
    names = {f"device {d}": d for d in range(devices)}
    links_of = links_of or links_between_devices(lowered)
    occupies: list[tuple[int, ...]] = []
    seconds: list[float] = []
    for row in rows:
        computes = KINDS[row.kind].computes
        resources = (f"device {row.place}",) if computes else links_of(row)
        taken = [names.setdefault(name, len(names)) for name in resources]
        occupies.append(tuple(taken))
        seconds.append(float(seconds_of(row)) if resources else 0.0)
    work = TaskGraph(
        list(_waits(lowered, occupies, buffers_wait=buffers_wait)),
        occupies,
        range(devices),
        lambda i: str(rows[i]),
    )
    starts_s = np.array(work.starts_s(seconds))
    ends_s = starts_s + seconds
    peak_bytes = tuple(peak.bytes for peak in peaks(lowered, devices, temporary_bytes))
    return Timeline(
        tasks=rows,
        starts_s=starts_s,
        ends_s=ends_s,
        occupies=occupies,
        resources=tuple(names),
        devices=devices,
        curves=_curves(lowered, devices, starts_s, ends_s, temporary_bytes),
        peak_bytes=peak_bytes,
    )


def _waits(
    lowered: Lowered,
    occupies: Sequence[tuple[int, ...]],
    *,
    buffers_wait: bool,
) -> Iterator[Sequence[int]]:
    """Yields the rows that each row waits for, by the rules of the module's docstring.

    A row that takes no time has no resources in `occupies`.
    """
    rows, buffers = lowered.rows, lowered.buffers
    writer: dict[int, int] = {}  # by buffer: the last row that wrote it
    readers: dict[int, list[int]] = {}  # by buffer: the rows that have read it since
    programs: dict[int, list[int]] = {}  # by device: the rows of its programs so far
    freed: dict[int, int] = {}  # by device: its last FREE
    for i, row in enumerate(rows):
        info = KINDS[row.kind]
        touched = (*row.reads, *row.writes)
        needs = {writer[b] for b in touched if b in writer}
        for b in row.writes:
            needs.update(readers.pop(b, ()))
        # A row waits for the last FREE of its device. A copy also waits for that of the device
        # where it arrives.
        arriving = [buffers[b].memory for b in row.writes]
        filled = {row.place, *arriving}
        needs.update(freed[d] for d in filled if d in freed)
        before = programs.setdefault(row.place, [])
        # The program whose end frees the memory that a copy needs.
        match info.link:
            case CopyLink.FROM_HOST:
                needs.update(before[-1:])
            case CopyLink.BATCH:
                needs.update(before[-2:-1] if occupies[i] else before[-1:])
            case CopyLink.PEER:
                if buffers_wait:
                    at_receiver = programs.get(arriving[0], ())
                    needs.update(at_receiver[-1:])
            case CopyLink.TO_HOST | None:
                pass
            case _:
                assert_never(info.link)
        match info.runs:
            case Runs.LAYER | Runs.PROGRAM:
                before.append(i)
            case Runs.WAIT:  # FREE, or RECEIPT, which waits for a copy to another process
                freed[row.place] = i
            case Runs.COPY | Runs.NOTHING:
                pass
            case _:
                assert_never(info.runs)
        yield sorted(needs)
        for b in row.writes:
            writer[b] = i
        for b in row.reads:
            readers.setdefault(b, []).append(i)


def _curves(
    lowered: Lowered,
    devices: int,
    starts_s: np.ndarray,
    ends_s: np.ndarray,
    temporary_bytes: Sequence[int],
) -> tuple[Curve, ...]:
    """Makes the curves of bytes over time, one for each device and a last one for the host.

    A buffer counts from the start of the row that makes it to the last end of a row that
    reads or writes it.

    Args:
        lowered: the rows and buffers of the step.
        devices: the number of devices.
        starts_s: when each row starts.
        ends_s: when each row ends.
        temporary_bytes: for each row, the bytes that its program needs; empty if not known.
    """
    buffers = lowered.buffers
    base = [0] * (devices + 1)
    for buffer in buffers[: lowered.persistent]:
        base[buffer.memory] += buffer.bytes
    changes: list[_Changes] = [[] for _ in base]
    touched_s: dict[int, float] = {}  # by buffer: when all rows so far that touch it have ended
    for i, (born, dead) in enumerate(lowered.changes()):
        row = lowered.rows[i]
        start_s = float(starts_s[i])
        end_s = float(ends_s[i])
        for b in (*row.reads, *row.writes):
            touched_s[b] = max(end_s, touched_s.get(b, 0.0))
        for b in born:
            buffer = buffers[b]
            changes[buffer.memory].append((start_s, buffer.bytes))
        for b in dead:
            buffer = buffers[b]
            changes[buffer.memory].append((touched_s[b], -buffer.bytes))
        temporary = temporary_bytes[i] if temporary_bytes else 0
        if temporary:
            changes[row.place] += [(start_s, temporary), (end_s, -temporary)]
    curves = [Curve.of(f"device {d}", changes[d], base[d]) for d in range(devices)]
    return (*curves, Curve.of("host", changes[HOST], base[HOST]))


def simulate_lists(
    lists: TaskLists,
    stages: Sequence[StageLoad],
    *,
    shared_link: bool = False,
    machines: tuple[tuple[int, ...], ...] = (),
) -> Timeline:
    """Simulates task lists at the level of whole stages, as planners do.

    The lists have forwards (F), backwards (B), halves of backwards (I, W) and updates (U). Copies
    and other tasks that follow from these are added (see `jvpipe.simulate.stages`).

    Args:
        lists: for each device, its tasks in order.
        stages: the seconds and bytes of each stage.
        shared_link: whether sends between devices take the links to the host, as swaps do.
        machines: for each place, the machine of each device there; empty if no networks are shared.

    Raises:
        ValueError: the lists cannot progress; the message says which task waits for which others.

    >>> from jvpipe.schedules.one_f_one_b import one_f_one_b
    >>> work = simulate_lists(one_f_one_b(4, 8), [StageLoad(1.0, 2.0)] * 4)
    >>> work.step_s, round(work.bubble_fraction, 4)  # (8 + 4 - 1) * 3, (4 - 1) / (8 + 4 - 1)
    (33.0, 0.2727)
    """
    parts_s = [stage.parts_s for stage in stages]
    features = Features.of(
        parts_s,
        shared=shared_link,
        swaps=any(stage.swapped_bytes for stage in stages),
        machines=machines,
    )
    work = stage_work(lists, features)
    seconds = work.seconds(parts_s)
    starts_s = np.array(work.work.starts_s(seconds))
    ends_s = starts_s + seconds
    curves = _stage_curves(work, stages, starts_s, ends_s)
    return Timeline(
        tasks=work.tasks,
        starts_s=starts_s,
        ends_s=ends_s,
        occupies=work.work.occupies,
        resources=work.resources,
        devices=len(lists),
        curves=curves,
        peak_bytes=tuple(curve.most_bytes for curve in curves),
    )


def _stage_curves(
    work: StageWork,
    stages: Sequence[StageLoad],
    starts_s: np.ndarray,
    ends_s: np.ndarray,
) -> tuple[Curve, ...]:
    """Makes the curves of bytes over time, one for each device and a last one for the host.

        bytes       when they are on the device
        static      always
        kept        from the start of F to the end of B, or of I if B is split
        swapped     as kept, except from the end of OUT to the start of IN
        handed      from the end of I to the end of W

    On the host, swapped bytes count from the start of OUT to the end of IN.

    Args:
        work: the tasks that have run.
        stages: the seconds and bytes of each stage.
        starts_s: when each task starts.
        ends_s: when each task ends.
    """
    devices = range(1 + max(work.places))
    changes: list[_Changes] = [[] for _ in devices]
    host: _Changes = []
    times = zip(
        work.tasks,
        starts_s.tolist(),
        ends_s.tolist(),
        strict=True,
    )
    for (s, kind, _), start_s, end_s in times:
        load = stages[s]
        left_bytes = load.kept_bytes + load.swapped_bytes
        device = changes[work.places[s]]
        info = KINDS[kind]
        match kind:
            case Kind.F | Kind.B | Kind.I | Kind.W:
                size = info.in_flight * left_bytes + info.between * load.handed_bytes
                device.append((start_s if info.in_flight > 0 else end_s, size))
            case Kind.OUT | Kind.IN:
                filled, freed = (host, device) if info.link is CopyLink.TO_HOST else (device, host)
                filled.append((start_s, load.swapped_bytes))
                freed.append((end_s, -load.swapped_bytes))
            case Kind.R | Kind.SEND | Kind.RETURN | Kind.REDUCE | Kind.U:
                pass  # static_bytes include the bytes that these tasks need while they run
            case _:
                raise AssertionError(f"nobody says what {kind} holds of a stage's bytes")
    static = [0] * len(devices)
    for s, load in enumerate(stages):
        static[work.places[s]] += load.static_bytes
    names = work.resources
    curves = [Curve.of(names[d], changes[d], static[d]) for d in devices]
    return (*curves, Curve.of("host", host))
