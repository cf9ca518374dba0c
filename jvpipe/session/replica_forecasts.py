"""Plans of replicated stages for hardware that is not here, from shapes alone."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from jvpipe.ir.extras import extra
from jvpipe.ir.layers import LayerGraph
from jvpipe.ir.plan import Plan
from jvpipe.papers.replicas import ask_replicas
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.replicas_answer import ReplicaAnswer
from jvpipe.planners.model.replicas_problem import ReplicaProblem
from jvpipe.planners.model.replicas_step import simulation
from jvpipe.report import timeline
from jvpipe.report.replica_answers import as_json, reasons, summary
from jvpipe.runtime.tensors import MemoryLimitExceeded
from jvpipe.session.question import Question
from jvpipe.session.replica_question import ReplicaQuestion, as_plan
from jvpipe.simulate.timeline import Timeline


@dataclass(frozen=True)
class ReplicaForecast:
    """The best plan of replicated stages, or why there is none; `str` of it is what the command prints."""

    problem: ReplicaProblem
    outcome: ReplicaAnswer | Infeasible
    graph: LayerGraph
    question: Question
    planner: str = "jvpipe"
    title: str = ""

    @property
    def fits(self) -> bool:
        """Whether there is a plan that keeps the limit."""
        return isinstance(self.outcome, ReplicaAnswer)

    @property
    def simulated(self) -> bool:
        """Whether there is a plan to be simulated."""
        return self.fits

    @property
    def answer(self) -> ReplicaAnswer:
        """The answer.

        Raises:
            MemoryLimitExceeded: no plan keeps the limit; its `smallest_limit_bytes` is one that would do.
        """
        if isinstance(self.outcome, Infeasible):
            raise MemoryLimitExceeded(str(self.outcome), self.outcome.smallest_limit_bytes)
        return self.outcome

    @property
    def plan(self) -> Plan:
        """The best plan, for a pipeline of so many `microbatches`; raises as `answer` does."""
        return as_plan(self.graph, self.answer.best, self.answer.planner)

    @property
    def microbatches(self) -> int:
        """How many the best plan splits a batch into; raises as `answer` does."""
        return self.problem.batch // self.answer.best.plan.size

    @property
    def step_s(self) -> float:
        """Seconds of a simulated step; infinite without a plan."""
        return self.answer.best.step_s if self.fits else math.inf

    @property
    def lower_bound_s(self) -> float:
        """Seconds of a step that no plan under the limit is below."""
        return self.answer.bound_s if self.fits else math.inf

    @cached_property
    def reasons(self) -> list[str]:
        """Why stages have as many devices as they have, and what plans of other shapes take."""
        return reasons(self.problem, self.answer)

    @cached_property
    def simulation(self) -> Timeline:
        """What each device of the best plan does when."""
        best = self.answer.best
        return simulation(self.problem, best.plan, best.stages)

    @cached_property
    def held_bytes(self) -> list[int]:
        """The most that each device holds under the best plan, as a run tells; for this programs are compiled."""
        return replace(self.question, microbatches=self.microbatches).held_bytes(self.plan)

    def why_not(self) -> str:
        """Why no plan keeps the limit, and what would."""
        return str(self.outcome)

    def figure(self, path: str | Path) -> None:
        """Draws the simulation (png, svg or pdf)."""
        with extra("figures"):
            from jvpipe.report.figures import check_format, timeline_figure
        check_format(path)
        title = ", ".join(filter(None, (self.title, "1f1b", self.planner)))
        timeline_figure(self.simulation, Path(path), (), title)

    def timeline(self, path: str | Path) -> None:
        """Writes the simulation for Perfetto."""
        timeline.write(Path(path), self.simulation.picture())

    def to_json(self) -> Any:
        """The answer as `--json` holds it."""
        if isinstance(self.outcome, Infeasible):
            smallest = self.outcome.smallest_limit_bytes
            why = {"reason": str(self.outcome), "smallest_limit_bytes": smallest}
            return {
                "planner": self.planner,
                "schedule": "1f1b",
                "feasible": False,
                **why,
                "stages": [],
            }
        return as_json(self.problem, self.outcome, self.plan)

    def show(self, console: Any) -> None:
        """Prints the answer to a `rich.console.Console`."""
        with extra("cli"):
            from jvpipe.report.tables import replica_table
        if isinstance(self.outcome, ReplicaAnswer):
            console.print(replica_table(self.problem, self.outcome.best))
            console.print(summary(self.problem, self.outcome), highlight=False)
            for reason in self.reasons:
                console.print(reason, highlight=False)

    def __str__(self) -> str:
        with extra("cli"):
            from jvpipe.report.tables import printed
        return printed(self.show) + ("" if self.fits else f"no plan: {self.why_not()}\n")


def forecast_replicas(question: ReplicaQuestion, title: str = "") -> ReplicaForecast:
    """Asks a planner of replicated stages.

    Args:
        question: about a model and a cluster.
        title: of a figure.
    """
    problem, graph = question.problem()
    try:
        outcome = ask_replicas(question.planner, problem)
    except Infeasible as infeasible:
        outcome = infeasible
    return ReplicaForecast(problem, outcome, graph, question.question, question.planner, title)
