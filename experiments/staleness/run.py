"""Every run, a line each as it ends; then the table and the figures.

Usage: python -m experiments.staleness.run FOLDER [bert | digits]. What FOLDER/curves.jsonl holds is
not run again.
"""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from experiments.staleness.figures import draw
from experiments.staleness.subjects import Subject, bert, digits
from experiments.staleness.table import print_table
from experiments.staleness.train import Curve, Run, per_micro_batch, train

STAGES, SEEDS = (2, 4, 8), (0, 1, 2)


def runs(subject: Subject, seed: int) -> Iterator[Run]:
    """What differs: synchronous schedules do not from one device, nor does 2bw with the stages (see
    `check`).
    """
    plain = [("1f1b", 1), ("pipedream", 1), ("2bw", 1)]
    stale = [
        (name, stages) for stages in reversed(STAGES) for name in ("pipedream", "pipemare", "xpipe")
    ]
    for name, stages in plain + stale:
        yield Run(subject.name, name, stages, seed, subject.rate(per_micro_batch(name)))


def check(subject: Subject, curves: list[Curve]) -> None:
    """8 steps of seed 0: gpipe and 1f1b give one device's bits at every number of stages, 2bw those
    of one stage.

    Where they end: on the way a stream's layers are not at one version.
    """
    for like in ("1f1b", "2bw"):
        run = next(
            c.run
            for c in curves
            if (c.run.subject, c.run.schedule, c.run.seed) == (subject.name, like, 0)
        )
        wanted = train(subject, run, 8).losses[-1]
        for name in ("gpipe", "1f1b") if like == "1f1b" else ("2bw",):
            for stages in STAGES:
                same = (
                    train(subject, replace(run, schedule=name, stages=stages), 8).losses[-1]
                    == wanted
                )
                word = "the same bits as" if same else "NOT the same as"
                print(f"{subject.name}, {name}, {stages} stages: {word} {like} on one", flush=True)


def urgency(run: Run) -> tuple[bool, int]:
    """What is to be shown comes first, then seed after seed: the run may be cut short."""
    shown = run.subject == "BERT mini" and run.schedule in ("1f1b", "2bw", "pipemare")
    return not shown, run.seed


def main() -> None:
    """The table is printed, and the figures are drawn, whenever a seed is done with a subject."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "curves.jsonl"
    curves = (
        [Curve.from_json(json.loads(line)) for line in path.read_text().splitlines()]
        if path.exists()
        else []
    )
    start_s = time.perf_counter()
    subjects = [
        make() for make in (bert, digits) if not sys.argv[2:] or make.__name__ in sys.argv[2:]
    ]
    known = {curve.run for curve in curves}
    wanted = [
        (subject, run) for seed in SEEDS for subject in subjects for run in runs(subject, seed)
    ]
    wanted.sort(key=lambda each: urgency(each[1]))
    for i, (subject, run) in enumerate(wanted):
        if run not in known:
            curves.append(train(subject, run))
            with path.open("a") as file:
                file.write(json.dumps(curves[-1].to_json()) + "\n")
            loss, taken_s = curves[-1].losses[-1], time.perf_counter() - start_s
            print(f"{taken_s:6.0f} s  {run}: {loss:.4f}", flush=True)
        following = [(each.subject, each.seed) for _, each in wanted[i + 1 : i + 2]]
        if following != [(run.subject, run.seed)]:
            draw(subject, curves, folder)
            print_table(subjects, curves)
    for subject in subjects:
        check(subject, curves)
    print(f"all in {(time.perf_counter() - start_s) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
