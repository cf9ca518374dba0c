"""The planner against enumeration, against a MILP, and against the others."""

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import scipy.optimize
import scipy.sparse

from jvpipe.cost.costs import Costs, Edge, LayerCost, Option
from jvpipe.cost.hardware import Link
from jvpipe.papers.registry import PLANNERS, find_planner
from jvpipe.planners.joint.lower_bound import lower_bound
from jvpipe.planners.joint.plan_search import jvpipe
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.stage_cost import StageCost, evaluate_decision, stage_cost, surrogate
from jvpipe.planners.model.stage_simulation import simulated_step_s
from jvpipe.schedules import find_schedule
from tests.grid import grid

SCHEDULES = ("gpipe", "1f1b", "pipedream", "2bw")


def chain(layers: int, stages: int, schedule: str, microbatches: int, seed: int) -> Problem:
    """Layers of three fates: keep, swap, recompute."""
    draw = random.Random(seed)

    def layer(i: int) -> LayerCost:
        f, size = draw.uniform(0.5, 1.5), draw.randint(50, 150)
        again = Option(0, 0, f * draw.uniform(0.3, 1.0), size)
        return LayerCost(
            f"layer{i}",
            f,
            2 * f,
            (Option(size), Option(0, size), again),
            draw.randint(10, 60),
            20,
            40,
            10,
            15,
        )

    costs = Costs(
        tuple(layer(i) for i in range(layers)),
        tuple(Edge(i, (i + 1,), 10) for i in range(layers - 1)),
    )
    links = {"host": Link(200.0), "peer": Link(100.0), "peer_uses_host": True}
    return Problem(costs, stages, find_schedule(schedule), microbatches, **links)


