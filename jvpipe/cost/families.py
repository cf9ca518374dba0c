"""How much of a data sheet's rates each family of devices reaches, with the sources.

A family is a set of devices that are assumed to reach the same shares of their makers' figures.
There are few constants, and none belongs to one device alone. So they can be used for devices that
nobody has measured, too. If the source of a constant says "fitted half", `experiments/predicts`
fitted the constant to one half of the published throughputs, and the other half judges the result.
"""

from dataclasses import dataclass

from jvpipe.cost.frameworks import Framework
from jvpipe.cost.tiling import Tiling


@dataclass(frozen=True, slots=True)
class Constant:
    """A number with its source: where it was measured, or why it is assumed."""

    value: float
    source: str


@dataclass(frozen=True, slots=True)
class Family:
    """The shares of their makers' figures that the devices of a family reach.

    Attributes:
        products: the share of the peak rate of float32 that products reach if their tiles keep all
            cores busy.
        memory: the share of the memory's peak rate that kernels reach.
        launch_s: the seconds that each kernel takes beside its work.
        start: the terms that are added to each sum of a product (see `Tiling`).
        winograd: the share of the rate of products that Winograd's algorithm reaches.
    """

    products: Constant
    memory: Constant
    launch_s: Constant
    start: Constant | None = None
    winograd: Constant | None = None

    def share(self, dtype: str) -> float:
        """Returns the share of the peak rate that products of a dtype reach.

        It was measured for float32 alone, so all other dtypes have the assumed share of `SHEET`.
        """
        return self.products.value if dtype == "float32" else SHEET.products.value

    @property
    def tiling(self) -> Tiling | None:
        """The efficiency of products by how their tiles fill the cores; None if not measured."""
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
"""The family of all devices that nobody measured. It has no tiling: products use all cores."""
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
"""Volta and Turing, whose ordinary cores compute products of float32, not their tensor cores."""

# An operation of PyTorch takes the host 5 to 25 us ("From PyTorch op to kernel launch").
_HOST_S = 1e-5
PYTORCH = Framework("PyTorch", passes=1.2, host_s=_HOST_S)
"""PyTorch without a compiler, where norms and activations are kernels of their own.

Fusing would spare up to 23% of the bytes that BERT moves (Ivanov et al., "Data movement is all you
need", MLSys 2021), so PyTorch moves up to 1.3 times the bytes of fused kernels. The fitted half of
experiments/predicts finds 1.2 times.
"""
TENSORFLOW = Framework("TensorFlow 1", fuses=False, host_s=_HOST_S)
"""TensorFlow 1 without XLA, where each operation is a kernel."""
