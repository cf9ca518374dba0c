"""The tensor table: the one mutable object of a run. It holds every array and counts every byte."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jvpipe._jax import Device, devices_in
from jvpipe.ir.buffers import HOST, Peak
from jvpipe.ir.layers import Array
from jvpipe.runtime.versions import VersionLedger

Identity = tuple[str, Array]
"""What tells an array of one model from those of others: its kind, path, shape and type."""


class MemoryLimitExceeded(Exception):  # noqa: N818 - the name is part of the contract
    """A memory limit that cannot be kept; `smallest_limit_bytes` is one that would do."""

    def __init__(self, message: str, smallest_limit_bytes: int) -> None:
        super().__init__(message)
        self.smallest_limit_bytes = smallest_limit_bytes


@dataclass
class Ledger:
    """Bytes held per device, now and at most, since the pipeline was initialised; the last number is the host's.

    `versions` says which weights each forward and backward read.
    """

    devices: tuple[Device, ...]
    versions: VersionLedger = field(default_factory=VersionLedger)
    live: list[int] = field(default_factory=list)
    peak: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.live = [0] * (len(self.devices) + 1)
        self.peak = [0] * (len(self.devices) + 1)

    def begin(self) -> None:
        """Counts anew: a run begins, and nothing is left of another one."""
        self.live[:] = self.peak[:] = [0] * len(self.live)
        self.versions = VersionLedger()

    def hold(self, device: int, size: int, temporary: int = 0) -> None:
        """Counts bytes that a device holds from now on.

        Args:
            device: its index; `HOST` for the host.
            size: bytes.
            temporary: bytes beside these that it holds for a moment.
        """
        self.live[device] += size
        self.peak[device] = max(self.peak[device], self.live[device] + temporary)

    def drop(self, device: int, size: int) -> None:
        """Counts bytes that a device holds no longer."""
        self.live[device] -= size

    @property
    def live_bytes(self) -> dict[Device, int]:
        """Bytes held now, per device."""
        return _by_device(self.devices, self.live)

    @property
    def peak_bytes(self) -> dict[Device, int]:
        """The most bytes held at once, per device."""
        return _by_device(self.devices, self.peak)

    @property
    def host_bytes(self) -> int:
        """Bytes of swapped values and of parked arrays on the host now."""
        return self.live[HOST]

    @property
    def host_peak_bytes(self) -> int:
        """The most bytes of swapped values and of parked arrays on the host at once."""
        return self.peak[HOST]


def _by_device(devices: Sequence[Device], values: Sequence[int]) -> dict[Device, int]:
    """By each device that there is: what a group holds, each of its devices does."""
    return {
        device: size
        for place, size in zip(devices, values, strict=False)
        for device in devices_in(place)
    }


@dataclass(frozen=True, slots=True)
class Away:
    """Stands for an array that another `process` has parked."""

    process: int


def parked_bytes(parked: Mapping[Identity, Any]) -> int:
    """Bytes of the arrays that this process has parked on its host."""
    return sum(array.bytes for (_, array), value in parked.items() if not isinstance(value, Away))


@dataclass(frozen=True)
class Limits:
    """Bytes that each device, and the host, may hold at any instant: one number for all devices, or one for each.

    On the host `parked` arrays, which the present model lacks, lie beside what is swapped.
    """

    device_bytes: int | Sequence[int] | None = None
    host_bytes: int | None = None
    parked: Mapping[Identity, Any] = field(default_factory=dict)

    def check(
        self, peaks: Sequence[Peak], devices: Sequence[Device], idle: str = "between steps"
    ) -> None:
        """Checks that no device, nor the host, would hold more bytes than its limit.

        Args:
            peaks: the most bytes of each device, and last of the host.
            devices: for the message.
            idle: says when that is if it is at no task.

        Raises:
            MemoryLimitExceeded: it would.
        """
        own, host, beside = peaks[:HOST], peaks[HOST], parked_bytes(self.parked)
        if self.device_bytes is not None:
            given = self.device_bytes
            limits = [given] * len(own) if isinstance(given, int) else given
            over = [peak.bytes - limit for peak, limit in zip(own, limits, strict=True)]
            if max(over) > 0:
                d = over.index(max(over))
                raise _exceeded(
                    str(devices[d]), own[d], limits[d], idle, max(peak.bytes for peak in own)
                )
        if self.host_bytes is not None and host.bytes + beside > self.host_bytes:
            holders = (*host.holders, ("parked", beside)) if beside else host.holders
            raise _exceeded(
                "the host",
                replace(host, bytes=host.bytes + beside, holders=holders),
                self.host_bytes,
                idle,
                0,
            )


def _exceeded(place: str, peak: Peak, limit: int, idle: str, most: int) -> MemoryLimitExceeded:
    """The error; one limit for all devices must be at least the `most` that one holds."""
    holders = ", ".join(f"{owner} {size:,}" for owner, size in peak.holders[:4])
    task = f"at task {peak.row}" if peak.row else idle
    return MemoryLimitExceeded(
        f"{place} would hold {peak.bytes:,} bytes {task}, the limit is {limit:,}. It holds {holders}. "
        f"A limit of {peak.bytes:,} bytes would do; so may more stages or more micro-batches",
        max(most, peak.bytes),
    )
