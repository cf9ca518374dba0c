"""The layer graph answers questions about itself."""

from jvpipe.ir.layers import Array, Layer, LayerGraph, Parameter, Ref, Tensor
from jvpipe.ir.reductions import AuxReduction
from jvpipe.ir.values import ValueKind


def array(name: str, *shape: int, dtype: str = "float32") -> Array:
    size = 4
    for n in shape:
        size *= n
    return Array(name, shape, dtype, size)


# Layer 1 and 2 read what layer 0 makes; w0 is tied between 0 and 2.
P0, P1 = (Ref(ValueKind.PARAMETER, i) for i in range(2))
T0, T1 = (Ref(ValueKind.TENSOR, i) for i in range(2))
LOSS = Ref(ValueKind.LOSS, 0)
GRAPH = LayerGraph(
    (
        Layer(0, "embed", (P0, Ref(ValueKind.BATCH, 0)), (T0,)),
        Layer(
            1,
            "middle",
            (P1, T0),
            (T1, Ref(ValueKind.AUX, 0)),
        ),
        Layer(
            2,
            "head",
            (P0, T0, T1),
            (LOSS,),
        ),
    ),
    (
        Tensor(array("embed:0", 8, 2), 0, (1, 2), True),
        Tensor(array("middle:1", 8, 2), 1, (2,), True),
    ),
    (Parameter(array("w0", 1024, 512), (0, 2)), Parameter(array("w1", 2, 2), (1,))),
    aux=(
        array("aux0"),
        array("aux1", 3),
        array("aux2"),
        array("aux3"),
        array("aux4", dtype="int32"),
    ),
    aux_groups=((0,), (1,), (2, 3), (4,)),
)


def test_the_first_reader_owns_a_parameter() -> None:
    assert [GRAPH.owned(i) for i in range(3)] == [(0,), (1,), ()]
    assert [p.array.name for p in GRAPH.tied()] == ["w0"]


def test_skips_are_read_beyond_the_next_layer() -> None:
    assert [t.array.name for t in GRAPH.skips()] == ["embed:0"]


def test_layers_know_what_they_read_and_write() -> None:
    assert GRAPH.layers[2].reading(ValueKind.TENSOR) == (0, 1)
    assert GRAPH.layers[1].writing(ValueKind.AUX) == (0,)
    assert GRAPH.loss_layer == 2


def test_scalars_and_weighted_pairs_of_aux_are_averaged() -> None:
    mean = AuxReduction.MEAN
    assert [GRAPH.aux_reduction(g) for g in range(4)] == [mean, None, mean, None]


def test_prints_a_line_per_layer() -> None:
    lines = str(GRAPH).splitlines()
    assert len(lines) == 3
    assert lines[0].split() == ["0", "embed", "2.00", "MiB", "->", "embed:0"]
    assert lines[2].endswith("-> loss")
