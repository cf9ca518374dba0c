"""Processes tell one another values; what differs is named with both processes."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Condition, Event
from typing import Any

import pytest

from jvpipe.runtime.engine.disagreement import Disagreement
from jvpipe.runtime.engine.failures import HostLost
from jvpipe.runtime.engine.hosts import Hosts
from jvpipe.runtime.engine.tensors import MemoryLimitExceeded

LIMIT_S = 20.0


class Store:
    """A key-value store whose readers wait."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._told = Condition()

    def key_value_set(self, key: str, value: str) -> None:
        with self._told:
            self._values[key] = value
            self._told.notify_all()

    def key_value_delete(self, key: str) -> None:
        with self._told:
            del self._values[key]

    def blocking_key_value_get(self, key: str, timeout_ms: int) -> str:
        with self._told:
            if not self._told.wait_for(lambda: key in self._values, timeout_ms / 1000):
                raise RuntimeError(f"DEADLINE_EXCEEDED: {key}")
            return self._values[key]


def each(count: int, act: Callable[[Hosts], Any], timeout_s: float = 5.0) -> list[Any]:
    """What every process gets of an act, or the error that it raises."""
    store = Store()

    def run(process: int) -> Any:
        try:
            return act(Hosts(process, count, store, timeout_s))
        except Exception as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def test_everybody_learns_of_everybody() -> None:
    assert (
        each(3, lambda hosts: hosts.exchange("name", bytes([hosts.process])))
        == [[b"\0", b"\1", b"\2"]] * 3
    )


def test_what_is_alike_is_agreed_on() -> None:
    assert each(2, lambda hosts: hosts.agree("options", [("a", "1"), ("b", "x\ty\nz")])) == [
        None,
        None,
    ]


def test_the_first_part_that_differs_is_named_with_both_processes() -> None:
    told = each(
        2,
        lambda hosts: hosts.agree(
            "options", [("a", "1"), ("b", f"it is {hosts.process}"), ("c", "")]
        ),
    )
    assert all(isinstance(error, Disagreement) for error in told)
    assert (
        str(told[0])
        == "options differ between processes: b is 'it is 0' in process 0 and 'it is 1' in "
        "process 1"
    )


def test_parts_that_one_lacks_are_a_difference_too() -> None:
    told = each(2, lambda hosts: hosts.agree("rows", [("a", "1"), ("b", "2")][: 1 + hosts.process]))
    assert [str(error) for error in told] == [
        f"rows differ between process {i} and process {1 - i}" for i in (0, 1)
    ]


def test_what_one_fails_at_all_raise() -> None:
    def act(hosts: Hosts) -> None:
        hosts.together("data", lambda: [0][hosts.process])

    (at_one,) = [type(e) for e in each(2, act) if not isinstance(e, Disagreement)]
    assert at_one is IndexError
    assert str(each(2, act)[0]) == "process 1 says: IndexError: list index out of range"


def test_a_limit_that_one_cannot_keep_is_told_to_all_with_one_that_would_do() -> None:
    def act(hosts: Hosts) -> None:
        def keep() -> None:
            if hosts.process:
                raise MemoryLimitExceeded(f"too much at {hosts.process}", 100 * hosts.process)

        hosts.together("limits", keep)

    told = each(3, act)
    assert [(type(error), error.smallest_limit_bytes) for error in told] == [
        (MemoryLimitExceeded, 200)
    ] * 3
    assert [str(error) for error in told[1:]] == ["process 2 says: too much at 2", "too much at 2"]


def test_who_knows_of_a_process_that_is_gone_does_not_wait_for_it() -> None:
    def act(hosts: Hosts) -> None:
        def lose() -> None:
            raise HostLost("process 1 is gone")

        hosts.together("moves", lose)

    hosts = Hosts(0, 2, Store(), timeout_s=3600.0)
    with pytest.raises(HostLost):
        act(hosts)


def test_the_first_process_decides() -> None:
    assert (
        each(3, lambda hosts: hosts.decided("plan", lambda: f"plan of {hosts.process}"))
        == ["plan of 0"] * 3
    )


def test_who_says_nothing_is_named() -> None:
    (error,) = [
        e
        for e in each(2, lambda h: h.process or h.exchange("data", b""), 0.05)
        if isinstance(e, Exception)
    ]
    assert isinstance(error, HostLost)
    assert str(error).startswith("process 1 has not told its data for 0.05 s")


def test_a_first_process_that_hears_nothing_is_named() -> None:
    """As the store does that lies with a process which is stopped, it keeps whoever tells it
    something.
    """

    class Stopped(Store):
        def key_value_set(self, key: str, value: str) -> None:
            released.wait(LIMIT_S)

    released = Event()
    with pytest.raises(HostLost, match=r"process 0 has not heard 'data' for 0\.05 s"):
        Hosts(1, 2, Stopped(), timeout_s=0.05).exchange("data", b"")
    released.set()


def test_who_counts_more_or_fewer_processes_is_named_at_once() -> None:
    store = Store()

    def run(process: int) -> str:
        with pytest.raises(Disagreement) as told:
            Hosts(process, 2 + process, store, timeout_s=3600.0).exchange("options", b"")
        return str(told.value)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, range(2))
    cure = ": give jax.distributed.initialize the same num_processes in all"
    assert first == f"process 0 is one of 2 processes and process 1 one of 3{cure}"
    assert second == f"process 1 is one of 3 processes and process 0 one of 2{cure}"


def test_what_is_told_aside_does_not_wait_for_the_rest() -> None:
    def told(hosts: Hosts) -> list[list[bytes]]:
        mine, aside = bytes([hosts.process]), hosts.aside("checkpoints")
        assert hosts.aside("checkpoints") is aside
        with ThreadPoolExecutor(1) as thread:
            if hosts.process:  # one process says first what the other says last
                beside = thread.submit(aside.exchange, "part", b"aside" + mine)
                return [hosts.exchange("step", mine), hosts.exchange("step", mine), beside.result()]
            steps = [hosts.exchange("step", mine), hosts.exchange("step", mine)]
            return [*steps, thread.submit(aside.exchange, "part", b"aside" + mine).result()]

    assert each(2, told) == [[[b"\0", b"\1"]] * 2 + [[b"aside\0", b"aside\1"]]] * 2
