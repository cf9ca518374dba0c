"""Writes beside the training: one at a time, and what one fails with is told."""

import threading
from collections.abc import Callable

import pytest

from jvpipe.runtime.state.checkpoints.background import Writer

LIMIT_S = 30


def fails() -> None:
    raise OSError("the disk is full")


def test_the_caller_goes_on_while_something_is_written() -> None:
    may_end, done = threading.Event(), []

    def write() -> None:
        assert may_end.wait(LIMIT_S)
        done.append("written")

    with Writer() as writer:
        writer.begin(write)
        writer.check()
        assert done == []
        may_end.set()
    assert done == ["written"]


def test_one_write_follows_another() -> None:
    order: list[int] = []

    def write(i: int) -> Callable[[], None]:
        return lambda: order.append(i)

    with Writer() as writer:
        for i in range(5):
            writer.begin(write(i))
            assert order == list(range(i)) or order == list(range(i + 1))
    assert order == list(range(5))


def until_it_is_told(writer: Writer) -> None:
    for _ in range(10**6):
        threading.Event().wait(0.001)
        writer.check()


@pytest.mark.parametrize(
    "ask", [Writer.wait, until_it_is_told, lambda writer: writer.begin(lambda: None)]
)
def test_a_failure_is_told_once_to_whoever_asks_next(ask: Callable[[Writer], None]) -> None:
    with Writer() as writer:
        writer.begin(fails)
        with pytest.raises(OSError, match="the disk is full"):
            ask(writer)
        writer.wait()


def begun(error: Exception | None) -> None:
    with Writer() as writer:
        writer.begin(fails)
        if error is not None:
            raise error


@pytest.mark.parametrize(
    ("error", "told"), [(None, "the disk is full"), (ValueError("no number"), "no number")]
)
def test_the_end_tells_of_it_unless_something_else_went_wrong(
    error: Exception | None, told: str
) -> None:
    with pytest.raises((OSError, ValueError), match=told):
        begun(error)


def test_a_write_is_waited_for_though_a_wait_before_was_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_end, done = threading.Event(), []

    def write() -> None:
        assert may_end.wait(LIMIT_S)
        done.append("written")

    def interrupted(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    with Writer() as writer:
        writer.begin(write)
        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(threading.Thread, "join", interrupted)
            with pytest.raises(KeyboardInterrupt):
                writer.wait()
        may_end.set()
    assert done == ["written"]
