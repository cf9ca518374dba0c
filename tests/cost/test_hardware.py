"""Links and devices: seconds of bytes, rates by dtype."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import pytest

from jvpipe.cost.hardware import INFINITE, Accelerator, Cluster, Link

DEVICE = Accelerator("d", 10**9, 1e9, {"float32": 4e9, "bfloat16": 8e9})


@pytest.mark.parametrize(
    ("dtype", "rate"),
    [("float32", 4e9), ("bfloat16", 8e9), ("float16", 8e9), ("float64", 2e9), ("int8", 4e9)],
)
def test_rates_depend_on_the_type(dtype: str, rate: float) -> None:
    assert DEVICE.products_per_s(dtype) == rate


def test_a_link_takes_its_latency_and_its_bytes_and_nothing_for_nothing() -> None:
    link = Link(2e9, 1e-5)
    assert link.seconds(4e9) == 2.00001
    assert link.seconds(0) == 0
    assert INFINITE.seconds(1e18) == 0


def test_devices_of_a_machine_are_peers_and_others_are_behind_the_network() -> None:
    cluster = Cluster("c", DEVICE, 4, 2, Link(1e9), Link(2e9), Link(3e9))
    assert cluster.devices == 8
    assert cluster.way([0], [3]) == cluster.way([7], [4]) == Link(2e9)
    assert cluster.way([3], [4]) == Link(3e9)
    assert not math.isfinite(Cluster("bare", DEVICE, 1).peer.bytes_per_s)


# 7/8 of 16e9 bytes go around twice inside a machine at 28e9; 1/2 of what a network carries, twice,
# at 2e9.
@pytest.mark.parametrize(
    ("devices", "networks", "seconds"),
    [
        (range(1), 1, 0.0),
        (range(2), 1, 2 * (1 / 2) * 16 / 28),
        (range(8), 1, 2 * (7 / 8) * 16 / 28),
        (range(16), 8, 2 * (7 / 8) * 16 / 28 + 2 * (1 / 2) * (16 / 8) / 2),
        (range(16), 1, 2 * (7 / 8) * 16 / 28 + 2 * (1 / 2) * 16 / 2),
        ((3, 8), 8, 2 * (1 / 2) * 16 / 2),
        ((0, 8, 16), 8, 2 * (2 / 3) * 16 / 2),
        ((0, 1, 8), 8, 2 * (1 / 2) * 16 / 28 + 2 * (1 / 2) * 16 / 2),
    ],
)
def test_an_all_reduce_by_hand(devices: Sequence[int], networks: int, seconds: float) -> None:
    cluster = Cluster("c", DEVICE, 8, 3, peer=Link(28e9), network=Link(2e9), networks=networks)
    assert cluster.reducing(devices).seconds(16e9) == pytest.approx(seconds)
    assert cluster.reducing(devices).seconds(0) == 0


def test_each_round_of_a_ring_takes_the_latency() -> None:
    assert Cluster("c", DEVICE, 4, peer=Link(4e9, 1e-3)).reducing(range(4)).seconds(
        4e9
    ) == pytest.approx(6 * (0.25 + 1e-3))


@pytest.mark.parametrize(
    ("senders", "readers", "networks", "seconds"),
    [
        ((0,), (1,), 1, 12 / 4),
        ((0, 1), (2, 3), 1, 12 / 4 / 2),
        ((0, 1), (2,), 1, 12 / 4),
        ((0, 1, 2, 3), (4, 5, 6, 7), 1, 12 / 1),
        ((0, 1, 2, 3), (4, 5, 6, 7), 3, 12 / 1 / 3),
        ((0, 4), (1, 5), 1, 12 / 4 / 2),  # each slice stays in its machine
        ((0, 4), (8, 12), 1, 12 / 1 / 2),
        ((0, 4, 8), (12,), 1, 12 / 1),
    ],
)
def test_slices_take_the_seconds_counted_by_hand(
    senders: Sequence[int], readers: Sequence[int], networks: int, seconds: float
) -> None:
    cluster = Cluster("c", DEVICE, 4, 4, peer=Link(4e9), network=Link(1e9), networks=networks)
    assert cluster.way(senders, readers).seconds(12e9) == pytest.approx(seconds)


@pytest.mark.parametrize("networks", [1, 2])
@pytest.mark.parametrize(("peer", "network"), [(100.0, 10.0), (10.0, 100.0)])
def test_no_placement_reduces_faster_than_the_least(
    networks: int, peer: float, network: float
) -> None:
    cluster = Cluster(
        "lab", DEVICE, 3, 2, peer=Link(peer, 0.01), network=Link(network, 0.02), networks=networks
    )
    for count in range(1, 7):
        least_s = min(
            cluster.reducing(devices).seconds(60.0) for devices in combinations(range(6), count)
        )
        if networks == 1:
            assert cluster.least_reduce_s(count, 60.0) == pytest.approx(least_s)
        more_s = (
            cluster.reducing(each).seconds(60.0)
            for n in range(count, 7)
            for each in combinations(range(6), n)
        )
        assert cluster.least_reduce_s(count, 60.0) <= min(more_s) * (1 + 1e-12)


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("field", ["memory_bytes_per_s", "launch_s", "float32"])
def test_impossible_numbers_are_refused_by_name(field: str, value: float) -> None:
    if field == "launch_s" and value == 0:
        value = -0.5
    said = {field: value} if field != "float32" else {"flops_per_s": {"float32": value}}
    with pytest.raises(ValueError, match=f"{field}.* of the device 'd' must be a number"):
        replace(DEVICE, **said)


def test_links_that_carry_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"bytes_per_s=0\.0 of a link must be a number above 0"):
        Link(0.0)
    with pytest.raises(ValueError, match="latency_s=nan of a link"):
        Link(1e9, float("nan"))
