"""The meeting of processes, each in a thread: who comes, who is refused, and whom strangers hold
up.
"""

import asyncio
import hashlib
import hmac
import json
import os
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from queue import Queue
from typing import Any

import pytest

from jvpipe import HostLost
from jvpipe.runtime.engine import meeting
from jvpipe.runtime.engine.meeting import Attendance, Given, MeetingServer
from jvpipe.runtime.engine.signed_lines import SignedLines

HERE, LIMIT_S = "127.0.0.1", 20.0
VALUES = [("--seed", "0"), ("--steps", "100")]
GIVEN = Given(VALUES, b"a secret")


@dataclass
class Room:
    """A meeting of which process 0 is there."""

    port: int
    coordinator: int
    server: MeetingServer
    first: Future[None]
    threads: ThreadPoolExecutor

    def come(self, process: int, given: Given = GIVEN, timeout_s: float = LIMIT_S) -> Future[int]:
        attendance = Attendance(HERE, self.port, process, given)
        return self.threads.submit(attendance.wait, timeout_s)

    def stranger(self) -> socket.socket:
        return socket.create_connection((HERE, self.port), timeout=LIMIT_S)


@contextmanager
def room(count: int, given: Given = GIVEN, timeout_s: float = LIMIT_S) -> Iterator[Room]:
    with ThreadPoolExecutor() as threads, socket.socket() as kept, ExitStack() as held:
        kept.bind((HERE, 0))
        listener = held.enter_context(socket.create_server((HERE, 0)))
        server = MeetingServer(listener, kept, count, given)
        first = threads.submit(server.wait, timeout_s)
        yield Room(listener.getsockname()[1], kept.getsockname()[1], server, first, threads)


def differing(*values: tuple[str, str]) -> Given:
    return Given(list((dict(VALUES) | dict(values)).items()), GIVEN.secret)


def refusal(of: Future[int] | Future[None]) -> str:
    """Why a process was refused for good: a mistake, not something to try again."""
    with pytest.raises(ValueError) as told:
        of.result(LIMIT_S)
    return str(told.value)


@pytest.mark.parametrize("secret", [b"a secret", b""])
def test_all_hear_where_to_go_on_once_the_last_has_come(secret: bytes) -> None:
    given = Given(VALUES, secret)
    with room(3, given) as here:
        early = here.come(2, given)
        assert not here.first.done()
        assert here.come(1, given).result(LIMIT_S) == early.result(LIMIT_S) == here.coordinator
        here.first.result(LIMIT_S)


def test_whatever_differs_is_named_in_both(capsys: pytest.CaptureFixture[str]) -> None:
    with room(2) as here:
        told = refusal(here.come(1, differing(("--seed", "1"), ("--steps", "7"))))
        assert refusal(here.first) == (
            "the processes were not given the same: --seed is '0' in process 0 and '1' in process "
            "1; --steps is '100' in process 0 and '7' in process 1"
        )
    assert told == (
        "the processes were not given the same: --seed is '1' in process 1 and '0' in process 0; "
        "--steps is '7' in process 1 and '100' in process 0"
    )


def test_who_is_not_concerned_hears_what_differs_too() -> None:
    with room(3) as here:
        alike = here.come(2)
        differs = here.come(1, differing(("--seed", "1")))
        told = [refusal(each) for each in (here.first, alike, differs)]
    assert all("--seed is " in line for line in told)


