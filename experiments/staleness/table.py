"""What the curves say: held-out loss at equal examples, at equal updates, and by simulated
seconds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from experiments.staleness.subjects import Subject
from experiments.staleness.train import Curve, simulated_s, updates

ROWS = [("one device, per batch", 1), ("one device, per micro-batch", 1)] + [
    (name, stages)
    for name in ("gpipe", "1f1b", "2bw", "pipedream", "pipemare", "xpipe")
    for stages in (2, 4, 8)
]
_RUN_AS = {
    "one device, per batch": "1f1b",
    "one device, per micro-batch": "pipedream",
    "gpipe": "1f1b",
}
_ALIKE = ("1f1b", "2bw")  # at every number of stages


@dataclass(frozen=True)
class Row:
    """The curves of one schedule: `losses[j, i]` with seed `seeds[j]` after `steps[i]` batches,
    `updates[i]`, ...
    """

    seeds: tuple[int, ...]
    steps: Int[np.ndarray, " looks"]
    updates: Int[np.ndarray, " looks"]
    seconds: Float[np.ndarray, " looks"]
    losses: Float[np.ndarray, "seeds looks"]

    @property
    def mean(self) -> Float[np.ndarray, " looks"]:
        return self.losses.mean(0)

    def seconds_to(self, loss: float) -> float:
        """When the mean first falls to `loss`, between two looks on a line; infinite if it does
        not.
        """
        mean = self.mean
        for i in range(1, len(mean)):
            if mean[i] <= loss < mean[i - 1]:
                share = (mean[i - 1] - loss) / (mean[i - 1] - mean[i])
                return float(self.seconds[i - 1] + share * (self.seconds[i] - self.seconds[i - 1]))
        return math.inf


def row(subject: Subject, curves: Sequence[Curve], name: str, stages: int) -> Row | None:
    """The curves of a row of `ROWS`; None if there are none yet."""
    schedule = _RUN_AS.get(name, name)
    run_on = 1 if schedule in _ALIKE else stages
    found = [
        c
        for c in curves
        if (c.run.subject, c.run.schedule, c.run.stages) == (subject.name, schedule, run_on)
    ]
    if not found:
        return None
    at = np.array(found[0].steps)
    seconds = np.array(simulated_s(schedule, stages, subject.steps))[at]
    made = np.array([updates(schedule, n) for n in at.tolist()])
    return Row(
        tuple(c.run.seed for c in found), at, made, seconds, np.array([c.losses for c in found])
    )


def print_table(subjects: Sequence[Subject], curves: Sequence[Curve]) -> None:
    """A table per subject; losses are means over seeds, with their standard deviation.

    A row is compared with 1f1b on the seeds that it has.
    """
    for subject in subjects:
        plain = row(subject, curves, "1f1b", 8)
        if plain is None:
            continue
        count = int(plain.updates[-1])
        ends = dict(zip(plain.seeds, plain.losses[:, -1].tolist(), strict=True))
        seen = subject.steps * subject.batch_size
        print(f"\n{subject.name}: {seen} examples\n")
        head = (
            "schedule",
            "S",
            "seeds",
            f"loss at {seen} examples",
            "over 1f1b's",
            f"loss at {count} updates",
            "updates",
        )
        print("|", " | ".join([*head, "simulated s", "to 1f1b's loss, s"]), "|")
        print("|---" * 9 + "|")
        for name, stages in ROWS:
            if found := row(subject, curves, name, stages):
                end, spread = float(found.mean[-1]), float(found.losses[:, -1].std())
                last = float(np.mean([ends[seed] for seed in found.seeds]))
                equal = float(found.mean[found.updates.tolist().index(count)])
                to_s = found.seconds_to(last)
                cells = (
                    name,
                    stages,
                    len(found.seeds),
                    f"{end:.3f} ± {spread:.3f}",
                    f"{end / last - 1:+.1%}",
                )
                times = (
                    found.updates[-1],
                    f"{found.seconds[-1]:.0f}",
                    f"{to_s:.0f}" if to_s < math.inf else "-",
                )
                print("|", " | ".join(map(str, (*cells, f"{equal:.3f}", *times))), "|")
    print(flush=True)
