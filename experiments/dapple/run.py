"""DAPPLE's tables V, VI and VII, planned and simulated: python -m experiments.dapple.run [--quick]

Configurations A, B and C are `v100-a`, `v100-b` and `v100-c`, 16 devices each. BERT is traced and estimated; the others
are PipeDream's profiles beside the checkout in shared/profiles, their seconds in proportion to the batch. Each plan is
made twice: all-reduces after a stage's last backward (as jvpipe runs), and overlapping it (as DAPPLE's data parallelism
does). `--quick` leaves BERT out.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean

from experiments.planners.questions import question
from experiments.planners.tables import PROFILES
from jvpipe.cost.cluster_file import find_cluster
from jvpipe.papers.dapple import in_flight
from jvpipe.papers.registry import find_planner
from jvpipe.papers.replica_rules import one_each
from jvpipe.papers.replicas import ask_replicas
from jvpipe.planners.joint.replicas_planner import plan_replicas
from jvpipe.planners.model.forecast import simulated_step_s
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.replicas_answer import ReplicaAnswer, Simulated
from jvpipe.planners.model.replicas_costs import LocalCosts, local_costs
from jvpipe.planners.model.replicas_plan import ReplicaPlan
from jvpipe.planners.model.replicas_problem import ReplicaProblem
from jvpipe.planners.model.replicas_stage import Tables
from jvpipe.planners.model.replicas_step import simulated_s
from jvpipe.planners.model.stage_cost import evaluate
from jvpipe.profiles.graph_file import read_graph
from jvpipe.schedules import find_schedule
from jvpipe.schedules.one_f_one_b import OneFOneB

DEVICES = 16
LOCAL_BATCHES = (1, 4)


@dataclass(frozen=True)
class Row:
    """A model, its batch, and the paper's plans on A, B and C."""

    model: str
    batch: int
    paper: tuple[str, str, str]


TABLE_V = (
    Row("resnet50", 2048, ("DP", "DP", "DP")),
    Row("vgg16", 2048, ("DP (VGG-19)", "DP (VGG-19)", "15:1 (VGG-19)")),
    Row("gnmt", 1024, ("8:8", "8:8", "straight")),
    Row("bert-48", 64, ("8:8", "straight", "straight")),
)
PROFILED_BATCH = {"resnet50": 128, "vgg16": 64, "gnmt": 64}


@cache
def costs_of(model: str) -> LocalCosts:
    """What a model takes: a profile's, or estimated at a few local batches."""
    if model in PROFILED_BATCH:
        costs = read_graph(PROFILES / f"pipedream_{model}.graph.txt").costs
        return LocalCosts((PROFILED_BATCH[model],), (costs,))
    name, size = model.split("-")
    device = find_cluster("v100-a")
    return local_costs(lambda b: question(name, size, b, 1, stages=1).costs(device), LOCAL_BATCHES)


def problem_of(
    model: str, batch: int, configuration: str, overlaps: bool = False
) -> ReplicaProblem:
    """A model on a configuration, with the memory of its devices."""
    cluster = find_cluster(f"v100-{configuration.lower()}")
    limit = cluster.device.memory_bytes
    return ReplicaProblem(costs_of(model), cluster, DEVICES, batch, limit, overlaps)


def short(plan: ReplicaPlan) -> str:
    """A plan in a cell."""
    if plan.stages == 1:
        return f"DP on {plan.replicas[0]}"
    layers = ":".join(map(str, plan.layers))
    replicas = "straight" if plan.shape == "straight" else ":".join(map(str, plan.replicas))
    return f"{replicas} ({layers}; mu {plan.size})"


def shape_s(answer: ReplicaAnswer, shape: str) -> str:
    """The seconds of the best plan of a shape over those of the best plan."""
    if shape not in answer.shapes:
        return "does not fit"
    return f"{answer.shapes[shape].step_s / answer.best.step_s:.2f}"


def other_s(planner: str, problem: ReplicaProblem, best: Simulated) -> str:
    """The seconds of another planner's best plan, of all sizes of micro-batches, over those of the best plan."""
    try:
        return f"{ask_replicas(planner, problem).best.step_s / best.step_s:.2f}"
    except Infeasible:
        return "does not fit"


def table_v(rows: tuple[Row, ...]) -> Iterator[str]:
    """Yields table V: ours beside the paper's, what other shapes take, and what the papers' planners find."""
    others = ("data parallel", "straight", "two stages")
    yield (
        "| model (batch) | on | reduce | paper | ours | step s | gap | DP | straight | two stages | dapple | pipedream "
        "| planned in s |"
    )
    yield "|---" * 13 + "|"
    for row in rows:
        for configuration, paper in zip("ABC", row.paper, strict=True):
            for overlaps in (False, True):
                problem = problem_of(row.model, row.batch, configuration, overlaps)
                start_s = time.process_time()
                answer = plan_replicas(problem)
                took_s = time.process_time() - start_s
                shapes = [shape_s(answer, shape) for shape in others]
                planners = [
                    other_s(planner, problem, answer.best) for planner in ("dapple", "pipedream")
                ]
                when = "overlaps" if overlaps else "after"
                yield (
                    f"| {row.model} ({row.batch}) | {configuration} | {when} | {paper} | {short(answer.best.plan)} "
                    f"| {answer.best.step_s:.3f} | {answer.gap:.0%} | {' | '.join((*shapes, *planners))} "
                    f"| {took_s:.1f} |"
                )