def limited(problem: Problem, share: float) -> Problem:
    """Under a share of what even cuts take with everything kept."""
    layers = len(problem.costs.layers)
    even = [layers * s // problem.stages for s in range(problem.stages + 1)]
    return replace(
        problem,
        memory_limit_bytes=int(
            share * evaluate_decision(problem, Decision.keeping_all(even)).peak_bytes
        ),
    )


def least_step_s(problem: Problem) -> float:
    """The surrogate's optimum over all cuts and all fates but runs, by enumeration."""
    n, stages, limit = len(problem.costs.layers), problem.stages, problem.memory_limit_bytes
    best: dict[tuple[int, int, int], StageCost] = {}
    for s, i in itertools.product(range(stages), range(n)):
        for j in range(i + 1, n - (stages - 1 - s) + 1):
            if i < s or (s == 0 and i) or (s == stages - 1 and j < n):
                continue
            for fates in itertools.product(range(-1, 3), repeat=j - i):
                cost = stage_cost(problem, s, i, j, [0] * i + list(fates) + [0] * (n - j))
                fits = limit is None or cost.peak_bytes <= limit
                if fits and ((s, i, j) not in best or cost.seconds < best[s, i, j].seconds):
                    best[s, i, j] = cost
    least = math.inf
    for inner in itertools.combinations(range(1, n), stages - 1):
        cells = [(s, i, j) for s, (i, j) in enumerate(itertools.pairwise((0, *inner, n)))]
        if all(cell in best for cell in cells):
            least = min(least, surrogate(problem, [best[cell] for cell in cells]))
    return least


@pytest.mark.parametrize("schedule", grid(SCHEDULES, "1f1b"))
def test_small_chains_equal_enumeration(schedule: str) -> None:
    met = 0
    for seed, share in itertools.product(range(3), (0.5, 0.65, 0.8, 1.2)):
        problem = limited(chain(6, 3, schedule, 4, seed), share)
        least = least_step_s(problem)
        if least == math.inf:
            continue
        met += 1
        decision = jvpipe(problem, refine=False)
        evaluation = evaluate_decision(problem, decision)
        assert evaluation.peak_bytes <= (problem.memory_limit_bytes or 0)
        assert evaluation.step_s <= least * (1 + 1e-9)  # runs of several layers may be better still
        if all(choice >= -1 for choice in decision.choices):
            assert evaluation.step_s == pytest.approx(least)
    assert met >= 6


def milp_s(problem: Problem, seconds: float) -> tuple[float, float]:
    """The least 1F1B surrogate without runs that HiGHS finds in time, and what it proves that none
    is below.

    x[i, s, o]: layer i is on stage s with option o.
    """
    layers, stages, m = problem.costs.layers, problem.stages, problem.microbatches
    n, options = len(layers), len(layers[0].options)
    limit = problem.memory_limit_bytes
    assert limit is not None
    size = n * stages * options
    at = np.arange(size).reshape(n, stages, options)
    rows: list[tuple[dict[int, float], float, float]] = []
    slowest, seconds_of = size, [size + 1 + s for s in range(stages)]
    at_work = [size + 1 + stages + s for s in range(stages)]
    total = size + 1 + (2 + n) * stages

    def up_to(i: int, s: int) -> int:
        return size + 1 + (2 + i) * stages + s

    for i in range(n):
        rows.append(({int(x): 1.0 for x in at[i].ravel()}, 1, 1))
    for i, s in itertools.product(
        range(n - 1), range(stages)
    ):  # the next layer is on this stage or a later one
        coefficients = {int(x): 1.0 for x in at[i, s].ravel()}
        coefficients |= {int(x): -1.0 for x in at[i + 1, s : s + 2].ravel()}
        rows.append((coefficients, -np.inf, 0))
    in_flight = problem.schedule.in_flight(stages, m)
    for s in range(stages):
        rows.append(({int(x): 1.0 for x in at[:, s].ravel()}, 1, np.inf))
        k, v = in_flight[s], problem.schedule.versions(s, stages)
        edges = 2 * ((10 if s else 0) + (10 if s < stages - 1 else 0))
        waiting = 10 * (in_flight[s - 1] - k if s else 0) + (10 if s < stages - 1 else 0)
        compute, link, held, built = {}, {}, {}, {}
        for i, o in itertools.product(range(n), range(options)):
            layer, option, x = layers[i], layers[i].options[o], int(at[i, s, o])
            compute[x] = layer.forward_s + layer.backward_s + option.extra_s
            link[x] = 2 * option.swapped_bytes / problem.host.bytes_per_s
            held[x] = v * layer.parameter_bytes + layer.gradient_bytes + layer.optimizer_bytes
            held[x] += (k - 1) * (option.kept_bytes + layer.input_bytes) + (
                min(k, 2) - 1
            ) * option.swapped_bytes
            built[x] = option.kept_bytes + layer.input_bytes + option.swapped_bytes
        for i in range(n):  # what layers up to this one leave, and what it works with
            before = {up_to(i - 1, s): 1.0} if i else {}
            rows.append(
                ({int(x): built[int(x)] for x in at[i, s]} | before | {up_to(i, s): -1.0}, 0, 0)
            )
            own = zip(at[i, s], layers[i].options, strict=True)
            works = {int(x): option.extra_bytes + layers[i].temporary_bytes for x, option in own}
            rows.append((works | {up_to(i, s): 1.0, at_work[s]: -1.0}, -np.inf, 0))
        rows.append((compute | {seconds_of[s]: -1.0}, -np.inf, 0))
        rows.append((link | {seconds_of[s]: -1.0}, -np.inf, -edges / problem.peer.bytes_per_s))
        rows.append((held | {at_work[s]: 1.0}, -np.inf, limit - waiting))
        rows.append(({seconds_of[s]: 1.0, slowest: -1.0}, -np.inf, 0))
    matrix = scipy.sparse.lil_matrix((len(rows), total))
    for r, (coefficients, _, _) in enumerate(rows):
        for column, value in coefficients.items():
            matrix[r, column] = value
    cost = np.zeros(total)
    cost[slowest], cost[seconds_of] = m - 1, 1.0
    result = scipy.optimize.milp(
        cost,
        constraints=[(matrix.tocsr(), [r[1] for r in rows], [r[2] for r in rows])],
        integrality=np.r_[np.ones(size), np.zeros(total - size)],
        bounds=scipy.optimize.Bounds(0, np.r_[np.ones(size), np.full(total - size, np.inf)]),
        options={"time_limit": seconds, "mip_rel_gap": 1e-3},
    )
    comm_s = (stages - 1) * 20 / problem.peer.bytes_per_s
    best = math.inf if result.fun is None else float(result.fun)
    bound = -math.inf if result.mip_dual_bound is None else float(result.mip_dual_bound)
    return best + comm_s, bound + comm_s


def test_twelve_layers_on_three_stages_equal_the_milp() -> None:
    for seed in range(3):
        problem = limited(chain(12, 3, "1f1b", 6, seed), 0.6)
        best, bound = milp_s(problem, 20)
        evaluation = evaluate_decision(problem, jvpipe(problem, refine=False))
        assert bound * (1 - 1e-9) <= evaluation.step_s <= best * (1 + 1e-3)


@pytest.mark.thorough
def test_many_layers_on_eight_stages_are_no_worse_than_the_milp() -> None:
    """In four minutes HiGHS finds what jvpipe finds at once, and proves that nothing is 1.2%
    better.
    """
    problem = limited(chain(96, 8, "1f1b", 16, 0), 0.6)
    best, bound = milp_s(problem, 3)
    evaluation = evaluate_decision(problem, jvpipe(problem, refine=False))
    assert bound * (1 - 1e-9) <= evaluation.step_s <= best * (1 + 1e-9)
    assert evaluation.step_s == pytest.approx(842.8946, abs=1e-3)


@pytest.mark.parametrize("schedule", grid(SCHEDULES, "pipedream"))
def test_never_worse_than_the_others_in_simulated_seconds(schedule: str) -> None:
    for seed, share, m in ((0, 0.6, 1), (1, 0.6, 4), (0, 1.5, 4)):
        problem = limited(chain(12, 4, schedule, 4 * m, seed), share)
        try:
            ours = evaluate_decision(problem, jvpipe(problem))
        except Infeasible:
            ours = None
        for planner in ("vpipe", "dawnpiper", "pipedream", "torchgpipe", "adapipe", "dapple"):
            try:
                theirs = evaluate_decision(problem, find_planner(planner).decide(problem))
            except Infeasible:
                continue
            if theirs.peak_bytes <= (problem.memory_limit_bytes or 0):
                assert ours is not None, f"{planner} finds a plan that fits"
                ours_s, theirs_s = (
                    simulated_step_s(problem, evaluation.stages) for evaluation in (ours, theirs)
                )
                assert ours_s <= theirs_s * (1 + 1e-6), planner


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_plan_is_under_the_lower_bound(schedule: str) -> None:
    for seed, share in ((0, 0.6), (1, 0.6), (2, 1.5)):
        problem = limited(chain(9, 3, schedule, 6, seed), share)
        bound = lower_bound(problem)
        for planner in PLANNERS:
            try:
                evaluation = evaluate_decision(problem, planner.decide(problem))
            except Infeasible:
                continue
            if evaluation.peak_bytes <= (problem.memory_limit_bytes or 0):
                assert simulated_step_s(problem, evaluation.stages) >= bound * (1 - 1e-9)


def test_schedules_change_the_answer() -> None:
    layers = tuple(LayerCost(f"layer{i}", 1.0, 2.0, (Option(30),), 100) for i in range(12))
    answers = {}
    for schedule in SCHEDULES:
        problem = Problem(Costs(layers), 3, find_schedule(schedule), 6, memory_limit_bytes=1_000)
        answers[schedule] = jvpipe(problem)
    assert answers["1f1b"] == Decision.keeping_all((0, 4, 8, 12))
    assert answers["gpipe"].bounds == (0, 4, 8, 12)
    assert any(
        answers["gpipe"].choices
    )  # six micro-batches in flight on every stage: some layers run again
    assert answers["pipedream"].bounds[1] < 4  # the first stage holds three versions, the last one
    assert len(set(answers.values())) == 4


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "interleaved", "pipedream"])
def test_the_same_lists_under_another_name_are_planned_alike(name: str) -> None:
    times = [
        (2.0, 2.0),
        (2.0, 2.0),
        (6.0, 1.0),
        (3.0, 1.0),
        (3.0, 1.0),
        (3.0, 1.0),
        (1.0, 6.0),
        (1.0, 1.0),
    ]
    costs = Costs(tuple(LayerCost(f"l{i}", f, b, (Option(1),)) for i, (f, b) in enumerate(times)))
    schedule = find_schedule(name)
    renamed = replace(schedule.with_lists(schedule.lists), name="mine")
    answers = []
    for one in (schedule, renamed):
        problem = Problem(costs, one.stages_on(4), one, 8)
        decision = find_planner("jvpipe").decide(problem)
        step_s = simulated_step_s(problem, evaluate_decision(problem, decision).stages)
        answers.append((decision, step_s, lower_bound(problem)))
    assert answers[0] == answers[1]


