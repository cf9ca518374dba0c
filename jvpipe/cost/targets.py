"""Compile targets: devices that programs are compiled for, even if no such device is here.

The compiler for GPUs needs a description of the device, which `_gpu` writes from the maker's data
sheet. The compiler for TPUs needs only the name of a topology: the kind of the chips, and the shape
in which they are joined. To add a device, add an entry to `_TARGETS`.
"""

import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from jvpipe.cost.hardware import Accelerator
from jvpipe.cost.presets import (
    A100_40GB,
    A100_80GB,
    CORE,
    H100,
    H200,
    RTX_4090,
    TPU_V4,
    TPU_V5E,
    TPU_V5P,
    TPU_V6E,
    V100,
)
from jvpipe.util.extras import MissingExtraError
from jvpipe.util.names import did_you_mean
from jvpipe.util.sizes import GIB


@dataclass(frozen=True, slots=True)
class Target:
    """A device that programs are compiled for.

    Attributes:
        name: the name of the target.
        platform: `cuda`, `tpu` or `cpu`.
        topology: how devices are joined, in the compiler's notation.
        config: the description of a GPU; empty for other devices.
        package: the Python distribution that contains the compiler.
        extra: the extra of jvpipe that installs `package`.
        accelerator: the name of the device in `presets.py`.
    """

    name: str
    platform: str
    topology: str = ""
    config: str = ""
    package: str = "jaxlib"
    extra: str = ""
    accelerator: str = ""

    @property
    def identity(self) -> tuple[str, ...]:
        """All that the compiler's answers depend on, apart from the program and the flags.

        It is part of the key by which the archive keeps answers. So if its format changes, programs
        are compiled again.
        """
        # JAX lowers the program, jaxlib holds XLA, and the package holds the device's compiler: a
        # new version of any of them may give other bytes.
        versions = version("jax"), version("jaxlib"), version(self.package)
        return self.platform, self.topology, self.config, *versions

    def check(self) -> None:
        """Raises MissingExtraError unless the compiler is installed."""
        try:
            version(self.package)
        except PackageNotFoundError:
            raise MissingExtraError(
                f"the compiler for {self.name} is not installed: pip install 'jvpipe[{self.extra}]'"
            ) from None


def _gpu(
    accelerator: Accelerator,
    name: str,
    device: str,
    capability: tuple[int, int],
    units: int,
    clock_ghz: float,
    memory: tuple[float, int],
    cache_mib: int,
    shared_kib: int,
    threads: int = 2048,
) -> Target:
    """Makes the target of a GPU, with a description from its data sheet.

    Args:
        accelerator: the device in `presets.py`; the number of multiprocessors comes from there.
        name: the name of the target.
        device: the name that the GPU's driver reports.
        capability: the compute capability of CUDA, major and minor.
        units: the float32 units of each multiprocessor.
        clock_ghz: the boost clock.
        memory: the rate of the memory in bytes per second, and its size in GiB.
        cache_mib: the size of the second-level cache.
        shared_kib: the shared memory of each multiprocessor.
        threads: the threads that a multiprocessor runs at once.
    """
    memory_bytes_per_s, memory_gib = memory
    # The text is all that the compiler learns about the device, because no driver is asked. The
    # numbers in it without a variable (threads, registers, limits of grids) hold for all GPUs of
    # compute capability 7.0 to 9.0. The versions at its end are fixed, so that answers do not
    # depend on the machine that compiles.
    # From Ampere on, a block may use all of the shared memory except one KiB.
    block_kib = shared_kib if capability < (8, 0) else shared_kib - 1
    config = f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {shared_kib * 1024} threads_per_core_limit: {threads}
  core_count: {accelerator.cores} fpus_per_core: {units}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {memory_bytes_per_s:.0f} l2_cache_size: {cache_mib * 2**20}
  clock_rate_ghz: {clock_ghz} device_memory_size: {memory_gib * GIB}
  shared_memory_per_block_optin: {block_kib * 1024}
  cuda_compute_capability {{ major: {capability[0]} minor: {capability[1]} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 8 }}
device_description_str: "{device}"
"""
    return Target(
        name,
        "cuda",
        topology="1x1x1",  # slices x hosts x devices per host
        config=config,
        package="jax-cuda12-plugin",
        extra="aot-cuda",
        accelerator=accelerator.name,
    )


def _tpu(name: str, topology: str, accelerator: str) -> Target:
    """Makes the target of a TPU; `topology` is the shape that its chips form, such as `2x2`."""
    return Target(
        name,
        "tpu",
        topology=f"{name}:{topology}",
        package="libtpu",
        extra="aot-tpu",
        accelerator=accelerator,
    )


_A100 = "NVIDIA A100-SXM4-"
_4090 = "NVIDIA GeForce RTX 4090"
_TARGETS = (
    _gpu(H100, "h100", "NVIDIA H100 80GB HBM3", (9, 0), 128, 1.98, (3352e9, 80), 50, 228),
    _gpu(H200, "h200", "NVIDIA H200", (9, 0), 128, 1.98, (4800e9, 141), 50, 228),
    _gpu(A100_80GB, "a100", _A100 + "80GB", (8, 0), 64, 1.41, (2039e9, 80), 40, 164),
    _gpu(A100_40GB, "a100-40gb", _A100 + "40GB", (8, 0), 64, 1.41, (1555e9, 40), 40, 164),
    _gpu(V100, "v100", "Tesla V100-SXM2-16GB", (7, 0), 64, 1.53, (898e9, 16), 6, 96),
    _gpu(RTX_4090, "rtx4090", _4090, (8, 9), 128, 2.52, (1008e9, 24), 72, 100, threads=1536),
    _tpu("v4", "2x2x1", TPU_V4.name),
    _tpu("v5e", "2x2", TPU_V5E.name),
    _tpu("v5p", "2x2x1", TPU_V5P.name),
    _tpu("v6e", "2x2", TPU_V6E.name),
    Target("cpu", "cpu", accelerator=CORE.name),
)
TARGETS = {target.name: target for target in _TARGETS}
"""All targets by name; `cpu` is the CPU of this machine."""


def find_target(name: str) -> Target:
    """Finds a target by name; a TPU's name may be followed by a topology, such as `v5e:4x4`.

    Raises:
        ValueError: no target has that name, or the topology is not two or three counts, such as
            `4x4`.

    >>> find_target("v5e:4x4").topology
    'v5e:4x4'
    >>> find_target("h10")
    Traceback (most recent call last):
    ValueError: unknown compile target 'h10': did you mean 'h100'? There are h100, h200, ...
    """
    kind, _, topology = name.partition(":")
    # Names of targets come first. A topology may follow only for TPUs, which can be joined in
    # several shapes.
    if name in TARGETS:
        return TARGETS[name]
    if kind not in TARGETS or TARGETS[kind].platform != "tpu":
        raise ValueError(did_you_mean("compile target", name, list(TARGETS)))
    chip = TARGETS[kind]
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", topology):
        raise ValueError(
            f"compile target {name}: a topology is two or three counts of at least 1, such as "
            f"{chip.topology}"
        )
    return _tpu(kind, topology, chip.accelerator)


def target_of(accelerator: Accelerator) -> Target:
    """Finds the target of a device of the presets.

    Raises:
        ValueError: the device has no target.
    """
    for target in TARGETS.values():
        if target.accelerator == accelerator.name:
            return target
    raise ValueError(
        f"no compile target is known for {accelerator.name}: name one of {', '.join(TARGETS)}"
    )
