"""jvpipe beside every other planner, where it once lost.

    python -m experiments.planners.rivals [PROFILE ...]

Profiles are given by path (by default those of `experiments/planners/profiles`); chains and graphs
with skips are drawn, models are those of the command line. Each model is planned for 2 to 16 stages
under every schedule, links, micro-batches and limits taking turns. `--every N` takes each N-th
case, `--first K` begins with the K-th.
"""

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import tyro

from experiments.planners.profiles import profiles_folder
from experiments.planners.questions import costs_on, question
from jvpipe.cost.cluster_file import find_cluster
from jvpipe.cost.costs import Costs, Edge, LayerCost, Option
from jvpipe.cost.hardware import Link
from jvpipe.papers.registry import PLANNERS, find_planner
from jvpipe.planners.joint.lower_bound import lower_bound
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.stage_cost import evaluate_decision
from jvpipe.planners.model.stage_simulation import simulated_step_s
from jvpipe.profiles.graph_file import read_graph
from jvpipe.schedules import SCHEDULES, find_schedule
from jvpipe.session.question import on_cluster

MB = 10**6
STAGES = (2, 4, 8, 16)
CLUSTERS = ("2080ti", "v100-b", "a100-80gb", "v100-c")
SHARES = (None, 0.7, None, 0.5)
"""Limits, as shares of what even cuts take with everything kept."""
LENGTHS = (50, 140, 300, 700, 2_000)
MODELS = (
    ("bert", "base", 64),
    ("bert", "large", 64),
    ("gpt2", "770m", 16),
    ("amoebanet", None, 32),
    ("t5", None, 32),
)
ROWS, ROWS_UNDER_A_LIMIT = 6_000, 1_200
"""AdaPipe is left out where stages x layers are more: it takes minutes to hours."""


@dataclass(frozen=True)
class Arguments:
    """Which cases are planned."""

    profiles: tyro.conf.Positional[tuple[Path, ...]] = ()
    every: int = 1
    first: int = 0


