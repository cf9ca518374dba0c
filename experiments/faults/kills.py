"""Kills runs and resumes them: python -m experiments.faults.kills [--kills 60] [--folder DIR]

Two kinds of runs take turns: a stream of BERT under pipedream, planned by the default planner, and
a model of one's own (own.py) that is evaluated every third step, of whose checkpoints the last and
the best are kept. Each is killed (SIGKILL) again and again: while it starts, traces and plans,
while it trains, while a checkpoint is written beside it. Each time it is resumed without a word
about its plan. Once it is done, its losses, evaluations, checkpoints and parameters are compared
with those of a run of the same command that nothing disturbed. And after each kill no more steps
may be lost than lie between three checkpoints: one may have been under way, and then the one before
it is whole.
"""

import argparse
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path

from experiments.faults.runs import LIMIT_S, Run, page

STEPS = 24
OPTIONS = (
    "--schedule",
    "pipedream",
    "--stages",
    "2",
    "--steps",
    str(STEPS),
    "--checkpoint-every",
    "2",
)
OWN = (
    *(
        "--model",
        f"{Path(__file__).with_name('own.py')}:waves",
        "--planner",
        "even",
        "--stages",
        "2",
    ),
    *(
        "--steps",
        str(STEPS),
        "--checkpoint-every",
        "4",
        "--eval-every",
        "3",
        "--keep",
        "1",
        "--early-stop",
        "5",
    ),
    *("--learning-rate", "0.05", "--warmup", "1"),
)
EARLY, START_S, STEP_S = 0.3, 12.0, 0.3
"""How many of the kills come at any time from the start on, and how long that takes; the others
come during a step.
"""
_POLL_S = 0.02


@dataclass(frozen=True)
class Outcome:
    """What became of a run: at which steps it was killed, how many it lost at most, and what was
    wrong (nothing).
    """

    killed_at: tuple[int, ...]
    lost: int = 0
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
    run, killed_at, most = replace(whole, path=whole.path.with_name(name)), list[int](), 0
    every = int(run.options[run.options.index("--checkpoint-every") + 1])
    while len(killed_at) < kills:
        with run.start("--export", str(_exported(run))) as process:
            _wait(run, process, rng)
            process.kill()
            told = process.communicate(timeout=LIMIT_S)[1]
        if process.returncode == 0:
            break
        if process.returncode > 0:
            return Outcome(tuple(killed_at), most, told)
        killed_at.append(len(_logged(run)))
        lost = killed_at[-1] - max(run.checkpoints(), default=0)
        most = max(most, lost)
        if lost > 2 * every:  # before a checkpoint begins, the one before is whole
            return Outcome(
                tuple(killed_at), most, f"{lost} steps lost, {every} between checkpoints"
            )
    else:
        if told := run.finish("--export", str(_exported(run))):
            return Outcome(tuple(killed_at), most, told)
    return Outcome(tuple(killed_at), most, _difference(run, whole))


def outcomes(wholes: Sequence[Run], kills: int, each: int = 10, seed: int = 0) -> Iterator[Outcome]:
    """Run after run, the kinds in turn, until there were so many kills; each is killed a few times
    at most.
    """
    rng, left = random.Random(seed), kills
    for number, whole in enumerate(cycle(wholes)):
        if left <= 0:
            return
        outcome = killed(whole, f"killed-{number}", min(left, each), rng)
        left -= max(1, len(outcome.killed_at))
        yield outcome


def _wait(run: Run, process: "subprocess.Popen[str]", rng: random.Random) -> None:
    """Until it is time to kill, or the run is done."""
    if rng.random() < EARLY:
        until, steps = time.monotonic() + rng.uniform(0, START_S), None
    else:
        until, steps = time.monotonic() + LIMIT_S, len(_logged(run)) + rng.randint(1, 6)
    while (
        process.poll() is None
        and time.monotonic() < until
        and (steps is None or len(_logged(run)) < steps)
    ):
        time.sleep(_POLL_S)
    if steps is not None:
        time.sleep(rng.uniform(0, STEP_S))


def _logged(run: Run) -> list[str]:
    path = run.path / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def _difference(run: Run, whole: Run) -> str:
    for name in ("loss", "held_out_loss", "aux"):
        ours, theirs = ([line.get(name) for line in each.lines()] for each in (run, whole))
        if ours != theirs:
            return f"{name} differs: {ours} after kills, {theirs} without"
    if run.checkpoints() != whole.checkpoints():
        return f"checkpoints differ: {run.checkpoints()} after kills, {whole.checkpoints()} without"
    best = [
        (each.path / "best.json").read_text()
        for each in (run, whole)
        if "--eval-every" in each.options
    ]
    if len(set(best)) > 1:
        return f"the best ones differ: {best}"
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
        folder = given.folder or Path(temporary)
        wholes = [
            undisturbed(folder / name, options)
            for name, options in (("stream", OPTIONS), ("own", OWN))
        ]
        resumes, wrong, lost = 0, 0, 0
        for outcome in outcomes(wholes, given.kills, seed=given.seed):
            resumes, wrong = resumes + len(outcome.killed_at), wrong + bool(outcome.wrong)
            lost = max(lost, outcome.lost)
            print(
                f"killed after steps {list(outcome.killed_at)}: {outcome.wrong or 'to the bit'}",
                flush=True,
            )
        print(
            f"{resumes} kills, {wrong} runs that did not go on to the bit, {lost} steps lost at "
            "most"
        )


if __name__ == "__main__":
    main()
