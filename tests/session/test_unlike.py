"""How devices differ: given speeds and limits, reported memory, measured layers."""

from typing import Any
from unittest.mock import Mock

import jax
import pytest

from jvpipe.cost import slowness
from jvpipe.cost.costs import Costs, LayerCost, Option
from jvpipe.cost.slowness import measured_slowness
from jvpipe.runtime.engine import memory_limits
from jvpipe.runtime.engine.memory_limits import device_limits, host_limit
from jvpipe.session.arguments import check_speeds, checked_speeds
from jvpipe.util.sizes import GIB

Patch = pytest.MonkeyPatch


def devices(patch: Patch, *limits: int | None) -> list[Any]:
    """Devices that report so much memory."""
    found = jax.devices()[: len(limits)]
    patch.setattr(memory_limits, "_reported", lambda device: limits[found.index(device)])
    return found


def test_limits_are_as_given_else_as_reported(monkeypatch: Patch) -> None:
    assert device_limits(7, devices(monkeypatch, 1, 2), 2, None) == (7, 7)
    assert device_limits((24, 11), devices(monkeypatch, 1, 2), 2, None) == (24, 11)
    assert device_limits(None, devices(monkeypatch, 2400, 1100), 2, None) == (2400, 1100)
    assert device_limits(None, devices(monkeypatch, None, None), 2, None) == ()


def test_those_that_report_nearly_the_same_are_alike(monkeypatch: Patch) -> None:
    assert device_limits(None, devices(monkeypatch, 1000, 990, 500, 995), 4, None) == (
        990,
        990,
        500,
        990,
    )


class Gpu:
    """What limits are read from of a GPU."""

    platform = "gpu"

    def __init__(self, process: int) -> None:
        self.id, self.process_index = id(self), process

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": 1000}


def test_what_a_gpu_reports_is_not_filled_and_its_host_pool_has_an_end(monkeypatch: Patch) -> None:
    gpus: list[Any] = [Gpu(0), Gpu(0), Gpu(1)]
    monkeypatch.setattr(
        "jvpipe.runtime.engine.memory_limits.is_own", lambda device: device.process_index == 0
    )
    assert device_limits(None, gpus[:2], 2, None) == (920, 920)
    assert device_limits(1000, gpus[:2], 2, None) == (1000, 1000)
    monkeypatch.delenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", raising=False)
    assert host_limit(None, gpus) == 2 * 64 * GIB
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "100")
    assert host_limit(None, gpus[:2]) == 100 * GIB
    assert host_limit(7, gpus) == 7
    assert host_limit(None, jax.devices()) is None


def test_a_plan_for_some_devices_needs_limits_for_these(monkeypatch: Patch) -> None:
    assert device_limits((24, 11), devices(monkeypatch, *[None] * 4), 2, None) == (24, 11, 11, 11)
    with pytest.raises(
        ValueError, match=r"2 memory limits .* for 3 devices: give one for each device"
    ):
        device_limits((24, 11), devices(monkeypatch, *[None] * 3), 3, None)


@pytest.mark.parametrize(
    ("speeds", "told"),
    [
        ([1.0, -1.0], "each must be a number above 0"),
        ([1.0, float("inf")], "each must be a number above 0"),
        ("fast", "each must be a number above 0"),
        ([1.0, True], "each must be a number above 0"),
        ([1.0], "1 speeds for 2 devices: give one for each"),
    ],
)
def test_speeds_that_are_none(speeds: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        check_speeds(checked_speeds("speeds", speeds), 2)


def test_layers_are_measured_once_on_each_kind_of_own_device(monkeypatch: Patch) -> None:
    asked, cards = (
        list[str](),
        dict(zip(jax.devices()[:5], ["H100", "small", "small", "H100", "V100"], strict=True)),
    )
    monkeypatch.setattr(slowness, "_kind", cards.__getitem__)
    named = {device: Mock(jax.Device, device_kind=card) for device, card in cards.items()}
    of_kind = slowness.accelerator_of
    monkeypatch.setattr(slowness, "accelerator_of", lambda device: of_kind(named[device]))
    monkeypatch.setattr(slowness, "is_own", lambda device: cards[device] != "V100")

    def costs(forward_s: float) -> Costs:
        return Costs(
            tuple(LayerCost("layer", (1 + i) * forward_s, 2.0, (Option(0),)) for i in range(2))
        )

    def measured_on(device: Any) -> Costs:
        asked.append(cards[device])
        return costs(3.0)

    found = measured_slowness(list(cards), measured_on, costs(1.0))
    assert asked == ["small"]
    assert found[:4] == [(), (5 / 3, 2.0), (5 / 3, 2.0), ()]
    reached = 0.6 * 495 / (0.85 * 15.7)  # of their peaks, as their families do
    assert found[4] == pytest.approx((reached,) * 2)


@pytest.mark.parametrize("text", ["", "64GB", "1.5", "-1"])
def test_a_host_pool_that_is_no_number_is_told_with_its_variable(
    monkeypatch: Patch, text: str
) -> None:
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", text)
    gpus: list[Any] = [Gpu(0)]
    with pytest.raises(ValueError, match=f"LIMIT_GB='{text}' must be a whole number of GiB, such"):
        host_limit(None, gpus)
