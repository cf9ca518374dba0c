"""Compile targets: devices that a compiler can be asked about though they are not here.

A GPU is told to its compiler by a description, written here from its maker's data sheet; a TPU by the name of a
topology, which its compiler knows.
"""

import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from jvpipe.cost import presets
from jvpipe.cost.hardware import Accelerator
from jvpipe.util.extras import MissingExtraError
from jvpipe.util.names import did_you_mean
from jvpipe.util.sizes import GIB


@dataclass(frozen=True, slots=True)
class Target:
    """A device that programs are compiled for.

    `package` brings the compiler, `extra` is what installs it; `config` is the description of a GPU. One without
    `host_memory` has nowhere to swap to.
    """

    name: str
    platform: str
    topology: str = ""
    config: str = ""
    package: str = "jaxlib"
    extra: str = ""
    host_memory: bool = True

    @property
    def identity(self) -> tuple[str, ...]:
        """All that what its compiler says depends on beside the program and the flags."""
        versions = version("jax"), version("jaxlib"), version(self.package)
        return self.platform, self.topology, self.config, *versions

    def check(self) -> None:
        """Raises MissingExtraError where the compiler is not installed."""
        try:
            version(self.package)
        except PackageNotFoundError:
            raise MissingExtraError(
                f"the compiler for {self.name} is not installed: pip install 'jvpipe[{self.extra}]'"
            ) from None


def _gpu(
    name: str,
    device: str,
    capability: tuple[int, int],
    cores: int,
    units: int,
    clock_ghz: float,
    memory: tuple[float, int],
    cache_mib: int,
    shared_kib: int,
    threads: int = 2048,
) -> Target:
    """A GPU by the figures of its data sheet.

    Args:
        name: of the target.
        device: what its driver calls it.
        capability: of CUDA, major and minor.
        cores: streaming multiprocessors.
        units: of float32 in each of them.
        clock_ghz: at boost.
        memory: bytes per second, and how many bytes there are.
        cache_mib: of the second level.
        shared_kib: of shared memory in each core; a block may have all but one of them.
        threads: that a core runs at once.
    """
    rate, size = memory
    block = (shared_kib if capability < (8, 0) else shared_kib - 1) * 1024
    config = f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {shared_kib * 1024} threads_per_core_limit: {threads}
  core_count: {cores} fpus_per_core: {units}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {rate:.0f} l2_cache_size: {cache_mib * 2**20}
  clock_rate_ghz: {clock_ghz} device_memory_size: {size}
  shared_memory_per_block_optin: {block}
  cuda_compute_capability {{ major: {capability[0]} minor: {capability[1]} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 8 }}
device_description_str: "{device}"
"""
    return Target(name, "cuda", "1x1x1", config, "jax-cuda12-plugin", "aot-cuda")


def _tpu(name: str, topology: str) -> Target:
    return Target(name, "tpu", f"{name}:{topology}", package="libtpu", extra="aot-tpu")


_A100 = "NVIDIA A100-SXM4-"
TARGETS = {
    target.name: target
    for target in (
        _gpu("h100", "NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 1.98, (3352e9, 80 * GIB), 50, 228),
        _gpu("h200", "NVIDIA H200", (9, 0), 132, 128, 1.98, (4800e9, 141 * GIB), 50, 228),
        _gpu("a100", _A100 + "80GB", (8, 0), 108, 64, 1.41, (2039e9, 80 * GIB), 40, 164),
        _gpu("a100-40gb", _A100 + "40GB", (8, 0), 108, 64, 1.41, (1555e9, 40 * GIB), 40, 164),
        _gpu("v100", "Tesla V100-SXM2-16GB", (7, 0), 80, 64, 1.53, (898e9, 16 * GIB), 6, 96),
        _gpu(
            "rtx4090",
            "NVIDIA GeForce RTX 4090",
            (8, 9),
            128,
            128,
            2.52,
            (1008e9, 24 * GIB),
            72,
            100,
            1536,
        ),
        _tpu("v4", "2x2x1"),
        _tpu("v5e", "2x2"),
        _tpu("v5p", "2x2x1"),
        _tpu("v6e", "2x2"),
        Target("cpu", "cpu"),
    )
}
"""By name; `cpu` is the device that is here."""

_OF_ACCELERATORS = {
    presets.H100.name: "h100",
    presets.H200.name: "h200",
    presets.A100_80GB.name: "a100",
    presets.A100_40GB.name: "a100-40gb",
    presets.V100.name: "v100",
    presets.RTX_4090.name: "rtx4090",
    presets.TPU_V4.name: "v4",
    presets.TPU_V5E.name: "v5e",
    presets.TPU_V5P.name: "v5p",
    presets.TPU_V6E.name: "v6e",
    presets.CORE.name: "cpu",
}


def find_target(name: str) -> Target:
    """The target of a name; that of a TPU may have another topology, such as `v5e:4x4`.

    Raises:
        ValueError: there is none.

    >>> find_target("v5e:4x4").topology
    'v5e:4x4'
    >>> find_target("h10")
    Traceback (most recent call last):
    ValueError: unknown compile target 'h10': did you mean 'h100'? There are h100, h200, ...
    """
    kind, _, topology = name.partition(":")
    if not topology and name in TARGETS:
        return TARGETS[name]
    if kind in TARGETS and TARGETS[kind].platform == "tpu":
        if re.fullmatch(r"\d+(x\d+){1,2}", topology):
            return _tpu(kind, topology)
        raise ValueError(
            f"compile target {name}: a topology is two or three counts, such as {TARGETS[kind].topology}"
        )
    raise ValueError(did_you_mean("compile target", name, list(TARGETS)))


def target_of(accelerator: Accelerator) -> Target:
    """The target that a device of a cluster is.

    Raises:
        ValueError: none is known for it.
    """
    if accelerator.name not in _OF_ACCELERATORS:
        raise ValueError(
            f"no compile target is known for {accelerator.name}: name one of {', '.join(TARGETS)}"
        )
    return TARGETS[_OF_ACCELERATORS[accelerator.name]]
