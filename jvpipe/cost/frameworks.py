"""Frameworks that run programs: how they turn equations into kernels, and what a kernel costs."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Framework:
    """The way in which a framework runs equations.

    Attributes:
        name: the name of the framework.
        fuses: whether elementwise operations become part of the kernels that read their results; if
            not, each operation is a kernel.
        passes: the bytes that a kernel without products moves, per byte that XLA's kernels move.
        host_s: the seconds that the host needs to launch a kernel. If a device's kernels take less,
            the device waits for the host.
    """

    name: str
    fuses: bool = True
    passes: float = 1.0
    host_s: float = 0.0


XLA = Framework("XLA")
