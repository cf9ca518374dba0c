"""Three layers in a row, the first parameter tied to the last layer, small enough to draw.

layer 0   p0 -> t0        layer 1   t0, p1 -> t1        layer 2   t1, p0 -> loss
"""

from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np
import optax

from jvpipe.ir.buffers import Buffer
from jvpipe.ir.layers import Array, Layer, LayerGraph, Parameter, Ref, Signature, Tensor
from jvpipe.ir.plan import Plan
from jvpipe.ir.rows import Row
from jvpipe.ir.values import ValueKind
from jvpipe.lowering.layout import MicrobatchLayout
from jvpipe.lowering.operation import Operation
from jvpipe.programs.optimizer_pieces import OptimizerCut, cut_optimizer

P0, P1 = Ref(ValueKind.PARAMETER, 0), Ref(ValueKind.PARAMETER, 1)
T0, T1 = Ref(ValueKind.TENSOR, 0), Ref(ValueKind.TENSOR, 1)
X, LOSS = Ref(ValueKind.BATCH, 0), Ref(ValueKind.LOSS, 0)


def array(name: str, count: int = 1) -> Array:
    return Array(name, (count,), "float32", 4 * count)


GRAPH = LayerGraph(
    layers=(
        Layer(0, "first", (P0, X), (T0,), (array("made"),)),
        Layer(1, "middle", (P1, T0), (T1,), (array("made"),)),
        Layer(2, "last", (P0, T1), (LOSS,), (array("made"),)),
    ),
    tensors=(Tensor(array("t0"), 0, (1,), True), Tensor(array("t1"), 1, (2,), True)),
    parameters=(Parameter(array("p0", 2), (0, 2)), Parameter(array("p1", 3), (1,))),
    batch=(array("x"),),
)
MADE = (array("made"),)
SIGNATURES = (
    Signature(MADE, (("input", 1), ("residual", 0)), (0,), (), (0,), ()),
    Signature(MADE, (("input", 0), ("input", 1), ("residual", 0)), (0,), (), (0,), (1,)),
    Signature(MADE, (("input", 0), ("input", 1), ("residual", 0)), (), (), (0,), (1,)),
)


def layout(
    cuts: Sequence[int],
    devices: Sequence[int] | None = None,
    fates: dict[str, str] | None = None,
    number: int = 0,
) -> MicrobatchLayout:
    """A layout of these cuts; fates are of the first stage."""
    plan = Plan.from_cuts(list(cuts), devices=devices)
    first, *others = plan.stages
    plan = replace(plan, stages=(replace(first, fates=fates or {}), *others))
    return MicrobatchLayout.of(GRAPH, plan, SIGNATURES, number)


def optimizer(micro: int = 2, of: optax.GradientTransformation | None = None) -> OptimizerCut:
    """Plain gradient descent, which has no state, or another one."""
    shapes = [jax.ShapeDtypeStruct((n,), np.float32) for n in (2, 3)]
    return cut_optimizer(of or optax.sgd(0.1), shapes, [0, 1], [2, 1], microbatches=micro)


def drawn(operation: Operation) -> str:
    """An operation on one line, its values by their names."""
    reads = ", ".join(map(str, operation.reads))
    writes = ", ".join(
        f"{w.value} {w.copy}" if w.copy != "own" else str(w.value) for w in operation.writes
    )
    return f"{operation.kind}{operation.layer}: {reads} -> {writes}"


def row(row: Row, buffers: Sequence[Buffer]) -> str:
    """A row on one line, its buffers by their names."""
    reads, writes = (
        ", ".join(str(buffers[b].spot) for b in ids) for ids in (row.reads, row.writes)
    )
    return f"{row.kind} on {row.place}: {reads} -> {writes}"
