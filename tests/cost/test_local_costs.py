"""Costs as functions of the local batch."""

from jvpipe.cost.costs import Costs, Edge, LayerCost, Option, Shared, SplitCost
from jvpipe.cost.local_costs import LocalCosts
from jvpipe.ir.plan import Fate
from tests.planners.joint.shapes import layer


def known(b: int) -> Costs:
    """Seconds with a part that does not shrink."""
    shared = (Shared((0, 1), 6 * b), Shared((0, 1), 7, per_version=True))
    return Costs((layer(1.0 + b, 100, 10 * b), layer(2.0 * b)), (Edge(0, (1,), 4 * b),), shared)


def test_between_known_sizes_and_beyond_them_everything_lies_on_a_line() -> None:
    costs = LocalCosts.of({b: known(b) for b in (8, 2, 4)})
    for b in (1, 2, 3, 4, 7, 8, 16):
        assert costs.at(b) == known(b)


def test_slices_are_never_faster_than_nothing() -> None:
    costs = LocalCosts((2, 4), (Costs((layer(1.0),)), Costs((layer(5.0),))))
    assert costs.at(1).layers[0].forward_s == 0


def test_options_are_in_proportion_to_what_the_layer_takes() -> None:
    swapped = Option(4, 12, 0.5, 8, {"x": Fate.SWAP}, swaps_input=True)
    split = SplitCost(1.0, 2.0, 6, 4)
    whole = LayerCost("layer", 2.0, 4.0, (Option(16), swapped), 100, input_bytes=10, split=split)
    half = LocalCosts((4,), (Costs((whole,)),)).at(2).layers[0]
    assert half.options == (
        Option(8),
        Option(2, 6, 0.25, 4, {"x": Fate.SWAP}, swaps_input=True),
    )
    assert half.split == SplitCost(0.5, 1.0, 3, 2)
    assert (half.parameter_bytes, half.input_bytes) == (100, 5)


def test_known_sizes_are_as_they_are() -> None:
    costs = LocalCosts.of({b: known(b) for b in (2, 4)})
    assert costs.at(2) is costs.costs[0]
    assert costs.at(3) is costs.at(3)


def test_bytes_between_halves_are_scaled_though_the_layer_keeps_nothing() -> None:
    costs = []
    for count in (2, 4):
        split = SplitCost(1.0, 1.0, 2 * count, 4 * count)
        whole = LayerCost("layer", 1.0, 2.0, (Option(0),), split=split)
        costs.append(Costs((whole,)))
    split = LocalCosts((2, 4), tuple(costs)).at(3).layers[0].split
    assert split is not None
    assert (split.handed_bytes, split.kept_bytes) == (6, 12)
