"""Who is alive is heard; who stops is silent, who was never heard is not missed, and strangers do
not count.
"""

import socket
import time
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

from jvpipe.runtime.engine.hosts import Hosts
from jvpipe.runtime.engine.pulse import BEAT_S, Pulse, Pulses

HERE, LIMIT_S = "127.0.0.1", 20.0


def heard(pulses: Pulses, process: int) -> bool:
    """Whether a process is heard of before the time is over."""
    until_s = time.monotonic() + LIMIT_S
    while not pulses.silent_s(process) and time.monotonic() < until_s:
        time.sleep(0.01)
    return pulses.silent_s(process) > 0


def test_processes_hear_of_one_another() -> None:
    first, second = Pulses(HERE), Pulses(HERE)
    first.begin(0, {1: second.own})
    second.begin(1, {0: first.own})
    assert heard(first, 1)
    assert heard(second, 0)


def test_who_was_heard_and_is_no_more_is_named_and_who_never_was_is_not() -> None:
    pulses, nobody = Pulses(HERE), Pulse(HERE, 9, "nobody")
    pulses.begin(0, {1: nobody, 2: nobody})
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.sendto(f"{pulses.own.word} 1".encode(), (HERE, pulses.own.port))
        other.sendto(b"a stranger 2", (HERE, pulses.own.port))
        other.sendto(f"{pulses.own.word} 7".encode(), (HERE, pulses.own.port))
    assert heard(pulses, 1)
    hosts = Hosts(0, 3, None, pulses=pulses, names=("a", "b", "c"))
    assert hosts.gone() == hosts.silent(60.0) == ""
    later_s = time.monotonic() + 61
    with mock.patch.object(time, "monotonic", return_value=later_s):
        assert hosts.silent(60.0) == "process 1 (host b) has been silent for 61 s"
        assert hosts.gone() == "process 1 (host b) has been silent for 61 s"
        hosts.transport = cast(Any, SimpleNamespace(lost=lambda: [2]))
        told = "process 2 (host c) is gone and process 1 (host b) has been silent for 61 s"
        assert hosts.gone() == told, "who is gone may have waited for who is silent"
        assert pulses.silent_s(2) == pulses.silent_s(7) == 0.0


def test_a_beat_is_short_beside_the_silence_of_who_is_lost() -> None:
    assert Hosts(0, 2, None).silent_s > 100 * BEAT_S
