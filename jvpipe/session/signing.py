"""Plans that the hardware's compiler signs: asked for again, with what it said of programs, until one keeps the limits.

Two things can make a plan hold more than was counted: programs whose temporaries the roofline has too low, of which the
next plan knows, and what no word on programs explains, by which the limits that planners see are lowered.
"""

import logging
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

from jvpipe.cost.archive import Archive
from jvpipe.cost.compiling import Sizes, compiler_of
from jvpipe.cost.hardware import Cluster
from jvpipe.cost.said import Said
from jvpipe.cost.target_store import RefusedProgram, TargetStore
from jvpipe.cost.targets import Target, target_of
from jvpipe.ir.buffers import Peak, peaks
from jvpipe.ir.compiled_stage import CompiledStage
from jvpipe.ir.plan import FATES, Plan
from jvpipe.ir.values import Owner
from jvpipe.planners.answer import Answer, smallest_limit_bytes
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.problem import Problem
from jvpipe.planners.model.stage_bytes import layers_bytes
from jvpipe.planners.model.stage_cost import evaluate
from jvpipe.programs.model import (
    backward_program,
    forward_program,
    input_program,
    weight_program,
)
from jvpipe.programs.store import Program, shared_store
from jvpipe.runtime.engine.compiled_plan import CompiledPlan
from jvpipe.session.devices import LIMITS
from jvpipe.session.forecast import Forecast
from jvpipe.session.question import Question
from jvpipe.trace.layer_split import split_as_planned

_log = logging.getLogger("jvpipe")


Ask = Callable[[Said, int], Forecast]
"""Plans with what compilers have said, under limits that are larger by some bytes; smaller, if these are below 0."""


@dataclass(frozen=True)
class Signer:
    """The compilers of the devices of a cluster; what each has said is kept for the next plan."""

    cluster: Cluster
    stores: tuple[TargetStore, ...]  # one for each device

    @staticmethod
    def of(cluster: Cluster, target: Target | None = None) -> "Signer":
        """Returns the compilers for the devices of a cluster.

        Args:
            cluster: the hardware.
            target: that all are compiled for, whatever they are called.

        Raises:
            ValueError: no compile target is known for a device, or its compiler is not installed.
        """
        targets = [target or target_of(device) for device in cluster.accelerators]
        folder, stores = Archive.beside_the_cache().folder, dict[Target, TargetStore]()
        for one in targets:
            one.check()
            stores.setdefault(one, TargetStore(compiler_of(one, folder), shared_store()))
        return Signer(cluster, tuple(stores[one] for one in targets))

    @property
    def said(self) -> Said:
        """What the compilers have said of programs: of each the most."""
        largest: dict[Hashable, Sizes] = {}
        for store in dict.fromkeys(self.stores):
            for key, sizes in store.sizes.items():
                if key not in largest or sizes.temporary > largest[key].temporary:
                    largest[key] = sizes
        return largest

    def stages(self, question: Question, problem: Problem, answer: Answer) -> list[CompiledStage]:
        """Returns what each stage of a plan takes, as planned and as compiled.

        Args:
            question: has the model.
            problem: that was answered.
            answer: with a plan.

        Raises:
            ValueError: the compiler does not take a program, or the plan swaps where there is no host memory.
        """
        plan, decision = answer.plan, answer.decision
        assert plan is not None
        assert decision is not None
        plan = replace(plan, splits=answer.splits)
        runs = {
            store: self._compiled(question, plan, store) for store in dict.fromkeys(self.stores)
        }
        by_store = {store: _laid_peaks(run) for store, run in runs.items()}
        evaluation, stages = evaluate(self._unsaid(question, problem, answer), decision), []
        for s, stage in enumerate(plan.stages):
            first, last = decision.bounds[s : s + 2]
            # Replicas hold alike, but devices of a stage may be compiled by different compilers.
            fullest = max(stage.devices, key=lambda d: by_store[self.stores[d]][d][0].bytes)
            peak, padding, host = by_store[self.stores[fullest]][fullest]
            layers = problem.layers_on(s)[first:last]
            working = [x.working for x in layers_bytes(layers, decision.choices[first:last])]
            # The row of the peak says in which layer the temporaries were.
            at = peak.row.layer - first if peak.row else -1
            place = problem.schedule.device_of(s, problem.devices)
            stages.append(
                CompiledStage(
                    self.stores[fullest].compiler.target.name,
                    evaluation.device_bytes[place],
                    peak.bytes,
                    str(peak.row) if peak.row else "the beginning",
                    dict(peak.holders).get(str(Owner.TEMPORARY), 0),
                    working[at] if 0 <= at < len(working) else 0,
                    padding,
                    host,
                )
            )
        return stages

    def _unsaid(self, question: Question, problem: Problem, answer: Answer) -> Problem:
        """Returns the problem as it is where no compiler has said anything; that of replicas stays as it is."""
        if not question.said or problem.replicated:
            return problem
        model = question.trace()
        traced = split_as_planned(model.traced, answer.splits)
        optimizer = question.cut(model, traced)
        return replace(
            problem, costs=replace(question, said={}).costs(self.cluster, traced, optimizer)
        )

    def _compiled(self, question: Question, plan: Plan, store: TargetStore) -> CompiledPlan:
        target = store.compiler.target
        away = [name for stage in plan.stages for name, f in stage.fates.items() if FATES[f].away]
        if away and not target.host_memory:
            raise ValueError(
                f"the plan swaps {away[0]} to the host, and {target.name} has no memory there: "
                "give host_memory_bytes = 0 in the cluster's file"
            )
        run = question.compiled(plan, store)
        try:
            run.bounds  # noqa: B018 - what is asked for is compiled
        except RefusedProgram as refused:
            raise ValueError(f"{_name_of(run, refused.program)}: {refused}") from None
        return run


