"""The processes of a run: connecting, exchanging metrics after each step, watching and ending.

The processes connect by the protocol of runtime/engine/meeting.py. An exchange waits for all
processes, so all of them must make the same exchanges in the same order.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, replace
from ipaddress import ip_address
from itertools import chain, starmap
from pathlib import Path
from typing import Any, NoReturn

import jax

from jvpipe.cli.command_options import TrainOptions, agreed_options
from jvpipe.cli.shell import ExitCode
from jvpipe.ir.kinds import Kind
from jvpipe.ir.span import Hop, Level, Picture, Span
from jvpipe.report.chrome_trace import Busy
from jvpipe.report.metrics import StepMetrics
from jvpipe.runtime.engine.hosts import ALONE, Hosts, present_hosts
from jvpipe.runtime.engine.meeting import PATIENCE, Attendance, Given, MeetingServer
from jvpipe.runtime.engine.signed_lines import read_secret
from jvpipe.session.settings import library_versions
from jvpipe.trace.digests import digest
from jvpipe.util.brief import first_line
from jvpipe.util.given import checked_address

Own = tuple[StepMetrics, Busy]
"""One process's measurements of a step: the metrics, and how busy its devices were."""


def shared(
    hosts: Hosts, signum: int | None, ours: Own | None
) -> tuple[int | None, StepMetrics | None]:
    """Exchanges metrics and signals between all processes, each of which must make the same call.

    Args:
        hosts: this process and the others.
        signum: the number of the signal that this process has received, if any.
        ours: this process's measurements of a step; None if there is no step to report.

    Returns:
        The number of a signal that some process has received, or None; and the metrics of the step
        for all processes together, or None if there is no step.
    """
    if hosts.count == 1:
        return signum, ours and ours[0]
    # The signal is sent together with the metrics, so that each step costs only one exchange.
    mine = [signum, ours and [asdict(ours[0]), ours[1]]]
    answers = hosts.exchange_json("step", mine)
    heard = next((answer for answer, _ in answers if answer is not None), None)
    if ours is None:
        return heard, None
    measured = [(line, Busy(*busy)) for _, (line, busy) in answers]
    return heard, _merged(ours[0], measured)


_JOINED: dict[str, Callable[[list[Any]], Any]] = {
    "seconds": max,
    "examples_per_s": min,
    "tokens_per_s": min,
    "mfu": min,
    "swapped_bytes": sum,
    "copy_hidden_s": sum,
    "copy_exposed_s": sum,
    "recomputed_s": sum,
}
"""How the metrics of all processes are joined. The time and the rates of a step are those of the
slowest process. Bytes are summed, and so are the seconds of copying and recomputing."""


def _merged(ours: StepMetrics, measured: Sequence[tuple[Mapping[str, Any], Busy]]) -> StepMetrics:
    """Joins the measurements of all processes; metrics that are equal in all come from `ours`.

    Args:
        ours: the metrics that this process measured.
        measured: for each process, its metrics by name, and how busy its devices were.
    """
    lines, work = zip(*measured, strict=True)
    numbers: dict[str, Any] = {}
    for name, join_numbers in _JOINED.items():
        present = [line[name] for line in lines if line[name] is not None]
        numbers[name] = join_numbers(present) if present else None
    seconds, elapsed_s, devices = zip(*work, strict=True)
    busy_fraction: dict[str, float] = {}  # each process measures the work of its own devices
    for line in lines:
        busy_fraction |= line["busy_fraction"]
    return replace(
        ours,
        **numbers,
        bubble_fraction=Busy(sum(seconds), max(elapsed_s), sum(devices)).bubble_fraction,
        peak_bytes={name: max(x["peak_bytes"][name] for x in lines) for name in ours.peak_bytes},
        busy_fraction=busy_fraction,
    )


def shared_picture(hosts: Hosts, picture: Picture) -> Picture:
    """Joins the pictures of all processes, whose clocks differ, into one picture.

    All processes leave an exchange at nearly the same time, which becomes time 0 in the picture.
    """
    if hosts.count == 1:
        return picture
    hosts.exchange("clock", b"")
    picture = picture.since(time.perf_counter())
    mine = [list(map(astuple, picture.spans)), picture.levels, picture.hops]
    answers = hosts.exchange_json("timeline", mine)
    all_spans, all_levels, all_hops = map(chain.from_iterable, zip(*answers, strict=True))
    # In the JSON list of a span, the kind is a text.
    return Picture(
        tuple(Span(*times, kind=Kind(kind), args=args) for *times, kind, args in all_spans),
        tuple(starmap(Level, all_levels)),
        tuple(starmap(Hop, all_hops)),
    )


# The functions below connect the processes of a run, watch them during training, and end them.


