"""The command over several processes of one host: what they train, and how they end when something
goes wrong.
"""

import fcntl
import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from experiments.faults.runs import page as prose
from experiments.hosts.run import free_port
from jvpipe.cli.shell import ExitCode
from tests.commands import finished, running
from tests.forks import Fork
from tests.grid import grid

STEPS, SAVED_EVERY = 100, 20


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prose to train on."""
    return prose(tmp_path_factory.mktemp("data") / "page.txt")


def arguments(page: Path, run: Path, *more: str) -> list[str]:
    base = [
        "--size",
        "tiny",
        "--planner",
        "even",
        "--data",
        str(page),
        "--stages",
        "3",
        "--steps",
        str(STEPS),
    ]
    return [
        *base,
        "--batch-size",
        "8",
        "--checkpoint-every",
        str(SAVED_EVERY),
        "--run-dir",
        str(run),
        *more,
    ]


@contextmanager
def processes(
    count: int,
    given: Sequence[str],
    timeout_s: int = 60,
    stands: Sequence[Path | None] = (None,) * 9,
) -> Iterator[list[Fork]]:
    """The same command in several processes, each in a folder; none outlives the block."""
    coordinator = f"127.0.0.1:{free_port()}"
    with ExitStack() as stack:
        places = [("--process-id", str(i), "--num-processes", str(count)) for i in range(count)]
        meet = ("--coordinator", coordinator, "--host-timeout", str(timeout_s))
        started = [
            running(*given, *place, *meet, stands=stands[i]) for i, place in enumerate(places)
        ]
        yield [stack.enter_context(each) for each in started]


def last_lines(commands: Sequence[Fork]) -> list[tuple[int, str]]:
    """Exit code and last line of each process, once all have ended."""
    ends = [command.ended() for command in commands]
    return [(end.returncode, (end.stderr.splitlines() or [""])[-1]) for end in ends]


def error(end: subprocess.CompletedProcess[str]) -> str:
    """The one line that says what went wrong."""
    (line,) = [line for line in end.stderr.splitlines() if line.startswith("error: ")]
    return line


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def has_trained(run: Path, steps: int) -> bool:
    metrics = run / "metrics.jsonl"
    return metrics.exists() and len(metrics.read_text().splitlines()) >= steps


@pytest.fixture(scope="module")
def undisturbed(page: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process."""
    run = tmp_path_factory.mktemp("runs") / "one"
    done = finished(*arguments(page, run))
    assert done.returncode == 0, done.stderr
    return losses(run)


