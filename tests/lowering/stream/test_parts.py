"""Asynchronous schedules against their rules: the versions that tasks read, and the timelines as
drawn.
"""

import pytest

from jvpipe.ir.task import text
from jvpipe.lowering.stream.parts import parts, versions
from jvpipe.schedules import PipeDream, PipeMare, Schedule, TwoBW, XPipe

M = 9


@pytest.mark.parametrize("S", range(1, 9))
def test_versions_are_those_of_the_rules(S: int) -> None:
    def table(schedule: Schedule) -> tuple[list[list[int]], list[list[int]]]:
        found = versions(schedule, schedule.with_updates(S, M, 3 * M), M)
        return [list(x) for x in found.forward], [list(x) for x in found.backward]

    count, stages = range(3 * M), range(S)
    late = [[max(0, i - (S - 1 - s)) for i in count] for s in stages]
    assert table(PipeDream()) == (late, late)
    vertical = [[max(0, i - (S - 1)) for i in count] for _ in stages]
    assert table(PipeDream(vertical_sync=True)) == (vertical, vertical)
    behind = [[max(0, i // M - 1) for i in count] for _ in stages]
    assert table(TwoBW()) == (behind, behind)
    newest = [list(count) for _ in stages]
    assert table(PipeMare()) == (late, newest)
    assert table(XPipe()) == (late, newest)


def test_updates_every_few_micro_batches() -> None:
    schedule = PipeDream(update_every=3)
    lists = schedule.with_updates(2, 3, 6)
    assert text(lists[0]) == "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0U2 0F4 0B3 0F5 0B4 0B5 0U5"
    assert versions(schedule, lists, 3).forward == ((0, 0, 0, 0, 1, 1), (0, 0, 0, 1, 1, 1))


DRAWN = {
    2: ["0F0 0F1 0B0 0U0", "0F2 0B1 0U1 0F3 0B2 0U2", "0B3 0U3"],
    3: ["0F0 0F1", "0F2 0B0 0U0 0F3 0B1 0U1", "0B2 0U2 0B3 0U3"],
    4: ["0F0 0F1", "0F2 0F3 0B0 0U0", "0B1 0U1 0B2 0U2 0B3 0U3"],
}


@pytest.mark.parametrize("S", DRAWN)
def test_the_first_stage_is_as_drawn(S: int) -> None:
    lists = [PipeDream().with_updates(S, 2, count) for count in (4, 6)]
    found = parts(lambda n: lists[1], 2, 2, ended=lists[0])
    assert [text(part[0]) for part in found] == DRAWN[S]
    assert [text(part[S - 1]) for part in found] == [
        f"{S - 1}F0 {S - 1}B0 {S - 1}U0 {S - 1}F1 {S - 1}B1 {S - 1}U1",
        f"{S - 1}F2 {S - 1}B2 {S - 1}U2 {S - 1}F3 {S - 1}B3 {S - 1}U3",
        "",
    ]


def test_options_out_of_range_are_refused() -> None:
    for bad, message in [
        (lambda: PipeMare(decay=1.0), "decay must lie between 0 and 1, not be 1.0"),
        (
            lambda: PipeMare(warmup_updates=-1),
            "warmup_updates must be a whole number of at least 0, not -1",
        ),
        (lambda: XPipe(update_every=0), "update_every must be a whole number of at least 1, not 0"),
        (
            lambda: PipeDream(update_every=3).check(2, 4),
            "update_every=3 must divide the 4 micro-batches",
        ),
        (
            lambda: TwoBW().check(4, 3),
            "2bw on 4 stages needs at least 4 micro-batches, but 3 are given",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            bad()
