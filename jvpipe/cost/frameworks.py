"""What runs programs on a device: how many kernels it makes of equations, and what they move."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Framework:
    """How a framework runs equations.

    Attributes:
        name: of it.
        fuses: whether elementwise operations are part of the kernels that read them; else each is a kernel.
        passes: how often the bytes of kernels that are not products pass, beside those of fused kernels.
        host_s: seconds of the host per kernel; where kernels take less the device waits.
    """

    name: str
    fuses: bool = True
    passes: float = 1.0
    host_s: float = 0.0


XLA = Framework("XLA")