def table_vi() -> Iterator[str]:
    """Yields table VI: BERT-48 on two stages of B, micro-batches of 2, everything kept or run again."""
    paper = {
        (2, False): 5.10,
        (8, False): 7.60,
        (16, False): 8.18,
        (2, True): 4.24,
        (8, True): 6.23,
        (16, True): 6.77,
    }
    yield "| run again | M | paper, examples/s | ours | paper, of M = 2 | ours | peak GB |"
    yield "|---|---|---|---|---|---|---|"
    for again in (False, True):
        first = None
        for count in (2, 8, 16):
            problem = replace(
                problem_of("bert-48", 2 * count, "B"), recomputes=again, memory_limit_bytes=None
            )
            tables = Tables(problem)
            plans = [
                ReplicaPlan((0, int(b), problem.layers), ((0,), (1,)), 2) for b in tables.cuts[1:-1]
            ]
            seconds = {plan: simulated_s(problem, plan, tables.stages(plan)) for plan in plans}
            plan = min(seconds, key=lambda plan: seconds[plan])
            rate = problem.batch / seconds[plan]
            first = first or rate
            held = max(stage.peak_bytes for stage in tables.stages(plan)) / 1e9
            said = paper[count, again]
            yield (
                f"| {'yes' if again else 'no'} | {count} | {said} | {rate:.1f} "
                f"| {said / paper[2, again]:.2f} | {rate / first:.2f} | {held:.1f} |"
            )


def beside_gpipe(model: str = "bert", size: str = "48") -> Iterator[str]:
    """Yields 1F1B (DAPPLE's order) beside GPipe's, straight on two devices of B, everything kept."""
    yield "| order | M | examples/s | of GPipe's M = 2 | average peak GB | of GPipe's M = 2 |"
    yield "|---|---|---|---|---|---|"
    asked = question(model, size, 4, 2, stages=2).problem(find_cluster("v100-b"))
    first: tuple[float, float] | None = None
    for order in ("gpipe", "1f1b"):
        for count in (2, 8, 16):
            free = replace(
                asked, schedule=find_schedule(order), microbatches=count, memory_limit_bytes=None
            )
            found = evaluate(free, find_planner("dapple").decide(free))
            rate, held = (
                2 * count / simulated_step_s(free, found.stages),
                fmean(found.device_bytes) / 1e9,
            )
            first = first or (rate, held)
            yield f"| {order} | {count} | {rate:.1f} | {rate / first[0]:.2f} | {held:.2f} | {held / first[1]:.2f} |"


def policies(
    chains: Sequence[tuple[str, int, int]] = (("gnmt", 1024, 4), ("bert-48", 64, 1)),
) -> Iterator[str]:
    """Yields DAPPLE's straight plans on C with as many micro-batches in flight as its policies A and B say.

    Args:
        chains: models, their batches and the examples of a micro-batch.
    """
    yield "| model (batch; mu) | policy | micro-batches in flight on the first stage | step s | fullest GB |"
    yield "|---|---|---|---|---|"
    for model, batch, size in chains:
        tables = Tables(replace(problem_of(model, batch, "C"), memory_limit_bytes=None))
        straight = one_each(tables, size, DEVICES, tables.coarse)
        for policy in ("A", "B"):
            warm = in_flight(DEVICES, straight.microbatches, eager=policy == "B")
            asked = replace(straight, schedule=OneFOneB(most=warm))
            planned = evaluate(asked, find_planner("dapple").decide(asked))
            step_s, held = simulated_step_s(asked, planned.stages), planned.peak_bytes / 1e9
            yield f"| {model} ({batch}; {size}) | {policy} | {warm[0]} | {step_s:.3f} | {held:.2f} |"


def table_vii(models: tuple[tuple[str, int], ...]) -> Iterator[str]:
    """Yields table VII: ours and PipeDream's plans on A, both simulated as synchronous steps."""
    yield "| model (batch) | ours | step s | PipeDream's | step s |"
    yield "|---|---|---|---|---|"
    for model, batch in models:
        problem = problem_of(model, batch, "A")
        ours, theirs = (ask_replicas(planner, problem).best for planner in ("jvpipe", "pipedream"))
        cells = (f"{short(best.plan)} | {best.step_s:.3f}" for best in (ours, theirs))
        yield f"| {model} ({batch}) | {' | '.join(cells)} |"


def main() -> None:
    """Prints the tables as they are made."""
    quick = "--quick" in sys.argv[1:]
    rows = tuple(row for row in TABLE_V if not (quick and row.model.startswith("bert")))
    for title, lines in (
        ("Table V", table_v(rows)),
        *(
            ()
            if quick
            else (
                ("Table VI", table_vi()),
                ("Table VI, GPipe", beside_gpipe()),
                ("Policies", policies()),
            )
        ),
        (
            "Table VII",
            table_vii(
                (("vgg16", 1024), ("gnmt", 1024), *(() if quick else (("bert-large", 128),)))
            ),
        ),
    ):
        print(f"\n## {title}\n", flush=True)
        for line in lines:
            print(line, flush=True)


if __name__ == "__main__":
    main()
