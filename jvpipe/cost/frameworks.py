"""Frameworks that run programs: how many kernels they make of equations,
and how many bytes these move.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Framework:
    """How a framework runs equations.

    Attributes:
        name: of it.
        fuses: whether elementwise operations join the kernels that read them; if not, each is a
            kernel.
        passes: the bytes that kernels other than products move, in units of those that fused
            kernels move.
        host_s: seconds of the host per kernel; the device waits if its kernels take less.
    """

    name: str
    fuses: bool = True
    passes: float = 1.0
    host_s: float = 0.0


XLA = Framework("XLA")
