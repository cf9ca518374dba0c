"""What a run holds, and may hold: bytes per device as they are counted, and limits on them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jvpipe._jax import Device, devices_in
from jvpipe.ir.buffers import HOST, Peak
from jvpipe.ir.layers import Array
from jvpipe.runtime.engine.versions import VersionLedger

Identity = tuple[str, Array]
"""The kind, path, shape and type of an array: what tells it from the other arrays of any model."""


class MemoryLimitExceeded(Exception):  # noqa: N818 - the name is part of the contract
    """A memory limit that cannot be kept; `smallest_limit_bytes` is one that would do."""

    def __init__(self, message: str, smallest_limit_bytes: int) -> None:
        super().__init__(message)
        self.smallest_limit_bytes = smallest_limit_bytes


@dataclass
class Ledger:
    """Counts the bytes held per device, now and at most, since the pipeline was initialised.

    The controller counts each row as it dispatches it, so what the ledger says follows from the
    order of dispatch, not from when programs run. It agrees with the buffer table that planners and
    the simulator read.

    Attributes:
        devices: by place.
        versions: which weights each forward and backward read.
        live: bytes held now, by place, and last on the host.
        peak: the most bytes held at once, of each device.
    """

    devices: tuple[Device, ...]
    versions: VersionLedger = field(default_factory=VersionLedger)
    live: list[int] = field(default_factory=list)
    peak: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.live = [0] * (len(self.devices) + 1)
        self.peak = [0] * (len(self.devices) + 1)

    def begin(self) -> None:
        """Begins to count again for a run that has nothing of the one before."""
        # In place: the controller keeps both lists at hand while it dispatches.
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
        """Counts bytes that a device holds no longer.

        Args:
            device: its index; `HOST` for the host.
            size: bytes.
        """
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
    """Returns values by device; each device of a group has what its place has."""
    by_place = zip(devices, values, strict=False)  # the host's is left out
    return {device: size for place, size in by_place for device in devices_in(place)}


@dataclass(frozen=True, slots=True)
class Away:
    """Stands for an array that another `process` has parked."""

    process: int


def parked_bytes(parked: Mapping[Identity, Any]) -> int:
    """Returns the bytes of the arrays that this process has parked on its host."""
    return sum(array.bytes for (_, array), value in parked.items() if not isinstance(value, Away))


@dataclass(frozen=True)
class Limits:
    """The bytes that each device, and the host, may hold at any instant.

    Attributes:
        device_bytes: one number for all devices, or one for each; None if there is no limit.
        host_bytes: of the host; None if there is no limit.
        parked: arrays on the host which the present model lacks: they count beside what is swapped.
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
            idle: says when a peak is that is at no task.

        Raises:
            MemoryLimitExceeded: a device or the host would.
        """
        if self.device_bytes is not None:
            self._check_devices(peaks[:HOST], self.device_bytes, devices, idle)
        if self.host_bytes is not None:
            self._check_host(peaks[HOST], self.host_bytes, idle)

    def _check_devices(
        self,
        peaks: Sequence[Peak],
        limit: int | Sequence[int],
        devices: Sequence[Device],
        idle: str,
    ) -> None:
        limits = [limit] * len(peaks) if isinstance(limit, int) else limit
        over = [peak.bytes - limit for peak, limit in zip(peaks, limits, strict=True)]
        if max(over) <= 0:
            return
        d = over.index(max(over))
        # One limit for all devices has to suffice for the fullest, which need not be the one
        # furthest over its own.
        fullest = max(peak.bytes for peak in peaks)
        raise _exceeded(str(devices[d]), peaks[d], limits[d], idle, fullest)

    def _check_host(self, peak: Peak, limit: int, idle: str) -> None:
        parked = parked_bytes(self.parked)
        if peak.bytes + parked <= limit:
            return
        holders = (*peak.holders, ("parked", parked)) if parked else peak.holders
        peak = replace(peak, bytes=peak.bytes + parked, holders=holders)
        raise _exceeded("the host", peak, limit, idle, fullest=0)


def _exceeded(place: str, peak: Peak, limit: int, idle: str, fullest: int) -> MemoryLimitExceeded:
    """Returns the error.

    A limit that is one for all devices must be at least what the `fullest` holds.
    """
    holders = ", ".join(f"{owner} {size:,}" for owner, size in peak.holders[:4])
    task = f"at task {peak.row}" if peak.row else idle
    return MemoryLimitExceeded(
        f"{place} would hold {peak.bytes:,} bytes {task}, the limit is {limit:,}. It holds {holders}. "
        f"A limit of {peak.bytes:,} bytes would do; so may more stages or more micro-batches",
        max(fullest, peak.bytes),
    )