def join(options: TrainOptions) -> Hosts:
    """Connects this process to the others that the options name.

    It must be called before JAX makes any device.

    Raises:
        ValueError: options about processes are missing or wrong, process 0 does not answer, or the
            processes have different options or secrets.
        HostLost: a process does not connect in time, or this process's number is taken.
        SystemExit: the user stops the command before all processes have connected.
    """
    secret = read_secret(options.secret_file)
    try:
        met = _of_cluster(secret) if options.distributed else _meeting(options, secret)
    except KeyboardInterrupt as stop:
        print("stopped before all processes had connected", file=sys.stderr)
        raise SystemExit(ExitCode.STOPPED + signal.SIGINT) from stop
    if met is None:
        return ALONE
    where, farewell = met
    # JAX does not report which process it waits for, so the message names all other processes.
    processes = range(options.num_processes or 0)
    others = " or ".join(f"process {i}" for i in processes if i != options.process_id)
    # `_given_up_after` ends the process first, with a clearer message than JAX's.
    jax_timeout_s = round(options.host_timeout) + 60
    with _given_up_after(options.host_timeout, others or "the others"):
        try:
            jax.distributed.initialize(
                **where,
                initialization_timeout=jax_timeout_s,
                heartbeat_timeout_seconds=jax_timeout_s,
                shutdown_timeout_seconds=10,
            )
        except (ValueError, RuntimeError) as problem:
            raise ValueError(
                f"the processes cannot connect: {first_line(problem)} If JAX does not support your "
                "cluster, give --coordinator HOST:PORT, --process-id and --num-processes"
            ) from problem
    hosts = present_hosts()
    if hosts is None:
        return ALONE
    hosts.timeout_s = hosts.silent_s = options.host_timeout
    hosts.address, hosts.farewell = options.host_address, farewell
    return hosts


Met = tuple[dict[str, Any], Callable[[], None]]
"""The arguments of `jax.distributed.initialize`, and the farewell: a function that tells the other
processes that this one ends without an error."""


def _of_cluster(secret: bytes) -> Met:
    """Returns empty arguments and an empty farewell, because JAX itself finds the processes."""
    if secret:
        raise ValueError(
            "with --distributed the processes meet through JAX, which does not check a secret: "
            "give --coordinator HOST:PORT, --process-id and --num-processes, or leave out "
            "--secret-file"
        )
    print("waiting for the other processes", file=sys.stderr)
    return {}, lambda: None


def _meeting(options: TrainOptions, secret: bytes) -> Met | None:
    """Takes part in the meeting of the processes; returns None if there is only one process."""
    coordinator, process, count = options.coordinator, options.process_id, options.num_processes
    flags = {"--coordinator": coordinator, "--process-id": process, "--num-processes": count}
    lacking = [flag for flag, value in flags.items() if value is None]
    if len(lacking) == len(flags):
        return None
    if coordinator is None or process is None or count is None:
        absent, needed = " and ".join(lacking), ", ".join(flags)
        raise ValueError(f"{absent} must also be given: several processes need {needed}")
    host, port = checked_address("--coordinator", coordinator)
    if process >= count:
        raise ValueError(
            f"--process-id must be from 0 to {count - 1}, because --num-processes is {count}; it "
            f"is {process}"
        )
    # Different values could make the processes wait for each other forever. So the values are
    # compared before JAX connects the processes.
    values = [*library_versions(), *agreed_options(options), _model_file(options.model)]
    agreed = Given(values, secret)
    plain_host = host.strip("[]")  # an IPv6 address has brackets before a port
    if process:
        attendance = Attendance(plain_host, port, process, agreed)
        own_port = attendance.wait(options.host_timeout)
        where, farewell = {"coordinator_address": f"{host}:{own_port}"}, attendance.end
    else:
        here = options.host_address or plain_host
        where, farewell = _opened(here, port, count, agreed, options.host_timeout)
    if count == 1:
        return None
    where |= {"process_id": process, "num_processes": count}
    return where | {"cluster_detection_method": "deactivate"}, farewell