def signed(ask: Ask, signer: Signer) -> Forecast:
    """Returns the first plan that keeps the limits as compiled, with what the compiler says of its stages.

    Args:
        ask: asks a planner.
        signer: asks the compilers.

    Returns:
        Where no plan keeps the limits an answer that says which would do.
    """
    forecast, more = _search(ask, signer, 0)
    if forecast is not None:
        return forecast
    # It ends: at some limit even the padded plan fits.
    while (would_do := _search(ask, signer, more)[0]) is None:
        more += max(1, more // 16)
    (answer,), raised = would_do.answers, would_do.problem
    assert raised.memory_limit_bytes is not None
    smallest, target = raised.memory_limit_bytes, signer.stores[0].compiler.target.name
    reason = (
        f"no plan of {answer.planner} keeps the limit of {smallest - more:,} bytes per device as the compiler "
        f"for {target} makes it: {smallest:,} bytes would do. So may more stages or more micro-batches"
    )
    infeasible = Infeasible(reason, 0, more, smallest)
    refused = Answer(answer.planner, answer.planning_s, infeasible=infeasible)
    problem = replace(raised, memory_limit_bytes=smallest - more)
    return replace(would_do, problem=problem, answers=(refused,))


def _search(ask: Ask, signer: Signer, more: int) -> tuple[Forecast | None, int]:
    """Asks for plans under limits that are larger by some bytes, until the compiler finds that one keeps them.

    Returns:
        The plan, and by how much larger limits have to be at least if there is none.
    """
    less, nearest, before = 0, math.inf, None
    for _ in range(LIMITS.signings):
        forecast = ask(signer.said, more - less)
        limit, question = forecast.problem.memory_limit_bytes, forecast.question
        assert limit is not None
        assert question is not None
        if not forecast.fits:
            needed = more + smallest_limit_bytes(forecast.answers) - limit
            return None, int(min(nearest, needed))
        (answer,), raised = (
            forecast.answers,
            replace(forecast.problem, memory_limit_bytes=limit + less),
        )
        question = replace(question, microbatches=forecast.microbatches)
        stages = signer.stages(question, forecast.problem, answer)
        limits = [raised.limit_of(place) or 0 for place in raised.places]
        over = max(x.compiled_bytes - size for x, size in zip(stages, limits, strict=True))
        if over <= 0:
            compiled = replace(answer, compiled=tuple(stages))
            return replace(forecast, problem=raised, answers=(compiled,)), more
        _log.info("compiled, the plan is %d bytes over the limit: planning goes on", over)
        nearest = min(nearest, more + over)
        # The same plan again: what the compiler said of programs does not explain it.
        less, before = less + (over if forecast.plan == before else 0), forecast.plan
    return None, int(nearest)


def _laid_peaks(run: CompiledPlan) -> list[tuple[Peak, int, int]]:
    """Returns each device's peak, how much of it is padding, and what the host holds for all of them."""
    elements = [
        [x.bytes for x in peaks(bound.lowered, len(run.devices), bound.temporary_bytes)]
        for bound in run.bounds
    ]
    *laid, host = run.peaks
    least = map(max, zip(*elements, strict=True))
    return [
        (peak, max(0, peak.bytes - size), host.bytes)
        for peak, size in zip(laid, least, strict=False)
    ]


def _name_of(run: CompiledPlan, program: Program) -> str:
    """Returns names the layer that a program is of."""
    for programs in run.programs:
        for layer, layer_programs in zip(run.traced.graph.layers, programs, strict=True):
            keys = [forward_program(layer_programs).key, backward_program(layer_programs).key]
            if layer_programs.halves is not None:
                keys += [input_program(layer_programs).key, weight_program(layer_programs).key]
            if program.key in keys:
                return f"layer {layer.id} ({layer.name})"
    return "the optimizer"
