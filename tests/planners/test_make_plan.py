"""The registry of planners."""

import pytest

from jvpipe.cost.measure import LayerSeconds
from jvpipe.ir.layers import Array, Layer, LayerGraph, Parameter, Ref
from jvpipe.planners import check_planner, make_plan


def chain(*megabytes: int) -> LayerGraph:
    """A graph of layers with one parameter each."""
    return LayerGraph(
        tuple(Layer(i, f"layer{i}", (Ref("parameter", i),), ()) for i in range(len(megabytes))),
        (),
        tuple(Parameter(Array(f"w{i}", (), "float32", n * 2**20), (i,)) for i, n in enumerate(megabytes)),
    )


def never() -> LayerSeconds:
    raise AssertionError("nothing is to be measured")


def test_even_counts_layers_alone() -> None:
    plan = make_plan("even", chain(9, 1, 1, 1, 1), 2, "gpipe", [1, 0], never)
    assert (plan.cuts, plan.schedule, plan.planner) == ((3, 2), "gpipe", "even")
    assert [stage.devices for stage in plan.stages] == [(1,), (0,)]


def test_torchgpipe_balances_seconds_of_forward_and_backward() -> None:
    seconds = LayerSeconds((1.0, 0.5, 0.5, 0.5, 0.5), (3.0, 0.5, 0.5, 0.5, 0.5))
    plan = make_plan("torchgpipe", chain(1, 1, 1, 1, 9), 2, "1f1b", [0, 1], lambda: seconds)
    assert plan.cuts == (1, 4)


def test_torchgpipe_size_balances_bytes() -> None:
    plan = make_plan("torchgpipe-size", chain(1, 1, 1, 1, 4), 2, "1f1b", [0, 1], never)
    assert plan.cuts == (4, 1)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="4 stages need as many layers, the model has 3: use at most 3 stages"):
        make_plan("even", chain(1, 1, 1), 4, "1f1b", [0, 1, 2, 3], never)


def test_an_unknown_planner_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown planner 'torchgpip': did you mean 'torchgpipe'"):
        check_planner("torchgpip")