def _opened(host: str, port: int, count: int, agreed: Given, timeout_s: float) -> Met:
    """Opens the meeting as process 0, and waits until all processes have connected.

    The arguments in the result have the address at which JAX will connect the processes. The port
    of this address is reserved, so no other program can take it before JAX does.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as problem:
        raise ValueError(
            f"--coordinator: the host {host} cannot be resolved: {problem.strerror}"
        ) from problem
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen()
    except OSError as problem:
        listener.close()
        raise ValueError(
            f"--coordinator {host}:{port} cannot be opened by process 0: {problem.strerror}; give "
            "the host of process 0 and a port that is free there, or give the address of that "
            "host by --host-address"
        ) from problem
    here = str(address[0])
    if not agreed.secret and not ip_address(here).is_loopback:
        print(
            f"warning: anyone who can reach {here} can join or end this run: give --secret-file",
            file=sys.stderr,
        )
    # This socket stays bound to the port, so that no other program can take it. JAX's server can
    # still listen there, because both set SO_REUSEPORT.
    port_holder = socket.socket(family, socket.SOCK_STREAM)
    port_holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    port_holder.bind((here, 0))
    server = MeetingServer(listener, port_holder, count, agreed)
    server.wait(timeout_s)
    own_port = port_holder.getsockname()[1]
    bracketed = f"[{here}]" if family == socket.AF_INET6 else here
    jax_address = f"{bracketed}:{own_port}"
    return {"coordinator_address": jax_address, "coordinator_bind_address": jax_address}, server.end


def _model_file(model: str) -> tuple[str, str]:
    """Returns a name for messages, and the digest of the user's file that defines the model.

    If `--model` does not name a file, the digest is empty. Processes compare the digests, because
    two hosts may have different versions of the file.
    """
    file = Path(model.rpartition(":")[0])
    is_file = file.suffix == ".py" and file.is_file()
    found = digest(file.read_text(errors="replace")) if is_file else ""
    return "the digest of --model's file", found


@contextmanager
def _given_up_after(timeout_s: float, awaited: str) -> Iterator[None]:
    """Ends the process if the code inside the context takes longer than `timeout_s` seconds.

    The code waits in JAX, where neither an exception nor a signal could interrupt it.
    """
    message = f"error: not all processes connected in {timeout_s:g} s: JAX waited for {awaited}"

    def give_up() -> None:
        print(message, file=sys.stderr, flush=True)
        os._exit(ExitCode.TRY_AGAIN)

    timer = threading.Timer(timeout_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Watch:
    """A context manager that ends this process if another is lost or the run makes no progress.

    It acts only if there are several processes. The training thread cannot be interrupted while it
    waits for a device, so another thread checks. Before that thread ends the process, it prints the
    cause as the last line. The training thread may notice the loss at the same moment: whoever
    takes `_verdict` first tells the cause, and the other thread stays silent.

    Args:
        hosts: this process and the others.
        say: is called at each sign of progress, with the next activity of the run.
    """

    def __init__(self, hosts: Hosts, say: Callable[[str], None]) -> None:
        self._hosts, self._say = hosts, say
        self._stopped, self._verdict = threading.Event(), threading.Lock()
        self._at_s, self._doing = time.monotonic(), "before the first step"

    def progress(self, doing: str) -> None:
        """Records that the run makes progress, and its next activity."""
        self._at_s, self._doing = time.monotonic(), doing
        self._say(doing)

    def __enter__(self) -> "Watch":
        if self._hosts.count > 1:
            threading.Thread(target=self._look, name="jvpipe-watch", daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()
        self._verdict.acquire()  # if the other thread has it, that thread ends this process

    def _look(self) -> None:
        while not self._stopped.wait(PATIENCE.look_s):
            if lost := self._hosts.lost():
                # The training thread gets some time to report the loss itself, because it also
                # knows which task failed. If process 0 is lost, there is no time for that, because
                # JAX ends all other processes at once.
                if 0 not in lost and self._stopped.wait(PATIENCE.grace_s):
                    return
                self._end(f"{self._hosts.gone()}, go on from the last checkpoint")
            silent_s = time.monotonic() - self._at_s
            if silent_s > self._hosts.timeout_s:
                self._end(f"no progress for {silent_s:.0f} s: {self._awaited(silent_s)}")

    def _awaited(self, silent_s: float) -> str:
        """Names the silent processes; if there are none, the process that this one waits for."""
        if silent := self._hosts.silent(silent_s / 2):
            return silent
        awaited = self._hosts.awaited()
        return f"waited for {awaited}" if awaited else "all processes are connected"

    def _end(self, message: str) -> None:
        if not self._verdict.acquire(blocking=False):
            return
        process = self._hosts.named(self._hosts.process)
        print(f"error: {message}; {process} was at {self._doing}", file=sys.stderr)
        leave(self._hosts, ExitCode.TRY_AGAIN)


def leave(hosts: Hosts, code: int) -> NoReturn:
    """Ends this process at once, in a run of several processes.

    With Python's usual exit, JAX would wait for the other processes, even for a lost one.

    Args:
        hosts: this process and the others.
        code: the exit code.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    hosts.farewell()
    if code == ExitCode.TRY_AGAIN:
        # JAX ends the other processes when process 0 has ended. So process 0 waits for some
        # seconds, in which they can report the loss.
        if hosts.process == 0 and hosts.count > 2:
            time.sleep(PATIENCE.ending_s)
    else:
        farewell = threading.Thread(target=jax.distributed.shutdown, daemon=True)
        farewell.start()
        farewell.join(PATIENCE.ending_s)
    os._exit(code)