def chain(layers: int, slow: bool) -> tuple[Costs, Link]:
    """Unlike layers with edges of unlike sizes; on slow links a stage's transfers take about as
    long as its work.
    """
    draw = random.Random(layers)
    drawn = []
    for i in range(layers):
        f, kept = draw.uniform(0.2, 1.8) / layers, draw.randint(5, 40) * MB
        options = (
            Option(kept),
            Option(0, kept),
            Option(kept // 3, 0, 0.4 * f, kept),
            Option(0, 0, 0.9 * f, kept),
        )
        more = dict.fromkeys(("parameter_bytes", "gradient_bytes"), draw.randint(1, 8) * MB)
        drawn.append(
            LayerCost(
                f"layer{i}", f, 2 * f, options, **more, input_bytes=4 * MB, temporary_bytes=4 * MB
            )
        )
    edges = tuple(Edge(i, (i + 1,), draw.choice((1, 2, 4, 8, 16)) * MB) for i in range(layers - 1))
    return Costs(tuple(drawn), edges), Link(60e6 if slow else 12e9, 1e-5)


def dense(blocks: int) -> Costs:
    """Blocks in which each layer reads all before it, and between them few bytes: like a DenseNet's
    graph.
    """
    draw = random.Random(blocks)
    layers, edges, begin = [], [], 0
    for block in range(blocks):
        size = 6 * (4 + 4 * block)
        for i in range(size):
            f, kept = 1e-3 * draw.uniform(0.5, 2.0) * (1 + i / size), (24 >> block) * MB
            layers.append(
                LayerCost(
                    f"block{block}.{i}", f, 2 * f, (Option(kept), Option(0, extra_s=f)), MB, MB
                )
            )
            readers = tuple(range(begin + i + 1, begin + size + (block + 1 < blocks)))
            edges += [Edge(begin + i, readers, (8 >> block) * MB)] if readers else []
        begin += size
    return Costs(tuple(layers), tuple(edges))


def models(
    profiles: Sequence[Path],
) -> Iterator[tuple[str, Callable[[], tuple[Costs, Link | None]]]]:
    """Names, and what makes their costs; with a link if they have one of their own."""
    for path in profiles:
        yield path.name.removesuffix(".graph.txt"), lambda path=path: (read_graph(path).costs, None)
    for layers, slow in product(LENGTHS, (False, True)):
        yield f"chain of {layers}, {'slow' if slow else 'fast'} links", partial(chain, layers, slow)
    for blocks in (3, 4):
        yield f"dense, {blocks} blocks", lambda blocks=blocks: (dense(blocks), None)
    for model, size, examples in MODELS:
        asked = question(model, size, 8 * examples, 8)
        yield (
            f"{model} {size or ''}".strip(),
            lambda q=asked: (costs_on(q, find_cluster("a100-40gb")), None),
        )


def cases(arguments: Arguments) -> Iterator[tuple[str, Problem]]:
    """The problems, links, micro-batches and limits taking turns."""
    profiles = arguments.profiles or sorted(
        p for p in profiles_folder().glob("*") if p.suffix in (".txt", ".json")
    )
    known: dict[str, tuple[Costs, Link | None]] = {}
    every = product(
        models([p for p in profiles if not p.stem.endswith("_expert")]), STAGES, SCHEDULES
    )
    for at, ((name, make), stages, schedule) in enumerate(every):
        if at < arguments.first or (at - arguments.first) % arguments.every:
            continue
        if name not in known:
            known = {name: make()}
        costs, link = known[name]
        turn = at + at // len(SCHEDULES)
        try:
            problem = Problem(costs, stages, find_schedule(schedule), stages * (1 + turn % 3))
            even = evaluate_decision(problem, find_planner("even").decide(problem))
        except ValueError:
            continue  # too few pieces
        if link:
            problem = replace(
                problem, host=Link(12e9, 1e-5), peer=link, peer_uses_host=bool(turn % 2)
            )
        else:
            cluster = replace(
                find_cluster(CLUSTERS[turn % len(CLUSTERS)]), machines=16, host_memory_bytes=None
            )
            problem = on_cluster(problem, cluster)
        share = SHARES[turn // 2 % len(SHARES)]
        yield name, replace(problem, memory_limit_bytes=share and int(share * even.peak_bytes))


def step_s(problem: Problem, planner: Callable[[Problem], Decision]) -> tuple[float, float]:
    """The simulated step of a planner's plan, infinite if it has none that fits; and the seconds it
    takes of a core.
    """
    start_s = time.process_time()
    try:
        decision = planner(problem)
    except Infeasible:
        return float("inf"), time.process_time() - start_s
    taken_s = time.process_time() - start_s
    evaluation, limit = evaluate_decision(problem, decision), problem.memory_limit_bytes
    fits = limit is None or evaluation.peak_bytes <= limit
    return simulated_step_s(problem, evaluation.stages) if fits else float("inf"), taken_s


def rivals(problem: Problem) -> list[str]:
    """The planners that answer in a minute or so."""
    rows = problem.stages * len(problem.costs.layers)
    most = ROWS if problem.memory_limit_bytes is None else ROWS_UNDER_A_LIMIT
    return [
        p.name for p in PLANNERS if p.name != "jvpipe" and (p.name != "adapipe" or rows <= most)
    ]


def main() -> None:
    """Prints a line per case; at the end, the worst."""
    arguments = tyro.cli(Arguments)
    print(
        "| model | layers | S | M | schedule | links, MB/s | limit, MB | best rival | its ms | "
        "jvpipe ms ",
        end="",
    )
    print("| ratio | over the bound | planning s |\n|" + 13 * "---|")
    worst, count = 0.0, 0
    for name, problem in cases(arguments):
        ours_s, taken_s = step_s(problem, find_planner("jvpipe").decide)
        theirs = {
            rival: step_s(problem, find_planner(rival).decide)[0] for rival in rivals(problem)
        }
        best = min(theirs, key=lambda rival: theirs[rival])
        if ours_s == theirs[best] == float("inf"):
            continue  # nothing fits
        ratio = ours_s / theirs[best]
        worst, count = max(worst, ratio), count + 1
        limit = problem.memory_limit_bytes
        cells = [
            name,
            len(problem.costs.layers),
            problem.stages,
            problem.microbatches,
            problem.schedule.name,
        ]
        cells += [
            f"{problem.peer.bytes_per_s / MB:.0f}{' shared' if problem.peer_uses_host else ''}"
        ]
        cells += [
            "none" if limit is None else f"{limit / MB:.0f}",
            best,
            f"{1e3 * theirs[best]:.2f}",
        ]
        cells += [
            f"{1e3 * ours_s:.2f}",
            f"{ratio:.4f}",
            f"{ours_s / lower_bound(problem):.3f}",
            f"{taken_s:.2f}",
        ]
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
    print(f"\n{count} cases; jvpipe over the best rival at worst: {worst:.4f}", file=sys.stdout)


if __name__ == "__main__":
    main()