@pytest.mark.parametrize("other", [b"another secret", b""])
def test_another_secret_is_named_in_both_and_disturbs_nobody(
    other: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    with room(2) as here:
        told = refusal(here.come(1, Given(VALUES, other)))
        assert "has another secret than process 1, or one of them has none" in told
        assert "refused a process on 127.0.0.1: its secret is another" in capsys.readouterr().err
        assert here.come(1).result(LIMIT_S) == here.coordinator
        here.first.result(LIMIT_S)


def test_a_number_that_is_taken_is_refused_before_and_during_the_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with room(3) as here:
        (second,), (one,) = wait([here.come(1), here.come(1)], LIMIT_S, FIRST_COMPLETED)
        with pytest.raises(HostLost, match="there is a process 1 already"):
            second.result()
        assert here.come(2).result(LIMIT_S) == one.result(LIMIT_S) == here.coordinator
        here.first.result(LIMIT_S)
        for late in (GIVEN, differing(("--seed", "1"))):
            with pytest.raises(HostLost, match="there is a process 1 already"):
                here.come(1, late).result(LIMIT_S)
        assert "--seed" in refusal(here.come(3, differing(("--seed", "1"))))
    assert capsys.readouterr().err.count("refused a second process 1, on 127.0.0.1") == 1


def test_a_connection_that_ends_without_a_farewell_is_named_by_both_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[asyncio.StreamWriter] = []
    said: Queue[str] = Queue()

    class Kept(SignedLines):
        def __init__(self, *given: Any) -> None:
            opened.append(given[1])
            super().__init__(*given)

    monkeypatch.setattr(meeting, "SignedLines", Kept)
    # Threads say it, and capsys loses what is written while it is read.
    monkeypatch.setattr(meeting, "_say", said.put)
    with room(3) as here:
        one, two = (Attendance(HERE, here.port, i, GIVEN) for i in (1, 2))
        come = [here.threads.submit(each.wait, LIMIT_S) for each in (one, two)]
        here.first.result(LIMIT_S)
        assert [each.result(LIMIT_S) for each in come] == [here.coordinator] * 2
        one.end()
        while not said.empty():
            assert "has ended" not in said.get()
        for writer in opened:
            with suppress(OSError):  # closed after the farewell
                writer.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        assert {said.get(timeout=LIMIT_S), said.get(timeout=LIMIT_S)} == {
            "warning: the connection to process 2 has ended",
            f"warning: the connection to process 0 at {HERE}:{here.port} has ended",
        }
        here.server.end()
    assert said.empty()


def test_who_left_before_all_had_come_may_come_again() -> None:
    with room(3) as here:
        with pytest.raises(HostLost, match="waited for process 2"):
            here.come(1, timeout_s=2.0).result(LIMIT_S)
        again, last = here.come(1), here.come(2)
        assert again.result(LIMIT_S) == last.result(LIMIT_S) == here.coordinator


def test_who_is_missing_is_named_by_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(meeting, "PATIENCE", meeting.Patience(say_s=0.2))
    with room(4, timeout_s=1.5) as here:
        present = here.come(2)
        late = f"waited for process 1 and process 3 at 127.0.0.1:{here.port}"
        for each in (here.first, present):
            with pytest.raises(HostLost, match=f"not all processes have come within 1.5 s: {late}"):
                each.result(LIMIT_S)
    said = capsys.readouterr().err
    assert said.count(late.replace("waited", "waiting")) >= 4


def test_a_first_process_that_never_comes_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(meeting, "PATIENCE", meeting.Patience(say_s=0.2))
    with socket.socket() as nobody:
        nobody.bind((HERE, 0))
        port = nobody.getsockname()[1]
        with pytest.raises(ValueError, match=r"has not answered process 1 for 0\.5 s"):
            Attendance(HERE, port, 1, GIVEN).wait(0.5)
    assert f"waiting for process 0 at 127.0.0.1:{port}: " in capsys.readouterr().err


def test_who_answers_something_else_is_not_the_first_process() -> None:
    with socket.create_server((HERE, 0)) as other, ThreadPoolExecutor() as threads:
        port = other.getsockname()[1]
        come = threads.submit(Attendance(HERE, port, 1, GIVEN).wait, 0.5)
        connection, _ = other.accept()
        connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
        assert "has not answered process 1" in refusal(come)
        connection.close()


def proof(secret: bytes, text: bytes) -> bytes:
    return hmac.digest(secret, text, hashlib.sha256).hex().encode()


def greeted(stranger: socket.socket, mine: bytes) -> bytes:
    """Exchanges nonces as a process does; returns both, process 0's first."""
    stranger.sendall(mine + b"\n")
    theirs = stranger.makefile("rb").readline().strip()
    assert theirs.startswith(b"jvpipe-meeting-1 ")
    return theirs + b" " + mine


NONSENSE = [
    b"",
    b"\n",
    b"GET / HTTP/1.1\r\n\r\n",
    os.urandom(4096),
    b"x" * (1 << 20),
    b"jvpipe-meeting-1 00\n" + b"[" * 60_000 + b"\n",
    b"jvpipe-meeting-1 00\n{}\n",
]
UNSEEMLY = [
    b"[" * 60_000,
    b"9" * 60_000,
    b"[]",
    b"{}",
    b"\xff",
    json.dumps({"process": "1", "parts": {}}).encode(),
    json.dumps({"process": True, "parts": {}}).encode(),
    json.dumps({"process": 0, "parts": {}}).encode(),
    json.dumps({"process": 1, "parts": {"--seed": [1, 2]}}).encode(),
    json.dumps({"process": 2, "parts": GIVEN.parts}).encode(),
]


@pytest.mark.parametrize("secret", [b"a secret", b""])
def test_nonsense_is_dropped_and_slow_ones_hold_up_nobody(
    secret: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    given = Given(VALUES, secret)
    with room(2, given) as here, ExitStack() as held:
        for words in NONSENSE:
            stranger = held.enter_context(here.stranger())
            try:
                stranger.sendall(words)  # and stays, silent from here on
            except OSError:
                assert len(words) == 1 << 20
        for text in UNSEEMLY:  # from one who has the secret
            stranger = held.enter_context(here.stranger())
            nonces = greeted(stranger, b"jvpipe-meeting-1 00")
            stranger.sendall(proof(secret, nonces + b" client 0 " + text) + b" " + text + b"\n")
            assert stranger.recv(1) == b"", text
        assert here.come(1, given).result(LIMIT_S) == here.coordinator
        here.first.result(LIMIT_S)
    assert "Traceback" not in capfd.readouterr().err


def test_what_was_said_once_is_not_believed_again(capsys: pytest.CaptureFixture[str]) -> None:
    text = json.dumps({"process": 1, "parts": GIVEN.parts}).encode()
    with room(2) as here:
        with here.stranger() as stranger:
            nonces = greeted(stranger, b"jvpipe-meeting-1 00")
        said = proof(GIVEN.secret, nonces + b" client 0 " + text) + b" " + text + b"\n"
        with here.stranger() as again:
            greeted(again, b"jvpipe-meeting-1 00")
            again.sendall(said)
            assert b"port" not in again.makefile("rb").read()
        assert not here.first.done()
        assert "refused a process" in capsys.readouterr().err
        here.come(1).result(LIMIT_S)


def test_the_secret_is_never_sent() -> None:
    """A relay between both ends hears all that is said."""
    heard: list[bytes] = []

    def passed_on(source: socket.socket, target: socket.socket) -> None:
        while words := source.recv(1 << 16):
            heard.append(words)
            target.sendall(words)
        target.shutdown(socket.SHUT_WR)

    with ExitStack() as held:
        here = held.enter_context(room(2))
        relay = held.enter_context(socket.create_server((HERE, 0)))
        more = held.enter_context(ThreadPoolExecutor())
        attendance = Attendance(HERE, relay.getsockname()[1], 1, GIVEN)
        come = more.submit(attendance.wait, LIMIT_S)
        client, server = held.enter_context(relay.accept()[0]), held.enter_context(here.stranger())
        passing = [more.submit(passed_on, *ends) for ends in ((client, server), (server, client))]
        assert come.result(LIMIT_S) == here.coordinator
        attendance.end()
        for each in passing:
            each.result(LIMIT_S)
    assert GIVEN.secret not in b"".join(heard)
    assert GIVEN.secret.hex().encode() not in b"".join(heard)


def test_strangers_in_a_crowd_are_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "PATIENCE", meeting.Patience(crowd=2))
    with room(2) as here, ExitStack() as held:
        crowd: Sequence[socket.socket] = [held.enter_context(here.stranger()) for _ in range(3)]
        assert crowd[0].recv(1) == crowd[1].recv(1) == b"j"
        assert crowd[2].recv(1) == b""
        for stranger in crowd:
            stranger.close()
        here.come(1).result(LIMIT_S)
