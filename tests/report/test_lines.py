"""Lines say what goes on, and no reader is needed for that."""

import io
from dataclasses import replace

from jvpipe.report.lines import Lines
from tests.report.test_metrics import ONE


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def begun() -> tuple[Lines, io.StringIO, Clock]:
    out, clock = io.StringIO(), Clock()
    return Lines(out, period_s=5.0, silence_s=10.0, clock=clock), out, clock


def test_the_first_step_is_said_the_last_and_one_every_few_seconds() -> None:
    lines, out, clock = begun()
    for step in range(1, 11):
        clock.now_s = 2.0 * step
        lines.step(replace(ONE, step=step), total=10)
    said = out.getvalue().splitlines()
    assert [line.split(":")[0] for line in said] == [f"step {n} of 10" for n in (1, 4, 7, 10)]
    assert said[0] == "step 1 of 10: loss 7.5000, 128.0 examples/s, bubble 20%, peak 20 B"


def test_silence_is_broken_by_what_goes_on() -> None:
    lines, out, clock = begun()
    lines.doing("preparing")
    lines.begin("planning")
    lines.begin("compiling")
    for clock.now_s in range(1, 24):
        if clock.now_s == 15:
            lines.end("compiling")
        lines.tell_silence()
    lines.doing("step 1")
    clock.now_s = 40
    lines.tell_silence()
    assert out.getvalue().splitlines() == [
        "compiling: 10 s so far",
        "planning: 20 s so far",
        "step 1: 17 s so far",
    ]


def test_a_reader_who_leaves_stops_nothing() -> None:
    lines, out, _ = begun()
    with lines:
        out.close()
        lines.say("nobody hears this")
        lines.step(ONE, total=1)


def test_work_that_ends_while_silence_is_noticed_is_no_error() -> None:
    class Ending(list[tuple[str, float]]):
        """Is emptied by another thread just after it was found to hold something."""

        def __bool__(self) -> bool:
            self.clear()
            return True

    lines, out, clock = begun()
    lines._doing = Ending([("compiling", 0.0)])
    clock.now_s = 20.0
    lines.tell_silence()
    assert out.getvalue() == "compiling: 20 s so far\n"
