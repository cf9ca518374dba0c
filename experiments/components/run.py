"""What each part of jvpipe brings, switched off alone.

    python -m experiments.components.run [MODEL ...]

Nothing runs: layers are estimated from their shapes, plans are simulated.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import optax

from experiments.planners.questions import question_of
from jvpipe.cost.cluster_file import find_cluster
from jvpipe.cost.costs import Edge, LayerCost, Option
from jvpipe.models import load
from jvpipe.papers.registry import find_planner
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.stage_cost import StageCost, evaluate_decision
from jvpipe.planners.model.stage_simulation import simulated_step_s
from jvpipe.schedules import find_schedule

CLUSTER, DEVICES, MICRO_BATCHES = find_cluster("2080ti"), 8, 32
SLOWER = 1.5
"""How much longer the device of the slowest stage takes once it has become slow."""


NEVER_S = 1e3


@dataclass(frozen=True)
class Subject:
    """A model at a size, and so many examples of a micro-batch that not everything can be kept."""

    model: str
    size: str
    micro_batch: int

    def problem(self) -> Problem:
        """On eight RTX 2080 Ti under 1F1B."""
        workload = load(self.model, self.size)
        batch_size = self.micro_batch * MICRO_BATCHES
        return question_of(workload, batch_size, MICRO_BATCHES, DEVICES, optax.adamw(1e-3)).problem(
            CLUSTER
        )


SUBJECTS = (Subject("bert", "large", 128), Subject("gpt2", "770m", 4), Subject("unet", "233m", 16))


def planned(problem: Problem) -> Decision | None:
    """What jvpipe's planner decides; None if nothing fits."""
    try:
        decision = find_planner("jvpipe").decide(problem)
    except Infeasible:
        return None
    never = any(
        stage.recompute_s >= NEVER_S for stage in evaluate_decision(problem, decision).stages
    )
    return None if never else decision


def planned_s(problem: Problem) -> float | None:
    """The seconds of a step of that."""
    decision = planned(problem)
    return step_s(problem, decision) if decision else None


def step_s(problem: Problem, decision: Decision) -> float:
    """The simulated seconds of a step."""
    return simulated_step_s(problem, evaluate_decision(problem, decision).stages)


def without_fates(problem: Problem) -> float | None:
    return planned_s(with_options(problem, lambda layer: layer.options[-1:]))


def without_swaps(problem: Problem) -> float | None:
    def left(layer: LayerCost) -> tuple[Option, ...]:
        return tuple(x for x in layer.options if not x.swapped_bytes and not x.swaps_input)

    return planned_s(with_options(problem, left))


def without_recomputation(problem: Problem) -> float | None:
    return planned_s(swapping(problem))


def swapping(problem: Problem) -> Problem:
    """The problem in which what may be kept is kept or swapped: to compute it again takes `NEVER_S`
    more.

    A plan that does so all the same stands for none.
    """

    def left(layer: LayerCost) -> tuple[Option, ...]:
        dear = replace(layer.options[-1], extra_s=NEVER_S)
        return (*(x for x in layer.options if not x.extra_s), dear)

    return with_options(problem, left)


def with_options(problem: Problem, left: Callable[[LayerCost], tuple[Option, ...]]) -> Problem:
    """The problem with other options of its layers."""
    layers = tuple(replace(layer, options=left(layer)) for layer in problem.costs.layers)
    return replace(problem, costs=replace(problem.costs, layers=layers))


def with_cuts_of(problem: Problem, planner: str) -> float | None:
    """Fates by jvpipe's planner, for the cuts of another one."""
    bounds = find_planner(planner).decide(replace(problem, memory_limit_bytes=None)).bounds
    together = tuple(tuple(range(i, j)) for i, j in pairwise(bounds))
    return planned_s(replace(problem, costs=replace(problem.costs, together=together)))


def without_overlap(problem: Problem) -> float | None:
    """Of swaps, where nothing is computed again: with everything on hardly anything is swapped."""
    decision = planned(swapping(problem))
    if decision is None:
        return None
    stages = evaluate_decision(swapping(problem), decision).stages
    return simulated_step_s(problem, [waiting(stage) for stage in stages])


def waiting(stage: StageCost) -> StageCost:
    """A stage that waits for its copies to the host and back."""
    half = stage.swap_s / 2
    return replace(
        stage, forward_s=stage.forward_s + half, backward_s=stage.backward_s + half, swap_s=0.0
    )


def without_direct_edges(problem: Problem) -> float | None:
    edges = tuple(relayed(edge) for edge in problem.costs.edges)
    return planned_s(replace(problem, costs=replace(problem.costs, edges=edges)))


def relayed(edge: Edge) -> Edge:
    """An edge whose value every layer on its way reads, so that every stage on it receives it and
    sends it on.
    """
    return replace(edge, readers=tuple(range(edge.producer + 1, max(edge.readers) + 1)))


def under_gpipe(problem: Problem) -> float | None:
    return planned_s(replace(problem, schedule=find_schedule("gpipe")))


def stayed_and_moved_s(problem: Problem) -> tuple[float, float] | None:
    """Seconds of a step once the slowest stage's device has become slow: under the plan of before,
    and the best one.
    """
    before = planned(problem)
    if before is None:
        return None
    seconds = [stage.seconds for stage in evaluate_decision(problem, before).stages]
    slow = with_slow_device(problem, seconds.index(max(seconds)))
    after_s = planned_s(slow)
    return None if after_s is None else (step_s(slow, before), after_s)


def with_slow_device(problem: Problem, device: int) -> Problem:
    """The problem in which a device takes longer."""
    limit, layers = problem.memory_limit_bytes, len(problem.costs.layers)
    slowness = [(SLOWER,) * layers if d == device else () for d in range(problem.devices)]
    return problem.told_apart(slowness, [] if limit is None else [limit] * problem.devices)


COMPONENTS: Mapping[str, Callable[[Problem], float | None]] = {
    "fates": without_fates,
    "swaps": without_swaps,
    "recomputation": without_recomputation,
    "repartition, even layers": lambda problem: with_cuts_of(problem, "even"),
    "repartition, even seconds": lambda problem: with_cuts_of(problem, "torchgpipe"),
    "recomputation and overlap": without_overlap,
    "direct edges": without_direct_edges,
    "schedule": under_gpipe,
}


def column(problem: Problem) -> Iterator[str]:
    """Yields seconds of a step with everything on, then how many times as long it takes without
    each component.
    """
    all_s = planned_s(problem)
    assert all_s is not None, "with everything on there is a plan"
    yield f"{all_s:.2f} s"
    for without in COMPONENTS.values():
        found = without(problem)
        yield "does not fit" if found is None else f"{found / all_s:.2f}"
    moved = stayed_and_moved_s(problem)
    yield "does not fit" if moved is None else f"{moved[0] / moved[1]:.2f}"


def main(names: Sequence[str]) -> int:
    chosen = [subject for subject in SUBJECTS if not names or subject.model in names]
    columns = [list(column(subject.problem())) for subject in chosen]
    heads = [f"{subject.model} {subject.size} ({subject.micro_batch})" for subject in chosen]
    print(f"| without | {' | '.join(heads)} |\n|---{'|---' * len(heads)}|")
    for name, *cells in zip(("nothing", *COMPONENTS, "migration"), *columns, strict=True):
        print(f"| {name} | {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
