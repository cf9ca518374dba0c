"""How long planning takes as models and pipelines grow: python -m experiments.planners.scaling

In brackets are the seconds of a step under the plan.

Layers are like those of a transformer, with six options each; limits are shares of what keeping
everything takes.
"""

import random
import time
from dataclasses import replace

from jvpipe.cost.costs import Costs, Edge, LayerCost, Option
from jvpipe.cost.hardware import Link
from jvpipe.planners.joint.plan_search import jvpipe
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.problem import Problem
from jvpipe.planners.model.stage_cost import evaluate_decision, stage_cost
from jvpipe.planners.model.stage_simulation import simulated_step_s
from jvpipe.schedules import find_schedule

SIZES = ((200, 16), (1_300, 8), (2_500, 16), (5_000, 64), (10_000, 64), (10_000, 256))
MB = 10**6
KINDS = (
    (1.0, 12, 16),
    (0.3, 40, 4),
    (1.6, 8, 32),
    (1.6, 30, 32),
)  # relative seconds, MB of residuals, of parameters


def model(layers: int, stages: int, schedule: str, seed: int = 0) -> Problem:
    """A deep chain, every layer a little different."""
    draw = random.Random(seed)
    drawn = []
    for i in range(layers):
        relative, kept_mb, parameter_mb = KINDS[i % len(KINDS)]
        f = 0.1 * relative / layers * draw.uniform(0.9, 1.1)
        kept, held, inputs = (
            int(size * MB * draw.uniform(0.9, 1.1)) for size in (kept_mb, parameter_mb, 4)
        )
        options = (
            Option(kept),
            Option(kept // 2, kept - kept // 2),
            Option(0, kept, swaps_input=True),
            Option(kept // 3, 0, 0.35 * f, kept - kept // 3),
            Option(kept // 3, kept // 3, 0.3 * f, kept // 3),
            Option(0, 0, 0.9 * f, kept),
        )
        drawn.append(
            LayerCost(f"layer{i}", f, 2 * f, options, held, held, 2 * held, inputs, 2 * inputs)
        )
    edges = tuple(Edge(i, (i + 1,), 4 * MB) for i in range(layers - 1))
    link = Link(10e9, 1e-5)
    return Problem(
        Costs(tuple(drawn), edges),
        stages,
        find_schedule(schedule),
        2 * stages,
        host=link,
        peer=link,
    )


def main() -> None:
    shares = (None, 0.7, 0.5)
    print(
        "| layers | stages | schedule | no limit, s | limit 0.7, s | limit 0.5, s "
        "|\n|---|---|---|---|---|---|"
    )
    for layers, stages in SIZES:
        for schedule in ("1f1b", "pipedream"):
            problem, taken = model(layers, stages, schedule), []
            each = layers // stages
            full = max(
                stage_cost(problem, s, each * s, each * (s + 1), (0,) * layers).peak_bytes
                for s in (0, stages - 1)
            )
            for share in shares:
                limited = replace(
                    problem, memory_limit_bytes=None if share is None else int(share * full)
                )
                start_s = time.process_time()
                try:
                    decision = jvpipe(limited)
                except Infeasible:
                    taken.append(f"{time.process_time() - start_s:.2f} (nothing fits)")
                    continue
                planning_s = time.process_time() - start_s
                evaluation = evaluate_decision(limited, decision)
                step_s = simulated_step_s(limited, evaluation.stages)
                taken.append(f"{planning_s:.2f} ({step_s:.4f})")
            print(f"| {layers} | {stages} | {schedule} | {' | '.join(taken)} |", flush=True)


if __name__ == "__main__":
    main()
