"""What the command says where processes meet, each in a thread and none of them in JAX's hands
yet.
"""

import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import MagicMock

import jax
import pytest

from experiments.hosts.run import free_port
from jvpipe.cli import processes
from jvpipe.cli.command_line import given
from jvpipe.cli.processes import Watch, join
from jvpipe.runtime.engine.hosts import ALONE, Hosts
from tests.commands import finished

LIMIT_S = 20


@pytest.fixture(autouse=True)
def without_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JVPIPE_SECRET_FILE", raising=False)


def refusals(*each: Sequence[str]) -> list[str]:
    """What processes say that cannot come together, by process."""
    meet = ["--coordinator", f"127.0.0.1:{free_port()}", "--host-timeout", str(LIMIT_S)]
    with ThreadPoolExecutor() as threads:
        ids = [["--process-id", str(i)] for i in range(len(each))]
        come = [
            threads.submit(join, given([*meet, *i, *more]))
            for i, more in zip(ids, each, strict=True)
        ]
        problems = [process.exception(LIMIT_S) for process in come]
    assert all(type(problem) is ValueError for problem in problems), problems
    return list(map(str, problems))


def test_a_number_of_processes_that_differs_is_named_by_both_at_once() -> None:
    told = refusals(("--num-processes", "3"), ("--num-processes", "2"))
    assert "--num-processes is '3' in process 0 and '2' in process 1" in told[0]
    assert "--num-processes is '2' in process 1 and '3' in process 0" in told[1]


def test_who_was_told_to_be_alone_refuses_the_others() -> None:
    meet = ["--coordinator", f"127.0.0.1:{free_port()}", "--host-timeout", str(LIMIT_S)]
    assert join(given([*meet, "--process-id", "0", "--num-processes", "1"])) is ALONE
    with pytest.raises(
        ValueError, match="--num-processes is '2' in process 1 and '1' in process 0"
    ):
        join(given([*meet, "--process-id", "1", "--num-processes", "2"]))


def test_a_model_file_that_differs_is_named_by_both(tmp_path: Path) -> None:
    for i in range(2):
        (tmp_path / str(i)).mkdir()
        (tmp_path / str(i) / "own.py").write_text(f"RATE = {i}\n")
    told = refusals(
        *(("--num-processes", "2", "--model", f"{tmp_path}/{i}/own.py:Model") for i in range(2))
    )
    assert all("the digest of --model's file is " in line for line in told)


@pytest.mark.parametrize("process", ["0", "1"])
def test_who_waits_can_be_stopped(process: str, capsys: pytest.CaptureFixture[str]) -> None:
    meet = [
        "--coordinator",
        f"127.0.0.1:{free_port()}",
        "--process-id",
        process,
        "--num-processes",
        "2",
    ]
    stop = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    stop.start()
    # The thread that waits goes on in this process, and ends before it would print anything.
    with pytest.raises(SystemExit) as end:
        join(given([*meet, "--host-timeout", "2"]))
    assert end.value.code == 128 + signal.SIGINT
    assert capsys.readouterr().err == "stopped before all processes had connected\n"


def test_a_network_without_a_secret_is_warned_of_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    everywhere = [
        "--coordinator",
        f"0.0.0.0:{free_port()}",
        "--process-id",
        "0",
        "--num-processes",
        "1",
    ]
    assert join(given(everywhere)) is ALONE
    told = "warning: anyone who can reach 0.0.0.0 can join or end this run: give --secret-file\n"
    assert capsys.readouterr().err == told


def test_an_error_of_jax_without_a_message_is_told_by_its_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(**_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(jax.distributed, "initialize", fails)
    with pytest.raises(ValueError, match="the processes cannot connect: RuntimeError If JAX"):
        join(given(["--distributed"]))


def test_a_secret_where_nobody_asks_for_it_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret")
    secret.chmod(0o644)
    meet = (
        "--coordinator",
        f"127.0.0.1:{free_port()}",
        "--process-id",
        "0",
        "--num-processes",
        "2",
    )
    open_to_others = finished(*meet, "--secret-file", str(secret))
    assert (open_to_others.returncode, len(open_to_others.stderr.splitlines())) == (2, 1)
    assert f"chmod 600 {secret}" in open_to_others.stderr
    secret.chmod(0o600)
    of_cluster = finished("--distributed", "--secret-file", str(secret))
    assert (of_cluster.returncode, len(of_cluster.stderr.splitlines())) == (2, 1)
    assert (
        "with --distributed the processes meet through JAX, which does not check a secret"
        in of_cluster.stderr
    )


def test_a_loss_that_the_training_thread_has_told_is_not_told_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The watch notices the loss of process 0 while the training thread reports it."""
    ended, looked, left = threading.Event(), threading.Event(), MagicMock()
    monkeypatch.setattr(processes, "leave", left)
    hosts = MagicMock(Hosts, count=2, process=1, timeout_s=60.0)

    def lost() -> tuple[int, ...]:
        looked.set()
        ended.wait(LIMIT_S)
        return (0,)

    hosts.lost.side_effect = lost
    with Watch(hosts, lambda _: None):
        assert looked.wait(LIMIT_S)
    ended.set()
    for thread in threading.enumerate():
        if thread.name == "jvpipe-watch":
            thread.join(LIMIT_S)
    assert capsys.readouterr().err == ""
    assert not left.called
