"""What every schedule says of itself: what it holds, how many stages and layers it needs, and what
it refuses.
"""

import logging
from pathlib import Path

import pytest

from jvpipe.ir.task import text, write_csv
from jvpipe.schedules import SCHEDULES, find_schedule
from jvpipe.schedules.interleaved import Interleaved, InterleavedLists
from jvpipe.schedules.schedule import Schedule
from tests.schedules.units import Clock

SEVERAL = ["interleaved", "zb-h1", "zb-v", "v-half", "1f1b", "gpipe"]


@pytest.mark.parametrize("name", SCHEDULES)
def test_csv_has_a_line_of_tasks_for_each_device(name: str, tmp_path: Path) -> None:
    lists = SCHEDULES[name].lists(3, 7)
    write_csv(tmp_path / "lists.csv", lists)
    lines = (tmp_path / "lists.csv").read_text().splitlines()
    assert lines == [text(tasks).replace(" ", ",") for tasks in lists]


@pytest.mark.parametrize("microbatches", [1, 3, 4, 11])
@pytest.mark.parametrize("name", SEVERAL)
def test_what_devices_hold_jointly_is_the_peak_of_its_lists(name: str, microbatches: int) -> None:
    schedule = SCHEDULES[name]
    clock = Clock(
        schedule.lists(4, microbatches), schedule.chunks, {"F": 1, "B": 2, "I": 1, "W": 1}
    )
    for between in (0, 1, 2):
        held = schedule.held(4, microbatches)
        most = [
            max(sum(k + between * w for k, w in vector) for vector in vectors) for vectors in held
        ]
        within = [peak * schedule.chunks for peak in clock.peaks(between)]
        # on the first stage backwards are run whole, and hold nothing between
        assert most == within or (
            between > 1 and all(m <= w for m, w in zip(most, within, strict=True))
        )


def test_no_vector_is_within_another() -> None:
    for vectors in find_schedule("v-half").held(6, 24):
        flat = [[n for pair in vector for n in pair] for vector in vectors]
        assert not any(
            a is not b and all(x <= y for x, y in zip(a, b, strict=True))
            for a in flat
            for b in flat
        )


def test_in_flight_counts_each_stage_for_itself() -> None:
    assert find_schedule("interleaved").in_flight(2, 4) == (4, 3, 2, 1)
    assert find_schedule("zb-v").in_flight(2, 4) == (4, 3, 2, 1)


def test_stages_are_chunks_of_devices() -> None:
    assert find_schedule("1f1b").stages_on(3) == 3
    assert Interleaved(chunks=4).stages_on(3) == 12


def test_more_stages_than_layers_are_refused_with_the_chunks_that_would_do() -> None:
    Interleaved(chunks=4).check_layers(3, 12)
    with pytest.raises(
        ValueError, match=r"needs 4 x 3 = 12 stages, .* 11 layers: 3 chunks per device are possible"
    ):
        Interleaved(chunks=4).check_layers(3, 11)
    with pytest.raises(ValueError, match=r"one chunk per device is possible\. Use '1f1b'"):
        Interleaved(chunks=4).check_layers(3, 5)
    with pytest.raises(
        ValueError,
        match=r"zb-v needs 2 x 3 = 6 stages, but the model has 5 layers: this schedule has two chunks",
    ):
        find_schedule("zb-v").check_layers(3, 5)


def test_streams_of_split_backwards_or_chunks_are_refused() -> None:
    split = Schedule(name="mine", lists=InterleavedLists(split=True), synchronous=False)
    with pytest.raises(
        ValueError, match=r"backwards in two halves, which cannot be combined with updates.*'zb-h1'"
    ):
        split.check(2, 4)
    with pytest.raises(
        ValueError, match=r"2 chunks per device, which cannot be combined with updates"
    ):
        Schedule(name="mine", lists=InterleavedLists(2), chunks=2, synchronous=False).check(2, 4)


def test_few_microbatches_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "jvpipe"):
        find_schedule("1f1b").warn_of_idle(4, 4)
        assert not caplog.messages
        find_schedule("1f1b").warn_of_idle(4, 1)
    assert caplog.messages == [
        "1 micro-batch leaves 4 devices idle for about 75% of a step under 1f1b: use "
        "microbatches=4 or more, unless the loss compares the examples of a batch (contrastive "
        "losses, batch norm) and so depends on the size of micro-batches"
    ]
