"""Costs as functions of the local batch."""

import pytest

from jvpipe.cost.costs import Costs, Edge, Shared
from jvpipe.planners.model.replicas_costs import LocalCosts, local_costs
from tests.planners.joint.replicas import layer


def known(b: int) -> Costs:
    """Seconds with a part that does not shrink."""
    shared = (Shared((0, 1), 6 * b), Shared((0, 1), 7, per_version=True))
    return Costs((layer(1.0 + b, 100, 10 * b), layer(2.0 * b)), (Edge(0, (1,), 4 * b),), shared)


def test_between_known_sizes_and_beyond_them_everything_lies_on_a_line() -> None:
    costs = local_costs(known, (2, 4, 8))
    for b in (1, 2, 3, 4, 7, 8, 16):
        assert costs.at(b) == known(b)


def test_slices_are_never_faster_than_nothing() -> None:
    costs = LocalCosts((2, 4), (Costs((layer(1.0),)), Costs((layer(5.0),))))
    assert costs.at(1).layers[0].forward_s == 0


def test_layers_that_run_again_keep_their_input_and_take_their_forward_more() -> None:
    found = local_costs(known, (2,)).recomputed().at(2).layers[0].options[0]
    assert (found.kept_bytes, found.extra_s, found.extra_bytes) == (0, 3, 20)


@pytest.mark.parametrize("batches", [(), (0,), (2, 2), (4, 2)])
def test_sizes_must_rise(batches: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must rise from 1 on"):
        LocalCosts(batches, tuple(known(1) for _ in batches))
