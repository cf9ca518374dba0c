"""Tasks become operations over values, as drawn by hand for three layers."""

from dataclasses import replace

from jvpipe.ir.kinds import Kind
from jvpipe.ir.layers import SplitSignature
from jvpipe.ir.values import Value, ValueKind
from jvpipe.lowering.expand import Expander, gradient_norm, metrics_of
from jvpipe.lowering.layout import MicrobatchLayout
from jvpipe.lowering.weight_rule import Weights
from tests.lowering.toy import GRAPH, SIGNATURES, array, drawn, layout

WEIGHT = Value(ValueKind.WEIGHT, 0, 2, version=0)


def step(how: MicrobatchLayout, micro: int = 1) -> list[str]:
    expander = Expander(GRAPH, Weights(GRAPH), set())
    lines = []
    for m in range(micro):
        for layer in GRAPH.layers:
            lines += map(drawn, expander.forward(layer, m, how))
            lines += map(drawn, expander.losses(layer, range(micro), WEIGHT))
        for layer in reversed(GRAPH.layers):
            lines += map(drawn, expander.backward(Kind.B, layer, m, how))
    return lines


def test_a_step_with_everything_kept() -> None:
    assert step(layout([3])) == [
        "F0: parameter 0 version 0, batch 0 micro-batch 0 -> tensor 0 micro-batch 0, residual 0 "
        "layer 0 micro-batch 0",
        "F1: parameter 1 version 0, tensor 0 micro-batch 0 -> tensor 1 micro-batch 0, residual 0 "
        "layer 1 micro-batch 0",
        "F2: parameter 0 version 0, tensor 1 micro-batch 0 -> loss 0 micro-batch 0, residual 0 "
        "layer 2 micro-batch 0",
        "LOSS2: loss 0 micro-batch 0 -> metric 0 micro-batch 0",
        "ZERO2:  -> gradient 0 layer 2 version 0",
        "B2: parameter 0 version 0, tensor 1 micro-batch 0, residual 0 layer 2 micro-batch 0, "
        "gradient 0 layer 2 version 0 -> gradient 0 layer 2 version 0, cotangent 1 micro-batch 0",
        "ZERO1:  -> gradient 1 layer 1 version 0",
        "B1: parameter 1 version 0, tensor 0 micro-batch 0, residual 0 layer 1 micro-batch 0, "
        "cotangent 1 micro-batch 0, gradient 1 layer 1 version 0 -> gradient 1 layer 1 version 0, "
        "cotangent 0 micro-batch 0",
        "ZERO0:  -> gradient 0 layer 0 version 0",
        "B0: batch 0 micro-batch 0, residual 0 layer 0 micro-batch 0, cotangent 0 micro-batch 0, "
        "gradient 0 layer 0 version 0 -> gradient 0 layer 0 version 0",
    ]


def test_sums_are_made_once_and_the_loss_is_summed_when_all_of_it_is_there() -> None:
    kinds = [line.split(":")[0] for line in step(layout([3]), micro=2)]
    assert [kinds.count(kind) for kind in ("ZERO0", "ZERO1", "ZERO2", "LOSS2")] == [1, 1, 1, 1]
    assert kinds.index("LOSS2") > kinds.index("B0"), "after the second forward"


def test_a_dropped_edge_is_made_again_before_the_first_backward_that_reads_it() -> None:
    lines = step(layout([3], fates={"t0": "recompute"}))
    again = next(line for line in lines if line.startswith("R0"))
    assert again.endswith("-> tensor 0 micro-batch 0 recomputed, residual 0 layer 0 micro-batch 0")
    assert "residual 0 layer 0 micro-batch 0 unused" in lines[0], (
        "what its forward left nobody reads"
    )
    kinds = [line.split(":")[0] for line in lines]
    assert kinds.index("B2") < kinds.index("R0") < kinds.index("B1")
    assert kinds.count("R0") == 1


def test_an_evaluation_leaves_nothing() -> None:
    expander = Expander(GRAPH, Weights(GRAPH), set())
    operations = [op for layer in GRAPH.layers for op in expander.evaluate(layer, 0)]
    assert {op.kind for op in operations} == {Kind.E}
    assert not [w for op in operations for w in op.writes if w.value.kind is ValueKind.RESIDUAL]


def test_what_is_made_goes_to_its_readers() -> None:
    expander, how = Expander(GRAPH, Weights(GRAPH), set()), layout([3])
    (forward,) = expander.forward(GRAPH.layers[0], 0, how)
    assert [(str(d.value), d.layers) for d in forward.delivers] == [
        ("tensor 0 micro-batch 0", (1,))
    ]
    for layer in GRAPH.layers[1:]:
        assert list(expander.forward(layer, 0, how))
    *_, backward = expander.backward(Kind.B, GRAPH.layers[2], 0, how)
    assert [(str(d.value), d.layers) for d in backward.delivers] == [
        ("cotangent 1 micro-batch 0", (1,))
    ]


def test_metrics_have_numbers_of_their_own() -> None:
    values = [*metrics_of(GRAPH), gradient_norm(GRAPH)]
    assert len(set(values)) == len(values)


def test_a_split_backward_hands_values_on_and_layers_without_halves_run_whole_in_one_of_them() -> (
    None
):
    middle = SIGNATURES[1]
    halves = SplitSignature(
        (array("handed", 2),),
        input=replace(middle, sources=(("input", 0),), gradients=()),
        weight=replace(middle, sources=(("input", 1), ("residual", 0)), cotangents=(), returned=()),
    )
    how, expander = (
        replace(layout([3]), halves={1: halves}),
        Expander(GRAPH, Weights(GRAPH), set()),
    )
    for layer in GRAPH.layers:
        list(expander.forward(layer, 0, how))
    inputs, weights = (
        [
            drawn(op)
            for layer in reversed(GRAPH.layers)
            for op in expander.backward(half, layer, 0, how)
        ]
        for half in (Kind.I, Kind.W)
    )
    assert [line.split(":")[0] for line in inputs] == ["ZERO2", "B2", "I1"], (
        "layer 2 has no halves, and is waited for"
    )
    assert inputs[-1] == (
        "I1: parameter 1 version 0, cotangent 1 micro-batch 0 -> cotangent 0 micro-batch 0, "
        "handed 0 layer 1 micro-batch 0"
    )
    assert [line.split(":")[0] for line in weights] == ["ZERO1", "W1", "ZERO0", "B0"], (
        "layer 0 returns nothing"
    )
    assert weights[1] == (
        "W1: tensor 0 micro-batch 0, residual 0 layer 1 micro-batch 0, handed 0 layer 1 "
        "micro-batch 0, gradient 1 layer 1 version 0 -> gradient 1 layer 1 version 0"
    )
