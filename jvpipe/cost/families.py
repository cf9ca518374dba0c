"""What devices of a kind reach of their data sheets, and who measured it.

Few constants, none of which belongs to a device alone: so what is known of a device at hand holds for one that is not.
`experiments/predicts` has found those that are marked so here, from what others printed, and judges them by what was
kept from it.
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
    """Devices that reach the same shares of what their makers state.

    Attributes:
        products: of the peak of float32, by tiles that fill all cores.
        memory: of the rate of the memory, by kernels that read and write all of it.
        launch_s: between two kernels.
        start: terms that each sum of a product seems to have beside its own (`Tiling`).
        winograd: of the rate of products, by Winograd's algorithm.
    """

    products: Constant
    memory: Constant
    launch_s: Constant
    start: Constant | None = None
    winograd: Constant | None = None

    def share(self, dtype: str) -> float:
        """The share of the peak that products of a type reach; only of float32 was it measured."""
        return self.products.value if dtype == "float32" else SHEET.products.value

    @property
    def tiling(self) -> Tiling | None:
        """How its products are dealt out, if that was measured."""
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
"""What is assumed where nothing was measured; products are dealt out without loss then."""
PASCAL = Family(Constant(0.78, _BY_IMAGES), _MEMORY, _LAUNCH_S, _START, _WINOGRAD)
"""The P40."""
VOLTA = Family(Constant(0.85, _BY_BERT), _MEMORY, _LAUNCH_S, _START, _WINOGRAD)
"""Volta and Turing, products of float32 on their cores."""

_HOST_S = (
    1e-5  # an operation of PyTorch costs the host 5 to 25 us ("From PyTorch op to kernel launch")
)
PYTORCH = Framework("PyTorch", passes=1.2, host_s=_HOST_S)
"""Norms and activations are kernels of their own. Fusing spares up to 23% of the bytes that BERT moves (Ivanov et al.,
"Data movement is all you need", MLSys 2021): 1.3 times; experiments/predicts, fitted half, finds 1.2 times."""
TENSORFLOW = Framework("TensorFlow 1", fuses=False, host_s=_HOST_S)
"""Each operation is a kernel, without XLA."""
