"""The clusters that have a name: those of the papers, and some with newer devices.

Rates are sustained rates: a figure of the maker, times the share that training programs reach. The
exceptions are CPU cores and copies between them, which have typical rates. To add a device or
cluster, add it here, from its data sheet. The shares are:

    products, memory    the share that the device's family reaches (`families.py`)
    links               0.8 of the raw rate in one direction: the share that large copies reach
                        through PCIe, NVLink, a TPU's ICI or a network

On devices that have TF32, products of `float32` have TF32's rate, because XLA uses TF32 by default.
"""

from collections.abc import Mapping
from dataclasses import replace

from jvpipe.cost.families import PASCAL, SHEET, VOLTA, Family
from jvpipe.cost.hardware import Accelerator, Cluster, Link
from jvpipe.util.devices import Device
from jvpipe.util.sizes import GIB

LINKS = 0.8
"""The share of a link's raw rate that large copies reach."""

_FAMILIES = {"Tesla P40": PASCAL, "RTX 2080 Ti": VOLTA, "V100 16 GB": VOLTA}
"""The devices whose families were measured, by name; all others have the family `SHEET`."""


def _family_of(name: str) -> Family:
    return _FAMILIES.get(name, SHEET)


def _gpu(
    name: str,
    memory_gib: int,
    memory_bytes_per_s: float,
    tflops: Mapping[str, float],
    vector_tflops: float,
    cores: int = 0,
) -> Accelerator:
    """Makes a GPU from its data sheet.

    Args:
        name: the name of the GPU, by which its family is found.
        memory_gib: the size of its memory.
        memory_bytes_per_s: the peak rate of its memory.
        tflops: the peak rate of its products, by dtype.
        vector_tflops: the peak rate of its float32 units, where a multiply-add counts as two
            operations.
        cores: the number of its multiprocessors; 0 if it is not known.
    """
    family = _family_of(name)
    return Accelerator(
        name,
        memory_gib * GIB,
        family.memory * memory_bytes_per_s,
        {dtype: family.share(dtype) * 1e12 * rate for dtype, rate in tflops.items()},
        launch_s=family.launch_s,
        elementwise_per_s=0.5e12 * vector_tflops,  # an operation takes as long as a multiply-add
        cores=cores,
        tiling=family.tiling,
    )


def _tpu(
    name: str,
    memory_gib: int,
    memory_bytes_per_s: float,
    tflops: float,
    vector_tflops: float,
    scratch_mib: int = 0,
) -> Accelerator:
    """Makes a TPU from its data sheet.

    On TPUs, products of float32 run as bfloat16 unless a program asks for more precision. So
    `tflops` is one rate for both. `scratch_mib` is the size of the on-chip memory; 0 if it is not
    modeled. The other arguments are those of `_gpu`.
    """
    rates = {"float32": tflops, "bfloat16": tflops}
    chip = _gpu(name, memory_gib, memory_bytes_per_s, rates, vector_tflops)
    return replace(chip, platform="tpu", scratch_bytes=scratch_mib * 2**20)


# From Ampere on, tensor cores multiply bfloat16, and also float32, which they round to TF32.
_AMPERE = {"float32": 156.0, "bfloat16": 312.0}
_HOPPER = {"float32": 495.0, "bfloat16": 989.0}

RTX_2080TI = _gpu(
    "RTX 2080 Ti",
    11,
    616e9,
    {"float32": 13.4, "float16": 53.8},
    13.4,
    68,
)
# The P40 has 24 GB, of which torchgpipe's paper counts 22.
P40 = _gpu(
    "Tesla P40",
    22,
    346e9,
    {"float32": 11.8, "float16": 11.8},
    11.8,
    30,
)
V100 = _gpu(
    "V100 16 GB",
    16,
    900e9,
    {"float32": 15.7, "float16": 125.0},
    15.7,
    80,
)
A100_40GB = _gpu("A100 40 GB", 40, 1555e9, _AMPERE, 19.5, 108)
A100_80GB = _gpu("A100 80 GB", 80, 2039e9, _AMPERE, 19.5, 108)
H100 = _gpu("H100 80 GB", 80, 3350e9, _HOPPER, 67.0, 132)
H200 = _gpu("H200 141 GB", 139, 4800e9, _HOPPER, 67.0, 132)
RTX_4090 = _gpu(
    "RTX 4090",
    24,
    1008e9,
    {"float32": 82.6, "bfloat16": 165.2},
    82.6,
    128,
)
TPU_V4 = _tpu("TPU v4", 32, 1228e9, 275.0, 8.6)
TPU_V5E = _tpu("TPU v5e", 16, 819e9, 197.0, 12.2, 128)
TPU_V5P = _tpu("TPU v5p", 95, 2765e9, 459.0, 28.0)
TPU_V6E = _tpu("TPU v6e", 32, 1640e9, 918.0, 14.4, 128)
CORE = Accelerator(
    "CPU core",
    4 * GIB,
    8e9,
    {"float32": 1e11, "bfloat16": 5e10},
    2e-6,
    1e10,
    "cpu",
)


def _link(gigabytes_per_s: float, latency_s: float) -> Link:
    return Link(LINKS * 1e9 * gigabytes_per_s, latency_s)


