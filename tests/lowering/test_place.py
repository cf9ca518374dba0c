"""Operations get places: what is read elsewhere is sent, what belongs to a layer that moved is
moved.
"""

from jvpipe.ir.buffers import Copy
from jvpipe.ir.kinds import Kind
from jvpipe.ir.plan import Plan
from jvpipe.ir.values import NONE, VALUES, Value, ValueKind
from jvpipe.lowering.operation import Delivery, Operation, Write
from jvpipe.lowering.place import Placer
from tests.lowering.toy import GRAPH, optimizer, row

HERE, THERE = Plan.from_cuts([1, 2]), Plan.from_cuts([2, 1])
T0 = Value(ValueKind.TENSOR, 0, microbatch=0)
P0, P1 = (Value(ValueKind.PARAMETER, p, version=0) for p in (0, 1))


def placer(plan: Plan = HERE, *, by_host: bool = False) -> Placer:
    made = Placer(GRAPH, plan, optimizer(), by_host=by_host)
    made.begin()
    return made


def rows(made: Placer) -> list[str]:
    return [row(r, made.buffers) for block in made.blocks for r in block.rows]


def forward(layer: int, *reads: Value, makes: Value, goes_to: tuple[int, ...] = ()) -> Operation:
    return Operation(
        Kind.F, layer, 0, reads, (Write(makes, 4),), delivers=(Delivery(makes, goes_to),)
    )


def test_a_tied_parameter_lies_where_it_is_read() -> None:
    made = placer()
    assert [str(buffer.spot) for buffer in made.buffers] == [
        "parameter 0 version 0 at 0",
        "parameter 0 version 0 at 1",
        "parameter 1 version 0 at 1",
    ]


def test_what_is_made_is_sent_once_to_each_place() -> None:
    made = placer()
    made.perform(forward(0, P0, makes=T0, goes_to=(1, 2)))
    assert rows(made) == [
        "F on 0: parameter 0 version 0 at 0 -> tensor 0 micro-batch 0 at 0",
        "SEND on 0: tensor 0 micro-batch 0 at 0 -> tensor 0 micro-batch 0 at 1",
    ]


def test_a_leaf_of_the_batch_is_fed_where_it_is_read() -> None:
    made = placer()
    x = Value(ValueKind.BATCH, 0, microbatch=0)
    made.perform(forward(1, x, makes=T0))
    made.perform(forward(2, x, makes=Value(ValueKind.LOSS, microbatch=0)))
    assert [line.split(" ")[0] for line in rows(made)] == ["FEED", "F", "F"]


def test_an_update_is_told_by_a_copy_and_writes_in_place() -> None:
    made = placer()
    sums = [Value(ValueKind.GRADIENT, 0, layer, version=0) for layer in (0, 2)]
    for layer, value in zip((0, 2), sums, strict=True):
        made.perform(Operation(Kind.ZERO, layer, NONE, (), (Write(value, 8),)))
    new = P0._replace(version=1)
    made.perform(
        Operation(Kind.U, 0, NONE, (*sums, P0), (Write(new, 8),), delivers=(Delivery(new, (0, 2)),))
    )
    *_, told, update, refreshed = (r for block in made.blocks for r in block.rows)
    assert (told.kind, told.place, update.place, refreshed.kind) == (Kind.SEND, 1, 0, Kind.SEND)
    assert update.writes[0] in update.reads, "the new version takes the old one's buffer"
    assert dict(made.lasting()).keys() >= {made.where.lasting[0].spot}


def test_an_update_whose_old_version_is_still_read_takes_a_buffer_of_its_own() -> None:
    made = placer()
    made.perform(Operation(Kind.U, 1, 0, (P1,), (Write(P1._replace(version=1), 12),)), keeps=True)
    (update,) = made.blocks[0].rows
    assert update.writes[0] not in update.reads
    assert (P1, 1) in made.current


def test_what_belongs_to_a_layer_that_moved_is_moved_and_leaves_a_stale_copy() -> None:
    made = placer()
    gradient = Value(ValueKind.GRADIENT, 1, 1, version=0)
    assert VALUES[gradient.kind].alone
    made.perform(Operation(Kind.ZERO, 1, NONE, (), (Write(gradient, 12),)))
    made.enter(THERE)
    made.perform(Operation(Kind.B, 1, 1, (gradient,), (Write(gradient, 12),)))
    assert [line.split(":")[0] for line in rows(made)] == ["ZERO on 1", "MOVE on 1", "B on 0"]
    assert [s.copy for s in made.spots if s.value == gradient] == [Copy.STALE, Copy.OWN]


def test_a_move_frees_what_was_left_once_all_of_it_has_arrived() -> None:
    made = placer()
    made.relocate(THERE)
    made.enter(THERE)
    made.commit()
    kinds = [line.split(":")[0] for line in rows(made)]
    assert kinds == ["MOVE on 1", "FREE on 1", "DROP on 1"]
    assert [str(spot) for spot, _ in made.lasting()] == [
        "parameter 0 version 0 at 0",
        "parameter 0 version 0 at 1",
        "parameter 1 version 0 at 0",
    ]


def test_by_the_host_all_leaves_before_anything_arrives() -> None:
    made = placer(by_host=True)
    made.relocate(THERE)
    made.enter(THERE)
    made.commit()
    assert [line.split(":")[0] for line in rows(made)] == [
        "OUT on 1",
        "FREE on 1",
        "DROP on 1",
        "IN on 0",
    ]


def test_a_sum_of_cotangents_that_comes_back_is_not_the_one_that_was_sent() -> None:
    """0 -> 1 -> 0: each adds to it; what place 0 sent first is no longer it."""
    three, cotangent = (
        Plan.from_cuts([1, 1, 1], devices=[0, 1, 0]),
        Value(ValueKind.COTANGENT, 0, microbatch=0),
    )
    made = placer(three)
    for layer, following in ((2, 1), (1, 0)):
        reads = (cotangent,) if layer == 1 else ()
        made.perform(
            Operation(
                Kind.B,
                layer,
                0,
                reads,
                (Write(cotangent, 4),),
                delivers=(Delivery(cotangent, (following,)),),
            )
        )
    made.perform(Operation(Kind.B, 0, 0, (cotangent,), ()))
    *_, sent_back, read = (r for block in made.blocks for r in block.rows)
    assert (sent_back.kind, read.reads) == (Kind.SEND, sent_back.writes)
    assert sent_back.writes != made.blocks[0].rows[0].writes