def test_a_signal_to_one_stops_all_at_one_step_and_fewer_go_on(
    page: Path, undisturbed: list[float], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with processes(3, arguments(page, run)) as commands:
        commands[0].wait_for(lambda: has_trained(run, 1))
        commands[2].send(signal.SIGTERM)
        ends = [command.ended() for command in commands]
    assert [end.returncode for end in ends] == [128 + signal.SIGTERM] * 3, [
        end.stderr[-500:] for end in ends
    ]
    assert "to go on: python -m jvpipe.train" in ends[0].stderr
    saved = max(int(path.name) for path in (run / "checkpoints").iterdir())
    assert len(losses(run)) == saved
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert len(line["peak_bytes"]) == 3
    assert all(line["peak_bytes"].values())
    assert 0 <= line["bubble_fraction"] < 1
    events = json.loads((run / "timeline.json").read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(line["peak_bytes"]) <= set(names.values())
    held = {
        name: [e["args"]["bytes"] for e in events if e["name"] == f"{name} bytes"]
        for name in line["peak_bytes"]
    }
    assert all(
        0 < max(levels) <= line["peak_bytes"][name] for name, levels in held.items()
    )  # of one step, of all
    leave, arrive = ({e["id"]: names[e["tid"]] for e in events if e["ph"] == end} for end in "sf")
    a, b, c = sorted(held, key=lambda name: int(name.split(":")[1]))
    assert {(leave[i], arrive[i]) for i in arrive} >= {(a, b), (b, c), (c, b), (b, a)}
    config = json.loads((run / "config.json").read_text())
    assert "coordinator" not in config
    assert losses(run) == undisturbed[:saved]
    with processes(2, ["--run-dir", str(run), "--resume"]) as commands:
        ends = [command.ended() for command in commands]
    assert [end.returncode for end in ends] == [0, 0], [end.stderr[-500:] for end in ends]
    assert not any("has ended" in end.stderr for end in ends)
    assert "held-out loss" in ends[0].stdout
    assert ends[1].stdout == ""
    assert losses(run) == undisturbed


@pytest.mark.parametrize("dies", grid([0, 1], 1))
def test_the_others_say_who_was_killed_and_one_goes_on(
    page: Path, undisturbed: list[float], tmp_path: Path, dies: int
) -> None:
    run = tmp_path / "run"
    with processes(2, arguments(page, run)) as commands:
        commands[0].wait_for((run / "checkpoints" / f"{SAVED_EVERY:08}").exists)
        commands[dies].send(signal.SIGKILL)
        left = commands[1 - dies].ended()
    if (
        dies or left.returncode != -signal.SIGABRT
    ):  # without the first process JAX may be faster than we
        assert left.returncode == ExitCode.TRY_AGAIN, left.stderr
        assert (
            f"process {dies} (host {socket.gethostname()}) is gone, go on from the last checkpoint"
            in error(left)
        )
    if dies:
        resumed = finished("--run-dir", str(run), "--resume")
        assert resumed.returncode == 0, resumed.stderr
        assert losses(run) == undisturbed


@pytest.mark.thorough
def test_who_is_stopped_is_named_after_the_silence_that_is_allowed(
    page: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with processes(2, arguments(page, run, "--steps", "4000"), timeout_s=8) as commands:
        commands[0].wait_for(lambda: has_trained(run, 2))
        commands[1].send(signal.SIGSTOP)
        left = commands[0].ended()
    assert left.returncode == ExitCode.TRY_AGAIN, left.stderr
    assert "process 1" in error(left)
    parts = "no progress for", "has not told its", "has been silent for"
    assert any(part in error(left) for part in parts)


def test_what_differs_is_named_by_both_and_nothing_is_written(page: Path, tmp_path: Path) -> None:
    run = tmp_path / "new" / "run"
    first = {
        "--stages": "3",
        "--steps": "100",
        "--batch-size": "8",
        "--schedule": "1f1b",
        "--num-processes": "3",
    }
    other = {
        "--stages": "2",
        "--steps": "90",
        "--batch-size": "4",
        "--schedule": "gpipe",
        "--num-processes": "2",
    }
    meet = ("--coordinator", f"127.0.0.1:{free_port()}")
    flags = [[text for pair in each.items() for text in pair] for each in (first, other)]
    with (
        running(*arguments(page, run), *flags[0], *meet, "--process-id", "0") as a,
        running(*arguments(page, run), *flags[1], *meet, "--process-id", "1") as b,
    ):
        told = last_lines([a, b])
    assert [code for code, _ in told] == [2, 2]
    for name, value in first.items():
        assert f"{name} is {value!r} in process 0 and {other[name]!r} in process 1" in told[0][1]
        assert f"{name} is {other[name]!r} in process 1 and {value!r} in process 0" in told[1][1]
    assert told[0][1].startswith("error: the processes were not given the same: ")
    assert "--data" not in told[0][1]
    assert not (tmp_path / "new").exists()


def listening(pid: int) -> set[tuple[str, int]]:
    """The addresses and ports where a process listens, as the system tells; addresses in its
    hexadecimal form.
    """
    sockets: set[str] = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            sockets.add(os.readlink(path))
    tables = [Path(f"/proc/{pid}/net/{kind}").read_text().splitlines() for kind in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table[1:]]
    is_listening = "0A"
    own = [row[1] for row in rows if row[3] == is_listening and f"socket:[{row[9]}]" in sockets]
    return {(where.split(":")[0], int(where.split(":")[1], 16)) for where in own}


@pytest.mark.thorough
def test_second_and_strange_processes_are_refused_and_the_run_goes_on(
    page: Path, tmp_path: Path
) -> None:
    run, secret, other = (tmp_path / name for name in ("run", "secret", "other"))
    for path in (secret, other):
        path.write_text(f"{path.name} of a test")
        path.chmod(0o600)
    given = arguments(page, run, "--stages", "2", "--steps", "150")
    with processes(2, [*given, "--secret-file", str(secret)]) as commands:
        commands[0].wait_for(lambda: has_trained(run, 1))
        meet = commands[1].arguments
        second = finished(*meet)
        stranger = finished(*meet, "--secret-file", str(other))
        opened = [listening(command.pid) for command in commands]
        ends = [command.ended() for command in commands]
    assert second.returncode == ExitCode.TRY_AGAIN
    assert (
        second.stderr
        == "error: there is a process 1 already: the run goes on without another one\n"
    )
    assert stranger.returncode == 2
    assert "has another secret than process 1" in error(stranger)
    assert [end.returncode for end in ends] == [0, 0], [end.stderr[-500:] for end in ends]
    said = ends[0].stderr
    assert "refused a second process 1, on 127.0.0.1" in said
    assert "refused a process on 127.0.0.1: its secret is another" in said
    port = int(meet[meet.index("--coordinator") + 1].split(":")[1])
    loopback = {
        "0100007F",
        "0000000000000000FFFF00000100007F",
    }  # 127.0.0.1, and the same as IPv6 has it
    assert port in {port for _, port in opened[0]}
    assert {address for process in opened for address, _ in process} <= loopback


def test_a_mistake_that_all_make_is_told_by_all(page: Path, tmp_path: Path) -> None:
    run = tmp_path / "new" / "run"
    with processes(2, arguments(page, run, "--stages", "1")) as commands:
        told = last_lines(commands)
    assert (
        told
        == [
            (
                2,
                "error: 1 stages are too few for 2 processes: use at least as many stages, or "
                "fewer processes",
            )
        ]
        * 2
    )
    assert not (tmp_path / "new").exists()


def test_a_folder_that_one_does_not_see_is_told_by_all(page: Path, tmp_path: Path) -> None:
    """The folder is given from where each process stands, and they stand apart."""
    flags = [
        *arguments(page, Path("run")),
        "--coordinator",
        f"127.0.0.1:{free_port()}",
        "--num-processes",
        "2",
    ]
    for i in range(2):
        (tmp_path / str(i)).mkdir()
    with (
        running(*flags, "--process-id", "0", stands=tmp_path / "0") as first,
        running(*flags, "--process-id", "1", stands=tmp_path / "1") as second,
    ):
        told = last_lines([first, second])
    assert [code for code, _ in told] == [2, 2]
    assert all(
        "the folder of a run must be on a file system that all processes share" in line
        for _, line in told
    )
    assert not list(tmp_path.glob("*/run"))


def test_an_error_in_one_is_told_by_it_and_ends_the_others(page: Path, tmp_path: Path) -> None:
    """The second process may write next to nothing, as on a disk that is full."""
    meet = ("--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", "2")
    given = arguments(page, tmp_path / "run", "--stages", "2", "--host-timeout", "60", *meet)
    with (
        running(*given, "--process-id", "0") as first,
        running(*given, "--process-id", "1", largest_file_bytes=20_000) as second,
    ):
        (code, told), (other_code, other) = last_lines([first, second])
    assert (code, other_code) == (2, 2)
    assert told.startswith("error: process 1 (host "), told
    assert "File too large" in told
    assert other.startswith("error: "), other
    assert not list((tmp_path / "run" / "checkpoints").glob("*/generation-0?????"))


def test_a_run_that_is_held_by_another_is_left_alone(page: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    held = os.open(run, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with processes(2, arguments(page, run)) as commands:
        told = last_lines(commands)
    os.close(held)
    assert [code for code, _ in told] == [2, 2]
    assert all("another run is at work in" in line for _, line in told)


def test_who_never_comes_is_waited_for_no_longer_than_allowed(page: Path, tmp_path: Path) -> None:
    meet = (
        "--coordinator",
        f"127.0.0.1:{free_port()}",
        "--num-processes",
        "2",
        "--host-timeout",
        "2",
    )
    with (
        running(*arguments(page, tmp_path / "run"), *meet, "--process-id", "0") as first,
        running(
            "--coordinator", f"127.0.0.1:{free_port()}", *meet[2:], "--process-id", "1"
        ) as second,
    ):
        told = last_lines([first, second])
    assert told[0][0] == ExitCode.TRY_AGAIN
    assert (
        told[0][1]
        == f"error: not all processes have come within 2 s: waited for process 1 at {meet[1]}"
    )
    assert told[1][0] == 2
    assert "has not answered process 1 for 2 s" in told[1][1]
    assert not (tmp_path / "run").exists()


def test_a_port_that_is_taken_is_named(page: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        meet = ("--coordinator", f"127.0.0.1:{port}", "--num-processes", "2", "--process-id", "0")
        refused = finished(*arguments(page, tmp_path / "run"), *meet)
    assert refused.returncode == 2
    assert refused.stderr.startswith(
        f"error: --coordinator 127.0.0.1:{port} cannot be opened by process 0: "
    )
    assert len(refused.stderr.splitlines()) == 1


def test_data_that_differ_are_told_by_both_and_nothing_is_written(
    page: Path, tmp_path: Path
) -> None:
    """The text is given from where each process stands, and they stand apart."""
    run = tmp_path / "new" / "run"
    flags = [
        *arguments(Path("page.txt"), run),
        "--coordinator",
        f"127.0.0.1:{free_port()}",
        "--num-processes",
        "2",
    ]
    for i in range(2):
        (tmp_path / str(i)).mkdir()
        (tmp_path / str(i) / "page.txt").write_text(page.read_text() + "\n\nThe end." * i)
    with (
        running(*flags, "--process-id", "0", stands=tmp_path / "0") as first,
        running(*flags, "--process-id", "1", stands=tmp_path / "1") as second,
    ):
        told = last_lines([first, second])
    differ = "error: the data of the processes differ between processes: their digest"
    assert all(code == 2 and line.startswith(differ) for code, line in told), told
    assert not (tmp_path / "new").exists()
