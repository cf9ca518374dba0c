"""Where layers run, and what lies on the devices between steps: by hand, with state, constants and
shared state.
"""

from dataclasses import replace

import jax
import optax

from jvpipe.ir.layers import Ref
from jvpipe.ir.plan import Plan
from jvpipe.ir.values import NONE, ValueKind
from jvpipe.lowering.placement import Placement, written_state
from jvpipe.programs.optimizer_pieces import cut_optimizer
from tests.lowering.toy import GRAPH, array, optimizer

FIRST, MIDDLE, LAST = GRAPH.layers
COUNT, FIXED, TABLE = Ref(ValueKind.STATE, 0), Ref(ValueKind.STATE, 1), Ref(ValueKind.CONSTANT, 0)
WITH_STATE = replace(
    GRAPH,
    layers=(
        replace(FIRST, reads=(*FIRST.reads, COUNT, TABLE), writes=(*FIRST.writes, COUNT)),
        replace(MIDDLE, reads=(*MIDDLE.reads, FIXED)),
        replace(LAST, reads=(*LAST.reads, TABLE, FIXED)),
    ),
    state=(array("count"), array("fixed")),
    constants=(array("table", 4),),
)
PLAN = Plan.from_cuts([1, 1, 1], devices=[2, 0, 1])


def names(where: Placement) -> list[str]:
    return [str(buffer.spot) for buffer in where.lasting]


def test_layers_run_where_the_plan_has_them_and_what_is_of_none_where_the_loss_is() -> None:
    where = Placement(GRAPH, PLAN, optimizer())
    assert [where.of(layer) for layer in (0, 1, 2, NONE)] == [2, 0, 1, 1]


def test_a_copy_of_all_that_is_read_lies_at_every_place_that_reads_it() -> None:
    assert names(Placement(WITH_STATE, PLAN, optimizer())) == [
        "parameter 0 version 0 at 2",
        "parameter 0 version 0 at 1",
        "parameter 1 version 0 at 0",
        "state 0 micro-batch 0 at 2",
        "state 1 at 0",
        "state 1 at 1",
        "constant 0 at 2",
        "constant 0 at 1",
    ]


def test_places_that_read_the_same_share_a_copy() -> None:
    assert names(Placement(WITH_STATE, Plan.from_cuts([3]), optimizer())) == [
        "parameter 0 version 0 at 0",
        "parameter 1 version 0 at 0",
        "state 0 micro-batch 0 at 0",
        "state 1 at 0",
        "constant 0 at 0",
    ]


def test_only_state_that_a_layer_writes_has_a_micro_batch() -> None:
    assert written_state(WITH_STATE) == {0}
    assert written_state(GRAPH) == frozenset()


def test_a_step_count_lies_with_every_layer_so_that_layers_can_move() -> None:
    shapes = [jax.ShapeDtypeStruct((n,), "float32") for n in (2, 3)]
    adam = cut_optimizer(optax.adam(0.1), shapes, [0, 1], [2, 1], microbatches=2)
    counts = [buffer for buffer in Placement(GRAPH, PLAN, adam).lasting if buffer.value.index == 0]
    spots = {
        (b.value.kind, b.value.layer, b.place)
        for b in counts
        if b.value.kind is ValueKind.OPTIMIZER
    }
    assert spots == {(ValueKind.OPTIMIZER, 0, 2), (ValueKind.OPTIMIZER, 1, 0)}