def test_what_fits_with_everything_kept_is_kept() -> None:
    """Swaps behind the work would take as long and leave room that nobody asked for."""
    layers = tuple(
        LayerCost(f"layer{i}", 1.0, 2.0, (Option(30), Option(0, swapped_bytes=30)))
        for i in range(8)
    )
    problem = Problem(Costs(layers), 2, find_schedule("1f1b"), 6, host=Link(1000.0))
    default = jvpipe(problem)
    peak = evaluate_decision(problem, default).peak_bytes
    assert (
        jvpipe(replace(problem, memory_limit_bytes=peak))
        == default
        == Decision.keeping_all((0, 4, 8))
    )
    assert any(jvpipe(replace(problem, memory_limit_bytes=peak - 61)).choices)


def test_when_nothing_fits_it_says_by_how_much() -> None:
    problem = replace(chain(8, 3, "1f1b", 6, 1), memory_limit_bytes=100)
    with pytest.raises(Infeasible, match="The smallest limit that would do is") as raised:
        jvpipe(problem)
    smallest = raised.value.smallest_limit_bytes
    evaluation = evaluate_decision(problem, jvpipe(replace(problem, memory_limit_bytes=smallest)))
    assert evaluation.peak_bytes == smallest
    with pytest.raises(Infeasible):
        jvpipe(replace(problem, memory_limit_bytes=smallest - 1))


