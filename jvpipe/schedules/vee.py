"""Schedules with two chunks per device in a vee, and backwards in two halves.

They are zb-v, v-half and v-min of the paper "Controllable Memory" (NeurIPS 2024). A chunk is one of
several stages on one device. With S devices, device d has stage d as its first chunk and
stage 2 S - 1 - d as its second. So the last device runs its second chunk directly after its first.
Device 0 has both the first stage (with the embedding) and the last stage (with the loss).

F<m> is the forward of micro-batch m, I<m> and W<m> are the halves of its backward. Small letters
stand for the device's second chunk. In the drawings a column is one unit of time, and each task
takes one unit. zb-v, for S = 3 devices and M = 5 micro-batches:

    device 0  F0 F1 F2 F3 F4 f0 i0 w0 f1 i1 w1 f2 i2 w2 I0 W0 f3 i3 w3 I1 W1 f4 i4 w4 I2 W2 I3 W3 I4 W4
    device 1     F0 F1 F2 f0 F3 f1 i0 w0 f2 i1 w1 F4 I0 W0 f3 i2 w2 I1 W1 f4 i3 w3 I2 i4 I3 W2 I4 W3 w4 W4
    device 2        F0 f0 F1 f1 F2 f2 i0 w0 F3 I0 W0 f3 i1 w1 F4 I1 W1 f4 i2 w2 I2 i3 I3 i4 I4 W2 w3 w4 W3 W4

v-half, for S = 3 and M = 4:

    device 0  F0 F1          f0 i0 w0 F2    f1 i1 w1 I0 W0 F3 f2 i2 w2 I1 W1 f3 i3 w3 I2 W2          I3 W3
    device 1     F0       f0 F1    i0 w0 f1 F2 I0 i1 W0 f2 w1 F3 I1 i2 W1 f3 w2    I2 i3 W2 w3    I3 W3
    device 2        F0 f0       F1 f1 i0 w0 I0 W0 F2 f2 i1 w1 I1 W1 F3 f3 i2 w2 I2 W2    i3 w3 I3 W3

The three differ in how many micro-batches a device holds at most. A micro-batch that is held on one
of the two chunks, where its W has not run, counts one half:

    name      `memory`    micro-batches
    zb-v      "full"      S, as under 1F1B
    v-half    "half"      S / 2 + 1, or S / 2 + 1 / 2 if S is odd
    v-min     "least"     at most S / 3 + 4 / 3

v-half and v-min give F, f, I and i of each micro-batch a numbered slot of time. From one
micro-batch to the next, each number rises by six. W and w fill the slots that are left empty. Only
the order of the slots is used, not how long tasks take.
"""

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Literal

from jvpipe.ir.kinds import Kind
from jvpipe.ir.task import Task, TaskLists
from jvpipe.schedules.schedule import Schedule
from jvpipe.util.brief import brief

Memory = Literal["full", "half", "least"]
NAMES: Mapping[Memory, str] = {"full": "zb-v", "half": "v-half", "least": "v-min"}
PERIOD_SLOTS = 6
"""The number of slots that a micro-batch takes on a device: F, I and W on each of two chunks."""


@dataclass(frozen=True)
class VeeLists:
    """The lists of `VSchedule`; `memory` is explained there.

    The code writes the work of a device in letters, as the drawings do.

    >>> from jvpipe.ir.task import text
    >>> text(VeeLists("half")(2, 1)[0])
    '0F0 3F0 3I0 3W0 0I0 0W0'
    """

    memory: Memory = "full"

    def __call__(self, devices: int, microbatches: int) -> TaskLists:
        """Makes a list per device."""
        return tuple(self._device(d, devices, microbatches) for d in range(devices))

    def _device(self, d: int, devices: int, microbatches: int) -> tuple[Task, ...]:
        """Makes the list of device d."""
        if self.memory == "full":
            # The phases need at least 2 S - 1 micro-batches. If a step has fewer, lists for that
            # many are made, and the tasks of the extra micro-batches are dropped below.
            work = _full(d, devices, max(microbatches, 2 * devices - 1))
        else:
            work = _repeated(_slots(self.memory, d, devices), microbatches)
        last = 2 * devices - 1
        tasks = []
        for letter, m in work:
            if m < microbatches:
                stage = d if letter.isupper() else last - d
                tasks.append(Task(stage, Kind(letter.upper()), m))
        return tuple(tasks)


