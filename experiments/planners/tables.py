"""Every planner on real profiles and on our own models: python -m experiments.planners.tables

Profiles are those of `experiments/planners/profiles`.
"""

import random
from dataclasses import replace

import numpy as np

from experiments.planners.expert_split import expert_split, split_loads_s
from experiments.planners.profiles import profiles_folder
from experiments.planners.questions import costs_on, question
from jvpipe.cost.cluster_file import find_cluster
from jvpipe.cost.costs import Costs
from jvpipe.papers.registry import PLANNERS
from jvpipe.planners.answer import Answer
from jvpipe.planners.model.problem import Problem
from jvpipe.planners.model.stage_cost import evaluate_decision
from jvpipe.planners.model.stage_simulation import simulated_step_s
from jvpipe.profiles.graph_file import read_graph
from jvpipe.schedules import find_schedule
from jvpipe.session.forecast import asked
from jvpipe.session.question import on_cluster

FILES = ("resnet50", "vgg16", "gnmt")
STAGES = (2, 4, 8)


def answer(problem: Problem, planner: str) -> Answer:
    """Asks one planner."""
    return asked(problem, [planner]).answers[0]


def exact_bottleneck_s(costs: Costs, stages: int) -> float:
    """The least slowest stage of all contiguous cuts, by a plain dynamic program that no planner
    shares.
    """
    total = np.concatenate([[0.0], np.cumsum([c.forward_s + c.backward_s for c in costs.layers])])
    best = total.copy()
    for _ in range(stages - 1):
        best = np.array(
            [
                min((max(best[i], total[j] - total[i]) for i in range(j)), default=0.0)
                for j in range(len(total))
            ]
        )
    return float(best[-1])


def profiled(name: str) -> Costs:
    """The costs in a profile of PipeDream."""
    return read_graph(profiles_folder() / f"pipedream_{name}.graph.txt").costs


def bottlenecks() -> None:
    print(
        "## Slowest stage over the exact contiguous optimum; no limit, schedule pipedream "
        "(planning seconds)\n"
    )
    print(
        f"| planner | {' | '.join(f'{f} {s}' for f in FILES for s in STAGES)} |\n|---|{'---|' * 9}"
    )
    problems = []
    for name in FILES:
        costs = profiled(name)
        for stages in STAGES:
            exact_s = exact_bottleneck_s(costs, stages)
            problems.append(
                (Problem(costs, stages, find_schedule("pipedream"), 4 * stages), exact_s)
            )
    for planner in (planner.name for planner in PLANNERS):
        cells = []
        for problem, exact_s in problems:
            given = answer(problem, planner)
            assert given.evaluation is not None
            cells.append(f"{given.evaluation.bottleneck_s / exact_s:.3f} ({given.planning_s:.2f})")
        print(f"| {planner} | {' | '.join(cells)} |", flush=True)


def expert() -> None:
    file = profiles_folder() / "dnn_partitioning_bert24_training.json"
    graph = read_graph(file)
    assert graph.devices is not None
    loads = split_loads_s(graph, expert_split(file.with_name(f"{file.stem}_expert.json")))
    problem = Problem(
        graph.costs,
        graph.devices,
        find_schedule("pipedream"),
        24,
        graph.memory_limit_bytes,
        peer=graph.link,
    )
    given = answer(problem, "jvpipe")
    assert given.evaluation is not None
    print(f"\n## BERT-24 of dnn-partitioning on {graph.devices} accelerators\n")
    print(
        f"the expert's largest load {1e3 * max(loads):.2f} ms, jvpipe's "
        f"{1e3 * given.evaluation.bottleneck_s:.2f} ms;"
    )
    print(
        f"most bytes on a device {given.evaluation.peak_bytes:,}, the limit "
        f"{graph.memory_limit_bytes:,}"
    )


def under_limits() -> None:
    print(
        "\n## Simulated step over jvpipe's, under a limit (share of what keeping everything "
        "takes); M = 4 S\n"
    )
    cases = [(name, profiled(name)) for name in FILES]
    cluster = find_cluster("a100-40gb")
    for size in ("base", "large"):
        costs = costs_on(question("bert", size, 64, 16), cluster)
        cases.append((f"bert {size}", costs))
    columns = [(s, share) for s in ("1f1b", "gpipe", "2bw") for share in (1.0, 0.6)]
    planners = [p.name for p in PLANNERS if p.name not in ("even", "torchgpipe-size")]
    print(
        f"| model, planner | {' | '.join(f'{s} {share}' for s, share in columns)} "
        f"|\n|---|{'---|' * len(columns)}"
    )
    for name, costs in cases:
        rows: dict[str, list[str]] = {planner: [] for planner in planners}
        for schedule, share in columns:
            problem = on_cluster(Problem(costs, 4, find_schedule(schedule), 16), cluster)
            keeping = answer(problem, "torchgpipe").evaluation
            assert keeping is not None
            problem = replace(problem, memory_limit_bytes=int(share * keeping.peak_bytes))
            ours_s = _step_s(problem, answer(problem, "jvpipe"))
            for planner in planners:
                step_s = _step_s(problem, answer(problem, planner))
                worse = (
                    "no plan"
                    if step_s is None
                    else ""
                    if ours_s is None
                    else f"{step_s / ours_s:.3f}"
                )
                rows[planner].append(worse)
        for planner, cells in rows.items():
            print(f"| {name}, {planner} | {' | '.join(cells)} |", flush=True)


def _step_s(problem: Problem, given: Answer) -> float | None:
    """The simulated step, if there is a plan and it fits."""
    if given.evaluation is None:
        return None
    limit = problem.memory_limit_bytes
    fits = limit is None or given.evaluation.peak_bytes <= limit
    return simulated_step_s(problem, given.evaluation.stages) if fits else None


def noise(draws: int = 20) -> None:
    print(
        "\n## Plans made on costs that are off by 10%: true step over that of a plan made on true "
        "costs\n"
    )
    print("| planner | mean | worst |\n|---|---|---|")
    cluster = find_cluster("a100-40gb")
    costs = costs_on(question("bert", "large", 64, 16), cluster)
    problem = on_cluster(Problem(costs, 8, find_schedule("1f1b"), 16), cluster)
    for planner in ("torchgpipe", "pipedream", "vpipe", "dawnpiper", "adapipe", "jvpipe"):
        true = answer(problem, planner)
        true_s, random_numbers, ratios = _step_s(problem, true), random.Random(0), []
        assert true_s is not None
        for _ in range(draws):
            layers = []
            for layer in costs.layers:
                f, b = (random_numbers.gauss(1, 0.1) for _ in range(2))
                layers.append(
                    replace(
                        layer,
                        forward_s=layer.forward_s * max(f, 0.5),
                        backward_s=layer.backward_s * max(b, 0.5),
                    )
                )
            given = answer(replace(problem, costs=replace(costs, layers=tuple(layers))), planner)
            assert given.decision is not None
            ratios.append(
                simulated_step_s(problem, evaluate_decision(problem, given.decision).stages)
                / true_s
            )
        print(f"| {planner} | {np.mean(ratios):.3f} | {max(ratios):.3f} |", flush=True)


def main() -> None:
    bottlenecks()
    expert()
    under_limits()
    noise()


if __name__ == "__main__":
    main()
