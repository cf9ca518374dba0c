"""What planners answer, as tables."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from rich.console import Console
from rich.table import Table

from jvpipe.ir.sizes import format_bytes
from jvpipe.planners.model.forecast import bubble_fraction, simulated_step_s
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.stage_cost import Evaluation
from jvpipe.report.answers import Answer
from jvpipe.report.console import in_runs


def stage_table(problem: Problem, decision: Decision, evaluation: Evaluation) -> Table:
    """Makes a row for each stage.

    Args:
        problem: what was asked.
        decision: the plan.
        evaluation: what it takes.
    """
    shared = problem.replicated
    names = ["stage", "layers", "F ms", "B ms", "again ms", "swap ms", "comm ms"]
    names += ["reduce ms"] if shared else []
    table = Table(*names, "in flight", "peak", "host")
    ids = problem.costs.ids or tuple(range(len(problem.costs.layers)))
    for s, ((i, j), cost) in enumerate(
        zip(pairwise(decision.bounds), evaluation.stages, strict=True)
    ):
        seconds = [cost.forward_s, cost.backward_s, cost.recompute_s, cost.swap_s, cost.comm_s]
        seconds += [cost.reduce_s] if shared else []
        devices = problem.where[s]
        several = f"{s}, on {len(devices)}: {in_runs(devices)}"
        table.add_row(
            several if shared else f"{s}, {problem.name_of(s)}" if problem.groups else str(s),
            f"{ids[i]} to {ids[j - 1]} ({j - i})",
            *(f"{1e3 * x:.2f}" for x in seconds),
            str(cost.in_flight),
            format_bytes(cost.peak_bytes),
            format_bytes(cost.host_bytes),
        )
    return table


def comparison(problem: Problem, answers: Sequence[Answer]) -> Table:
    """Makes a row for each planner."""
    table = Table(
        "planner", "layers per stage", "slowest stage ms", "step ms", "idle", "peak", "planned in s"
    )
    for answer in answers:
        if answer.decision is None or answer.evaluation is None:
            table.add_row(
                answer.planner, "no plan fits", "", "", "", "", f"{answer.planning_s:.2f}"
            )
            continue
        stages = answer.evaluation.stages
        table.add_row(
            answer.planner,
            " ".join(str(j - i) for i, j in pairwise(answer.decision.bounds)),
            f"{1e3 * answer.evaluation.bottleneck_s:.2f}",
            f"{1e3 * simulated_step_s(problem, stages):.2f}",
            f"{bubble_fraction(problem, stages):.1%}",
            format_bytes(answer.evaluation.peak_bytes)
            + ("" if answer.fits(problem) else " (over the limit)"),
            f"{answer.planning_s:.2f}",
        )
    return table


def printed(show: Callable[[Console], None]) -> str:
    """What `show` prints, as text without colours."""
    console = Console(
        width=160, color_system=None, force_jupyter=False
    )  # it would show a cell of its own
    with console.capture() as captured:
        show(console)
    return captured.get()