def _full(d: int, devices: int, microbatches: int) -> Iterator[tuple[str, int]]:
    """Yields the tasks of device d under zb-v, in phases; each phase repeats some letters.

    letters         phase
    F               until the first micro-batch comes back from the last device
    fF              while that micro-batch goes on to device 0, which has the loss
    fiw             until the pipeline is full
    FIWfiw, IWfiw   the steady state, as long as forwards are left
    Ii, IW, w, W    the drain

    Args:
        d: the device.
        devices: the number of devices.
        microbatches: the number of micro-batches, at least 2 S - 1.
    """
    hops = devices - d
    letters = "F" * (2 * hops - 1) + "fF" * d + "fiw" * hops
    letters += "FIWfiw" * (microbatches - devices - hops + 1) + "IWfiw" * (hops - 1)
    letters += "Ii" * d + "IW" * hops + "w" * d + "W" * d
    done = Counter[str]()
    for letter in letters:
        yield letter, done[letter]
        done[letter] += 1


def _slots(memory: Literal["half", "least"], d: int, devices: int) -> dict[str, int]:
    """Returns the slots of F, f, I and i of the first micro-batch on device d.

    For micro-batch m the same task comes 6 m slots later. If two of the four slots were equal
    modulo 6, tasks of different micro-batches would collide. The `gap` prevents this.

    Args:
        memory: how much a device holds.
        d: the device.
        devices: the number of devices.
    """
    S = devices
    if memory == "half":
        gap = 0 if S % 2 else 3
        slots = 2 * d, 3 * S - 2 - d, 3 * S - 1 + gap + 2 * d, 6 * S - 2 + gap - d
    else:
        gap = 0 if S % 3 else 2
        slots = d, 2 * S - 1 - d, 2 * S + gap + d, 4 * S - 1 + gap - d
    return dict(zip("FfiI", slots, strict=True))


_LATER = {"i": "w", "I": "W"}


def _repeated(slots: Mapping[str, int], microbatches: int) -> Iterator[tuple[str, int]]:
    """Yields all tasks of a device, in the order of their slots.

    Micro-batch m has the given slots, each 6 m later. W and w fill the empty slots in between.
    """
    tasks = product(slots.items(), range(microbatches))
    at = {slot + PERIOD_SLOTS * m: (letter, m) for (letter, slot), m in tasks}
    late: deque[tuple[str, int]] = deque()  # second halves that wait for a slot
    for slot in range(max(at) + 1):  # the oldest second half that waits takes each empty slot
        if slot in at:
            letter, m = at[slot]
            yield letter, m
            if letter in _LATER:
                late.append((_LATER[letter], m))
        elif late:
            yield late.popleft()
    yield from late


class VSchedule(Schedule):
    """A schedule with two chunks per device in a vee.

    `memory` says how much a device holds: as much as under 1F1B ("full"), about half of that
    ("half"), or about a third ("least").

    >>> VSchedule().name, VSchedule(memory="half").device_of(5, 3), VSchedule(memory="half").device_of(3, 3)
    ('zb-v', 0, 2)
    """

    def __init__(self, *, memory: Memory = "full") -> None:
        if memory not in tuple(NAMES):
            raise ValueError(f"memory must be one of {', '.join(NAMES)}, not {brief(memory)}")
        super().__init__(name=NAMES[memory], lists=VeeLists(memory), chunks=2, vee=True)
