"""Each process runs its own rows and its halves of copies; what it offered stays until it has
arrived.
"""

import optax
import pytest

from jvpipe.ir.buffers import Buffer, Lowered
from jvpipe.ir.kinds import Kind
from jvpipe.ir.rows import AskRun, OfferRun
from jvpipe.ir.values import Value, ValueKind
from jvpipe.lowering.projection import projected, telling_all
from jvpipe.lowering.receipts import OPEN_OFFERS, with_receipts
from jvpipe.lowering.splice import spliced
from jvpipe.lowering.step import divided_move, lower_evaluation, lower_move, lower_step
from jvpipe.schedules import find_schedule
from tests.lowering.toy import GRAPH, layout, optimizer

TWO = (0, 1)
HERE, THERE = layout([1, 2], [0, 1]), layout([2, 1], [0, 1], number=1)
ADAM = optax.adam(0.1)


def stepped(micro: int = 2) -> Lowered:
    return lower_step(
        GRAPH, [HERE] * micro, find_schedule("1f1b").lists(2, micro), optimizer(micro)
    )


def moving(micro: int = 3, at: int = 1) -> Lowered:
    """A step inside which the middle layer moves from the second process to the first."""
    lists = find_schedule("1f1b").lists(2, micro)
    layouts = [HERE] * at + [THERE] * (micro - at)
    return lower_step(GRAPH, layouts, spliced(lists, lists, at), optimizer(micro, ADAM))


def moved() -> tuple[Lowered, Lowered]:
    """The same between two steps: the copies, and the end of what is left."""
    return divided_move(lower_move(GRAPH, HERE.plan, THERE.plan, optimizer(2, ADAM)))


def evaluated(micro: int) -> Lowered:
    return lower_evaluation(GRAPH, HERE.plan, optimizer(micro), micro)


def drawn(step: Lowered) -> str:
    told = []
    for row in step.rows:
        match row.run:
            case OfferRun():
                told.append(f"offer {step.buffers[row.reads[0]].value.kind}")
            case AskRun():
                told.append(f"ask {step.buffers[row.writes[0]].value.kind}")
            case _:
                told.append(str(row.kind))
    return " ".join(told)


STEPS = {"step": stepped(4), "evaluation": evaluated(7), "moving": moving(), "moved": moved()[0]}


def test_each_process_runs_its_own_rows_and_its_halves_of_copies() -> None:
    step = with_receipts(telling_all(stepped(), TWO), TWO)
    first, second = (projected(step, TWO, own) for own in TWO)
    assert drawn(first) == (
        "FEED F offer tensor FEED F offer tensor ask cotangent ZERO B ask cotangent B ask "
        "gradient U offer parameter ask mark ask metric RECEIPT"
    )
    assert drawn(second) == (
        "ask tensor ask tensor F F ZERO B ZERO B offer cotangent F F LOSS B B offer cotangent "
        "offer gradient ask parameter ARRIVE offer mark U offer metric"
    )


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_both_halves_of_a_copy_have_one_number(step: Lowered) -> None:
    step = with_receipts(telling_all(step, TWO), TWO)
    halves = [[row.run for row in projected(step, TWO, own).rows] for own in TWO]
    offers = [{run.number for run in runs if isinstance(run, OfferRun)} for runs in halves]
    asks = [{run.number for run in runs if isinstance(run, AskRun)} for runs in halves]
    assert offers == asks[::-1]
    assert offers[1]
    assert offers[0].isdisjoint(offers[1])


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_every_row_is_somebodys_and_every_buffer_ends_where_it_lies(step: Lowered) -> None:
    step = with_receipts(telling_all(step, TWO), TWO)
    for own in TWO:
        mine = projected(step, TWO, own)
        alive = {b for b in range(step.persistent) if step.buffers[b].place == own}
        for row in mine.rows:
            assert alive.issuperset(row.reads)
            alive |= set(row.writes)
            assert alive.issuperset(row.frees)
            alive -= set(row.frees)
        lasting = {*step.final, *mine.metrics}
        assert alive == {b for b in lasting if step.buffers[b].place == own}
        assert len(mine.metrics) == len(step.metrics) // 2
    asked = sum(isinstance(row.run, AskRun) for row in projected(step, TWO, 1).rows)
    offered = sum(isinstance(row.run, OfferRun) for row in projected(step, TWO, 1).rows)
    own = sum(
        row.place == 1 and row.kind is not Kind.FREE for row in step.rows
    )  # the receipt has waited
    assert len(projected(step, TWO, 1).rows) == own + asked
    assert offered or step is STEPS["moved"]


