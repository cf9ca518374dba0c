"""The tensor table: the one mutable object of a run. It holds every array and counts every byte."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from jvpipe._jax import Device
from jvpipe.ir.buffers import Peak


class MemoryLimitExceeded(Exception):  # noqa: N818 - the name is part of the contract
    """A memory limit that cannot be kept; `smallest_limit_bytes` is one that would do."""

    def __init__(self, message: str, smallest_limit_bytes: int) -> None:
        super().__init__(message)
        self.smallest_limit_bytes = smallest_limit_bytes


@dataclass
class Ledger:
    """Bytes held per device, now and at most, since the pipeline was initialised."""

    devices: tuple[Device, ...]
    live: list[int] = field(default_factory=list)
    peak: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.live = [0] * len(self.devices)
        self.peak = [0] * len(self.devices)

    def hold(self, device: int, size: int, temporary: int = 0) -> None:
        """Counts bytes that a device holds from now on, and some that it holds for a moment."""
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


def _by_device(devices: Sequence[Device], values: Sequence[int]) -> dict[Device, int]:
    return dict(zip(devices, values, strict=True))


def check_limit(peaks: Sequence[Peak], devices: Sequence[Device], limit: int | None) -> None:
    """Raises `MemoryLimitExceeded` if a step would hold more than `limit` bytes on a device."""
    worst = max(peaks, key=lambda peak: peak.bytes)
    if limit is None or worst.bytes <= limit:
        return
    device = devices[peaks.index(worst)]
    holders = ", ".join(f"{owner} {size:,}" for owner, size in worst.holders[:4])
    task = f"at task {worst.row}" if worst.row else "between steps"
    raise MemoryLimitExceeded(
        f"{device} would hold {worst.bytes:,} bytes {task}, the limit is {limit:,}. It holds {holders}. "
        f"A limit of {worst.bytes:,} bytes would do; so may more stages or more micro-batches",
        worst.bytes,
    )