_PCIE3, _PCIE4, _PCIE5 = (_link(rate, 10e-6) for rate in (15.75, 31.5, 63.0))
# A V100 has six NVLinks, but only one or two lead to the same other V100, so one is counted. A pair
# of A100s or H100s uses all links of a device.
_NVLINK_V100, _NVLINK_A100, _NVLINK_H100 = (_link(rate, 5e-6) for rate in (25.0, 300.0, 450.0))
# The rate of one link of a TPU chip to a neighbor.
_ICI_50, _ICI_100 = (_link(rate, 2e-6) for rate in (50.0, 100.0))


def _cluster(
    name: str,
    device: Accelerator,
    devices_per_machine: int,
    machines: int,
    host: Link,
    network_gigabits_per_s: float,
    peer: Link | None = None,
) -> Cluster:
    """Makes a cluster whose machines are joined by a network.

    Args:
        name: the name of the cluster.
        device: the kind of all of its devices.
        devices_per_machine: the number of devices of each machine.
        machines: the number of machines.
        host: the link between each device and its host.
        network_gigabits_per_s: the raw rate of the network.
        peer: the link between devices of a machine; None if they send through the host's link.
    """
    return Cluster(
        name,
        device,
        devices_per_machine,
        machines,
        host,
        peer or host,
        network=_link(network_gigabits_per_s / 8, 30e-6),
        peer_uses_host=peer is None,
    )


_CLUSTERS = (
    # Clusters of papers.
    # vPipe: machines with four devices on PCIe 3, and 40 Gbps between machines.
    _cluster("2080ti", RTX_2080TI, 4, 2, _PCIE3, 40.0),
    # DAPPLE, table III: (a) eight devices per machine with NVLink, and 25 Gbps between machines;
    # (b) one device per machine at 25 Gbps; (c) one device per machine at 10 Gbps.
    _cluster("v100-a", V100, 8, 2, _PCIE3, 25.0, _NVLINK_V100),
    _cluster("v100-b", V100, 1, 16, _PCIE3, 25.0),
    _cluster("v100-c", V100, 1, 16, _PCIE3, 10.0),
    # DawnPiper: eight A100s on PCIe 4. torchgpipe: eight P40s on PCIe 3.
    _cluster("a100-40gb", A100_40GB, 8, 1, _PCIE4, 100.0),
    _cluster("p40", P40, 8, 1, _PCIE3, 40.0),
    # Other GPUs.
    _cluster("a100-80gb", A100_80GB, 8, 1, _PCIE4, 200.0, _NVLINK_A100),
    _cluster("h100", H100, 8, 1, _PCIE5, 400.0, _NVLINK_H100),
    _cluster("h200", H200, 8, 1, _PCIE5, 400.0, _NVLINK_H100),
    _cluster("rtx4090", RTX_4090, 8, 1, _PCIE4, 100.0),
    # TPUs of one or two hosts. Consecutive stages lie on neighboring chips, so a peer is one ICI
    # link.
    _cluster("v4", TPU_V4, 4, 2, _PCIE3, 200.0, _ICI_50),
    _cluster("v5e", TPU_V5E, 8, 1, _PCIE3, 200.0, _ICI_50),
    _cluster("v5p", TPU_V5P, 4, 2, _PCIE3, 200.0, _ICI_100),
    _cluster("v6e", TPU_V6E, 8, 1, _PCIE4, 200.0, _ICI_100),
    # CPU devices of one process share its memory, so a transfer is a copy in that memory.
    _cluster("cpu", CORE, 8, 1, Link(5e9, 1e-4), 10.0),
)
PRESETS = {cluster.name: cluster for cluster in _CLUSTERS}

# A device reports its kind as a text. The first name of this table that occurs in the text counts.
# So a name must stand before every other name that is a part of it.
_KINDS = {
    "H200": H200,
    "H100": H100,
    "A100-SXM4-80GB": A100_80GB,
    "A100 80GB": A100_80GB,
    "A100": A100_40GB,
    "V100": V100,
    "P40": P40,
    "RTX 2080 Ti": RTX_2080TI,
    "RTX 4090": RTX_4090,
    "TPU v4": TPU_V4,
    "TPU v5 lite": TPU_V5E,
    "TPU v5e": TPU_V5E,
    "TPU v5": TPU_V5P,
    "TPU v6": TPU_V6E,
}


def peak_per_s(device: Accelerator, dtype: str) -> float:
    """Returns the peak rate of an accelerator's products in flops per second, as its maker states.

    >>> round(peak_per_s(H100, "bfloat16") / 1e12), round(peak_per_s(V100, "float32") / 1e11)
    (989, 157)
    >>> round(peak_per_s(V100, "float64") / 1e9)  # half of float32's
    7850
    """
    listed = device.listed_dtype(dtype)
    return device.products_per_s(dtype) / _family_of(device.name).share(listed)


def accelerator_of(device: Device) -> Accelerator:
    """Finds the accelerator of a device's kind; for an unknown kind, that of its platform.

    >>> import jax
    >>> accelerator_of(jax.devices("cpu")[0]) is CORE
    True
    """
    of_platform = {"cpu": CORE, "tpu": TPU_V5P}
    known = known_accelerator(getattr(device, "device_kind", ""))
    return known or of_platform.get(device.platform, A100_40GB)


def known_accelerator(kind: str) -> Accelerator | None:
    """Finds the accelerator of a kind of device; None if the kind contains no known name.

    >>> known_accelerator("cpu"), known_accelerator("NVIDIA A100 80GB PCIe") is A100_80GB
    (None, True)
    """
    return next((accelerator for name, accelerator in _KINDS.items() if name in kind), None)
