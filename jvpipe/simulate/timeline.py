"""A simulated timeline: when each task ran on which resources, and the bytes held over time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jvpipe.ir.rows import Row
from jvpipe.ir.span import Level, Picture, Span
from jvpipe.ir.task import Task


class Curve(NamedTuple):
    """The bytes on a device or on the host over time: `bytes[i]` from `t_s[i]` on."""

    place: str
    t_s: Float[np.ndarray, " changes"]
    bytes: Int[np.ndarray, " changes"]

    @staticmethod
    def of(
        place: str,
        changes: Sequence[tuple[float, int]],
        base_bytes: int = 0,
    ) -> "Curve":
        """Makes a curve of changes, which may be given in any order.

        Changes at the same instant are added up first, so bytes that are removed make room for
        bytes that are added.

        Args:
            place: the name of the device or of the host.
            changes: pairs of a time in seconds and the bytes that are added or (negative) removed.
            base_bytes: the bytes that are held all the time.

        >>> curve = Curve.of("stage 0", [(1.0, 5), (0.0, 3), (1.0, -3)], base_bytes=10)
        >>> curve.t_s.tolist(), curve.bytes.tolist(), curve.most_bytes
        ([0.0, 1.0], [13, 15], 15)
        """
        seconds, sizes = zip((0.0, base_bytes), *changes, strict=True)  # a curve begins at 0
        times, group = np.unique(seconds, return_inverse=True)
        sums = np.zeros(len(times), int)  # all changes of an instant count as one
        np.add.at(sums, group, sizes)
        return Curve(place, times, sums.cumsum())

    @property
    def most_bytes(self) -> int:
        """The most bytes at any time."""
        return int(self.bytes.max())


@dataclass(frozen=True)
class Timeline:
    """A simulated run: when each task ran on which resources, and the bytes over time.

    Task i ran from `starts_s[i]` to `ends_s[i]` on the resources `occupies[i]`, which are indices
    into `resources`. The first `devices` resources are devices, and the others are links. `curves`
    has the bytes over time, one curve for each device and a last one for the host. `peak_bytes` has
    the peaks in the same order.

    If the tasks are rows (programs and copies, as the controller of a run dispatches them), a peak
    may differ from the largest number of its curve. The peak counts bytes in the order in which
    rows are dispatched, as the ledger of a run does. The curve counts bytes by simulated time.
    """

    tasks: Sequence[Task | Row]
    starts_s: Float[np.ndarray, " tasks"]
    ends_s: Float[np.ndarray, " tasks"]
    occupies: Sequence[tuple[int, ...]]
    resources: tuple[str, ...]
    devices: int
    curves: tuple[Curve, ...] = ()
    peak_bytes: tuple[int, ...] = ()

    @property
    def step_s(self) -> float:
        """The seconds from 0, where the simulation begins, to the last end."""
        return float(self.ends_s.max(initial=0.0))

    @cached_property
    def busy_s(self) -> dict[str, float]:
        """The seconds during which each resource worked, by its name."""
        busy_s = np.zeros(len(self.resources))
        durations_s = self.ends_s - self.starts_s
        for resources, seconds in zip(self.occupies, durations_s, strict=True):
            for r in resources:
                busy_s[r] += seconds
        return dict(zip(self.resources, busy_s.tolist(), strict=True))

    @property
    def bubble_fraction(self) -> float:
        """The share of the step in which devices are idle, on average over the devices."""
        if not self.step_s:
            return 0.0
        devices = self.resources[: self.devices]
        busy_s = sum(self.busy_s[name] for name in devices)
        return max(0.0, 1.0 - busy_s / (self.devices * self.step_s))  # sums are rounded

    def spans(self) -> Iterator[Span]:
        """Yields each task that took time, once for each resource that it occupied."""
        times = zip(
            self.tasks,
            self.starts_s.tolist(),
            self.ends_s.tolist(),
            self.occupies,
            strict=True,
        )
        for task, start_s, end_s, resources in times:
            if end_s <= start_s:  # it could not be seen in a picture
                continue
            args = {"stage": task.stage, "microbatch": task.microbatch}
            for r in resources:
                yield Span(
                    self.resources[r],
                    str(task),
                    start_s,
                    end_s,
                    task.kind,
                    args,
                )

    def picture(self) -> Picture:
        """Returns the tasks and the bytes over time in the form that pictures are drawn from."""
        levels: list[Level] = []
        for curve in self.curves:
            times_s = curve.t_s.tolist()
            sizes = curve.bytes.tolist()
            for t_s, size in zip(times_s, sizes, strict=True):
                levels.append(Level(curve.place, t_s, size))
        return Picture(tuple(self.spans()), tuple(levels))