def test_a_model_of_many_layers_that_fits_nowhere_is_told_the_smallest_limit() -> None:
    """The windows of so many layers are thinned, but the last stage must end the model."""
    layer = LayerCost("a", 1.0, 2.0, (Option(0),), parameter_bytes=10)
    costs = Costs((layer,) * 1300)
    problem = Problem(costs, 3, find_schedule("1f1b"), 4, memory_limit_bytes=4000)
    with pytest.raises(Infeasible) as raised:
        jvpipe(problem)
    assert raised.value.smallest_limit_bytes == 4340


def test_the_host_limit_is_kept() -> None:
    problem = replace(limited(chain(8, 2, "gpipe", 6, 2), 0.6), host=Link(2e3))
    unlimited = evaluate_decision(problem, jvpipe(problem))
    swapped = sum(stage.host_bytes for stage in unlimited.stages)
    assert swapped > 0
    problem = replace(problem, host_limit_bytes=swapped // 2)
    evaluation = evaluate_decision(problem, jvpipe(problem))
    assert sum(stage.host_bytes for stage in evaluation.stages) <= swapped // 2


def test_layers_that_belong_together_share_a_stage() -> None:
    problem = chain(8, 2, "1f1b", 6, 0)
    free = jvpipe(problem).bounds[1]
    problem = replace(problem, costs=replace(problem.costs, together=((free - 1, free),)))
    assert jvpipe(problem).bounds[1] != free
