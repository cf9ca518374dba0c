"""The bytes that a run holds on each device: the ledger that counts them, and their limits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jvpipe.ir.buffers import HOST, Peak
from jvpipe.ir.layers import Array
from jvpipe.runtime.engine.versions import VersionLedger
from jvpipe.util.devices import Device, devices_in

Identity = tuple[str, Array]
"""The kind of an array (such as parameter), and its path, shape and type. If a model replaces
another one, arrays with equal identities count as one array, which keeps its values."""


class MemoryLimitExceeded(Exception):  # noqa: N818 - the name is part of the contract
    """A memory limit that cannot be kept; `smallest_limit_bytes` is a limit that can be kept."""

    def __init__(self, message: str, smallest_limit_bytes: int) -> None:
        super().__init__(message)
        self.smallest_limit_bytes = smallest_limit_bytes


@dataclass
class Ledger:
    """The bytes held on each device, now and at the peak since the run began.

    The controller counts the bytes of a row (a program or a copy) when it dispatches the row. So
    the counts follow from the order of dispatch, and not from when programs run. This is why they
    equal the counts of the buffer table, which planners and the simulator read.

    Attributes:
        devices: the device of each place.
        versions: which versions of the weights each forward and backward has read.
        live: the bytes held now at each place, and last on the host.
        peak: the most bytes held at once at each place, and last on the host.
    """

    devices: tuple[Device, ...]
    versions: VersionLedger = field(default_factory=VersionLedger)
    live: list[int] = field(default_factory=list)
    peak: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        memories = len(self.devices) + 1  # the last is the host
        self.live = [0] * memories
        self.peak = [0] * memories

    def begin(self) -> None:
        """Sets all counts to 0, for a new run."""
        # The lists are changed in place, because the controller refers to them while it dispatches.
        self.live[:] = self.peak[:] = [0] * len(self.live)
        self.versions = VersionLedger()

    def hold(self, device: int, size: int, temporary: int = 0) -> None:
        """Counts bytes that a device holds from now on.

        Args:
            device: the number of the device; `HOST` for the host.
            size: the bytes.
            temporary: further bytes that the device holds only for a moment.
        """
        self.live[device] += size
        self.peak[device] = max(self.peak[device], self.live[device] + temporary)

    def drop(self, device: int, size: int) -> None:
        """Counts bytes that a device no longer holds.

        Args:
            device: the number of the device; `HOST` for the host.
            size: the bytes.
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
        """Bytes on the host now: swapped values and parked arrays (`Away` says what these are)."""
        return self.live[HOST]

    @property
    def host_peak_bytes(self) -> int:
        """The most bytes on the host at once: swapped values and parked arrays."""
        return self.peak[HOST]


def _by_device(devices: Sequence[Device], values: Sequence[int]) -> dict[Device, int]:
    """Returns values by device; each device of a mesh gets the value of its place."""
    by_place = zip(devices, values, strict=False)  # the last value is the host's and is left out
    return {device: size for place, size in by_place for device in devices_in(place)}


@dataclass(frozen=True, slots=True)
class Away:
    """A stand-in for an array that another `process` has parked.

    An array of an earlier model is parked if it is kept on the host for a later model.
    """

    process: int


def parked_bytes(parked: Mapping[Identity, Any]) -> int:
    """Returns the bytes of the arrays that this process has parked on its host."""
    here = [array for (_, array), value in parked.items() if not isinstance(value, Away)]
    return sum(array.bytes for array in here)


@dataclass(frozen=True)
class Limits:
    """The bytes that each device, and the host, may hold at any instant.

    Attributes:
        device_bytes: one number for all devices, or one for each; None if there is no limit.
        host_bytes: the limit of the host; None if there is no limit.
        parked: arrays of earlier models that the host keeps. They count towards its limit.
    """

    device_bytes: int | Sequence[int] | None = None
    host_bytes: int | None = None
    parked: Mapping[Identity, Any] = field(default_factory=dict)

    def check(
        self,
        peaks: Sequence[Peak],
        devices: Sequence[Device],
        idle: str = "between steps",
    ) -> None:
        """Checks that no device, nor the host, would hold more bytes than its limit.

        Args:
            peaks: the most bytes of each device, and last of the host.
            devices: the devices, for the message.
            idle: for a peak outside of all tasks, says in the message when it occurs.

        Raises:
            MemoryLimitExceeded: a device or the host would exceed its limit.
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
        """Raises MemoryLimitExceeded if a device would hold more bytes than its limit."""
        limits = [limit] * len(peaks) if isinstance(limit, int) else limit
        pairs = zip(peaks, limits, strict=True)
        over = [peak.bytes - of_device for peak, of_device in pairs]
        if max(over) <= 0:
            return
        d = over.index(max(over))
        # The error suggests one limit for all devices, which must be enough for the fullest one.
        # This need not be the device that exceeds its own limit most.
        fullest = max(peak.bytes for peak in peaks)
        raise _exceeded(str(devices[d]), peaks[d], limits[d], idle, fullest)

    def _check_host(self, peak: Peak, limit: int, idle: str) -> None:
        """Raises MemoryLimitExceeded if the host would hold more bytes than its limit."""
        parked = parked_bytes(self.parked)
        if peak.bytes + parked <= limit:
            return
        holders = (*peak.holders, ("parked", parked)) if parked else peak.holders
        peak = replace(peak, bytes=peak.bytes + parked, holders=holders)
        raise _exceeded("the host", peak, limit, idle, fullest=0)


def _exceeded(
    place: str,
    peak: Peak,
    limit: int,
    idle: str,
    fullest: int,
) -> MemoryLimitExceeded:
    """Returns the error; the limit that it suggests is enough for `fullest` bytes on a device.

    Args:
        place: the name of the device, or of the host.
        peak: the most bytes that it would hold.
        limit: its limit in bytes.
        idle: for a peak outside of all tasks, says when it occurs.
        fullest: the most bytes that any device would hold.
    """
    holders = ", ".join(f"{owner} {size:,}" for owner, size in peak.holders[:4])
    task = f"at task {peak.row}" if peak.row else idle
    return MemoryLimitExceeded(
        f"{place} would hold {peak.bytes:,} bytes {task}, the limit is {limit:,}. "
        f"It holds {holders}. A limit of {peak.bytes:,} bytes would do; "
        "so may more stages or more micro-batches",
        max(fullest, peak.bytes),
    )
