"""Strikes processes of several at random moments.

    python -m experiments.hosts.storm [--count 50] [--seed 0]

A run over 2 or 3 processes of this host has one of them killed (SIGKILL), stopped (SIGSTOP) or cut
off: all its connections are closed. That is at any moment from the start on, or some steps later.
Each process that is left must end by itself within the seconds that it was given, name whom it has
waited for, and leave with the code of docs/hosts.md.
"""

import argparse
import ctypes
import os
import random
import re
import signal
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

from experiments.hosts.run import free_port
from jvpipe.cli.shell import ExitCode
from tests.forks import Fork, forked

KINDS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "cut off": signal.SIGUSR1}
TIMEOUT_S, LATE_S = 8.0, 12.0
"""The --host-timeout, and how much later a process may end, for it leaves others the time to
speak.
"""
EARLY, START_S, STEPS, STEP_S = 0.3, 6.0, 40, 0.2
"""The share of blows at any moment from the start on, and how long that takes; the others follow a
step.
"""
OPTIONS = ("--model", "tests.own:Plain", "--planner", "even", "--steps", "100000")
_POLL_S = 0.02


class Blow(NamedTuple):
    """What becomes of which of how many processes, and when: seconds after the start, or after a
    step.
    """

    kind: str
    processes: int
    victim: int
    step: int
    delay_s: float

    def __str__(self) -> str:
        when = f"{self.delay_s:.1f} s after {f'step {self.step}' if self.step else 'the start'}"
        return f"{self.processes} processes, {self.victim} {self.kind} {when}"


class End(NamedTuple):
    """How a process that was left has ended: after how many seconds, with what code, saying
    what.
    """

    process: int
    took_s: float
    code: int
    line: str

    def lacks_first(self, blow: Blow) -> bool:
        """Whether its connections to process 0 have ended, upon which JAX may end it before it can
        speak.
        """
        cut = blow.kind == "cut off" and self.process == blow.victim
        return cut or (blow.victim == 0 and blow.kind != "stopped")

    def names(self, blow: Blow) -> bool:
        """Whether it says whom it waited for: the victim; of one that is cut off, any other."""
        others = [i for i in range(blow.processes) if i != self.process]
        awaited = others if self.process == blow.victim else [blow.victim]
        return any(re.search(rf"process {i}\b", self.line) for i in awaited)

    def faults(self, blow: Blow) -> list[str]:
        """What is not as docs/hosts.md promises."""
        never_met = self.code == ExitCode.MISTAKE and "has not answered" in self.line
        by_jax = self.code == -signal.SIGABRT and self.lacks_first(blow)
        faults = {
            f"code {self.code}": self.code == ExitCode.TRY_AGAIN or never_met or by_jax,
            "named nobody": self.names(blow),
            "late": self.took_s <= TIMEOUT_S + LATE_S,
        }
        return [fault for fault, right in faults.items() if not right]


def drawn(rng: random.Random, kind: str) -> Blow:
    """A blow at a random moment."""
    count = rng.choice((2, 3))
    victim = rng.randrange(count)
    if rng.random() < EARLY:
        return Blow(kind, count, victim, 0, rng.uniform(0, START_S))
    return Blow(kind, count, victim, rng.randint(1, STEPS), rng.uniform(0, STEP_S))


def struck(blow: Blow, folder: Path) -> list[End]:
    """Runs until a blow falls; how the processes that it leaves have ended.

    Args:
        blow: the one.
        folder: where the run writes.
    """
    meet = ("--coordinator", f"127.0.0.1:{free_port()}", "--host-timeout", str(TIMEOUT_S))
    given = (*OPTIONS, "--stages", str(blow.processes), "--run-dir", str(folder), *meet)
    places = [
        ("--process-id", str(i), "--num-processes", str(blow.processes))
        for i in range(blow.processes)
    ]
    with ExitStack() as stack:
        processes = [stack.enter_context(forked(process, *given, *place)) for place in places]
        metrics = folder / "metrics.jsonl"
        if blow.step:
            processes[0].wait_for(lambda: metrics.exists() and lines_of(metrics) >= blow.step)
        time.sleep(blow.delay_s)
        processes[blow.victim].send(KINDS[blow.kind])
        struck_s = time.monotonic()
        left = [i for i in range(blow.processes) if i != blow.victim or blow.kind == "cut off"]
        return [ended(i, processes[i], struck_s) for i in left]


def ended(i: int, process: Fork, struck_s: float) -> End:
    """How a process has ended; one that goes on for too long is killed."""
    until_s = struck_s + TIMEOUT_S + 2 * LATE_S
    while process.exit_code is None and time.monotonic() < until_s:
        time.sleep(_POLL_S)
    took_s = time.monotonic() - struck_s
    process.kill()
    end = process.ended()
    lines = end.stderr.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    warnings = [line for line in lines if line.startswith("warning: the connection")]
    return End(i, took_s, end.returncode, (errors or warnings or [end.stderr[-200:]])[-1])


def lines_of(path: Path) -> int:
    """How many lines a file has."""
    return path.read_bytes().count(b"\n")


def process(arguments: Sequence[str]) -> int:
    """One process of the run, whose connections are closed by SIGUSR1; returns the exit code."""
    from jvpipe.cli import train_command

    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])  # of threads to come, too
    threading.Thread(target=_cut_when_told, daemon=True).start()
    return train_command.main(list(arguments))


def _cut_when_told() -> None:
    signal.sigwait([signal.SIGUSR1])
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile, or no connection
            if os.readlink(path).startswith("socket:"):
                _cut(int(path.name))


def _cut(descriptor: int) -> None:
    connection = socket.socket(fileno=descriptor)
    try:
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.getpeername()
            ctypes.CDLL(None).shutdown(descriptor, socket.SHUT_RDWR)
    finally:
        connection.detach()


def main() -> None:
    """Prints a line per blow, and what was not as promised."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    os.environ.setdefault("XLA_FLAGS", "")
    rng, kinds, tally = random.Random(given.seed), list(KINDS), Counter[str]()
    took_s: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(given.count):
        blow = drawn(rng, kinds[number % len(kinds)])
        with tempfile.TemporaryDirectory() as folder:
            ends = struck(blow, Path(folder) / "run")
        told = []
        for end in ends:
            faults = end.faults(blow)
            tally["left"] += 1
            is_aborted = end.code == -signal.SIGABRT
            tally["ended by JAX"] += is_aborted
            tally["of these, had named whom they waited for"] += is_aborted and end.names(blow)
            tally["at fault"] += bool(faults)
            took_s[blow.kind].append(end.took_s)
            told.append(f"{end.process}: {end.took_s:.1f} s, code {end.code}{faults or ''}")
            if faults:
                told.append(repr(end.line))
        print(f"{blow}: {'; '.join(told)}", flush=True)
    for kind, seconds in took_s.items():
        if seconds:
            print(f"{kind}: ended after {min(seconds):.1f} to {max(seconds):.1f} s")
    print(f"{given.count} blows: {dict(tally)}")


if __name__ == "__main__":
    main()
