"""What share of the rates in its data sheet a device reaches, by family, with the sources.

A family is a set of devices that are assumed to reach the same shares of their makers' figures. A
constant belongs to a family, not to one device. So a device that has not been measured can use the
constants of its family. The comment above a constant is its source. If the comment says "fitted
half", `experiments/predicts` fitted the constant to one half of the published throughputs, and the
other half judges the result.
"""

from dataclasses import dataclass

from jvpipe.cost.frameworks import Framework
from jvpipe.cost.tiling import Tiling


@dataclass(frozen=True, slots=True)
class Family:
    """The shares of their makers' figures that the devices of a family reach.

    Attributes:
        products: the share of the peak rate of float32 that products reach if their tiles keep all
            cores busy.
        tiling: how the rate of products depends on their tiles; None if not measured.
        memory: the share of the memory's peak rate that kernels reach.
        launch_s: the fixed seconds that each kernel takes in addition to its work.
    """

    products: float
    tiling: Tiling | None = None
    # Assumed for all families. A V100's copies reach a bit more: 790 of 900 GB/s (Warburton, 2018).
    memory: float = 0.8
    # The same in all families; experiments/predicts, fitted half, finds 2.97e-6.
    launch_s: float = 3e-6

    def share(self, dtype: str) -> float:
        """Returns the share of the peak rate that products of a dtype reach.

        Only float32 was measured, so all other dtypes have the share that `SHEET` assumes.
        """
        return self.products if dtype == "float32" else SHEET.products


_TILING = Tiling(
    # experiments/predicts, fitted half: DAPPLE's table VI and BERT-24 on V100s
    start=32.0,
    # experiments/predicts, fitted half: torchgpipe's AmoebaNet-D and U-Net on P40s
    winograd=0.82,
)

# Assumed for large products. The share covers what a tiling would count, such as idle cores.
SHEET = Family(0.6)
"""The family of all devices whose family was not measured. Without a tiling, all products reach the
same share of the peak rate.
"""
# experiments/predicts, fitted half: torchgpipe's AmoebaNet-D and U-Net on P40s
PASCAL = Family(0.78, _TILING)
"""The family of the P40."""
# experiments/predicts, fitted half: DAPPLE's table VI and BERT-24 on V100s
VOLTA = Family(0.85, _TILING)
"""The family of Volta and Turing GPUs, whose tensor cores cannot multiply float32. So float32 runs
on their ordinary cores.
"""

# The host needs 5 to 25 us for an operation of PyTorch ("From PyTorch op to kernel launch").
_HOST_S = 1e-5
PYTORCH = Framework("PyTorch", passes=1.2, host_s=_HOST_S)
"""PyTorch without a compiler, where norms and activations are kernels of their own.

Fusing would avoid up to 23% of the bytes that BERT moves (Ivanov et al., "Data movement is all you
need", MLSys 2021). So PyTorch moves up to 1 / (1 - 0.23) = 1.3 times the bytes of fused kernels. On
the fitted half of experiments/predicts, the best factor is 1.2.
"""
TENSORFLOW = Framework("TensorFlow 1", fuses=False, host_s=_HOST_S)
"""TensorFlow 1 without XLA, where each operation is a kernel."""
