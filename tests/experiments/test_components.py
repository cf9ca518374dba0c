"""Components switched off on models of a few layers."""

import pytest

from experiments.components import run
from experiments.components.run import COMPONENTS, column, relayed, waiting
from jvpipe.cost.costs import Costs, Edge, LayerCost, Option
from jvpipe.cost.hardware import Link
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.stage_cost import evaluate_decision
from jvpipe.schedules import find_schedule


def problem() -> Problem:
    """Twelve layers, the first one slower and the last one reading it, on four devices that cannot
    keep all.
    """
    options = (Option(10), Option(0, swapped_bytes=10), Option(0, extra_s=0.5, extra_bytes=10))
    layers = tuple(
        LayerCost(f"layer{i}", s, 2 * s, options, input_bytes=1)
        for i, s in enumerate((2.0, *[1.0] * 11))
    )
    edges = (*(Edge(i, (i + 1,), 1) for i in range(11)), Edge(0, (11,), 1))
    host, peer = Link(10.0), Link(100.0)
    return Problem(
        Costs(layers, edges),
        4,
        find_schedule("1f1b"),
        8,
        70,
        host=host,
        peer=peer,
        peer_uses_host=False,
    )


@pytest.mark.thorough
def test_a_column_has_what_is_left_without_each(monkeypatch: pytest.MonkeyPatch) -> None:
    some = ("fates", "recomputation", "recomputation and overlap")
    monkeypatch.setattr(run, "COMPONENTS", {name: COMPONENTS[name] for name in some})
    seconds, fates, recomputation, overlap, migration = column(problem())
    assert seconds == "117.66 s"
    assert float(fates) > 1.05
    assert float(overlap) > float(recomputation) > 1.1
    assert float(migration) > 1.1


def test_what_switches_off_means() -> None:
    assert relayed(Edge(1, (4, 2), 7)) == Edge(1, (2, 3, 4), 7)
    swapped = evaluate_decision(problem(), Decision((0, 3, 6, 9, 12), (1, *[0] * 11))).stages[0]
    assert swapped.swap_s == pytest.approx(2.0)
    assert waiting(swapped).compute_s == pytest.approx(swapped.compute_s + 2.0)
