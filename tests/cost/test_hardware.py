"""Links and devices: seconds of bytes, rates by dtype."""

import math

import pytest

from jvpipe.cost.hardware import INFINITE, Accelerator, Cluster, Link

DEVICE = Accelerator("d", 10**9, 1e9, {"float32": 4e9, "bfloat16": 8e9})


@pytest.mark.parametrize(
    ("dtype", "rate"), [("float32", 4e9), ("bfloat16", 8e9), ("float16", 8e9), ("float64", 2e9), ("int8", 4e9)]
)
def test_rates_by_dtype(dtype: str, rate: float) -> None:
    assert DEVICE.products_per_s(dtype) == rate


def test_a_link_takes_its_latency_and_its_bytes_and_nothing_for_nothing() -> None:
    link = Link(2e9, 1e-5)
    assert link.seconds(4e9) == 2.00001
    assert link.seconds(0) == 0
    assert INFINITE.seconds(1e18) == 0


def test_devices_of_a_machine_are_peers_and_others_are_behind_the_network() -> None:
    cluster = Cluster("c", DEVICE, 4, 2, Link(1e9), Link(2e9), Link(3e9))
    assert cluster.devices == 8
    assert cluster.between(0, 3) == cluster.between(7, 4) == Link(2e9)
    assert cluster.between(3, 4) == Link(3e9)
    assert not math.isfinite(Cluster("bare", DEVICE, 1).peer.bytes_per_s)
