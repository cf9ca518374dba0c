"""Two chunks per device in a vee, backwards in two halves (zb-v, v-half, v-min: Controllable Memory, NeurIPS 2024).

The first chunk of device d is stage d, the second one stage 2S - 1 - d: the last device's second
chunk follows its first at once, and loss and embedding share device 0.

    F<m>, I<m>, W<m>: forward and the halves of the backward of micro-batch m; small letters: of the device's second
    chunk. zb-v, S = 3, M = 5:

    device 0  F0 F1 F2 F3 F4 f0 i0 w0 f1 i1 w1 f2 i2 w2 I0 W0 f3 i3 w3 I1 W1 f4 i4 w4 I2 W2 I3 W3 I4 W4
    device 1     F0 F1 F2 f0 F3 f1 i0 w0 f2 i1 w1 F4 I0 W0 f3 i2 w2 I1 W1 f4 i3 w3 I2 i4 I3 W2 I4 W3 w4 W4
    device 2        F0 f0 F1 f1 F2 f2 i0 w0 F3 I0 W0 f3 i1 w1 F4 I1 W1 f4 i2 w2 I2 i3 I3 i4 I4 W2 w3 w4 W3 W4

    v-half, S = 3, M = 4:

    device 0  F0 F1          f0 i0 w0 F2    f1 i1 w1 I0 W0 F3 f2 i2 w2 I1 W1 f3 i3 w3 I2 W2          I3 W3
    device 1     F0       f0 F1    i0 w0 f1 F2 I0 i1 W0 f2 w1 F3 I1 i2 W1 f3 w2    I2 i3 W2 w3    I3 W3
    device 2        F0 f0       F1 f1 i0 w0 I0 W0 F2 f2 i1 w1 I1 W1 F3 f3 i2 w2 I2 W2    i3 w3 I3 W3

zb-v ("full") holds as much as 1F1B, S micro-batches of a device, v-half at most S / 2 + 1.5 and
v-min ("least") at most S / 3 + 1.5. The latter two repeat a block of six slots per micro-batch;
only its order counts.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, assert_never

from jvpipe.ir.kinds import Kind
from jvpipe.ir.task import Task, TaskLists
from jvpipe.schedules.schedule import Schedule
from jvpipe.util.brief import brief

Memory = Literal["full", "half", "least"]
NAMES: Mapping[Memory, str] = {"full": "zb-v", "half": "v-half", "least": "v-min"}
PERIOD_SLOTS = 6
"""What a micro-batch takes of a device: F, I and W of two chunks."""


@dataclass(frozen=True)
class VeeLists:
    """The lists of `VSchedule`.

    A device's work is written in letters: small ones are of its second chunk.

    >>> from jvpipe.ir.task import text
    >>> text(VeeLists("half")(2, 1)[0])
    '0F0 3F0 3I0 3W0 0I0 0W0'
    """

    memory: Memory = "full"

    def __call__(self, devices: int, microbatches: int) -> TaskLists:
        """Makes a list per device."""
        return tuple(self._device(d, devices, microbatches) for d in range(devices))

    def _device(self, d: int, devices: int, microbatches: int) -> tuple[Task, ...]:
        match self.memory:
            case "full":
                # The phases need some micro-batches more than a short step has: these are left out.
                work = _full(d, devices, max(microbatches, 2 * devices - 1))
            case "half" | "least":
                work = _repeated(_slots(self.memory, d, devices), microbatches)
            case _:
                assert_never(self.memory)
        # There and back: the second chunk of the last device comes right after its first.
        stage = {True: 2 * devices - 1 - d, False: d}  # by whether it is of the second chunk
        return tuple(
            Task(stage[letter.islower()], Kind(letter.upper()), m)
            for letter, m in work
            if m < microbatches
        )


def _full(d: int, devices: int, microbatches: int) -> Iterator[tuple[str, int]]:
    """Yields the phases of zb-v on device d.

    F               until the first micro-batch comes back from the last device
    fF              while it goes on to device 0, where the loss is
    fiw             until the pipeline is full
    FIWfiw          steady, as long as there is something to begin
    Ii, IW, w, W    the drain
    """
    done = dict.fromkeys("FfIiWw", 0)

    def left(letter: str) -> int:
        return microbatches - done[letter]

    def run(letters: str, times: int = 1) -> Iterator[tuple[str, int]]:
        for letter in letters * times:
            yield letter, done[letter]
            done[letter] += 1

    yield from run("F", 2 * (devices - d) - 1)
    yield from run("fF", d)
    yield from run("fiw", devices - d)
    while left("f"):
        yield from run("F" * min(1, left("F")) + "IWfiw")
    yield from run("Ii", d)
    yield from run("IW", devices - d)
    yield from run("w", left("w"))
    yield from run("W", left("W"))


def _slots(memory: Literal["half", "least"], d: int, devices: int) -> dict[str, int]:
    """Returns the slot of each task of the first micro-batch on device d.

    Micro-batch m has slot + 6 m. The `gap` keeps two tasks of a device from having slots that are
    equal modulo 6: then those of all micro-batches would collide.
    """
    S = devices
    if memory == "half":
        gap = 0 if S % 2 else 3
        return {
            "F": 2 * d,
            "f": 3 * S - 2 - d,
            "i": 3 * S - 1 + gap + 2 * d,
            "I": 6 * S - 2 + gap - d,
        }
    gap = 0 if S % 3 else 2
    return {"F": d, "f": 2 * S - 1 - d, "i": 2 * S + gap + d, "I": 4 * S - 1 + gap - d}


_LATER = {"i": "w", "I": "W"}


def _repeated(slots: Mapping[str, int], microbatches: int) -> Iterator[tuple[str, int]]:
    """Yields each micro-batch's tasks, six slots after those of the one before; W and w fill the slots between."""
    at: dict[int, tuple[str, int]] = {}
    for letter, slot in slots.items():
        for m in range(microbatches):
            at[slot + PERIOD_SLOTS * m] = letter, m
    late: deque[tuple[str, int]] = deque()  # second halves that wait for a slot
    for slot in range(max(at) + 1):  # an empty slot is for a second half, if one waits
        if slot in at:
            letter, m = at[slot]
            yield letter, m
            if letter in _LATER:
                late.append((_LATER[letter], m))
        elif late:
            yield late.popleft()
    yield from late


class VSchedule(Schedule):
    """Two chunks per device, there and back; `memory` says of how much: that of 1F1B, half of it, or a third.

    >>> VSchedule().name, VSchedule(memory="half").device_of(5, 3), VSchedule(memory="half").device_of(3, 3)
    ('zb-v', 0, 2)
    """

    def __init__(self, *, memory: Memory = "full") -> None:
        if memory not in tuple(NAMES):
            raise ValueError(f"memory must be one of {', '.join(NAMES)}, not {brief(memory)}")
        super().__init__(name=NAMES[memory], lists=VeeLists(memory), chunks=2, vee=True)
