"""The shares of their data sheets that devices reach, by families of devices,
with the source of each number.

The constants are few and none belongs to one device alone, so that they hold for devices that
nobody measured. `experiments/predicts` fitted those whose source says so to one half of the
published throughputs; the other half judges them.
"""

from dataclasses import dataclass

from jvpipe.cost.frameworks import Framework
from jvpipe.cost.tiling import Tiling


@dataclass(frozen=True, slots=True)
class Constant:
    """A number, and where it was measured."""

    value: float
    source: str


@dataclass(frozen=True, slots=True)
class Family:
    """Devices that reach the same shares of their makers' figures.

    Attributes:
        products: the share of the peak of float32 that tiles reach which fill all cores.
        memory: the share of the memory's rate that kernels reach.
        launch_s: seconds between two kernels.
        start: terms that each sum of a product seems to have beside its own (`Tiling`).
        winograd: the share of the rate of products that Winograd's algorithm reaches.
    """

    products: Constant
    memory: Constant
    launch_s: Constant
    start: Constant | None = None
    winograd: Constant | None = None

    def share(self, dtype: str) -> float:
        """Returns the share of the peak that products of a type reach.

        It was measured for float32 alone.
        """
        return self.products.value if dtype == "float32" else SHEET.products.value

    @property
    def tiling(self) -> Tiling | None:
        """The way products are dealt out to cores; None if it was not measured."""
        if self.start is None or self.winograd is None:
            return None
        return Tiling(self.start.value, self.winograd.value)


_BY_IMAGES = "experiments/predicts, fitted half: torchgpipe's AmoebaNet-D and U-Net on P40s"
_BY_BERT = "experiments/predicts, fitted half: DAPPLE's table VI and BERT-24 on V100s"
_MEMORY = Constant(
    0.8, "as for all presets; a V100's copies reach 790 of 900 GB/s (Warburton, 2018)"
)
_LAUNCH_S = Constant(3e-6, "as for all presets; experiments/predicts, fitted half, finds 2.97e-6")
_START = Constant(32.0, _BY_BERT)
_WINOGRAD = Constant(0.82, _BY_IMAGES)

SHEET = Family(
    Constant(0.6, "assumed: large products with their launches and tails"),
    _MEMORY,
    _LAUNCH_S,
)
"""The assumption where nothing was measured: products are dealt out without loss."""
PASCAL = Family(
    Constant(0.78, _BY_IMAGES),
    _MEMORY,
    _LAUNCH_S,
    _START,
    _WINOGRAD,
)
"""The P40."""
VOLTA = Family(
    Constant(0.85, _BY_BERT),
    _MEMORY,
    _LAUNCH_S,
    _START,
    _WINOGRAD,
)
"""Volta and Turing, with products of float32 on the ordinary cores."""

# An operation of PyTorch costs the host 5 to 25 us ("From PyTorch op to kernel launch").
_HOST_S = 1e-5
PYTORCH = Framework("PyTorch", passes=1.2, host_s=_HOST_S)
"""Norms and activations are kernels of their own. Fusing spares up to 23% of the bytes that BERT
moves (Ivanov et al., "Data movement is all you need", MLSys 2021): 1.3 times; experiments/predicts,
fitted half, finds 1.2 times.
"""
TENSORFLOW = Framework("TensorFlow 1", fuses=False, host_s=_HOST_S)
"""Each operation is a kernel, without XLA."""
