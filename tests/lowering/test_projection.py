"""Each process runs its own rows and its halves of copies; what it offered stays until it has arrived."""

import pytest

from jvpipe.ir.buffers import Lowered
from jvpipe.ir.kinds import Kind
from jvpipe.ir.rows import AskRun, OfferRun
from jvpipe.lowering.projection import projected, telling_all
from jvpipe.lowering.receipts import OPEN_OFFERS, with_receipts
from jvpipe.lowering.step import lower_evaluation, lower_step
from jvpipe.schedules import find_schedule
from tests.lowering.toy import GRAPH, layout, optimizer

TWO = (0, 1)


def stepped(micro: int = 2) -> Lowered:
    there = layout([1, 2], [0, 1])
    return lower_step(GRAPH, [there] * micro, find_schedule("1f1b").lists(2, micro), optimizer(micro))


def evaluated(micro: int) -> Lowered:
    return lower_evaluation(GRAPH, layout([1, 2], [0, 1]).plan, optimizer(micro), micro)


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


def test_each_process_runs_its_own_rows_and_its_halves_of_copies() -> None:
    step = with_receipts(telling_all(stepped(), TWO), TWO)
    first, second = (projected(step, TWO, own) for own in TWO)
    assert drawn(first) == (
        "FEED F offer tensor FEED F offer tensor ask cotangent ZERO B ask cotangent B ask gradient U offer parameter "
        "ask mark ask metric RECEIPT"
    )
    assert drawn(second) == (
        "ask tensor F F ask tensor ZERO B ZERO B offer cotangent F F LOSS B B offer cotangent offer gradient "
        "ask parameter ARRIVE offer mark U offer metric"
    )


@pytest.mark.parametrize("step", [stepped(4), evaluated(7)], ids=["step", "evaluation"])
def test_both_halves_of_a_copy_have_one_number(step: Lowered) -> None:
    step = with_receipts(telling_all(step, TWO), TWO)
    halves = [[row.run for row in projected(step, TWO, own).rows] for own in TWO]
    offers = [{run.number for run in runs if isinstance(run, OfferRun)} for runs in halves]
    asks = [{run.number for run in runs if isinstance(run, AskRun)} for runs in halves]
    assert offers == asks[::-1]
    assert all(offers)
    assert offers[0].isdisjoint(offers[1])


@pytest.mark.parametrize("step", [stepped(4), evaluated(7)], ids=["step", "evaluation"])
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
    own = sum(row.place == 1 for row in step.rows)
    assert len(projected(step, TWO, 1).rows) == own + asked
    assert offered


def test_an_offer_is_overwritten_only_after_it_has_arrived() -> None:
    step = with_receipts(stepped(), TWO)
    offers = {i: row.reads[0] for i, row in enumerate(step.rows) if row.kind is Kind.SEND and row.place == 0}
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
