"""torchgpipe's benchmarks on its Tesla P40s, planned and simulated.

    python -m experiments.torchgpipe.run [TABLE ...]

Tables are `amoebanet`, `unet` (speed) and `memory`. Nothing runs: layers are estimated from their
shapes.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import jax
import optax

from experiments.planners.questions import question_of
from jvpipe.cost.presets import PRESETS
from jvpipe.models import load
from jvpipe.papers.asking import ask
from jvpipe.papers.registry import find_planner
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.problem import RECOMPUTE, RECOMPUTE_CHAIN, Decision, Problem
from jvpipe.planners.model.stage_cost import evaluate_decision
from jvpipe.planners.model.stage_simulation import simulated_step_s
from jvpipe.schedules import find_schedule

GIB = 2**30


@dataclass(frozen=True)
class Benchmark:
    """A row of theirs: a model over `devices`, its batch cut in `microbatches`, and what they
    measured.

    `whole`: nothing is cut or recomputed (Naive-1). `theirs` is examples/s, or GiB of all devices.
    """

    title: str
    model: str
    size: str
    devices: int
    microbatches: int
    batch: int
    theirs: float
    whole: bool = False

    def problem(self, schedule: str) -> Problem:
        """What a planner is asked, at the memory of a P40."""
        workload, optimizer = load(self.model, self.size), optax.sgd(0.1)
        asked = question_of(
            workload, self.batch, self.microbatches, self.devices, optimizer, schedule
        )
        return asked.problem(PRESETS["p40"])


@dataclass(frozen=True)
class Simulated:
    """Seconds of a step, and the bytes of each device."""

    step_s: float
    device_bytes: tuple[int, ...]

    @staticmethod
    def of(problem: Problem, decision: Decision) -> "Simulated":
        """What a decision takes."""
        found = evaluate_decision(problem, decision)
        return Simulated(simulated_step_s(problem, found.stages), found.device_bytes)


def as_torchgpipe(problem: Problem, *, whole: bool = False) -> Simulated:
    """Blocks of equal seconds, GPipe's order; each stage keeps its input alone, unless `whole`."""
    decision = find_planner("torchgpipe").decide(problem)
    again = [
        c
        for i, j in pairwise(decision.bounds)
        for c in (RECOMPUTE, *[RECOMPUTE_CHAIN] * (j - i - 1))
    ]
    return Simulated.of(problem, decision if whole else replace(decision, choices=tuple(again)))


def as_jvpipe(problem: Problem) -> Simulated | None:
    """Cuts and fates of jvpipe's planner under 1F1B; None if nothing fits."""
    try:
        found = ask("jvpipe", replace(problem, schedule=find_schedule("1f1b")))
    except Infeasible:
        return None
    return Simulated.of(found.problem, found.decision)


def _amoebanet(devices: int, microbatches: int, batch: int, theirs: float) -> Benchmark:
    title = f"n={devices}, m={microbatches}"
    return Benchmark(title, "amoebanet", "122m", devices, microbatches, batch, theirs)


AMOEBANET = (
    *(_amoebanet(2, 1, 96, 26.733), _amoebanet(2, 4, 256, 41.133), _amoebanet(2, 32, 1280, 47.386)),
    *(
        _amoebanet(4, 1, 160, 26.827),
        _amoebanet(4, 4, 360, 44.543),
        _amoebanet(4, 32, 1152, 72.412),
    ),
    *(
        _amoebanet(8, 1, 196, 24.918),
        _amoebanet(8, 4, 480, 70.065),
        _amoebanet(8, 32, 1280, 132.413),
    ),
)
GPIPE = (1.0, 1.07, 1.21, 1.13, 1.26, 1.84, 1.38, 1.72, 3.48)
"""GPipe's speed-ups in the rows of AmoebaNet, on its TPUs."""
UNET = (
    Benchmark("Naive-1", "unet", "233m", 1, 1, 40, 28.500, whole=True),
    Benchmark("Pipeline-1", "unet", "233m", 1, 2, 80, 24.456),
    Benchmark("Pipeline-2", "unet", "233m", 2, 32, 512, 35.502),
    Benchmark("Pipeline-4", "unet", "233m", 4, 16, 512, 67.042),
    Benchmark("Pipeline-8", "unet", "233m", 8, 40, 640, 88.497),
)
MEMORY = (
    Benchmark("Naive-1", "unet", "362m", 1, 1, 32, 20.3, whole=True),
    Benchmark("Pipeline-1", "unet", "2.2b", 1, 32, 32, 20.5),
    Benchmark("Pipeline-2", "unet", "5b", 2, 32, 32, 43.4),
    Benchmark("Pipeline-4", "unet", "7.8b", 4, 32, 32, 79.1),
    Benchmark("Pipeline-8", "unet", "15.8b", 8, 32, 32, 154.1),
)


def speeds(rows: Sequence[Benchmark], others: Sequence[float] = ()) -> None:
    """Examples per second, and how many times the first row's."""
    print(
        "| | batch | paper /s | | GPipe's | as torchgpipe /s | | jvpipe /s | | fullest device "
        "GiB, of both |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    first: list[float] = []
    for i, row in enumerate(rows):
        problem = row.problem("gpipe")
        theirs, ours = as_torchgpipe(problem, whole=row.whole), as_jvpipe(problem)
        rates = [row.theirs, row.batch / theirs.step_s, row.batch / ours.step_s if ours else 0.0]
        first = first or rates
        cells = [
            f"{rate:.1f} | {rate / begin:.2f}x" for rate, begin in zip(rates, first, strict=True)
        ]
        gpipe = f"{others[i]:.2f}x" if others else ""
        held = ", ".join(f"{max(each.device_bytes) / GIB:.1f}" for each in (theirs, ours) if each)
        print(
            f"| {row.title} | {row.batch} | {cells[0]} | {gpipe} | {cells[1]} | {cells[2]} | "
            f"{held} |",
            flush=True,
        )


def memory(rows: Sequence[Benchmark]) -> None:
    """GiB of all devices, and whether the fullest one has as many."""
    print(
        "| | (B, C) | parameters | paper GiB | as torchgpipe GiB | fullest | jvpipe GiB | fullest |"
    )
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for row in rows:
        workload, problem = load(row.model, row.size), row.problem("gpipe")
        count = sum(
            leaf.size for leaf in jax.tree.leaves(jax.eval_shape(workload.init, jax.random.key(0)))
        )
        dials = f"({workload.config.convolutions}, {workload.config.channels})"
        cells = []
        for found in (as_torchgpipe(problem, whole=row.whole), as_jvpipe(problem)):
            gib = [held / GIB for held in found.device_bytes] if found else []
            cells.append(f"{sum(gib):.1f} | {max(gib):.1f}" if gib else "does not fit | ")
        print(
            f"| {row.title} | {dials} | {count:,} | {row.theirs} | {cells[0]} | {cells[1]} |",
            flush=True,
        )


TABLES: dict[str, Callable[[], None]] = {
    "amoebanet": lambda: speeds(AMOEBANET, GPIPE),
    "unet": lambda: speeds(UNET),
    "memory": lambda: memory(MEMORY),
}


def main(names: Sequence[str]) -> int:
    for name in names:
        print(f"\n## {name}\n")
        TABLES[name]()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(TABLES)))
