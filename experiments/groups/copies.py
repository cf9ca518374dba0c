"""What copies cost where buffers wait for all that is enqueued before them: steps over those where
they do not.

    python -m experiments.groups.copies

Nothing runs: rows of BERT at size tiny are simulated. Each layer's forward takes as long as
another's of its stage, its backward twice that; "unlike" stages differ by up to 30%, the mean of
some draws.
"""

import random
import statistics
from collections.abc import Sequence
from itertools import product

from experiments.planners.questions import question
from jvpipe import Plan
from jvpipe.ir.buffers import Lowered
from jvpipe.ir.kinds import KINDS, CopyLink
from jvpipe.ir.rows import Row
from jvpipe.lowering.layout import MicrobatchLayout
from jvpipe.lowering.step import lower_step
from jvpipe.programs.model_programs import layer_programs
from jvpipe.programs.store import shared_store
from jvpipe.schedules import find_schedule
from jvpipe.schedules.planned import lists_of
from jvpipe.simulate.simulator import simulate

MICROBATCHES, DRAWS, SPREAD = 8, 6, 0.3


def lowered(schedule: str, stages: int) -> Lowered:
    """A step of as many layers on each stage."""
    asked = question("bert", "tiny", 8 * MICROBATCHES, MICROBATCHES, stages)
    model = asked.trace()
    graph = model.traced.graph
    each, more = divmod(len(graph.layers), stages)
    plan = Plan.from_cuts([each + (s < more) for s in range(stages)], schedule=schedule)
    signatures = [programs.signature for programs in layer_programs(shared_store(), model.traced)]
    layouts = [MicrobatchLayout.of(graph, plan, signatures)] * MICROBATCHES
    optimizer = asked.cut(model)
    return lower_step(
        graph, layouts, lists_of(plan, find_schedule(schedule), MICROBATCHES), optimizer
    )


def over(step: Lowered, forward_s: Sequence[float], copy_s: float) -> float:
    """A step where buffers wait over one where they do not.

    Args:
        step: its rows.
        forward_s: of each stage.
        copy_s: of what goes from one stage to the next.
    """
    layers = [0] * len(forward_s)
    for s in {row.layer: row.stage for row in step.rows if row.layer >= 0}.values():
        layers[s] += 1

    def seconds(row: Row) -> float:
        info = KINDS[row.kind]
        if info.link is CopyLink.PEER:
            return copy_s
        return info.weight * forward_s[row.stage] / layers[row.stage] if info.weight else 0.0

    free, waiting = (simulate(step, seconds, buffers_wait=waits) for waits in (False, True))
    return waiting.step_s / free.step_s


def main() -> None:
    """Prints the table."""
    chance = random.Random(0)
    print("| schedule | stages | copy, forwards | alike | unlike: mean | most |")
    print("|---|---|---|---|---|---|")
    for schedule, stages in product(("gpipe", "1f1b"), (2, 4)):
        step = lowered(schedule, stages)
        unlike = [
            [1 + chance.uniform(-SPREAD, SPREAD) for _ in range(stages)] for _ in range(DRAWS)
        ]
        for copy_s in (0.05, 0.2):
            alike = over(step, [1.0] * stages, copy_s)
            found = [over(step, forward_s, copy_s) for forward_s in unlike]
            costs = f"{alike:.3f} | {statistics.mean(found):.3f} | {max(found):.3f}"
            print(f"| {schedule} | {stages} | {copy_s} | {costs} |", flush=True)


if __name__ == "__main__":
    main()
