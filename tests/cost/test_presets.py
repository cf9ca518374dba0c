"""The presets are the machines that the papers name."""

from unittest.mock import Mock

import jax
import pytest

from jvpipe.cost.cluster_file import find_cluster
from jvpipe.cost.hardware import Accelerator
from jvpipe.cost.presets import (
    A100_40GB,
    A100_80GB,
    CORE,
    H200,
    PRESETS,
    TPU_V5E,
    TPU_V5P,
    TPU_V6E,
    accelerator_of,
)


def test_every_machine_is_there() -> None:
    wanted = [
        "2080ti",
        "v100-a",
        "v100-b",
        "v100-c",
        "a100-40gb",
        "p40",
        "a100-80gb",
        "h100",
        "h200",
        "rtx4090",
        "v4",
        "v5e",
        "v5p",
        "v6e",
        "cpu",
    ]
    assert sorted(PRESETS) == sorted(wanted)
    assert all(find_cluster(name).name == name for name in wanted)


@pytest.mark.parametrize(
    ("name", "gigabits", "per_machine"),
    [("2080ti", 40, 4), ("v100-a", 25, 8), ("v100-b", 25, 1), ("v100-c", 10, 1)],
)
def test_networks_are_those_of_the_papers(name: str, gigabits: float, per_machine: int) -> None:
    cluster = PRESETS[name]
    assert 0.7 < cluster.network.bytes_per_s * 8 / (gigabits * 1e9) < 1
    assert cluster.devices_per_machine == per_machine


def test_nvlink_leaves_the_links_to_the_host_alone() -> None:
    apart = {name for name, cluster in PRESETS.items() if not cluster.peer_uses_host}
    assert apart == {"v100-a", "a100-80gb", "h100", "h200", "v4", "v5e", "v5p", "v6e"}
    for name in apart:
        assert PRESETS[name].peer.bytes_per_s > PRESETS[name].host.bytes_per_s


def test_figures_are_sustained_and_grow_with_the_generations() -> None:
    order = ["p40", "v100-a", "a100-40gb", "a100-80gb", "h100", "h200"]
    bandwidths = [PRESETS[name].device.memory_bytes_per_s for name in order]
    assert bandwidths == sorted(bandwidths)
    assert PRESETS["a100-40gb"].device.products_per_s("bfloat16") < 312e12
    assert PRESETS["p40"].device.products_per_s("float32") < PRESETS[
        "v100-a"
    ].device.products_per_s("float32")


@pytest.mark.parametrize(
    ("kind", "platform", "known"),
    [
        ("NVIDIA H200", "gpu", H200),
        ("NVIDIA A100-PCIE-40GB", "gpu", A100_40GB),
        ("NVIDIA A100-SXM4-80GB", "gpu", A100_80GB),
        ("something new", "gpu", A100_40GB),
        ("TPU v5 lite", "tpu", TPU_V5E),
        ("TPU v5", "tpu", TPU_V5P),
        ("TPU v6e", "tpu", TPU_V6E),
        ("a later TPU", "tpu", TPU_V5P),
        ("cpu", "cpu", CORE),
    ],
)
def test_a_device_at_hand_is_like_one_that_is_known(
    kind: str, platform: str, known: Accelerator
) -> None:
    assert accelerator_of(Mock(jax.Device, device_kind=kind, platform=platform)) is known
