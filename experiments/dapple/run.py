"""DAPPLE's tables V, VI and VII, planned and simulated: python -m experiments.dapple.run [--quick]

Configurations A, B and C are `v100-a`, `v100-b` and `v100-c`, 16 devices each. ResNet-50 and GNMT
are PipeDream's, of `experiments/planners/profiles`, their seconds in proportion to the batch; the
others are traced at their real sizes and estimated, with the paper's optimizers. Each plan is made
twice: all-reduces after a stage's last backward, and overlapping it (as DAPPLE's data parallelism
does). `--quick` leaves out what is traced.
"""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from statistics import fmean

import optax

from experiments.planners.questions import costs_on, question_of
from experiments.planners.tables import profiled
from jvpipe.cost.cluster_file import find_cluster
from jvpipe.cost.hardware import Cluster
from jvpipe.cost.local_costs import LocalCosts
from jvpipe.models import load
from jvpipe.papers.asking import ask_shapes
from jvpipe.papers.pipedream_replicas import one_each
from jvpipe.papers.registry import find_planner
from jvpipe.planners.joint.shape_bound import least_step_s
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.local_segments import LocalSegments, computing_again
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.shapes import Shape, Shapes
from jvpipe.planners.model.stage_cost import evaluate_decision
from jvpipe.planners.model.stage_simulation import simulated_step_s
from jvpipe.planners.planned_problem import Planned
from jvpipe.planners.shape_reasons import pipeline_shape
from jvpipe.schedules import find_schedule
from jvpipe.schedules.one_f_one_b import ONE_F_ONE_B, OneFOneB
from jvpipe.session.question import Question

DEVICES = 16
MACHINES_VII = (2, 4)
"""Of A, in table VII and figure 13."""


@dataclass(frozen=True)
class Row:
    """A model, its batch, and the paper's plans on A, B and C."""

    model: str
    batch: int
    paper: tuple[str, str, str]


TABLE_V = (
    Row("resnet50", 2048, ("DP", "DP", "DP")),
    Row("vgg-19", 2048, ("DP", "DP", "15:1")),
    Row("gnmt", 1024, ("8:8", "8:8", "straight")),
    Row("bert-48", 64, ("8:8", "straight", "straight")),
    Row("xlnet-36", 128, ("8:8", "8:8", "straight")),
    Row("amoebanet-36", 128, ("8:8", "11:5", "11:5")),
)
TABLE_VII = (
    ("vgg-19", 1024),
    ("gnmt", 1024),
    ("bert-large", 128),
    ("xlnet-36", 128),
    ("amoebanet-36", 128),
)
PROFILED_BATCH = {"resnet50": 128, "vgg16": 64, "gnmt": 64}


@dataclass(frozen=True)
class Sized:
    """A built-in model as the paper has it: its size, fields of its own, its optimizer.

    `local` are the examples per device at which it is estimated; between them costs lie on lines.
    """

    model: str
    size: str
    fields: Mapping[str, int]
    optimizer: optax.GradientTransformation
    local: tuple[int, ...] = (1, 4)

    def question(self, batch: int, microbatches: int, stages: int) -> Question:
        """What is asked of a planner about it."""
        workload = load(self.model, self.size, **self.fields)
        return question_of(workload, batch, microbatches, stages, self.optimizer)


ADAM = optax.adam(1e-4)
SQUAD = {"tokens": 384, "published": True}
"""BERT of its authors on SQuAD."""
TRACED: Mapping[str, Sized] = {
    "vgg-19": Sized("vgg", "19", {}, optax.sgd(0.1), (1, 8, 64)),
    "bert-48": Sized("bert", "48", SQUAD, ADAM),
    "bert-large": Sized("bert", "large", SQUAD, ADAM),
    "xlnet-36": Sized("xlnet", "36", {}, ADAM),  # 512 tokens, as its traffic in table I says
    "amoebanet-36": Sized("amoebanet", "1.1b", {"filters": 512}, optax.rmsprop(2.56)),
}


@cache
def costs_of(model: str) -> LocalCosts:
    """What a model takes: a profile's, or estimated at a few local batches."""
    if model in PROFILED_BATCH:
        costs = profiled(model)
        return LocalCosts((PROFILED_BATCH[model],), (costs,))
    sized, device = TRACED[model], find_cluster("v100-a")
    return LocalCosts.of({b: costs_on(sized.question(b, 1, 1), device) for b in sized.local})


def shapes_on(
    local: LocalCosts, cluster: Cluster, devices: int, batch: int, overlaps: bool = False
) -> Shapes:
    """The shapes of a model on devices of a cluster, with their memory.

    Args:
        local: what it takes; layers keep everything or compute all again, as DAPPLE's do.
        cluster: that has the devices.
        devices: how many of them.
        batch: examples of a step.
        overlaps: replicas add up gradients while the last backward runs.
    """
    limit = cluster.device.memory_bytes
    model = Problem(local.costs[-1], 1, ONE_F_ONE_B, 1, limit, peer_uses_host=False)
    return Shapes(replace(model, overlaps=overlaps), local, cluster, devices, batch)


