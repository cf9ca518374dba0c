"""The comparison on a model of six layers, whose small batches take as long as larger ones."""

from dataclasses import replace

import pytest

from experiments.seeds_throughput import gap, run
from experiments.seeds_throughput.run import CLUSTER, NONE, SYSTEMS, compared, row
from jvpipe.cost.costs import Costs, Edge, LayerCost, Option
from jvpipe.cost.hardware import Link


def costs(size: int) -> Costs:
    """Each layer keeps 10 bytes of an example, and takes no less than 8 examples do."""
    seconds = max(size, 8) / 8
    options = (Option(10 * size), Option(0, extra_s=0.2 * seconds, extra_bytes=10 * size))
    layers = tuple(
        LayerCost(f"layer{i}", seconds, 2 * seconds, options, input_bytes=size) for i in range(6)
    )
    return Costs(layers, tuple(Edge(i, (i + 1,), size) for i in range(5)))


def test_fates_spare_recomputation_and_make_room_for_larger_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run, "MOST", 8)
    monkeypatch.setattr(run, "MICRO_BATCHES", 4)
    fast = Link(1e12)
    small = replace(
        CLUSTER,
        device=replace(CLUSTER.device, memory_bytes=400),
        host=fast,
        peer=fast,
        network=fast,
    )
    (pipedream, more), (gpipe, faster) = (compared(system, costs, 2, small) for system in SYSTEMS)
    assert (pipedream.size, more.size) == (4, 8)
    assert pipedream.per_s == pytest.approx(
        4 / 9, rel=1e-3
    )  # the slower stage takes 9 seconds a micro-batch
    assert more.per_s > 1.5 * pipedream.per_s
    assert faster.per_s > 1.1 * gpipe.per_s > 0
    assert str(NONE) == "does not fit"
    assert row("six", costs, 2, small).startswith("| six | 2 | 0.444 (4) | ")


def test_an_assumption_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "MICRO_BATCHES", 4)
    monkeypatch.setattr(gap, "MOST", 8)
    base, quarter, stashes, _, _ = gap.ASSUMPTIONS
    gains = [gap.gain(SYSTEMS[0], assumption, costs, 2) for assumption in (base, quarter, stashes)]
    assert gains[0] == gains[2] == "+0% (8, 32)", "layers without parameters have nothing to stash"
    assert gains[1] == "+300% (2, 32)", "a quarter of the examples takes as long"
    weighty = replace(costs(8), layers=(replace(costs(8).layers[0], parameter_bytes=10**9),))
    stashed = gap.stashed(weighty).layers[0].update_s
    assert stashed == pytest.approx(7e9 / CLUSTER.device.memory_bytes_per_s)
