"""What finer layers save: models at their real size on many devices, planned with whole layers and
with halves of some.

M = 2 S micro-batches. Nothing runs, the estimates are the roofline's.
"""

from collections.abc import Sequence
from dataclasses import replace

from experiments.planners.questions import question
from jvpipe.cost.cluster_file import find_cluster
from jvpipe.planners.answer import Answer
from jvpipe.planners.model.problem import Problem
from jvpipe.planners.model.stage_simulation import simulated_step_s
from jvpipe.session.forecast import asked, with_splits

MODELS = (("bert", "large", 16), ("gpt2", "770m", 2))
"""Model, size, examples per micro-batch."""
CLUSTERS = (("a100-40gb", (4, 8)), ("a100-80gb", (8, 16, 24)))
"""Cluster (the links of the first are PCIe, those of the second NVLink) and stages, all as if in
one machine.
"""


def planned(
    cluster_name: str, model: str, size: str, examples: int, stages: int
) -> list[tuple[Problem, Answer]]:
    """The plan with whole layers, and with finer ones."""
    microbatches = 2 * stages
    about = question(model, size, examples * microbatches, microbatches, stages)
    cluster = replace(find_cluster(cluster_name), devices_per_machine=stages)
    whole = asked(about.problem(cluster), ["jvpipe"])
    return [(found.problem, found.answers[0]) for found in (whole, with_splits(about, whole))]


def row(name: str, stages: int, answers: Sequence[tuple[Problem, Answer]]) -> str:
    """Slowest stage over the mean, its layers, step milliseconds; of both plans, and what is
    saved.
    """
    cells, steps = [], []
    for problem, each in answers:
        if each.decision is None or each.evaluation is None:
            return f"| {name} | {stages} | no plan fits |"
        costs, bounds = each.evaluation.stages, each.decision.bounds
        seconds = [cost.compute_s for cost in costs]
        slowest = seconds.index(max(seconds))
        steps.append(simulated_step_s(problem, costs))
        cells += [
            f"{max(seconds) * stages / sum(seconds):.3f}",
            f"{bounds[slowest + 1] - bounds[slowest]}",
        ]
        cells += [f"{1e3 * steps[-1]:.1f}"]
    layers = len(answers[1][0].costs.layers)
    return f"| {name} | {stages} | {' | '.join(cells)} | {layers} | {1 - steps[1] / steps[0]:.1%} |"


def main() -> None:
    """Prints the table."""
    print("| model, cluster | S | slowest / mean | its layers | step ms ", end="")
    print("| finer: slowest / mean | its layers | step ms | layers | saved |\n|" + 10 * "---|")
    for cluster, each in CLUSTERS:
        for model, size, examples in MODELS:
            for stages in each:
                answers = planned(cluster, model, size, examples, stages)
                print(row(f"{model} {size}, {cluster}", stages, answers), flush=True)


if __name__ == "__main__":
    main()
