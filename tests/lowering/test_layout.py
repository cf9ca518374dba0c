"""Layouts: whose layer is where, what a stage drops, and what of it goes to the host."""

from dataclasses import replace

from tests.lowering.toy import GRAPH, P0, SIGNATURES, T0, X, layout

FIRST, MIDDLE, LAST = GRAPH.layers


def test_layers_are_those_of_their_stage_in_order() -> None:
    how = layout([1, 2], devices=[3, 0])
    assert [[layer.id for layer in how.layers(s)] for s in (0, 1)] == [[0], [1, 2]]
    assert dict(how.stage) == {0: 0, 1: 1, 2: 1}


def test_an_edge_is_dropped_by_its_stage_alone() -> None:
    how = layout([1, 2], fates={"t0": "recompute"})
    assert [how.drops(layer, T0) for layer in (FIRST, MIDDLE)] == [True, False]
    assert not how.drops(FIRST, X)
    assert not how.drops(FIRST, P0)
    assert not layout([1, 2], fates={"t0": "swap"}).drops(FIRST, T0)


def test_what_is_swapped_is_what_a_backward_of_the_stage_reads() -> None:
    how = layout(
        [2, 1], fates={"first/made": "swap", "middle/made": "keep", "t0": "swap", "t1": "swap"}
    )
    assert [str(value) for value in how.swapped(0, 5)] == [
        "residual 0 layer 0 micro-batch 5",
        "tensor 0 micro-batch 5",  # tensor 1 is read by the last layer's backward, on another stage
    ]
    assert how.swapped(1, 5) == []


def test_an_edge_that_another_stage_of_its_device_reads_is_not_swapped_away() -> None:
    apart, together = (
        layout([1, 1, 1], devices, fates={"t0": "swap"}) for devices in ([0, 1, 2], [0, 0, 1])
    )
    signatures = (replace(SIGNATURES[0], sources=(("output", 0),)), *SIGNATURES[1:])
    apart, together = (replace(how, signatures=signatures) for how in (apart, together))
    assert [str(value) for value in apart.swapped(0, 0)] == ["tensor 0 micro-batch 0"]
    assert together.swapped(0, 0) == []
