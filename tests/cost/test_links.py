"""Measured links: copies are timed alone and together."""

import jax
import pytest

from jvpipe.cost import links
from jvpipe.cost.hardware import INFINITE, Link

SIZES = (2**10, 2**18)


def test_links_between_two_devices() -> None:
    found = links.measure_links(jax.devices()[0], jax.devices()[1], SIZES)
    for link in (found.out, found.back, found.send):
        assert 0 < link.bytes_per_s < 1e13
        assert 0 <= link.latency_s < 1
    assert found.host.bytes_per_s == min(found.out.bytes_per_s, found.back.bytes_per_s)
    assert found.host.latency_s >= found.out.latency_s


def test_a_device_alone_sends_to_nobody() -> None:
    found = links.measure_links(jax.devices()[0], None, SIZES)
    assert found.send == INFINITE
    assert not found.send_uses_host


@pytest.mark.parametrize(("together_s", "shared"), [(2.0, True), (1.1, False)])
def test_what_is_slower_together_shares_a_link(
    together_s: float, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of 1 and 2 KiB that take 1 s per KiB and half a second besides."""

    def seconds(copies: list, arrays: list) -> float:
        alone = arrays[0][0].size / 1024 + 0.5
        return alone if len(copies) == 1 else together_s * alone

    monkeypatch.setattr(links, "_seconds", seconds)
    found = links.measure_links(jax.devices()[0], jax.devices()[1], (1024, 2048))
    assert found.out == found.back == found.send == Link(1024.0, 0.5)
    assert found.send_uses_host == shared
