"""Kills one process of several, and goes on.

    python -m experiments.hosts.kills [--kills 20] [--seed 0]

A run over 2 or 3 processes loses one of them (SIGKILL) at some moment: while they meet, plan, train
or save. The others must end by themselves within seconds, with a line that names it. The run is
resumed by 1, 2 or 3 processes, and loses one again. Once it is done, its losses and parameters are
compared with those of one process that nothing disturbed.
"""

import argparse
import random
import signal
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from experiments.faults.runs import LIMIT_S, Run, page
from experiments.hosts.run import free_port

STEPS = 24
OPTIONS = ("--stages", "3", "--steps", str(STEPS), "--checkpoint-every", "2")
EARLY, START_S, STEP_S = 0.3, 10.0, 0.3
"""How many of the kills come at any time from the start on, and how long that takes; the others
come during a step.
"""
_POLL_S = 0.005


class Death(NamedTuple):
    """What became of the others once one process was killed: seconds until each had ended, and
    how.
    """

    victim: int
    steps: int
    took_s: Sequence[float]
    codes: Sequence[int]
    named: int


def disturbed(run: Run, count: int, rng: random.Random) -> Death | None:
    """Runs over so many processes until one is killed; None if the run was done before."""
    victim = rng.randrange(count)
    meet = (
        "--coordinator",
        f"127.0.0.1:{free_port()}",
        "--num-processes",
        str(count),
        "--host-timeout",
        "60",
    )
    with ExitStack() as stack:
        processes = [
            stack.enter_context(run.start(*meet, "--process-id", str(i))) for i in range(count)
        ]
        for process in processes:
            stack.callback(process.kill)
        wait(run, processes[victim], rng)
        processes[victim].send_signal(signal.SIGKILL)
        killed_s, steps = time.monotonic(), len(run.losses())
        others = [process for i, process in enumerate(processes) if i != victim]
        ended_s: dict[int, float] = {}
        while len(ended_s) < len(others) and time.monotonic() < killed_s + LIMIT_S:
            for i, process in enumerate(others):
                if i not in ended_s and process.poll() is not None:
                    ended_s[i] = time.monotonic() - killed_s
            time.sleep(_POLL_S)
        told = [process.communicate(timeout=LIMIT_S)[1] for process in others]
        codes = [process.returncode for process in others]
    if not any(codes):
        return None
    named = sum(f"process {victim} " in each for each in told)
    return Death(victim, steps, tuple(ended_s.values()), codes, named)


def wait(run: Run, process: "subprocess.Popen[str]", rng: random.Random) -> None:
    """Until it is time to kill, or the run is done."""
    if rng.random() < EARLY:
        until_s, steps = time.monotonic() + rng.uniform(0, START_S), None
    else:
        until_s, steps = time.monotonic() + LIMIT_S, len(run.losses()) + rng.randint(1, 4)
    while (
        process.poll() is None
        and time.monotonic() < until_s
        and (steps is None or len(run.losses()) < steps)
    ):
        time.sleep(_POLL_S)
    if steps is not None:
        time.sleep(rng.uniform(0, STEP_S))


def main() -> None:
    """Prints a line per kill, and how the run ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng, deaths, wrong, number = random.Random(given.seed), list[Death](), 0, 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        whole = Run(folder / "whole", page(folder / "page.txt"), folder / "cache", OPTIONS)
        export = ("--export", str(folder / "whole.safetensors"))
        if told := whole.finish(*export):
            raise RuntimeError(told)
        while len(deaths) < given.kills:
            run, number = replace(whole, path=folder / f"killed-{number}"), number + 1
            for _ in range(6):
                count = rng.choice((2, 3))
                death = disturbed(run, count, rng)
                if death is None:
                    break
                deaths.append(death)
                took = ", ".join(
                    f"{s:.2f} s (exit {code})"
                    for s, code in zip(death.took_s, death.codes, strict=True)
                )
                print(
                    f"{count} processes, {death.victim} killed after {death.steps} steps: {took}",
                    flush=True,
                )
            own = folder / f"{run.path.name}.safetensors"
            told = run.finish("--export", str(own))
            same = (
                not told
                and run.losses() == whole.losses()
                and own.read_bytes() == Path(export[1]).read_bytes()
            )
            wrong += not same
            print(
                f"resumed by one process: {'to the bit' if same else told or 'DIFFERS'}", flush=True
            )
    codes = Counter(code for death in deaths for code in death.codes)
    first = [s for death in deaths for s in death.took_s if death.victim == 0]
    later = [s for death in deaths for s in death.took_s if death.victim != 0]
    for name, taken in (("process 0", first), ("another", later)):
        if taken:
            print(
                f"{name} killed: the others ended after {statistics.median(taken):.2f} s, at most "
                f"{max(taken):.2f} s"
            )
    named = sum(death.named for death in deaths)
    print(
        f"{len(deaths)} kills, exit codes {dict(codes)}, {named} of "
        f"{sum(map(len, (d.codes for d in deaths)))} named it"
    )
    print(f"{wrong} runs that did not go on to the bit")


if __name__ == "__main__":
    main()