def test_an_offer_is_overwritten_only_after_it_has_arrived() -> None:
    step = with_receipts(stepped(), TWO)
    offers = {
        i: row.reads[0]
        for i, row in enumerate(step.rows)
        if row.kind is Kind.SEND and row.place == 0
    }
    receipts = [i for i, row in enumerate(step.rows) if row.kind is Kind.RECEIPT]
    for i, b in offers.items():
        later = [j for j, row in enumerate(step.rows) if j > i and b in row.writes]
        assert all(any(i < r < j for r in receipts) for j in later)
        if b in step.final:
            assert any(r > i for r in receipts), "the next step's update overwrites it"


def test_nothing_is_added_where_a_process_is_alone() -> None:
    step = stepped()
    assert with_receipts(step, (0, 0)) is step
    assert projected(step, (0, 0), 0) == step


@pytest.mark.parametrize("micro", [OPEN_OFFERS, OPEN_OFFERS + 3])
def test_an_evaluation_does_not_run_ahead_of_a_slow_receiver(micro: int) -> None:
    step = with_receipts(evaluated(micro), TWO)
    offers = [i for i, row in enumerate(step.rows) if row.kind is Kind.SEND and row.place == 0]
    receipts = [i for i, row in enumerate(step.rows) if row.kind is Kind.RECEIPT]
    assert len(receipts) == micro - OPEN_OFFERS
    for n, offer in enumerate(offers):
        assert sum(r < offer for r in receipts) >= n + 1 - OPEN_OFFERS


def ends(step: Lowered, b: int, after: int) -> int:
    """The first row after one that overwrites or ends a buffer."""
    rows = enumerate(step.rows)
    return next(
        (i for i, row in rows if i > after and b in (*row.writes, *row.frees)), len(step.rows)
    )


def made_of(step: Lowered, b: int, before: int, copy: int) -> bool:
    """Whether what a buffer holds before a row was made of what another row has copied."""
    maker = max((i for i, row in enumerate(step.rows[:before]) if b in row.writes), default=-1)
    return maker == copy or (
        maker >= 0 and any(made_of(step, r, maker, copy) for r in step.rows[maker].reads)
    )


@pytest.mark.parametrize("step", [stepped(), moving(), moving(4, 3), moved()[0]])
def test_what_lies_on_the_devices_between_steps_has_arrived_before_it_ends(step: Lowered) -> None:
    step = with_receipts(step, TWO)
    waits = [(i, row) for i, row in enumerate(step.rows) if row.kind is Kind.RECEIPT]
    copies = [i for i, row in enumerate(step.rows) if row.kind in (Kind.SEND, Kind.MOVE)]
    copies = [i for i in copies if step.rows[i].reads[0] < step.persistent]
    assert copies
    for copy in copies:
        b = step.rows[copy].reads[0]
        until = ends(step, b, copy)
        received = [made_of(step, row.reads[0], i, copy) for i, row in waits if copy < i < until]
        assert any(received) or (until == len(step.rows) and b not in step.final)


def test_all_that_moves_from_one_place_to_another_has_one_mark() -> None:
    step = with_receipts(telling_all(moving(), TWO), TWO)
    first, second = (projected(step, TWO, own) for own in TWO)
    assert [kind for kind in drawn(second).split(" ") if kind in ("DROP", "RECEIPT")] == [
        "RECEIPT",
        "DROP",
    ]
    assert (
        drawn(first).count(
            "ask parameter ask optimizer ask optimizer ask optimizer ARRIVE offer mark"
        )
        == 1
    )
    assert "FREE" not in drawn(second), "the receipt has waited for it"


def test_a_move_between_steps_ends_nothing_before_its_copies_are_there() -> None:
    copies, end = moved()
    both = [projected(with_receipts(copies, TWO), TWO, own) for own in TWO]
    assert [drawn(step) for step in both] == [
        "ask parameter ask optimizer ask optimizer ask optimizer ARRIVE offer mark",
        "offer parameter offer optimizer offer optimizer offer optimizer ask mark RECEIPT",
    ]
    assert all(b >= copies.persistent for step in both for row in step.rows for b in row.frees), (
        "the marks alone"
    )
    assert [drawn(projected(with_receipts(end, TWO), TWO, own)) for own in TWO] == ["", "DROP"]
    (drop,) = end.rows
    assert {end.buffers[b].place for b in drop.frees} == {1}
    assert sorted((*end.final, *drop.frees)) == [*range(len(end.buffers))]


def test_every_process_is_told_metrics_that_lie_with_several() -> None:
    """As in a stream whose last layer has moved."""
    losses = [
        Buffer(Value(ValueKind.LOSS, 0, microbatch=m), place, 4)
        for m, place in enumerate((0, 1, 1))
    ]
    step = telling_all(Lowered((), tuple(losses), 3, (), (0, 1, 2)), TWO)
    for own in TWO:
        told = [step.buffers[b] for b in projected(step, TWO, own).metrics]
        assert [buffer.value.microbatch for buffer in told] == [0, 1, 2]
        assert {buffer.place for buffer in told} == {own}