def shapes_of(model: str, batch: int, configuration: str, overlaps: bool = False) -> Shapes:
    """The shapes of a model on a configuration."""
    cluster = find_cluster(f"v100-{configuration.lower()}")
    return shapes_on(costs_of(model), cluster, DEVICES, batch, overlaps)


def short(shapes: Shapes, problem: Problem, decision: Decision) -> str:
    """A plan in a cell."""
    shape = pipeline_shape(problem, shapes.batch // problem.microbatches)
    if shape.kind == "data parallel":
        return f"DP on {shape.replicas[0]}"
    layers = ":".join(str(j - i) for i, j in pairwise(decision.bounds))
    replicas = "straight" if shape.kind == "straight" else ":".join(map(str, shape.replicas))
    return f"{replicas} ({layers}; mu {shape.size})"


def kind_s(planned: Planned, kind: str) -> str:
    """The seconds of the best plan of a kind of shape over those of the best plan."""
    if pipeline_shape(planned.problem).kind == kind:
        return "1.00"
    if kind not in planned.shapes:
        return "does not fit"
    return f"{planned.shapes[kind].step_s / planned.step_s:.2f}"


def other_s(planner: str, shapes: Shapes, best_s: float) -> str:
    """The seconds of another planner's best plan, of all sizes of micro-batches, over those of the
    best plan.
    """
    try:
        return f"{ask_shapes(planner, shapes).step_s / best_s:.2f}"
    except Infeasible:
        return "does not fit"
    except ValueError:  # it wants a layer for each device
        return "too few layers"


def table_v(rows: tuple[Row, ...]) -> Iterator[str]:
    """Yields table V: ours beside the paper's, what other shapes take, and what the papers'
    planners find.
    """
    others = ("data parallel", "straight", "two stages")
    yield (
        "| model (batch) | on | reduce | paper | ours | step s | gap | DP | straight | two stages "
        "| dapple | pipedream | planned in s |"
    )
    yield "|---" * 13 + "|"
    for row in rows:
        for configuration, paper in zip("ABC", row.paper, strict=True):
            for overlaps in (False, True):
                shapes = shapes_of(row.model, row.batch, configuration, overlaps)
                start_s = time.process_time()
                planned = ask_shapes("jvpipe", shapes)
                took_s = time.process_time() - start_s
                cells = [kind_s(planned, kind) for kind in others]
                for planner in ("dapple", "pipedream"):
                    cells.append(other_s(planner, shapes, planned.step_s))
                when = "overlaps" if overlaps else "after"
                plan = short(shapes, planned.problem, planned.decision)
                yield (
                    f"| {row.model} ({row.batch}) | {configuration} | {when} | {paper} | {plan} "
                    f"| {planned.step_s:.3f} | {gap(shapes, planned):.0%} | {' | '.join(cells)} "
                    f"| {took_s:.1f} |"
                )


def gap(shapes: Shapes, planned: Planned) -> float:
    """By which part a plan is above what no plan is below, at most."""
    return planned.step_s / least_step_s(shapes) - 1


def table_vi() -> Iterator[str]:
    """Yields table VI: BERT-48 on two stages of B, micro-batches of 2, everything kept or run
    again.
    """
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
        first, local = None, costs_of("bert-48")
        costs = tuple(map(computing_again, local.costs)) if again else local.costs
        for count in (2, 8, 16):
            cluster = find_cluster("v100-b")
            shapes = shapes_on(LocalCosts(local.batches, costs), cluster, DEVICES, 2 * count)
            problem = shapes.problem(Shape(((0,), (1,)), 2))
            seconds = dict[tuple[int, ...], float]()
            for cut in LocalSegments(shapes).cuts[1:-1].tolist():
                stages = evaluate_decision(
                    problem, Decision.keeping_all((0, cut, shapes.layers))
                ).stages
                seconds[0, cut, shapes.layers] = simulated_step_s(problem, stages)
            bounds = min(seconds, key=lambda bounds: seconds[bounds])
            rate = shapes.batch / seconds[bounds]
            first = first or rate
            held = evaluate_decision(problem, Decision.keeping_all(bounds)).peak_bytes / 1e9
            said = paper[count, again]
            yield (
                f"| {'yes' if again else 'no'} | {count} | {said} | {rate:.1f} "
                f"| {said / paper[2, again]:.2f} | {rate / first:.2f} | {held:.1f} |"
            )


def beside_gpipe(sized: Sized = TRACED["bert-48"]) -> Iterator[str]:
    """Yields 1F1B (DAPPLE's order) beside GPipe's, straight on two devices of B, everything
    kept.
    """
    yield "| order | M | examples/s | of GPipe's M = 2 | average peak GB | of GPipe's M = 2 |"
    yield "|---|---|---|---|---|---|"
    asked = sized.question(4, 2, 2).problem(find_cluster("v100-b"))
    first: tuple[float, float] | None = None
    for order in ("gpipe", "1f1b"):
        for count in (2, 8, 16):
            free = replace(
                asked, schedule=find_schedule(order), microbatches=count, memory_limit_bytes=None
            )
            found = evaluate_decision(free, find_planner("dapple").decide(free))
            rate, held = (
                2 * count / simulated_step_s(free, found.stages),
                fmean(found.device_bytes) / 1e9,
            )
            first = first or (rate, held)
            yield (
                f"| {order} | {count} | {rate:.1f} | {rate / first[0]:.2f} | {held:.2f} | "
                f"{held / first[1]:.2f} |"
            )


def policies(
    chains: Sequence[tuple[str, int, int]] = (("gnmt", 1024, 4), ("bert-48", 64, 1)),
) -> Iterator[str]:
    """Yields DAPPLE's straight plans on C with as many micro-batches in flight as its policies A
    and B say.

    Args:
        chains: models, their batches and the examples of a micro-batch.
    """
    yield (
        "| model (batch; mu) | policy | micro-batches in flight on the first stage | step s | "
        "fullest GB |"
    )
    yield "|---|---|---|---|---|"
    for model, batch, size in chains:
        limited = shapes_of(model, batch, "C")
        shapes = replace(limited, model=replace(limited.model, memory_limit_bytes=None))
        straight = one_each(shapes, size, DEVICES, LocalSegments(shapes).coarse)
        for policy in ("A", "B"):
            remaining = range(DEVICES, 0, -1)
            wished = (2 * count - 1 if policy == "B" else count for count in remaining)
            warm = tuple(min(count, straight.microbatches) for count in wished)
            asked = replace(straight, schedule=OneFOneB(most=warm))
            planned = evaluate_decision(asked, find_planner("dapple").decide(asked))
            step_s, held = simulated_step_s(asked, planned.stages), planned.peak_bytes / 1e9
            yield f"| {model} ({batch}; {size}) | {policy} | {warm[0]} | {step_s:.3f} | {held:.2f} |"


def table_vii(models: Sequence[tuple[str, int]]) -> Iterator[str]:
    """Yields table VII: ours and PipeDream's plans on A, simulated as synchronous steps.

    Args:
        models: each with its batch.
    """
    yield "| model (batch) | on | ours | step s | PipeDream's | step s | times ours | DP |"
    yield "|---|---|---|---|---|---|---|---|"
    for model, batch in models:
        for machines in MACHINES_VII:
            cluster = replace(find_cluster("v100-a"), machines=machines)
            shapes = shapes_on(costs_of(model), cluster, 8 * machines, batch)
            ours = ask_shapes("jvpipe", shapes)
            try:
                theirs = ask_shapes("pipedream", shapes)
            except Infeasible:
                cells = "does not fit | |"
            except ValueError:  # it wants a layer for each device
                cells = "too few layers | |"
            else:
                plan = short(shapes, theirs.problem, theirs.decision)
                times = theirs.step_s / ours.step_s
                cells = f"{plan} | {theirs.step_s:.3f} | {times:.2f}"
            own = f"{short(shapes, ours.problem, ours.decision)} | {ours.step_s:.3f}"
            dp = kind_s(ours, "data parallel")
            yield f"| {model} ({batch}) | {machines} x 8 | {own} | {cells} | {dp} |"


TITLES = {
    "V": "Table V",
    "VI": "Table VI",
    "gpipe": "Table VI, GPipe",
    "policies": "Policies",
    "VII": "Table VII",
}


def main(words: Sequence[str]) -> None:
    """Prints the tables as they are made.

    Args:
        words: the tables that are wanted, all unless named, and models; `--quick` leaves out what
            is traced.
    """
    quick, models = "--quick" in words, {*PROFILED_BATCH, *TRACED}
    chosen = models.intersection(words) or (
        models.intersection(PROFILED_BATCH) if quick else models
    )
    tables: Mapping[str, Iterator[str]] = {
        "V": table_v(tuple(row for row in TABLE_V if row.model in chosen)),
        "VI": table_vi(),
        "gpipe": beside_gpipe(),
        "policies": policies(),
        "VII": table_vii([case for case in TABLE_VII if case[0] in chosen]),
    }
    usual = ("V", "VII") if quick else tuple(TITLES)
    for name in [name for name in TITLES if name in words] or usual:
        print(f"\n## {TITLES[name]}\n", flush=True)
        for line in tables[name]:
            print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
