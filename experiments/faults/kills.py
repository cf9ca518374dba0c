"""Kills runs and resumes them: python -m experiments.faults.kills [--kills 60] [--folder DIR]

A stream under pipedream, planned by the default planner, is killed (SIGKILL) again and again: while it starts, traces
and plans, while it trains, while it saves. Each time it is resumed without a word about its plan. Once it is done its
losses and parameters are compared with those of a run of the same command that nothing disturbed.
"""

import argparse
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.faults.runs import LIMIT_S, Run, page

STEPS = 24
OPTIONS = ("--schedule", "pipedream", "--stages", "2", "--steps", str(STEPS), "--checkpoint-every", "2")
EARLY, START_S, STEP_S = 0.3, 12.0, 0.3
"""How many of the kills come at any time from the start on, and how long that takes; the others come during a step."""
_POLL_S = 0.02


@dataclass(frozen=True)
class Outcome:
    """What became of a run: how often it was killed, at which steps, and what was wrong in the end (nothing)."""

    killed_at: tuple[int, ...]
    wrong: str = ""


def undisturbed(folder: Path, options: tuple[str, ...] = OPTIONS) -> Run:
    """A whole run of the command, with a cache of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(folder / "whole", page(folder / "page.txt"), folder / "cache", options)
    if told := run.finish("--export", str(_exported(run))):
        raise RuntimeError(told)
    return run


def killed(whole: Run, name: str, kills: int, rng: random.Random) -> Outcome:
    """The same command once more, killed so many times, or until it is done."""
    run, killed_at = replace(whole, path=whole.path.with_name(name)), list[int]()
    while len(killed_at) < kills:
        with run.start("--export", str(_exported(run))) as process:
            _wait(run, process, rng)
            process.kill()
            told = process.communicate(timeout=LIMIT_S)[1]
        if process.returncode == 0:
            break
        if process.returncode > 0:
            return Outcome(tuple(killed_at), told)
        killed_at.append(len(_logged(run)))
    else:
        if told := run.finish("--export", str(_exported(run))):
            return Outcome(tuple(killed_at), told)
    return Outcome(tuple(killed_at), _difference(run, whole))


def outcomes(whole: Run, kills: int, each: int = 10, seed: int = 0) -> Iterator[Outcome]:
    """Run after run, until there were so many kills; each is killed a few times at most."""
    rng, left, number = random.Random(seed), kills, 0
    while left > 0:
        outcome = killed(whole, f"killed-{number}", min(left, each), rng)
        left, number = left - max(1, len(outcome.killed_at)), number + 1
        yield outcome


def _wait(run: Run, process: "subprocess.Popen[str]", rng: random.Random) -> None:
    """Until it is time to kill, or the run is done."""
    if rng.random() < EARLY:
        until, steps = time.monotonic() + rng.uniform(0, START_S), None
    else:
        until, steps = time.monotonic() + LIMIT_S, len(_logged(run)) + rng.randint(1, 6)
    while process.poll() is None and time.monotonic() < until and (steps is None or len(_logged(run)) < steps):
        time.sleep(_POLL_S)
    if steps is not None:
        time.sleep(rng.uniform(0, STEP_S))


def _logged(run: Run) -> list[str]:
    path = run.path / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def _difference(run: Run, whole: Run) -> str:
    if run.losses() != whole.losses():
        return f"losses differ: {run.losses()} after kills, {whole.losses()} without"
    same = _exported(run).read_bytes() == _exported(whole).read_bytes()
    return "" if same else "the last parameters differ"


def _exported(run: Run) -> Path:
    return run.path.with_suffix(".safetensors")


def main() -> None:
    """Prints a line per run, and how many resumes there were."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        whole = undisturbed(given.folder or Path(temporary))
        resumes, wrong = 0, 0
        for outcome in outcomes(whole, given.kills, seed=given.seed):
            resumes, wrong = resumes + len(outcome.killed_at), wrong + bool(outcome.wrong)
            print(f"killed after steps {list(outcome.killed_at)}: {outcome.wrong or 'to the bit'}", flush=True)
        print(f"{resumes} kills, {wrong} runs that did not go on to the bit")


if __name__ == "__main__":
    main()
